"""Small charts as SVG text: lines with bands, sorted bars, rates with intervals. Colours are the page's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
COLOURS = 8  # the page defines --c0 to --c7; further lines are dashed
LETTER = 6.4  # width of a letter of a line's name
WIDE_LETTER = 7.2  # of a name that may hold capitals
LONGEST = 32  # letters of a name beside a chart
ROW = 22  # height of a row of a chart with names


@dataclass(frozen=True)
class Line:
    """One line of a chart, with a band around it where it stands for several."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    colour: int = 0


class Point(NamedTuple):
    """One point of a chart, and what is written beside it."""

    name: str
    x: float
    y: float
    colour: int = 0
    said: str = ""


@dataclass(frozen=True)
class Axis:
    """How data become places on the page."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, wanted: int = 5, least: float = 0.0) -> list[float]:
        step = max(nice_step((self.high - self.low) / wanted), least)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def line_chart(
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    floor: float = -math.inf,
    ceiling: float = math.inf,
    least: float = 1.0,
) -> str:
    """Lines over rounds, each named at its end where the chart has few of them. least: from one tick to the next."""
    everything = [values for line in lines for values in (line.y, line.low, line.high) if values is not None]
    low, high = span(everything, floor, ceiling)
    named = len(lines) <= 3 and len(lines) > 1
    margin = RIGHT + (max(len(line.name) for line in lines) * LETTER + 6 if named else 0)
    x = Axis(0.0, max([float(line.x.max()) for line in lines if len(line.x)] + [1.0]), LEFT, WIDTH - margin)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*grid(x, y, x_title, y_title, least=least)]
    parts += [band(line, x, y) for line in lines if line.low is not None and line.high is not None]
    for line in lines:
        dashed = ' stroke-dasharray="6 4"' if line.colour >= COLOURS else ""
        path = path_of(line.x, line.y, x, y)
        if np.isfinite(line.y).sum() == 1:
            parts.append(dot(line, x, y))
            continue
        parts.append(
            f'<path class="line" style="stroke:{colour(line.colour)}"{dashed} d="{path}"><title>{escape(line.name)}'
            "</title></path>"
        )
    if named:
        parts += end_names(lines, x, y)
    return picture(parts, f"{y_title} over {x_title}")


def dot(line: Line, x: Axis, y: Axis) -> str:
    """What a line with a single value is drawn as."""
    (place,) = np.flatnonzero(np.isfinite(line.y))
    at = f'cx="{x.at(float(line.x[place])):.1f}" cy="{y.at(float(line.y[place])):.1f}"'
    return f'<circle style="fill:{colour(line.colour)}" {at} r="3.5"><title>{escape(line.name)}</title></circle>'


def end_names(lines: Sequence[Line], x: Axis, y: Axis) -> Iterable[str]:
    """The lines' names at their ends, pushed apart where they would touch."""
    ends = []
    for line in lines:
        known = np.flatnonzero(np.isfinite(line.y))
        if len(known):
            ends.append((y.at(float(line.y[known[-1]])), line))
    ends.sort(key=lambda end: end[0])
    places: list[float] = []
    for wanted, _ in ends:
        places.append(max(wanted, places[-1] + 14.0) if places else wanted)
    overflow = max(0.0, (places[-1] if places else 0.0) - (HEIGHT - BOTTOM))
    for place, (_, line) in zip(places, ends, strict=True):
        yield (
            f'<text class="name" style="fill:{colour(line.colour)}" x="{x.end + 6:.1f}" y="{place - overflow + 4:.1f}">'
            f"{escape(line.name)}</text>"
        )


def bar_chart(
    heights: Floats, low: Floats | None, high: Floats | None, *, x_title: str, y_title: str, names: Sequence[str] = ()
) -> str:
    """Bars side by side, with a whisker each where they stand for several; the y axis starts at zero."""
    tops = [heights] if high is None else [heights, high]
    _, top = span([*tops, np.zeros(1)], 0.0, 100.0)
    count = len(heights)
    x = Axis(0.0, float(count), LEFT, WIDTH - RIGHT)
    y = Axis(0.0, top, HEIGHT - BOTTOM, TOP)
    width = (x.end - x.start) / count
    gap = min(2.0, width * 0.2)
    parts = [*grid(x, y, x_title, y_title, x_ticks=False)]
    for place, height in enumerate(heights):
        if not math.isfinite(height):
            continue
        left, upper = x.at(place) + gap / 2, y.at(float(height))
        said = f"{names[place]}: " if names else ""
        parts.append(
            f'<rect class="bar" x="{left:.2f}" y="{upper:.1f}" width="{max(width - gap, 0.4):.2f}" '
            f'height="{y.start - upper:.1f}"><title>{escape(said)}{height:.1f}</title></rect>'
        )
        if low is not None and high is not None and high[place] > low[place]:
            middle = left + (width - gap) / 2
            ends = f'y1="{y.at(float(low[place])):.1f}" y2="{y.at(float(high[place])):.1f}"'
            parts.append(f'<line class="whisker" x1="{middle:.2f}" x2="{middle:.2f}" {ends}/>')
    return picture(parts, f"{y_title}, {x_title}")


def interval_chart(
    names: Sequence[str], values: Floats, low: Floats, high: Floats, *, everyone: float, x_title: str
) -> str:
    """A dot and its interval for every name, below each other, and a line where everyone is."""
    x_low, x_high = span([values, low, high, np.array([everyone])], 0.0, 100.0)
    widest = min(max(map(len, names)), LONGEST)
    bottom = TOP + ROW * len(names)
    x = Axis(x_low, x_high, widest * WIDE_LETTER + 14, WIDTH - RIGHT)
    parts = []
    for value in x.ticks():
        at = x.at(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{bottom + 16}">{value:,g}</text>')
    at = x.at(everyone)
    parts.append(
        f'<line class="axis" stroke-dasharray="4 3" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"><title>'
        f"everyone: {everyone:.1f}</title></line>"
    )
    for row, name in enumerate(names):
        y = TOP + ROW * (row + 0.5)
        shown = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
        parts.append(
            f'<text class="tick" text-anchor="end" x="{x.start - 8:.1f}" y="{y + 4:.1f}">{escape(shown)}</text>'
        )
        if not math.isfinite(values[row]):
            continue
        ends = f'x1="{x.at(float(low[row])):.1f}" x2="{x.at(float(high[row])):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        said = f"{name}: {values[row]:.1f} ({low[row]:.1f} .. {high[row]:.1f})"
        parts.append(f'<line class="whisker" {ends}/>')
        parts.append(
            f'<circle class="bar" cx="{x.at(float(values[row])):.1f}" cy="{y:.1f}" r="4"><title>{escape(said)}</title>'
            "</circle>"
        )
    middle = (x.start + x.end) / 2
    parts.append(f'<text class="tick" text-anchor="middle" x="{middle:.1f}" y="{bottom + 32}">{escape(x_title)}</text>')
    return picture(parts, x_title, bottom + 38)


def scatter_chart(
    points: Sequence[Point], *, x_title: str, y_title: str, joined: bool = False, ceiling: float = 100.0
) -> str:
    """Points, named where they say something; those of a colour joined in their order where they follow each other."""
    xs, ys = (np.array([getattr(point, axis) for point in points]) for axis in ("x", "y"))
    low, high = span([xs, np.zeros(1)], 0.0, math.inf)
    x = Axis(low, high, LEFT, WIDTH - RIGHT)
    y = Axis(*span([ys], 0.0, ceiling), HEIGHT - BOTTOM, TOP)
    parts = [*grid(x, y, x_title, y_title)]
    shades = np.array([point.colour for point in points])
    for shade in np.unique(shades).tolist() if joined else []:
        path = path_of(xs[shades == shade], ys[shades == shade], x, y)
        parts.append(f'<path class="line" style="stroke:{colour(shade)};opacity:.4" d="{path}"/>')
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda one: -one.y):
        if not (math.isfinite(point.x) and math.isfinite(point.y)):
            continue
        at, height = x.at(point.x), y.at(point.y)
        said = f"{point.name}: {point.x:.1f}, {point.y:.1f}"
        parts.append(
            f'<circle style="fill:{colour(point.colour)}" cx="{at:.1f}" cy="{height:.1f}" r="4"><title>{escape(said)}'
            "</title></circle>"
        )
        if point.said:
            width = len(point.said) * LETTER
            place = height + 4
            while any(abs(place - other) < 12 and abs(at - beside) < width for beside, other in taken):
                place += 12
            taken.append((at, place))
            left = at + 7 + width < WIDTH
            anchor = f'x="{at + 7:.1f}"' if left else f'text-anchor="end" x="{at - 7:.1f}"'
            style = f'style="fill:{colour(point.colour)}"'
            parts.append(f'<text class="name" {style} {anchor} y="{place:.1f}">{escape(point.said)}</text>')
    return picture(parts, f"{y_title} against {x_title}")


def picture(parts: Iterable[str], said: str, height: int = HEIGHT) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(said)}">\n{body}\n</svg>'


def grid(x: Axis, y: Axis, x_title: str, y_title: str, x_ticks: bool = True, least: float = 1.0) -> Iterable[str]:
    """Axes, light lines and numbers."""
    for value in y.ticks():
        at = y.at(value)
        yield f'<line class="grid" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="tick" text-anchor="end" x="{x.start - 6:.1f}" y="{at + 4:.1f}">{value:,g}</text>'
    for value in x.ticks(6, least=least) if x_ticks else []:  # rounds and percent are whole
        at = x.at(value)
        yield f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{y.start + 16:.1f}">{value:,g}</text>'
    yield f'<line class="axis" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{y.start:.1f}" y2="{y.start:.1f}"/>'
    middle = (x.start + x.end) / 2
    yield f'<text class="tick" text-anchor="middle" x="{middle:.1f}" y="{HEIGHT - 6}">{escape(x_title)}</text>'
    height = (y.start + y.end) / 2
    yield (
        f'<text class="tick" text-anchor="middle" transform="translate(12 {height:.1f}) rotate(-90)">{escape(y_title)}'
        "</text>"
    )


def band(line: Line, x: Axis, y: Axis) -> str:
    assert line.low is not None
    assert line.high is not None
    known = np.isfinite(line.low) & np.isfinite(line.high)
    if not known.any():
        return ""
    there = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in zip(line.x[known], line.high[known], strict=True)]
    back = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in zip(line.x[known], line.low[known], strict=True)]
    return f'<polygon class="band" style="fill:{colour(line.colour)}" points="{" ".join(there + back[::-1])}"/>'


def path_of(xs: Floats, ys: Floats, x: Axis, y: Axis) -> str:
    """A path that is broken where a value is missing."""
    words, pen = [], "M"
    for a, b in zip(xs, ys, strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        words.append(f"{pen}{x.at(float(a)):.1f} {y.at(float(b)):.1f}")
        pen = "L"
    return "".join(words)


def span(values: Iterable[Floats], floor: float, ceiling: float) -> tuple[float, float]:
    """A range that holds all values with a little air, within limits."""
    joined = np.concatenate([np.asarray(entry, dtype=np.float64) for entry in values] or [np.zeros(1)])
    joined = joined[np.isfinite(joined)]
    low, high = (float(joined.min()), float(joined.max())) if len(joined) else (0.0, 1.0)
    air = 0.05 * (high - low) or max(abs(high) * 0.05, 0.5)
    low, high = max(low - air, floor), min(high + air, ceiling)
    return (low, high) if high > low else (low, low + 1.0)


def colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"
