"""One HTML page that needs nothing else: no font, no request, and a small script of its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

from evenhand.report import svg
from evenhand.report.colours import DARK, LIGHT, colour, declared
from evenhand.report.figure import Figure


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def style() -> str:
    """The page's look, on light and on dark screens; on paper always light."""
    return (
        f":root {{ color-scheme: light dark; {declared(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {declared(DARK)} }} }}\n"
        f"{svg.STYLE}{_file('page.css')}"
    )


def page(title: str, body: Sequence[str], scripts: Sequence[str] = (), connect: str = "'none'") -> str:
    """The whole page; `body` is HTML already, the title is not.

    The browser is told to run nothing but the page's own script (and `scripts`, if a server adds any) and to ask
    nobody for anything (but `connect`), whatever the text in it says.
    """
    every = [_file("page.js"), *scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in every)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; connect-src {connect}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n"
        + "\n".join(f"<script>{script}</script>" for script in every)
        + "\n</body>\n</html>\n"
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


def figure(shown: Figure, name: str = "", inside: str = "") -> str:
    """A figure with its title, its sentence and its legend; `inside` is HTML below it."""
    place = f' id="{escape(name)}"' if name else ""
    marks = legend(shown.legend) if shown.legend else ""
    return (
        f'<section{place}>\n<h2>{escape(shown.title)}</h2>\n<p class="soft">{escape(shown.said)}</p>\n{shown.drawing}\n'
        f"{marks}{inside}</section>"
    )


def charts(sections: Sequence[str]) -> str:
    return '<div class="charts">\n' + "\n".join(sections) + "\n</div>"


def legend(entries: Mapping[int, str], kind: str = "", lines: bool = False) -> str:
    """Buttons that bring a series to the front."""
    items = []
    for number, name in entries.items():
        drawn = f'<line class="line" style="stroke:{colour(number)}"{svg.dashed(number)} x2="14" y1="7" y2="7"/>'
        sign = drawn if lines else svg.mark(7, 7, number, radius=4.5)
        items.append(
            f'<button type="button" aria-pressed="false" data-series="{number}">'
            f'<svg viewBox="0 0 14 14" aria-hidden="true">{sign}</svg>{escape(name)}</button>'
        )
    return f'<div class="legend {kind}" role="group" aria-label="what the colours mean">{"".join(items)}</div>'


def table(title: str, said: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A table of plain text; the columns in `words` are flush left."""
    return html_table(title, said, heads, [[escape(cell) for cell in row] for row in rows], words)


def html_table(
    title: str, said: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()
) -> str:
    """A table whose cells are HTML already."""
    kinds = [' class="text"' if place in words else "" for place in range(len(heads))]
    top = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<section class="wide">\n<h2>{escape(title)}</h2>\n<p class="soft">{escape(said)}</p>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table>\n<thead><tr>{top}</tr>'
        f"</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n</section>"
    )


def finder(names: Sequence[str]) -> str:
    """A field that finds a client by name in all charts."""
    options = "".join(f'<option value="{escape(name)}" data-place="{place}">' for place, name in enumerate(names))
    return (
        '<form class="find interactive"><label for="client">Find a client</label><input id="client" list="clients" '
        f'autocomplete="off"><datalist id="clients">{options}</datalist><output></output></form>'
    )


def command(text: str) -> str:
    """A command, with a button that copies it."""
    return (
        f'<div class="command"><code>{escape(text)}</code><button type="button" class="copy interactive">copy</button>'
        "</div>"
    )


def facts(entries: Mapping[str, str]) -> str:
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in entries.items()) + "</dl>"
    )


def details(title: str, text: str, opened: bool = False) -> str:
    return folded(title, f"<pre>{escape(text)}</pre>", opened)


def folded(title: str, html: str, opened: bool = False) -> str:
    """What only some readers want; `html` is HTML already."""
    return f"<details{' open' if opened else ''}>\n<summary>{escape(title)}</summary>\n{html}\n</details>"
