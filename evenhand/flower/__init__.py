"""The same methods on Flower: a Strategy, a wrapper for clients, and a ready app.

    from evenhand.flower import FairStrategy, fair_client

needs Flower: pip install 'evenhand[flower]'. docs/flower.md walks through a whole deployment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evenhand.checks import EvenhandError, near_miss

try:
    import flwr  # noqa: F401
except ImportError as missing:
    raise EvenhandError(
        "evenhand.flower needs Flower: pip install 'evenhand[flower]' (or pip install flwr)"
    ) from missing

if TYPE_CHECKING:
    from evenhand.flower.client import Task, fair_client
    from evenhand.flower.deployment import Deployment
    from evenhand.flower.server import server_app
    from evenhand.flower.site import site_client
    from evenhand.flower.strategy import FairStrategy

__all__ = ["Deployment", "FairStrategy", "Task", "fair_client", "server_app", "site_client"]

# Every message starts a client anew, so nothing is imported before it is needed.
LATER = {
    "Deployment": "evenhand.flower.deployment",
    "FairStrategy": "evenhand.flower.strategy",
    "Task": "evenhand.flower.client",
    "fair_client": "evenhand.flower.client",
    "server_app": "evenhand.flower.server",
    "site_client": "evenhand.flower.site",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'evenhand.flower' has no attribute {name!r}{near_miss(name, __all__)}")
