"""Print the tables of docs/even.md from the runs beside this file: python docs/results/even/tables.py."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import ttest_1samp

from evenhand.experiment import Experiment
from evenhand.recipe import find_recipe

HERE = Path(__file__).parent
PARTS = {
    "CIFAR-10, two shards": "CIFAR-10, batches",
    "CIFAR-10, two shards, full batch": "CIFAR-10, full batch",
    "Fashion-MNIST, one class": "F-MNIST, 1 class",
    "Fashion-MNIST, two classes": "F-MNIST, 2 classes",
    "Fashion-MNIST, Dir(0.1)": "F-MNIST, Dir(0.1)",
}


def set_up(part: str, **more: object) -> Experiment:
    """The experiment of one set-up, with other settings."""
    recipe = find_recipe("even/memory")
    settings = next(entry.settings for entry in recipe.parts if entry.name == part)
    return recipe.experiment.with_settings({**settings, **more})


def table(file: str, row: str, columns: tuple[str, str], order: Sequence[str] = ()) -> None:
    """A line a row and a column a part, "mean / worst 10%", ± the spread over the seeds; - where nothing was run.

    Runs that diverged have no numbers; they are counted.
    """
    with (HERE / file).open(newline="", encoding="utf-8") as lines:
        runs = list(csv.DictReader(lines))
    found: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for run in runs:
        found[run[row], run["part"]].append(run)
    parts = [part for part in PARTS if any(part == there for _, there in found)]
    print(f"| | {' | '.join(PARTS[part] for part in parts)} |\n|---|{'---|' * len(parts)}")
    for name in dict.fromkeys([*order, *(name for name, _ in found)]):
        cells = []
        for part in parts:
            if (name, part) not in found:
                cells.append("-")
                continue
            ended = [run for run in found[name, part] if run[columns[0]] != "nan"]
            means = [[100 * float(run[column]) for run in ended] for column in columns]
            lost = len(found[name, part]) - len(ended)
            spread = [f" ± {stdev(values):.1f}" if len(values) > 1 else "" for values in means]
            told = " / ".join(f"{mean(values):.1f}{more}" for values, more in zip(means, spread, strict=True))
            cells.append(told + (f" ({lost} diverged)" if lost else ""))
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def differences(file: str, row: str) -> None:
    """What `row` has more than each other row, over all set-ups and seeds that both have (paired t-test)."""
    with (HERE / file).open(newline="", encoding="utf-8") as lines:
        runs = {(run["row"], run["part"], run["seed"]): run for run in csv.DictReader(lines) if run["mean"] != "nan"}
    print(f"| {row} less | pairs | mean | p | worst 10% | p |\n|---|---|---|---|---|---|")
    for other in dict.fromkeys(name for name, _, _ in runs if name != row):
        pairs = [(runs[row, *key], run) for (name, *key), run in runs.items() if name == other and (row, *key) in runs]
        cells = []
        for measure in ("mean", "worst:10"):
            more = [100 * (float(a[measure]) - float(b[measure])) for a, b in pairs]
            cells.append(f"{mean(more):+.2f} | {ttest_1samp(more, 0.0).pvalue:.4f}")
        print(f"| {other} | {len(pairs)} | {' | '.join(cells)} |")
    print()


if __name__ == "__main__":
    table("trial.csv", "setting", ("late_mean", "late_worst:10"))
    table("first_form.csv", "row", ("mean", "worst:10"))
    for recipe in ("ablation", "memory"):
        rows = [entry.name for entry in find_recipe(f"even/{recipe}").rows]
        table(f"../even-{recipe}/results.csv", "row", ("mean", "worst:10"), rows)
        differences(f"../even-{recipe}/results.csv", "even")
    for longer in ("even, 8 turns", "even, learnt recall, 8 turns"):
        differences("../even-ablation/results.csv", longer)
