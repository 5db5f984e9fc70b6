"""What a deployment runs: an experiment, what the clients' files have in common, and how long to wait for anybody.

The file is an experiment's TOML (as `evenhand run` writes it) with two more tables:

    [schema]        what the clients' own files have in common (evenhand.flower.schema); without it every node takes its
                    part of a data set that it can load by name, for trials
    [deployment]
    timeout = 600   seconds that any message is waited for
    wait = 600      seconds that the clients are waited for before the first round
    min_replies = 2 good replies without which a round leaves the model as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from evenhand.checks import EvenhandError, near_miss, number
from evenhand.constraints import Cells
from evenhand.data import Dataset, Partition
from evenhand.engine.groups import cells_of, check_groups
from evenhand.experiment import Experiment, draw_partition, load_data
from evenhand.flower.needs import can_federate
from evenhand.flower.roster import plain_sampling
from evenhand.flower.schema import LABELS, PART, Schema
from evenhand.folders import writing
from evenhand.models import build, must_fit
from evenhand.storage import write_bytes
from evenhand.toml import read_toml, to_toml

OWN_FILES = "own files"
SIMULATED = ("chunk", "keep_on")  # settings that say how the simulator computes


@dataclass(frozen=True)
class Waiting:
    """How long to wait, and for how many."""

    timeout: float = 600.0
    wait: float = 600.0
    min_replies: int = 2

    def __post_init__(self) -> None:
        number("deployment.timeout", self.timeout, above=0.0)
        number("deployment.wait", self.wait, low=0.0)
        number("deployment.min_replies", self.min_replies, low=1, whole=True)


@dataclass(frozen=True, eq=False)
class Deployment:
    """A checked description; the same file serves the server and every client."""

    experiment: Experiment
    schema: Schema | None = None
    waiting: Waiting = Waiting()

    def __post_init__(self) -> None:
        chosen = self.experiment
        if len(chosen.seeds) != 1:
            raise EvenhandError(f"a deployment runs one seed, not {len(chosen.seeds)}: seeds = [0]")
        if chosen.measure == "all":
            raise EvenhandError(
                "measure = 'all' asks every participant again after the round, which costs a message; take 'losses' or "
                "'needed'"
            )
        plain_sampling(chosen.sampling)
        if self.schema is not None and chosen.clients is None:
            raise EvenhandError("clients = N is needed: how many clients, each with its own file, the run waits for")
        if self.schema is not None and chosen.noise is not None:
            raise EvenhandError("noise is for the simulator: the clients' own labels are what they are")
        can_federate(chosen.method, self.cells, chosen.work.lr)
        if chosen.method.objective.grouped and self.cells is not None:
            check_groups(chosen.method, self._named, self.cells)

    @classmethod
    def read(cls, path: str | Path) -> Deployment:
        """From a TOML file."""
        values = read_toml(path)
        try:
            return cls.from_dict(values)
        except EvenhandError as error:
            raise EvenhandError(f"{Path(path).name}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Deployment:
        given = dict(values)
        schema, waiting = given.pop("schema", None), given.pop("deployment", {})
        known = [entry.name for entry in fields(Waiting)]
        for name in waiting:
            if name not in known:
                raise EvenhandError(
                    f"deployment has no entry {name!r}{near_miss(name, known)} (it has {', '.join(known)})"
                )
        given = {"measure": "needed", **given}
        if schema is not None:
            for name in ("partition", "partition_options", "data_dir", "data_options"):
                if name in given:
                    raise EvenhandError(
                        f"{name} and [schema] exclude each other: with a schema every client has its file"
                    )
            given = {"data": OWN_FILES, **given, "partition": "natural"}
        found = Experiment.from_dict(given)
        return cls(found, None if schema is None else Schema.from_dict(schema), Waiting(**waiting))

    def to_toml(self) -> str:
        """The file that `read` reads."""
        values = self.experiment.to_dict()
        if self.schema is not None:
            for name in ("partition", "partition_options", "data_dir", "data_options"):
                del values[name]
            values["schema"] = self.schema.to_dict()
        return to_toml({**values, "deployment": dict(vars(self.waiting))})

    # ---- what follows from it

    @property
    def seed(self) -> int:
        return self.experiment.seeds[0]

    @cached_property
    def _data(self) -> Dataset:
        return load_data(self.experiment)

    @property
    def _named(self) -> Dataset:
        """Something with a name and sensitive attributes to check a method against."""
        if self.schema is None:
            return self._data
        return Dataset(
            OWN_FILES,
            torch.zeros(1, *self.schema.width),
            torch.zeros(1, dtype=torch.int64),
            len(self.schema.classes),
            columns={name: np.array([words[0]]) for name, words in self.schema.sensitive.items()},
            sensitive=tuple(self.schema.sensitive),
        )

    @cached_property
    def cells(self) -> Cells | None:
        """The groups of people, where there are any."""
        return cells_of(self._data)[0] if self.schema is None else self.schema.cells

    @cached_property
    def drawn(self) -> Partition:
        """Who holds what, where a data set is handed out by name."""
        return draw_partition(self._data, self.experiment, self.seed)

    @property
    def clients(self) -> int:
        """How many take part."""
        return self.drawn.clients if self.schema is None else int(self.experiment.clients or 0)

    def module(self) -> nn.Module:
        """The network with its starting weights: the same at the server and at every client."""
        shape = self._data.shape if self.schema is None else self.schema.width
        classes = self._data.classes if self.schema is None else len(self.schema.classes)
        made = build(self.experiment.model, shape, classes, seed=self.seed, **self.experiment.model_options)
        tokens = self.schema is None and not self._data.inputs.is_floating_point()
        inputs = self._data.inputs[:2] if self.schema is None else torch.zeros(2, *shape)
        if not tokens:
            must_fit(self.experiment.model, made, inputs, classes)
        return made

    def holding(self, place: int | None, path: str | None) -> tuple[Dataset, Partition, int]:
        """One client's data: the data set it is part of, who holds what, and which number it is there."""
        if self.schema is not None:
            if not path:
                raise EvenhandError(
                    "this node has no data-path: start it with --node-config "
                    '\'name="north" data-path="/data/north.npz"\''
                )
            return *self.schema.read(Path(path), seed=self.seed, split=self.experiment.split), 0
        if place is None:
            raise EvenhandError(
                f"the description hands out {self.experiment.data!r} by number, and this node has no partition-id; "
                "describe the clients' own files in [schema], or start it with --node-config 'partition-id=0'"
            )
        if not 0 <= place < self.drawn.clients:
            raise EvenhandError(f"partition-id={place} is not one of the {self.drawn.clients} clients (0 is the first)")
        return self._data, self.drawn, place


def write_files(experiment: Experiment, folder: Path) -> tuple[Deployment, list[Path]]:
    """Hand a data set out into one file a client, and write the description that goes with them.

    The files hold what the simulator gives each client, so that a deployment over them gives the simulator's numbers.
    """
    by_name = Deployment(experiment)
    data, drawn = by_name._data, by_name.drawn
    people = {name: data.column(name).astype(str) for name in data.sensitive}
    values = experiment.to_dict()
    for name in ("partition", "partition_options", "data_dir", "data_options", "noise"):
        del values[name]
    groups = {group.name: list(group.values) for group in data.groups()} if data.sensitive else {}
    classes = list(data.class_names) or data.classes
    schema = {"shape": list(data.shape), "classes": classes, **({"sensitive": groups} if groups else {})}
    values |= {"clients": drawn.clients, "data": experiment.data_name, "schema": schema}
    made = Deployment.from_dict(values)
    with writing(folder):
        (folder / "clients").mkdir(parents=True, exist_ok=True)
        paths = [_write_client(folder / "clients", client, data, drawn, people) for client in range(drawn.clients)]
        write_bytes(folder / "deployment.toml", made.to_toml().encode())
    return made, paths


def _write_client(
    folder: Path, client: int, data: Dataset, drawn: Partition, people: Mapping[str, np.ndarray[Any, Any]]
) -> Path:
    import io

    splits = (drawn.train, drawn.validation, drawn.test)
    rows = np.concatenate([split[client] for split in splits])
    parts = np.repeat(np.arange(3), [len(split[client]) for split in splits])
    labels = data.labels[rows]
    arrays = {"x": data.inputs.numpy()[rows], "y": labels, PART: parts}
    arrays |= {name: values[rows] for name, values in people.items()}
    if drawn.labels is not None:
        own = slice(int(drawn.train.offsets[client]), int(drawn.train.offsets[client + 1]))
        arrays[LABELS] = np.concatenate([drawn.labels[own], labels[len(drawn.train[client]) :]])
    name = drawn.names[client] if drawn.names else f"client-{client:0{len(str(drawn.clients - 1))}d}"
    path, content = folder / f"{name}.npz", io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_bytes(path, content.getvalue())
    return path
