"""One HTML page that needs nothing else: no script, no font, no request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from evenhand.report.svg import COLOURS, colour

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2126; --soft: #5a646e; --grid: #e4e7eb; --tile: #f5f6f8;
  --c0: #1f6fb0; --c1: #cf5f0a; --c2: #2a862a; --c3: #c8242b; --c4: #7f52b8; --c5: #7d4a3f;
  --c6: #0c8a91; --c7: #5f6874 }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e7eaed; --soft: #a0a9b2; --grid: #2c333a;
  --tile: #1d2329; --c0: #6db3e8; --c1: #ffa557; --c2: #62c462; --c3: #ff7f7f; --c4: #bd9ae6; --c5: #cfa898;
  --c6: #4fd0d6; --c7: #b0b8c1 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px } h2 { font-size: 16px; margin: 0 0 2px }
p { margin: 6px 0 } .soft { color: var(--soft) } .lead { font-size: 17px; margin: 18px 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0 26px }
.tile { background: var(--tile); border-radius: 8px; padding: 12px 14px }
.tile b { display: block; font-size: 24px; font-weight: 600; line-height: 1.3 } .tile small { color: var(--soft) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 30px 36px }
section { min-width: 0 } section.wide, .wide + .charts { margin-top: 34px }
svg { display: block; width: 100%; height: auto; margin-top: 6px }
.grid { stroke: var(--grid) } .axis { stroke: var(--soft) } .tick { fill: var(--soft); font-size: 12px }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .band { opacity: .16 } .name { font-size: 12px }
.bar { fill: var(--c0) } .whisker { stroke: var(--ink); stroke-width: 1; opacity: .55 }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 20px 0 14px; padding: 8px 0; position: sticky; top: 0;
  background: var(--paper) }
.legend i { display: inline-block; width: 18px; border-top: 3px solid; vertical-align: middle; margin-right: 6px }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums }
th, td { padding: 5px 16px 5px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap }
sup { display: inline-block; width: 1.2em; text-align: left; line-height: 0 }
.words td:last-child, .words th:last-child { text-align: left; white-space: normal; min-width: 22em }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left }
@media (max-width: 600px) { .tick { font-size: 15px } .name { font-size: 14px } .tile b { font-size: 20px } }
details { margin-top: 34px } summary { cursor: pointer; font-weight: 600 }
pre { background: var(--tile); border-radius: 8px; padding: 14px; overflow-x: auto; font-size: 13px; line-height: 1.45 }
"""


def page(title: str, body: Sequence[str]) -> str:
    """The whole page; `body` is HTML already, the title is not."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n"
        "</html>\n"
    )


def head(title: str, below: str) -> str:
    return f'<header>\n<h1>{escape(title)}</h1>\n<p class="soft">{escape(below)}</p>\n</header>'


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind!r}' if kind else ''}>{escape(text)}</p>"


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Numbers to see first: value, what it is, and a word beside the value."""
    cells = [
        f'<div class="tile"><b>{escape(value)} <small>{escape(beside)}</small></b>{escape(said)}</div>'
        for value, beside, said in entries
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def chart(title: str, said: str, drawing: str) -> str:
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="soft">{escape(said)}</p>\n{drawing}\n</section>'


def charts(sections: Sequence[str]) -> str:
    return '<div class="charts">\n' + "\n".join(sections) + "\n</div>"


def legend(names: Sequence[str]) -> str:
    items = []
    for number, name in enumerate(names):
        dashed = ";border-top-style:dashed" if number >= COLOURS else ""
        items.append(f'<span><i style="border-color:{colour(number)}{dashed}"></i>{escape(name)}</span>')
    return f'<div class="legend">{"".join(items)}</div>'


def table(title: str, said: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text."""
    return html_table(title, said, heads, [[escape(cell) for cell in row] for row in rows])


def html_table(title: str, said: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are HTML already."""
    top = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section class="wide">\n<h2>{escape(title)}</h2>\n<p class="soft">{escape(said)}</p>\n<div class="scroll">'
        f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n</section>"
    )


def details(title: str, text: str) -> str:
    return f"<details>\n<summary>{escape(title)}</summary>\n<pre>{escape(text)}</pre>\n</details>"
