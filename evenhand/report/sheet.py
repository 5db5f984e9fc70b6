"""Several charts as one SVG file that needs nothing else: a title, a legend, two charts a row."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from evenhand.report.colours import colour, filled_in
from evenhand.report.svg import HEIGHT, STYLE, WIDTH, dashed

ACROSS = 2
GAP, EDGE, LINE = 24, 20, 20
LETTER = 8.5  # width, of names with many capitals too
FONT = 'font-family="system-ui, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"'


class Panel(NamedTuple):
    """A chart and what stands above it."""

    title: str
    chart: str


def sheet(title: str, below: Sequence[str], panels: Sequence[Panel], names: Sequence[str]) -> str:
    """The file. `below`: lines under the title; `names`: the charts' lines in the order of their colours."""
    across = min(ACROSS, max(1, len(panels)))
    width = 2 * EDGE + across * WIDTH + (across - 1) * GAP
    body = [
        f'<text x="{EDGE}" y="32" style="fill:var(--ink)" font-size="17" font-weight="600">{escape(title)}</text>',
        *(
            f'<text x="{EDGE}" y="{52 + 18 * n}" style="fill:var(--soft)" font-size="13">{escape(line)}</text>'
            for n, line in enumerate(below)
        ),
    ]
    marks, y = _legend(names, width, 56 + 18 * len(below))
    body += marks
    for place, panel in enumerate(panels):
        row, column = divmod(place, across)
        left, top = EDGE + column * (WIDTH + GAP), y + row * (HEIGHT + 2 * LINE)
        said = f'<text x="{left}" y="{top + 12}" style="fill:var(--ink)" font-size="14">{escape(panel.title)}</text>'
        placed = f'<svg x="{left}" y="{top + LINE}" width="{WIDTH}" height="{HEIGHT}" '
        body += [said, panel.chart.replace("<svg ", placed, 1)]
    height = y + -(-len(panels) // across) * (HEIGHT + 2 * LINE) + 4
    return filled_in(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" {FONT}>\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _legend(names: Sequence[str], width: int, y: int) -> tuple[list[str], int]:
    """The lines' names side by side, and where what follows begins."""
    x, marks = float(EDGE), []
    for number, name in enumerate(names):
        wide = 26 + len(name) * LETTER + 18
        if x > EDGE and x + wide > width - EDGE:
            x, y = float(EDGE), y + LINE
        stroke = f'style="stroke:{colour(number)};stroke-width:3"{dashed(number)}'
        marks += [
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4}" y2="{y - 4}" {stroke}/>',
            f'<text x="{x + 24:.0f}" y="{y}" style="fill:var(--ink)" font-size="13">{escape(name)}</text>',
        ]
        x += wide
    return marks, y + LINE if names else y
