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
import scipy.linalg

from evenhand.checks import choice, number
from evenhand.geometry import Floats
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean, unit


@dataclass(frozen=True)
class AdaFed(Rule):
    """A direction that lowers every client's loss, the larger ones faster."""

    gamma: float = 1.0  # 0: all losses fall equally; larger: large losses fall faster
    normalise: bool = False  # give all updates unit length first (the paper does not)
    ridge: float = 0.0  # added to the unit updates' Gram matrix; 0 is exact
    length: str = "mean"  # "mean" or "paper"
    absent: str = "off"

    name: ClassVar[str] = "adafed"
    paper: ClassVar[str] = "Hamidi & Yang, TMLR 2024"
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("gamma", self.gamma, low=0.0)
        number("ridge", self.ridge, low=0.0)
        choice("length", self.length, ("mean", "paper"))
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        losses = np.abs(round.losses)
        largest = losses.max()
        if largest == 0.0 and self.gamma > 0.0:
            return Weights(np.zeros(round.rows), notes=("every loss is zero: the update is zero",))
        falls = (losses / largest) ** self.gamma if self.gamma > 0.0 else np.ones(round.rows)
        slopes = falls if self.normalise else falls * unit(round.norms)
        coefficients, notes = proportional_descent(round, slopes, self.ridge)
        if self.length == "mean":
            coefficients, more = like_the_mean(round, coefficients)
            return Weights(coefficients, notes=notes + more)
        # u = K^-1 b for b = falls; with b in its own unit d = u / |u|^2, and both sides scale by largest^gamma.
        square = round.length(coefficients) ** 2
        if square == 0.0:
            return Weights(np.zeros(round.rows), notes=(*notes, "the updates cancel out: the update is zero"))
        unit_of_loss = largest**self.gamma if self.gamma > 0.0 else 1.0
        return Weights(coefficients / (square * unit_of_loss), notes=notes)


def proportional_descent(round: Round, slopes: Floats, ridge: float) -> tuple[Floats, tuple[str, ...]]:
    """Coefficients of the shortest u in the rows' span with (g_k / |g_k|) . u = slopes_k, zero rows left out."""
    scale = unit(round.norms)
    moving = scale > 0.0
    coefficients = np.zeros(round.rows)
    if not moving.any():
        return coefficients, ()
    gram = round.total[np.ix_(moving, moving)] * np.outer(scale[moving], scale[moving])
    gram[np.diag_indices_from(gram)] += ridge
    solved, rank = _solve(gram, slopes[moving], round.resolution)
    coefficients[moving] = solved * scale[moving]
    if rank < len(gram):
        return coefficients, (
            f"dependent updates (rank {rank} of {len(gram)}): losses fall in proportion in the least-squares sense",
        )
    return coefficients, ()


def _solve(gram: Floats, right: Floats, resolution: float) -> tuple[Floats, int]:
    """Cholesky where the matrix is safely definite, else the pseudo-inverse; with the rank that was used."""
    cutoff = 10.0 * len(gram) * resolution
    try:
        factor = scipy.linalg.cho_factor(gram, lower=True, check_finite=False)
        if np.diagonal(factor[0]).min() ** 2 > cutoff:
            return scipy.linalg.cho_solve(factor, right, check_finite=False), len(gram)
    except scipy.linalg.LinAlgError:
        pass
    values, vectors = np.linalg.eigh(gram)
    sound = values > cutoff * max(values[-1] / len(gram), 1.0)
    inverse = np.divide(1.0, values, out=np.zeros_like(values), where=sound)
    return vectors @ (inverse * (vectors.T @ right)), int(sound.sum())
