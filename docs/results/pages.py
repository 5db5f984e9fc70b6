"""Write every page and figure beside this file anew from its CSV, and print how long the runs of each table took.

python docs/results/pages.py          nothing is run
python docs/results/pages.py times    the times alone, as in docs/recipes.md
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import evenhand as eh
from evenhand.reproduction import PAGE

HERE = Path(__file__).parent
PART: dict[str, dict[str, Any]] = {  # what was run of each recipe, where that is not all of it
    "adafed-fig2": {"parts": ["CIFAR-10"]},
    "adafed-fig3": {"parts": ["CIFAR-10"]},
    "adafed-fig7": {"parts": ["FEMNIST-skewed"]},
    "adafed-table3": {"parts": ["FEMNIST-skewed"]},
    "adafed-table4": {"parts": ["Set-up 2"], "quirks": "off", "rounds": 20, "seeds": 1},
    "adafed-table13": {"parts": ["FEMNIST-skewed"]},
    "fedfv-fig2": {"parts": ["CIFAR-10"]},
    "fedfv-fig2-mnist": {"parts": ["MNIST"], "quirks": "off", "rounds": 200, "seeds": 2},
    "fedlf-table2": {"quirks": "off"},
    "fedlf-table4": {"quirks": "off", "rounds": 100, "seeds": 1},
    "fedlf-unequal": {"parts": ["FMNIST Pat-2"], "quirks": "on"},
}


def recipe_of(folder: Path) -> str:
    paper, _, name = folder.name.removesuffix("-mnist").partition("-")
    return f"{paper}/{name}"


def write(folder: Path) -> None:
    name, how = recipe_of(folder), PART.get(folder.name, {})
    found = eh.reproduce(name, out=folder, stored=True, **how)
    page = (folder / PAGE).read_text(encoding="utf-8")
    print(f"{folder.name}: {found.missing or 'no'} cells missing, {len(page):,} characters")


def duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def times(*folders: Path) -> str:
    """Of all runs in their CSVs, trials included: their shares of the programs that they trained in, added up."""
    spent: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for folder in folders:
        with (folder / "results.csv").open(newline="", encoding="utf-8") as lines:
            for run in csv.DictReader(lines):
                where = "H200" if "H200" in run["machine"] else "CPU"
                spent[where][run["digest"], run["seed"]] = float(run["seconds"])
    return ", ".join(f"{duration(sum(spent[where].values()))} {where}" for where in ("H200", "CPU") if where in spent)


def folders() -> list[Path]:
    return [folder for folder in sorted(HERE.iterdir()) if (folder / PAGE).is_file()]


if __name__ == "__main__":
    if "times" in sys.argv:
        for place in folders():
            print(f"| {place.name} | {times(place)} |")
        print(f"| all, each run once | {times(*folders())} |")
    else:
        for place in folders():
            write(place)
