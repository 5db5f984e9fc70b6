"""Flower's server and nodes look for messages every three seconds; in tests they look more often.

Put on the PYTHONPATH of their processes. It reaches into Flower's own modules by name, and does nothing where these
have changed.
"""

import sys
import time

MODULES = ("flwr.superlink.grid.http_grid", "flwr.supernode.start_client_internal")
SHORT = 0.2
sleep = time.sleep


def quick(seconds: float) -> None:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    sleep(min(seconds, SHORT) if caller in MODULES else seconds)


time.sleep = quick
