"""A figure: a drawing with a name, a title and a sentence; on a page, or as a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evenhand import storage
from evenhand.checks import EvenhandError, near_miss
from evenhand.report import svg
from evenhand.report.colours import filled_in

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
KINDS = (".svg", ".pdf", ".png")
PNG_SCALE = 3.0  # 560 units wide: 1,680 pixels

Shown = TypeVar("Shown")


class Figure(NamedTuple):
    """What a reader sees, and what it shows in a sentence."""

    title: str
    said: str
    drawing: str
    legend: Mapping[int, str] = {}
    """Where colours or shapes mean something that is not written beside them."""


Maker = Callable[[Shown], Figure | None]


def find(makers: Mapping[str, Maker[Shown]], shown: Shown, name: str) -> Figure:
    """A figure by name."""
    if name not in makers:
        raise EvenhandError(f"there is no figure {name!r}{near_miss(name, makers)} (there are {', '.join(makers)})")
    found = makers[name](shown)
    if found is None:
        there = ", ".join(other for other, make in makers.items() if make(shown) is not None)
        raise EvenhandError(f"the figure {name!r} needs something that was not recorded here (there are {there})")
    return found


def check_kind(path: str | Path) -> None:
    """Insist on a kind of file that figures are written as, before anything is computed."""
    suffix = Path(path).suffix
    if suffix not in KINDS:
        raise EvenhandError(f"a figure is written as {', '.join(KINDS)}, not as {str(path)!r}")
    if suffix != ".svg":
        _converter(suffix)


def save(found: Figure, path: str | Path) -> Path:
    """Write a figure; the suffix says how. It looks as on the page, on white."""
    check_kind(path)
    drawing = standalone(found)
    if Path(path).suffix == ".svg":
        data = drawing.encode()
    elif Path(path).suffix == ".pdf":
        data = _converter(".pdf").svg_to_pdf(drawing)
    else:
        data = _converter(".png").svg_to_png(drawing, scale=PNG_SCALE)
    storage.write_bytes(path, data)
    return Path(path)


def standalone(found: Figure) -> str:
    """The drawing as a file of its own: with its namespace, its style and its colours, and nothing interactive."""
    head, _, body = found.drawing.partition(">")
    box = head.split('viewBox="', 1)[1].split('"', 1)[0]
    width, height = map(float, box.split()[2:])
    legend = _legend(found.legend, width, height)
    height += 20 * legend.count("\n")
    style = f"text {{ font-family: {FONT} }}{svg.STYLE}"
    return filled_in(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n<title>{escape(found.title)}</title>\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{body.removesuffix("</svg>")}{legend}</svg>\n'
    )


def _legend(entries: Mapping[int, str], width: float, top: float) -> str:
    """Marks and names in rows below the drawing."""
    rows, x = [""], 20.0
    for number, name in entries.items():
        room = 22 + len(name) * svg.WIDE_LETTER
        if rows[-1] and x + room > width:
            rows.append("")
            x = 20.0
        y = top + 20 * len(rows) - 8
        rows[-1] += svg.mark(x, y - 4, number) + svg.text(name, x + 9, y, kind="note")
        x += room + 8
    return "".join(f"{row}\n" for row in rows if row)


def _converter(suffix: str) -> Any:
    """What turns SVG into PDF and PNG, or how to get it."""
    try:
        import vl_convert
    except ImportError as missing:
        raise EvenhandError(
            f"a figure as {suffix} needs vl-convert-python: pip install 'evenhand[figures]' (or write it as .svg)"
        ) from missing
    return vl_convert
