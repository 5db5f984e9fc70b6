"""Rooms that need a library which is not there are left out."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["evenhand/flower/*"]
if not importlib.util.find_spec("triton"):
    collect_ignore_glob.append("evenhand/engine/*kernels.py")
