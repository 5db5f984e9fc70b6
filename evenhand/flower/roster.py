"""Who is there: clients by stable name, whatever node ids Flower gives them, and whom a round asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError
from evenhand.engine.sampling import Sampling
from evenhand.streams import stream

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Member:
    """A client as it describes itself."""

    name: str
    train_samples: int
    test_samples: int
    place: int | None = None  # its number, where clients are numbered


@dataclass
class Roster:
    """Every client ever seen, in an order that does not change, and which of them are connected as which node."""

    members: list[Member] = field(default_factory=list)
    nodes: dict[int, int] = field(default_factory=dict)  # node id -> position, of the connected ones
    fixed: bool = False  # nobody new is taken in

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def train_samples(self) -> Indices:
        return np.array([member.train_samples for member in self.members], dtype=np.int64)

    @property
    def test_samples(self) -> Indices:
        return np.array([member.test_samples for member in self.members], dtype=np.int64)

    @property
    def connected(self) -> dict[int, int]:
        """Position -> node id."""
        return {position: node for node, position in self.nodes.items()}

    def leave(self, here: Iterable[int]) -> None:
        """Forget the node ids that are not among these; their owners stay on the list."""
        present = set(here)
        self.nodes = {node: position for node, position in self.nodes.items() if node in present}

    def join(self, described: Mapping[int, Member]) -> list[str]:
        """Take in nodes that have said who they are; returns what is odd about any of them."""
        notes = []
        known = {member.name: position for position, member in enumerate(self.members)}
        for node, member in sorted(described.items(), key=lambda entry: _order(entry[1])):
            position = known.get(member.name)
            if position is None and self.fixed:
                notes.append(f"{member.name!r} is not one of this run's clients and is not asked")
                continue
            if position is None:
                position = known[member.name] = len(self.members)
                self.members.append(member)
            elif position in self.nodes.values():
                other = self.connected[position]
                notes.append(f"two nodes call themselves {member.name!r}: {other} is asked, {node} is not")
                continue
            else:
                self.members[position] = member  # it may have more data than last time
            self.nodes[node] = position
        return notes

    def sort(self) -> None:
        """Put everybody in the order of their numbers and names, before the first round."""
        order = sorted(range(len(self.members)), key=lambda place: _order(self.members[place]))
        self.members = [self.members[place] for place in order]
        self.nodes = {node: order.index(position) for node, position in self.nodes.items()}

    def cohort(self, sampling: Sampling, seed: int, round: int) -> tuple[list[int], int]:
        """Positions of the clients that a round asks, in ascending order; and how many it is meant to ask.

        The draw is the simulator's, over everybody on the list, so that a schedule can be repeated. Whoever is drawn
        but not connected is replaced by the next connected one in an order that follows from the seed and the round
        alone: a client that comes or goes changes its own place in a round and no other's.
        """
        sizes, here = self.train_samples, self.connected
        drawn = [int(place) for place in sampling.draw(seed, round, sizes)]
        asked = [place for place in drawn if place in here]
        if len(asked) < len(drawn):
            order = stream(seed, "availability", round).permutation(len(self.members)).tolist()
            spare = [place for place in order if place in here and place not in drawn]
            asked += spare[: len(drawn) - len(asked)]
        return [place for place in sorted(asked) if sizes[place] > 0], len(
            drawn
        )  # without data there is nothing to say

    def to_plain(self) -> list[dict[str, Any]]:
        return [vars(member).copy() for member in self.members]

    def restored(self, plain: Sequence[Mapping[str, Any]]) -> Roster:
        """The list that was written down; those on it who are connected stay so, as they described themselves now."""
        found = Roster([Member(**dict(entry)) for entry in plain], fixed=self.fixed)
        known = {name: position for position, name in enumerate(found.names)}
        for node, position in self.nodes.items():
            member = self.members[position]
            if member.name in known:
                found.nodes[node] = known[member.name]
                found.members[known[member.name]] = member
        return found


def _order(member: Member) -> tuple[Any, ...]:
    """Numbered clients by number, then the others by name, numbers inside names counting as numbers."""
    words = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", member.name) if part]
    return (member.place is None, member.place or 0, words)


def plain_sampling(sampling: Sampling) -> Sampling:
    """Insist on a sampling that invents no failures: in a federation clients fail by themselves."""
    for name, harmless in (("availability", 1.0), ("dropout", 0.0), ("stragglers", 0.0), ("drop", {})):
        if getattr(sampling, name) != harmless:
            raise EvenhandError(
                f"sampling.{name}={getattr(sampling, name)!r} is for the simulator: on Flower clients fail by "
                "themselves; leave it out"
            )
    return sampling
