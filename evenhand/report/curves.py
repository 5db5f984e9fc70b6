"""Numbers over rounds as lines of a chart: the seeds' mean, and their band."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand.report.svg import Floats, Line
from evenhand.report.words import ends

if TYPE_CHECKING:
    from evenhand.runs import Run, Runs

POINTS = 60  # of a curve that has a value every round
POINTS_OF_MANY = 20  # where many such curves share a chart
OVER_SEEDS = "; mean over {} seeds, the bands span them"


def over(seeds: int) -> str:
    return OVER_SEEDS.format(seeds) if seeds > 1 else ""


def measured(runs: Runs, name: str, measure: str, scale: float, colour: int) -> Line:
    """A measure over the evaluations."""
    return of_evaluations(runs, name, lambda run: scale * run.curves[measure], colour)


def tails(runs: Runs, name: str, which: int, colour: int) -> Line:
    """The accuracy of the worst-served few (0) or of the best-served few (1) over the evaluations."""

    def few(run: Run) -> Floats:
        return ends(np.array([entry["accuracies"] for entry in run.evaluations]))[which]

    return of_evaluations(runs, name, few, colour)


def of_evaluations(runs: Runs, name: str, values: Callable[[Run], Floats], colour: int) -> Line:
    length = min(len(run.evaluations) for run in runs)
    rounds = runs[0].curves["round"][:length].astype(np.float64)
    return line(name, rounds, np.array([values(run)[:length] for run in runs]), colour)


def of_rounds(
    runs: Runs, name: str, value: Callable[[dict[str, Any]], float], colour: int, points: int = POINTS
) -> Line:
    """A number of every round, averaged over stretches of rounds."""
    stretch = max(1, -(-len(runs[0].rounds) // points))
    seeds = []
    for run in runs:
        values = np.array([value(record) for record in run.rounds], dtype=np.float64)
        values = values[: len(values) // stretch * stretch].reshape(-1, stretch)
        known = np.isfinite(values)
        total = np.where(known, values, 0.0).sum(1)
        seeds.append(np.divide(total, known.sum(1), out=np.full(len(values), np.nan), where=known.any(1)))
    shortest = min(map(len, seeds))
    rounds = np.arange(1, shortest + 1, dtype=np.float64) * stretch
    return line(name, rounds, np.array([seed[:shortest] for seed in seeds]), colour)


def line(name: str, x: Floats, seeds: Floats, colour: int) -> Line:
    mean = seeds.mean(0) if len(seeds) else np.full(len(x), np.nan)
    if len(seeds) < 2:
        return Line(name, x, mean, colour=colour)
    return Line(name, x, mean, seeds.min(0), seeds.max(0), colour)


def share_against(record: dict[str, Any]) -> float:
    """Whose updates the step goes against, in percent of those who answered."""
    answered = int(record.get("answered", 0))
    return 100.0 * record["conflicts"] / answered if answered and "conflicts" in record else np.nan


def share_fell(record: dict[str, Any]) -> float:
    """Whose own loss fell, in percent of those who answered."""
    return 100.0 * record.get("fell", np.nan)


def layer_share(layer: int) -> Callable[[dict[str, Any]], float]:
    """The same conflicts seen by one layer of the model."""

    def share(record: dict[str, Any]) -> float:
        answered, found = int(record.get("answered", 0)), record.get("layer_conflicts", ())
        return 100.0 * found[layer] / answered if answered and layer < len(found) else np.nan

    return share


def mean_loss(entry: str) -> Callable[[dict[str, Any]], float]:
    def mean(record: dict[str, Any]) -> float:
        values = np.array([value for value in record.get(entry, ()) if value is not None], dtype=np.float64)
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else np.nan

    return mean
