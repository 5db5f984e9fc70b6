"""Charts as SVG text: lines with bands, distributions, points with intervals, heat maps, bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evenhand.report.colours import LEVELS, colour
from evenhand.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER,
    LONGEST,
    RIGHT,
    ROW,
    TOP,
    WIDE_LETTER,
    WIDTH,
    Axis,
    Floats,
    Line,
    LogAxis,
    Point,
    across,
    apart,
    band,
    grid,
    hits,
    mark,
    path_of,
    picture,
    said,
    shortened,
    span,
    stroke,
    text,
)

NAMED = 12  # lines that are named at their ends; of more the legend speaks
NAME = 20  # letters of such a name
BINS = 20  # of a distribution of accuracies


def line_chart(
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    floor: float = -math.inf,
    ceiling: float = math.inf,
    digits: int = 1,
    least: float = 1.0,
    start: float = 0.0,
) -> str:
    """Lines over rounds, or anything else from `start` on, each named at its end where there is room for the names."""
    everything = [values for line in lines for values in (line.y, line.low, line.high) if values is not None]
    low, high = span(everything, floor, ceiling)
    named = 1 < len(lines) <= NAMED
    names = [shortened(line.name, NAME) for line in lines]
    margin = RIGHT + (max(map(len, names)) * WIDE_LETTER + 10 if named else 0)
    ends = [float(line.x.max()) for line in lines if len(line.x)]
    x = Axis(start, max([*ends, start + 1.0]), LEFT, WIDTH - margin)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*grid(x, y, x_title, y_title, least=least)]
    faint = len(lines) > 3
    parts += [band(line, x, y, faint) for line in lines if line.low is not None and line.high is not None]
    parts += [stroke(line, x, y) for line in lines]
    if named:
        parts += _end_names(lines, x, y)
    longest = max(lines, key=lambda line: len(line.x), default=None)
    if longest is not None and len(longest.x):
        parts += hits(x, y, longest.x, _told(lines, longest.x, x_title, digits))
    return picture(parts, f"{y_title} over {x_title}: {', '.join(line.name for line in lines)}")


def _told(lines: Sequence[Line], places: Floats, x_title: str, digits: int) -> list[str]:
    """What each place of a line chart says: every line's value there."""
    found = []
    for number, place in enumerate(places):
        values = [(line.name, line.y[number]) for line in lines if number < len(line.y)]
        values.sort(key=lambda entry: -entry[1] if math.isfinite(entry[1]) else math.inf)
        told = [f"{name} {value:,.{digits}f}" if math.isfinite(value) else f"{name} -" for name, value in values]
        found.append(f"{x_title.removesuffix('s')} {place:,g}\n" + "\n".join(told))
    return found


def _end_names(lines: Sequence[Line], x: Axis, y: Axis) -> list[str]:
    """The lines' names at their ends, pushed apart where they would touch."""
    ends = []
    for line in lines:
        known = np.flatnonzero(np.isfinite(line.y))
        if len(known):
            ends.append((y.at(float(line.y[known[-1]])), line))
    ends.sort(key=lambda end: end[0])
    places = apart([place for place, _ in ends], 14.0, HEIGHT - BOTTOM)
    return [
        text(
            shortened(line.name, NAME), x.end + 6, at + 4, kind="name", series=line.colour,
            more=f' data-series="{line.colour}"',
        )
        for at, (_, line) in zip(places, ends, strict=True)
    ]  # fmt: skip


def bar_chart(
    heights: Floats,
    *,
    names: Sequence[str],
    x_title: str,
    y_title: str,
    low: Floats | None = None,
    high: Floats | None = None,
) -> str:
    """Bars side by side, with a whisker each where they stand for several; the y axis starts at zero."""
    tops = [heights] if high is None else [heights, high]
    _, top = span([*tops, np.zeros(1)], 0.0, 100.0)
    count = len(heights)
    x = Axis(0.0, float(count), LEFT, WIDTH - RIGHT)
    y = Axis(0.0, top, HEIGHT - BOTTOM, TOP)
    width = (x.end - x.start) / count
    gap = min(12.0, width * 0.2)
    parts = [*grid(x, y, x_title, y_title, x_ticks=False)]
    for place, height in enumerate(heights):
        if not math.isfinite(height):
            continue
        left, upper = x.at(place) + gap / 2, y.at(float(height))
        parts.append(
            f'<rect class="bar" x="{left:.2f}" y="{upper:.1f}" '
            f'width="{max(width - gap, 0.4):.2f}" height="{y.start - upper:.1f}">'
            f"{said(f'{names[place]}: {height:.1f}')}</rect>"
        )
        middle = left + (width - gap) / 2
        if low is not None and high is not None and high[place] > low[place]:
            ends = f'y1="{y.at(float(low[place])):.1f}" y2="{y.at(float(high[place])):.1f}"'
            parts.append(f'<line class="whisker" x1="{middle:.2f}" x2="{middle:.2f}" {ends}/>')
        parts.append(text(shortened(names[place], max(3, int(width / LETTER))), middle, y.start + 16, "middle"))
    return picture(parts, f"{y_title}, {x_title}")


class Spread(NamedTuple):
    """The accuracies of one method's clients in percent, for a distribution."""

    name: str
    values: Floats
    mean: float
    worst: float
    colour: int = 0


def histogram(values: Floats) -> Floats:
    """The share in percent of values in each bin from 0 to 100."""
    known = values[np.isfinite(values)]
    counts, _ = np.histogram(np.clip(known, 0.0, 100.0), bins=BINS, range=(0.0, 100.0))
    return 100.0 * counts / max(len(known), 1)


def distribution_chart(spreads: Sequence[Spread], *, x_title: str, tail: str) -> str:
    """Histograms of the clients' accuracies, one above the other on the same axis, with mean and worst few marked."""
    single = len(spreads) == 1
    row = 190.0 if single else max(46.0, min(70.0, 420.0 / len(spreads)))
    names = [shortened(spread.name, NAME) for spread in spreads]
    left = LEFT if single else max(map(len, names)) * WIDE_LETTER + 14
    bottom = TOP + row * len(spreads)
    x = Axis(0.0, 100.0, left, WIDTH - RIGHT - 4)
    parts = [*across(x, TOP, bottom, x_title)]
    shares = [histogram(spread.values) for spread in spreads]
    highest = max(float(share.max()) for share in shares) or 1.0
    for place, (spread, share) in enumerate(zip(spreads, shares, strict=True)):
        base = TOP + row * (place + 1)
        y = Axis(0.0, highest, base, base - row + 20)
        if single:
            parts += [text(f"{value:g}%", left - 6, y.at(value) + 4, "end") for value in y.ticks(4)]
        else:
            parts.append(text(names[place], left - 8, base - 6, "end", "name", spread.colour))
        for number, height in enumerate(share):
            if height:
                here = x.at(100.0 * number / BINS), y.at(float(height))
                low, high = 100 * number // BINS, 100 * (number + 1) // BINS
                told = f"{spread.name}: {height:.1f}% of the clients are at {low} to {high}%"
                parts.append(
                    f'<rect data-series="{spread.colour}" style="fill:{colour(spread.colour)}" x="{here[0] + 0.5:.1f}" '
                    f'y="{here[1]:.1f}" width="{x.at(100 / BINS) - x.start - 1:.1f}" height="{base - here[1]:.1f}">'
                    f"{said(told)}</rect>"
                )
        parts.append(f'<line class="axis" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{base:.1f}" y2="{base:.1f}"/>')
        parts += _pointers(spread, x, base - row + 4, base, tail, shown=single or place == 0)
    return picture(parts, f"distribution of {x_title}: {', '.join(spread.name for spread in spreads)}", bottom + 38)


def _pointers(spread: Spread, x: Axis, top: float, base: float, tail: str, shown: bool) -> list[str]:
    """Where the mean and the worst few stand."""
    found = []
    words = ((spread.mean, "mean"), (spread.worst, f"worst {tail}"))
    room = abs(x.at(spread.mean) - x.at(spread.worst)) > 90
    for number, (value, word) in enumerate(words):
        at = x.at(value)
        dashes = ' stroke-dasharray="3 3"' if number else ""
        told = said(f"{spread.name}: {word} {value:.1f}%")
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{base:.1f}"'
        found.append(f'<line class="whisker"{dashes} {ends}>{told}</line>')
        label = f"{word} {value:.1f}"
        before = at - len(label) * LETTER > x.start if number else at + len(label) * LETTER > x.end
        if shown and (room or number == 0):  # the worst few are named to their left, the mean to its right
            found.append(text(label, at + (-4 if before else 4), top + 8, "end" if before else "start", "note"))
    return found


def interval_chart(
    names: Sequence[str], values: Floats, low: Floats, high: Floats, *, everyone: float, x_title: str
) -> str:
    """A dot and its interval for every name, below each other, and a line where everyone is."""
    x_low, x_high = span([values, low, high, np.array([everyone])], 0.0, 100.0)
    widest = min(max(map(len, names)), LONGEST)
    bottom = TOP + ROW * len(names)
    x = Axis(x_low, x_high, widest * WIDE_LETTER + 14, WIDTH - RIGHT)
    parts = [*across(x, TOP, bottom, x_title)]
    at = x.at(everyone)
    parts.append(
        f'<line class="axis" stroke-dasharray="4 3" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}">'
        f"{said(f'everyone: {everyone:.1f}')}</line>"
    )
    for row, name in enumerate(names):
        y = TOP + ROW * (row + 0.5)
        parts.append(text(shortened(name), x.start - 8, y + 4, "end"))
        if not math.isfinite(values[row]):
            continue
        ends = f'x1="{x.at(float(low[row])):.1f}" x2="{x.at(float(high[row])):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        told = said(f"{name}: {values[row]:.1f} ({low[row]:.1f} .. {high[row]:.1f})")
        parts.append(f'<line class="whisker" {ends}/>')
        parts.append(mark(x.at(float(values[row])), y, 0, told))
    return picture(parts, x_title, bottom + 38)


def row_bars(names: Sequence[str], values: Floats, words: Sequence[str], *, x_title: str) -> str:
    """A bar from zero for every name, below each other, with its value in words at its end."""
    widest, longest = min(max(map(len, names)), LONGEST), max(map(len, words))
    bottom = TOP + ROW * len(names)
    _, top = span([values, np.zeros(1)], 0.0, math.inf)
    x = Axis(0.0, top, widest * WIDE_LETTER + 14, WIDTH - RIGHT - longest * WIDE_LETTER)
    parts = [*across(x, TOP, bottom, x_title)]
    for row, (name, value, told) in enumerate(zip(names, values, words, strict=True)):
        y = TOP + ROW * row
        parts.append(text(shortened(name), x.start - 8, y + 15, "end", "name", row))
        if math.isfinite(value):
            style = f'data-series="{row}" style="fill:{colour(row)}"'
            parts.append(
                f'<rect {style} x="{x.start:.1f}" y="{y + 4}" width="{x.at(float(value)) - x.start:.1f}" '
                f'height="{ROW - 8}">{said(f"{name}: {told}")}</rect>'
            )
            parts.append(text(told, x.at(float(value)) + 5, y + 15))
    return picture(parts, x_title, bottom + 38)


def scatter_chart(
    points: Sequence[Point],
    *,
    x_title: str,
    y_title: str,
    joined: bool = False,
    front: Sequence[Point] = (),
    from_zero: bool = True,
    ceiling: float = 100.0,
) -> str:
    """Points, named where they say something; those of a colour joined in their order where they follow each other.

    front: the points that no other beats, joined by steps.
    """
    xs, ys = (np.array([getattr(point, axis) for point in points]) for axis in ("x", "y"))
    reach = [np.array(ends) for point in points for ends in [point.x_interval] if ends is not None]
    heights = [np.array(ends) for point in points for ends in [point.y_interval] if ends is not None]
    x = Axis(*span([xs, *reach, *([np.zeros(1)] if from_zero else [])], 0.0, math.inf), LEFT, WIDTH - RIGHT)
    y = Axis(*span([ys, *heights], 0.0, ceiling), HEIGHT - BOTTOM, TOP)
    parts = [*grid(x, y, x_title, y_title)]
    shades = np.array([point.colour for point in points])
    for shade in np.unique(shades).tolist() if joined else []:
        path = path_of(xs[shades == shade], ys[shades == shade], x, y)
        parts.append(f'<path class="line" style="stroke:{colour(shade)};opacity:.4" d="{path}"/>')
    if len(front) > 1:
        parts.append(_steps(front, x, y))
    placed = [point for point in points if math.isfinite(point.x) and math.isfinite(point.y)]
    parts += [_cross(point, x, y) for point in placed]
    taken: list[tuple[float, float, float]] = []
    for point in sorted(placed, key=lambda one: -one.y):
        at, height = x.at(point.x), y.at(point.y)
        parts.append(mark(at, height, point.colour, said(f"{point.name}: {point.x:.1f}, {point.y:.1f}")))
        if point.said:
            width = len(point.said) * WIDE_LETTER
            right = at + 9 + width < WIDTH
            start, place = (at + 8 if right else at - 8 - width), height - 6
            while any(abs(place - other) < 13 and start < end and begin < start + width for begin, end, other in taken):
                place += 13
            taken.append((start, start + width, place))
            parts.append(
                text(point.said, start, place, kind="name", series=point.colour, more=f' data-series="{point.colour}"')
            )
    return picture(parts, f"{y_title} against {x_title}: {', '.join(point.name for point in placed[:40])}")


def _cross(point: Point, x: Axis, y: Axis) -> str:
    """The intervals of a point, as far as they are inside the chart."""
    parts = []
    style = f'data-series="{point.colour}" style="stroke:{colour(point.colour)};opacity:.6"'
    if point.x_interval is not None:
        low, high = (x.at(min(max(value, x.low), x.high)) for value in point.x_interval)
        at = y.at(point.y)
        parts.append(f'<line {style} x1="{low:.1f}" x2="{high:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
    if point.y_interval is not None:
        low, high = (y.at(min(max(value, y.low), y.high)) for value in point.y_interval)
        at = x.at(point.x)
        parts.append(f'<line {style} x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
    return "".join(parts)


def _steps(front: Sequence[Point], x: Axis, y: Axis) -> str:
    """The front from its left end to its right: what a method off it could at best have had."""
    path, before = "", None
    for point in sorted(front, key=lambda one: one.x):
        at, height = x.at(point.x), y.at(point.y)
        path += f"M{at:.1f} {height:.1f}" if before is None else f"L{at:.1f} {before:.1f}L{at:.1f} {height:.1f}"
        before = height
    return f'<path class="front" d="{path}">{said("the Pareto front: no method is better in both")}</path>'


class Client(NamedTuple):
    """One client of a cloud of points."""

    place: int | None
    """The number that the charts share; None for a client that no other chart shows."""
    size: float
    accuracy: float
    group: int
    told: str


def cloud_chart(clients: Sequence[Client], *, x_title: str, y_title: str) -> str:
    """Every client as a point: how well it is served against how much data it has."""
    sizes = np.array([max(client.size, 1.0) for client in clients])
    many = len(clients) > 400
    wide = len(sizes) and sizes.max() / sizes.min() > 20.0
    low, high = (float(sizes.min()) * 0.85, float(sizes.max()) * 1.15) if len(sizes) else (1.0, 2.0)
    x: Axis = LogAxis(low, high, LEFT, WIDTH - RIGHT)
    if not wide:
        x = Axis(*span([sizes], 0.0, math.inf), LEFT, WIDTH - RIGHT)
    y = Axis(*span([np.array([client.accuracy for client in clients])], 0.0, 100.0), HEIGHT + 60 - BOTTOM, TOP)
    parts = [*grid(x, y, x_title, y_title, bottom=HEIGHT + 60)]
    steps = np.diff([x.at(float(size)) for size in np.unique(sizes)])
    reach = min(max(0.25 * float(steps.min()), 2.0), 40.0) if len(steps) else 40.0
    shifts = np.random.default_rng(0).uniform(-1.0, 1.0, (len(clients), 2))  # equal clients lie beside each other
    for client, size, (right, up) in zip(clients, sizes, shifts, strict=True):
        at = min(max(x.at(float(size)) + reach * right, x.start), x.end)
        height = min(max(y.at(client.accuracy) + 3.0 * up, TOP), y.start)
        more = "" if client.place is None else f' data-client="{client.place}"'
        parts.append(mark(at, height, client.group, said(client.told), 2.6 if many else 4.2, more))
    return picture(parts, f"{y_title} against {x_title}, {len(clients)} clients", HEIGHT + 60)


def heat_chart(
    shades: Floats,
    row_names: Sequence[str],
    column_names: Sequence[str],
    *,
    x_title: str,
    y_title: str,
    told: Sequence[str],
    by_row: bool = True,
    most: float | None = None,
    row_clients: Sequence[int] | None = None,
) -> str:
    """Shades from nothing to everything, rows x columns; `told` says something of every row, or of every column.

    The squares of a shade are one path, so that thousands of them are a small page.
    """
    rows, columns = shades.shape
    height = max(4.0, min(36.0, 330.0 / rows))
    names = [shortened(name, NAME) for name in row_names]
    left = max(LEFT, max(map(len, names), default=1) * WIDE_LETTER + 24)
    bottom = TOP + rows * height
    x, y = Axis(0.0, columns, left, WIDTH - RIGHT), Axis(0.0, rows, TOP, bottom)
    width = (x.end - x.start) / columns
    top = most if most is not None else float(np.nanmax(shades, initial=0.0))
    levels = np.ceil(np.nan_to_num(shades) / (top or 1.0) * LEVELS - 1e-9).clip(0, LEVELS).astype(int)
    parts = []
    gap = 0.6 if width > 4 and height > 4 else 0.0
    for level in range(1, LEVELS + 1):
        squares = np.argwhere(levels == level)
        path = "".join(
            f"M{x.at(column):.1f} {y.at(row):.1f}h{width - gap:.2f}v{height - gap:.2f}h{gap - width:.2f}z"
            for row, column in squares
        )
        if path:
            parts.append(f'<path class="heat" style="opacity:{level / LEVELS:.2f}" d="{path}"/>')
    every = max(1, math.ceil(13.0 / height))
    for row in range(rows):
        if names[row] and (row % every == 0 or not names[row - 1]):
            parts.append(text(names[row], left - 6, y.at(row + 0.5) + 4, "end"))
    widest = max(map(len, column_names), default=1) * LETTER + 8
    step = max(1, math.ceil(widest / width))
    for column in range(0, columns, step):
        if column_names[column]:
            parts.append(text(column_names[column], x.at(column + 0.5), bottom + 15, "middle"))
    parts += [
        f'<line class="axis" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>',
        text(x_title, (x.start + x.end) / 2, bottom + 32, "middle"),
    ]
    if bottom - TOP > len(y_title) * LETTER:
        parts.append(
            f'<text class="tick" text-anchor="middle" transform="translate(12 {(TOP + bottom) / 2:.1f}) rotate(-90)">'
            f"{y_title}</text>"
        )
    for place, words in enumerate(told):
        box = (x.start, y.at(place), x.end - x.start, height) if by_row else (x.at(place), TOP, width, bottom - TOP)
        client = "" if row_clients is None else f' data-client="{row_clients[place]}"'
        parts.append(
            f'<rect class="hit"{client} x="{box[0]:.1f}" y="{box[1]:.1f}" width="{box[2]:.1f}" height="{box[3]:.1f}">'
            f"{said(words)}</rect>"
        )
    return picture(parts, f"{x_title} by {y_title}", bottom + 38)


def pareto_front(points: Sequence[Any]) -> list[Any]:
    """Of points whose x is better low and whose y is better high, those that no other beats."""
    return [
        one
        for one in points
        if not any(other.x <= one.x and other.y >= one.y and (other.x < one.x or other.y > one.y) for other in points)
    ]
