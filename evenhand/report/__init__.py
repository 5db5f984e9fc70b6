"""A run, or a comparison, as one HTML page that can be mailed: curves, client accuracies, who is served worst."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand import storage
from evenhand.fairness import few
from evenhand.report import groups, page
from evenhand.report.svg import Floats, Line, bar_chart, line_chart

if TYPE_CHECKING:
    from evenhand.comparison import Cell, Comparison
    from evenhand.runs import Run, Runs

WORST_SHOWN = 10
BARS = 200  # of more clients, evenly chosen ones are drawn
POINTS = 60  # of a curve that has a value every round
POINTS_OF_MANY = 20  # where many such curves share a chart


def write_run(runs: Runs, path: str | Path) -> Path:
    """Write the page of a run."""
    storage.write_bytes(path, run_page(runs).encode())
    return Path(path)


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page of a comparison."""
    storage.write_bytes(path, comparison_page(comparison).encode())
    return Path(path)


# ----------------------------------------------------------------------------------------------------------- one run


def run_page(runs: Runs) -> str:
    tail, over = few(runs[0].measured_clients), _over(len(runs))
    curves = [
        _measured(runs, f"best {tail}", "best", 100.0, 2),
        _measured(runs, "mean", "mean", 100.0, 0),
        _measured(runs, f"worst {tail}", "worst", 100.0, 1),
    ]
    heights, low, high = _sorted_accuracies(runs)
    whiskers = "; the thin lines span the seeds" if len(runs) > 1 else ""
    sections = [
        page.chart(
            "How well the clients are served",
            f"Accuracy of each client on its own test data{over}.",
            line_chart(curves, x_title="rounds", y_title="accuracy %", floor=0.0, ceiling=100.0),
        ),
        page.chart(
            "How evenly",
            f"Standard deviation of the clients' accuracies; lower is fairer{over}.",
            line_chart(
                [_measured(runs, "std", "std_pp", 1.0, 0)],
                x_title="rounds",
                y_title="percentage points",
                floor=0.0,
            ),
        ),
        page.chart(
            "Every client at the end",
            f"Clients from the worst-served to the best-served{whiskers}.",
            bar_chart(heights, low, high, x_title="clients, by accuracy", y_title="accuracy %"),
        ),
        page.chart(
            "Conflicts",
            "Of the clients that answered: whose update the step goes against, and whose loss fell.",
            line_chart(
                [
                    _per_round(runs, "against", "conflicts", 1),
                    _per_round(runs, "loss fell", "fell", 2),
                ],
                x_title="rounds",
                y_title="% of the cohort",
                floor=0.0,
                ceiling=100.0,
            ),
        ),
    ]
    grouped = groups.has_groups(runs)
    body = [
        page.head(f"{runs.experiment.method.name} on {runs.experiment.data_name}", _what(runs)),
        page.paragraph(runs.fairness.sentence(), "lead"),
        *([page.paragraph(runs.group_sentence(), "lead")] if grouped else []),
        page.tiles(_tiles(runs, tail)),
        page.charts([*(groups.charts(runs) if grouped else []), *sections]),
        _worst_served(runs),
        *(groups.by_client(runs) if grouped else []),
        *[page.paragraph(f"Note: {note}", "soft") for note in runs.notes],
        page.details("What was run", runs.experiment.to_toml()),
    ]
    return page.page(f"{runs.experiment}", body)


def _what(runs: Runs) -> str:
    seeds = ", ".join(str(run.seed) for run in runs)
    reached = len(runs[0].rounds)
    unfinished = f"; stopped after {reached:,} rounds" if reached < runs.experiment.rounds else ""
    seeds = f"seed{'s' if len(runs) > 1 else ''} {seeds}"
    return f"{runs.experiment.method}; {runs.experiment.setting()}; {seeds}{unfinished}"


def _over(seeds: int) -> str:
    return f"; mean over {seeds} seeds, the bands span them" if seeds > 1 else ""


def _tiles(runs: Runs, tail: str) -> list[tuple[str, str, str]]:
    shown = [
        ("mean", 100.0, "%", "mean accuracy"),
        ("worst", 100.0, "%", f"worst-served {tail}"),
        ("best", 100.0, "%", f"best-served {tail}"),
        ("std_pp", 1.0, " pp", "standard deviation"),
        ("angle_degrees", 1.0, "°", "angle to equal accuracies"),
    ]
    found = []
    for name, scale, unit, said in shown:
        values = scale * runs.measured(name)
        spread = f"± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
        found.append((f"{values.mean():.1f}{unit}", spread, said))
    return found


def _worst_served(runs: Runs) -> str:
    found = []
    for run in runs:
        known = np.flatnonzero(np.isfinite(run.accuracies))
        worst = known[np.lexsort((-run.losses[known], run.accuracies[known]))][:WORST_SHOWN]
        asked = _times_asked(run)
        found += [(run.accuracies[client], -run.losses[client], run, client, asked[client]) for client in worst]
    found.sort(key=lambda row: row[:2])
    text = [
        [
            run.names[client],
            *([str(run.seed)] if len(runs) > 1 else []),
            f"{100 * accuracy:.1f}",
            f"{-loss:.3f}",
            f"{run.test_samples[client]:,}",
            f"{asked:,} of {len(run.rounds):,}",
        ]
        for accuracy, loss, run, client, asked in found[:WORST_SHOWN]
    ]
    heads = ["client", *(["seed"] if len(runs) > 1 else []), "accuracy %", "loss", "test samples", "rounds asked"]
    return page.table("The worst-served clients", "On their own test data, at the end.", heads, text)


def _times_asked(run: Run) -> np.ndarray[Any, np.dtype[np.int64]]:
    asked = [client for entry in run.rounds for client in entry["asked"]]
    return np.bincount(np.array(asked, dtype=np.int64), minlength=len(run.names))


# ------------------------------------------------------------------------------------------------------- a comparison


def comparison_page(comparison: Comparison) -> str:
    heads = ["method", *(column.head for column in comparison.columns)]
    rows = [[escape(label), *row] for label, *row in comparison.rows(_cell)]
    every = list(comparison.runs.items())
    tail = few(comparison.clients)

    def overlaid(measure: str, scale: float) -> list[Line]:
        return [_measured(runs, label, measure, scale, place, bands=False) for place, (label, runs) in enumerate(every)]

    sections = [
        page.chart(
            "How well the average client is served",
            "Mean of the clients' accuracies.",
            line_chart(overlaid("mean", 100.0), x_title="rounds", y_title="accuracy %", floor=0.0, ceiling=100.0),
        ),
        page.chart(
            f"How the worst-served {tail} {'fares' if tail == 'client' else 'fare'}",
            "Accuracy on their own test data.",
            line_chart(overlaid("worst", 100.0), x_title="rounds", y_title="accuracy %", floor=0.0, ceiling=100.0),
        ),
        page.chart(
            "How evenly",
            "Standard deviation of the clients' accuracies; lower is fairer.",
            line_chart(overlaid("std_pp", 1.0), x_title="rounds", y_title="percentage points", floor=0.0),
        ),
        page.chart(
            "Every client at the end",
            "Clients from the worst-served to the best-served.",
            line_chart(
                [_ranked(runs, label, place) for place, (label, runs) in enumerate(every)],
                x_title="clients, by accuracy (%)",
                y_title="accuracy %",
                floor=0.0,
                ceiling=100.0,
            ),
        ),
        page.chart(
            "Conflicts",
            "Of the clients that answered: whose update the step goes against.",
            line_chart(
                [
                    _per_round(runs, label, "conflicts", place, POINTS_OF_MANY)
                    for place, (label, runs) in enumerate(every)
                ],
                x_title="rounds",
                y_title="% of the cohort",
                floor=0.0,
                ceiling=100.0,
            ),
        ),
    ]
    if all(groups.has_groups(runs) for runs in comparison.runs.values()):
        violation = line_chart(overlaid("dp", 100.0), x_title="rounds", y_title="percentage points", floor=0.0)
        said = "Largest deviation of a group's rate of each prediction from everyone's; lower is fairer."
        sections = [*groups.trade_offs(every), page.chart("Demographic parity", said, violation), *sections]
    seeds = ", ".join(map(str, comparison.seeds))
    body = [
        page.head("Comparison of " + ", ".join(comparison.labels), f"{comparison.experiment.setting()}; seeds {seeds}"),
        page.html_table("The table", comparison.words()[0], heads, rows),
        *[page.paragraph(line, "soft") for line in comparison.words()[1:]],
        page.legend(list(comparison.runs)),
        page.charts(sections),
        *[page.paragraph(f"Note: {note}", "soft") for note in comparison.notes],
        page.details("What was run", "\n".join(f"{label}: {runs.experiment.method}" for label, runs in every)),
    ]
    return page.page("Comparison of " + ", ".join(comparison.labels), body)


def _cell(cell: Cell) -> str:
    number = f"<b>{cell.number()}</b>" if cell.bold else cell.number()
    spread = f' <span class="soft">± {cell.plus_minus()}</span>' if cell.plus_minus() else ""
    return f"{number}{spread}<sup>{escape(cell.marks)}</sup>"


# ------------------------------------------------------------------------------------------------------------- curves


def _measured(runs: Runs, name: str, measure: str, scale: float, colour: int, bands: bool = True) -> Line:
    """A measure over the evaluations: the seeds' mean, and their band."""
    rounds = runs[0].curves["round"].astype(np.float64)
    seeds = [scale * run.curves[measure] for run in runs if len(run.curves["round"]) == len(rounds)]
    return _line(name, rounds, np.array(seeds), colour, bands)


def _per_round(runs: Runs, name: str, entry: str, colour: int, points: int = POINTS) -> Line:
    """A share of the cohort in percent, averaged over stretches of rounds; with a band where a chart has few lines."""
    stretch = max(1, -(-len(runs[0].rounds) // points))
    seeds = []
    for run in runs:
        shares = np.array([_share(record, entry) for record in run.rounds])
        shares = shares[: len(shares) // stretch * stretch].reshape(-1, stretch)
        known = np.isfinite(shares)
        total = np.where(known, shares, 0.0).sum(1)
        seeds.append(np.divide(100.0 * total, known.sum(1), out=np.full(len(shares), np.nan), where=known.any(1)))
    shortest = min(map(len, seeds))
    rounds = (np.arange(shortest, dtype=np.float64) + 0.5) * stretch
    return _line(name, rounds, np.array([seed[:shortest] for seed in seeds]), colour, points == POINTS)


def _share(record: dict[str, Any], entry: str) -> float:
    answered = int(record.get("answered", 0))
    if entry not in record or not answered:
        return np.nan
    return record[entry] / answered if entry == "conflicts" else record[entry]


def _line(name: str, x: Floats, seeds: Floats, colour: int, bands: bool) -> Line:
    mean = seeds.mean(0) if len(seeds) else np.full(len(x), np.nan)
    if not bands or len(seeds) < 2:
        return Line(name, x, mean, colour=colour)
    return Line(name, x, mean, seeds.min(0), seeds.max(0), colour)


def _ranked(runs: Runs, name: str, colour: int) -> Line:
    heights, _, _ = _sorted_accuracies(runs)
    if len(heights) == 1:
        heights = np.repeat(heights, 2)  # one client is a level line
    return Line(name, np.linspace(0.0, 100.0, len(heights)), heights, colour=colour)


def _sorted_accuracies(runs: Runs) -> tuple[Floats, Floats | None, Floats | None]:
    """The clients' accuracies in percent, from low to high: the seeds' mean, lowest and highest at every rank."""
    found: Sequence[Floats] = [100.0 * np.sort(run.accuracies[np.isfinite(run.accuracies)]) for run in runs]
    bars = min([BARS, *map(len, found)])
    ranked = np.array([seed[np.linspace(0, len(seed) - 1, bars).round().astype(int)] for seed in found])
    if len(ranked) == 1:
        return ranked[0], None, None
    return ranked.mean(0), ranked.min(0), ranked.max(0)
