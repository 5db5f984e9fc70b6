"""What every page must be: whole, closed, and in need of nothing else but its own script."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import evenhand.report

SCRIPT = (Path(evenhand.report.__file__).parent / "page.js").read_text()
VOID = ("meta", "input", "option")  # HTML closes these by itself


class Tags(HTMLParser):
    """Insists that every tag is closed, and collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: set[str] = set()
        self.handlers: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.fetched
    assert not tags.handlers
    assert re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL) == [SCRIPT]
    assert "default-src 'none'" in text
    for word in ("http:", "https:", "//www", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in text
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing.lower().replace("pan", "")
    return tags
