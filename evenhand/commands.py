"""The command line that repeats a run or a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.comparison import SEEDS
from evenhand.experiment import Experiment
from evenhand.methods import Method, method
from evenhand.toml import written

OPTIONS = {
    "data": "--data",
    "data_dir": "--data-dir",
    "data_options.target": "--target",
    "data_options.client_column": "--client-column",
    "data_options.sensitive": "--sensitive",
    "partition": "--partition",
    "clients": "--clients",
    "noise": "--noise",
    "model": "--model",
    "rounds": "--rounds",
    "sampling.participation": "--participation",
    "sampling.cohort": "--cohort",
    "work.epochs": "--epochs",
    "work.lr": "--lr",
    "eval_every": "--eval-every",
    "device": "--device",
}


def run_command(experiment: Experiment) -> str:
    """What a person types to repeat a run; where a line cannot say it all, the description in its folder does.

    >>> run_command(Experiment().with_settings({"method": "fedfv:alpha=0.2", "lr": 0.05, "seeds": 3}))
    'evenhand run fedfv:alpha=0.2 --lr 0.05 --seeds 3'
    """
    label = experiment.method.written
    if not _says(label, experiment.method):
        return "evenhand run --config experiment.toml"
    return shlex.join(["evenhand", "run", label, *_options(experiment, seeds=1)])


def compare_command(experiment: Experiment, methods: Mapping[str, Method]) -> str:
    """The same for a comparison."""
    if not all(_says(label, chosen) for label, chosen in methods.items()):
        return "evenhand compare --config comparison.toml"
    return shlex.join(["evenhand", "compare", *methods, *_options(experiment, seeds=SEEDS)])


def _says(label: str, chosen: Method) -> bool:
    """Whether a method's label means the method; with parts of another method, or one's own, it does not."""
    try:
        return method(label) == chosen
    except ValueError:
        return False


def _options(experiment: Experiment, seeds: int) -> list[str]:
    """What differs from what holds without options."""
    here, there = (_flat(one.to_dict()) for one in (experiment, Experiment()))
    words: list[str] = []
    for name, value in here.items():
        if name == "seeds" or (name in there and there[name] == value):
            continue
        if name == "sampling.participation" and here["sampling.cohort"] is not None:
            continue
        words += _option(name, value)
    if experiment.seeds != tuple(range(seeds)):
        words += ["--seeds", _seeds(experiment.seeds)]
    return words


def _option(name: str, value: Any) -> Sequence[str]:
    if name == "work.batch_size":
        return "--batch-size", str(value or 0)
    if name == "split" and value is not None:
        return "--split", value if isinstance(value, str) else ",".join(f"{share:g}" for share in value)
    if name in OPTIONS and value is not None and not isinstance(value, list | tuple):
        return OPTIONS[name], str(value)
    return "--set", f"{name}={written(value)}"


def _seeds(seeds: tuple[int, ...]) -> str:
    if seeds == tuple(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their full names, without the method's."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "method":
            continue
        found |= (
            {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return found
