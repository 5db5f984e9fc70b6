"""Server steps: how the combined update u is applied (theta <- theta - step(u)).

Papers: server momentum, Hsu et al. 2019; FedAdam, FedYogi, FedAdagrad, Reddi et al., Adaptive Federated Optimization,
ICLR 2021, Algorithm 2; FedAMSGrad, Tong et al., Effective Federated Adaptive Gradient Methods, 2020.
With D = -u:  m <- beta1 m + (1 - beta1) D,  theta <- theta + eta m / (sqrt(v) + tau), and
    Adagrad  v <- v + D^2,   Yogi  v <- v - (1 - beta2) D^2 sign(v - D^2),   Adam  v <- beta2 v + (1 - beta2) D^2,
    AMSGrad  as Adam, with the largest v so far in the denominator.

Departures: m and v start at zero (the paper allows v >= tau^2); FedAdam's bias correction, which some
frameworks add, is an option and off; moments are kept in float32 at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evenhand.checks import flag, number
from evenhand.methods.base import Ask, Memo, Round, ServerStep, Weights

EARLY = 0.05  # of the training so far: longer a mean of models would still hold its beginning

Applied = tuple[list[Tensor], Memo, tuple[str, ...]]


@dataclass(frozen=True)
class Plain(ServerStep):
    """The combined update times eta."""

    eta: float = 1.0  # the server's learning rate

    name: ClassVar[str] = "plain"

    def __post_init__(self) -> None:
        number("eta", self.eta, low=0.0)

    def apply(self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None) -> Applied:
        return [tensor if self.eta == 1.0 else self.eta * tensor for tensor in direction], {}, ()


@dataclass(frozen=True)
class Average(ServerStep):
    """A plain step that also keeps the average of all models so far, the one to evaluate (AFL)."""

    eta: float = 1.0  # the server's learning rate

    name: ClassVar[str] = "average"

    def __post_init__(self) -> None:
        number("eta", self.eta, low=0.0)

    def apply(self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None) -> Applied:
        return _with_mean([self.eta * tensor for tensor in direction], memo, math.inf)

    def offset(self, memo: Memo) -> list[Tensor] | None:
        return list(memo["offset"])


@dataclass(frozen=True)
class Recent(ServerStep):
    """A plain step that also keeps the mean of recent models, the one to evaluate: nobody's turn was too long ago.

    A turn is as many rounds as it takes to hear all whose updates are known: 1 where all take part in every round.
    """

    eta: float = 1.0  # the server's learning rate
    rounds: float | None = None  # how many rounds the mean goes back; None: by turns
    turns: float = 1.0  # so many turns back, but after the first one no more than a twentieth of the training so far

    name: ClassVar[str] = "recent"

    def __post_init__(self) -> None:
        number("eta", self.eta, low=0.0)
        number("turns", self.turns, low=1.0)
        if self.rounds is not None:
            number("rounds", self.rounds, low=1.0)

    def back(self, turn: float, models: int) -> float:
        """How many of so many models the mean goes back."""
        if self.rounds is not None:
            return self.rounds
        return max(turn, min(1.0 + self.turns * (turn - 1.0), EARLY * models))

    def apply(self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None) -> Applied:
        back = self.back(round.rows / round.present, int(memo.get("models", 0)) + 1)
        return _with_mean([self.eta * tensor for tensor in direction], memo, back)

    def offset(self, memo: Memo) -> list[Tensor] | None:
        return list(memo["offset"])


def _with_mean(update: list[Tensor], memo: Memo, back: float) -> Applied:
    """The update, and how far the mean of the models is from the last one; of more than `back` models a moving mean."""
    models = int(memo.get("models", 0)) + 1
    before = memo.get("offset") or [tensor.new_zeros(()) for tensor in update]
    share = 1.0 - 1.0 / min(models, back)  # what the mean keeps of the models before
    offset = [share * (old + step) for old, step in zip(before, update, strict=True)]
    return update, {"models": models, "offset": offset}, ()


@dataclass(frozen=True)
class Momentum(ServerStep):
    """Heavy-ball momentum at the server (FedAvgM): v <- beta v + u, step eta v."""

    beta: float = 0.9  # share of the old velocity
    eta: float = 1.0  # the server's learning rate

    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        number("beta", self.beta, low=0.0, high=1.0)
        number("eta", self.eta, low=0.0)

    def apply(self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None) -> Applied:
        before = memo.get("velocity") or [tensor.new_zeros(()) for tensor in direction]
        velocity = [self.beta * old + new for old, new in zip(before, direction, strict=True)]
        return [self.eta * tensor for tensor in velocity], {"velocity": velocity}, ()


@dataclass(frozen=True)
class _Adaptive(ServerStep):
    """What FedAdam, FedYogi and FedAdagrad share: they differ in the second moment alone."""

    eta: float = 0.1  # the server's learning rate
    beta1: float = 0.9  # of the first moment
    tau: float = 1e-3  # keeps the step finite where the second moment is small

    def __post_init__(self) -> None:
        number("eta", self.eta, low=0.0)
        number("beta1", self.beta1, low=0.0, high=1.0)
        number("tau", self.tau, above=0.0)

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no second moment")

    def rate(self, steps: int) -> float:
        return self.eta

    def kept(self, second: list[Tensor], memo: Memo) -> Memo:
        """What is carried on besides the moments."""
        return {}

    def apply(self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None) -> Applied:
        steps = int(memo.get("steps", 0)) + 1
        zeros = [torch.zeros_like(tensor) for tensor in direction]
        first, second = memo.get("first") or zeros, memo.get("second") or zeros
        first = [self.beta1 * old + (1.0 - self.beta1) * new for old, new in zip(first, direction, strict=True)]
        second = [self.second_moment(old, new * new) for old, new in zip(second, direction, strict=True)]
        memo = {"steps": steps, "first": first, "second": second, **self.kept(second, memo)}
        rate, below = self.rate(steps), memo.get("largest", second)
        update = [rate * mean / (square.sqrt() + self.tau) for mean, square in zip(first, below, strict=True)]
        return update, memo, ()


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """Adam at the server."""

    beta2: float = 0.99  # of the second moment
    bias_correction: bool = False  # as some frameworks add it

    name: ClassVar[str] = "fedadam"
    when: ClassVar[str] = (
        "Slow training, or parameters on very different scales: each gets a step of its own. As a server step it goes "
        "with any rule."
    )
    when_not: ClassVar[str] = (
        "As a method for fairness: it combines as FedAvg does. Its eta has to be tuned; too large a one diverges."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        number("beta2", self.beta2, low=0.0, high=1.0)
        flag("bias_correction", self.bias_correction)

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * before + (1.0 - self.beta2) * square

    def rate(self, steps: int) -> float:
        if not self.bias_correction:
            return self.eta
        return float(self.eta * (1.0 - self.beta2**steps) ** 0.5 / (1.0 - self.beta1**steps))


@dataclass(frozen=True)
class FedAMSGrad(_Adaptive):
    """Adam at the server, whose second moment never shrinks."""

    beta2: float = 0.99  # of the second moment

    name: ClassVar[str] = "fedamsgrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        number("beta2", self.beta2, low=0.0, high=1.0)

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * before + (1.0 - self.beta2) * square

    def kept(self, second: list[Tensor], memo: Memo) -> Memo:
        before = memo.get("largest") or second
        return {"largest": [torch.maximum(old, new) for old, new in zip(before, second, strict=True)]}


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """Yogi at the server: the second moment moves by at most the squared update."""

    eta: float = 0.01  # the server's learning rate
    beta2: float = 0.99  # of the second moment

    name: ClassVar[str] = "fedyogi"
    when: ClassVar[str] = "As fedadam, where the step should not jump when updates suddenly become small or large."
    when_not: ClassVar[str] = "As a method for fairness: it combines as FedAvg does. Its eta has to be tuned."

    def __post_init__(self) -> None:
        super().__post_init__()
        number("beta2", self.beta2, low=0.0, high=1.0)

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return before - (1.0 - self.beta2) * square * torch.sign(before - square)


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """Adagrad at the server: the second moment only grows."""

    beta1: float = 0.0  # of the first moment

    name: ClassVar[str] = "fedadagrad"
    when: ClassVar[str] = "As fedadam, where few clients touch some parameters and steps should only ever shrink."
    when_not: ClassVar[str] = "As a method for fairness: it combines as FedAvg does. In long runs its steps die away."

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return before + square
