"""AdaFed: a common descent direction along which each loss falls in proportion to its own size.

Paper: Hamidi and Yang, AdaFed: Fair Federated Learning via Adaptive Common Descent Direction, TMLR 2024, Algorithm 1.
Its orthogonalisation (eqs. 5, 6) and min-norm weights (eq. 14) collapse to one linear system: with b_k = |f_k|^gamma,
    w = K^-1 b,   d = sum_k w_k g_k / (b . w),   so that   g_k . d = b_k |d|^2   (eq. 18),
and the result does not depend on the order of the clients.

Departures: `length="mean"`, the default, gives d the length of the mean update, as FedFV and FedLF do: the
paper's own length depends on the unit of the loss, never comes with a server step size, and collapses for
gamma = 5 (length="paper" is the literal form). Dependent updates are solved in the least-squares sense. A zero
update takes no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import choice, flag, number
from evenhand.geometry import Floats
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean
from evenhand.solvers import submatrix


@dataclass(frozen=True)
class AdaFed(Rule):
    """A direction that lowers every client's loss, the larger ones faster."""

    gamma: float = 1.0  # 0: all losses fall equally; larger: large losses fall faster
    normalise: bool = False  # give all updates unit length first (the paper does not)
    ridge: float = 0.0  # added to the unit updates' Gram matrix; 0 is exact
    length: str = "mean"  # "mean" or "paper"
    absent: str = "off"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "adafed"
    paper: ClassVar[str] = "Hamidi & Yang, TMLR 2024"
    when: ClassVar[str] = (
        "Where every participant's loss should fall, in proportion to its size, at the price of one small linear "
        "system."
    )
    when_not: ClassVar[str] = (
        "With more clients than independent updates: the promise then holds in the least-squares sense alone. As "
        "published it forgets absent clients, and the seeds of the README's demo do not tell it from FedAvg; "
        "absent=expected gives it a memory."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("gamma", self.gamma, low=0.0)
        flag("normalise", self.normalise)
        number("ridge", self.ridge, low=0.0)
        choice("length", self.length, ("mean", "paper"))
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        losses = np.abs(round.losses)
        largest = losses.max()
        if largest == 0.0 and self.gamma > 0.0:
            return Weights(np.zeros(round.rows), notes=("every loss is zero: the update is zero",))
        falls = (losses / largest) ** self.gamma if self.gamma > 0.0 else np.ones(round.rows)
        coefficients, notes = proportional_descent(round, falls, equal_lengths=self.normalise, ridge=self.ridge)
        if self.length == "mean":
            coefficients, more = like_the_mean(round, coefficients)
            return Weights(coefficients, notes=notes + more)
        # u = K^-1 b for b = falls; with b in its own unit d = u / |u|^2, and both sides scale by largest^gamma.
        square = round.length(coefficients) ** 2
        met = round.total @ coefficients
        if square == 0.0 or met @ falls <= 1e-3 * np.linalg.norm(met) * np.linalg.norm(falls):
            return Weights(
                np.zeros(round.rows), notes=(*notes, "no direction lowers the losses so: the update is zero")
            )
        unit_of_loss = largest**self.gamma if self.gamma > 0.0 else 1.0
        return Weights(coefficients / (square * unit_of_loss), notes=notes)


def proportional_descent(
    round: Round, falls: Floats, *, equal_lengths: bool, ridge: float
) -> tuple[Floats, tuple[str, ...]]:
    """Coefficients of the shortest u in the rows' span with g_k . u = falls_k, zero rows left out.

    With `equal_lengths` g_k stands for the row at unit length; the ridge is added to the unit rows' Gram matrix. Where
    the rows are dependent the falls are met in the least-squares sense.
    """
    moving = np.flatnonzero(round.norms > 0.0)
    coefficients = np.zeros(round.rows)
    if not len(moving):
        return coefficients, ()
    scale = 1.0 / round.norms[moving]
    unit_gram = submatrix(round.total, moving) * np.outer(scale, scale)
    slopes = falls[moving] if equal_lengths else falls[moving] * scale
    solved = _solve_definite(unit_gram, slopes, ridge, round.resolution)
    if solved is not None:
        coefficients[moving] = solved * scale
        return coefficients, ()
    if not equal_lengths:  # a common scale alone, so that all falls count the same
        scale = np.full(len(moving), scale.min())
        unit_gram, slopes = submatrix(round.total, moving) * np.outer(scale, scale), falls[moving] * scale
    solved, rank = _solve_least_squares(unit_gram, slopes, ridge, round.resolution)
    coefficients[moving] = solved * scale
    return coefficients, (
        f"dependent updates (rank {rank} of {len(moving)}): losses fall in proportion in the least-squares sense",
    )


def _solve_definite(gram: Floats, right: Floats, ridge: float, resolution: float) -> Floats | None:
    """Cholesky; None where the matrix is singular to working accuracy or the answer drowns in cancellation."""
    import scipy.linalg  # slow to load, and clients never need it

    ridged = gram + ridge * np.eye(len(gram))
    try:
        factor, lower = scipy.linalg.cho_factor(ridged, lower=True, check_finite=False)
    except scipy.linalg.LinAlgError:
        return None
    reciprocal_condition, _ = scipy.linalg.lapack.dpocon(factor, np.abs(ridged).sum(axis=0).max(), uplo="L")
    if reciprocal_condition < 10.0 * resolution:
        return None
    solved: Floats = scipy.linalg.cho_solve((factor, lower), right, check_finite=False)
    if solved @ gram @ solved <= 1e4 * resolution * np.abs(solved).sum() ** 2:
        return None
    return solved


def _solve_least_squares(gram: Floats, right: Floats, ridge: float, resolution: float) -> tuple[Floats, int]:
    """The pseudo-inverse: what is lost in the rounding of the Gram matrix, on either side, gets no weight."""
    values, vectors = np.linalg.eigh(gram)
    noise = 10.0 * len(gram) * resolution
    sound = values > noise * values[-1]
    asked = vectors.T @ right
    asked[np.abs(asked) <= noise * np.linalg.norm(right)] = 0.0
    inverse = np.divide(1.0, values + ridge, out=np.zeros_like(values), where=sound)
    return vectors @ (inverse * asked), int(sound.sum())
