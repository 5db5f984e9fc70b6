"""What a memory is worth: how like their last updates those of returning clients are, as learnt recall learns it.

python docs/results/even/echoes.py [PART ...]    trains (300 rounds, one seed) and adds to echoes.csv
python docs/results/even/echoes.py table         prints the table of docs/even.md
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from tables import PARTS, set_up

from evenhand.engine.simulation import Simulation
from evenhand.experiment import prepare
from evenhand.reruns import machine_of

FILE = Path(__file__).with_name("echoes.csv")
HEADS = ("part", "round", "layer", "cosine", "machine")
METHOD, SEED, ROUNDS, EVERY, FIRST = "even:recall=learnt", 10, 300, 20, 100


def train(part: str) -> None:
    chosen = set_up(part, method=METHOD, seeds=[SEED], rounds=ROUNDS, eval_every=ROUNDS)
    machine = machine_of(chosen)

    def after(simulation: Simulation) -> None:
        state = simulation.replicas[0].state
        if simulation.round % EVERY or state is None:
            return
        with FILE.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                table.writerow(HEADS)
            for layer, cosine in enumerate(state.rule_memo["cosines"], start=1):
                table.writerow((part, simulation.round, layer, f"{cosine:.4f}", machine))

    prepare(chosen).run(after_round=after)


def table() -> None:
    """By layer, from round FIRST on."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with FILE.open(newline="", encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            if int(line["round"]) >= FIRST:
                found[line["part"], line["layer"]].append(float(line["cosine"]))
    print(f"| | {' | '.join(PARTS.values())} |\n|---|{'---|' * len(PARTS)}")
    for layer in sorted({layer for _, layer in found}):
        print(f"| layer {layer} | {' | '.join(f'{np.mean(found[part, layer]):.2f}' for part in PARTS)} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        table()
    else:
        for name in sys.argv[1:] or list(PARTS):
            train(name)
