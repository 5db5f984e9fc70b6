"""The min-norm point of a convex hull, from a Gram matrix alone, over the simplex or a box inside it.

    minimise  w' K w   subject to  sum w = 1,  lower <= w <= upper

Small problems go to DAQP's dual active set, plain simplices above LARGE rows to non-negative least squares,
boxes above LARGE rows to PIQP where it is installed. Every answer is checked against the optimality
conditions of the problem as given (without the ridge that the solvers need); the next solver is tried when
the check fails, and the answer says which one was used and how well it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize

from evenhand.checks import EvenhandError

Floats = np.ndarray[Any, np.dtype[np.float64]]

LARGE = 150  # rows above which an active set is slower than the alternatives
RIDGE = 1e-8  # relative to the mean diagonal; DAQP fails on the barely definite matrices of smaller ones
TOLERANCE = 1e-9  # accepted optimality gap, relative to the mean diagonal


@dataclass(frozen=True)
class MinNorm:
    """Weights, the squared norm they reach, and how far that is from optimal (relative to the mean diagonal)."""

    weights: Floats
    square: float
    gap: float
    solver: str

    @property
    def verified(self) -> bool:
        return self.gap <= TOLERANCE

    def note(self) -> str:
        return f"{self.solver}, optimality gap {self.gap:.1e}" + ("" if self.verified else " (NOT verified)")


def min_norm(gram: Floats, lower: Floats | None = None, upper: Floats | None = None) -> MinNorm:
    """Weights of the hull's point nearest the origin; with bounds, of the box-restricted hull's."""
    rows = len(gram)
    boxed = lower is not None or upper is not None
    low = np.zeros(rows) if lower is None else np.maximum(lower, 0.0)
    high = np.ones(rows) if upper is None else np.minimum(upper, 1.0)
    _check_feasible(low, high)
    scale = float(np.trace(gram)) / rows
    if rows == 1 or scale <= 0.0:
        weights = _inside(np.full(rows, 1.0 / rows), low, high)
        return MinNorm(weights, float(weights @ gram @ weights), 0.0, "closed form")
    normalised = np.ascontiguousarray(gram / scale)
    best: MinNorm | None = None
    for name, solve in _solvers(rows, boxed):
        raw = solve(normalised, low, high)
        if raw is None or not np.isfinite(raw).all():
            continue
        weights, label = _inside(raw, low, high), name
        gap = optimality_gap(normalised, weights, low, high)
        if gap > 1e-14:
            polished = _polish(normalised, weights, low, high)
            polished_gap = optimality_gap(normalised, polished, low, high)
            if polished_gap < gap:
                weights, gap, label = polished, polished_gap, f"{name} polished"
        if best is None or gap < best.gap:
            best = MinNorm(weights, float(weights @ gram @ weights), gap, label)
        if best.verified:
            break
    if best is None:
        raise EvenhandError(f"no solver found the min-norm point of {rows} rows; is the Gram matrix finite?")
    return best


def optimality_gap(gram: Floats, weights: Floats, low: Floats, high: Floats) -> float:
    """How much the linearised objective could still fall: zero exactly at a minimiser (Frank-Wolfe gap)."""
    slope = gram @ weights
    order = np.argsort(slope, kind="stable")
    room = (high - low)[order]
    spent = np.minimum(np.maximum(1.0 - low.sum() - (np.cumsum(room) - room), 0.0), room)
    cheapest = float(low @ slope + spent @ slope[order])
    return max(0.0, float(weights @ slope) - cheapest)


def project_to_simplex(point: Floats) -> Floats:
    """The nearest point of the probability simplex (Euclidean)."""
    descending = np.sort(point)[::-1]
    excess = (np.cumsum(descending) - 1.0) / np.arange(1, len(point) + 1)
    last = np.nonzero(descending > excess)[0][-1]
    return np.maximum(point - excess[last], 0.0)


def _check_feasible(low: Floats, high: Floats) -> None:
    if (low > high + 1e-12).any() or low.sum() > 1.0 + 1e-9 or high.sum() < 1.0 - 1e-9:
        raise EvenhandError(
            f"no weights fit the box: lower bounds add up to {low.sum():.6g}, upper bounds to {high.sum():.6g}, "
            "and 1 must lie between"
        )


def _inside(weights: Floats, low: Floats, high: Floats) -> Floats:
    """Clip rounding errors away and spread what is missing from 1 over the weights that have room."""
    weights = np.clip(weights, low, high)
    for _ in range(3):
        missing = 1.0 - weights.sum()
        room = high - weights if missing > 0 else weights - low
        if abs(missing) < 1e-16 or room.sum() <= 0.0:
            break
        weights = np.clip(weights + missing * room / room.sum(), low, high)
    return weights


def _polish(gram: Floats, weights: Floats, low: Floats, high: Floats) -> Floats:
    """Re-solve exactly for the weights strictly inside their bounds, which removes the ridge's bias."""
    inner = (weights > low + 1e-9) & (weights < high - 1e-9)
    if not inner.any():
        return weights
    fixed = np.where(inner, 0.0, weights)
    system = np.ones((inner.sum() + 1,) * 2)
    system[:-1, :-1] = gram[np.ix_(inner, inner)]
    system[-1, -1] = 0.0
    right = np.append(-(gram[inner] @ fixed), 1.0 - fixed.sum())
    solved = scipy.linalg.lstsq(system, right, cond=1e-14, lapack_driver="gelsy", check_finite=False)[0]
    polished = weights.copy()
    polished[inner] = solved[:-1]
    return _inside(polished, low, high)


Solver = Callable[[Floats, Floats, Floats], Floats | None]


def _solvers(rows: int, boxed: bool) -> Iterator[tuple[str, Solver]]:
    if boxed:
        order: tuple[tuple[str, Solver], ...] = (("daqp", _daqp), ("piqp", _piqp), ("slsqp", _slsqp))
        if rows > LARGE:
            order = (order[1], order[0], order[2])
    else:
        order = (("daqp", _daqp), ("nnls", _nnls), ("piqp", _piqp))
        if rows > LARGE:
            order = (order[1], order[2], order[0])
    yield from order


def _daqp(gram: Floats, low: Floats, high: Floats) -> Floats | None:
    try:
        import daqp
    except ImportError:
        return None
    rows = len(gram)
    sense = np.zeros(rows + 1, dtype=np.int32)
    sense[-1] = 5  # an equality
    weights, _, flag, _ = daqp.solve(
        gram + RIDGE * np.eye(rows),
        np.zeros(rows),
        np.ones((1, rows)),
        np.append(high, 1.0),
        np.append(low, 1.0),
        sense,
        iter_limit=max(1000, 20 * rows),
    )
    return np.asarray(weights) if flag == 1 else None


def _piqp(gram: Floats, low: Floats, high: Floats) -> Floats | None:
    try:
        import piqp
    except ImportError:
        return None
    rows = len(gram)
    solver = piqp.DenseSolver()
    solver.settings.eps_abs, solver.settings.eps_rel = 1e-11, 1e-12
    ones, zeros = np.ones((1, rows)), np.zeros(rows)
    solver.setup(gram + RIDGE * np.eye(rows), zeros, ones, np.ones(1), None, None, None, low, high)
    solved = solver.solve() == piqp.PIQP_SOLVED
    return np.array(solver.result.x) if solved else None


def _nnls(gram: Floats, low: Floats, high: Floats) -> Floats | None:
    """Without a box: min |R w|^2 + (sum w - 1)^2 over w >= 0, whose solution is proportional to the answer."""
    values, vectors = np.linalg.eigh(gram)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    system = np.vstack([root, np.ones(len(gram))])
    try:
        weights, _ = scipy.optimize.nnls(system, np.append(np.zeros(len(gram)), 1.0), maxiter=30 * len(gram))
    except RuntimeError:  # its iteration limit
        return None
    total = weights.sum()
    return weights / total if total > 0 else None


def _slsqp(gram: Floats, low: Floats, high: Floats) -> Floats | None:
    """Last resort for boxes where neither QP library can be imported or neither succeeds."""
    start = _inside(np.full(len(gram), 1.0 / len(gram)), low, high)
    found = scipy.optimize.minimize(
        lambda w: 0.5 * w @ gram @ w,
        start,
        jac=lambda w: gram @ w,
        bounds=list(zip(low, high, strict=True)),
        constraints=[{"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like}],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return np.asarray(found.x)
