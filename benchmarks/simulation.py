"""The simulator's rounds beside the bare matrix products and a plain PyTorch loop, in one run.

60,000 samples of 784 features, 100 clients with two classes each (80/20 local split), MLP 784-200-200-10, 10 clients a
round, one epoch of batches of 50 (and one full-batch step), lr 0.1. Milliseconds a round without evaluation: the
quietest of five passes over all rows, each the mean of its rounds.

    python benchmarks/simulation.py [--device cpu|cuda] [--rounds 30] [--long] [--only fedavg] [--tables rounds]

Without --device all devices that are there are measured. --long adds whole runs (3,000 rounds, on a CPU 100),
a convolutional network and a million registered clients. --only leaves rows of other methods out, --tables
other tables (there are rounds, whole, unequal, convolutions, population). peers.py measures other frameworks on the
same workload.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from machine import devices, provenance, wait
from torch import nn

from evenhand.data import Dataset, Partition, partition
from evenhand.engine.batches import plan
from evenhand.engine.rounds import Replica, Settings
from evenhand.engine.sampling import Sampling
from evenhand.engine.simulation import Simulation
from evenhand.engine.training import LocalWork, Shape
from evenhand.methods import method
from evenhand.models import build
from evenhand.processes import side_by_side
from evenhand.streams import stream

ADDING = ["fedprox", "fedfa", "ditto"]  # whose clients do more in a step: a pull, momentum, a second model
METHODS = ["fedavg", *ADDING, "qffl:q=1", "fedfv", "adafed", "even", "fedlf", "mfairfl:measure=off"]
GROUPED = ["fairfed", "fpfl", "mfairfl", "mfairfl:measure=eodds"]  # two groups; ten classes
REMEMBERED = 75  # updates of absent clients that FedFV, FedLF and even keep here, 65 to 90
SAMPLING = Sampling(cohort=10)
PASSES = 5


def workload() -> tuple[Dataset, Partition]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(60_000) % 10
    centres = torch.randn(10, 784, generator=generator)
    inputs = centres[targets] + 4.0 * torch.randn(60_000, 784, generator=generator)
    sex = np.array(["f", "m"])[torch.randint(2, (60_000,), generator=generator).numpy()]
    dataset = Dataset("benchmark", inputs, targets, classes=10, columns={"sex": sex}, sensitive=("sex",))
    return dataset, partition(dataset, "pat:2", clients=100, seed=0)


def simulation(
    dataset: Dataset,
    parted: Partition,
    name: str,
    batch: int | None,
    seeds: int = 1,
    device: str = "cpu",
    *,
    model: str = "mlp",
    program: str = "auto",
    cohort: int = 10,
    rounds: int = 10**6,
    eval_every: int = 10**6,
    measure: str = "losses",
) -> Simulation:
    module = build(model, dataset.shape, 10, seed=0)
    start = Shape.of(module).flat(module).to(device)
    replicas = [Replica(seed, method(name), parted, start.clone()) for seed in range(seeds)]
    work, sampling = LocalWork(batch_size=batch), Sampling(cohort=cohort)
    settings = Settings(rounds, work, sampling, eval_every=eval_every, measure=measure, program=program)
    return Simulation(dataset, module, replicas, settings, torch.device(device))


def ours(made: Simulation, rounds: int, device: str, warm_up: int = 12) -> float:
    """Mean time of a round, after a few that warm up (and fill the memory of absent clients)."""
    made.run(until=warm_up)
    wait(device)
    start = perf_counter()
    made.run(until=made.round + rounds)
    wait(device)
    return (perf_counter() - start) / rounds


def bare_products(parted: Partition, batch: int | None, rounds: int, device: str) -> float:
    """The matrix products of forward and backward alone, over the cohort at once."""
    widths = [784, 200, 200, 10]
    samples = [parted.train[k] for k in range(10)]
    steps = plan(samples, epochs=np.ones(10), batch_size=batch, rng=stream(0, "batches"))
    weights = [torch.randn(10, b, a, device=device) for a, b in itertools.pairwise(widths)]
    activations = [torch.randn(10, steps.indices.shape[2], width, device=device) for width in widths]

    def work() -> None:
        for _ in range(steps.steps):
            for depth, weight in enumerate(weights):
                torch.bmm(activations[depth], weight.transpose(1, 2))
                torch.bmm(activations[depth + 1].transpose(1, 2), activations[depth])
                if depth:
                    torch.bmm(activations[depth + 1], weight)

    return _median(work, rounds, device)


def reading(rounds: int) -> float:
    """Reading as many updates as a method remembers, once: their products with one vector."""
    module = build("mlp", (784,), 10, seed=0)
    kept = torch.randn(REMEMBERED, Shape.of(module).total)
    one, elsewhere = torch.randn(kept.shape[1]), torch.zeros(16 << 20)

    def work() -> float:
        elsewhere.add_(1.0)  # training leaves nothing of them in the cache
        start = perf_counter()
        torch.mv(kept, one)
        return perf_counter() - start

    return sorted(work() for _ in range(rounds))[rounds // 2]


def plain_loop(dataset: Dataset, parted: Partition, batch: int | None, rounds: int, device: str) -> float:
    """What most people write: one client after another, an optimiser each, then the average of the models."""
    model = build("mlp", (784,), 10, seed=0).to(device)
    inputs, targets = dataset.inputs.to(device), dataset.targets.to(device)
    number = iter(range(10**6))

    def work() -> None:
        asked = SAMPLING.draw(0, next(number), parted.train.sizes)
        states, sizes = [], []
        for client in asked:
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
            own = torch.from_numpy(parted.train[client]).to(device)
            own = own[torch.randperm(len(own), device=device)]
            for piece in own.split(batch or len(own)):
                optimiser.zero_grad()
                nn.functional.cross_entropy(local(inputs[piece]), targets[piece]).backward()
                optimiser.step()
            states.append(local.state_dict())
            sizes.append(len(own))
        shares = [size / sum(sizes) for size in sizes]
        model.load_state_dict(
            {name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in states[0]}
        )

    return _median(work, rounds, device)


def _median(work: Callable[[], None], rounds: int, device: str) -> float:
    times = []
    for _ in range(rounds + 2):
        start = perf_counter()
        work()
        wait(device)
        times.append(perf_counter() - start)
    return float(np.median(times[2:]))


def whole_run(dataset: Dataset, parted: Partition, name: str, seeds: int, device: str, rounds: int) -> float:
    """Seconds for rounds with evaluation of all clients every 10 rounds, everything that is logged included."""
    made = simulation(dataset, parted, name, 50, seeds, device, rounds=rounds, eval_every=10, measure="all")
    start = perf_counter()
    made.run()
    wait(device)
    return perf_counter() - start


def one_seed(seed: int, name: str, device: str, rounds: int) -> float:
    return whole_run(*workload(), name, 1, device, rounds)


def apart(name: str, seeds: int, device: str, rounds: int) -> float:
    """Seconds for the same with a process for every seed, their start and the making of the data included."""
    start = perf_counter()
    list(side_by_side(partial(one_seed, name=name, device=device, rounds=rounds), range(seeds), seeds))
    return perf_counter() - start


def convolution(device: str, program: str, rounds: int, seeds: int = 1, name: str = "fedavg") -> float:
    """FedLF's network on images of CIFAR-10's shape: 50,000 samples, 100 clients, 10 a round, batches of 50."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50_000, 3, 32, 32, generator=generator)
    dataset = Dataset(name="images", inputs=inputs, targets=torch.arange(50_000) % 10, classes=10)
    parted = partition(dataset, "pat:2", clients=100, seed=0)
    made = simulation(dataset, parted, name, 50, seeds, device, model="cnn", program=program)
    return ours(made, rounds, device, 3)


def population(clients: int, name: str, device: str, rounds: int) -> float:
    """A round of 100 clients with 8 training samples each, out of few or many registered ones."""
    samples = torch.randn(10 * clients, 10, generator=torch.Generator().manual_seed(0))
    dataset = Dataset(name="crowd", inputs=samples, targets=torch.arange(len(samples)) % 10, classes=10)
    parted = partition(dataset, "iid", clients=clients, seed=0)
    return ours(simulation(dataset, parted, name, 4, 1, device, model="logistic", cohort=100), rounds, device)


def busy(dataset: Dataset, parted: Partition, rounds: int) -> float:
    """Seconds of a FedAvg round for which a GPU computes."""
    made = simulation(dataset, parted, "fedavg", 50, device="cuda")
    made.run(until=20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        made.run(until=made.round + rounds)
        torch.cuda.synchronize()
    return 1e-6 * sum(entry.self_device_time_total for entry in seen.key_averages()) / rounds


def table(device: str, rounds: int, only: str = "") -> None:
    """Every row in several passes, and the quietest pass of each: machines have slow minutes."""
    dataset, parted = workload()
    kinds: dict[str, dict[str, object]] = {f"evenhand, {name}": {"name": name} for name in [*METHODS, *GROUPED]}
    kinds["evenhand, fedavg, no losses measured"] = {"name": "fedavg", "measure": "needed"}
    kinds["evenhand, fedavg, and who fell"] = {"name": "fedavg", "measure": "all"}
    kinds["evenhand, fedavg, five seeds at once"] = {"name": "fedavg", "seeds": 5}
    rows: dict[str, list[Callable[[int], float]]] = {
        "bare matrix products": [
            lambda count, batch=batch: bare_products(parted, batch, count, device) for batch in (50, None)
        ],
        "plain PyTorch loop": [
            lambda count, batch=batch: plain_loop(dataset, parted, batch, count, device) for batch in (50, None)
        ],
    }
    if device == "cpu":
        rows[f"reading {REMEMBERED} remembered updates once"] = [reading, reading]
    rows = {label: both for label, both in rows.items() if only in label}
    for label, kind in kinds.items():
        if only not in label:
            continue
        made = [simulation(dataset, parted, batch=batch, device=device, **kind) for batch in (50, None)]
        rows[label] = [lambda count, one=one: ours(one, count, device) for one in made]
    times: dict[tuple[str, int], list[float]] = {}
    least = 3 if device == "cpu" else 50  # rounds follow each other closely there, and a pass has a first and a last
    for _ in range(PASSES):
        for label, both in rows.items():
            for column, measure in enumerate(both):
                times.setdefault((label, column), []).append(measure(max(least, rounds // PASSES)))
    print("\n| what | batches of 50, ms | full batch, ms |\n|---|---|---|")
    for label in rows:
        print(f"| {label} | {1e3 * min(times[label, 0]):.2f} | {1e3 * min(times[label, 1]):.2f} |")
    if device == "cuda":
        print(
            f"\nOf a FedAvg round with batches of 50 the device computes for {1e3 * busy(dataset, parted, 50):.2f} ms."
        )


def unequal_table(device: str, rounds: int) -> None:
    """Clients with very different amounts of data: the longest works for several times as long as most."""
    dataset, _ = workload()
    parted = partition(dataset, "dir:0.1", clients=100, seed=0)
    rows: dict[str, list[Callable[[], float]]] = {
        "plain PyTorch loop": [
            lambda batch=batch: plain_loop(dataset, parted, batch, rounds, device) for batch in (50, None)
        ]
    }
    for name in ("fedavg", "fedlf"):
        made = [simulation(dataset, parted, name, batch, device=device) for batch in (50, None)]
        rows[f"evenhand, {name}"] = [lambda one=one: ours(one, rounds, device) for one in made]
    print("\n| unequal clients (dir:0.1) | batches of 50, ms | full batch, ms |\n|---|---|---|")
    for label, both in rows.items():
        cells = [f"{1e3 * min(measure() for _ in range(3)):.1f}" for measure in both]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def whole_table(device: str, only: str = "") -> None:
    dataset, parted = workload()
    whole = 100 if device == "cpu" else 3000
    print("\n| whole run, evaluation of 100 clients every 10 rounds, all logged | seconds |\n|---|---|")
    for name, seeds in (("fedavg", 1), ("fedavg", 5), ("fedlf", 1), ("fedlf", 5)):
        if only in name:
            seconds = whole_run(dataset, parted, name, seeds, device, whole)
            print(f"| {name}, {whole:,} rounds, {seeds} seed{'s' * (seeds > 1)} | {seconds:.1f} |", flush=True)
    for name in ("fedavg", "fedlf"):
        if only in name:
            seconds = apart(name, 5, device, whole)
            print(f"| {name}, {whole:,} rounds, 5 seeds, a process each | {seconds:.1f} |", flush=True)


def convolution_table(device: str, rounds: int, only: str = "") -> None:
    few = max(3, rounds // 4)
    rows: dict[str, dict[str, Any]] = {"sequential": {}, "batched": {}}
    if device == "cuda":
        own = {f"fused, {name}": {"name": name} for name in ADDING}
        rows = {"fused": {}, **own, "fused, five seeds at once": {"seeds": 5}, **rows}
    print("\n| convolutional network, 798k parameters | ms a round |\n|---|---|")
    for label, more in rows.items():
        if only in label:
            cell = 1e3 * convolution(device, label.partition(",")[0], few, **more)
            print(f"| {label} | {cell:.1f} |", flush=True)


def population_table(device: str, rounds: int) -> None:
    print("\n| 100 clients a round out of | fedavg, ms | adafed, ms |\n|---|---|---|")
    for clients in (1_000, 1_000_000):
        cells = [f"{1e3 * population(clients, name, device, rounds):.2f}" for name in ("fedavg", "adafed")]
        print(f"| {clients:,} | {' | '.join(cells)} |", flush=True)


TABLES = ("rounds", "whole", "unequal", "convolutions", "population")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: all there are")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--long", action="store_true", help="whole runs, a convolutional network, a million clients")
    parser.add_argument("--tables", nargs="+", choices=TABLES, help="these and no others")
    parser.add_argument("--only", default="", metavar="WORD", help="only rows that have this in their name")
    arguments = parser.parse_args()
    every = not arguments.only
    usual = {"rounds": True, "whole": arguments.long, "unequal": every}
    usual |= dict.fromkeys(TABLES[3:], arguments.long and every)
    wanted = arguments.tables or [name for name, usually in usual.items() if usually]
    for device in devices(arguments.device):
        print(provenance(device))
        if "rounds" in wanted:
            table(device, arguments.rounds, arguments.only)
        if "whole" in wanted:
            whole_table(device, arguments.only)
        if "unequal" in wanted:
            unequal_table(device, arguments.rounds)
        if "convolutions" in wanted:
            convolution_table(device, arguments.rounds, arguments.only)
        if "population" in wanted:
            population_table(device, arguments.rounds)


if __name__ == "__main__":
    main()
