"""even: our own and the default. Every present and remembered client's loss falls in proportion to its size.

Not from a paper: AdaFed's condition, FedLF's equal-length updates and its memory of absent clients, in one
linear system. With unit updates u_k (present and remembered) and losses f,
    (U U' + ridge I) w = f^gamma,   d = sum_k w_k u_k, with the length of the mean update.
The ridge keeps near-copies of one update from being played off against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import number
from evenhand.methods.adafed import proportional_descent
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean, nonnegative_losses


@dataclass(frozen=True)
class Even(Rule):
    """All clients' losses, absent ones included, fall together, larger ones faster: one linear solve."""

    gamma: float = 1.0  # 0: all losses fall equally; larger: large losses fall faster
    ridge: float = 1e-3  # larger: nearer to the losses' own weights
    absent: str = "expected"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "even"
    paper: ClassVar[str] = "this library"
    when: ClassVar[str] = (
        "The default: one model that should serve all clients about equally well, above all where few of many take "
        "part in a round, since the others keep a say."
    )
    when_not: ClassVar[str] = (
        "Where a large loss does not mean badly served (wrong labels, losses on different scales): it follows large "
        "losses, whoever has them. The server keeps an update of every remembered client."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("gamma", self.gamma, low=0.0)
        number("ridge", self.ridge, above=0.0)
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        losses = nonnegative_losses(round, "even")
        largest = losses.max()
        if largest == 0.0:
            return Weights(np.zeros(round.rows), notes=("every loss is zero: the update is zero",))
        coefficients, notes = proportional_descent(
            round, (losses / largest) ** self.gamma, equal_lengths=True, ridge=self.ridge
        )
        coefficients, more = like_the_mean(round, coefficients)
        return Weights(coefficients, notes=notes + more)
