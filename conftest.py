"""Without Flower the room that needs it is left out."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["evenhand/flower/*"]
