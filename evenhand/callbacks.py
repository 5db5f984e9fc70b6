"""Callbacks: what a run tells while it trains, to a logger or to code of your own.

A callback hears of every seed of every method by itself: that it starts, each round (with the measures of all clients
where they were measured), and how it ends. A callback that fails is left out from then on, with a warning; the
training goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand.checks import EvenhandError
from evenhand.constraints import Cells
from evenhand.runs import Integers, Run

if TYPE_CHECKING:
    from evenhand.experiment import Experiment

FINISHED, STOPPED, DIVERGED, FAILED = "finished", "stopped", "diverged", "failed"
# The numbers of a round that are plain already, by their names in its record.
PLAIN = ("answered", "conflicts", "fell", "direction", "remembered", "bytes_down", "bytes_up", "seconds")


class CallbackWarning(UserWarning):
    """A callback failed and is left out."""


@dataclass(frozen=True)
class Point:
    """What became known with one round; number 0 is the measurement before the first."""

    round: int
    """How many rounds have been played."""
    record: Mapping[str, Any] | None
    """Who was asked, losses, coefficients, conflicts, bytes, seconds; None for number 0."""
    evaluation: Mapping[str, Any] | None
    """Every client's accuracy and loss, where all clients were measured after this round."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Every measure of that evaluation by name: mean, worst, std_pp, ..."""

    def scalars(self) -> dict[str, float]:
        """Every finite number of the point by name: `clients/...` of the evaluation, `round/...` of the round."""
        found = {f"clients/{name}": value for name, value in self.measures.items() if name != "round"}
        if self.record is not None:
            found |= {f"round/{name}": self.record[name] for name in PLAIN if self.record.get(name) is not None}
            losses = np.asarray(self.record.get("losses") or (), dtype=np.float64)
            if losses.size:
                found["round/loss"] = losses.mean()
        return {name: float(value) for name, value in found.items() if np.isfinite(value)}


@dataclass(frozen=True)
class Tracked:
    """One seed of one method, as callbacks hear of it."""

    id: str
    """Stays the same when a run is resumed; another run, under the same name too, has another one."""
    name: str
    """Such as digits-even-1/seed-0, or digits-compare-1/fedfv:alpha=0.2/seed-0."""
    group: str
    """The run or the comparison that it belongs to; empty where nothing is kept."""
    label: str
    """The method as it was written."""
    experiment: Experiment
    """The description, with this one seed."""
    names: tuple[str, ...]
    """Of the clients."""
    test_samples: Integers
    cells: Cells | None
    folder: Path | None
    """Where its records are, if they are kept."""
    past: Sequence[Point] = ()
    """What was known when it started: empty, or what a resumed run has played already."""

    @property
    def seed(self) -> int:
        return self.experiment.seeds[0]

    def point(
        self, round: int, record: Mapping[str, Any] | None = None, evaluation: Mapping[str, Any] | None = None
    ) -> Point:
        measures: Mapping[str, float] = {}
        if evaluation is not None:
            seen = Run(
                self.experiment, self.seed, self.names, self.test_samples, [], [dict(evaluation)], cells=self.cells
            )
            measures = seen.measures()
        return Point(round, record, evaluation, measures)


class Callback:
    """Every method does nothing unless it is overridden."""

    name = ""
    """How a warning calls it; empty: by its class."""
    log = ""
    """Of a logger: how `--log` names it, such as tensorboard:DIR."""

    def on_start(self, run: Tracked) -> None:
        """A seed of a method starts, or goes on: `run.past` holds what was played already."""

    def on_round(self, run: Tracked, point: Point) -> None:
        """A round was played; the first point is the measurement before any round."""

    def on_end(self, run: Tracked, how: str) -> None:
        """It ended: "finished", "stopped" (it can be resumed), "diverged" or "failed"."""


class Guarded:
    """A callback that cannot end a run: after its first error it is left out."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.failed = False

    def call(self, step: str, run: Tracked, *values: Any) -> None:
        if self.failed:
            return
        try:
            getattr(self.callback, step)(run, *values)
        except Exception as error:
            self.failed = True
            name = self.callback.name or type(self.callback).__name__
            why = str(error).strip() or type(error).__name__
            kept = "" if run.folder is None else "; the run folder is complete without it"
            warnings.warn(
                f"{name} failed ({run.name}: {why}) and is left out from here on; training goes on{kept}",
                CallbackWarning,
                stacklevel=2,
            )


Callbacks = Sequence[Callback | Guarded | str]


def guarded(callbacks: Callbacks) -> list[Guarded]:
    """Callbacks that cannot end a run; words such as "tensorboard:DIR" become loggers."""
    if isinstance(callbacks, str | Callback):
        raise EvenhandError(f"callbacks={callbacks!r} must be a list of callbacks")
    return [entry if isinstance(entry, Guarded) else Guarded(_callback(entry)) for entry in callbacks]


def _callback(given: Callback | str) -> Callback:
    if isinstance(given, str):
        from evenhand.loggers import logger

        return logger(given)
    if not isinstance(given, Callback):
        raise EvenhandError(f"{given!r} is no callback: derive it from evenhand.Callback, or write tensorboard:DIR")
    return given


class Audience:
    """The callbacks of one run, and its seeds."""

    def __init__(self, callbacks: Sequence[Guarded], runs: Sequence[Tracked]) -> None:
        self.callbacks, self.runs = callbacks, runs

    def start(self) -> None:
        for run in self.runs:
            self._tell("on_start", run)

    def hear(self, place: int, told: Iterable[Point]) -> None:
        """Tell what has become known about the seed at a place; nothing is worked out that nobody listens to."""
        if all(callback.failed for callback in self.callbacks):
            return
        for point in told:
            self._tell("on_round", self.runs[place], point)

    def end(self, how: str) -> None:
        for run in self.runs:
            self._tell("on_end", run, how)

    def _tell(self, step: str, run: Tracked, *values: Any) -> None:
        for callback in self.callbacks:
            callback.call(step, run, *values)


def points(
    run: Tracked,
    rounds: Sequence[Mapping[str, Any]],
    seconds: Sequence[float | None],
    evaluations: Sequence[Mapping[str, Any]],
) -> Iterator[Point]:
    """Records as points, in the order of the rounds."""
    measured = {int(entry["round"]): entry for entry in evaluations}
    if 0 in measured:
        yield run.point(0, evaluation=measured[0])
    for record, took in zip(rounds, seconds, strict=True):
        played = int(record["round"]) + 1
        yield run.point(played, {**record, "seconds": took}, measured.get(played))
