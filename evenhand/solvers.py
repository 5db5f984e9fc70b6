"""The min-norm point of a convex hull, from a Gram matrix alone, over the simplex or a box inside it.

    minimise  w' K w   subject to  sum w = 1,  lower <= w <= upper

Plain simplices go to block principal pivoting; where that fails, and for boxes, to DAQP's dual active set, above LARGE
rows to non-negative least squares and to PIQP where it is installed. Every answer is checked against the optimality
conditions of the problem as given (without the ridge that the solvers need); the next solver is tried when
the check fails, and the answer says which one was used and how well it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError

Floats = np.ndarray[Any, np.dtype[np.float64]]

CALM = range(32, 301)  # rows for which numpy's BLAS would start threads and does better with one
LARGE = 150  # rows above which an active set is slower than the alternatives
PIVOTS = 20  # more rounds of pivoting than this take longer than the alternatives
RIDGE = 1e-8  # on rows of unit length; DAQP fails on the barely definite matrices of smaller ones
SHARP = 1e-13  # a gap that needs no further work
TOLERANCE = 1e-9  # accepted optimality gap, relative to the shortest row (or the answer, where that is longer)


@cache
def _blas() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:  # it only saves time
        return None
    return ThreadpoolController().select(user_api="blas")


def calm_blas(rows: int) -> AbstractContextManager[Any]:
    """One thread for numpy's BLAS while matrices are small: idle BLAS threads spin, and slow torch's own down."""
    controller = _blas() if rows in CALM else None
    return nullcontext() if controller is None else controller.limit(limits=1)


@dataclass(frozen=True)
class MinNorm:
    """Weights, the squared norm they reach, and how far that is from optimal (relative, see TOLERANCE)."""

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
    """Weights of the hull's point nearest the origin; with bounds, of the box-restricted hull's.

    The solvers see rows of equal length (their weights absorb the lengths), so that short rows, which decide
    where the nearest point lies, are not lost beside long ones.
    """
    rows = len(gram)
    boxed = lower is not None or upper is not None
    low = np.zeros(rows) if lower is None else np.maximum(lower, 0.0)
    high = np.ones(rows) if upper is None else np.minimum(upper, 1.0)
    if boxed:
        _check_feasible(low, high)
    squares: Floats = np.diagonal(gram)
    if not np.isfinite(squares).all():
        raise EvenhandError("the Gram matrix holds NaN or Inf; leave such rows out")
    still = squares <= 0.0
    if rows == 1 or still.all() or (still.any() and not boxed):
        start = still / still.sum() if still.any() else np.ones(rows)
        return MinNorm(_inside(start, low, high), 0.0 if still.any() else float(gram[0, 0]), 0.0, "closed form")
    shortest = float(squares[~still].min())
    lengths = np.sqrt(np.where(still, shortest, squares) / shortest)
    problem = _Problem(gram / (shortest * lengths[:, None] * lengths), 1.0 / lengths, low * lengths, high * lengths)
    norms = np.sqrt(np.maximum(squares, 0.0))
    best: MinNorm | None = None
    for name, solve in _solvers(rows, boxed):
        scaled = solve(problem)
        if scaled is None or not np.isfinite(scaled).all():
            continue
        for label, point in _candidates(name, problem, scaled):
            weights = _inside(point / lengths, low, high) if boxed else _on_simplex(point / lengths)
            slope = gram @ weights
            square = float(weights @ slope)
            noise = 1e-15 * float(norms.max()) * float(weights @ norms)
            left = optimality_gap(slope, weights, (low, high) if boxed else None)
            gap = max(0.0, left - noise) / max(shortest, square)
            if best is None or gap < best.gap:
                best = MinNorm(weights, square, gap, label)
            if best.gap <= SHARP:
                return best
        if best is not None and best.verified:
            return best
    if best is None:
        raise EvenhandError(f"no solver found the min-norm point of {rows} rows; is daqp installed?")
    return best


def optimality_gap(slope: Floats, weights: Floats, box: tuple[Floats, Floats] | None = None) -> float:
    """How much the linearised objective could still fall: zero exactly at a minimiser (Frank-Wolfe gap).

    slope: gram @ weights. box: lower and upper bounds; None is the simplex.
    """
    if box is None:
        return max(0.0, float(weights @ slope) - float(slope.min()))
    low, high = box
    order = np.argsort(slope, kind="stable")
    room = (high - low)[order]
    spent = np.minimum(np.maximum(1.0 - low.sum() - (np.cumsum(room) - room), 0.0), room)
    cheapest = float(low @ slope + spent @ slope[order])
    return max(0.0, float(weights @ slope) - cheapest)


def submatrix(matrix: Floats, which: np.ndarray[Any, Any]) -> Floats:
    """Some rows of a square matrix, or of each of several, and the same columns (faster than indexing by pairs)."""
    return matrix.take(which, axis=-2).take(which, axis=-1)


def project_to_simplex(point: Floats) -> Floats:
    """The nearest point of the probability simplex (Euclidean)."""
    point = point - point.max()  # adding a constant changes nothing, and keeps the 1 below from being rounded away
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


def _on_simplex(weights: Floats) -> Floats:
    """Clip rounding errors away; weights add up to one."""
    weights = np.maximum(weights, 0.0)
    total = float(weights.sum())
    return weights / total if total > 0.0 else np.full(len(weights), 1.0 / len(weights))


def _inside(weights: Floats, low: Floats, high: Floats) -> Floats:
    """Clip rounding errors away and spread what is missing from 1 over the weights that have room."""
    weights = np.clip(weights, low, high)
    for _ in range(3):
        missing = 1.0 - weights.sum()
        room = high - weights if missing > 0 else weights - low
        if abs(missing) < 1e-16 or room.sum() <= 0.0:
            break
        inner = (weights - low) * (high - weights)  # weights at a bound stay there if the others can take it all
        if inner.sum() > 0.0 and (abs(missing) * inner <= room * inner.sum()).all():
            room = inner
        weights = np.clip(weights + missing * room / room.sum(), low, high)
    return weights


@dataclass(frozen=True)
class _Problem:
    """minimise x' gram x  subject to  costs . x = 1,  low <= x <= high;  rows of unit length."""

    gram: Floats
    costs: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.gram)

    def ridged(self) -> Floats:
        ridged = self.gram.copy()
        ridged.ravel()[:: len(ridged) + 1] += RIDGE
        return ridged


def _candidates(name: str, problem: _Problem, point: Floats) -> Iterator[tuple[str, Floats]]:
    """The exact point of the solver's active set, which has no ridge's bias, and last the solver's own point.

    Gaussian elimination is tried before least squares, which is needed only where the active rows are dependent.
    """
    if name == "pivoting":  # which has refined its answer already
        yield name, point
    inner = (point > problem.low + 1e-9) & (point < problem.high - 1e-9)
    if not inner.any():
        yield name, point
        return
    fixed = np.where(inner, 0.0, point)
    costs = problem.costs[inner]
    system = np.zeros((len(costs) + 1,) * 2)
    system[:-1, :-1] = problem.gram[np.ix_(inner, inner)]
    system[-1, :-1] = system[:-1, -1] = costs
    right = np.append(-(problem.gram[inner] @ fixed), 1.0 - problem.costs @ fixed)
    polished = point.copy()
    try:
        polished[inner] = np.linalg.solve(system, right)[:-1]
        if np.isfinite(polished).all():
            yield f"{name} polished", polished
    except np.linalg.LinAlgError:
        pass
    from scipy.linalg import lstsq

    polished = point.copy()
    polished[inner] = lstsq(system, right, cond=1e-14, lapack_driver="gelsy", check_finite=False)[0][:-1]
    yield f"{name} polished", polished
    yield name, point


Solver = Callable[[_Problem], Floats | None]


def _solvers(rows: int, boxed: bool) -> Iterator[tuple[str, Solver]]:
    if boxed:
        order: tuple[tuple[str, Solver], ...] = (("daqp", _daqp), ("piqp", _piqp), ("slsqp", _slsqp))
        if rows > LARGE:
            order = (order[1], order[0], order[2])
    else:
        order = (("pivoting", _pivoting), ("daqp", _daqp), ("nnls", _nnls), ("piqp", _piqp))
        if rows > LARGE:
            order = (order[0], order[2], order[3], order[1])
    yield from order


def _pivoting(problem: _Problem) -> Floats | None:
    """Without a box: block principal pivoting (Judice and Pires 1994; Kim and Park, SISC 2011, section 3).

    With x proportional to the answer and y = K x - costs, either x_i or y_i is zero at the optimum, and both are
    non-negative. All rows on the wrong side change sides at once; when that stops helping, one does. A few Cholesky
    factorisations, where an active set takes a step for every row that changes sides.
    """
    from scipy.linalg import lapack  # a third of a second, which a client's program never needs

    gram, costs = problem.ridged(), problem.costs
    free = np.ones(len(problem), dtype=bool)
    fewest, chances = len(problem) + 1, 3
    for _ in range(PIVOTS):
        inside = free.nonzero()[0]
        part = gram if len(inside) == len(problem) else submatrix(gram, inside)
        factor, found, info = lapack.dposv(part, costs[inside], lower=1)
        if info != 0:
            return None
        point = np.zeros(len(problem))
        point[inside] = found
        slope = gram @ point - costs
        slope[inside] = found / max(float(np.abs(found).max(initial=0.0)), 1e-300)  # its own side: the point's sign
        wrong = (slope < -1e-12).nonzero()[0]
        if not len(wrong):
            for _ in range(2):  # the factor of the ridged matrix refines the solution of the matrix itself
                rest = costs[inside] - (part @ found - RIDGE * found)
                found = found + lapack.dpotrs(factor, rest, lower=1)[0]
            point[inside] = np.maximum(found, 0.0)
            total = float(costs @ point)
            return point / total if total > 0.0 else None
        if len(wrong) < fewest:
            fewest, chances = len(wrong), 3
        else:
            chances -= 1
        changing = wrong if chances >= 0 else wrong[-1:]
        free[changing] = ~free[changing]
    return None


def _daqp(problem: _Problem) -> Floats | None:
    try:
        import daqp
    except ImportError:
        return None
    rows = len(problem)
    sense = np.zeros(rows + 1, dtype=np.int32)
    sense[-1] = 5  # an equality
    point, _, flag, _ = daqp.solve(
        problem.ridged(),
        np.zeros(rows),
        np.ascontiguousarray(problem.costs[None, :]),
        np.append(problem.high, 1.0),
        np.append(problem.low, 1.0),
        sense,
        iter_limit=max(1000, 20 * rows),
    )
    return np.asarray(point) if flag == 1 else None


def _piqp(problem: _Problem) -> Floats | None:
    try:
        import piqp
    except ImportError:
        return None
    solver = piqp.DenseSolver()
    solver.settings.eps_abs, solver.settings.eps_rel = 1e-11, 1e-12
    costs, zeros = problem.costs[None, :], np.zeros(len(problem))
    solver.setup(problem.ridged(), zeros, costs, np.ones(1), None, None, None, problem.low, problem.high)
    return np.array(solver.result.x) if solver.solve() == piqp.PIQP_SOLVED else None


def _nnls(problem: _Problem) -> Floats | None:
    """Without a box: min |R x|^2 + (costs . x - 1)^2 over x >= 0, whose solution is proportional to the answer."""
    import scipy.optimize  # a quarter of a second that most programs never need

    values, vectors = np.linalg.eigh(problem.gram)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    system = np.vstack([root, problem.costs])
    try:
        point, _ = scipy.optimize.nnls(system, np.append(np.zeros(len(problem)), 1.0), maxiter=30 * len(problem))
    except RuntimeError:  # its iteration limit
        return None
    total = problem.costs @ point
    return point / total if total > 0 else None


def _slsqp(problem: _Problem) -> Floats | None:
    """Last resort for boxes where neither QP library can be imported or neither succeeds."""
    import scipy.optimize

    weights = _inside(
        np.full(len(problem), 1.0 / len(problem)), problem.low * problem.costs, problem.high * problem.costs
    )
    found = scipy.optimize.minimize(
        lambda x: 0.5 * x @ problem.gram @ x,
        weights / problem.costs,
        jac=lambda x: problem.gram @ x,
        bounds=list(zip(problem.low, problem.high, strict=True)),
        constraints=[{"type": "eq", "fun": lambda x: problem.costs @ x - 1.0, "jac": lambda x: problem.costs}],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return np.asarray(found.x)
