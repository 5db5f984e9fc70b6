"""Shared by the tests of evenhand.flower: small deployments in this process, and a plain client of a user's own."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")

import torch
from flwr.app import ArrayRecord
from torch import nn

from evenhand.experiment import Experiment
from evenhand.flower import FairStrategy, fair_client, site_client
from evenhand.flower.deployment import Deployment
from evenhand.flower.inprocess import InProcessGrid
from evenhand.flower.server import SiteStrategy

logging.getLogger("flwr").setLevel(logging.ERROR)

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 6,
    "rounds": 4,
    "eval_every": 2,
    "participation": 0.5,
    "work.batch_size": 50,
    "device": "cpu",
    "measure": "losses",
}
GROUPS = {"data": "synthetic-groups", "clients": None, "participation": 1.0, "rounds": 3}


def small(method: Any = "fedavg", **settings: Any) -> Experiment:
    return Experiment().with_settings({**SMALL, **settings, "method": method})


def grid_of(deployment: Deployment, kind: type[InProcessGrid] = InProcessGrid) -> InProcessGrid:
    return kind(site_client(deployment), [{"partition-id": client} for client in range(deployment.clients)])


def started(deployment: Deployment) -> ArrayRecord:
    return ArrayRecord(dict(deployment.module().state_dict()))


def federated(experiment: Experiment, **changes: Any) -> tuple[FairStrategy, InProcessGrid]:
    """An experiment played over an in-process grid."""
    deployment = Deployment(experiment)
    grid, strategy = grid_of(deployment), SiteStrategy(deployment, **changes)
    strategy.start(grid, started(deployment), num_rounds=experiment.rounds)
    return strategy, grid


# ------------------------------------------------------------------------------------------ a user's own client


def own_data(context: Any) -> tuple[Any, Any]:
    """Two well-apart classes; every client's are turned a little differently."""
    place = int(context.node_config["partition-id"])
    generator = torch.Generator().manual_seed(place)
    labels = torch.arange(40) % 2
    inputs = torch.randn(40, 3, generator=generator) + (2.0 * labels - 1.0).unsqueeze(1) * (1.0 + 0.2 * place)
    whole = torch.utils.data.TensorDataset(inputs, labels)
    train, test = torch.utils.data.Subset(whole, range(30)), torch.utils.data.Subset(whole, range(30, 40))
    return torch.utils.data.DataLoader(train, batch_size=10), torch.utils.data.DataLoader(test, batch_size=10)


def own_train(model: nn.Module, data: Any, task: Any) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=task.momentum)
    for inputs, labels in data:
        optimiser.zero_grad()
        (nn.functional.cross_entropy(model(inputs), labels) + task.penalty(model)).backward()
        optimiser.step()


def own_evaluate(model: nn.Module, data: Any) -> tuple[float, float]:
    loss, right, count = 0.0, 0, 0
    for inputs, labels in data:
        scores = model(inputs)
        loss += float(nn.functional.cross_entropy(scores, labels, reduction="sum"))
        right += int((scores.argmax(1) == labels).sum())
        count += len(labels)
    return loss / count, right / count


def own_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def own_app(train: Any = own_train, evaluate: Any = own_evaluate, **more: Any) -> Any:
    return fair_client(train, evaluate, **{"model": own_model, "data": own_data, **more})


def own_grid(kind: type[InProcessGrid] = InProcessGrid, clients: int = 4, app: Any = None) -> InProcessGrid:
    return kind(app or own_app(), [{"partition-id": client} for client in range(clients)])


def own_start() -> ArrayRecord:
    return ArrayRecord(own_model().state_dict())
