"""A round before it begins: who takes part, and on which samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from evenhand.data import Dataset
from evenhand.engine.batches import (
    Batches,
    Cohort,
    Indices,
    Plan,
    filled_up,
    join,
    mixed,
    plan_together,
    relabelled,
)
from evenhand.engine.rounds import Ready, Replica, Settings
from evenhand.engine.wishes import mixup_of, sees_one_batch
from evenhand.engine.worker import UNIT, Worker
from evenhand.streams import round_stream

AHEAD = 4  # rounds that are prepared at once


@dataclass(frozen=True)
class Cast:
    """The people of a round: whom every replica asks, who will fail, and whose work is the same."""

    asked: list[Indices]
    lost: list[np.ndarray[tuple[int], np.dtype[np.bool_]]]
    cohorts: dict[Hashable, tuple[Replica, Cohort]]  # replicas of a seed on the same data do the same work
    whose: list[Hashable]  # each replica's among them

    @property
    def counts(self) -> list[int]:
        return [len(here) for here in self.asked]

    def rows(self) -> Indices:
        """Which of the cohorts' rows each replica's clients are."""
        edges = np.cumsum([0, *(len(cohort.samples) for _, cohort in self.cohorts.values())])
        starts = dict(zip(self.cohorts, edges, strict=False))
        return np.concatenate(
            [starts[key] + np.arange(count) for key, count in zip(self.whose, self.counts, strict=True)]
        )


class Preparation:
    """Says of a round, before it begins, all that follows from its number and the seeds."""

    def __init__(self, dataset: Dataset, replicas: Sequence[Replica], settings: Settings, worker: Worker) -> None:
        self.dataset, self.settings, self.worker = dataset, settings, worker
        self.replicas, self.device = replicas, worker.local.inputs.device
        self.noisy = any(replica.labels is not None for replica in replicas)
        self.mixing = any(mixup_of(replica.method) > 0.0 for replica in replicas)
        self._stock: deque[Ready] = deque()  # rounds to come
        self._last: tuple[Plan, Batches] | None = None
        self._first: tuple[Tensor, Batches] | None = None  # of such weights, one round's
        self._owners: tuple[tuple[int, ...], Tensor] | None = None
        self._shared: tuple[Indices, Tensor] | None = None

    @cached_property
    def uneven(self) -> bool:
        """Whether clients need different numbers of steps for their data."""
        size = self.settings.work.batch_size
        steps = {int(count) for replica in self.replicas for count in np.unique(replica.trained.sizes) if count}
        return size is not None and len({-(-count // size) for count in steps}) > 1

    @cached_property
    def repeating(self) -> bool:
        """Whether all rounds are alike: as many clients, with as much data each, who all do the same work."""
        federated = all(one.method.training == "federated" and one.course is None for one in self.replicas)
        alike = len({int(count) for replica in self.replicas for count in np.unique(replica.trained.sizes)}) == 1
        sampling = self.settings.sampling
        return federated and alike and sampling.availability == 1.0 and sampling.stragglers == 0.0 and not self.noisy

    def round(self, index: int, replicas: list[Replica]) -> Ready:
        """A round of some of the replicas."""
        return self._stock.popleft() if self._holds(index, replicas) else self._rounds([index], replicas)[0]

    def stock(self, index: int, replicas: list[Replica]) -> None:
        """Prepare a round and some of those that follow, if they are small; less work than one by one."""
        most = min(AHEAD // len(replicas), self.settings.rounds - index)
        if most > 1 and self.repeating and not self._holds(index, replicas):
            self._stock = deque(self._rounds(range(index, index + most), replicas))

    def _holds(self, index: int, replicas: list[Replica]) -> bool:
        return bool(self._stock) and self._stock[0].round == index and self._stock[0].replicas is replicas

    def _rounds(self, indices: Sequence[int], replicas: list[Replica]) -> list[Ready]:
        casts = [self._cast(index, replicas) for index in indices]
        steps = self._plan([cohort for cast in casts for cohort in cast.cohorts.values()])
        if self.worker.replayed is not None and self.uneven and steps.steps > UNIT:
            steps = filled_up(steps, UNIT)
        every = Batches.of(steps, self.device, self._last)
        self._last = steps, every
        own = zip(indices, casts, self._apart(every, len(casts)), strict=True)
        return [self._ready(index, cast, batches, replicas) for index, cast, batches in own]

    def _apart(self, every: Batches, rounds: int) -> list[Batches]:
        """The batches of rounds that are alike; all but the samples is the same in all of them."""
        if rounds == 1:
            return [every]
        rows = len(every.indices) // rounds
        if self._first is None or self._first[0] is not every.weights or len(self._first[1].indices) != rows:
            self._first = every.weights, every.part(slice(0, rows))
        each = every.indices.view(rounds, rows, *every.indices.shape[1:])
        return [replace(self._first[1], indices=own) for own in each.unbind()]

    def _cast(self, index: int, replicas: list[Replica]) -> Cast:
        sampling, work = self.settings.sampling, self.settings.work
        cast = Cast([], [], {}, [])
        for replica in replicas:
            sizes = replica.trained.sizes
            pooled = replica.method.training == "pooled"
            if replica.course is not None:
                here = replica.course.asked(index, replica.seed, sampling, replica.memo)
            else:
                here = np.zeros(1, dtype=np.int64) if pooled else sampling.draw(replica.seed, index, sizes)
            here = here[sizes[here] > 0]  # a client without training data has nothing to say
            sending = replica.method.training == "federated"  # who sends nothing cannot fail to
            one = sees_one_batch(replica.method)
            key = (replica.seed, id(replica.partition), pooled, replica.course and id(replica), one)
            cast.asked.append(here)
            cast.lost.append(sampling.failed(replica.seed, index, here) if sending else np.zeros(len(here), dtype=bool))
            cast.whose.append(key)
            if key not in cast.cohorts:
                epochs = sampling.epochs(replica.seed, index, here, 1 if one else work.epochs)
                rng = round_stream(replica.seed, "batches", index)
                cast.cohorts[key] = replica, Cohort(self._samples(replica, here), epochs, rng)
        return cast

    def _samples(self, replica: Replica, clients: Indices) -> list[Indices]:
        """The clients' samples, or their places among all training samples where labels go by these."""
        held, most = replica.trained, self.settings.work.batch_size if sees_one_batch(replica.method) else None
        every = np.arange(len(held.indices)) if self.noisy else held.indices
        edges = zip(held.offsets[clients].tolist(), held.offsets[clients + 1].tolist(), strict=True)
        return [every[start:stop][:most] for start, stop in edges]

    def _plan(self, cohorts: Sequence[tuple[Replica, Cohort]]) -> Plan:
        """All local steps; with the labels as the clients have them, where anybody's are not the data set's."""
        if not self.noisy:
            return plan_together([cohort for _, cohort in cohorts], self.settings.work.batch_size)
        return join([self._relabelled(replica, cohort) for replica, cohort in cohorts])

    def _relabelled(self, replica: Replica, cohort: Cohort) -> Plan:
        held, labels = replica.trained, replica.labels
        labels = self.dataset.labels[held.indices] if labels is None else labels
        steps = relabelled(plan_together([cohort], self.settings.work.batch_size), held.indices, labels)
        return mixed(steps, mixup_of(replica.method), cohort.rng) if self.mixing else steps

    def _ready(self, index: int, cast: Cast, every: Batches, replicas: list[Replica]) -> Ready:
        counts = cast.counts
        if len(cast.cohorts) < len(replicas):
            rows = cast.rows()
            every = every.part(self._numbers(rows), rows)
        total = sum(counts)
        chunk = self.settings.chunk or max(1, total)
        pieces = [every] if chunk >= total else [every.part(slice(a, a + chunk)) for a in range(0, total, chunk)]
        return Ready(
            round=index,
            replicas=replicas,
            asked=cast.asked,
            lost=cast.lost,
            edges=np.cumsum([0, *counts]),
            owner=self._owner(tuple(counts)),
            even=len(set(counts)) == 1 and len(pieces) == 1,
            repeating=self.repeating,
            pieces=pieces,
        )

    def _owner(self, counts: tuple[int, ...]) -> Tensor:
        """Which replica each row belongs to; kept, since most rounds are alike."""
        if self._owners is None or self._owners[0] != counts:
            owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(self.device)
            self._owners = (counts, owner)
        return self._owners[1]

    def _numbers(self, rows: Indices) -> Tensor:
        """These numbers on the device; kept like the owners."""
        if self._shared is None or not np.array_equal(self._shared[0], rows):
            self._shared = rows, torch.from_numpy(rows).to(self.device)
        return self._shared[1]
