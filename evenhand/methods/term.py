"""TERM: tilted empirical risk, clients weigh by the exponential of their loss.

Paper: Li et al., Tilted Empirical Risk Minimization, ICLR 2021, Lemma 1 at the level of clients:
    theta <- theta - sum_k a_k g_k,   a = softmax(t F).

Departure: the authors' federated code keeps a running estimate of the normaliser and divides by the number of
clients twice; this is the algorithm that the paper states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import number
from evenhand.methods.base import Memo, Round, Rule, Weights, spread


@dataclass(frozen=True)
class TERM(Rule):
    """Clients weigh by softmax(t * loss); t -> 0 is the plain mean, t -> infinity the worst client alone."""

    t: float = 1.0  # near 0: the plain mean; large: the worst client alone

    name: ClassVar[str] = "term"
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    when: ClassVar[str] = (
        "A smooth dial from the mean (t near 0) to the worst client alone (t large), without anything to keep."
    )
    when_not: ClassVar[str] = (
        "Where losses lie far apart: once t times their difference exceeds a few units, one client is all that counts. "
        "A weighted mean may still go against a client."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("t", self.t)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        tilted = self.t * round.losses[: round.present]
        weights = np.exp(tilted - tilted.max())
        return Weights(spread(round, weights / weights.sum()))
