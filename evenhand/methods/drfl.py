"""DRFL: dynamic reweighting, clients weigh by a power of their loss.

Paper: Zhao and Joshi, A Dynamic Reweighting Strategy for Fair Federated Learning, ICASSP 2022; weights
    p_k proportional to F_k^q   (q = 1 is the form in which later papers run it).

Departure: the paper's biased client selection belongs to the sampler, not to the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenhand.checks import number
from evenhand.methods.base import Memo, Round, Rule, Weights, nonnegative_losses, spread


@dataclass(frozen=True)
class DRFL(Rule):
    """Clients weigh by the q-th power of their loss, normalised; q = 0 is the plain mean."""

    q: float = 1.0  # power of the loss

    name: ClassVar[str] = "drfl"
    paper: ClassVar[str] = "Zhao & Joshi, ICASSP 2022"
    when: ClassVar[str] = (
        "Like q-FFL, with weights that add up to one, so that the step keeps the length of an average and the learning "
        "rate stays what it was."
    )
    when_not: ClassVar[str] = (
        "Where updates conflict: a weighted mean may still go against a client, and clients with wrong labels have "
        "large losses too."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("q", self.q, low=0.0)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        losses = nonnegative_losses(round, "drfl")[: round.present]
        largest = losses.max()
        if largest == 0.0:
            return Weights(round.mean, notes=("every loss is zero: plain mean taken",))
        weights = (losses / largest) ** self.q
        return Weights(spread(round, weights / weights.sum()))
