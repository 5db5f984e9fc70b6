"""The round loop: several replicas of one experiment, every client measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.aggregation import Aggregate, aggregate
from evenhand.checks import EvenhandError
from evenhand.data import Dataset, Partition
from evenhand.engine.batches import Plan, Samples, gather, join, plan
from evenhand.engine.graphs import GraphedTraining
from evenhand.engine.sampling import Sampling
from evenhand.engine.training import LocalWork, Shape, choose_program, evaluate, train
from evenhand.methods import Method
from evenhand.objectives import Personal
from evenhand.state import State
from evenhand.streams import stream

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Replica:
    """One run of the experiment: a seed, a method and a partition, with its model and what its method carries."""

    seed: int
    method: Method
    partition: Partition
    model: Tensor
    state: State | None = None
    offset: Tensor | None = None  # of the model to evaluate, where a method evaluates another one
    personal: Tensor | None = None  # one model a client, where the objective trains them
    rounds: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    pooled: Samples | None = field(default=None, repr=False)

    @property
    def evaluated(self) -> Tensor:
        return self.model if self.offset is None else self.model + self.offset


@dataclass(frozen=True)
class Settings:
    """What all replicas share."""

    rounds: int
    work: LocalWork
    sampling: Sampling
    eval_every: int = 10
    descent: bool = True  # measure after each round whose loss fell
    program: str = "auto"
    chunk: int | None = None  # rows trained at once; None is all


class Simulation:
    """Runs rounds; stops, saves and continues at any round without changing a number."""

    def __init__(
        self, dataset: Dataset, module: nn.Module, replicas: Sequence[Replica], settings: Settings, device: torch.device
    ) -> None:
        self.dataset, self.module, self.settings, self.device = dataset, module.to(device), settings, device
        self.inputs, self.targets = dataset.inputs.to(device), dataset.targets.to(device)
        self.shape = Shape.of(module)
        self.program = choose_program(module, settings.program)
        self.graphs: GraphedTraining | None = None
        if GraphedTraining.possible(module, device, self.program):
            self.graphs = GraphedTraining(self.program, self.shape, self.inputs, self.targets, settings.work)
        self.replicas = list(replicas)
        self.round = 0
        for replica in self.replicas:
            if len(replica.partition.train) == 0:
                raise EvenhandError("the partition has no clients")

    @cached_property
    def data_fingerprint(self) -> str:
        """Taken once: it reads the whole data set, and every checkpoint records it."""
        return self.dataset.fingerprint()

    def run(self, until: int | None = None, after_round: Callable[[Simulation], None] | None = None) -> None:
        """Play rounds up to `until` (default: all), evaluating on the way."""
        last = self.settings.rounds if until is None else min(until, self.settings.rounds)
        if self.round == 0 and not self.replicas[0].evaluations:
            self.evaluate()
        while self.round < last:
            self._play()
            self.round += 1
            if self.round % self.settings.eval_every == 0 or self.round == self.settings.rounds:
                self.evaluate()
            if after_round is not None:
                after_round(self)

    # ------------------------------------------------------------------------------------------------ one round

    def _play(self) -> None:
        started = perf_counter()
        work, index = self.settings.work, self.round
        cohorts = [self._cohort(replica) for replica in self.replicas]
        plans, trained_on = [], []
        for replica, (asked, _) in zip(self.replicas, cohorts, strict=True):
            samples = [replica.partition.train[k] for k in asked]
            epochs = self.settings.sampling.epochs(replica.seed, index, asked, work.epochs)
            rng = stream(replica.seed, "batches", index)
            plans.append(plan(samples, epochs=epochs, batch_size=work.batch_size, rng=rng))
            trained_on.append(gather(samples, self.device))
        counts = [len(asked) for asked, _ in cohorts]
        owner = np.repeat(np.arange(len(self.replicas)), counts)
        models = torch.stack([replica.model for replica in self.replicas])
        received = models[torch.from_numpy(owner).to(self.device)]
        rows = received.clone()
        work_plan, edges = join(plans), np.cumsum([0, *counts])
        pulls = [getattr(replica.method.objective, "mu", 0.0) for replica in self.replicas]
        self._train(rows, received, work_plan, owner, pulls)
        self._train_personal(received, work_plan, owner, [asked for asked, _ in cohorts], edges)
        updates = torch.sub(received, rows, out=rows)
        for number_, replica in enumerate(self.replicas):
            asked, lost = cohorts[number_]
            self._serve(replica, asked, lost, updates[edges[number_] : edges[number_ + 1]], trained_on[number_])
            replica.rounds[-1]["seconds"] = (perf_counter() - started) / len(self.replicas)

    def _cohort(self, replica: Replica) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        sizes = replica.partition.train.sizes
        asked = self.settings.sampling.draw(replica.seed, self.round, sizes)
        asked = asked[sizes[asked] > 0]  # a client without training data has nothing to say
        return asked, self.settings.sampling.failed(replica.seed, self.round, asked)

    def _train_personal(
        self,
        received: Tensor,
        work_plan: Plan,
        owner: np.ndarray[Any, Any],
        asked: list[np.ndarray[Any, Any]],
        edges: np.ndarray[Any, Any],
    ) -> None:
        """Ditto: the asked clients' own models take the same steps, pulled towards the received model."""
        pulls = [getattr(replica.method.objective, "lam", 0.0) for replica in self.replicas]
        if not any(isinstance(replica.method.objective, Personal) for replica in self.replicas):
            return
        rows = received.clone()
        for number_, replica in enumerate(self.replicas):
            if isinstance(replica.method.objective, Personal):
                if replica.personal is None:
                    replica.personal = replica.model.repeat(replica.partition.clients, 1)
                rows[edges[number_] : edges[number_ + 1]] = replica.personal[torch.from_numpy(asked[number_])]
        self._train(rows, received, work_plan, owner, pulls)
        for number_, replica in enumerate(self.replicas):
            if replica.personal is not None:
                replica.personal[torch.from_numpy(asked[number_])] = rows[edges[number_] : edges[number_ + 1]]

    def _train(
        self, rows: Tensor, received: Tensor, work_plan: Plan, owner: np.ndarray[Any, Any], pulls: list[float]
    ) -> None:
        """Train the rows in place, in chunks where a limit is set: rows do not depend on each other."""
        chunk = self.settings.chunk or len(rows)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            piece = work_plan if chunk >= len(rows) else work_plan.part(part)
            self._train_chunk(rows[part], received[part], piece, owner[part], pulls)

    def _train_chunk(
        self, rows: Tensor, received: Tensor, work_plan: Plan, owner: np.ndarray[Any, Any], pulls: list[float]
    ) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=rows.dtype, device=self.device)[owner_tensor].unsqueeze(1)

        owner_tensor = torch.from_numpy(owner).to(self.device)
        work = self.settings.work
        momenta = [getattr(r.method.objective, "client_momentum", work.momentum) for r in self.replicas]
        columns = {"rates": column([work.rate(self.round)] * len(self.replicas))}
        if any(momenta):
            columns["momentum"] = column(momenta)
        if any(pulls):
            columns["pull"] = column(pulls)
        if self.graphs is not None and self.graphs.train(rows, received, work_plan, columns):
            return
        train(self.program, self.shape, rows, received, work_plan, self.inputs, self.targets, work, **columns)

    def _serve(
        self,
        replica: Replica,
        asked: np.ndarray[Any, Any],
        lost: np.ndarray[Any, Any],
        updates: Tensor,
        samples: Samples,
    ) -> None:
        """The server's part of a round for one replica: losses, rule, server step, record."""
        before, right = self._losses(replica.model, samples)
        kept = np.flatnonzero(~lost)
        record: dict[str, Any] = {"round": self.round, "asked": asked.tolist(), "lost": asked[lost].tolist()}
        replica.rounds.append(record)
        if not len(kept):
            record["note"] = "no client answered: the model stays"
            return
        trials = 0

        def trial_losses(trial: Tensor) -> Floats:
            nonlocal trials
            trials += 1
            return self._losses(replica.model - trial, samples)[0][kept]

        work = self.settings.work
        out = aggregate(
            replica.method,
            updates if len(kept) == len(asked) else updates[torch.from_numpy(kept).to(self.device)],
            losses=before[kept],
            sizes=samples.counts[kept].astype(np.float64),
            accuracies=right[kept],
            clients=asked[kept].tolist(),
            round=self.round,
            state=replica.state,
            lr=work.rate(self.round),
            layers=self._layers(),
            evaluate=trial_losses,
            seed=replica.seed,
            own=True,
        )
        replica.model = replica.model - out.update
        replica.state, replica.offset = out.state, out.evaluation_offset
        record |= self._record(out, before[kept], len(asked), len(kept), trials)
        if self.settings.descent:
            after = self._losses(replica.model, samples)[0][kept]
            record["fell"] = float((after < before[kept]).mean())

    def _record(self, out: Aggregate, losses: Floats, asked: int, answered: int, trials: int) -> dict[str, Any]:
        size = self.shape.total * 4
        found = out.diagnostics
        present = int((found.ages == 0).sum())
        return {
            "losses": losses.tolist(),
            "coefficients": out.coefficients.tolist(),
            "conflicts": int(found.conflicts[:present].sum()),
            "layer_conflicts": found.layer_conflicts[:, :present].sum(axis=1).tolist(),
            "direction": found.direction_norm,
            "remembered": len(found.ages) - present,
            "excluded": {str(client): reason for client, reason in found.excluded.items()},
            "notes": list(found.notes),
            "bytes_down": size * (asked + trials * answered),
            "bytes_up": size * answered + 8 * answered * (1 + trials),
        }

    def _layers(self) -> dict[str, int]:
        layers: dict[str, int] = {}
        for name, size in zip(self.shape.names, self.shape.sizes, strict=True):
            layers[name.rpartition(".")[0] or name] = layers.get(name.rpartition(".")[0] or name, 0) + size
        return layers

    # ------------------------------------------------------------------------------------------------ evaluation

    def _losses(self, model: Tensor, samples: Samples) -> tuple[Floats, Floats]:
        """Mean loss and accuracy of one model on several clients' samples; NaN for a client without any."""
        sums, right = evaluate(
            self.module,
            self.shape,
            model,
            self.inputs,
            self.targets,
            samples.indices,
            samples.owners,
            len(samples.counts),
        )
        both = torch.stack([sums, right]).cpu().numpy() / np.where(samples.counts > 0, samples.counts, np.nan)
        return both[0], both[1]

    def _personal_losses(self, replica: Replica) -> tuple[Floats, Floats]:
        """Each client's own model on its own test data."""
        assert replica.personal is not None
        found = [
            self._losses(model, gather([replica.partition.test[client]], self.device))
            for client, model in enumerate(replica.personal)
        ]
        return np.array([losses[0] for losses, _ in found]), np.array([right[0] for _, right in found])

    def evaluate(self) -> None:
        """Every client's own test data, all clients, and by their weights the pooled test set."""
        for replica in self.replicas:
            if replica.pooled is None:
                replica.pooled = gather(
                    [replica.partition.test[k] for k in range(replica.partition.clients)], self.device
                )
            losses, accuracies = (
                self._personal_losses(replica)
                if replica.personal is not None
                else self._losses(replica.evaluated, replica.pooled)
            )
            counts = replica.pooled.counts
            replica.evaluations.append(
                {
                    "round": self.round,
                    "accuracies": accuracies,
                    "losses": losses,
                    "pooled_accuracy": float(np.nansum(accuracies * counts) / max(counts.sum(), 1)),
                    "pooled_loss": float(np.nansum(losses * counts) / max(counts.sum(), 1)),
                }
            )
