"""What FairStrategy costs beside Flower's own FedAvg: a round with 2, 10 and 50 clients in one process, 2M parameters.

    python benchmarks/flower.py [--rounds 4]

Clients take five local steps, so that the round is about as short as one with so large a model can be; models are
written and read as Flower does it. The overhead is the server's extra time as a share of the whole round with FedAvg.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp.strategy import FedAvg
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import provenance
from evenhand.flower import FairStrategy, fair_client
from evenhand.flower.inprocess import InProcessGrid

CLIENTS = (2, 10, 50)
METHODS = ("fedavg", "fedlf", "even")
STEPS = 5  # of local training, batches of 50


def network() -> nn.Module:
    """About two million parameters: 1000-1000-990-10."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 990), nn.ReLU(), nn.Linear(990, 10))


def data(context: Context) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    batches = [(torch.randn(50, 1000, generator=generator), torch.randint(10, (50,), generator=generator))]
    return batches * STEPS, batches


def train(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], task: object) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()


def evaluate(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    found = [(model(inputs), labels) for inputs, labels in batches]
    losses = [float(nn.functional.cross_entropy(scores, labels)) for scores, labels in found]
    right = [float((scores.argmax(1) == labels).float().mean()) for scores, labels in found]
    return float(np.mean(losses)), float(np.mean(right))


def plain_client():
    """The same work as a plain Flower client: what FedAvg is measured with."""
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model, (batches, _) = network(), data(context)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        train(model, batches, None)
        found = MetricRecord({"num-examples": 50 * STEPS})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": found})
        return Message(content, reply_to=message)

    return app


class Clocked(InProcessGrid):
    """Tells the clients' time from the server's."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.clients = 0.0

    def send_and_receive(self, messages, *, timeout=None):
        given = list(messages)
        started = perf_counter()
        replies = super().send_and_receive(given, timeout=timeout)
        self.clients += perf_counter() - started
        return replies


def measured(strategy, app, clients: int, rounds: int) -> tuple[float, float]:
    """Seconds a round of the clients and of the server: the least of the rounds after the first."""
    grid = Clocked(app, [{"partition-id": client} for client in range(clients)])
    start = ArrayRecord(network().state_dict())
    marks: list[tuple[float, float]] = []

    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def begin(*given, **named):
        marks.append((perf_counter(), grid.clients))
        return configure(*given, **named)

    ends: list[tuple[float, float]] = []

    def end(*given, **named):
        found = aggregate(*given, **named)
        ends.append((perf_counter(), grid.clients))
        return found

    strategy.configure_train, strategy.aggregate_train = begin, end
    strategy.start(grid, start, num_rounds=rounds)
    pairs = [
        (now[0] - before[0] - (now[1] - before[1]), now[1] - before[1])
        for before, now in zip(marks[1:], ends[1:], strict=True)
    ]
    return min(pair[1] for pair in pairs), min(pair[0] for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    count = sum(parameter.numel() for parameter in network().parameters())
    print(f"{provenance()}; {count:,} parameters, {given.rounds} rounds, the least of them\n")
    heads = ["clients", "round of FedAvg (s)", "its server (s)", *(f"{name}: server (s), round" for name in METHODS)]
    print("| " + " | ".join(heads) + " |\n|" + "---:|" * len(heads))
    ours = fair_client(train, evaluate, model=network, data=data)
    for clients in CLIENTS:
        work, theirs = measured(FedAvg(fraction_evaluate=0.0), plain_client(), clients, given.rounds)
        row = [str(clients), f"{work + theirs:.2f}", f"{theirs:.3f}"]
        for name in METHODS:
            strategy = FairStrategy(name, evaluate_every=0)
            _, server = measured(strategy, ours, clients, given.rounds)
            row.append(f"{server:.3f}, {100 * (server - theirs) / (work + theirs):+.1f}%")
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
