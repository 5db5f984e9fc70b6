"""A round before it begins: who takes part, and on which samples; on a GPU several rounds at once, beside its work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
    plans_apart,
    relabelled,
)
from evenhand.engine.rounds import Ready, Replica, Settings
from evenhand.engine.wishes import mixup_of, sees_one_batch
from evenhand.streams import stream

UNIT = 8  # of clients with different numbers of steps rounds have a multiple of so many, and so fewer shapes
AHEAD = 16  # rounds that are prepared at once where a GPU waits for them
ROOM = 2**22  # and how many samples' places they may have in all


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


@dataclass(frozen=True)
class Drawn:
    """Some rounds' people and plans, before they are on the device."""

    indices: Sequence[int]
    casts: list[Cast]
    plans: list[Plan]


class Preparation:
    """Says of a round, before it begins, all that follows from its number and the seeds."""

    def __init__(self, dataset: Dataset, replicas: Sequence[Replica], settings: Settings, device: torch.device) -> None:
        self.dataset, self.settings, self.device = dataset, settings, device
        self.replicas = replicas
        self.even_steps = False  # whether rounds are filled up to a multiple of UNIT steps
        self.noisy = any(replica.labels is not None for replica in replicas)
        self.mixing = any(mixup_of(replica.method) > 0.0 for replica in replicas)
        self._stock: dict[int, Ready] = {}
        self._aside: tuple[int, Future[Drawn]] | None = None  # the rounds after those, and the first of their numbers
        self._helper: ThreadPoolExecutor | None = None
        self._owners: tuple[tuple[int, ...], Tensor] | None = None
        self._shared: tuple[Indices, Tensor] | None = None

    @cached_property
    def uneven(self) -> bool:
        """Whether clients need different numbers of steps for their data."""
        size = self.settings.work.batch_size
        steps = {int(count) for replica in self.replicas for count in np.unique(replica.trained.sizes) if count}
        return size is not None and len({-(-count // size) for count in steps}) > 1

    def one(self, index: int, replicas: list[Replica]) -> Ready:
        """A round of some replicas."""
        return self._placed(self._drawn([index], replicas), replicas)[0]

    def next(self, index: int) -> Ready:
        """A round of all replicas.

        The rounds after it are prepared with it and wait for their turn, and while they do a thread draws those that
        follow: numpy lets go of the interpreter while it draws and sorts.
        """
        if self.noisy or any(replica.course is not None for replica in self.replicas):
            return self.one(index, list(self.replicas))
        if index not in self._stock:
            self._stock = {ready.round: ready for ready in self._fetched(index)}
        return self._stock.pop(index)

    def _fetched(self, index: int) -> list[Ready]:
        """A round and those prepared with it."""
        replicas, aside = list(self.replicas), self._aside
        drawn = (
            aside[1].result() if aside is not None and aside[0] == index else self._drawn(self._from(index), replicas)
        )
        ready, following = self._placed(drawn, replicas), self._from(index + len(drawn.indices))
        self._aside = None
        if following:
            if self._helper is None:
                self._helper = ThreadPoolExecutor(1, "evenhand-rounds")
            self._aside = following.start, self._helper.submit(self._drawn, following, replicas)
        return ready

    def _from(self, index: int) -> range:
        return range(index, min(index + self._at_once, self.settings.rounds))

    @cached_property
    def _at_once(self) -> int:
        sizes = [int(replica.trained.sizes.max(initial=1)) for replica in self.replicas]
        clients = [self.settings.sampling.count(len(replica.trained)) for replica in self.replicas]
        places = max(1, self.settings.work.epochs) * sum(map(int.__mul__, sizes, clients))
        return max(1, min(AHEAD, ROOM // max(1, places)))

    def _drawn(self, indices: Sequence[int], replicas: list[Replica]) -> Drawn:
        casts = [self._cast(index, replicas) for index in indices]
        plans = self._plans([list(cast.cohorts.values()) for cast in casts])
        if self.even_steps and self.uneven:
            plans = [filled_up(steps, UNIT) if steps.steps > UNIT else steps for steps in plans]
        return Drawn(indices, casts, plans)

    def _placed(self, drawn: Drawn, replicas: list[Replica]) -> list[Ready]:
        """The rounds on the device."""
        batches = Batches.several(drawn.plans, self.device)
        return [self._ready(*given, replicas) for given in zip(drawn.indices, drawn.casts, batches, strict=True)]

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
                rng = stream(replica.seed, "batches", index)
                cast.cohorts[key] = replica, Cohort(self._samples(replica, here), epochs, rng)
        return cast

    def _samples(self, replica: Replica, clients: Indices) -> list[Indices]:
        """The clients' samples, or their places among all training samples where labels go by these."""
        held, most = replica.trained, self.settings.work.batch_size if sees_one_batch(replica.method) else None
        every = np.arange(len(held.indices)) if self.noisy else held.indices
        edges = zip(held.offsets[clients].tolist(), held.offsets[clients + 1].tolist(), strict=True)
        return [every[start:stop][:most] for start, stop in edges]

    def _plans(self, rounds: Sequence[Sequence[tuple[Replica, Cohort]]]) -> list[Plan]:
        """All local steps; with the labels as the clients have them, where anybody's are not the data set's."""
        size = self.settings.work.batch_size
        if not self.noisy:
            return plans_apart([[cohort for _, cohort in cohorts] for cohorts in rounds], size)
        return [join([self._relabelled(replica, cohort) for replica, cohort in cohorts]) for cohorts in rounds]

    def _relabelled(self, replica: Replica, cohort: Cohort) -> Plan:
        held, labels = replica.trained, replica.labels
        labels = self.dataset.labels[held.indices] if labels is None else labels
        steps = relabelled(plan_together([cohort], self.settings.work.batch_size), held.indices, labels)
        return mixed(steps, mixup_of(replica.method), cohort.rng) if self.mixing else steps

    def _ready(self, index: int, cast: Cast, every: Batches, replicas: list[Replica]) -> Ready:
        counts = cast.counts
        if len(cast.cohorts) < len(replicas):
            every = every.part(self._numbers(cast.rows()))
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
