"""The server of a deployment: FairStrategy over the clients, and the run folder of a simulation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.data import Partition, Split
from evenhand.engine.rounds import Settings
from evenhand.engine.training import Shape
from evenhand.flower.deployment import Deployment
from evenhand.flower.roster import Roster
from evenhand.flower.site import ROW, ROWS, SEED, WIDEST
from evenhand.flower.strategy import FairStrategy
from evenhand.folders import CURRENT, NEWEST, PREVIOUS, RunFolder, new_folder
from evenhand.recording import Recorder
from evenhand.running import play
from evenhand.runs import Runs
from evenhand.tables import text_table

DEPLOYMENT = "deployment.toml"


def server_app(deployment: Deployment | str | Path) -> ServerApp:
    """The ServerApp of a deployment. Its run configuration may name the run's folder (`out`), on the server's disk,
    and say that a run in it shall go on (`resume`) or be replaced (`force`)."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = deployment if isinstance(deployment, Deployment) else Deployment.read(deployment)
        config = context.run_config
        out = str(config.get("out") or "") or new_folder(
            f"{chosen.experiment.data_name}-{chosen.experiment.method.name}"
        )
        log(INFO, "results go to %s", Path(out).absolute())
        runs = federate(chosen, grid, out=out, resume=bool(config.get("resume")), force=bool(config.get("force")))
        for line in f"{runs}\nreport  {Path(out).absolute() / 'report.html'}".splitlines():
            log(INFO, line)

    return app


def federate(
    deployment: Deployment,
    grid: Grid,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
) -> Runs:
    """Run a deployment over a grid: into a folder like a simulation's, checkpointed after every round, or in memory."""
    chosen = deployment.experiment
    if out is None:
        federation = Federation(deployment, grid)
        federation.meet()
        return play(chosen, Recorder(federation, None))
    folder = DeploymentFolder(out)
    if resume and folder.started:
        if folder.finished:
            raise EvenhandError(f"{str(out)!r} holds a finished run; there is nothing to resume")
        with folder.locked():
            return _resume(deployment, grid, folder)
    with folder.claimed(force=force):
        federation = Federation(deployment, grid)
        federation.meet()
        folder.begin(chosen.to_toml(), federation)
        folder.keep(deployment)
        return play(chosen, FederationRecorder(federation, folder, every=0.0, keeper=Checkpoints()))


def _resume(deployment: Deployment, grid: Grid, folder: DeploymentFolder) -> Runs:
    begun = Deployment.read(folder.path / DEPLOYMENT)
    if replace(begun, waiting=deployment.waiting).to_toml() != deployment.to_toml():
        raise EvenhandError(
            f"{str(folder.path)!r} holds a run of another description; go on with the {DEPLOYMENT} in it, or choose "
            "another folder (how long anybody is waited for may be changed)"
        )
    folder.keep(deployment)
    federation = Federation(deployment, grid)
    federation.recall(folder)
    federation.meet()
    recorder = FederationRecorder(federation, folder, every=0.0, keeper=Checkpoints())
    recorder.restore()
    return play(deployment.experiment, recorder)


class SiteStrategy(FairStrategy):
    """FairStrategy for evenhand's own clients: they are told which batches are theirs."""

    def __init__(self, deployment: Deployment, **changes: Any) -> None:
        chosen, waiting = deployment.experiment, deployment.waiting
        given: dict[str, Any] = {
            "sampling": chosen.sampling,
            "min_train_nodes": min(waiting.min_replies, deployment.clients),
            "min_available_nodes": deployment.clients,
            "evaluate_every": chosen.eval_every,
            "seed": deployment.seed,
            "lr": chosen.work.rate,
            "measure": chosen.measure,
            "timeout": waiting.timeout,
            "wait": waiting.wait,
            "cells": deployment.cells,
        }
        super().__init__(chosen.method, **{**given, **changes})

    def task(self, index: int, asked: Sequence[int], row: int) -> dict[str, Any]:
        sizes = self.roster.train_samples[list(asked)]
        plan = {SEED: self.seed, ROW: row, ROWS: len(asked), WIDEST: int(sizes.max(initial=1))}
        return super().task(index, asked, row) | plan


# ------------------------------------------------------------------------------------------------- as it is recorded


class Federation:
    """A deployment in the form in which runs are recorded: what a simulation is, with the clients elsewhere."""

    def __init__(self, deployment: Deployment, grid: Grid) -> None:
        chosen = deployment.experiment
        self.grid = grid
        self.strategy = SiteStrategy(deployment)
        self.module: Any = deployment.module()
        self.shape: Any = Shape.of(self.module)
        self.cells = deployment.cells
        self.device = torch.device("cpu")
        self.dataset: Any = Elsewhere(chosen.data_name)
        self.settings: Any = Settings(chosen.rounds, chosen.work, chosen.sampling, chosen.eval_every, chosen.measure)
        trained = {name: tensor for name, tensor in self.module.named_parameters() if tensor.requires_grad}
        self.arrays = ArrayRecord({name: tensor.detach().clone() for name, tensor in trained.items()})
        self.replicas: list[Any] = []

    @property
    def round(self) -> int:
        return self.strategy.round

    @round.setter
    def round(self, value: int) -> None:
        self.strategy.round = value

    def meet(self) -> None:
        """Wait for the clients; from then on nobody else belongs to the run."""
        self.strategy.open(self.grid, self.arrays)
        self.strategy.roster.fixed = True
        self.replicas = [Remote(self.strategy)]

    def recall(self, folder: RunFolder) -> None:
        """The clients of a run that goes on, from its last checkpoint; not all of them need to be there at once."""
        for name in (NEWEST, CURRENT, PREVIOUS):
            if (folder.path / name).is_file():
                with contextlib.suppress(EvenhandError):
                    self.strategy.restore(folder.path / name)
                    self.strategy.roster.fixed = True
                    self.strategy.min_available_nodes = self.strategy.min_train_nodes
                    return

    def facts(self) -> dict[str, Any]:
        """What the server knows of the model; of the data, no more than its name and how many samples there are."""
        roster = self.strategy.roster
        return {
            "data": self.dataset.name,
            "samples": int(roster.train_samples.sum() + roster.test_samples.sum()),
            "parameters": self.shape.parameters,
            "layers": list(self.shape.layers),
            "command": f"evenhand deploy {DEPLOYMENT}",
        }

    def holdings(self, replica: Any) -> None:
        """Which classes a client holds stays with the client."""

    def run(self, until: int | None = None, after_round: Callable[[Any], None] | None = None) -> None:
        """Play all rounds that are left."""
        if after_round is not None:
            self.strategy.after_round = lambda _: after_round(self)
        self.strategy.start(self.grid, self.arrays, num_rounds=self.settings.rounds)


class Remote:
    """A federation's one run, as recorders see it; its rounds and evaluations are the strategy's."""

    personal = None

    def __init__(self, strategy: FairStrategy) -> None:
        self.strategy, self.method, self.seed = strategy, strategy.method, strategy.seed
        self.partition = holdings(strategy.roster)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return self.strategy.rounds

    @rounds.setter
    def rounds(self, entries: list[dict[str, Any]]) -> None:
        self.strategy.rounds = entries

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return self.strategy.evaluations

    @evaluations.setter
    def evaluations(self, entries: list[dict[str, Any]]) -> None:
        self.strategy.evaluations = entries

    @property
    def evaluated(self) -> Tensor:
        return self.strategy.evaluated

    @property
    def predicted(self) -> Any:
        return self.strategy.predicted


class Elsewhere:
    """The clients' data as the server knows it: by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self) -> str:
        return f"{self.name}: the clients' own, which the server does not see"


class Holdings(Partition):
    """How many samples each client says it has; which ones, and of which classes, the server does not know."""

    def table(self, dataset: Any, limit: int = 20) -> str:
        rows = [["client", "train", "test"]]
        for client in range(min(self.clients, limit)):
            counts = [f"{int(split.sizes[client]):,}" for split in (self.train, self.test)]
            rows.append([(self.names or ())[client], *counts])
        lines = [text_table(rows, right=(1, 2))]
        if self.clients > limit:
            lines.append(f"... and {self.clients - limit:,} more clients")
        return "\n".join(lines)


def holdings(roster: Roster) -> Holdings:
    def split(sizes: Any) -> Split:
        return Split(np.arange(int(sizes.sum())), np.append(0, np.cumsum(sizes)))

    none = np.zeros(len(roster.members), dtype=np.int64)
    train, test = split(roster.train_samples), split(roster.test_samples)
    return Holdings("as the clients say", len(roster.members), train, split(none), test, names=roster.names)


class DeploymentFolder(RunFolder):
    """The folder of a deployment's run; it also holds the deployment's description."""

    verb = "deploy"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, f"evenhand deploy {Path(path) / DEPLOYMENT} --out {path} --resume")

    def describe(self, text: str) -> None:
        first = f"# what was run; {DEPLOYMENT} beside this file repeats it\n\n"
        storage.write_bytes(self.path / self.description, (first + text).encode())

    def keep(self, deployment: Deployment) -> None:
        storage.write_bytes(self.path / DEPLOYMENT, deployment.to_toml().encode())


class Checkpoints:
    """The server's state on disk."""

    def save(self, simulation: Federation, path: Path) -> None:
        simulation.strategy.save(path)

    def restore(self, simulation: Federation, path: Path) -> None:
        simulation.strategy.restore(path)


class FederationRecorder(Recorder):
    """Leaves signals to Flower: every round is on disk, so that an end at any moment costs one round at most."""

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        yield
