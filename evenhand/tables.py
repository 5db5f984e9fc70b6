"""Tables: aligned text, pandas frames, and listings (methods, models, data sets, partitions) that print as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from evenhand.checks import EvenhandError

Entry = TypeVar("Entry")


class Listing(Sequence[Entry]):
    """A fixed list of entries; subclasses say how they print."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = tuple(entries)

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)


def text_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows of words as aligned text; the columns in `right` are flush right, the last one is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def pandas_or_hint() -> Any:
    """pandas, or how to get it."""
    try:
        import pandas
    except ImportError as missing:
        raise EvenhandError("tables need pandas: pip install 'evenhand[report]' (or pip install pandas)") from missing
    return pandas
