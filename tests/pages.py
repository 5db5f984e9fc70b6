"""What every page must be: whole, closed, and in need of nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree


class Tags(HTMLParser):
    """Insists that every tag is closed, and collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
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
    assert "script" not in tags.seen
    assert "http" not in text
    assert "url(" not in text
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing.lower().replace("pan", "")
    return tags
