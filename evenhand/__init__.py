"""evenhand: federated learning that serves every client about equally well.

>>> import numpy as np
>>> import evenhand as eh
>>> out = eh.aggregate("adafed", np.eye(2), losses=[1.0, 3.0])
>>> bool(np.isclose(out.update[1] / out.update[0], 3.0))  # the larger loss falls three times as fast
True
"""

from __future__ import annotations

from evenhand.aggregation import Aggregate, Diagnostics, aggregate
from evenhand.checks import EvenhandError
from evenhand.methods import Method, MethodInfo, method, methods, register
from evenhand.methods.base import Objective, Round, Rule, ServerStep, Weights
from evenhand.state import State

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "Diagnostics",
    "EvenhandError",
    "Method",
    "MethodInfo",
    "Objective",
    "Round",
    "Rule",
    "ServerStep",
    "State",
    "Weights",
    "aggregate",
    "method",
    "methods",
    "register",
]
