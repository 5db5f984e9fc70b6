"""What a paper's fairness numbers leave possible: python docs/results/possible.py mfairfl/table1 mfairfl/tableS2.

Given the test rows' share of each group and its share of positives, the largest accuracy that any classifier can have
whose violations stay within a row's DP, EO and AP (each rounded up by 0.0005) is a linear programme over the groups'
true and false positive rates. Prints it beside the paper's accuracies as a Markdown table.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from scipy.optimize import linprog

from evenhand.engine.groups import cells_of
from evenhand.experiment import load_data
from evenhand.recipe import find_recipe

HALF = 0.0005  # a digit's rounding


def best_accuracy(counts: np.ndarray[Any, Any], dp: float, eodds: float, ap: float) -> float:
    """Of any classifier within these bounds; counts: groups x (negatives, positives)."""
    size, groups = counts.sum(), len(counts)
    right = np.zeros(2 * groups)  # of accuracy by (tpr, fpr) of each group, besides a constant
    right[0::2], right[1::2] = counts[:, 1] / size, -counts[:, 0] / size
    constant = counts[:, 0].sum() / size
    above, below = [], []

    def within(row: np.ndarray[Any, Any], offset: float, bound: float) -> None:
        above.extend([row, -row])
        below.extend([bound - offset, bound + offset])

    def unit(group: int, label: int) -> np.ndarray[Any, Any]:
        found = np.zeros(2 * groups)
        found[2 * group + (1 - label)] = 1.0
        return found

    every = {y: sum(counts[g, y] * unit(g, y) for g in range(groups)) / counts[:, y].sum() for y in (0, 1)}
    positive = sum(counts[g, y] * unit(g, y) for g in range(groups) for y in (0, 1)) / size
    for g in range(groups):
        share = counts[g] / counts[g].sum()
        within(share[1] * unit(g, 1) + share[0] * unit(g, 0) - positive, 0.0, dp)
        for y in (0, 1):
            within(unit(g, y) - every[y], 0.0, eodds)
        own = share[1] * unit(g, 1) - share[0] * unit(g, 0)
        within(own - right, share[0] - constant, ap)
    solved = linprog(-right, A_ub=np.array(above), b_ub=np.array(below), bounds=(0.0, 1.0))
    return float(constant - solved.fun)


def main(*names: str) -> None:
    print("| table | data | row | Acc. in the paper | largest possible | always the commoner class |")
    print("|---|---|---|---:|---:|---:|")
    for name in names:
        recipe = find_recipe(name)
        for part in recipe.parts:
            dataset = load_data(recipe.experiment.with_settings(part.settings))
            cells, codes = cells_of(dataset)
            assert cells is not None
            assert codes is not None
            tested = codes[dataset.train_rows or 0 :].numpy()
            counts = np.bincount(tested, minlength=cells.count).reshape(cells.joint, cells.classes).astype(float)
            said = {row.name.split(" (")[0]: row.numbers[part.name] for row in recipe.rows if row.numbers}
            for row, (accuracy, *bounds) in said.items():
                if accuracy is None or None in bounds[:3]:
                    continue
                most = best_accuracy(counts, *(float(bound or 0.0) + HALF for bound in bounds[:3]))
                over = " **above**" if accuracy > most + HALF else ""
                common = counts.sum(0).max() / counts.sum()
                print(f"| {name} | {part.name} | {row} | {accuracy:.3f}{over} | {most:.3f} | {common:.3f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
