"""What a method carries from round to round, and how it is kept on disk (safetensors + JSON, no pickle).

The memory of absent clients lives here: each client's latest update with its age, and the inner products among the
remembered updates, so that a round costs products with its own rows alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.geometry import Floats
from evenhand.methods.base import Client, Memo
from evenhand.transfer import sent
from evenhand.updates import Updates, past_updates

Integers = np.ndarray[Any, np.dtype[np.int64]]

SLACK = 2.0  # windows that a row is kept with absent="expected", since a smaller cohort widens the window again


@dataclass(frozen=True)
class Held:
    """Remembered rows kept together: the first `rows` of a matrix (rows x size) per entry of the layout.

    `turn` counts how often rows were written in place; a memory made before the last time is out of date.
    """

    rows: int
    parts: tuple[Tensor, ...]
    turn: list[int] = field(default_factory=lambda: [0], compare=False)

    def filled(self) -> tuple[Tensor, ...]:
        return tuple(part[: self.rows] for part in self.parts)


@dataclass(frozen=True)
class Memory:
    """The latest update of each client seen, with its round, its numbers, and the rows' inner products per block."""

    clients: tuple[Client, ...] = ()
    rounds: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    holders: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # which of `held` has the row
    places: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # which of its rows it is
    values: Mapping[str, Floats] = field(default_factory=dict)
    gram: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    held: tuple[Held, ...] = ()
    turns: tuple[int, ...] = ()  # the turn of each of `held` when this memory was made

    def check(self) -> None:
        """Refuse a memory whose rows a later round has written over."""
        if any(held.turn[0] != turn for held, turn in zip(self.held, self.turns, strict=True)):
            raise EvenhandError(
                "this state was given up (own=True) to a later round, which has written over its memory; pass the "
                "newest state, or call with own=False where a state shall serve more than once"
            )

    def absent(self, present: Collection[Client], index: int, window: float) -> Integers:
        """Positions of the rows of clients not present that are at most `window` rounds old."""
        if not self.clients:
            return np.zeros(0, dtype=np.int64)
        here = set(present)
        away = np.array([client not in here for client in self.clients], dtype=bool)
        return np.flatnonzero(away & (index - self.rounds <= window))

    def last(self, present: Sequence[Client], between: Floats, index: int, window: float) -> Floats | None:
        """Of the present clients' own last rows: products with their new ones, and squares (2 x blocks x present).

        between: products of the new rows with all remembered ones. NaN where a client has no row that is at most
        `window` rounds old; None where nobody has.
        """
        near = np.flatnonzero(index - self.rounds <= window).tolist()
        places = {self.clients[position]: position for position in near}
        back = [position for position, client in enumerate(present) if client in places]
        if not back:
            return None
        rows = [places[present[position]] for position in back]
        found = np.full((2, len(between), len(present)), np.nan)
        found[0][:, back], found[1][:, back] = between[:, back, rows], self.gram[:, rows, rows]
        return found

    def pieces(self, like: Updates) -> list[Updates]:
        """All remembered rows as they lie, beside the updates of a round."""
        return [past_updates(like, held.filled(), held.rows) for held in self.held]

    def between(self, products: Sequence[Floats], rows: int, blocks: int) -> Floats:
        """Products of a round's rows with each of the pieces, as products with the remembered clients in order."""
        found = np.empty((blocks, rows, len(self.clients)))
        for holder, piece in enumerate(products):
            mine = np.flatnonzero(self.holders == holder)
            found[:, :, mine] = piece[:, :, self.places[mine]]
        return found

    def spread(self, coefficients: Floats, used: Integers) -> list[Floats]:
        """Coefficients of the used rows (blocks x used) as coefficients of all rows of each piece."""
        found = []
        for holder, held in enumerate(self.held):
            mine = self.holders[used] == holder
            scales = np.zeros((len(coefficients), held.rows))
            scales[:, self.places[used[mine]]] = coefficients[:, mine]
            found.append(scales)
        return found

    def store(
        self, kept: Integers, fresh: Updates, *, own: bool, device: torch.device | None = None
    ) -> tuple[Integers, Integers, tuple[Held, ...]]:
        """Holders, places and held rows of the kept clients and then of the fresh rows.

        Fresh rows are copied beside what is there, so that this memory stays as it is; with `own` they are written over
        rows that are not kept, in one matrix that holds them all, and this memory is out of date.
        """
        if own:
            return self._store_in_place(kept, fresh, device)
        still = sorted(set(self.holders[kept].tolist()))
        holders = np.append(np.searchsorted(still, self.holders[kept]), np.full(len(fresh), len(still)))
        places = np.append(self.places[kept], np.arange(len(fresh)))
        copies = tuple(fresh.dense(part, device) for part in range(len(fresh.parts)))
        return holders, places, (*(self.held[i] for i in still), Held(len(fresh), copies))

    def _store_in_place(
        self, kept: Integers, fresh: Updates, device: torch.device | None
    ) -> tuple[Integers, Integers, tuple[Held, ...]]:
        one = len(self.held) == 1
        before = self.places[kept] if one else np.arange(len(kept))
        taken = set(before.tolist())
        free = [place for place in range(len(kept) + len(fresh)) if place not in taken][: len(fresh)]
        filled = self.held[0].rows if one else len(kept)
        rows = max(filled, max(free, default=-1) + 1)
        index = np.array(free, dtype=np.int64)
        parts = []
        for part in range(len(fresh.parts)):
            rows_now = fresh.dense(part, device, copy=False)
            bank = self.held[0].parts[part] if one else None
            if bank is None or len(bank) < rows or bank.device != rows_now.device:
                grown = rows_now.new_empty(rows + rows // 2, rows_now.shape[1])
                if bank is not None:
                    grown[:filled] = bank[:filled]
                else:
                    for place, position in enumerate(kept.tolist()):
                        holder = self.held[self.holders[position]].parts[part]
                        grown[place] = holder[self.places[position]]
                bank = grown
            bank.index_copy_(0, sent(index, torch.int64, bank.device), rows_now)
            parts.append(bank)
        turn = self.held[0].turn if one else [0]
        turn[0] += 1
        holders = np.zeros(len(kept) + len(fresh), dtype=np.int64)
        return holders, np.append(before, free).astype(np.int64), (Held(rows, tuple(parts), turn),)


def window_of(absent: str, seen: int, present: int) -> float:
    """How many rounds back the memory reaches: 0, TAU, or the expected time until a client returns."""
    if absent == "off":
        return 0.0
    return seen / present if absent == "expected" else float(absent.partition(":")[2])


def kept_window(absent: str, window: float) -> float:
    """How many rounds rows are kept that a later round may look back to."""
    return SLACK * window if absent == "expected" else window


@dataclass(frozen=True)
class State:
    """Opaque: pass `out.state` of one round as `state` of the next."""

    rule: str
    server: str
    round: int
    named: bool  # whether the clients were named; without names nobody can be remembered
    seen: frozenset[Client]  # everybody so far, where the memory's window depends on it
    layout: list[list[Any]]
    rule_memo: Memo = field(default_factory=dict)
    server_memo: Memo = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def __repr__(self) -> str:
        return f"State({self.rule!r} after round {self.round}, {len(self.memory.clients)} updates remembered)"

    def placed(self, device: torch.device) -> State:
        """The same with its remembered updates on a device (a loaded state comes on the CPU)."""
        held = tuple(Held(entry.rows, tuple(part.to(device) for part in entry.parts)) for entry in self.memory.held)
        return replace(self, memory=replace(self.memory, held=held, turns=(0,) * len(held)))

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
        flat["memory"]["held"] = [{"rows": e.rows, "parts": e.filled()} for e in self.memory.held]
        del flat["memory"]["turns"]
        flat["seen"] = sorted(self.seen, key=lambda client: (isinstance(client, str), client))
        return flat

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> State:
        memory = dict(plain["memory"])
        memory["clients"] = tuple(memory["clients"])
        memory["held"] = tuple(Held(entry["rows"], tuple(entry["parts"])) for entry in memory["held"])
        memory["turns"] = (0,) * len(memory["held"])
        return cls(**{**plain, "seen": frozenset(plain["seen"]), "memory": Memory(**memory)})
