"""What a method carries from round to round, and how it is kept on disk (safetensors + JSON, no pickle).

The memory of absent clients lives here: each client's latest update with its age, and the inner products among the
remembered updates, so that a round costs products with its own rows alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.geometry import Floats, Updates, past_updates
from evenhand.methods.base import Client, Memo

SLACK = 2.0  # rows up to this many windows old are kept, since a smaller cohort widens the "expected" window again


@dataclass(frozen=True)
class Sent:
    """The updates that one round's clients sent, kept together: dense (rows x size) or one tensor a row, per entry."""

    round: int
    rows: int
    parts: tuple[Tensor | tuple[Tensor, ...], ...]


@dataclass(frozen=True)
class Memory:
    """The latest update of each client seen, with its round, its numbers, and the rows' inner products per block."""

    clients: tuple[Client, ...] = ()
    rounds: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    places: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: Mapping[str, Floats] = field(default_factory=dict)
    gram: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))  # NaN where not computed yet
    sent: tuple[Sent, ...] = ()  # where client i's row is number places[i] of its round's

    def absent(self, present: Sequence[Client], index: int, window: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions of the rows to use: clients not present, at most `window` rounds old."""
        here = set(present)
        away = np.array([client not in here for client in self.clients], dtype=bool)
        return np.flatnonzero(away & (index - self.rounds <= window) & (index - self.rounds >= 1))

    def pieces(self, used: np.ndarray[Any, Any], like: Updates) -> list[tuple[Updates, np.ndarray[Any, Any], Any]]:
        """The rounds that hold the used rows: all their rows, which of `used` are among them, and where.

        Most rows of a round are usually in use, and reading it whole is cheaper than picking rows out of it.
        """
        found = []
        for sent in self.sent:
            among = np.flatnonzero(self.rounds[used] == sent.round)
            if len(among):
                found.append((past_updates(like, sent.parts, sent.rows), among, self.places[used[among]]))
        return found


def window_of(absent: str, seen: int, present: int) -> float:
    """How many rounds back the memory reaches: 0, TAU, or the expected time until a client returns."""
    if absent == "off":
        return 0.0
    return seen / present if absent == "expected" else float(absent.partition(":")[2])


@dataclass(frozen=True)
class State:
    """Opaque: pass `out.state` of one round as `state` of the next."""

    rule: str
    server: str
    round: int
    named: bool  # whether the clients were named; without names nobody can be remembered
    seen: tuple[Client, ...]
    layout: list[list[Any]]
    rule_memo: Memo = field(default_factory=dict)
    server_memo: Memo = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def __repr__(self) -> str:
        return (
            f"State({self.rule!r} after round {self.round}, {len(self.seen)} clients seen, "
            f"{len(self.memory.clients)} updates remembered)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically: an interrupted save leaves an older file as it was."""
        storage.write(path, "state", self.to_plain())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> State:
        """Read what `save` wrote; tensors arrive on the CPU and move to the updates' device when used."""
        try:
            return cls.from_plain(storage.read(path, "state"))
        except (KeyError, TypeError, AttributeError) as error:
            raise EvenhandError(f"{str(path)!r} is not a readable state file: {error!r}") from error

    def to_plain(self) -> dict[str, Any]:
        """Nested values that `evenhand.storage` can write."""
        flat = {name: getattr(self, name) for name in self.__dataclass_fields__}
        flat["memory"] = {name: getattr(self.memory, name) for name in self.memory.__dataclass_fields__}
        flat["memory"]["sent"] = [{"round": e.round, "rows": e.rows, "parts": e.parts} for e in self.memory.sent]
        return flat

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> State:
        memory = dict(plain["memory"])
        memory["clients"] = tuple(memory["clients"])
        memory["sent"] = tuple(_sent(entry) for entry in memory["sent"])
        return cls(**{**plain, "seen": tuple(plain["seen"]), "memory": Memory(**memory)})


def _sent(entry: Mapping[str, Any]) -> Sent:
    parts = tuple(tuple(part) if isinstance(part, list) else part for part in entry["parts"])
    return Sent(entry["round"], entry["rows"], parts)
