"""Which rows of FedLF's tables cannot be: python docs/results/angles.py

Accuracies of 100 clients with a given mean, whose five worst and five best have given means, are at least so far apart;
their angle to equal ones has a least value, reached where the ten are two kinds and the other ninety are all alike.
Five runs have means and spreads of these numbers as printed (± half a digit): prints, as a Markdown table, the rows
whose printed angle is smaller than the least mean angle of five such runs.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from evenhand.recipe import find_recipe

TABLES = tuple(f"fedlf/table{number}" for number in (1, 2, 3, 6, 7, 8))
RUNS, TENTH, HALF = 5, 0.05, 0.0005  # 5% of the clients are the worst, 5% the best; half a digit
STARTS = 20

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


def least_angles(mean: Vector, worst: Vector, best: Vector) -> Vector:
    """Of single runs, in radians."""
    middle = (mean - TENTH * (worst + best)) / (1.0 - 2.0 * TENTH)
    square = TENTH * ((mean - worst) ** 2 + (best - mean) ** 2) + (1.0 - 2.0 * TENTH) * (middle - mean) ** 2
    return np.arctan(np.sqrt(square) / mean)


def least_mean_angle(numbers: Vector, spreads: Vector) -> float:
    """Of five runs with these means and spreads of the mean accuracy, the worst 5% and the best 5%."""
    rng = np.random.default_rng(0)

    def runs(flat: Vector) -> Vector:
        return flat.reshape(3, RUNS)

    def inside(flat: Vector) -> Vector:
        found = runs(flat)
        off = HALF - np.abs(found.mean(1) - numbers), HALF - np.abs(found.std(1, ddof=1) - spreads)
        order = found[0] - found[1], found[2] - found[0]  # worst <= mean <= best
        return np.concatenate([*off, *order])

    least = np.inf
    for _ in range(STARTS):
        drawn = rng.standard_normal((3, RUNS))
        drawn = (drawn - drawn.mean(1, keepdims=True)) / drawn.std(1, ddof=1, keepdims=True)
        found = minimize(
            lambda flat: least_angles(*runs(flat)).mean(),
            (numbers[:, None] + spreads[:, None] * drawn).ravel(),
            method="SLSQP",
            bounds=[(0.01, 1.0)] * RUNS + [(0.0, 1.0)] * (2 * RUNS),
            constraints={"type": "ineq", "fun": inside},
            options={"maxiter": 500},
        )
        if inside(found.x).min() > -1e-6:
            least = min(least, float(found.fun))
    return least


def main() -> None:
    print("| table | part | row | mean | worst 5% | best 5% | printed angle | least possible |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    count = 0
    for name in TABLES:
        for row in find_recipe(name).rows:
            for part, numbers in row.numbers.items():
                if None in numbers:
                    continue
                mean, angle, worst, best = (float(number or 0.0) for number in numbers)
                spread = [float(own or 0.0) for own in row.spread[part]]
                count += 1
                if least_angles(*(np.array([own]) for own in (mean, worst, best)))[0] < 0.9 * angle:
                    continue  # far from it
                least = least_mean_angle(np.array([mean, worst, best]), np.array([spread[0], spread[2], spread[3]]))
                if least > angle + HALF:
                    told = [f"{own:.3f}" for own in (mean, worst, best, angle, least)]
                    print(f"| {name} | {part} | {row.name} | {' | '.join(told)} |")
    print(f"\n{count} rows looked at")


if __name__ == "__main__":
    main()
