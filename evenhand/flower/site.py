"""evenhand's own client: one client's data, and the simulator's own local training on it.

What it computes is one row of the simulator's cohort, so that the same experiment gives the same model in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from evenhand.constraints import Sums, View
from evenhand.engine.batches import OPTIONAL, Batches, Plan, gather, mixed, plan, relabelled
from evenhand.engine.choice import choose_program
from evenhand.engine.correction import dimensions, log_probabilities, upper
from evenhand.engine.groups import cells_of, looks_at_groups, sharpness, told_columns
from evenhand.engine.training import Columns, Local, Shape, evaluate, pulling, samples_at_once
from evenhand.engine.wishes import likeness_of, mixup_of, pull_of
from evenhand.flower import correction, wire
from evenhand.flower.client import PERSONAL, described, evaluated, node_name, node_place
from evenhand.flower.deployment import Deployment
from evenhand.flower.keep import Keep
from evenhand.methods import Method, method
from evenhand.objectives import Correction, Personal
from evenhand.streams import stream

PREVIOUS, LABELS, LOSSES = "previous", "labels", "losses"
SEED, ROW, ROWS, WIDEST = "seed", "row", "rows", "widest"  # which row of the cohort's plan of batches is the client's

Indices = np.ndarray[Any, np.dtype[np.int64]]
Task = Mapping[str, Any]


def site_client(deployment: Deployment | str | Path) -> ClientApp:
    """The ClientApp of a deployment: trains evenhand's models on the node's own data."""
    chosen = deployment if isinstance(deployment, Deployment) else Deployment.read(deployment)
    app = ClientApp()

    def site(context: Context) -> Site:
        path = context.node_config.get("data-path")
        return _site(chosen, node_place(context), None if path is None else str(path))

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        here = site(context)
        name = here.name if here.name is not None and "name" not in context.node_config else node_name(context)
        return described(message, name, len(here.train), len(here.test), node_place(context))

    @app.query("survey")
    def survey(message: Message, context: Context) -> Message:
        turn = Turn.of(site(context), message, context)
        return Message(RecordDict({wire.SUMS: wire.write_sums(turn.survey())}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(Turn.of(site(context), message, context).train(), reply_to=message)

    @app.query("trial")
    def trial(message: Message, context: Context) -> Message:
        losses = Turn.of(site(context), message, context).trial()
        return Message(RecordDict({wire.METRICS: MetricRecord({wire.TRIAL_LOSSES: losses})}), reply_to=message)

    @app.query("correct")
    def correct(message: Message, context: Context) -> Message:
        found = Turn.of(site(context), message, context).correct()
        return Message(RecordDict({wire.METRICS: MetricRecord(found)}), reply_to=message)

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        return _evaluate(site(context), message, context)

    return app


class Site:
    """One client's data and network."""

    def __init__(self, deployment: Deployment, place: int | None, path: str | None) -> None:
        dataset, drawn, number = deployment.holding(place, path)
        self.work, self.seed = deployment.experiment.work, deployment.seed
        self.name = drawn.names[number] if drawn.names else None if path is not None else str(number)
        self.train, self.test = drawn.train[number], drawn.test[number]
        own = slice(int(drawn.train.offsets[number]), int(drawn.train.offsets[number + 1]))
        self.labels = None if drawn.labels is None else drawn.labels[own]
        self.true = dataset.labels[self.train]
        self.device = deployment.experiment.torch_device()
        self.module: nn.Module = deployment.module().to(self.device)
        self.shape = Shape.of(self.module)
        self.start = self.shape.flat(self.module).to(self.device)
        self.cells, codes = cells_of(dataset)
        experiment = deployment.experiment
        program = choose_program(self.module, experiment.program, self.device, experiment.precision, dataset.inputs)
        self.local = Local(
            program,
            self.shape,
            dataset.inputs.to(self.device),
            dataset.targets.to(self.device),
            self.work,
            None if codes is None else codes.to(self.device),
            0 if self.cells is None else self.cells.count,
            experiment.precision,
        )

    def flat(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """A model as one row."""
        row = torch.zeros(1, self.shape.total)
        for name, view in self.shape.views(row).items():
            view[0] = arrays[name]
        return row[0].to(self.device)

    def named(self, row: Tensor) -> dict[str, Tensor]:
        return {name: view[0].cpu() for name, view in self.shape.views(row.unsqueeze(0)).items()}

    def said(self, row: Tensor) -> Any:
        """What a model says of the client's training data (log-probabilities)."""
        tensors = {name: view[0] for name, view in self.shape.views(row.unsqueeze(0)).items()}
        inputs = self.local.inputs[torch.from_numpy(self.train).to(self.device)]
        return log_probabilities(self.module, tensors, inputs, samples_at_once(self.local.program, self.device))


@lru_cache(maxsize=256)
def _site(deployment: Deployment, place: int | None, path: str | None) -> Site:
    """Kept for as long as the process lives, which may be one message or a whole simulation."""
    return Site(deployment, place, path)


@dataclass(frozen=True)
class Turn:
    """A client's part of one round."""

    site: Site
    message: Message
    task: Task
    keep: Keep
    method: Method
    model: Tensor  # as received

    @classmethod
    def of(cls, site: Site, message: Message, context: Context) -> Turn:
        task = wire.read_task(message.content)
        model = site.flat(wire.tensors_of(message.content.array_records[wire.ARRAYS]))
        return cls(site, message, task, Keep(context, task[wire.EXPERIMENT]), method(task[wire.METHOD]), model)

    @property
    def round(self) -> int:
        return int(self.task[wire.ROUND])

    @property
    def index(self) -> int:
        return self.round - 1

    # ---- which samples, with which labels

    def batches(self) -> Batches:
        """The client's row of the cohort's plan: the same numbers are drawn as if the others were planned too."""
        site, rows, row = self.site, int(self.task[ROWS]), int(self.task[ROW])
        slots = [np.zeros(int(self.task[WIDEST]), dtype=np.int64)] * rows
        slots[row] = np.arange(len(site.train))
        rng = stream(int(self.task[SEED]), "batches", self.index)
        epochs = np.full(rows, float(site.work.epochs))
        steps = plan(slots, epochs=epochs, batch_size=site.work.batch_size, rng=rng)
        labels = self.labels()
        if labels is None:
            steps = replace(steps, indices=site.train[steps.indices])
        else:
            steps = relabelled(steps, site.train, labels)
            if mixup_of(self.method) > 0.0:
                steps = mixed(steps, mixup_of(self.method), rng)
        return Batches.of(_row(steps, row), site.device)

    def labels(self) -> Indices | None:
        """Of the training data as the client has them; None where they are the data's own."""
        site = self.site
        if not isinstance(self.method.objective, Correction):
            return site.labels
        kept = self.keep.read(LABELS, before=self.round)
        return (site.true if site.labels is None else site.labels) if kept is None else kept[LABELS].numpy()

    # ---- what the server may ask

    def survey(self, batches: Batches | None = None) -> Sums:
        """Sums by cell of the received model."""
        site = self.site
        assert site.cells is not None
        sharp = torch.tensor([[sharpness(self.method)]], device=site.device)
        found = site.local.survey(self.model.unsqueeze(0), batches or self.batches(), sharp).cpu().numpy()
        classes = site.cells.classes
        return Sums(found[..., :classes], found[..., classes], found[..., classes + 1 :])

    def trial(self) -> list[float]:
        """The training loss at every length of the step that the server may take."""
        step = self.site.flat(wire.tensors_of(self.message.content.array_records[wire.DIRECTION]))
        batches, losses = self.batches(), []
        for length in self.task[wire.LENGTHS]:
            moved = self.model - length * step
            losses.append(float(self.site.local.measure(moved.unsqueeze(0), batches)[0, 0]))
        return losses

    def train(self) -> RecordDict:
        """Train, and report what is wanted."""
        site, batches, wanted = self.site, self.batches(), self.task[wire.WANT]
        columns, sums = self._columns(batches)
        received = self.model.unsqueeze(0)
        updates, measured = site.local.round(received, batches, columns, measuring=wire.BEFORE in wanted)
        trained = received - updates
        found: dict[str, Any] = {wire.SAMPLES: len(site.train)}
        if wire.BEFORE in wanted:
            found |= {wire.LOSS: float(measured[0, 0]), wire.ACCURACY: float(measured[1, 0])}
        if wire.AFTER in wanted:
            found[wire.TRAINED_LOSS] = float(site.local.measure(trained, batches)[0, 0])
        found |= self._remember(trained[0], batches)
        content = RecordDict({wire.UPDATE: wire.record_of(site.named(updates[0])), wire.METRICS: MetricRecord(found)})
        if sums is not None:
            content[wire.SUMS] = wire.write_sums(sums)
        return content

    def _columns(self, batches: Batches) -> tuple[Columns, Sums | None]:
        """What the method adds to the training; and the sums by cell, where they go with the answer."""
        site, chosen, work = self.site, self.method, self.site.work
        rate, momentum = work.rate(self.index), getattr(chosen.objective, "client_momentum", work.momentum)
        named = self._told(rate, momentum, pull_of(chosen, rate))
        if looks_at_groups(chosen):
            named["sharpness"] = torch.full_like(named["rates"], sharpness(chosen))
        if correction.LEASH in self.task:
            named["leash"] = torch.tensor([[self.task[correction.LEASH]]], dtype=torch.float32, device=site.device)
        sums = None
        if wire.TOLD in self.message.content.array_records:
            named |= wire.tensors_of(self.message.content.array_records[wire.TOLD])
        elif looks_at_groups(chosen):
            sums = self.survey(batches)
            named |= self._lean(sums)
        strengths = likeness_of(chosen)
        if strengths:
            before = self.keep.read(PREVIOUS, before=self.round)
            named["likeness"] = torch.tensor([strengths], device=site.device)
            named["previous"] = (self.model if before is None else site.flat(before)).unsqueeze(0)
        return Columns(**named), sums

    def _told(self, rate: float, momentum: float, pull: float) -> dict[str, Tensor]:
        """What one row is told of its steps."""
        values = {"rates": [rate], "momentum": [momentum], **pulling([rate], [pull], [momentum], self.site.work)}
        device = self.site.device
        return {
            name: torch.tensor([value], dtype=torch.float32, device=device)
            for name, value in values.items()
            if name == "rates" or any(value)
        }

    def _lean(self, sums: Sums) -> dict[str, Tensor]:
        """What the client tells itself about groups, where it needs nobody else for that."""
        cells = self.site.cells
        assert cells is not None
        if not self.method.objective.grouped:
            return {}
        memo = wire.read_memo(self.task[wire.MEMO])
        clients = tuple(memo.get("clients", ("this",)))
        leaning = self.method.objective.lean(View(cells, sums, clients, np.ones(1), self.index), memo)
        return told_columns(cells, 1, [(np.zeros(1, dtype=np.int64), leaning)], self.site.device)

    # ---- what stays with the client

    def _remember(self, trained: Tensor, batches: Batches) -> dict[str, Any]:
        """Keep what the objective will look back to; returns what the server should know of it."""
        found: dict[str, Any] = {}
        if isinstance(self.method.objective, Personal):
            found[wire.LOST] = self._train_personal(batches)
        if likeness_of(self.method):
            lost = self.task[wire.KNOWN] and self.keep.read(PREVIOUS, before=self.round) is None
            self.keep.write(PREVIOUS, self.round, self.site.named(trained))
            found[wire.LOST] = int(lost)
        if isinstance(self.method.objective, Correction) and self.task[correction.STAGE] == 1:
            said, labels = self.site.said(trained), self.labels()
            assert labels is not None
            losses = -said[np.arange(len(said)), labels]
            self.keep.write(LOSSES, self.round, {LOSSES: torch.from_numpy(losses)})
            found[correction.DIMENSION] = float(dimensions(np.exp(said), self.method.objective.neighbours).mean())
        return found

    def _train_personal(self, batches: Batches) -> int:
        """Ditto: the client's own model takes the same steps, pulled towards the received one."""
        site, objective = self.site, self.method.objective
        assert isinstance(objective, Personal)
        own = self.keep.read(PERSONAL, before=self.round)
        row = (site.start if own is None else site.flat(own)).unsqueeze(0).clone()
        columns = Columns(**self._told(site.work.rate(self.index), site.work.momentum, objective.lam))
        site.local.train(row, self.model.unsqueeze(0), batches, columns)
        self.keep.write(PERSONAL, self.round, site.named(row[0]))
        return int(own is None and bool(self.task[wire.KNOWN]))

    def correct(self) -> dict[str, Any]:
        """FedCorr: which share of the labels is wrong; the sure ones among the worst are corrected."""
        objective, labels = self.method.objective, self.labels()
        assert isinstance(objective, Correction)
        assert labels is not None
        kept = self.keep.read(LOSSES)
        losses = np.full(len(labels), np.nan) if kept is None else kept[LOSSES].numpy()
        level = float(upper(losses, int(self.task[correction.SEED])).mean())
        said = self.site.said(self.model)
        sure = np.exp(said.max(axis=1)) > objective.confidence
        if not self.task[correction.ALL]:
            count = int(len(said) * level * objective.ratio)
            worst = np.argsort(-losses, kind="stable")[:count]
            sure &= np.isin(np.arange(len(said)), worst)
        fixed = np.where(sure, said.argmax(axis=1), labels)
        self.keep.write(LABELS, self.round, {LABELS: torch.from_numpy(fixed)})
        return {correction.LEVEL: level, correction.CHANGED: int((fixed != labels).sum())}


def _row(steps: Plan, row: int) -> Plan:
    """One row of a plan."""
    every: dict[str, Any] = {name: getattr(steps, name) for name in ("indices", "weights", "shares", *OPTIONAL)}
    part: dict[str, Any] = {name: array if array is None else array[row : row + 1] for name, array in every.items()}
    return Plan(steps=steps.steps, **part)


def _evaluate(site: Site, message: Message, context: Context) -> Message:
    """The received model (or the client's own) on the client's test data."""
    task = wire.read_task(message.content)
    row = site.flat(wire.tensors_of(message.content.array_records[wire.ARRAYS]))
    if isinstance(method(task[wire.METHOD]).objective, Personal):
        own = Keep(context, task[wire.EXPERIMENT]).read(PERSONAL)
        row = site.start if own is None else site.flat(own)
    local, count = site.local, len(site.test)
    if not count:
        return evaluated(message, 0, 0.0, 0.0, None if site.cells is None else np.zeros(_size(site), dtype=np.int64))
    asked = local.asked(gather([site.test], site.device))
    sums, predicted = evaluate(site.module, site.shape, row.unsqueeze(0), asked)
    loss, right = (float(value) / count for value in sums[:, 0])
    return evaluated(message, count, loss, right, None if predicted is None else predicted.cpu().numpy())


def _size(site: Site) -> int:
    assert site.cells is not None
    return site.cells.count * site.cells.classes
