"""What all loggers share: a log is written once, whatever stops and resumes the run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from evenhand.callbacks import Callback, Point, Tracked
from evenhand.checks import EvenhandError

NOTHING = -1  # the last round of an empty log
ROUNDS = "rounds"  # how many were played, beside every point's numbers: it says how far a log has got


class Logger(Callback):
    """Writes the points of every run that its log does not hold yet."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def on_start(self, run: Tracked) -> None:
        self._last[run.id] = self.open(run)
        for point in run.past:
            self.on_round(run, point)

    def on_round(self, run: Tracked, point: Point) -> None:
        if point.round > self._last[run.id]:
            self.write(run, point)
            self._last[run.id] = point.round

    def on_end(self, run: Tracked, how: str) -> None:
        self.close(run, how)

    def open(self, run: Tracked) -> int:
        """Begin the run's log, or find it again; returns the last round that it holds (`NOTHING`: none)."""
        raise NotImplementedError

    def write(self, run: Tracked, point: Point) -> None:
        raise NotImplementedError

    def close(self, run: Tracked, how: str) -> None:
        raise NotImplementedError


def library(module: str, extra: str) -> Any:
    """A module of an optional library, or the words that install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(error, extra) from error


def missing(error: ImportError, extra: str) -> EvenhandError:
    return EvenhandError(f"the {extra} logger lacks a library ({error}); pip install 'evenhand[{extra}]'")


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted names.

    >>> dict(flat({"rounds": 5, "work": {"lr": 0.1}}))
    {'rounds': 5, 'work.lr': 0.1}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
