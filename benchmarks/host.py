"""What a round costs besides the device: local training is replaced by a device that sleeps.

    python benchmarks/host.py [--rounds 320]

Everything else of a GPU's round takes place as it would there: who takes part and on which samples, the server's step,
the record. Milliseconds a round, the quietest of four passes; the closer to the device's own time, the better.
"""

from __future__ import annotations

import argparse
import time
from time import perf_counter
from typing import Any

import torch
from machine import provenance
from simulation import simulation
from torch import Tensor

from evenhand import transfer
from evenhand.data import Dataset, partition

CASES = [("fedavg", 1, 0.6), ("fedavg", 5, 1.5), ("fedlf", 1, 0.8)]  # method, seeds, milliseconds of the device


def workload() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60_000, 2, generator=generator)
    return Dataset("benchmark", inputs, torch.arange(60_000) % 10, classes=10)


def measure(name: str, seeds: int, busy: float, rounds: int) -> float:
    dataset = workload()
    made = simulation(dataset, partition(dataset, "pat:2", clients=100, seed=0), name, 50, seeds, model="logistic")
    made.together = True
    updates = torch.randn(10 * seeds, made.shape.total, generator=torch.Generator().manual_seed(0))
    measured = torch.rand(2, 10 * seeds, dtype=torch.float64) + 0.1
    until = 0.0  # the device has finished all that it was given

    def train(*given: Any) -> tuple[Tensor, ...]:
        nonlocal until
        models, then, beside = given[0], *given[-2:]
        until = max(until, perf_counter()) + busy
        return (updates, measured, *(() if then is None else then(updates, measured, models, **beside)))

    def asked(self: transfer.Awaited, *given: Any) -> None:
        asking(self, *given)
        due[id(self)] = until

    def arrived(self: transfer.Awaited) -> list[transfer.Floats]:
        time.sleep(max(0.0, due.pop(id(self)) - perf_counter()))
        return plainly(self)

    due: dict[int, float] = {}  # when the device has what is awaited
    asking, plainly = transfer.Awaited.__init__, transfer.Awaited.numpy
    made.worker.round = train  # type: ignore[method-assign, assignment]  # both for the measurement alone
    transfer.Awaited.__init__, transfer.Awaited.numpy = asked, arrived  # type: ignore[method-assign]
    try:
        made.run(until=64)
        best = float("inf")
        for _ in range(4):
            start = perf_counter()
            made.run(until=made.round + rounds)
            best = min(best, (perf_counter() - start) / rounds)
    finally:
        transfer.Awaited.__init__, transfer.Awaited.numpy = asking, plainly  # type: ignore[method-assign]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=320)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(provenance("cpu"))
    print("\n| method | seeds | device, ms | round, ms |\n|---|---|---|---|")
    for name, seeds, busy in CASES:
        print(f"| {name} | {seeds} | {busy} | {1e3 * measure(name, seeds, busy / 1e3, rounds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
