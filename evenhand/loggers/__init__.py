"""Loggers: what a run tells, in the tools that people keep their experiments in.

Each seed of each method is a logged run of its own. A resumed run goes on in the log it wrote before: what the log
holds already is not written twice, and what it lacks is added.
"""

from __future__ import annotations

import importlib

from evenhand.checks import EvenhandError, near_miss
from evenhand.loggers.base import Logger

# By name: the module and the class, and what may stand behind the colon.
LOGGERS = {
    "tensorboard": ("evenhand.loggers.tensorboard", "TensorBoard", "DIR"),
    "mlflow": ("evenhand.loggers.mlflow", "Mlflow", "URI"),
    "wandb": ("evenhand.loggers.wandb", "Wandb", "PROJECT"),
}

__all__ = ["LOGGERS", "Logger", "logger"]


def logger(written: str) -> Logger:
    """The logger that words name: tensorboard:DIR, mlflow:URI or wandb:PROJECT; without a colon, the tool's default."""
    name, colon, where = written.partition(":")
    if name not in LOGGERS:
        known = ", ".join(f"{name}:{place}" for name, (_, _, place) in LOGGERS.items())
        raise EvenhandError(f"unknown logger {name!r}{near_miss(name, list(LOGGERS))} (known: {known})")
    module, kind, place = LOGGERS[name]
    if colon and not where:
        raise EvenhandError(f"{written!r} names no place; write {name}:{place}, or {name} alone")
    made: Logger = getattr(importlib.import_module(module), kind)(where)
    made.log = written
    return made
