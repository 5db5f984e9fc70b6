"""The figures of one run, by name. Each is None where a run did not record what it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand.report import curves, groups
from evenhand.report.charts import (
    BINS,
    Client,
    Spread,
    bar_chart,
    cloud_chart,
    distribution_chart,
    heat_chart,
    line_chart,
)
from evenhand.report.colours import SERIES
from evenhand.report.figure import Figure, Maker
from evenhand.report.svg import Floats, Line
from evenhand.report.words import at_the_end, client_words, make_up, tail_of, times_asked

if TYPE_CHECKING:
    from evenhand.runs import Run, Runs

FEW = 8  # clients that get a bar each in place of a distribution
MANY = 5000  # points of a cloud; of more clients, evenly chosen ones are drawn
ROWS = 60  # of a heat map; more clients share rows
COLUMNS = 120
KINDS = 4 * SERIES  # that marks can tell apart
LAYERS = 8


def accuracy(runs: Runs) -> Figure:
    tail = tail_of(runs)
    lines = [
        curves.tails(runs, f"best {tail}", 1, 3),
        curves.measured(runs, "mean", "mean", 100.0, 0),
        curves.tails(runs, f"worst {tail}", 0, 1),
    ]
    return Figure(
        "How well the clients are served",
        f"Accuracy of each client on its own test data{curves.over(len(runs))}.",
        line_chart(lines, x_title="rounds", y_title="accuracy %", floor=0.0, ceiling=100.0),
    )


def fairness(runs: Runs) -> Figure:
    return Figure(
        "How evenly",
        f"Standard deviation of the clients' accuracies; lower is fairer{curves.over(len(runs))}.",
        line_chart(
            [curves.measured(runs, "std", "std_pp", 1.0, 0)], x_title="rounds", y_title="percentage points", floor=0.0
        ),
    )


def clients(runs: Runs) -> Figure:
    """Every client as a point."""
    many, points = len(runs) > 1, []
    groups_of, legend = main_classes(runs)
    chosen = [(run, client) for run in runs for client in np.flatnonzero(np.isfinite(run.accuracies)).tolist()]
    asked = {run.seed: times_asked(run) for run in runs}
    step = -(-len(chosen) // MANY)
    for run, client in chosen[::step]:
        held = run.holdings
        size = run.test_samples[client] if held is None else held.train[client]
        told = client_words(run, client, int(asked[run.seed][client]), many)
        group = groups_of[run.seed][client]
        place = client if run is runs[0] else None  # the other charts show the first seed
        points.append(Client(place, float(size), 100.0 * float(run.accuracies[client]), int(group), told))
    fewer = f"; {len(points):,} of {len(chosen):,} are drawn" if step > 1 else ""
    coloured = ", coloured by the class it holds most of" if legend else ""
    return Figure(
        "Every client",
        f"A point a client{coloured}{fewer}. Point at one, or walk with the arrow keys, to see who it is.",
        cloud_chart(points, x_title="test samples" if runs[0].holdings is None else "training samples",
                    y_title="accuracy %"),
        legend,
    )  # fmt: skip


def main_classes(runs: Runs) -> tuple[dict[int, Any], dict[int, str]]:
    """Each client's largest class as a number that marks can show, and what the numbers mean."""
    if any(run.holdings is None for run in runs):
        return {run.seed: np.zeros(len(run.names), dtype=int) for run in runs}, {}
    main = {run.seed: run.holdings.labels.argmax(1) for run in runs if run.holdings is not None}
    every = np.concatenate(list(main.values()))
    common = np.bincount(every)
    shown = np.flatnonzero(common)
    names = runs[0].holdings.classes
    if len(shown) <= KINDS:
        places = {int(label): place for place, label in enumerate(shown)}
        legend = {place: str(names[label]) for label, place in places.items()}
    else:  # too many to tell apart: the largest have a mark of their own
        shown = np.sort(np.argsort(-common, kind="stable")[: SERIES - 1])
        places = {int(label): place for place, label in enumerate(shown)}
        legend = {place: str(names[label]) for label, place in places.items()} | {SERIES - 1: "another class"}
    return {
        seed: np.array([places.get(int(label), SERIES - 1) for label in labels]) for seed, labels in main.items()
    }, legend


def distribution(runs: Runs) -> Figure:
    """Few clients get a bar each, more a histogram."""
    if runs[0].measured_clients <= FEW:
        heights = 100.0 * np.mean([run.accuracies for run in runs], axis=0)
        low, high = (100.0 * end([run.accuracies for run in runs], axis=0) for end in (np.min, np.max))
        drawing = bar_chart(heights, names=runs[0].names, x_title="clients", y_title="accuracy %", low=low, high=high)
        return Figure("Every client at the end", f"Accuracy on its own test data{_spans(runs)}.", drawing)
    return Figure(
        "The distribution of accuracies",
        f"How many of the clients end up where, in steps of {100 // BINS} points{_pooled(runs)}.",
        distribution_chart([spread(runs, "", 0)], x_title="accuracy %", tail=tail_of(runs)),
    )


def _spans(runs: Runs) -> str:
    return "; the thin lines span the seeds" if len(runs) > 1 else ""


def _pooled(runs: Runs) -> str:
    return f"; the clients of {len(runs)} seeds together" if len(runs) > 1 else ""


def spread(runs: Runs, name: str, colour: int) -> Spread:
    values = 100.0 * np.concatenate([run.accuracies for run in runs])
    return Spread(name or runs.experiment.method.name, values, 100.0 * float(runs.measured("mean").mean()),
                  at_the_end(runs)[0], colour)  # fmt: skip


def conflicts(runs: Runs) -> Figure | None:
    lines = [
        curves.of_rounds(runs, "against", curves.share_against, 1),
        curves.of_rounds(runs, "loss fell", curves.share_fell, 3),
    ]
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return None
    return Figure(
        "Conflicts",
        "Of the clients that answered: whose update the step goes against, and whose own loss fell.",
        _shares(lines),
    )


def layer_conflicts(runs: Runs) -> Figure | None:
    """The same by layer of the model; of many layers, evenly chosen ones."""
    names = runs[0].facts.get("layers") or []
    found: list[int] = next(
        (record["layer_conflicts"] for record in runs[0].rounds if record.get("layer_conflicts")), []
    )
    if len(found) < 2:
        return None
    names = names if len(names) == len(found) else [f"layer {number + 1}" for number in range(len(found))]
    places = np.unique(np.linspace(0, len(found) - 1, min(LAYERS, len(found))).round().astype(int)).tolist()
    lines = [
        curves.of_rounds(runs, names[layer], curves.layer_share(layer), place) for place, layer in enumerate(places)
    ]
    lines = [Line(line.name, line.x, line.y, colour=line.colour) for line in lines]  # bands would hide each other
    fewer = f" {len(places)} of {len(found)} layers are drawn." if len(places) < len(found) else ""
    return Figure(
        "Conflicts by layer",
        f"Of the clients that answered: whose update the step goes against within a layer.{fewer}",
        _shares(lines),
    )


def _shares(lines: Sequence[Line]) -> str:
    return line_chart(lines, x_title="rounds", y_title="% of the cohort", floor=0.0, ceiling=100.0)


def losses(runs: Runs) -> Figure | None:
    lines = [
        curves.of_rounds(runs, "before", curves.mean_loss("losses"), 1),
        curves.of_rounds(runs, "after", curves.mean_loss("losses_after"), 0),
    ]
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return None
    return Figure(
        "Loss before and after each round",
        "Mean training loss of the clients that answered, with the model they received and with the next one"
        f"{curves.over(len(runs))}.",
        line_chart(lines, x_title="rounds", y_title="loss", floor=0.0, digits=3),
    )


def listened(runs: Runs) -> Figure | None:
    """Who was listened to: the share of the weight that each client's update got, over the rounds."""
    run: Run = runs[0]
    if not run.rounds:
        return None
    order = np.argsort(np.nan_to_num(run.accuracies, nan=2.0), kind="stable")
    rows = np.array_split(order, min(ROWS, len(order)))
    stretch = -(-len(run.rounds) // COLUMNS)
    columns = [slice(start, start + stretch) for start in range(0, len(run.rounds), stretch)]
    row_of = np.empty(len(order), dtype=np.int64)
    for place, row in enumerate(rows):
        row_of[row] = place
    shades, total = np.zeros((len(rows), len(columns))), np.zeros(len(order))
    for number, clients, shares in shares_of(run):
        np.add.at(shades[:, number // stretch], row_of[clients], shares)
        np.add.at(total, clients, shares)
    if not total.any():
        return None
    lengths = [len(run.rounds[part]) for part in columns]
    shades /= np.outer([len(row) for row in rows], lengths)
    asked = times_asked(run)
    told = [_listened_words(run, row, asked, total) for row in rows]
    single = len(rows) == len(order)
    names = [run.names[row[0]] if single else "" for row in rows]
    if not single:
        names[0], names[-1] = "worst", "best"
    seed = f" Seed {run.seed}." if len(runs) > 1 else ""
    together = "" if single else f" Clients share a row with {len(rows[0]) - 1:,} others served alike."
    return Figure(
        "Who was listened to",
        "The weight of each client's update in the step, fuller is more; the worst-served clients are on top. A round "
        f"in which a client was not asked is empty, unless its last update was remembered.{together}{seed}",
        heat_chart(
            shades,
            names,
            [str(part.start + 1) for part in columns],
            x_title="rounds",
            y_title="clients, by accuracy",
            told=told,
            most=float(np.quantile(shades[shades > 0], 0.98)) if (shades > 0).any() else 1.0,
            row_clients=[int(row[0]) for row in rows] if single else None,
        ),
    )


def shares_of(run: Run) -> Iterator[tuple[int, list[int], Floats]]:
    """Of every round: its number, the clients whose updates the step is made of, and the share of each.

    A rule may weigh the layers differently, and may weigh an update negatively: the absolute values count, over all
    layers, and a round's shares add up to one. Remembered updates of absent clients count as theirs.
    """
    if run.experiment.method.training != "federated":
        return
    for number, record in enumerate(run.rounds):
        if not record.get("coefficients"):
            continue
        lost = set(record["lost"])
        rows = [client for client in record["asked"] if client not in lost] + record.get("remembered_clients", [])
        sizes = np.abs(np.array(record["coefficients"], dtype=np.float64)).mean(0)[: len(rows)]
        if sizes.sum() > 0.0:
            yield number, rows, sizes / sizes.sum()


def _listened_words(run: Run, row: Any, asked: Any, total: Any) -> str:
    share = 100.0 * total[row].sum() / max(total.sum(), 1e-300)
    if len(row) == 1:
        client = int(row[0])
        right = f"{100 * run.accuracies[client]:.1f}% right" if np.isfinite(run.accuracies[client]) else "not measured"
        return (
            f"client {run.names[client]}: {right}\nasked in {asked[client]:,} of {len(run.rounds):,} rounds\n"
            f"{share:.1f}% of all weight (an even share is {100 / len(run.names):.1f}%)"
        )
    known = run.accuracies[row][np.isfinite(run.accuracies[row])]
    right = f"{100 * known.min():.0f} to {100 * known.max():.0f}% right" if len(known) else "not measured"
    return (
        f"{len(row):,} clients: {right}\nasked {asked[row].mean():.1f} times on average\n{share:.1f}% of all weight "
        f"(an even share is {100 * len(row) / len(run.names):.1f}%)"
    )


def partition(runs: Runs) -> Figure | None:
    """Classes by clients."""
    run: Run = runs[0]
    held = run.holdings
    if held is None:
        return None
    order = np.lexsort((np.nan_to_num(run.accuracies, nan=2.0), held.labels.argmax(1)))
    columns = np.array_split(order, min(COLUMNS, len(order)))
    shown = np.sort(np.argsort(-held.labels.sum(0), kind="stable")[:ROWS])
    counts = np.array([held.labels[column].mean(0) for column in columns]).T[shown]
    single = len(columns) == len(order)
    told = []
    for column in columns:
        if single:
            client = int(column[0])
            right = f": {100 * run.accuracies[client]:.1f}% right" if np.isfinite(run.accuracies[client]) else ""
            head = f"client {run.names[client]}{right}\n{held.labels[client].sum():,} samples: "
        else:
            head = f"{len(column):,} clients\n{held.labels[column].sum():,} samples: "
        told.append(head + make_up(held.labels[column].sum(0), held.classes))
    fewer = f" The {ROWS} largest of {len(held.classes):,} classes." if len(shown) < len(held.classes) else ""
    together = "" if single else f" Each column stands for {len(columns[0]):,} clients."
    seed = f" Seed {run.seed}." if len(runs) > 1 else ""
    return Figure(
        "Who holds what",
        f"Samples of each class, fuller is more; clients with the same main class are side by side.{fewer}{together}"
        f"{seed}",
        heat_chart(
            counts,
            [str(held.classes[label]) for label in shown],
            [run.names[int(column[0])] if single and len(columns) <= 40 else "" for column in columns],
            x_title="clients",
            y_title="classes",
            told=told,
            by_row=False,
            row_clients=[int(column[0]) for column in columns] if single else None,
        ),
    )


def sent(runs: Runs) -> Figure | None:
    """Bytes from the start."""
    totals = [runs[0].rounds[-1:] and _sum(runs[0], entry) for entry in ("bytes_down", "bytes_up")]
    if not any(totals):
        return None
    unit, word = next(
        (size, name) for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
        if max(total or 0 for total in totals) >= size or size == 1.0
    )  # fmt: skip

    def so_far(name: str, entry: str, colour: int) -> Line:
        length = min(len(run.rounds) for run in runs)
        step = max(1, length // curves.POINTS)
        seeds = np.array([np.cumsum([record.get(entry, 0) for record in run.rounds])[:length] / unit for run in runs])
        places = np.arange(step - 1, length, step)
        return curves.line(name, (places + 1).astype(np.float64), seeds[:, places], colour)

    return Figure(
        "Sent so far",
        f"From the server to the clients and back, all clients together, {word}; numbers of four bytes.",
        line_chart(
            [so_far("to the clients", "bytes_down", 1), so_far("back", "bytes_up", 0)],
            x_title="rounds", y_title=word, floor=0.0,
        ),
    )  # fmt: skip


def _sum(run: Run, entry: str) -> float:
    return float(sum(record.get(entry, 0) for record in run.rounds))


RUN_FIGURES: dict[str, Maker[Any]] = {
    "accuracy": accuracy,
    "fairness": fairness,
    "clients": clients,
    "distribution": distribution,
    "listened": listened,
    "partition": partition,
    "conflicts": conflicts,
    "layers": layer_conflicts,
    "losses": losses,
    "bytes": sent,
    **{name: partial(groups.figure, name) for name in groups.FIGURES},
}
