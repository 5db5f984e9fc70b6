"""Nodes that come and go: who is connected, and who they say they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING
from time import monotonic

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from evenhand.flower import wire
from evenhand.flower.exchange import Exchange
from evenhand.flower.replies import member
from evenhand.flower.roster import Member, Roster
from evenhand.flower.wire import Unusable

AGAIN = 5.0  # seconds until a node that did not say who it is is asked again; then twice as many, and so on


@dataclass(frozen=True)
class Strange:
    """A node that did not say who it is."""

    reason: str
    tries: int
    again: float  # the time from which it is asked again


@dataclass
class Door:
    """Takes nodes in, and remembers those that it could not."""

    strange: dict[int, Strange] = field(default_factory=dict)

    def look(self, grid: Grid, roster: Roster, timeout: float) -> None:
        """Put the roster right: who has left, and who is new."""
        here = sorted(grid.get_node_ids())
        roster.leave(here)
        self.strange = {node: entry for node, entry in self.strange.items() if node in here}
        self._meet(grid, roster, [node for node in here if node not in roster.nodes and self._due(node)], timeout)

    def complaints(self) -> str:
        """Why some nodes were not taken in."""
        return "".join(f"; node {node}: {entry.reason}" for node, entry in self.strange.items())

    def _due(self, node: int) -> bool:
        """Whether to ask a node who it is: a new one at once, a strange one again after a while."""
        entry = self.strange.get(node)
        return entry is None or monotonic() >= entry.again

    def _meet(self, grid: Grid, roster: Roster, nodes: Sequence[int], timeout: float) -> None:
        if not nodes:
            return
        messages = [Message(RecordDict(), node, wire.DESCRIBE, ttl=timeout) for node in nodes]
        found = Exchange(wire.DESCRIBE, messages, list(nodes), timeout).over(grid)
        members: dict[int, Member] = {}
        for node, content in found.good.items():
            try:
                members[node] = member(content)
            except Unusable as error:
                found.failed[node] = str(error)
        for note in (*found.notes, *roster.join(members)):
            log(WARNING, note)
        for node, reason in found.failed.items():
            log(WARNING, "node %d did not say who it is (%s); is its ClientApp a fair_client?", node, reason)
        for node in set(nodes) - set(roster.nodes):
            tries = 1 + (self.strange[node].tries if node in self.strange else 0)
            reason = found.failed.get(node, "its name is taken, or not one of this run's clients")
            self.strange[node] = Strange(reason, tries, monotonic() + AGAIN * 2 ** (tries - 1))
