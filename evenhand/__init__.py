"""evenhand: federated learning that serves every client about equally well.

>>> import numpy as np
>>> import evenhand as eh
>>> out = eh.aggregate("adafed", np.eye(2), losses=[1.0, 3.0])
>>> bool(np.isclose(out.update[1] / out.update[0], 3.0))  # the larger loss falls three times as fast
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evenhand.aggregation import Aggregate, Diagnostics, aggregate
from evenhand.checks import EvenhandError, near_miss
from evenhand.methods import Method, MethodInfo, method, methods, register
from evenhand.methods.base import Objective, Round, Rule, ServerStep, Weights
from evenhand.state import State

if TYPE_CHECKING:
    from evenhand.auditing import audit
    from evenhand.callbacks import Callback
    from evenhand.comparison import compare, load_comparison, resume_comparison
    from evenhand.experiment import Experiment
    from evenhand.fairness import client_fairness
    from evenhand.groups import group_fairness
    from evenhand.recipe import recipes
    from evenhand.reproduction import reproduce
    from evenhand.running import load_runs, resume, simulate

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

# The simulator is loaded when it is first used, so that one round in somebody's own loop does not wait for it.
LATER = {
    **dict.fromkeys(("load_runs", "resume", "simulate"), "evenhand.running"),
    **dict.fromkeys(("compare", "load_comparison", "resume_comparison"), "evenhand.comparison"),
    "Callback": "evenhand.callbacks",
    "Experiment": "evenhand.experiment",
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
