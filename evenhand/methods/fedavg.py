"""FedAvg: the size-weighted (or plain) mean of the clients' updates.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1, line 8; with n_k samples of client k and n of all who take part,
    theta <- theta - sum_k n_k / n g_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import choice
from evenhand.geometry import Floats
from evenhand.methods.base import Memo, Round, Rule, Weights, spread


@dataclass(frozen=True)
class FedAvg(Rule):
    """The usual average: every client counts by its number of samples, or every client counts the same."""

    weights: str = "size"  # "size" or "uniform"

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    when: ClassVar[str] = (
        "As the baseline of every comparison, and where clients are alike or the mean is all that counts."
    )
    when_not: ClassVar[str] = (
        "Where clients differ and each must be served: whoever is outnumbered pays. In the README's demo its worst "
        "clients are far behind those of the fair methods."
    )
    foreseen: ClassVar[bool] = True

    def __post_init__(self) -> None:
        choice("weights", self.weights, ("size", "uniform"))

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("sizes",) if self.weights == "size" else ()

    def shares(self, sizes: Floats) -> Floats:
        return sizes / sizes.sum() if self.weights == "size" else super().shares(sizes)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        shares = reference_weights(round, self.weights)
        return Weights(spread(round, shares))


def reference_weights(round: Round, kind: str) -> Floats:
    """The present clients' shares, by size or equal."""
    if kind == "uniform":
        return np.full(round.present, 1.0 / round.present)
    sizes = round.values["sizes"][: round.present]
    return sizes / sizes.sum()
