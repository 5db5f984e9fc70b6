"""What a simulation holds: its replicas and settings, and a round before, during and after the server's part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.aggregation import Weighed
from evenhand.data import Partition, Split
from evenhand.engine.batches import Batches, Indices, Samples
from evenhand.engine.correction import Course
from evenhand.engine.groups import Told
from evenhand.engine.sampling import Sampling
from evenhand.engine.training import LocalWork
from evenhand.methods import METHODS, Method
from evenhand.state import State
from evenhand.transfer import Awaited
from evenhand.updates import RESOLUTION, Updates, computed_in

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

MEASURES = {
    "all": "every participant's loss before and after the round, and so whose loss fell",
    "losses": "every participant's loss before the round",
    "needed": "nothing but what the method needs",
}


@dataclass
class Replica:
    """One run of the experiment: a seed, a method and a partition, with its model and what its method carries."""

    seed: int
    method: Method
    partition: Partition
    model: Tensor
    lr: float | None = None  # of its clients, where it is not the settings'
    state: State | None = None
    offset: Tensor | None = None  # of the model to evaluate, where a method evaluates another one
    personal: Tensor | None = None  # one model a client, where the objective trains them
    previous: dict[int, Tensor] = field(default_factory=dict)  # each client's last one, where the objective looks back
    memo: Mapping[str, Any] = field(default_factory=dict)  # what its objective carries from round to round
    rounds: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    predicted: Integers | None = field(default=None, repr=False)  # last evaluation, clients x cells x classes
    pooled: Samples | None = field(default=None, repr=False)
    course: Course | None = field(default=None, repr=False)  # where labels are corrected
    diverged: int | None = None  # the round in which no client's update was finite any more, counted from 1

    @cached_property
    def trained(self) -> Split:
        """The training data by owner; one owner has it all where the method pools it."""
        own = self.partition.train
        if self.method.training != "pooled":
            return own
        return Split(own.indices, np.array([0, len(own.indices)]))

    @property
    def labels(self) -> Integers | None:
        """Of the training data, as its owners have them; None where they are the data set's."""
        return self.partition.labels if self.course is None else np.asarray(self.memo["labels"])

    def acting(self, index: int) -> Method:
        """The method whose rule and server step serve a round."""
        return self.method if self.course is None or self.course.stage(index) == 3 else METHODS["fedavg"]

    @property
    def evaluated(self) -> Tensor:
        return self.model if self.offset is None else self.model + self.offset


@dataclass(frozen=True)
class Settings:
    """What all replicas share."""

    rounds: int
    work: LocalWork
    sampling: Sampling
    eval_every: int = 10
    measure: str = "all"  # what is measured in each round on the participants' own data (MEASURES)
    program: str = "auto"
    precision: str = "tf32"  # of local training and evaluation on a GPU (PRECISIONS)
    chunk: int | None = None  # rows trained at once; None is all
    keep_on: torch.device | None = None  # where absent clients' updates are kept, if not on the device
    forgiving: bool = False  # a replica that diverges stands still and the others go on; else it ends them all


@dataclass(frozen=True)
class Ready:
    """A round before it begins: who is asked, who will fail, and which samples each row sees at each step."""

    round: int
    replicas: list[Replica]
    asked: list[Indices]  # per replica
    lost: list[np.ndarray[Any, np.dtype[np.bool_]]]
    edges: Indices  # where each replica's rows begin, and the last ones end
    owner: Tensor  # which replica each row belongs to
    even: bool  # all rows are trained at once and every replica has as many of them
    repeating: bool  # as all other rounds: as many clients with as much data
    pieces: list[Batches]  # the rows' batches, a chunk each

    def rows(self, number: int) -> slice:
        """The rows of one replica."""
        return slice(int(self.edges[number]), int(self.edges[number + 1]))

    def answering(self, number: int) -> Indices:
        """Those of them whose clients answer."""
        return np.arange(*self.edges[number : number + 2])[~self.lost[number]]

    @cached_property
    def alike(self) -> bool:
        """Whether all rows arrive, as many of every replica."""
        return self.even and not np.concatenate(self.lost).any()

    def parts(self) -> Iterator[tuple[slice, Batches]]:
        start = 0
        for batches in self.pieces:
            yield slice(start, start + len(batches.indices)), batches
            start += len(batches.indices)


@dataclass(frozen=True)
class Turn:
    """What one replica's server has in hand: the updates that arrived, the remembered ones, who answered."""

    given: Updates
    past: list[Updates]
    kept: Indices


@dataclass(frozen=True)
class Foreseen:
    """The outcome of a round that does not depend on what its clients say."""

    coefficients: Floats  # replicas x layers x rows
    models: list[Tensor]  # every replica's after the round


@dataclass(frozen=True)
class Begun:
    """A round whose clients have been set to work, which the device may not have finished."""

    ready: Ready
    received: list[Tensor]  # every replica's model
    models: Tensor  # the same as rows
    updates: Tensor
    told: Told | None
    measuring: bool
    turns: list[Turn]  # none yet where the outcome was foreseen
    found: Awaited  # what was measured; each turn's inner products; those with the rows it remembers
    foreseen: Foreseen | None = None

    @property
    def resolution(self) -> float:
        """Of the inner products."""
        return RESOLUTION[computed_in(self.updates.dtype)]

    def fits(self, index: int) -> bool:
        """Whether this is what round `index` would begin with now."""
        models = [replica.model for replica in self.ready.replicas]
        return self.ready.round == index and all(map(is_, models, self.received))


@dataclass(frozen=True)
class Verdict:
    """What a replica's server makes of a round, until it is written down."""

    weighed: Weighed
    losses: Floats | None  # of those who answered, at the received model
    trials: list[Floats]  # their losses at each step that was tried
