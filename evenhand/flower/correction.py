"""FedCorr over a federation: the server knows who seems noisy and how much, labels and losses stay with the clients.

As in evenhand/engine/correction.py, in three parts: after its training a client of the first stage sends the mean local
dimension of its own model's answers; after an iteration the server tells noisy clients from clean ones by these and
sends the noisy ones the new model; each of them estimates by its own samples' losses which share of its labels is
wrong, corrects labels, and sends that share and how many labels it changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict

from evenhand.data import Split
from evenhand.engine.correction import Course, upper
from evenhand.engine.sampling import Sampling
from evenhand.flower import wire
from evenhand.flower.roster import Roster
from evenhand.methods import METHODS, Method
from evenhand.objectives import Correction

Indices = np.ndarray[Any, np.dtype[np.int64]]
Memo = Mapping[str, Any]

STAGE, LEASH, ALL, SEED, DIMENSION, LEVEL, CHANGED = "stage", "leash", "all", "seed", "dimension", "level", "changed"


@dataclass(frozen=True)
class Correcting:
    """The server's part."""

    course: Course

    @classmethod
    def of(cls, settings: Correction, sizes: Indices, rounds: int) -> Correcting:
        held = Split(np.arange(int(sizes.sum())), np.append(0, np.cumsum(sizes)))
        return cls(Course(settings, held, rounds))

    def start(self) -> dict[str, Any]:
        """Nothing is known yet."""
        count = len(self.course.held)
        return {
            "levels": np.zeros(count),
            "noisy": np.zeros(count, dtype=np.int64),
            "dimensions": np.zeros(count),
            "heard": np.zeros(count, dtype=np.int64),
        }

    def acting(self, chosen: Method, index: int) -> Method:
        """The method whose rule and server step serve a round."""
        return chosen if self.course.stage(index) == 3 else METHODS["fedavg"]

    def cohort(self, roster: Roster, sampling: Sampling, seed: int, index: int, memo: Memo) -> tuple[list[int], int]:
        """Whom a round asks, of those who are connected; and how many it is meant to ask."""
        if self.course.stage(index) == 3:
            return roster.cohort(sampling, seed, index)
        here = roster.connected
        asked = self.course.asked(index, seed, sampling, memo).tolist()
        return [place for place in asked if place in here], len(asked)

    def task(self, index: int, asked: Sequence[int], row: int, memo: Memo) -> dict[str, Any]:
        """What a client is told besides the rest: a leash, perhaps of strength zero, where anybody has one."""
        pulls = self.course.pulls(index, np.array(asked), memo)
        return {STAGE: self.course.stage(index)} | ({LEASH: float(pulls[row])} if pulls.any() else {})

    def hear(self, index: int, place: int, content: RecordDict, memo: Memo) -> Memo:
        """Take in what a client of the first stage says of its own model."""
        if self.course.stage(index) != 1:
            return memo
        found = {name: np.copy(memo[name]) for name in ("dimensions", "heard")}
        found["dimensions"][place] += wire.number_in(content, DIMENSION)
        found["heard"][place] += 1
        return {**memo, **found}

    def judge(self, memo: Memo, seed: int, index: int) -> tuple[Memo, list[int]]:
        """Who seems noisy; after the first stage that is settled."""
        if self.course.stage(index) == 1:
            noisy = np.zeros(len(self.course.held), dtype=np.int64)
            known = np.flatnonzero(memo["heard"] > 0)
            noisy[known] = upper(memo["dimensions"][known] / memo["heard"][known], seed)
            memo = {**memo, "noisy": noisy, "levels": np.zeros(len(noisy))}
        return memo, np.flatnonzero(memo["noisy"]).tolist()

    def order(self, index: int, seed: int) -> dict[str, Any]:
        """What noisy clients are told to do with their labels."""
        return {ALL: self.course.stage(index) == 2, SEED: seed}

    def corrected(self, memo: Memo, good: Mapping[int, RecordDict], index: int) -> tuple[Memo, int, dict[int, str]]:
        """What the noisy clients found, how many labels they changed in all, and whose answer cannot be used."""
        levels, changed, failed = np.copy(memo["levels"]), 0, {}
        for place, content in good.items():
            try:
                level = wire.number_in(content, LEVEL, low=0.0)
                changed += int(wire.number_in(content, CHANGED, low=0.0))
            except wire.Unusable as error:
                failed[place] = str(error)
                continue
            if self.course.stage(index) == 1:
                levels[place] = level
        return {**memo, "levels": levels}, changed, failed
