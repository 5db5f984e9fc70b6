"""How far back the mean of models should go: one training, measured with many means at once.

python docs/results/even/windows.py METHOD SEED [PART ...]   trains (1,000 rounds) and adds to windows.csv
python docs/results/even/windows.py                          prints the tables of docs/even.md

Which mean is measured changes nothing in the training, so that a run serves all of them. A turn is what `recent` takes
for one: rows over present clients, for a method without a memory 7 rounds.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_1samp
from tables import PARTS

from evenhand.engine.simulation import Simulation
from evenhand.experiment import prepare
from evenhand.methods.server import Recent
from evenhand.recipe import find_recipe
from evenhand.reruns import machine_of

FILE = Path(__file__).with_name("windows.csv")
TURNS = (1.0, 2.0, 4.0, 8.0)
MEANS = {"last": None, **{f"turns={turns:g}": Recent(turns=turns) for turns in TURNS}}
HEADS = ("part", "method", "seed", "round", "model", "mean", "worst:10", "machine")
EVERY, ROUNDS = 100, 1000
WITHOUT_MEMORY, LATE = 7.0, 500

Vector = np.ndarray[Any, np.dtype[np.float64]]


def train(method: str, seed: int, part: str) -> None:
    recipe = find_recipe("even/memory")
    settings = next(entry.settings for entry in recipe.parts if entry.name == part)
    chosen = recipe.experiment.with_settings({**settings, "method": method, "seeds": [seed], "eval_every": ROUNDS})
    present = round(chosen.sampling.participation * chosen.clients)
    made, kept, machine = prepare(chosen), dict[str, torch.Tensor](), machine_of(chosen)

    def after(simulation: Simulation) -> None:
        replica, index = simulation.replicas[0], simulation.round
        turn = (
            1.0 + replica.rounds[-1]["remembered"] / present if replica.method.rule.memory != "off" else WITHOUT_MEMORY
        )
        for name, step in MEANS.items():
            share = 1.0 if step is None else 1.0 / min(index, step.back(turn, index))
            kept[name] = replica.model.clone() if share == 1.0 else torch.lerp(kept[name], replica.model, share)
        if index % EVERY == 0:
            own, there = replica.offset, len(replica.evaluations)
            for name, model in kept.items():
                replica.offset = model - replica.model
                simulation.evaluate()
                accuracies = np.sort(replica.evaluations.pop()["accuracies"])
                assert len(replica.evaluations) == there
                worst = accuracies[: len(accuracies) // 10].mean()
                add(part, method, seed, index, name, float(accuracies.mean()), float(worst), machine)
            replica.offset = own

    made.run(after_round=after)


def add(*values: object) -> None:
    with FILE.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            table.writerow(HEADS)
        table.writerow(values)


def late(method: str) -> dict[str, dict[tuple[str, str], Vector]]:
    """By model, then by set-up and seed: mean and worst tenth in percent, over the last 500 rounds' evaluations."""
    found: dict[str, dict[tuple[str, str], list[Vector]]] = defaultdict(lambda: defaultdict(list))
    for (index, model, who), told in measured(method).items():
        if index > LATE:
            found[model][who].append(told)
    return {model: {who: np.mean(told, axis=0) for who, told in runs.items()} for model, runs in found.items()}


def measured(method: str) -> dict[tuple[int, str, tuple[str, str]], Vector]:
    """By round, model, and set-up and seed: mean and worst tenth in percent."""
    with FILE.open(newline="", encoding="utf-8") as lines:
        return {
            (int(line["round"]), line["model"], (line["part"], line["seed"])): 100.0
            * np.array([float(line[measure]) for measure in ("mean", "worst:10")])
            for line in csv.DictReader(lines)
            if line["method"] == method
        }


def parts_of(runs: dict[str, dict[tuple[str, str], Vector]]) -> list[str]:
    return [part for part in PARTS if any(part == there for there, _ in runs["last"])]


def table(method: str) -> None:
    """A line a mean, a column a set-up; then what each has more than one turn has, over all set-ups and seeds."""
    runs = late(method)
    parts = parts_of(runs)
    print(f"| {method} | {' | '.join(PARTS[part] for part in parts)} |\n|---|{'---|' * len(parts)}")
    for model, own in runs.items():
        cells = []
        for part in parts:
            told = np.array([numbers for (there, _), numbers in own.items() if there == part])
            spreads = told.std(axis=0, ddof=1) if len(told) > 1 else None
            cells.append(
                " / ".join(f"{one:.1f}" for one in told.mean(axis=0)) if spreads is None else said(told, spreads)
            )
        print(f"| {model} | {' | '.join(cells)} |")
    print("\n| more than turns=1 | pairs | mean | | worst 10% | |\n|---|---|---|---|---|---|")
    for model, own in runs.items():
        if model != "turns=1":
            more = np.array([numbers - runs["turns=1"][who] for who, numbers in own.items()])
            tests = [f"{column.mean():+.2f} | {chance(column)}" for column in more.T]
            print(f"| {model} | {len(more)} | {' | '.join(tests)} |")
    print()


def compared(one: str, other: str) -> None:
    """What one method has more than another, whose mean goes as far back: by set-up, and over all of them."""
    ours, theirs = late(one), late(other)
    parts = parts_of(ours)
    heads = [f"{one} more than {other}", *(PARTS[part] for part in parts), "all"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for model, own in ours.items():
        more = {who: numbers - theirs[model][who] for who, numbers in own.items() if who in theirs[model]}
        groups = [[told for (there, _), told in more.items() if there == part] for part in parts]
        cells = []
        for group in [*groups, list(more.values())]:
            cells.append(" / ".join(f"{column.mean():+.2f} ({chance(column)})" for column in np.array(group).T))
        print(f"| {model} | {' | '.join(cells)} |")
    print()


def on_the_way(method: str, model: str) -> None:
    """What a model has more than with one turn where training ends earlier, over all set-ups and seeds."""
    runs = measured(method)
    rounds = sorted({index for index, _, _ in runs})
    print(f"| {method}, rounds | {' | '.join(f'{index}' for index in rounds)} |\n|---|{'---|' * len(rounds)}")
    print(f"| {model} more than turns=1 ", end="")
    for index in rounds:
        longer = {who: told for (at, name, who), told in runs.items() if (at, name) == (index, model)}
        gains = np.mean([told - runs[index, "turns=1", who] for who, told in longer.items()], axis=0)
        print(f"| {' / '.join(f'{gain:+.2f}' for gain in gains)} ", end="")
    print("|\n")


def chance(differences: Vector) -> str:
    found = ttest_1samp(differences, 0.0).pvalue
    return "p < 0.001" if found < 0.001 else f"p = {found:.3f}"


def said(told: Vector, spreads: Vector) -> str:
    return " / ".join(f"{one:.1f} ± {spread:.1f}" for one, spread in zip(told.mean(axis=0), spreads, strict=True))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        for name in sys.argv[3:] or list(PARTS):
            train(sys.argv[1], int(sys.argv[2]), name)
    else:
        for name in ("even", "fedavg"):
            table(name)
        compared("even", "fedavg")
        on_the_way("even", f"turns={TURNS[-1]:g}")
