"""q-FFL (q-FedAvg): clients with larger losses count more, with a step size that adapts to q.

Paper: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2. With L = lipschitz,
    dw_k = L (theta - theta_k),  D_k = F_k^q dw_k,  h_k = q F_k^(q-1) |dw_k|^2 + L F_k^q,
    theta <- theta - sum_k D_k / sum_k h_k.

`losses="trained"` asks the simulator for the clients' losses after their local training, as FedFV's code does for its
baseline; the paper's F_k is that of the received model.

Departure: a loss of exactly zero counts as 1e-10 (the authors' code adds that to every loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import choice, number
from evenhand.methods.base import Memo, Round, Rule, Weights, learning_rate, nonnegative_losses, spread


@dataclass(frozen=True)
class QFFL(Rule):
    """Clients weigh by the q-th power of their loss; q = 0 is the plain mean."""

    q: float = 0.1  # 0: the plain mean; larger: large losses count more
    lipschitz: float | None = None  # L; the papers take 1 / learning rate, which is what None means
    losses: str = "received"  # of which model: "received" or "trained"

    name: ClassVar[str] = "qffl"
    paper: ClassVar[str] = "Li et al., ICLR 2020"
    when: ClassVar[str] = (
        "A small, well-known step from the average towards clients with large losses: one setting, nothing to keep."
    )
    when_not: ClassVar[str] = (
        "With a large q and no learning rate of its own: the step depends on q and on the unit of the loss. In the "
        "README's demo q = 1 learns far slower than FedAvg at the same rate, and in FedFV's Table 3 q = 15 loses nine "
        "points of mean accuracy."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    lr_setting: ClassVar[str] = "lipschitz"

    def __post_init__(self) -> None:
        number("q", self.q, low=0.0)
        if self.lipschitz is not None:
            number("lipschitz", self.lipschitz, above=0.0)
        choice("losses", self.losses, ("received", "trained"))

    def weigh(self, round: Round, memo: Memo) -> Weights:
        constant = self.lipschitz or 1.0 / learning_rate(None, round, "lipschitz", "qffl")
        losses = np.maximum(nonnegative_losses(round, "qffl")[: round.present], 1e-10)
        # Powers are taken relative to the largest loss: the common factor cancels in the quotient.
        largest = losses.max()
        powers = (losses / largest) ** self.q
        squares = (constant * round.norms[: round.present]) ** 2
        curvatures = self.q * powers / losses * squares + constant * powers
        return Weights(spread(round, powers * constant / curvatures.sum()))
