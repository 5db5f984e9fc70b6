"""The arithmetic behind every table of the five papers, and how long an H200 takes for it at its peak.

For every recipe: its distinct runs (trials that choose settings, with and without quirks), the floating-point
operations of their clients' forward and backward passes, and the time that these take at the 989 TFLOP/s that NVIDIA's
datasheet has for dense products of 16-bit numbers on an H200. Nothing else is counted: no loss before training, no
evaluation, no second model of Ditto's, nothing that is read from memory. Below that time nothing can go.

    python docs/results/floor.py FOLDER

FOLDER holds the data sets' files (docs/data.md); of one that is not there the published number of samples counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from evenhand import reproduction
from evenhand.checks import EvenhandError
from evenhand.data import ENTRIES, load
from evenhand.data.dataset import LOCAL_SPLIT
from evenhand.experiment import Experiment
from evenhand.models import build
from evenhand.recipe import Recipe, find_recipe, names

PEAK = 989e12  # operations a second


class Held(NamedTuple):
    """What is known of a data set."""

    samples: int
    training: int  # officially
    shape: torch.Size
    classes: int
    there: bool  # whether its files are


@lru_cache(maxsize=64)
def data_of(name: str, options: tuple[tuple[str, Any], ...], folder: str) -> Held:
    try:
        found = load(name, data_dir=folder, **dict(options))
        return Held(len(found), found.train_rows or len(found), found.shape, found.classes, True)
    except (EvenhandError, OSError):
        entry = ENTRIES[name]
        if not entry.samples[0].isdigit():
            raise SystemExit(
                f"{name}: how many samples it has is known from its files alone; put them into FOLDER"
            ) from None
        shape = torch.Size(int(side) for side in entry.shape.removesuffix(" tokens").split("x"))
        count = int(entry.samples.replace(",", ""))
        return Held(count, count, shape, int(entry.classes), False)


@lru_cache(maxsize=64)
def operations(model: str, options: tuple[tuple[str, Any], ...], shape: torch.Size, classes: int) -> float:
    """Of one sample's way forward and back."""
    module = build(model, shape, classes, **dict(options))
    tokens = any(isinstance(part, torch.nn.Embedding) for part in module.modules())
    x = torch.zeros(2, *shape, dtype=torch.int64 if tokens else torch.float32)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    return counter.get_total_flops() / len(x)


def of_a_run(told: Experiment, folder: str) -> tuple[float, bool]:
    """Operations of one run, and whether its data is there."""
    held = data_of(told.data, tuple(sorted(told.data_options.items())), folder)
    dealt = held.training if told.partition_options.get("pool") == "train" else held.samples
    trained = held.training if told.split == "official" else dealt * (told.split or LOCAL_SPLIT)[0]
    each = operations(told.model, tuple(sorted(told.model_options.items())), held.shape, held.classes)
    return told.rounds * told.work.epochs * trained * told.sampling.participation * each, held.there


def runs_of(recipe: Recipe) -> Iterator[tuple[Experiment, int]]:
    """Every distinct training and under how many seeds it is run."""
    variants = (True, False) if recipe.quirky else (False,)
    whole = reproduction.Reproduction(recipe, recipe.experiment.seeds, None, recipe.rows, variants, {})
    trials = {t.digest: t.experiment for t in reproduction._tasks(whole, {}, "trial") if len(t.row.tries()) > 1}
    final = {t.cell: t for t in reproduction._tasks(whole, {}, "final")}  # one of a grid's settings
    if recipe.choose is not None:
        yield from ((told, len(recipe.choose.seeds)) for told in trials.values())
    once = {task.digest: task.experiment for task in final.values()}
    yield from ((told, len(recipe.experiment.seeds)) for told in once.values())


def main(folder: str) -> None:
    print("| table | runs | 10^15 operations | at least | data here |\n|---|---:|---:|---:|---|")
    total = {True: [0, 0.0], False: [0, 0.0]}
    for name in names():
        recipe = find_recipe(name)
        if name.startswith("even/") or not recipe.rows or recipe.takes == "nothing to run":
            continue
        sums = {True: [0, 0.0], False: [0, 0.0]}
        for told, seeds in runs_of(recipe):
            spent, there = of_a_run(told, folder)
            for own in (sums, total):
                own[there][0] += seeds
                own[there][1] += seeds * spent
        for there, words in ((True, ""), (False, "no")):
            if sums[there][0]:
                print(line(name, *sums[there], words), flush=True)
    print(line("all whose data is here", *total[True], ""))
    print(line("all others", *total[False], "no"))


def line(name: str, runs: float, spent: float, words: str) -> str:
    seconds = spent / PEAK
    units = f"{seconds:,.1f} s" if seconds < 60 else f"{seconds / 60:,.1f} min" if seconds < 3600 else ""
    return f"| {name} | {runs:,.0f} | {spent / 1e15:,.1f} | {units or f'{seconds / 3600:,.1f} h'} | {words} |"


if __name__ == "__main__":
    main(*sys.argv[1:2] or sys.exit(__doc__))
