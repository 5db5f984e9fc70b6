"""FedFV: conflicting updates are projected onto each other's normal planes in the order of the losses.

Paper: Wang et al., Federated Learning with Fair Averaging, IJCAI 2021, Algorithms 1 to 3. For every client k that does
not keep its update, and every other client j in ascending order of the losses,
    g_k' <- g_k' - (g_k' . g_j) / |g_j|^2 g_j   where g_k' . g_j < 0   (g_k' starts as g_k),
    d = mean_k g_k', turned likewise away from absent clients' updates, with the length of mean_k g_k.
In Gram space g_k' is a row of coefficients, and one sweep over the targets projects all clients at once.

Departures, all as in the authors' own code: the share alpha with the LARGEST losses keeps its updates (Algorithm 2,
line 1 reads as if it were projected); absent clients last seen i rounds ago have t_k = t - i (Algorithm 3, line 4
prints t_k = i). A zero update is no target. `absent` may replace the window of tau rounds. `fedlf_code=True` is the
mistake behind FedLF's FedFV rows: the window is a round late, so that it holds the present clients themselves in the
place of those of tau rounds ago; with tau = 1 there are no absent clients in it at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import choice, flag, number
from evenhand.geometry import Floats
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean, spread
from evenhand.methods.projection import projection_order, share_of, sweep


@dataclass(frozen=True)
class FedFV(Rule):
    """Conflicts between updates are projected away, in an order that protects the clients with large losses."""

    alpha: float = 0.1  # share of clients, largest losses first, that keep their update as it is
    tau: int = 10  # how many rounds an absent client's update is protected
    order: str = "loss"  # "loss" (ascending), "random" or "reverse": order of the projection targets
    absent: str | None = None  # another memory than last:tau
    fedlf_code: bool = False  # as FedLF's code has it: a window from the present clients to those of tau - 1 rounds ago

    name: ClassVar[str] = "fedfv"
    paper: ClassVar[str] = "Wang et al., IJCAI 2021"
    when: ClassVar[str] = (
        "Few of many clients a round, updates that conflict, and a mean that must not suffer: in the README's demo and "
        "in FedFV's Table 3 (alpha = 2/3) it is much fairer than FedAvg at no less mean accuracy."
    )
    when_not: ClassVar[str] = (
        "Where a promise is needed: after all projections the mean may still go against a client. With alpha = 0 it "
        "protects nobody in particular (in FedFV's Table 3 its spread is then wider than FedAvg's)."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("alpha", self.alpha, low=0.0, high=1.0)
        number("tau", self.tau, low=0, whole=True)
        choice("order", self.order, ("loss", "random", "reverse"))
        if self.absent is not None:
            check_absent(self.absent)
        flag("fedlf_code", self.fedlf_code)

    @property
    def memory(self) -> str:
        oldest = self.tau - self.fedlf_code
        return self.absent or (f"last:{oldest}" if oldest > 0 else "off")

    def weigh(self, round: Round, memo: Memo) -> Weights:
        present = round.present
        order = projection_order(round, self.order, present)
        free = np.ones(present, dtype=bool)
        free[order[present - kept_clients(present, self.alpha) :]] = False
        swept = sweep(round.total[:present, :present], order, free)
        combined = spread(round, swept.coefficients.mean(axis=0))
        if self.absent is not None or round.index + self.fedlf_code >= self.tau:
            combined = mitigate_external(round, combined, youngest=0 if self.fedlf_code and self.tau else 1)
        combined, notes = like_the_mean(round, combined)
        return Weights(combined, notes=notes)


def kept_clients(count: int, alpha: float) -> int:
    """How many clients alpha exempts from projection (the authors' count: m=10: .1 -> 1, .5 -> 5)."""
    return count - share_of(count - 1, 1.0 - alpha) if alpha > 0.0 else 0


def mitigate_external(round: Round, combined: Floats, youngest: int = 1) -> Floats:
    """Algorithm 3: project the combined update off the sum of conflicting absent updates, oldest round first."""
    gram = round.total
    for age in sorted({age for age in round.ages.tolist() if age >= youngest}, reverse=True):
        dots = gram @ combined
        against = np.where((round.ages == age) & (dots < 0.0), 1.0, 0.0)
        square = against @ gram @ against
        dot = against @ dots
        if dot < 0.0 and square > 0.0:
            combined = combined - dot / square * against
    return combined
