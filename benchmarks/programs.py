"""A training step of 10 clients by each program: which one is faster for which network.

The choice in `evenhand/engine/choice.py` goes by the kind of network; this is where it comes from. On a GPU also a
round's steps as a CUDA graph, by the programs and precisions that there are.

    python benchmarks/programs.py [--device cpu|cuda] [--model NAME ...] [--kernels]

--kernels prints instead what a GPU spends a step of the fused program on, kernel by kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from machine import best_time, devices, provenance, wait

from evenhand.engine.choice import choose_program
from evenhand.engine.programs import Batched, FeedForward, Program, Sequential
from evenhand.engine.recurrent import Recurrent, recurrent_parts
from evenhand.engine.training import Shape, arithmetic
from evenhand.models import build

CLIENTS = 10
MODELS = {
    "cnn": ((3, 32, 32), 50),
    "cnn-mnist": ((1, 28, 28), 50),
    "resnet18-gn": ((3, 32, 32), 10),
    "nf-resnet18": ((3, 32, 32), 10),
    "cct": ((3, 32, 32), 10),
    "char-lstm": ((80,), 10),
}


Given = tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]


def given(name: str, shape: tuple[int, ...], clients: int, batch: int, device: str) -> Given:
    """A network, its tensors of every client, inputs and targets."""
    text = name == "char-lstm"
    classes = 80 if text else 10
    module = build(name, shape, classes, seed=0).to(device)
    inputs = torch.randint(0, 80, (clients, batch, *shape)) if text else torch.randn(clients, batch, *shape)
    targets = torch.randint(0, classes, (clients, batch), device=device)
    layout = Shape.of(module)
    return module, layout.views(layout.flat(module).to(device).repeat(clients, 1)), inputs.to(device), targets


def step(program: Callable[[torch.nn.Module], Program], name: str, device: str) -> float:
    """Seconds for the gradients of one step."""
    shape, batch = MODELS[name]
    module, tensors, inputs, targets = given(name, shape, CLIENTS, batch, device)
    weights = torch.full((CLIENTS, batch), 1 / batch, device=device)
    made = program(module)
    return best_time(lambda: made.gradients(tensors, inputs, targets, weights), device, budget=2.0, least=2)


def replayed(name: str, kind: str, precision: str, clients: int) -> tuple[float, float]:
    """Seconds to prepare, and seconds for a round's steps replayed as a CUDA graph (see STEPS)."""
    shape, steps = (784,) if name == "mlp" else MODELS[name][0], STEPS[name]
    module, tensors, inputs, targets = given(name, shape, clients, 50, "cuda")
    program = choose_program(module, kind.removesuffix(", compiled"), torch.device("cuda"), precision)
    if isinstance(program, FeedForward):
        inputs = program.form(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
    weights = torch.full((clients, 50), 0.002, device="cuda")
    start = perf_counter()
    one: Callable[..., object] = program.step if isinstance(program, FeedForward) else program.gradients
    if kind.endswith("compiled"):
        one = torch.compile(one, dynamic=False)

    def work() -> None:
        for _ in range(steps):
            one(tensors, inputs, targets, weights)

    with arithmetic(precision):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    wait("cuda")
    return perf_counter() - start, best_time(graph.replay, "cuda")


def kernels(name: str, clients: int) -> None:
    """What a step of the fused program takes a GPU, kernel by kernel."""
    shape = (784,) if name == "mlp" else MODELS[name][0]
    module, tensors, inputs, targets = given(name, shape, clients, 50, "cuda")
    program = choose_program(module, "fused", torch.device("cuda"), "tf32")
    assert isinstance(program, FeedForward)
    read = program.form(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
    weights, times = torch.full((clients, 50), 1e-4, device="cuda"), 5
    with arithmetic("tf32"):
        for _ in range(3):
            program.step(tensors, read, targets, weights, full=True)
        wait("cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(times):
                program.step(tensors, read, targets, weights, full=True)
            wait("cuda")
    found = sorted(seen.key_averages(), key=lambda entry: -entry.self_device_time_total)
    print(f"\n| {name}, {clients} clients, 50 samples each | launches | us |\n|---|---:|---:|")
    for entry in found[:15]:
        print(f"| {entry.key[:70]} | {entry.count / times:.0f} | {entry.self_device_time_total / times:.1f} |")
    print(f"| all | | {sum(entry.self_device_time_total for entry in found) / times:.1f} |", flush=True)


GRAPHS = [
    ("mlp", "feed-forward", "float32"),
    ("mlp", "feed-forward, compiled", "float32"),
    ("mlp", "feed-forward", "tf32"),
    ("mlp", "fused", "float32"),
    ("mlp", "fused", "tf32"),
    ("cnn", "sequential", "tf32"),
    ("cnn", "fused", "tf32"),
    ("char-lstm", "batched", "tf32"),
    ("char-lstm", "recurrent", "float32"),
    ("char-lstm", "recurrent", "tf32"),
]
STEPS = {"mlp": 10, "cnn": 8, "char-lstm": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: all there are")
    every = dict.fromkeys([*MODELS, *STEPS])
    parser.add_argument("--model", nargs="+", choices=every, default=list(every))
    parser.add_argument("--kernels", action="store_true", help="a step of the fused program, kernel by kernel")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.kernels:
        if not torch.cuda.is_available():
            parser.error("--kernels needs a CUDA GPU")
        print(provenance("cuda"))
        for name in filter({"mlp", "cnn", "cnn-mnist"}.__contains__, arguments.model):
            for clients in (10, 50, 150):
                kernels(name, clients)
        return
    for device in devices(arguments.device):
        print(provenance(device))
        print("\n| network | batch | batched, ms | one after another, ms | recurrent, ms |\n|---|---|---|---|---|")
        for name in filter(MODELS.__contains__, arguments.model):
            cells = [f"{1e3 * step(program, name, device):,.0f}" for program in (Batched, Sequential)]
            recurs = recurrent_parts(build(name, MODELS[name][0], 80)) is not None
            cells.append(f"{1e3 * step(Recurrent, name, device):,.0f}" if recurs else "-")
            print(f"| {name} | {MODELS[name][1]} | {' | '.join(cells)} |", flush=True)
        if device == "cuda":
            print("\n| network | program | precision | to prepare, s | 10 clients, ms | 50 clients, ms |")
            print("|---|---|---|---|---|---|")
            for name, kind, precision in (row for row in GRAPHS if row[0] in arguments.model):
                (prepared, few), (_, many) = (replayed(name, kind, precision, clients) for clients in (10, 50))
                print(
                    f"| {name} | {kind} | {precision} | {prepared:.1f} | {1e3 * few:.2f} | {1e3 * many:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
