"""Local objectives: what a client minimises besides its plain risk.

An objective is a frozen dataclass of hyper-parameters. `penalty` is added to the client's risk (a torch
scalar, so that it can be differentiated and batched); `momentum` is the momentum of the client's own SGD.
Rules and server steps do not depend on the objective, so any of them combines with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from evenhand.checks import choice, flag, number
from evenhand.constraints import Leaning, View

Client = int | str
Memo = Mapping[str, Any]  # what a part of a method carries from round to round: arrays, lists, numbers, strings


@dataclass(frozen=True)
class Objective:
    """What a client minimises."""

    name: ClassVar[str]
    when: ClassVar[str] = ""  # as in Rule
    when_not: ClassVar[str] = ""

    @property
    def grouped(self) -> bool:
        """Whether it asks, before each round's training, how the received model treats groups of people."""
        return False

    @property
    def alone(self) -> bool:
        """Whether what a client is told follows from its own sums and its own part of the memo."""
        return False

    def lean(self, view: View, memo: Memo) -> Leaning:
        """What the clients are told about groups and labels, given their sums over cells."""
        raise NotImplementedError(f"{type(self).__name__} says nothing about groups")

    def part(self, memo: Memo, client: Client) -> dict[str, Any]:
        """One client's part of the memo, where it is enough for that client."""
        return {}


@dataclass(frozen=True)
class PlainRisk(Objective):
    """The client's mean loss on its own data."""

    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Proximal(Objective):
    """FedProx (Li et al., MLSys 2020, eq. 2): the risk plus mu/2 times the squared distance to the received model.

    A client minimises, from the received theta on,
        F_k(w) + mu / 2 |w - theta|^2.

    `fedlf_code=True` is the mistake behind FedLF's FedProx rows: a client makes one step a round, always on its first
    mini-batch, where the penalty is still zero.
    """

    mu: float = 0.1  # strength of the pull towards the received model
    fedlf_code: bool = False  # as FedLF's code has it: one step, on the same mini-batch every round

    name: ClassVar[str] = "proximal"
    when: ClassVar[str] = (
        "Much local work on unlike data, so that clients drift far from the received model before they answer."
    )
    when_not: ClassVar[str] = (
        "As a method for fairness: nobody is given more say. With one local step a round it is FedAvg."
    )

    def __post_init__(self) -> None:
        number("mu", self.mu, low=0.0)
        flag("fedlf_code", self.fedlf_code)

    def penalty(self, parameters: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Tensor:
        squares = [(parameters[name] - received[name]).square().sum() for name in parameters]
        return 0.5 * self.mu * torch.stack(squares).sum()


@dataclass(frozen=True)
class ClientMomentum(Objective):
    """FedFa (eqs. 1, 2): the plain risk, minimised by SGD with momentum, which starts anew each round."""

    client_momentum: float = 0.9  # of the clients' SGD

    name: ClassVar[str] = "client-momentum"

    def __post_init__(self) -> None:
        number("client_momentum", self.client_momentum, low=0.0, high=1.0)


@dataclass(frozen=True)
class Personal(Objective):
    """Ditto (Li et al., ICML 2021, Algorithm 1): besides the shared model every client trains one of its own.

    The personal model v_k takes the same local steps with a pull towards the received model theta,
        v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - theta)),
    and is the one that serves (and is evaluated on) the client.

    `fedlf_code=True` is the mistake behind FedLF's Ditto rows: there are no personal models. A client's only model
    takes every step twice, the second time with the same gradient and the pull, which is one step along
    (2 - lr lam) g + lam (w - theta); the shared one then serves everybody. That code lets the shared model move to
    each client's in turn by a share 1/N of the way, N being all clients; for m clients a round the server's step
    eta = 1 - (1 - 1/N)^m goes as far in one go.
    """

    lam: float = 1.0  # strength of the personal model's pull towards the received one
    fedlf_code: bool = False  # as FedLF's code has it: no personal models

    name: ClassVar[str] = "personal"
    when: ClassVar[str] = "Where every client may have a model of its own."
    when_not: ClassVar[str] = (
        "Where one shared model has to serve, new clients included. A personal model may also be lost: on Bank one "
        "was, under one seed of five."
    )

    def __post_init__(self) -> None:
        number("lam", self.lam, low=0.0)
        flag("fedlf_code", self.fedlf_code)


@dataclass(frozen=True)
class Similarity(Objective):
    """FedCKA (Son et al., 2022): the first layers stay more like the received model's than like the client's last ones.

    To the mean loss of a batch is added
        mu * mean over the first layers of -log(e^near / (e^near + e^far)),
    where near is the linear CKA between the layer's answers to the batch and those of the received model, and far the
    same with the client's own model of the last time it took part (a newcomer's is the received one). A layer is a
    module with a weight matrix; its answer is taken before the activation function. Samples that are all alike, such
    as a batch of one, have CKA 0. quirk="weights" is the version of FedLF's code, which compares weights without a
    gradient and so is FedAvg.
    """

    mu: float = 3.0  # what the similarity counts beside the loss
    layers: int = 2  # how many of the first layers
    quirk: str = "none"  # "weights": as in FedLF's code, which is FedAvg

    name: ClassVar[str] = "similarity"
    when: ClassVar[str] = "Many local steps on unlike data, where the first layers should stay common to all."
    when_not: ClassVar[str] = (
        "As a method for fairness: nobody is given more say. Every step asks two more models, and every client seen "
        "keeps one."
    )

    def __post_init__(self) -> None:
        number("mu", self.mu, low=0.0)
        number("layers", self.layers, low=1, whole=True)
        choice("quirk", self.quirk, ("none", "weights"))

    @property
    def strengths(self) -> list[float]:
        """What each layer's term counts; empty where there is none."""
        return [] if self.mu == 0.0 or self.quirk == "weights" else [self.mu / self.layers] * self.layers


@dataclass(frozen=True)
class Correction(Objective):
    """FedCorr (Xu et al., CVPR 2022): find the clients with wrong labels, correct these, then train as usual.

    The details are in evenhand/engine/correction.py. The method's own rule and server step begin with the third stage;
    until then FedAvg's serve.
        1  all clients, `iterations` times: who is noisy, by the local dimension of the models' answers; how much, by a
           mixture over the losses; labels of which the shared model is sure are corrected
        2  clean clients alone, a share `fine_tuning` of the rounds that are left; then a second correction
        3  all clients, as usual
    """

    iterations: int = 5  # of the first stage, each over all clients
    together: int = 1  # clients a round in the first stage
    fine_tuning: float = 0.5  # share of the rounds after the first stage that go to clean clients alone
    mixup: float = 1.0  # of Beta(mixup, mixup), from which the shares of mixed samples come; 0 mixes none
    beta: float = 5.0  # times a client's noise level: the pull towards the received model in the first stage
    neighbours: int = 20  # of an answer, from which its local dimension is estimated
    ratio: float = 0.5  # of the samples that seem wrong, how many may be corrected in an iteration
    confidence: float = 0.5  # probability above which the shared model's label is taken
    clean: float = 0.1  # noise level up to which a client takes part in the second stage

    name: ClassVar[str] = "correction"
    when: ClassVar[str] = "Where some clients' training labels are wrong, and it is not known whose."
    when_not: ClassVar[str] = (
        "With clean labels (rare ones that are right may be corrected too) or few rounds: the first stage alone takes "
        "iterations * clients / together of them."
    )

    def __post_init__(self) -> None:
        for name in ("iterations", "together", "neighbours"):
            number(name, getattr(self, name), low=1, whole=True)
        number("mixup", self.mixup, low=0.0)
        number("beta", self.beta, low=0.0)
        for name in ("fine_tuning", "ratio", "confidence", "clean"):
            number(name, getattr(self, name), low=0.0, high=1.0)
