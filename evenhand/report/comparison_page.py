"""The page of a comparison."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from evenhand.commands import compare_command
from evenhand.report import groups, page
from evenhand.report.charts import histogram
from evenhand.report.colours import colour
from evenhand.report.comparison_figures import COMPARISON_FIGURES, TRADE_OFFS, on_the_front, seconds_of
from evenhand.report.run_figures import spread
from evenhand.report.run_page import about
from evenhand.report.words import verdict

if TYPE_CHECKING:
    from evenhand.comparison import Cell, Comparison
    from evenhand.runs import Runs

FIRST = ("distribution", "pareto")


def comparison_page(comparison: Comparison) -> str:
    every = list(comparison.runs.items())
    drawn = {name: make(comparison) for name, make in COMPARISON_FIGURES.items()}
    sections = {name: page.figure(figure, name) for name, figure in drawn.items() if figure is not None}
    people = [name for name in sections if name in TRADE_OFFS or name == "parity"]
    rest = [name for name in sections if name not in FIRST and name not in people]
    seeds = ", ".join(map(str, comparison.seeds))
    methods = {label: runs.experiment.method for label, runs in every}
    command = compare_command(comparison.experiment, comparison.methods)
    first = every[0][1]
    title = "Comparison of " + ", ".join(comparison.labels)
    body = [
        page.head(title, f"{comparison.experiment.setting()}; seeds {seeds}"),
        page.paragraph(verdict(comparison), "lead"),
        page.paragraph(front_words(comparison), "soft"),
        _table(comparison),
        *[page.paragraph(line, "soft") for line in comparison.words()[1:]],
        page.legend({place: label for place, (label, _) in enumerate(every)}, "top interactive", lines=True),
        page.charts([sections[name] for name in people]) if people else "",
        page.charts([sections[name] for name in FIRST]),
        page.charts([sections[name] for name in rest]),
        *[page.paragraph(f"Note: {note}", "soft") for note in comparison.notes],
        *about(
            first,
            command,
            "\n".join([*(f"# {label}: {chosen}" for label, chosen in methods.items()), "", comparison.description()]),
            all(groups.has_groups(runs) for _, runs in every),
        ),
    ]
    return page.page(title, body)


def front_words(comparison: Comparison) -> str:
    """Which methods are on the Pareto front, and of what."""
    what = "accuracy and demographic parity" if comparison.grouped else "mean accuracy and evenness"
    front = on_the_front(comparison)
    names = front[0] if len(front) == 1 else f"{', '.join(front[:-1])} and {front[-1]}"
    return f"On the Pareto front of {what}: {names} (no other method is better in both)."


def _table(comparison: Comparison) -> str:
    heads = ["method", *(column.head for column in comparison.columns), "clients by accuracy", "seconds"]
    rows = []
    for label, *cells in comparison.rows(_cell):
        runs = comparison.runs.get(label)
        small = ["", "-"] if runs is None else [_small(runs, label), f"{seconds_of(runs):,.1f}".replace("nan", "-")]
        rows.append([escape(label), *cells, *small])
    return page.html_table("The table", comparison.words()[0], heads, rows)


def _small(runs: Runs, label: str) -> str:
    """A histogram that fits in a line."""
    shares = histogram(spread(runs, label, 0).values)
    width, top = 96 / len(shares), float(shares.max()) or 1.0
    bars = "".join(
        f'<rect style="fill:{colour(0)}" x="{place * width:.1f}" y="{22 - 22 * share / top:.1f}" '
        f'width="{width - 0.6:.1f}" height="{22 * share / top:.1f}"/>'
        for place, share in enumerate(shares)
        if share
    )
    said = f"distribution of the clients' accuracies with {label}"
    return f'<svg viewBox="0 0 96 22" role="img" aria-label="{escape(said)}">{bars}</svg>'


def _cell(cell: Cell) -> str:
    number = f"<b>{cell.number()}</b>" if cell.bold else cell.number()
    spread = f' <span class="soft">± {cell.plus_minus()}</span>' if cell.plus_minus() else ""
    return f"{number}{spread}<sup>{escape(cell.marks)}</sup>"
