"""FedMGDA+: the min-norm point of the normalised updates, near given weights: a common descent direction.

Paper: Hu et al., Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022, Algorithm 1:
    lambda* = argmin | sum_k lambda_k g_k / |g_k| |   over the simplex with |lambda - reference|_inf <= epsilon,
    theta <- theta - sum_k lambda*_k g_k / |g_k|.

Departures: a zero update takes no part; a remembered row has reference weight zero; `length="mean"` gives the
direction the length of the mean update, where the paper's step (at most 1 long) is left to the server's eta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import choice, number
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean, unit
from evenhand.methods.fedavg import reference_weights
from evenhand.solvers import min_norm


@dataclass(frozen=True)
class FedMGDAPlus(Rule):
    """A direction against no client's update (epsilon = 1), or near the reference weights (small epsilon)."""

    epsilon: float = 0.1  # how far a weight may be from its reference; 1 frees them
    reference: str = "size"  # "size" or "uniform"
    length: str = "paper"  # "paper" (at most 1) or "mean" (of the mean update)
    absent: str = "off"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "fedmgda+"
    paper: ClassVar[str] = "Hu et al., IEEE TNSE 2022"
    when: ClassVar[str] = (
        "Where a step must be against no participant (epsilon = 1), or where one client's very long update must not "
        "rule: all count at unit length."
    )
    when_not: ClassVar[str] = (
        "Without a look at the step: the paper's is at most 1 long whatever the updates are, and needs a server's eta "
        "(length=mean spares that). With epsilon = 0.05 it has the widest spread in FedFV's Table 3."
    )

    def __post_init__(self) -> None:
        number("epsilon", self.epsilon, low=0.0, high=1.0)
        choice("reference", self.reference, ("size", "uniform"))
        choice("length", self.length, ("paper", "mean"))
        check_absent(self.absent)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("sizes",) if self.reference == "size" else ()

    def weigh(self, round: Round, memo: Memo) -> Weights:
        scale = unit(round.norms)
        moving = scale > 0.0
        reference = np.zeros(round.rows)
        reference[: round.present] = reference_weights(round, self.reference)
        reference = np.where(moving, reference, 0.0)
        if reference.sum() == 0.0:  # nobody who counts by size has moved
            reference[: round.present] = moving[: round.present]
        if reference.sum() == 0.0:
            return Weights(np.zeros(round.rows), notes=("every present update is zero: the update is zero",))
        reference /= reference.sum()
        gram = round.total[np.ix_(moving, moving)] * np.outer(scale[moving], scale[moving])
        box = reference[moving]
        solved = min_norm(gram, box - self.epsilon, box + self.epsilon) if self.epsilon < 1.0 else min_norm(gram)
        coefficients = np.zeros(round.rows)
        coefficients[moving] = solved.weights * scale[moving]
        notes: tuple[str, ...] = (f"min-norm point: {solved.note()}",)
        if self.length == "mean":
            coefficients, more = like_the_mean(round, coefficients)
            notes += more
        return Weights(coefficients, notes=notes)
