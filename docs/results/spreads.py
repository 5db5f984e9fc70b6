"""How far ours is from a paper's cells where its spread is small: python docs/results/spreads.py fedlf/table1.

Prints of the cells with quirks on how many are within two of the paper's spreads, how many of the others have a
published spread of 0.005 or less, and how many are within two spreads where ours counts, too.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import evenhand as eh
from evenhand.reproduction import WITHIN

SMALL = 0.005


def main(name: str) -> None:
    found = eh.reproduce(name, out=Path(__file__).parent / name.replace("/", "-"), stored=True)
    cells = [cell for _, _, cell in found.cells(True) if cell.paper is not None and cell.spread is not None]
    off = [cell for cell in cells if not cell.within]
    small = [cell for cell in off if cell.spread is not None and cell.spread <= SMALL]
    both = [
        cell
        for cell in cells
        if abs(cell.mean - (cell.paper or 0.0)) <= WITHIN * math.hypot(cell.spread or 0.0, cell.own_spread or 0.0)
    ]
    print(f"{len(cells) - len(off)} of {len(cells)} within two of the paper's spreads")
    print(f"{len(small)} of the other {len(off)} have a published spread of {SMALL} or less")
    print(f"{len(both)} of {len(cells)} within two spreads, the paper's and ours together")


if __name__ == "__main__":
    main(sys.argv[1])
