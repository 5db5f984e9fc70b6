"""The trial of `fading` in docs/even.md: even with and without it, under seeds that no other table uses.

    python docs/results/even/fading.py DATA [--device cuda] [--part NUMBER ...] [--seed SEED ...] [--setting NAME ...]

Appends a line a run to fading.csv beside this file; tables.py prints the table.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from evenhand.experiment import prepare
from evenhand.methods import method
from evenhand.recipe import find_recipe
from evenhand.reruns import machine_of

SETTINGS = [
    "even",
    "even:fading=0.01",
    "even:fading=0.03",
    "even:fading=0.1",
    "even:fading=0.3",
    "even:fading=1",
    "even:absent=off",
    "even:gamma=1,fading=0.1",
    "even:ridge=0,fading=0.1",
    "even:layerwise=false,fading=0.1",
    "even:gamma=1,layerwise=false,fading=0.1",
]


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
        made = prepare(experiment, [method(name) for name in given.setting])
        made.run()
        names = [name for name in given.setting for _ in given.seed]
        with (Path(__file__).parent / "fading.csv").open("a", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, lineterminator="\n")
            for name, replica in zip(names, made.replicas, strict=True):
                served = np.sort(replica.evaluations[-1]["accuracies"])
                numbers = (served.mean(), served.std(), served[:10].mean(), served[:5].mean())
                figures = [f"{number:.6f}" for number in numbers]
                lines.writerow([part.name, name, replica.seed, given.rounds, *figures, machine_of(experiment)])


if __name__ == "__main__":
    main()
