"""mFairFL's Tables 1, 2, 3 and S2 on the real files: the paper's numbers beside ours, tuned and measured by one rule.

Adult, COMPAS and Bank over five clients by shares of the groups, high and low heterogeneity, a network with four hidden
layers, 10 rounds of 20 local epochs, five seeds. The learning rate and each method's settings are chosen on a fifth of
every client's training rows that is held out; then the test rows are measured.

    python benchmarks/mfairfl.py --data-dir DATA [--device cuda] [--seeds 5] [--data adult] [--frozen] [--only even]

puts every row, setting and seed into mfairfl.csv, data set by data set, and writes mfairfl.md from it. All settings of
a table run as one program: minutes on a GPU, hours on two cores. --only runs some rows again, with the learning rates
of the others.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from machine import provenance
from scipy.optimize import linprog

from evenhand.constraints import Cells
from evenhand.data import Dataset
from evenhand.engine.groups import cells_of
from evenhand.experiment import Experiment, load_data
from evenhand.methods import Method, method
from evenhand.reruns import played as together

BATCH = {"adult": 256, "compas": 128, "bank": 256}
SENSITIVE = {"adult": "sex", "compas": "sex", "bank": "age_group"}
HETEROGENEITY = ("high", "low")
KINDS = ("dp", "eodds", "ap")
HEADS = {"accuracy": "Acc.", "dp": "DP", "eodds": "EO", "ap": "AP", "cf": "CF"}
RATES = (0.02, 0.05, 0.1, 0.2)
GAMMAS, BETAS, DAMPING = (0.3, 1.0, 3.0), (0.2, 0.6, 1.0), (0.3, 1.0, 3.0)
HELD_OUT = (1000, 1001)  # seeds of the trial runs
PAPER = Path(__file__).parent / "mfairfl_paper.csv"
COLUMNS = ("data", "heterogeneity", "row", "constraint", "setting", "lr", "seed", *HEADS)

Measured = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One row of the tables: its name, what it is chosen from, and by what (a violation, or client fairness)."""

    name: str
    settings: tuple[str, ...]
    constraint: str = ""
    like: str = ""  # the row whose choice it takes over

    @property
    def weighed(self) -> tuple[str, ...]:
        """The violations that its settings are chosen by."""
        if self.name in ("FedAvg", "q-FFL", "DRFL", "Ditto", "FedMGDA+", "mFairFL without groups", "even"):
            return ("cf",)
        return (self.constraint,) if self.constraint else ("dp",)


def grid(name: str, **values: Sequence[Any]) -> tuple[str, ...]:
    chosen = itertools.product(*values.values())
    return tuple(f"{name}:" + ",".join(f"{k}={v}" for k, v in zip(values, one, strict=True)) for one in chosen)


def rows(frozen: bool) -> list[Row]:
    found = []
    for kind in KINDS:
        measure = (f"{kind},follow=false" if frozen else kind,)
        found += [
            Row("IndFair", grid("indfair", gamma=GAMMAS, measure=measure), kind),
            Row("FedAvg-F", grid("fedavg-f", gamma=GAMMAS, measure=measure), kind),
            Row("FPFL", grid("fpfl", gamma=GAMMAS, damping=DAMPING, measure=measure), kind),
            Row("CenFL", grid("cenfair", gamma=GAMMAS, measure=measure), kind),
            Row("mFairFL", grid("mfairfl", beta=BETAS, gamma=GAMMAS, measure=measure), kind),
            Row("mFairFL-rnd", grid("mfairfl", beta=BETAS, gamma=GAMMAS, measure=measure, order=("random",)), kind),
            Row("mFairFL-rev", grid("mfairfl", beta=BETAS, gamma=GAMMAS, measure=measure, order=("reverse",)), kind),
        ]
    return [
        *(replace(row, like="mFairFL") if row.name in ("mFairFL-rnd", "mFairFL-rev") else row for row in found),
        Row("FedFB", grid("fedfb", step=(0.1, 0.3, 1.0))),
        Row("FairFed", grid("fairfed", beta=(0.05, 0.1, 1, 5), measure=("dp",))),
        Row("FedMGDA+", grid("fedmgda+", length=("paper", "mean"))),
        Row("FedAvg", ("fedavg",)),
        Row("q-FFL", grid("qffl", q=(0.01, 0.1, 1, 5))),
        Row("DRFL", grid("drfl", q=(0.01, 0.1, 1, 5))),
        Row("Ditto", grid("ditto", lam=(0.05, 0.1, 1.0))),
        Row("mFairFL without groups", grid("mfairfl", beta=BETAS, measure=("off",))),
        Row("even", ("even",)),
    ]


# ------------------------------------------------------------------------------------------------------- running


def described(data: str, heterogeneity: str, lr: float, args: argparse.Namespace) -> Experiment:
    base = Experiment(
        data=data,
        data_dir=args.data_dir,
        data_options={"sensitive": SENSITIVE[data]},
        partition=f"shares:{heterogeneity}",
        model="mlp4",
        rounds=args.rounds,
        eval_every=args.rounds,
        measure="needed",
        device=args.device,
    )
    return base.with_settings({"lr": lr, "epochs": args.epochs, "batch_size": BATCH[data], "participation": 1.0})


def held_out(experiment: Experiment) -> Experiment:
    """The same on training rows alone, a fifth of each client's in place of the test rows."""
    options = {**experiment.partition_options, "pool": "train"}
    return replace(experiment, partition_options=options, split=(0.8, 0.0, 0.2), seeds=HELD_OUT)


def played(experiment: Experiment, dataset: Dataset, methods: Sequence[Method]) -> list[list[Measured]]:
    """What every method and seed reaches; those that train alike run as one program."""
    found: list[list[Measured]] = [[] for _ in methods]
    kinds = [(entry.training, entry.objective.name == "personal") for entry in methods]
    for alike in dict.fromkeys(kinds):
        mine = [place for place, entry in enumerate(kinds) if entry == alike]
        wanted = {"accuracy": "pooled_accuracy", "cf": "client_deviation", **{kind: kind for kind in KINDS}}
        for place, runs in zip(mine, together(experiment, [methods[i] for i in mine], dataset, None, ""), strict=True):
            said = [run.measures() for run in runs]
            found[place] = [{name: seed[source] for name, source in wanted.items()} for seed in said]
    return found


def chosen_rate(data: str, heterogeneity: str, dataset: Dataset, args: argparse.Namespace) -> float:
    """The learning rate with which FedAvg is right most often on held-out rows; all methods share it."""
    reached = {}
    for lr in RATES:
        experiment = held_out(described(data, heterogeneity, lr, args))
        seeds = played(experiment, dataset, [method("fedavg")])[0]
        reached[lr] = float(np.mean([measured["accuracy"] for measured in seeds]))
    print(f"  lr: {', '.join(f'{lr:g} {value:.4f}' for lr, value in reached.items())}", flush=True)
    return max(reached, key=lambda lr: reached[lr])


def chosen_settings(experiment: Experiment, dataset: Dataset, every: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Each row's setting: the largest accuracy minus its own violation on held-out rows, the mean of two seeds."""
    tried = [(row, setting) for row in every if not row.like for setting in row.settings]
    values = played(held_out(experiment), dataset, [method(setting) for _, setting in tried])
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for (row, setting), seeds in zip(tried, values, strict=True):
        scores = [one["accuracy"] - np.mean([one[kind] for kind in row.weighed]) for one in seeds]
        score = float(np.mean(scores))
        best[row.name, row.constraint] = max(best.get((row.name, row.constraint), (-1.0, "")), (score, setting))
    found = {key: setting for key, (_, setting) in best.items()}
    for row in every:
        if row.like:
            place = next(r for r in every if r.name == row.like).settings
            like = next(r for r in every if (r.name, r.constraint) == (row.like, row.constraint))
            assert len(place) == len(row.settings)
            found[row.name, row.constraint] = row.settings[like.settings.index(found[row.like, row.constraint])]
    return found


def run(
    data: str, args: argparse.Namespace, rates: dict[tuple[str, str], float], write: Callable[[list[Any]], None]
) -> None:
    """rates: those that are known."""
    every = [row for row in rows(args.frozen) if not args.only or row.name in args.only]
    for heterogeneity in HETEROGENEITY:
        started = perf_counter()
        dataset = load_data(described(data, heterogeneity, RATES[0], args))
        lr = rates.get((data, heterogeneity)) or chosen_rate(data, heterogeneity, dataset, args)
        experiment = described(data, heterogeneity, lr, args)
        settings = chosen_settings(experiment, dataset, every)
        final = replace(experiment, seeds=tuple(range(args.seeds)))
        values = played(final, dataset, [method(settings[row.name, row.constraint]) for row in every])
        for row, seeds in zip(every, values, strict=True):
            for seed, measured in zip(final.seeds, seeds, strict=True):
                setting = settings[row.name, row.constraint]
                told = [f"{measured[name]:.5f}" for name in HEADS]
                write([data, heterogeneity, row.name, row.constraint, setting, f"{lr:g}", seed, *told])
        print(f"{data}, {heterogeneity}: {perf_counter() - started:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------------- the page


def best_accuracy(cells: Cells, counts: np.ndarray[Any, Any], bounds: Measured) -> float:
    """The largest accuracy that any classifier can have whose violations stay within bounds: a linear programme.

    Its unknowns are each group's true and false positive rate; with the groups' sizes and shares of positives given,
    every rate in the measures is linear in them.
    """
    size = counts.sum()
    groups = len(counts)
    right = np.zeros(2 * groups)  # of accuracy by (tpr, fpr) of each group, besides a constant
    right[0::2], right[1::2] = counts[:, 1] / size, -counts[:, 0] / size
    constant = counts[:, 0].sum() / size
    above, below = [], []

    def within(row: np.ndarray[Any, Any], offset: float, bound: float) -> None:
        above.extend([row, -row])
        below.extend([bound - offset, bound + offset])

    def unit(group: int, label: int) -> np.ndarray[Any, Any]:
        found = np.zeros(2 * groups)
        found[2 * group + (1 - label)] = 1.0
        return found

    every = {y: sum(counts[g, y] * unit(g, y) for g in range(groups)) / counts[:, y].sum() for y in (0, 1)}
    positive = sum(counts[g, y] * unit(g, y) for g in range(groups) for y in (0, 1)) / size
    for g in range(groups):
        share = counts[g] / counts[g].sum()
        within(share[1] * unit(g, 1) + share[0] * unit(g, 0) - positive, 0.0, bounds["dp"])
        for y in (0, 1):
            within(unit(g, y) - every[y], 0.0, bounds["eodds"])
        own = share[1] * unit(g, 1) - share[0] * unit(g, 0)
        within(own - right, share[0] - constant, bounds["ap"])
    solved = linprog(-right, A_ub=np.array(above), b_ub=np.array(below), bounds=(0.0, 1.0))
    return float(constant - solved.fun)


def page(args: argparse.Namespace) -> str:
    with (args.out / "mfairfl.csv").open() as file:
        ours = list(csv.DictReader(file))
    with PAPER.open() as file:
        paper = list(csv.DictReader(file))
    lines = [
        "# mFairFL's tables, run again",
        "",
        f"Made by `python benchmarks/mfairfl.py{' --frozen' * args.frozen}` (see its head); {args.provenance}.",
        "Every seed is in mfairfl.csv.",
        "",
        *FOREWORD,
    ]
    findings = args.out / "mfairfl_findings.md"
    if findings.is_file():
        lines += ["", findings.read_text().strip()]
    for table, (title, heterogeneity) in TABLES.items():
        lines += ["", f"## Table {table}: {title}", ""]
        for data in dict.fromkeys(row["data"] for row in ours):
            lines += _table(table, data, heterogeneity, ours, paper)
    lines += ["", "## What the paper's numbers allow", "", *BOUNDS_WORDS, ""]
    lines += _bounds(args, paper)
    return "\n".join(lines) + "\n"


TABLES = {
    "1": ("group fairness, high heterogeneity", "high"),
    "S2": ("group fairness, low heterogeneity", "low"),
    "2": ("client fairness, high heterogeneity", "high"),
    "3": ("the order of projection, high heterogeneity", "high"),
}
FOREWORD = """\
DP, EO and AP are the largest deviation of a group from everyone in demographic parity, equalised odds and
accuracy parity; CF is the largest deviation of a client's accuracy from everyone's (the paper defines none).
A row with a constraint is trained under that one; the paper has one row a method and does not say which. Ours
are means over the seeds with their standard deviation; the paper's stand without one. `FedAvg` and `even`
know nothing of groups.""".splitlines()
BOUNDS_WORDS = """\
Given the test rows' share of each group and its share of positives, the largest accuracy that any classifier
can reach with a row's DP, EO and AP (each rounded up by 0.0005) is a linear programme over the groups' true
and false positive rates. A row whose accuracy is above that cannot be one model on these test rows under
these measures.""".splitlines()


def _table(table: str, data: str, heterogeneity: str, ours: list[Any], paper: list[Any]) -> list[str]:
    wanted = [row for row in paper if row["table"] == table and row["data"] == data]
    heads = [name for name in HEADS if any(row[name] for row in wanted)]
    lines = [f"**{data}**", "", "| row | constraint | " + " | ".join(f"{HEADS[h]} paper | ours" for h in heads) + " |"]
    lines.append("|---|---|" + "---:|" * (2 * len(heads)))
    here = [row for row in ours if row["data"] == data and row["heterogeneity"] == heterogeneity]
    extra = [] if table == "3" else ["even"] if table == "2" else ["FedAvg", "even"]
    for name in [*(row["row"] for row in wanted), *extra]:
        said = next((row for row in wanted if row["row"] == name), None)
        mine = "mFairFL without groups" if table == "2" and name == "mFairFL" else name
        constraints = dict.fromkeys(row["constraint"] for row in here if row["row"] == mine)
        for number, constraint in enumerate(constraints):
            seeds = [row for row in here if row["row"] == mine and row["constraint"] == constraint]
            cells = []
            for head in heads:
                values = np.array([float(row[head]) for row in seeds])
                spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
                shown = f"{values.mean():.3f}{spread}" if not (head == "cf" and mine in ("IndFair", "CenFL")) else "-"
                cells += [(said[head] or "-") if said and not number else "", shown]
            lines.append(f"| {mine if not number else ''} | {constraint or '-'} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _bounds(args: argparse.Namespace, paper: list[Any]) -> list[str]:
    lines = ["| table | data | row | Acc. in the paper | largest possible | always the commoner class |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for data in args.data:
        dataset = load_data(described(data, "high", RATES[0], args))
        cells, codes = cells_of(dataset)
        assert cells is not None
        assert codes is not None
        tested = codes[dataset.train_rows or 0 :].numpy()
        counts = np.bincount(tested, minlength=cells.count).reshape(cells.joint, cells.classes).astype(float)
        constant = counts.sum(0).max() / counts.sum()
        for row in paper:
            if row["data"] != data or row["table"] not in ("1", "S2") or not row["dp"]:
                continue
            most = best_accuracy(cells, counts, {kind: float(row[kind]) + 0.0005 for kind in KINDS})
            over = " **above**" if float(row["accuracy"]) > most + 0.0005 else ""
            lines.append(
                f"| {row['table']} | {data} | {row['row']} | {row['accuracy']}{over} | {most:.3f} | {constant:.3f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--data", nargs="+", choices=list(SENSITIVE), default=list(SENSITIVE))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--only", nargs="+", choices=[row.name for row in rows(False) if not row.like], default=[])
    parser.add_argument("--frozen", action="store_true", help="gaps stay as they are through a round (follow=false)")
    parser.add_argument("--page-only", action="store_true", help="write the page from the numbers that are there")
    parser.add_argument("--where", default="", help="machine and date, for the page; default: this machine, today")
    args = parser.parse_args()
    args.provenance = args.where or provenance(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "mfairfl.csv"
    if not args.page_only:
        before = []
        if path.is_file():
            with path.open() as file:
                before = list(csv.DictReader(file))
        kept = [row for row in before if row["data"] not in args.data or (args.only and row["row"] not in args.only)]
        rates = {(row["data"], row["heterogeneity"]): float(row["lr"]) for row in kept}
        with path.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(COLUMNS)
            table.writerows([row[name] for name in COLUMNS] for row in kept)
            for data in args.data:
                run(data, args, rates, lambda row: (table.writerow(row), file.flush())[0])
    (args.out / "mfairfl.md").write_text(page(args))


if __name__ == "__main__":
    main()
