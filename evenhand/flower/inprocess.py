"""A Grid whose nodes live in this process: an app can be tried and tested without a network.

grid = InProcessGrid(client_app, [{"partition-id": k} for k in range(10)])
FairStrategy("fedlf").start(grid, ArrayRecord(model.state_dict()), num_rounds=3)
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

SERVER = 1
FAILED = 2  # Flower's code for a ClientApp that raised an exception


class InProcessGrid(Grid):
    """Calls a ClientApp once a message, one after another, each node with its own configuration and state."""

    def __init__(
        self, app: ClientApp, nodes: Sequence[Mapping[str, Any]], *, run_config: Mapping[str, Any] | None = None
    ) -> None:
        _identify()
        self.app = app
        self.contexts = {
            1000 + number: Context(
                run_id=1,
                node_id=1000 + number,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for number, config in enumerate(nodes)
        }
        self.online = set(self.contexts)
        self.sent: list[str] = []  # the types of all messages so far
        self._numbers = itertools.count(1)

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.online)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Every node's answer, in the order in which they were asked."""
        given = list(messages)
        for message in given:
            self._deliver(message)
        replies = [self.answer(message) for message in given]
        return [reply for reply in replies if reply is not None]

    def answer(self, message: Message) -> Message | None:
        """What a node makes of a message; a subclass may let it fail."""
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # as a SuperNode would report it
            reason = "".join(traceback.format_exception_only(error)).strip()
            return Message(Error(FAILED, reason), reply_to=message)

    def _deliver(self, message: Message) -> None:
        message.metadata.__dict__["_message_id"] = f"message-{next(self._numbers)}"
        self.sent.append(message.metadata.message_type)

    # ---- what Flower's strategies do not use

    def set_run(self, run: Any) -> None:
        """Nothing to set: there is one run."""

    @property
    def run(self) -> Any:
        raise NotImplementedError("an in-process grid has no run")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_nodes(self) -> Iterable[Any]:
        raise NotImplementedError("an in-process grid knows its nodes by number: get_node_ids()")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("an in-process grid answers at once: send_and_receive()")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("an in-process grid answers at once: send_and_receive()")


def _identify() -> None:
    """Messages ask the process for whom it works; outside Flower's own processes that has to be said.

    The only use of a private module of Flower.
    """
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
