"""FedFa: weights from the information in accuracy and participation, momentum at the server (and at the client).

Paper: Huang et al., Fairness and Accuracy in Horizontal Federated Learning, Information Sciences 589, 2022,
Algorithm 2:
    Acc_k <- Acc_k / sum Acc,  f_k <- f_k / sum f                                  (9, 10)
    a_k = -log2 Acc_k,  p_k = -log2 (1 - f_k), each normalised to sum 1            (11 to 14)
    weight_k = alpha a_k + beta p_k                                                (15)
    m <- gamma m + (1 - gamma) (w~ - w),   w <- w~ - eta m   every b-th round       (4 to 7).

Departures: a zero inside a logarithm counts as 1e-6 (the paper: "a very small constant"). The minus sign
before eta m makes the momentum a brake; that is what the paper prints and what the published numbers used;
momentum="forward" turns it round.

The mistakes behind FedLF's FedFa rows are `fedlf_code=True` (accuracies and shares of participation themselves are
divided by the sums of their information, so that accurate clients weigh more) and momentum="heavy-ball" (m <- gamma m
+ (w~ - w), w <- w + m: with gamma = 0.9 ten times the step). `accuracies="trained"` asks the simulator for the clients'
accuracies after their local training, as FedFV's and FedLF's code do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from evenhand.checks import EvenhandError, choice, flag, number
from evenhand.geometry import Floats
from evenhand.methods.base import (
    Ask,
    Memo,
    Round,
    Rule,
    ServerStep,
    Weights,
    carry,
    learning_rate,
    recall,
    spread,
)

SMALL = 1e-6


@dataclass(frozen=True)
class FedFa(Rule):
    """Clients with low accuracy and frequent participation weigh more; momentum at client and server."""

    alpha: float = 0.5  # share of the accuracy's information
    beta: float = 0.5  # share of the participation's; alpha + beta = 1
    accuracies: str = "received"  # of which model: "received" or "trained"
    fedlf_code: bool = False  # as FedLF's code has it: accurate clients weigh more

    name: ClassVar[str] = "fedfa"
    paper: ClassVar[str] = "Huang et al., Inf. Sci. 2022"
    when: ClassVar[str] = (
        "Where clients report accuracies rather than losses, and those with low accuracy who take part often should "
        "count more."
    )
    when_not: ClassVar[str] = (
        "Where updates conflict, or many clients take part (the logarithms then give all nearly the same weight). The "
        "seeds of the README's demo do not tell it from FedAvg; its server momentum is a brake."
    )
    needs: ClassVar[tuple[str, ...]] = ("accuracies",)
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("alpha", self.alpha, low=0.0, high=1.0)
        number("beta", self.beta, low=0.0, high=1.0)
        if abs(self.alpha + self.beta - 1.0) > 1e-9:
            raise EvenhandError(f"alpha={self.alpha:g} and beta={self.beta:g} must add up to 1")
        choice("accuracies", self.accuracies, ("received", "trained"))
        flag("fedlf_code", self.fedlf_code)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        clients = round.clients[: round.present]
        counts = recall(memo, "participations", clients, default=0.0) + 1.0
        if "participations" in round.values:
            counts = round.values["participations"][: round.present]
        accuracies = round.values["accuracies"][: round.present]
        if self.fedlf_code:
            weights = inverted_weights(accuracies, counts / (round.index + 1), self.alpha, self.beta)
        else:
            weights = information_weights(accuracies, counts, self.alpha, self.beta)
        return Weights(spread(round, weights), carry(memo, clients, participations=counts))


def information_weights(accuracies: Floats, participations: Floats, alpha: float, beta: float) -> Floats:
    """Equations 9 to 15; a client on its own has weight 1."""
    if len(accuracies) == 1:
        return np.ones(1)
    total = accuracies.sum()
    shares = accuracies / total if total > 0.0 else np.full(len(accuracies), 1.0 / len(accuracies))
    from_accuracy = -np.log2(np.where(shares > 0.0, shares, SMALL))
    absence = 1.0 - participations / participations.sum()
    from_participation = -np.log2(np.where(absence > 0.0, absence, SMALL))
    return np.asarray(
        alpha * from_accuracy / from_accuracy.sum() + beta * from_participation / from_participation.sum()
    )


def inverted_weights(accuracies: Floats, frequencies: Floats, alpha: float, beta: float) -> Floats:
    """What FedLF's code makes of equations 9 to 15; accuracies count in percent there, frequencies as shares."""
    accuracies = 100.0 * accuracies
    total = max(float(accuracies.sum()), SMALL)
    of_accuracy = -np.log2(accuracies / total + SMALL).sum()
    of_participation = -np.log2(1.0 - frequencies / frequencies.sum() + SMALL).sum()
    weights = alpha * accuracies / of_accuracy + beta * frequencies / of_participation
    if weights.sum() <= 0.0:
        return np.full(len(weights), 1.0 / len(weights))
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class FedFaMomentum(ServerStep):
    """FedFa's server momentum (eqs. 4 to 7)."""

    gamma: float = 0.5  # share of the old momentum
    every: int = 1  # b: the momentum is applied every b-th round
    eta: float | None = None  # None is the clients' learning rate
    momentum: str = "paper"  # "paper" (a brake, w~ - eta m), "forward" (w~ + eta m) or "heavy-ball" (FedLF's code)

    name: ClassVar[str] = "fedfa"
    lr_setting: ClassVar[str] = "eta"

    def __post_init__(self) -> None:
        number("gamma", self.gamma, low=0.0, high=1.0)
        number("every", self.every, low=1, whole=True)
        if self.eta is not None:
            number("eta", self.eta, low=0.0)
        choice("momentum", self.momentum, ("paper", "forward", "heavy-ball"))

    def apply(
        self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None
    ) -> tuple[list[Tensor], Memo, tuple[str, ...]]:
        before = memo.get("momentum") or [tensor.new_zeros(()) for tensor in direction]
        if self.momentum == "heavy-ball":
            ball = [self.gamma * old + new for old, new in zip(before, direction, strict=True)]
            return ball, {"momentum": ball}, ()
        rate = learning_rate(self.eta, round, "eta", "fedfa")
        after = [self.gamma * old + (1.0 - self.gamma) * new for old, new in zip(before, direction, strict=True)]
        if (round.index + 1) % self.every == 0:
            sign = -rate if self.momentum == "paper" else rate
            direction = [new + sign * old for new, old in zip(direction, after, strict=True)]
        return direction, {"momentum": after}, ()
