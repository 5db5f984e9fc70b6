"""What one row of a table has more than others, in each part and over all of them (paired t-tests over the seeds).

python docs/results/pairs.py fedlf/table2 even                    against every other row, quirks off
python docs/results/pairs.py fedlf/table2 even FedLF FedAvg       against these
python docs/results/pairs.py fedlf/unequal FedLF --quirks
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import evenhand as eh
from evenhand.fairness import paired_test
from evenhand.reproduction import Reproduction
from evenhand.reruns import CSV

HERE = Path(__file__).parent


def values(found: Reproduction, row: str, part: str, quirks: bool) -> list[np.ndarray]:
    """What a row has under each seed, a column after the other; nothing where it was not run."""
    cells = [cell for here, name, cell in found.cells(quirks) if (here.name, name.name) == (part, row)]
    return [cell.values for cell in cells if len(cell.values) == len(found.seeds)]


def main(name: str, row: str, others: Sequence[str], quirks: bool) -> None:
    stored = HERE / name.replace("/", "-") / CSV
    with TemporaryDirectory() as folder:  # the page beside the CSV stays as it is
        shutil.copy(stored, folder)
        found = eh.reproduce(name, out=folder, stored=True, quirks="on" if quirks else "off")
    columns = [column.title for column in found.recipe.columns]
    print(
        f"| {row} less | part | {' | '.join(f'{title} | p' for title in columns)} |\n|{'---|' * (2 + 2 * len(columns))}"
    )
    for other in others or [entry.name for entry in found.rows if entry.name != row]:
        pairs = {}
        for part in found.parts():
            ours, theirs = (values(found, one, part.name, quirks) for one in (row, other))
            if ours and theirs:
                pairs[part.name] = ours, theirs
        if len(pairs) > 1:
            pairs[f"all {len(pairs)}"] = tuple(
                [np.concatenate(column) for column in zip(*side, strict=True)]
                for side in zip(*pairs.values(), strict=True)
            )
        for part, (ours, theirs) in pairs.items():
            tests = [paired_test(one, two) for one, two in zip(ours, theirs, strict=True)]
            told = [f"{test.difference:+.4f} | {'-' if test.p is None else f'{test.p:.4f}'}" for test in tests]
            print(f"| {other} | {part} | {' | '.join(told)} |")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--quirks"]
    main(words[0], words[1], words[2:], "--quirks" in sys.argv)
