"""The live view: the report of a run or a comparison, on this machine, renewed while it trains."""

from evenhand.watch.server import Server
from evenhand.watch.view import View, waiting_for

__all__ = ["Server", "View", "waiting_for"]
