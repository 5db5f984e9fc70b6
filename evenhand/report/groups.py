"""The panels about groups of people in the page of a run or a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand.chance import over, wilson
from evenhand.constraints import Cells
from evenhand.counts import KINDS
from evenhand.report import page
from evenhand.report.charts import interval_chart, line_chart, scatter_chart
from evenhand.report.figure import Figure
from evenhand.report.svg import Floats, Line, Point

if TYPE_CHECKING:
    from evenhand.runs import Runs

SHOWN = ("dp", "eodds", "ap")
MOST = 30  # groups in a chart, clients in a table
EVERYONE = "Each with the 95% interval of its test samples; the dashed line is everyone."


def has_groups(runs: Runs) -> bool:
    """Whether the data says who belongs to which group."""
    return runs[0].cells is not None and all("predicted" in run.evaluations[-1] for run in runs)


FIGURES = ("group-accuracy", "group-predictions", "group-gaps", "multipliers", "group-trade-off")


def figure(name: str, runs: Runs) -> Figure | None:
    """How groups are treated at the end, how that came about, and what the clients were told."""
    if not has_groups(runs):
        return None
    cells = runs[0].cells
    assert cells is not None
    if name in ("group-accuracy", "group-predictions"):
        if name == "group-predictions" and cells.classes != 2:
            return None
        tables = [cells.tables(np.asarray(run.evaluations[-1]["predicted"])) for run in runs]  # groups, labels, classes
        return _rates(cells, tables, "right" if name == "group-accuracy" else "predicted")
    if name == "group-gaps":
        curves = [_curve(runs, KINDS[kind].title, kind, place) for place, kind in enumerate(SHOWN)]
        return Figure(
            "How differently groups are treated",
            "Largest deviation of a group's rate from everyone's; lower is fairer.",
            line_chart(curves, x_title="rounds", y_title="percentage points", floor=0.0),
        )
    if name == "multipliers":
        told = _multipliers(runs)
        said = "The multiplier of each group's constraint: how hard its rate is pushed towards everyone's."
        drawing = line_chart(told, x_title="rounds", y_title="multiplier", digits=3) if told else ""
        return Figure("What the clients were told", said, drawing) if told else None
    path = [point for place, kind in enumerate(SHOWN) for point in _path(runs, kind, place)]
    if len(path) <= len(SHOWN):
        return None
    return Figure(
        "Accuracy against each violation",
        "The model at every evaluation; to the upper left is better.",
        scatter_chart(path, x_title="largest deviation, points", y_title="accuracy %", joined=True),
    )


def _path(runs: Runs, kind: str, colour: int) -> list[Point]:
    """A model's way from evaluation to evaluation; its end is named."""
    violations, accuracies = _mean(runs, kind), _mean(runs, "pooled_accuracy")
    last = len(violations) - 1
    return [
        Point(
            f"{KINDS[kind].title}, round {runs[0].curves['round'][place]:g}",
            100 * float(violations[place]),
            100 * float(accuracies[place]),
            colour,
            KINDS[kind].title if place == last else "",
        )
        for place in range(last + 1)
    ]


def _rates(cells: Cells, tables: Sequence[Any], what: str) -> Figure:
    """One rate of every group, with its interval, and everyone's."""
    places = range(len(cells.names))[:MOST]
    every = np.mean(tables, axis=0)
    of = every.sum((1, 2))
    hits = np.einsum("gyy->g", every) if what == "right" else every[:, :, 1].sum(1)
    low, high = wilson(hits, of)
    first = next(iter(cells.attributes.values()))
    everyone = 100 * float(hits[first].sum() / of[first].sum())
    label = cells.labels[1] if len(cells.labels) > 1 else "1"
    title, axis = ("Right, by group", "right %") if what == "right" else (f"Predicted {label}, by group", "predicted %")
    drawing = interval_chart(
        [cells.names[place] for place in places],
        100 * over(hits, of)[: len(places)],
        100 * low[: len(places)],
        100 * high[: len(places)],
        everyone=everyone,
        x_title=axis,
    )
    return Figure(title, EVERYONE, drawing)


def _mean(runs: Runs, measure: str) -> Floats:
    length = min(len(run.curves["round"]) for run in runs)
    return np.asarray(np.mean([run.curves[measure][:length] for run in runs], axis=0))


def _curve(runs: Runs, name: str, measure: str, colour: int) -> Line:
    length = min(len(run.curves["round"]) for run in runs)
    seeds = np.array([100.0 * run.curves[measure][:length] for run in runs])
    rounds = runs[0].curves["round"][:length].astype(np.float64)
    low, high = (seeds.min(0), seeds.max(0)) if len(seeds) > 1 else (None, None)
    return Line(name, rounds, seeds.mean(0), low, high, colour)


def _multipliers(runs: Runs) -> list[Line]:
    """The server's multipliers over the rounds, one line a constraint, the seeds' mean."""
    told = [[record["told"] for record in run.rounds if "multipliers" in record.get("told", {})] for run in runs]
    length = min(map(len, told))
    if not length:
        return []
    values = np.mean([[entry["multipliers"] for entry in seed[:length]] for seed in told], axis=0)
    names = told[0][0]["constraints"]
    rounds = np.arange(1, length + 1, dtype=np.float64)
    return [Line(name, rounds, values[:, place], colour=place) for place, name in enumerate(names)]


def by_client(runs: Runs) -> list[str]:
    """Every client's rates in every group, of the first seed."""
    run, cells = runs[0], runs[0].cells
    predicted = run.load_predicted()
    if cells is None or predicted is None:
        return []
    tables = cells.tables(predicted)  # clients x groups x labels x classes
    sizes = tables.sum((2, 3))
    right = over(np.einsum("kgyy->kg", tables), sizes)
    chosen = over(tables[..., 1].sum(2), sizes)
    order = np.argsort(np.nan_to_num(run.accuracies, nan=2.0), kind="stable")[:MOST]

    def cell(client: int, group: int) -> str:
        if not sizes[client, group]:
            return "-"
        positive = f" / {100 * chosen[client, group]:.0f}" if cells.classes == 2 else ""
        return f"{100 * right[client, group]:.1f}{positive} ({sizes[client, group]:,})"

    rows = [[run.names[client], *(cell(client, group) for group in range(len(cells.names)))] for client in order]
    both = "Right % / predicted positive % (test samples)" if cells.classes == 2 else "Right % (test samples)"
    few = f", the {MOST} worst-served of {len(run.names):,}" if len(run.names) > MOST else ""
    seed = f", seed {run.seed}" if len(runs) > 1 else ""
    return [page.table("Groups within each client", f"{both}{few}{seed}.", ["client", *cells.names], rows)]
