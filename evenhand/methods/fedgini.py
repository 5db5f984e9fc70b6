"""FedGini: weights grow with the rank of a client's loss (a Gini penalty).

Paper: Li et al., Information Sciences 619, 2023. For the client whose loss has rank i (0 = smallest of m),
    weight proportional to 1 + (1 - epsilon) i (i + 1) / D,   D = (m - 1) m (m + 1) / 3.

Departure: the only public code mixes ranks with positions and gives the LARGEST loss the smallest weight; here ranks
are ranks and larger losses weigh more, as the method intends. Tied losses share their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import number
from evenhand.methods.base import Memo, Round, Rule, Weights, spread


@dataclass(frozen=True)
class FedGini(Rule):
    """Clients weigh by the rank of their loss; epsilon = 1 is the plain mean."""

    epsilon: float = 0.1  # 1: the plain mean; 0: the strongest tilt

    name: ClassVar[str] = "fedgini"
    paper: ClassVar[str] = "Li et al., Inf. Sci. 2023"
    when: ClassVar[str] = (
        "A mild tilt towards clients with large losses that one outlier cannot take over: ranks decide, not amounts."
    )
    when_not: ClassVar[str] = (
        "Where a mild tilt is not enough: the largest weight is at most 1 + 3 / (clients + 1) times the smallest, 1.27 "
        "with ten clients a round."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("epsilon", self.epsilon, low=0.0, high=1.0)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        count, losses = round.present, round.losses[: round.present]
        if count == 1:
            return Weights(round.mean)
        position = np.arange(count)
        by_rank = 1.0 + (1.0 - self.epsilon) * position * (position + 1) / ((count - 1) * count * (count + 1) / 3)
        cumulative = np.append(0.0, np.cumsum(by_rank))
        ascending = np.sort(losses)
        first, last = np.searchsorted(ascending, losses, "left"), np.searchsorted(ascending, losses, "right")
        weights = (cumulative[last] - cumulative[first]) / (last - first)
        return Weights(spread(round, weights / weights.sum()))
