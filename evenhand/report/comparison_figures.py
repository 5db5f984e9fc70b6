"""The figures of a comparison, by name. Each is None where the runs did not record what it shows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from evenhand.counts import KINDS
from evenhand.report import curves, groups
from evenhand.report.charts import distribution_chart, line_chart, pareto_front, row_bars, scatter_chart
from evenhand.report.figure import Figure, Maker
from evenhand.report.run_figures import spread
from evenhand.report.svg import Line, Point
from evenhand.report.words import tail_of

if TYPE_CHECKING:
    from evenhand.comparison import Comparison
    from evenhand.runs import Runs

BANDS = 8  # methods whose bands are drawn; of more they would hide each other
TRADE_OFFS = {f"trade-off-{kind}": kind for kind in groups.SHOWN}


def interval(values: Any, confidence: float) -> tuple[float, float] | None:
    """The t interval of the mean over the seeds; None for one seed."""
    count = len(values)
    if count < 2:
        return None
    reach = float(values.std(ddof=1)) / count**0.5 * float(stdtrit(count - 1, (1.0 + confidence) / 2.0))
    return float(values.mean()) - reach, float(values.mean()) + reach


def points_of(comparison: Comparison, fair: str, fair_scale: float, good: str) -> list[Point]:
    """A point a method: how unfair it is against how good."""
    found = []
    for place, (label, runs) in enumerate(comparison.runs.items()):
        x, y = fair_scale * runs.measured(fair), 100.0 * runs.measured(good)
        ends = interval(x, comparison.confidence), interval(y, comparison.confidence)
        found.append(Point(label, float(x.mean()), float(y.mean()), place, label, *ends))
    return found


def on_the_front(comparison: Comparison) -> list[str]:
    """Methods that no other beats in both: mean accuracy and evenness, or accuracy and demographic parity."""
    return [point.name for point in pareto_front(_trade(comparison))]


def _trade(comparison: Comparison) -> list[Point]:
    if comparison.grouped:
        return points_of(comparison, "dp", 100.0, "pooled_accuracy")
    return points_of(comparison, "std_pp", 1.0, "mean")


def pareto(comparison: Comparison) -> Figure:
    points = points_of(comparison, "std_pp", 1.0, "mean")
    return Figure(
        "Accuracy against fairness",
        f"A point a method; to the upper left is better. {_front_words(comparison)}",
        scatter_chart(
            points,
            x_title="standard deviation between clients, points (lower is fairer)",
            y_title="mean accuracy %",
            front=pareto_front(points),
            from_zero=False,
        ),
    )


def _front_words(comparison: Comparison) -> str:
    front = "The dashed steps join the methods that no other beats in both (the Pareto front)"
    if len(comparison.seeds) < 2:
        return f"{front}."
    seeds = len(comparison.seeds)
    return f"{front}; the crosses are {comparison.confidence:.0%} intervals of the mean over {seeds} seeds."


def trade_off(kind: str, comparison: Comparison) -> Figure | None:
    """The same against how differently groups of people are treated."""
    if not all(map(groups.has_groups, comparison.runs.values())):
        return None
    points = points_of(comparison, kind, 100.0, "pooled_accuracy")
    return Figure(
        f"Accuracy against {KINDS[kind].title}",
        f"Largest deviation of a group's rate from everyone's; to the upper left is better. {_front_words(comparison)}",
        scatter_chart(
            points, x_title="largest deviation, points", y_title="accuracy %", front=pareto_front(points),
            from_zero=False,
        ),
    )  # fmt: skip


def distribution(comparison: Comparison) -> Figure:
    every = comparison.runs.items()
    first = next(iter(comparison.runs.values()))
    seeds = f", the clients of {len(comparison.seeds)} seeds together" if len(comparison.seeds) > 1 else ""
    tail = tail_of(first)
    return Figure(
        "The distributions side by side",
        f"How many of the clients end up where{seeds}; a solid line at the mean, a dashed one at the worst {tail}.",
        distribution_chart(
            [spread(runs, label, place) for place, (label, runs) in enumerate(every)], x_title="accuracy %", tail=tail
        ),
    )


def _overlaid(comparison: Comparison, make: Any) -> list[Line]:
    lines: list[Line] = [make(runs, label, place) for place, (label, runs) in enumerate(comparison.runs.items())]
    if len(lines) > BANDS:
        lines = [Line(line.name, line.x, line.y, colour=line.colour) for line in lines]
    return lines


def _over(comparison: Comparison) -> str:
    return curves.over(len(comparison.seeds)) if len(comparison.runs) <= BANDS else ""


def accuracy(comparison: Comparison) -> Figure:
    lines = _overlaid(comparison, lambda runs, label, place: curves.measured(runs, label, "mean", 100.0, place))
    return Figure(
        "How well the average client is served",
        f"Mean of the clients' accuracies{_over(comparison)}.",
        line_chart(lines, x_title="rounds", y_title="accuracy %", floor=0.0, ceiling=100.0),
    )


def worst(comparison: Comparison) -> Figure:
    tail = tail_of(next(iter(comparison.runs.values())))
    lines = _overlaid(comparison, lambda runs, label, place: curves.tails(runs, label, 0, place))
    return Figure(
        f"How the worst-served {tail} {'fares' if tail == 'client' else 'fare'}",
        f"Accuracy on their own test data{_over(comparison)}.",
        line_chart(lines, x_title="rounds", y_title="accuracy %", floor=0.0, ceiling=100.0),
    )


def fairness(comparison: Comparison) -> Figure:
    lines = _overlaid(comparison, lambda runs, label, place: curves.measured(runs, label, "std_pp", 1.0, place))
    return Figure(
        "How evenly",
        f"Standard deviation of the clients' accuracies; lower is fairer{_over(comparison)}.",
        line_chart(lines, x_title="rounds", y_title="percentage points", floor=0.0),
    )


def parity(comparison: Comparison) -> Figure | None:
    if not all(map(groups.has_groups, comparison.runs.values())):
        return None
    lines = _overlaid(comparison, lambda runs, label, place: curves.measured(runs, label, "dp", 100.0, place))
    return Figure(
        "Demographic parity",
        f"Largest deviation of a group's rate of each prediction from everyone's; lower is fairer{_over(comparison)}.",
        line_chart(lines, x_title="rounds", y_title="percentage points", floor=0.0),
    )


def conflicts(comparison: Comparison) -> Figure | None:
    lines = _overlaid(
        comparison,
        lambda runs, label, place: curves.of_rounds(runs, label, curves.share_against, place, curves.POINTS_OF_MANY),
    )
    lines = [Line(line.name, line.x, line.y, colour=line.colour) for line in lines]
    if not any(np.isfinite(line.y).any() for line in lines):
        return None
    return Figure(
        "Conflicts",
        "Of the clients that answered: whose update the step goes against.",
        line_chart(lines, x_title="rounds", y_title="% of the cohort", floor=0.0, ceiling=100.0),
    )


def seconds_of(runs: Runs) -> float:
    """How long the rounds of a seed took on average; not-a-number where that is not known."""
    known = [[value for value in run.seconds if value is not None] for run in runs]
    return float(np.mean([sum(entry) for entry in known])) if all(known) else np.nan


def time(comparison: Comparison) -> Figure | None:
    seconds = np.array([seconds_of(runs) for runs in comparison.runs.values()])
    if not np.isfinite(seconds).any():
        return None
    rounds = [len(runs[0].rounds) for runs in comparison.runs.values()]
    words = [
        f"{total:,.1f} s, {1000 * total / max(count, 1):,.1f} ms a round" if np.isfinite(total) else "-"
        for total, count in zip(seconds, rounds, strict=True)
    ]
    return Figure(
        "Wall time",
        "Seconds that the rounds of one seed took on the machine named below, without evaluations.",
        row_bars(list(comparison.runs), seconds, words, x_title="seconds"),
    )


COMPARISON_FIGURES: dict[str, Maker[Any]] = {
    "distribution": distribution,
    "pareto": pareto,
    **{name: partial(trade_off, kind) for name, kind in TRADE_OFFS.items()},
    "accuracy": accuracy,
    "worst": worst,
    "fairness": fairness,
    "parity": parity,
    "conflicts": conflicts,
    "time": time,
}
