"""The min-norm point of a hull by each solver: which one is tried first, and why.

Rows are random vectors with more or less of a common part, so that few, some or all of them carry weight.

    python benchmarks/solvers.py
"""

from __future__ import annotations

from functools import partial

import numpy as np
from machine import best_time, provenance

from evenhand import solvers

ROWS = (10, 66, 100, 300, 1000)
COMMON = (0.0, 0.6, 2.4)  # length of the common part beside rows of length one


def hull(rows: int, common: float) -> solvers._Problem:
    rng = np.random.default_rng(rows)
    vectors = rng.standard_normal((rows, 3000))
    vectors += common * rng.standard_normal(3000) * rng.random((rows, 1))
    gram = vectors @ vectors.T
    lengths = np.sqrt(np.diagonal(gram))
    lengths = lengths / lengths.min()
    unit = gram / (np.diagonal(gram).min() * np.outer(lengths, lengths))
    return solvers._Problem(unit, 1.0 / lengths, np.zeros(rows), lengths)


def main() -> None:
    print(provenance())
    print("\n| rows | with weight | pivoting, ms | daqp, ms | nnls, ms |\n|---|---|---|---|---|")
    for rows in ROWS:
        for common in COMMON:
            problem = hull(rows, common)
            with solvers.calm_blas(rows):
                found = solvers._pivoting(problem)
                used = "-" if found is None else int((found > 1e-12).sum())
                choices = (solvers._pivoting, solvers._daqp, solvers._nnls)
                cells = [f"{1e3 * best_time(partial(solve, problem)):.2f}" for solve in choices]
            print(f"| {rows:,} | {used} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
