"""A reproduced figure as one SVG file that needs nothing else: a chart for every part and what is drawn of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand.recipe import Column, Figure, Part, Row
from evenhand.report.charts import line_chart, scatter_chart
from evenhand.report.sheet import Panel, sheet
from evenhand.report.svg import Line, Point

if TYPE_CHECKING:
    from evenhand.reproduction import Reproduction

Floats = np.ndarray[Any, np.dtype[np.float64]]

SHARES = ("mean", "worst", "best", "min", "max", "client", "pooled_accuracy", "fell")  # between 0 and 1


def drawing(found: Reproduction) -> str:
    """The whole figure."""
    figure = found.recipe.figure
    assert figure is not None
    by_row = figure.lines == "rows"
    names = [row.name for row in found.rows if not row.unavailable] if by_row else list(figure.columns)
    kinds = {"curves": _curves, "distribution": _distributions, "points": _points}
    panels = [
        Panel(", ".join(filter(None, (part.name, found.variant(quirks) if found.recipe.quirky else "", said))), chart)
        for part in found.parts()
        for quirks in found.variants
        for said, chart in kinds[figure.kind](found, figure, part, quirks)
    ]
    played = "; ".join(found.scaled_down()) or f"{len(found.seeds)} seeds"
    of_seeds = (
        "Points: means over the seeds." if _across(found, figure) else "Bands: one standard deviation over the seeds."
    )
    below = (found.recipe.title, f"{played}. {of_seeds}")
    return sheet(f"{found.recipe.paper}, run again", below, panels, [] if figure.kind == "points" else names)


def _drawn(found: Reproduction, figure: Figure) -> list[Column]:
    return [column for column in found.recipe.columns if column.title in figure.columns]


def _across(found: Reproduction, figure: Figure) -> Column | None:
    """The column that points are drawn against; None where they are drawn against a number of their rows."""
    if figure.kind != "points":
        return None
    return next((column for column in found.recipe.columns if column.title == figure.x), None)


def _shown(found: Reproduction, part: Part, quirks: bool) -> Iterator[tuple[int, Row]]:
    """The rows that were run, with their colours."""
    rows = [row for row in found.rows if not row.unavailable]
    return ((n, row) for n, row in enumerate(rows) if (part.name, row.name, quirks) in found.tasks)


def _line(name: str, x: Floats, values: Floats, colour: int, most: float | None = None) -> Line:
    """A line with a band from one row of values a seed, which lie between zero and `most` where that is known."""
    middle = values.mean(axis=0)
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else None
    if spread is None:
        return Line(name, x, middle, colour=colour)
    low, high = middle - spread, middle + spread
    if most is not None:
        low, high = np.maximum(low, 0.0), np.minimum(high, most)
    return Line(name, x, middle, low, high, colour)


def _curves(found: Reproduction, figure: Figure, part: Part, quirks: bool) -> Iterator[tuple[str, str]]:
    columns, rows = _drawn(found, figure), list(_shown(found, part, quirks))
    lines: dict[tuple[str, str], Line] = {}
    for colour, row in rows:
        for place, column in enumerate(columns):
            known = found.curve(part, row, column, quirks)
            if known is not None:
                name, shade = (row.name, colour) if figure.lines == "rows" else (column.title, place)
                share = found.recipe.drawn(quirks)[column.title].partition(":")[0] in SHARES
                lines[row.name, column.title] = _line(name, *known, shade, column.scale if share else None)
    groups = (
        [(column.title, [lines.get((row.name, column.title)) for _, row in rows]) for column in columns]
        if figure.lines == "rows"
        else [(row.name, [lines.get((row.name, column.title)) for column in columns]) for _, row in rows]
    )
    for said, each in groups:
        there = [line for line in each if line is not None]
        if there:
            axis = said if figure.lines == "rows" else ", ".join(figure.columns)
            yield said, line_chart(there, x_title="rounds", y_title=axis)


def _distributions(found: Reproduction, figure: Figure, part: Part, quirks: bool) -> Iterator[tuple[str, str]]:
    shown = [(colour, row, found.clients(part, row, quirks)) for colour, row in _shown(found, part, quirks)]
    lines, bins = [], _bins([one for _, _, known in shown for one in known])
    for colour, row, known in shown:
        if known:
            shares = [np.histogram(np.clip(100.0 * one, 0, 100), bins)[0] / len(one) for one in known]
            lines.append(_line(row.name, (bins[:-1] + bins[1:]) / 2, 100.0 * np.array(shares), colour))
    if lines:
        begin = float(bins[0])
        yield "", line_chart(lines, x_title="accuracy, %", y_title="clients, %", floor=0.0, start=begin)


def _bins(accuracies: Sequence[Floats]) -> Floats:
    """Edges of bins, in percent, from below the lowest accuracy on; narrower where all are high."""
    least = 100.0 * min((float(np.nanmin(one)) for one in accuracies), default=0.0)
    low = max(0.0, 5.0 * (least // 5.0) - 5.0)
    return np.arange(low, 100.1, 2.5 if low >= 50.0 else 5.0)


def _points(found: Reproduction, figure: Figure, part: Part, quirks: bool) -> Iterator[tuple[str, str]]:
    rows, columns = list(_shown(found, part, quirks)), _drawn(found, figure)
    across = _across(found, figure)
    for column in columns:
        if across is not None:
            if column is across:
                continue
            points = []
            for colour, row in rows:
                x, y = (found.cell(part, row, one, quirks).mean for one in (across, column))
                points.append(Point(row.name, x, y, colour, row.name))
            chart = scatter_chart(points, x_title=figure.x, y_title=column.title, from_zero=False, ceiling=np.inf)
            yield column.title, chart
            continue
        there = sorted((row.at, row.name, row) for _, row in rows if row.at is not None)
        if there:
            places = np.array([at for at, _, _ in there])
            values = np.stack([found.values(part, row, column, quirks) for _, _, row in there], axis=1)
            line = _line(column.title, places, values, 0)
            yield column.title, line_chart([line], x_title=figure.x, y_title=column.title, least=0.0)
