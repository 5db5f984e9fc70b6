"""The trial in docs/even.md of what even makes of its memory, under seeds that no other table uses.

    python docs/results/even/memory.py DATA [--device cuda] [--part NUMBER ...] [--seed SEED ...] [--setting NAME ...]

Appends a line a run to memory.csv beside this file, without numbers where it diverged; tables.py prints the table.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evenhand.checks import NoUsableClient
from evenhand.experiment import Experiment, prepare
from evenhand.methods import method
from evenhand.recipe import find_recipe
from evenhand.reruns import machine_of

SETTINGS = [
    "even",
    "even:recall=0.3",
    "even:recall=0",
    "even:gamma=2,recall=0.3",
    "even:gamma=2,recall=0",
    "even:absent=off",
]


def served(experiment: Experiment, settings: Sequence[str]) -> Iterator[tuple[str, int, list[str]]]:
    """Setting, seed and how its clients are served in the end (nothing where it diverged), all in one program."""
    made = prepare(experiment, [method(name) for name in settings])
    try:
        made.run()
    except NoUsableClient:
        if len(settings) > 1:
            yield from itertools.chain.from_iterable(served(experiment, [name]) for name in settings)
        elif len(experiment.seeds) > 1:
            alone = (replace(experiment, seeds=(seed,)) for seed in experiment.seeds)
            yield from itertools.chain.from_iterable(served(one, settings) for one in alone)
        else:
            yield settings[0], experiment.seeds[0], [""] * 4
        return
    names = [name for name in settings for _ in experiment.seeds]
    for name, replica in zip(names, made.replicas, strict=True):
        all_of_them = np.sort(replica.evaluations[-1]["accuracies"])
        numbers = (all_of_them.mean(), all_of_them.std(), all_of_them[:10].mean(), all_of_them[:5].mean())
        yield name, replica.seed, [f"{number:.6f}" for number in numbers]


def main() -> None:
    recipe = find_recipe("even/ablation")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", help="folder that holds the data sets' files")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument(
        "--part", type=int, nargs="+", default=range(len(recipe.parts)), help="of even/ablation, from 0"
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--setting", nargs="+", default=SETTINGS)
    given = parser.parse_args()
    every = {"seeds": given.seed, "rounds": given.rounds, "data_dir": given.data, "device": given.device}
    for part in (recipe.parts[number] for number in given.part):
        experiment = recipe.experiment.with_settings({**part.settings, **every, "eval_every": 50, "measure": "needed"})
        found = list(served(experiment, given.setting))
        with (Path(__file__).parent / "memory.csv").open("a", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, lineterminator="\n")
            for name, seed, figures in found:
                lines.writerow([part.name, name, seed, given.rounds, *figures, machine_of(experiment)])


if __name__ == "__main__":
    main()
