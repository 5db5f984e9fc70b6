"""The parts of a chart as SVG text: axes, lines, marks, names. Colours are the page's own (`colours`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from evenhand.report.colours import SERIES, colour, letters

Floats = np.ndarray[Any, np.dtype[np.float64]]

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
LETTER = 6.4  # width of a letter of a line's name
WIDE_LETTER = 7.2  # of a name that may hold capitals
LONGEST = 32  # letters of a name beside a chart
ROW = 22  # height of a row of a chart with names
DASHES = ("", "7 3", "2 3", "9 3 2 3")
STYLE = """
.grid { stroke: var(--grid) } .axis { stroke: var(--soft) } .tick { fill: var(--soft); font-size: 12px }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
.band { opacity: .15 } .faint { opacity: .07 } .name { font-size: 12px }
.bar { fill: var(--c0) } .whisker { stroke: var(--ink); stroke-width: 1; opacity: .55 }
.mark { stroke: var(--paper); stroke-width: .6 } .front { fill: none; stroke: var(--soft); stroke-dasharray: 4 3 }
.hit { fill: transparent } .heat { fill: var(--c0) } .light { opacity: .25 } .note { fill: var(--ink); font-size: 12px }
"""


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
    """One point of a chart, with what is written beside it and its intervals where it has any."""

    name: str
    x: float
    y: float
    colour: int = 0
    said: str = ""
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None


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


class LogAxis(Axis):
    """The same for sizes of very different order: equal factors are equal steps."""

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self, wanted: int = 5, least: float = 0.0) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        tens = [10.0**power for power in powers]
        every = tens if len(tens) > 3 else sorted(factor * ten for ten in tens for factor in (1, 2, 5))
        return [value for value in every if self.low <= value <= self.high]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def span(values: Iterable[Floats], floor: float, ceiling: float) -> tuple[float, float]:
    """A range that holds all values with a little air, within limits."""
    joined = np.concatenate([np.asarray(entry, dtype=np.float64) for entry in values] or [np.zeros(1)])
    joined = joined[np.isfinite(joined)]
    low, high = (float(joined.min()), float(joined.max())) if len(joined) else (0.0, 1.0)
    air = 0.05 * (high - low) or max(abs(high) * 0.05, 0.5)
    low, high = max(low - air, floor), min(high + air, ceiling)
    return (low, high) if high > low else (low, low + 1.0)


def picture(parts: Iterable[str], said: str, height: float = HEIGHT) -> str:
    """The chart; a keyboard reaches it, and the page's script then walks over its marks."""
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" tabindex="0" aria-label="{escape(said)}">\n{body}\n</svg>'


def text(
    words: str, x: float, y: float, anchor: str = "start", kind: str = "tick", series: int | None = None, more: str = ""
) -> str:
    style = "" if series is None else f' style="fill:{letters(series)}"'
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}"{style}{at} x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def said(words: str) -> str:
    """What is told of a mark when it is pointed at."""
    return f"<title>{escape(words)}</title>"


def shortened(name: str, most: int = LONGEST) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def grid(
    x: Axis,
    y: Axis,
    x_title: str,
    y_title: str,
    x_ticks: bool = True,
    bottom: float = HEIGHT,
    least: float = 1.0,
) -> Iterable[str]:
    """Axes, light lines and numbers. least: from one tick of the x axis to the next."""
    for value in y.ticks():
        at = y.at(value)
        yield f'<line class="grid" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield text(f"{value:,g}", x.start - 6, at + 4, "end")
    for value in x.ticks(6, least=least) if x_ticks else []:  # rounds, samples and percent are whole
        yield text(f"{value:,g}", x.at(value), y.start + 16, "middle")
    yield f'<line class="axis" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{y.start:.1f}" y2="{y.start:.1f}"/>'
    yield text(x_title, (x.start + x.end) / 2, bottom - 6, "middle")
    height = (y.start + y.end) / 2
    yield (
        f'<text class="tick" text-anchor="middle" transform="translate(12 {height:.1f}) rotate(-90)">{escape(y_title)}'
        "</text>"
    )


def across(x: Axis, top: float, bottom: float, x_title: str) -> Iterable[str]:
    """The axis of a chart whose rows have names: light upright lines, numbers and a title below."""
    for value in x.ticks():
        at = x.at(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top:g}" y2="{bottom:g}"/>'
        yield text(f"{value:,g}", at, bottom + 16, "middle")
    yield text(x_title, (x.start + x.end) / 2, bottom + 32, "middle")


def dashed(number: int) -> str:
    """Lines differ by dash as well as by colour."""
    pattern = DASHES[(number // SERIES + number) % len(DASHES) if number else 0]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def stroke(line: Line, x: Axis, y: Axis) -> str:
    if np.isfinite(line.y).sum() == 1:
        (place,) = np.flatnonzero(np.isfinite(line.y))
        return mark(x.at(float(line.x[place])), y.at(float(line.y[place])), line.colour, said(line.name), 3.5)
    path = path_of(line.x, line.y, x, y)
    style = f'style="stroke:{colour(line.colour)}"{dashed(line.colour)}'
    return f'<path class="line" data-series="{line.colour}" {style} d="{path}">{said(line.name)}</path>'


def band(line: Line, x: Axis, y: Axis, faint: bool = False) -> str:
    assert line.low is not None
    assert line.high is not None
    known = np.isfinite(line.low) & np.isfinite(line.high)
    if not known.any():
        return ""
    there = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in zip(line.x[known], line.high[known], strict=True)]
    back = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in zip(line.x[known], line.low[known], strict=True)]
    style = f'data-series="{line.colour}" style="fill:{colour(line.colour)}"'
    return f'<polygon class="band{" faint" if faint else ""}" {style} points="{" ".join(there + back[::-1])}"/>'


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


def apart(wanted: Sequence[float], least: float, floor: float) -> list[float]:
    """Places in ascending order, pushed apart until none touch, and back where they would leave the chart."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + least) if places else place)
    limit = floor
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - least
    return places


def mark(x: float, y: float, number: int, inside: str = "", radius: float = 4.0, more: str = "") -> str:
    """A point; its colour and its shape say what it belongs to."""
    style = f'class="mark" data-series="{number}" style="fill:{colour(number)}"{more}'
    shape, r = number // SERIES % 4, radius
    if shape == 0:
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="{r:g}">{inside}</circle>'
    corners = {
        1: f"M{x - r:.1f} {y - r:.1f}h{2 * r:g}v{2 * r:g}h{-2 * r:g}z",
        2: f"M{x:.1f} {y - 1.3 * r:.1f}l{1.2 * r:.1f} {2.2 * r:.1f}h{-2.4 * r:.1f}z",
        3: f"M{x:.1f} {y - 1.4 * r:.1f}l{1.3 * r:.1f} {1.4 * r:.1f}l{-1.3 * r:.1f} {1.4 * r:.1f}l{-1.3 * r:.1f} "
        f"{-1.4 * r:.1f}z",
    }
    return f'<path {style} d="{corners[shape]}">{inside}</path>'


def hits(x: Axis, y: Axis, places: Floats, words: Sequence[str]) -> Iterable[str]:
    """Upright strips, one for each place on the axis, that say what stands there."""
    edges = [x.start, *((x.at(a) + x.at(b)) / 2 for a, b in pairwise(places)), x.end]
    for (left, right), told in zip(pairwise(edges), words, strict=True):
        width = max(right - left, 0.0)
        yield (
            f'<rect class="hit" x="{left:.1f}" y="{y.end:.1f}" width="{width:.1f}" height="{y.start - y.end:.1f}">'
            f"{said(told)}</rect>"
        )
