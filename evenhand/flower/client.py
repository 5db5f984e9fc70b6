"""`fair_client`: a user's ordinary PyTorch functions as a ClientApp that answers what FairStrategy asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from evenhand.checks import EvenhandError
from evenhand.flower import wire
from evenhand.flower.keep import Keep
from evenhand.methods import Method, method
from evenhand.objectives import ClientMomentum, Correction, Personal, PlainRisk, Proximal, Similarity

PERSONAL = "personal"


@dataclass
class Task:
    """What a client is asked in a round, for the user's own functions."""

    round: int  # from 1, as Flower counts
    config: Mapping[str, Any] = field(default_factory=dict)  # the user's own (train_config, evaluate_config)
    lr: float | None = None  # the learning rate that the server reckons with, where it was told one
    objective: Any = field(default_factory=PlainRisk)
    received: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    used: set[str] = field(default_factory=set, repr=False)

    def penalty(self, model: nn.Module) -> Tensor:
        """What the method adds to the loss of every step (FedProx's term, Ditto's pull); zero where it adds nothing."""
        self.used.add("penalty")
        named = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        if not isinstance(self.objective, (Proximal, Personal)):
            return torch.zeros((), device=next(iter(named.values())).device)
        pull = self.objective if isinstance(self.objective, Proximal) else Proximal(mu=self.objective.lam)
        return pull.penalty(named, {name: self.received[name].to(tensor.device) for name, tensor in named.items()})

    @property
    def momentum(self) -> float:
        """The momentum of the clients' SGD that the method asks for (FedFa); zero where it asks for none."""
        self.used.add("momentum")
        return float(getattr(self.objective, "client_momentum", 0.0))

    def check(self) -> None:
        """Insist that the training looked at what the method asks of it."""
        if isinstance(self.objective, (Proximal, Personal)) and "penalty" not in self.used:
            raise EvenhandError(
                f"the method's clients minimise {self.objective.name!r}: add task.penalty(model) to the loss in train()"
            )
        if isinstance(self.objective, ClientMomentum) and "momentum" not in self.used:
            raise EvenhandError("the method's clients use momentum: pass momentum=task.momentum to SGD in train()")


Train = Callable[[nn.Module, Any, Task], Any]
Evaluate = Callable[[nn.Module, Any], tuple[float, float]]


def fair_client(
    train: Train,
    evaluate: Evaluate,
    *,
    model: Callable[[], nn.Module],
    data: Callable[[Context], tuple[Any, Any]],
    name: Callable[[Context], str] | None = None,
    size: Callable[[Any], int] | None = None,
) -> ClientApp:
    """A ClientApp that trains and measures with functions of your own, and reports what FairStrategy asks.

    Args:
        train: `train(model, data, task)` trains the model in place on the training data.
        evaluate: `evaluate(model, data)` returns the mean loss and the accuracy on some data. It is called with the
            test data for evaluations, and with the training data where a method asks for losses.
        model: makes the network; its weights are those that the server sends.
        data: `data(context)` returns the client's training data and test data (loaders, tensors: anything that `train`
            and `evaluate` take).
        name: the client's stable name; default: `name` or `partition-id` of the node's configuration, else the node id.
        size: the number of samples in some data; default: len(data.dataset) of a loader, else len(data).
    """
    for said, given in (("train", train), ("evaluate", evaluate), ("model", model), ("data", data)):
        if not callable(given):
            raise EvenhandError(f"{said}={given!r} must be a function")
    count = size or samples_in
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        ours, theirs = data(context)
        return described(message, (name or node_name)(context), count(ours), count(theirs), node_place(context))

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        task = wire.read_task(message.content)
        chosen, (ours, _), network = _method(task), data(context), model()
        received = wire.tensors_of(wire.model_in(message.content))
        network.load_state_dict(received)
        found: dict[str, Any] = {wire.SAMPLES: count(ours)}
        wanted = task[wire.WANT]
        if wire.BEFORE in wanted:
            found[wire.LOSS], found[wire.ACCURACY] = _measured(evaluate, network, ours)
        asked = _asked(task, message, chosen, received)
        if isinstance(chosen.objective, Personal):
            found |= _train_personal(train, model(), ours, asked, Keep(context, task[wire.EXPERIMENT]), task)
            asked = Task(asked.round, asked.config, asked.lr, PlainRisk(), received)
        network.train()
        train(network, ours, asked)
        asked.check()
        if wire.AFTER in wanted:
            found[wire.TRAINED_LOSS] = _measured(evaluate, network, ours)[0]
        content = RecordDict({wire.ARRAYS: ArrayRecord(network.state_dict()), wire.METRICS: MetricRecord(found)})
        return Message(content, reply_to=message)

    @app.query("trial")
    def trial(message: Message, context: Context) -> Message:
        task, (ours, _), network = wire.read_task(message.content), data(context), model()
        start = wire.tensors_of(message.content.array_records[wire.ARRAYS])
        step = wire.tensors_of(message.content.array_records[wire.DIRECTION])
        losses = []
        for length in task[wire.LENGTHS]:
            moved = {
                key: tensor - length * step[key] if tensor.is_floating_point() else tensor
                for key, tensor in start.items()
            }
            network.load_state_dict(moved)
            losses.append(_measured(evaluate, network, ours)[0])
        return Message(RecordDict({wire.METRICS: MetricRecord({wire.TRIAL_LOSSES: losses})}), reply_to=message)

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        task, (_, theirs), network = wire.read_task(message.content), data(context), model()
        tensors: Mapping[str, Tensor] = wire.tensors_of(wire.model_in(message.content))
        if isinstance(_method(task).objective, Personal):
            tensors = Keep(context, task[wire.EXPERIMENT]).read(PERSONAL) or tensors
        network.load_state_dict(tensors)
        loss, accuracy = _measured(evaluate, network, theirs) if count(theirs) else (0.0, 0.0)
        return evaluated(message, count(theirs), loss, accuracy)

    return app


def _train_personal(
    train: Train, network: nn.Module, data: Any, asked: Task, keep: Keep, task: Mapping[str, Any]
) -> dict[str, int]:
    """Ditto: the client's own model takes the same steps, pulled towards the received one."""
    own = keep.read(PERSONAL, before=asked.round)
    network.load_state_dict(own or dict(asked.received))
    network.train()
    train(network, data, asked)
    asked.check()
    keep.write(PERSONAL, asked.round, {key: tensor.detach().cpu() for key, tensor in network.state_dict().items()})
    return {wire.LOST: int(own is None and bool(task[wire.KNOWN]))}


def _method(task: Mapping[str, Any]) -> Method:
    """The method, where a client of the user's own can do its part."""
    chosen = method(task[wire.METHOD])
    if chosen.objective.grouped or isinstance(chosen.objective, (Similarity, Correction)):
        raise EvenhandError(
            f"{chosen.name}'s clients minimise {chosen.objective.name!r}, which evenhand's own client can do "
            "(evenhand.flower.site_client, evenhand deploy) and a train() of your own cannot"
        )
    return chosen


def _asked(task: Mapping[str, Any], message: Message, chosen: Method, received: Mapping[str, Tensor]) -> Task:
    config = message.content.config_records.get(wire.CONFIG, ConfigRecord())
    return Task(int(task[wire.ROUND]), dict(config), task.get("lr"), chosen.objective, received)


def _measured(evaluate: Evaluate, network: nn.Module, data: Any) -> tuple[float, float]:
    network.eval()
    with torch.no_grad():
        found = evaluate(network, data)
    try:
        loss, accuracy = (float(number) for number in found)
    except (TypeError, ValueError) as error:
        raise EvenhandError(
            f"evaluate() returned {found!r}; it should return the mean loss and the accuracy"
        ) from error
    return loss, accuracy


def samples_in(data: Any) -> int:
    """Samples in a loader or anything else that has a length."""
    try:
        return len(getattr(data, "dataset", data))
    except TypeError as error:
        raise EvenhandError(
            f"how many samples are in a {type(data).__name__}? pass fair_client(size=...), a function that says so"
        ) from error


# ------------------------------------------------------------------------------------------ shared with evenhand's own


def node_name(context: Context) -> str:
    """The stable name of a node, as its owner configured it."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def node_place(context: Context) -> int | None:
    """The client's number, where clients are numbered."""
    place = context.node_config.get("partition-id")
    return int(place) if isinstance(place, int) else None


def described(message: Message, name: str, train: int, test: int, place: int | None) -> Message:
    """The answer to who a client is."""
    said = ConfigRecord({"name": name})
    if place is not None:
        said["place"] = place
    counts = MetricRecord({wire.SAMPLES: int(train), wire.TEST_SAMPLES: int(test)})
    return Message(RecordDict({wire.CLIENT: said, wire.METRICS: counts}), reply_to=message)


def evaluated(
    message: Message, count: int, loss: float, accuracy: float, predicted: np.ndarray[Any, Any] | None = None
) -> Message:
    """The answer to an evaluation."""
    found: dict[str, Any] = {wire.SAMPLES: int(count), wire.LOSS: float(loss), wire.ACCURACY: float(accuracy)}
    if predicted is not None:
        found[wire.PREDICTED] = [int(value) for value in predicted.reshape(-1)]
    return Message(RecordDict({wire.METRICS: MetricRecord(found)}), reply_to=message)
