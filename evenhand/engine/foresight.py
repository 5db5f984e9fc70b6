"""Rounds of rules that go by their clients' sizes: where they lead is known before the clients have answered.

So the next round can be begun before the server hears of this one. Where it then hears of something that it did not
expect (a client with NaN, say, which has to be left out), the next round is dropped and this one is played again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.aggregation import Combination, plain_records
from evenhand.engine.rounds import Begun, Floats, Foreseen, Integers, Ready, Replica
from evenhand.engine.wishes import foreseeable
from evenhand.geometry import in_range
from evenhand.transfer import sent


@dataclass(frozen=True)
class Shares:
    """What every replica's clients count in a round."""

    coefficients: Floats  # replicas x layers x rows
    there: Tensor  # on the device, replicas x rows

    def foreseen(self, models: Tensor) -> Foreseen:
        """models: every replica's after the round, where the next round may put others."""
        return Foreseen(self.coefficients, list(models.clone().unbind()))


class Foresight:
    """Says of a round what its clients count, where that can be said before they answer."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.layers, self.device = layers, device
        self._last: tuple[Integers, Shares] | None = None  # of clients of these sizes

    def shares(self, ready: Ready) -> Shares | None:
        """None where somebody is lost or a rule listens; the same as before where the sizes are."""
        if not (ready.alike and all(map(_foreseeable, ready.replicas))):
            return None
        if self._last is not None and ready.repeating:
            return self._last[1]
        given = zip(ready.replicas, ready.asked, strict=True)
        sizes = np.stack([replica.trained.sizes[asked] for replica, asked in given])
        if self._last is None or not np.array_equal(self._last[0], sizes):
            own = zip(ready.replicas, sizes.astype(np.float64), strict=True)
            shares = np.stack([replica.method.rule.shares(counts) for replica, counts in own])
            spread = np.repeat(shares[:, None], self.layers, axis=1)
            self._last = sizes, Shares(spread, sent(shares, torch.float32, self.device))
        return self._last[1]


def _foreseeable(replica: Replica) -> bool:
    """After the first round, in which a replica's state is made, and while its clients' updates are finite."""
    going = replica.state is not None and replica.diverged is None
    return going and replica.course is None and foreseeable(replica.method)


def as_foreseen(begun: Begun, foreseen: Foreseen, answers: list[Floats]) -> list[dict[str, Any]] | None:
    """What the replicas' records keep of a round, by what the server heard; None where that is not as expected."""
    measured, *products = answers
    gram = np.stack(products)
    # Rows whose squared lengths are in range are finite, and so are their products with each other.
    if not in_range(gram) or (begun.measuring and not np.isfinite(measured).all()):
        return None
    found = Combination(gram, foreseen.coefficients)
    return None if found.cancels.any() else plain_records(found, begun.resolution)
