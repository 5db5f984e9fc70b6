"""What to run: a validated description that can be written down, and how it is set up.

An experiment names data, partition, model, method, local work and sampling; running.py runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from evenhand.checks import EvenhandError, choice, near_miss, number
from evenhand.data import SUFFIXES, Dataset, Noise, Partition, load, partition
from evenhand.engine.rounds import MEASURES, Replica, Settings
from evenhand.engine.sampling import Sampling
from evenhand.engine.simulation import Simulation
from evenhand.engine.training import PRECISIONS, LocalWork, Shape
from evenhand.folders import Training
from evenhand.methods import DEFAULT, Method, method
from evenhand.models import build, must_fit
from evenhand.recording import Recorder
from evenhand.runs import Run, Runs, said_once
from evenhand.toml import read_toml, to_toml

CLIENTS = 30  # where the partition does not know itself
# What the simulator can tell a rule about the clients.
MEASURED = ("losses", "sizes", "accuracies", "fairness", "fairness_global")
AUTO = "auto"


@dataclass(frozen=True)
class Experiment:
    """A full description: the same description gives the same numbers on the same machine."""

    method: Method = field(default_factory=lambda: method(DEFAULT))
    data: str = "digits"
    data_dir: str | None = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    partition: str = AUTO  # what the data asks for, its own clients where it has them, else two classes a client
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    clients: int | None = None  # None: what the partition knows itself, else 30
    split: tuple[float, float, float] | str | None = None  # train, validation, test; None: what the data set asks for
    noise: str | None = None  # RHO,TAU: wrong training labels in a share RHO of the clients (evenhand.data.noise)
    model: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 200
    work: LocalWork = LocalWork()
    sampling: Sampling = Sampling(participation=0.2)
    eval_every: int = 10
    seeds: tuple[int, ...] = (0,)
    device: str = AUTO
    program: str = AUTO
    precision: str = "tf32"  # of products on a GPU: "tf32" or "float32"; a CPU has the latter
    measure: str = "all"  # of each round's participants: "all" (losses before and after), "losses", or "needed"
    chunk: int | None = None  # clients trained at once, where all of a round's are too many for the memory
    keep_on: str = AUTO  # where absent clients' updates are kept: "auto" is where they were computed

    def __post_init__(self) -> None:
        number("rounds", self.rounds, low=1, whole=True)
        number("eval_every", self.eval_every, low=1, whole=True)
        if self.clients is not None:
            number("clients", self.clients, low=1, whole=True)
        for seed in self.seeds:
            number("a seed", seed, low=0, whole=True)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise EvenhandError(f"seeds={list(self.seeds)} must be different whole numbers, at least one")
        for name in ("data", "partition", "model", "device", "program"):
            if not isinstance(getattr(self, name), str):
                raise EvenhandError(f"{name}={getattr(self, name)!r} must be a name")
        if self.noise is not None:
            Noise.parse(self.noise)
        choice("measure", self.measure, tuple(MEASURES))
        choice("precision", self.precision, tuple(PRECISIONS))
        if self.chunk is not None:
            number("chunk", self.chunk, low=1, whole=True)
        choice("keep_on", self.keep_on, (AUTO, "cpu"))

    def __str__(self) -> str:
        return f"{self.method.written} on {self.setting()}"

    @property
    def data_name(self) -> str:
        return Path(self.data).name if _own_file(self.data) else self.data

    def setting(self) -> str:
        """Data, clients, model and work in a line: all but the method."""
        clients = "the clients" if self.clients is None else f"{self.clients} clients"
        share = f"{100 * self.sampling.participation:g}%" if self.sampling.cohort is None else str(self.sampling.cohort)
        batch = "full batch" if self.work.batch_size is None else f"batch {self.work.batch_size}"
        words = [
            self.data_name,
            *([] if self.partition == AUTO else [self.partition]),
            *([] if self.noise is None else [f"label noise {self.noise}"]),
            f"{share} of {clients} a round",
            self.model,
            "1 round" if self.rounds == 1 else f"{self.rounds:,} rounds",
            "1 epoch" if self.work.epochs == 1 else f"{self.work.epochs} epochs",
            batch,
            f"lr {self.work.lr:g}",
        ]
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, nested by part; `from_dict` gives back an equal experiment."""
        flat = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        flat["method"] = self.method.to_dict()
        flat |= {name: _settings(flat[name]) for name in PARTS}
        split = list(self.split) if isinstance(self.split, tuple) else self.split
        return flat | {"split": split, "seeds": list(self.seeds)}

    def to_toml(self) -> str:
        """The file that repeats the run."""
        return to_toml(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        return cls(**_entries(values))

    def with_settings(self, settings: Mapping[str, Any]) -> Experiment:
        """Changes by name: `{"method.alpha": 0.2, "work.lr": 0.05, "rounds": 100}`.

        Settings of the local work and of the sampling need no prefix: `{"lr": 0.05, "participation": 0.1}`.
        """
        chosen = {_full_name(name): value for name, value in settings.items()}
        if chosen.get("sampling.cohort") is not None and chosen.get("sampling.participation") is not None:
            raise EvenhandError("participation and cohort both say how many clients a round asks; give one of them")
        changed = replace(self, method=_method(chosen.pop("method"))) if "method" in chosen else self
        for name, value in chosen.items():
            part, dot, entry = name.partition(".")
            if part == "method" and dot:
                changed = replace(changed, method=_with_setting(changed.method, entry, value))
            elif part in PARTS and dot:
                values = {**_settings(getattr(changed, part)), entry: value}
                if name == "sampling.participation":
                    values["cohort"] = None
                changed = replace(changed, **_entries({part: values}))
            else:
                changed = replace(changed, **_entries({name: value}))
        return changed

    def torch_device(self) -> torch.device:
        choice("device", self.device.partition(":")[0], (AUTO, "cpu", "cuda"))
        if self.device == AUTO:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise EvenhandError("device='cuda' was asked for, but torch sees no CUDA device; use 'cpu' or 'auto'")
        return torch.device(self.device)


SHORT = {
    **{entry.name: f"work.{entry.name}" for entry in fields(LocalWork)},
    **{entry.name: f"sampling.{entry.name}" for entry in fields(Sampling)},
}


OPTIONS = ("data_options", "partition_options", "model_options")
PARTS = ("work", "sampling", *OPTIONS)  # entries with settings of their own


def _settings(part: Any) -> dict[str, Any]:
    """A part's settings by name."""
    return (
        dict(part) if isinstance(part, Mapping) else {entry.name: getattr(part, entry.name) for entry in fields(part)}
    )


def _entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Some of an experiment's entries, read from plain values."""
    known = [entry.name for entry in fields(Experiment)]
    for name in values:
        if name in SHORT:
            raise EvenhandError(f"{name} belongs to a part of the experiment: write it as {SHORT[name]}")
        if name not in known:
            raise EvenhandError(f"an experiment has no entry {name!r}{near_miss(name, known)}")
    given = dict(values)
    if "method" in given:
        given["method"] = _method(given["method"])
    for name, kind in (("work", LocalWork), ("sampling", Sampling)):
        if name in given:
            given[name] = _part(kind, given[name], name)
    for name in ("data", "data_dir"):
        if isinstance(given.get(name), Path):
            given[name] = str(given[name])
    for name in OPTIONS:
        if not isinstance(given.get(name, {}), Mapping):
            raise EvenhandError(f"{name}={given[name]!r} must hold options by name")
    if isinstance(given.get("noise"), list | tuple):
        given["noise"] = ",".join(map(str, given["noise"]))
    elif isinstance(given.get("noise"), float):
        given["noise"] = str(given["noise"])
    if isinstance(given.get("split"), list):
        given["split"] = tuple(given["split"])
    if "seeds" in given:
        given["seeds"] = _seeds(given["seeds"])
    return given


def _full_name(name: str) -> str:
    known = [entry.name for entry in fields(Experiment)]
    if name in SHORT:
        return SHORT[name]
    if name.partition(".")[0] not in known:
        known += SHORT
        raise EvenhandError(
            f"an experiment has no setting {name!r}{near_miss(name, known)} (it has {', '.join(known)})"
        )
    return name


def _method(given: Any) -> Method:
    if isinstance(given, Mapping) and "rule" not in given:  # a person's file: [method] name = "fedfv", alpha = 0.2
        return method(**given)
    return method(given)


def _with_setting(chosen: Method, name: str, value: Any) -> Method:
    if name == "server":
        return method(chosen, server=value)
    if name == "objective":
        return method(chosen, objective=value)
    return chosen.with_settings({name: value})


def _part(kind: Any, values: Any, name: str) -> Any:
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise EvenhandError(f"{name}={values!r} must hold settings by name")
    known = [entry.name for entry in fields(kind)]
    for entry in values:
        if entry not in known:
            raise EvenhandError(f"{name} has no setting {entry!r}{near_miss(entry, known)} (known: {', '.join(known)})")
    if values.get("batch_size") == 0:
        values = {**values, "batch_size": None}
    return kind(**values)


def _seeds(given: Any) -> tuple[int, ...]:
    """A count (5 means seeds 0 to 4) or the seeds themselves."""
    if isinstance(given, bool) or not isinstance(given, (int, list, tuple, range)):
        raise EvenhandError(f"seeds={given!r} must be how many, or the seeds themselves")
    if isinstance(given, int):
        number("seeds", given, low=1, whole=True)
        return tuple(range(given))
    return tuple(given)


def _own_file(data: str) -> bool:
    return Path(data).suffix in SUFFIXES


def load_toml(path: str | Path) -> Experiment:
    """An experiment from a file that a run wrote (or a person)."""
    values = read_toml(path)
    if "methods" in values:
        raise EvenhandError(f"{str(path)!r} describes a comparison: evenhand compare --config {path}")
    return Experiment.from_dict(values)


def chosen_experiment(experiment: Experiment | None, settings: Mapping[str, Any]) -> Experiment:
    """The experiment with settings changed, and paths that hold from any folder."""
    chosen = (experiment or Experiment()).with_settings(settings)
    if _own_file(chosen.data):
        chosen = replace(chosen, data=str(Path(chosen.data).expanduser().absolute()))
    if chosen.data_dir is not None:
        chosen = replace(chosen, data_dir=str(Path(chosen.data_dir).expanduser().absolute()))
    return chosen


# ----------------------------------------------------------------------------------------------------- running


def prepare(
    experiment: Experiment,
    methods: Sequence[Method] | None = None,
    dataset: Dataset | None = None,
    redraw: Callable[[Partition, int], Partition] | None = None,
    *,
    rates: Sequence[float] | None = None,
    forgiving: bool = False,
) -> Simulation:
    """Load the data, draw partitions and initial models, and set up one replica for every method and seed.

    redraw: makes the partition that is used of the one that was drawn, and the seed. rates: each method's learning
    rate, where they differ. forgiving: a replica that diverges does not end the others.
    """
    for chosen in methods or [experiment.method]:
        can_simulate(chosen)
    dataset = dataset or load_data(experiment)
    device = experiment.torch_device()
    replicas, module = [], None
    parted: dict[int, tuple[Partition, torch.Tensor]] = {}
    for seed in experiment.seeds:
        before = module
        module = build(experiment.model, dataset.shape, dataset.classes, seed=seed, **experiment.model_options)
        if before is None:
            must_fit(experiment.model, module, dataset.inputs[:2], dataset.classes)
        _check_frozen(before, module)
        drawn = draw_partition(dataset, experiment, seed)
        if redraw is not None:
            drawn = redraw(drawn, seed)
        experiment.sampling.count(drawn.clients)  # a cohort that is too large is refused before the first round
        parted[seed] = (drawn, Shape.of(module).flat(module).to(device))
    chosen_methods = methods or [experiment.method]
    for chosen, rate in zip(chosen_methods, rates or [experiment.work.lr] * len(chosen_methods), strict=True):
        for seed, (drawn, start) in parted.items():
            replicas.append(Replica(seed, chosen, drawn, start.clone(), lr=rate))
    assert module is not None
    settings = Settings(
        rounds=experiment.rounds,
        work=experiment.work,
        sampling=experiment.sampling,
        eval_every=experiment.eval_every,
        measure=experiment.measure,
        program=experiment.program,
        precision=experiment.precision,
        chunk=experiment.chunk,
        keep_on=None if experiment.keep_on == AUTO else torch.device(experiment.keep_on),
        forgiving=forgiving,
    )
    return Simulation(dataset, module, replicas, settings, device)


def can_simulate(chosen: Method) -> None:
    """Insist that the simulator measures what a method needs."""
    missing = [name for name in chosen.rule.inputs if name not in MEASURED]
    if missing:
        raise EvenhandError(
            f"{chosen.name} needs {' and '.join(missing)}, which the simulator does not measure; pass them to "
            "evenhand.aggregate in a loop of your own, or choose another method"
        )


def frozen(module: nn.Module) -> dict[str, torch.Tensor]:
    """What training leaves as it is."""
    return {name: tensor.detach() for name, tensor in module.named_parameters() if not tensor.requires_grad}


def _check_frozen(one: nn.Module | None, other: nn.Module) -> None:
    """Several seeds run as one program share what is frozen."""
    if one is None:
        return
    for name, tensor in frozen(one).items():
        if not torch.equal(tensor, frozen(other)[name]):
            raise EvenhandError(
                f"the frozen parameter {name!r} differs from seed to seed; load it from a file in the model's own "
                "code, or run one seed at a time"
            )


def load_data(experiment: Experiment) -> Dataset:
    return load(experiment.data, data_dir=experiment.data_dir, **experiment.data_options)


_at_hand: dict[str, Dataset] = {}  # the last one used


def data_at_hand(experiment: Experiment) -> Dataset:
    """The data; for experiments on the same data, one after another, it is loaded once."""
    key = json.dumps([experiment.data, experiment.data_dir, dict(experiment.data_options)], default=str)
    if key not in _at_hand:
        _at_hand.clear()
        _at_hand[key] = load_data(experiment)
    return _at_hand[key]


def draw_partition(dataset: Dataset, experiment: Experiment, seed: int) -> Partition:
    """Who holds which samples under a seed."""
    spec = experiment.partition
    if spec == AUTO:
        spec = dataset.partition or ("natural" if "client" in dataset.columns else "pat:2")
    clients = experiment.clients
    if clients is None and not spec.startswith(("natural", "shares")) and "clients=" not in spec:
        clients = CLIENTS
    drawn = partition(dataset, spec, clients=clients, seed=seed, split=experiment.split, **experiment.partition_options)
    if not len(drawn.test.indices):
        raise EvenhandError(
            f"no client has test data under {spec!r} with split={experiment.split}, so none can be measured; "
            "leave a share for testing (split=[0.8, 0, 0.2])"
        )
    return drawn if experiment.noise is None else Noise.parse(experiment.noise).apply(drawn, dataset, seed)


def runs_notes(simulation: Training, runs: Runs) -> list[str]:
    """What a careful reader of the results should know."""
    notes = said_once({f"seed {replica.seed}": replica.partition.notes for replica in simulation.replicas})
    for one in runs:
        lost = int((~np.isfinite(one.losses) & (one.test_samples > 0)).sum())
        if lost:
            notes.append(f"seed {one.seed}: the loss of {lost} clients is not finite; a smaller lr may help")
    return notes


def runs_of(experiment: Experiment, recorder: Recorder) -> list[Run]:
    """What every replica of a finished simulation gives."""
    runs, simulation = [], recorder.simulation
    still = {name: tensor.cpu() for name, tensor in frozen(simulation.module).items()}
    known = simulation.facts()
    for replica, record in zip(simulation.replicas, recorder.records, strict=True):
        shared = simulation.shape.views(replica.evaluated.unsqueeze(0))
        own = None if replica.personal is None else simulation.shape.views(replica.personal)
        one = Run(
            replace(experiment, method=replica.method, seeds=(replica.seed,)),
            replica.seed,
            record.names,
            record.test_samples,
            record.rounds,
            record.evaluations,
            model={name: tensor[0].cpu().clone() for name, tensor in shared.items()} | still,
            personal=None if own is None else {name: tensor.cpu().contiguous() for name, tensor in own.items()},
            partition=replica.partition,
            cells=simulation.cells,
            predicted=replica.predicted,
            holdings=simulation.holdings(replica),
            facts=known,
            seconds=record.seconds,
        )
        runs.append(one)
    return runs
