"""Local objectives: what a client minimises besides its plain risk.

An objective is a frozen dataclass of hyper-parameters. `penalty` is added to the client's risk (a torch
scalar, so that it can be differentiated and batched); `momentum` is the momentum of the client's own SGD.
Rules and server steps do not depend on the objective, so any of them combines with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evenhand.checks import number
from evenhand.methods.base import Objective


@dataclass(frozen=True)
class PlainRisk(Objective):
    """The client's mean loss on its own data."""

    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Proximal(Objective):
    """FedProx (Li et al., MLSys 2020, eq. 2): the risk plus mu/2 times the squared distance to the received model."""

    mu: float = 0.1

    name: ClassVar[str] = "proximal"

    def __post_init__(self) -> None:
        number("mu", self.mu, low=0.0)

    def penalty(self, parameters: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Tensor:
        squares = [(parameters[name] - received[name]).square().sum() for name in parameters]
        return 0.5 * self.mu * torch.stack(squares).sum()


@dataclass(frozen=True)
class ClientMomentum(Objective):
    """FedFa (eqs. 1, 2): the plain risk, minimised by SGD with momentum, which starts anew each round."""

    client_momentum: float = 0.9

    name: ClassVar[str] = "client-momentum"

    def __post_init__(self) -> None:
        number("client_momentum", self.client_momentum, low=0.0, high=1.0)


@dataclass(frozen=True)
class Personal(Objective):
    """Ditto (Li et al., ICML 2021, Algorithm 1): besides the shared model every client trains one of its own.

    The personal model v_k takes the same local steps with a pull lam (v_k - theta) towards the received model,
    and is the one that serves (and is evaluated on) the client.
    """

    lam: float = 1.0

    name: ClassVar[str] = "personal"

    def __post_init__(self) -> None:
        number("lam", self.lam, low=0.0)
