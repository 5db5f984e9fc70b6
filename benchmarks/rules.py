"""Every rule beside the floor and beside its published long-vector form.

The floor reads the updates twice: one plain Gram product and one plain combination, by the same torch in the
same run. The published form is the paper's algorithm box on long vectors (tests/oracles.py), on the same float32
numbers; it is run where it takes less than --patience seconds by estimate (FedMGDA+'s box never: its oracle is no
published form). Extra memory includes the result itself, which is 1/clients of the updates.

    python benchmarks/rules.py                 all sizes on every device there is: several minutes
    python benchmarks/rules.py --quick         the small ones
    python benchmarks/rules.py --patience 90   with published forms that take long
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from machine import best_time, devices, peak_extra, provenance

import evenhand as eh

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import oracles

SIZES = [(10, 200_000), (100, 200_000), (10, 2_000_000), (100, 2_000_000), (1000, 200_000)]
LAYERS = 5  # equal blocks for the layer-wise rule

RULES: dict[str, dict[str, object]] = {
    "fedavg": {},
    "qffl": {"q": 1.0},
    "afl": {},
    "term": {},
    "drfl": {},
    "fedgini": {},
    "fedmgda+": {},
    "fedmgda+ eps=1": {"epsilon": 1.0},
    "fedfv": {},
    "fedmdfg": {},
    "fedlf": {},
    "adafed": {},
    "even": {},
    "fedfa": {},
    "mfairfl": {},
    "fairfed": {},
    "fedavg + fedadam": {"server": "fedadam"},
}


def published(name: str, updates: np.ndarray, losses: np.ndarray) -> object:
    """The algorithm box of the paper, for the rules that work on whole gradients."""
    ids = list(range(len(updates)))
    uniform = np.full(len(updates), 1 / len(updates))
    edges = np.linspace(0, updates.shape[1], LAYERS + 1).astype(int)
    layers = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    forms = {
        "qffl": lambda: oracles.qffl(updates, losses, 1.0, 10.0),
        "fedmgda+ eps=1": lambda: oracles.fedmgda_plus(updates, 1.0, uniform),
        "fedfv": lambda: oracles.fedfv(updates, losses, ids, 0, None, 0.1, 0),
        "fedmdfg": lambda: oracles.fedmdfg(updates, losses, ids, 0, None, 11.25),
        "fedlf": lambda: oracles.fedlf(updates, losses, ids, 0, None, layers),
        "adafed": lambda: oracles.adafed(updates, losses, 1.0, "mean"),
        "mfairfl": lambda: oracles.mfairfl_conflicts(updates, losses, ids, None, 1.0, 0.01),
    }
    return forms.get(name)


def blocks(columns: int) -> list[int]:
    return np.diff(np.linspace(0, columns, LAYERS + 1).astype(int)).tolist()


def times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 1.0 else f"{ratio:.1f}x"


def measure(rows: int, columns: int, device: str, patience: float) -> None:
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(rows, columns, generator=generator)  # independent: half of all pairs conflict
    updates = updates.to(device)
    losses = torch.rand(rows, generator=generator).double().numpy() + 0.1
    inputs = {
        "losses": losses,
        "sizes": np.ones(rows),
        "accuracies": 1 - losses / 2,
        "fairness": losses,
        "fairness_global": 0.5,
        "lr": 0.1,
    }
    weights = torch.full((rows,), 1 / rows, device=device)
    product = best_time(lambda: updates @ updates.T, device)
    combination = best_time(lambda: weights @ updates, device)
    floor = product + combination
    size = updates.numel() * updates.element_size()
    print(f"\n### {rows} clients, {columns:,} parameters ({size / 2**20:,.0f} MiB of updates)\n")
    print(f"Floor: {1e3 * floor:.2f} ms (Gram product {1e3 * product:.2f}, combination {1e3 * combination:.2f}).\n")
    print("| rule | aggregate, ms | x floor | extra memory | published form, ms | published / aggregate |")
    print("|---|---|---|---|---|---|")
    for label, settings in RULES.items():
        name = label.split()[0]
        layers = blocks(columns) if name == "fedlf" else None

        def run(name=name, settings=settings, layers=layers):
            return eh.aggregate(name, updates, layers=layers, **inputs, **settings)

        seconds = best_time(run, device)
        extra = peak_extra(run, device) / size
        row = f"| {label} | {1e3 * seconds:.2f} | {seconds / floor:.2f} | {100 * extra:.1f}% |"
        theirs = published_seconds(label, updates, losses, device, patience)
        row += " - | - |" if theirs is None else f" {1e3 * theirs:,.0f} | {times(theirs / seconds)} |"
        print(row, flush=True)


def published_seconds(
    label: str, updates: torch.Tensor, losses: np.ndarray, device: str, patience: float
) -> float | None:
    """One run of the long-vector form, where a shorter one of the same shape says it will not take too long."""
    if device != "cpu" or len(updates) > 200:  # an oracle's own set-up takes minutes there
        return None
    whole = updates.numpy()
    short = np.ascontiguousarray(whole[:, : max(1000, whole.shape[1] // 50)])
    trial = published(label, short, losses)
    if trial is None:
        return None
    seconds = 0.0
    for work in (trial, published(label, whole, losses)):
        if seconds * whole.shape[1] / short.shape[1] > patience:
            return None
        start = perf_counter()
        work()
        seconds = perf_counter() - start
    return seconds


def measure_memory_of_absent(present: int, past: int, columns: int, device: str) -> None:
    """Rounds that also look at remembered updates: the floor is products with the present rows alone."""
    generator = torch.Generator().manual_seed(1)
    cohorts = [torch.randn(present, columns, generator=generator).to(device) for _ in range(1 + past // present)]
    both, weights = torch.cat(cohorts), torch.ones(present + past, device=device)
    floor = best_time(lambda: both @ cohorts[0].T, device) + best_time(lambda: weights @ both, device)
    print(f"\n### {present} clients present, {past} remembered, {columns:,} parameters\n")
    print(f"Floor: {1e3 * floor:.2f} ms (products with the present rows, combination of all).\n")
    print(
        "| rule | state kept as it is, ms | x floor | state given up (own=True), ms | x floor |\n|---|---|---|---|---|"
    )
    for name in ("fedfv", "fedlf", "adafed", "even"):
        times = [best_time(rounds(name, cohorts, own), device, budget=2.0) for own in (False, True)]
        cells = " | ".join(f"{1e3 * seconds:.2f} | {seconds / floor:.2f}" for seconds in times)
        print(f"| {name} | {cells} |", flush=True)


def rounds(name: str, cohorts: list[torch.Tensor], own: bool) -> Callable[[], object]:
    """The next round of a federation whose cohorts take turns, all others being remembered."""
    present, columns = cohorts[0].shape
    memory = {"tau": len(cohorts) - 1} if name == "fedfv" else {"absent": f"last:{len(cohorts) - 1}"}
    layers = blocks(columns) if name == "fedlf" else None
    turn, state = itertools.count(), None

    def play() -> object:
        nonlocal state
        now = next(turn) % len(cohorts)
        clients = list(range(now * present, (now + 1) * present))
        losses = np.linspace(0.5, 1.5, present)
        out = eh.aggregate(
            name, cohorts[now], losses=losses, clients=clients, layers=layers, state=state, own=own, **memory
        )
        state = out.state
        return out

    for _ in cohorts:
        play()
    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: all there are")
    parser.add_argument("--quick", action="store_true", help="the small sizes alone")
    parser.add_argument("--size", type=int, nargs=2, metavar=("CLIENTS", "PARAMETERS"), help="one size alone")
    parser.add_argument("--absent", action="store_true", help="rounds with remembered updates alone")
    parser.add_argument("--patience", type=float, default=2.0, help="longest run of a published form, seconds")
    arguments = parser.parse_args()
    sizes = SIZES[:2] if arguments.quick else SIZES
    for device in devices(arguments.device):
        print(provenance(device))
        for rows, columns in [tuple(arguments.size)] if arguments.size else [] if arguments.absent else sizes:
            measure(rows, columns, device, arguments.patience)
        for columns in [] if arguments.size else [200_000, 2_000_000][: 1 if arguments.quick else 2]:
            measure_memory_of_absent(10, 60, columns, device)


if __name__ == "__main__":
    main()
