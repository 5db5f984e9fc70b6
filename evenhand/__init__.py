"""evenhand: federated learning that serves every client about equally well.

>>> import numpy as np
>>> import evenhand as eh
>>> out = eh.aggregate("adafed", np.eye(2), losses=[1.0, 3.0])
>>> bool(np.isclose(out.update[1] / out.update[0], 3.0))  # the larger loss falls three times as fast
True
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from evenhand.checks import EvenhandError, near_miss

if TYPE_CHECKING:
    from evenhand.aggregation import Aggregate, Diagnostics, aggregate
    from evenhand.auditing import audit
    from evenhand.callbacks import Callback
    from evenhand.comparison import compare, load_comparison, resume_comparison
    from evenhand.experiment import Experiment
    from evenhand.fairness import client_fairness
    from evenhand.groups import group_fairness
    from evenhand.methods import Method, MethodInfo, method, methods, register
    from evenhand.methods.base import Round, Rule, ServerStep, Weights
    from evenhand.objectives import Objective
    from evenhand.recipe import recipes
    from evenhand.reproduction import reproduce
    from evenhand.running import load_runs, resume, simulate
    from evenhand.state import State
    from evenhand.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "Callback",
    "Diagnostics",
    "EvenhandError",
    "Experiment",
    "Method",
    "MethodInfo",
    "Objective",
    "Round",
    "Rule",
    "ServerStep",
    "State",
    "Weights",
    "aggregate",
    "audit",
    "client_fairness",
    "compare",
    "group_fairness",
    "load_comparison",
    "load_runs",
    "method",
    "methods",
    "recipes",
    "register",
    "reproduce",
    "resume",
    "resume_comparison",
    "simulate",
    "tune",
]

# Rooms are loaded when they are first used: `evenhand --help` does not wait for torch, and a round in somebody's own
# loop not for the simulator.
LATER = {
    **dict.fromkeys(("Aggregate", "Diagnostics", "aggregate"), "evenhand.aggregation"),
    **dict.fromkeys(("Method", "MethodInfo", "method", "methods", "register"), "evenhand.methods"),
    **dict.fromkeys(("Round", "Rule", "ServerStep", "Weights"), "evenhand.methods.base"),
    **dict.fromkeys(("load_runs", "resume", "simulate"), "evenhand.running"),
    **dict.fromkeys(("compare", "load_comparison", "resume_comparison"), "evenhand.comparison"),
    "Callback": "evenhand.callbacks",
    "Experiment": "evenhand.experiment",
    "Objective": "evenhand.objectives",
    "State": "evenhand.state",
    "audit": "evenhand.auditing",
    "client_fairness": "evenhand.fairness",
    "group_fairness": "evenhand.groups",
    "recipes": "evenhand.recipe",
    "reproduce": "evenhand.reproduction",
    "tune": "evenhand.tuning",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'evenhand' has no attribute {name!r}{near_miss(name, __all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Door(ModuleType):
    """This module. Whoever loads the room `evenhand.methods` does not take the place of the function `methods`."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.methods if name == "methods" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Door
