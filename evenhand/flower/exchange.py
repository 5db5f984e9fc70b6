"""One exchange of messages: whom they went to, and what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from evenhand.flower.roster import Roster

LONGEST_REASON = 300  # letters of a client's error that a record keeps
EXPIRED = 3  # Flower's code for a message that is too old to be answered


@dataclass
class Sorted:
    """The replies by position on the roster: good ones, why the others are not, and what else is odd."""

    good: dict[int, RecordDict] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  # those of the failed who did not answer themselves
    notes: list[str] = field(default_factory=list)


@dataclass
class Exchange:
    """The messages of one kind that went out together."""

    kind: str
    messages: list[Message]
    positions: list[int]
    timeout: float

    @classmethod
    def to(cls, roster: Roster, kind: str, contents: Mapping[int, RecordDict], timeout: float) -> Exchange:
        """A message to each of these positions, none of which outlives the time that is waited for it."""
        nodes = roster.connected
        messages = [Message(content, nodes[place], kind, ttl=timeout) for place, content in contents.items()]
        return cls(kind, messages, list(contents), timeout)

    def over(self, grid: Grid) -> Sorted:
        """Send the messages, wait for the replies, and sort them."""
        return self.sort(grid.send_and_receive(self.messages, timeout=self.timeout) if self.messages else [])

    def sort(self, replies: Iterable[Message]) -> Sorted:
        """Put every reply to the client that was asked.

        An error that Flower makes itself (a node gone, a message too old) names the SuperLink as its sender, so
        replies are told apart by the message they answer.
        """
        found = Sorted()
        by_message = {message.metadata.message_id: place for place, message in enumerate(self.messages)}
        by_node = {message.metadata.dst_node_id: place for place, message in enumerate(self.messages)}
        for reply in replies:
            answered, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            place = by_message.get(answered) if answered else by_node.get(sender)
            if place is None:
                found.notes.append(f"a reply of node {sender} answers none of this round's messages: left out")
                continue
            position = self.positions[place]
            if position in found.good or position in found.failed:
                found.notes.append(f"a second reply of node {sender} to the same message: left out")
            elif reply.has_error():
                found.failed[position] = self._spoken(reply)
                if sender != self.messages[place].metadata.dst_node_id:
                    found.silent.add(position)
            elif not reply.has_content():
                found.failed[position] = "its reply is empty"
            else:
                found.good[position] = reply.content
        for position in self.positions:
            if position not in found.good and position not in found.failed:
                found.failed[position] = f"no reply within {self.timeout:g} s"
                found.silent.add(position)
        return found

    def _spoken(self, reply: Message) -> str:
        if reply.error.code == EXPIRED:
            return f"no reply within {self.timeout:g} s"
        reason = " ".join(str(reply.error.reason or "no reason given").split())
        if len(reason) > LONGEST_REASON:
            reason = "... " + reason[-LONGEST_REASON:]  # a traceback says at its end what went wrong
        return f"error {reply.error.code}: {reason}"
