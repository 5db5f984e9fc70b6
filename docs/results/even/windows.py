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
from tables import PARTS, set_up

from evenhand.engine.simulation import Simulation
from evenhand.experiment import prepare
from evenhand.fairness import worst
from evenhand.methods.server import Recent
from evenhand.reruns import machine_of

FILE = Path(__file__).with_name("windows.csv")
TURNS = (1.0, 2.0, 4.0, 8.0)
MEANS = {"last": None, **{f"turns={turns:g}": Recent(turns=turns) for turns in TURNS}}
HEADS = ("part", "method", "seed", "round", "model", "mean", "worst:10", "machine")
EVERY, ROUNDS = 100, 1000
WITHOUT_MEMORY, LATE = 7.0, 500

Vector = np.ndarray[Any, np.dtype[np.float64]]
Who = tuple[str, str]  # set-up and seed
Runs = dict[str, dict[Who, Vector]]  # by model


def train(method: str, seed: int, part: str) -> None:
    chosen = set_up(part, method=method, seeds=[seed], eval_every=ROUNDS)
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
                accuracies = np.asarray(replica.evaluations.pop()["accuracies"])
                assert len(replica.evaluations) == there
                add(part, method, seed, index, name, float(accuracies.mean()), float(worst(accuracies, 10)), machine)
            replica.offset = own

    made.run(after_round=after)


def add(*values: object) -> None:
    with FILE.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            table.writerow(HEADS)
        table.writerow(values)


def measured(method: str) -> dict[int, Runs]:
    """By round: mean and worst tenth in percent."""
    found: dict[int, Runs] = defaultdict(lambda: defaultdict(dict))
    with FILE.open(newline="", encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            if line["method"] == method:
                told = np.array([100.0 * float(line[measure]) for measure in ("mean", "worst:10")])
                found[int(line["round"])][line["model"]][line["part"], line["seed"]] = told
    return dict(sorted(found.items()))


def late(rounds: dict[int, Runs]) -> Runs:
    """The mean over the last 500 rounds' evaluations."""
    last = [runs for index, runs in rounds.items() if index > LATE]
    return {
        model: {who: np.mean([runs[model][who] for runs in last], axis=0) for who in own}
        for model, own in last[-1].items()
    }


def parts_of(runs: Runs) -> list[str]:
    return [part for part in PARTS if any(part == there for there, _ in runs["last"])]


def table(method: str, runs: Runs) -> None:
    """A line a mean, a column a set-up; then what each has more than one turn has, over all set-ups and seeds."""
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


def compared(heading: str, ours: Runs, theirs: Runs) -> None:
    """What one method has more than another, whose mean goes as far back: by set-up, and over all of them."""
    parts = parts_of(ours)
    heads = [heading, *(PARTS[part] for part in parts), "all"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for model, own in ours.items():
        more = {who: numbers - theirs[model][who] for who, numbers in own.items() if who in theirs[model]}
        groups = [[told for (there, _), told in more.items() if there == part] for part in parts]
        cells = [
            " / ".join(f"{column.mean():+.2f} ({chance(column)})" for column in np.array(group).T)
            for group in [*groups, list(more.values())]
        ]
        print(f"| {model} | {' | '.join(cells)} |")
    print()


def on_the_way(method: str, rounds: dict[int, Runs], model: str) -> None:
    """What a model has more than with one turn where training ends earlier, over all set-ups and seeds."""
    gains = [
        np.mean([told - runs["turns=1"][who] for who, told in runs[model].items()], axis=0) for runs in rounds.values()
    ]
    print(f"| {method}, rounds | {' | '.join(str(index) for index in rounds)} |\n|---|{'---|' * len(rounds)}")
    cells = [" / ".join(f"{gain:+.2f}" for gain in both) for both in gains]
    print(f"| {model} more than turns=1 | {' | '.join(cells)} |\n")


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
        ours, theirs = measured("even"), measured("fedavg")
        table("even", late(ours))
        table("fedavg", late(theirs))
        compared("even more than fedavg", late(ours), late(theirs))
        on_the_way("even", ours, f"turns={TURNS[-1]:g}")
