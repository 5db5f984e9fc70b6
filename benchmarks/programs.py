"""A training step of 10 clients by each program: which one is faster for which network.

The choice in `evenhand/engine/programs.py` goes by the kind of network; this is where it comes from. On a GPU also
the feed-forward step as a CUDA graph, as it is and after torch.compile.

    python benchmarks/programs.py [--device cpu|cuda] [--model NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from machine import best_time, devices, provenance, wait

from evenhand.engine.programs import Batched, FeedForward, Program, Sequential
from evenhand.engine.training import Shape
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


def step(program: Callable[[torch.nn.Module], Program], name: str, device: str) -> float:
    """Seconds for the gradients of one step."""
    shape, batch = MODELS[name]
    text = len(shape) == 1
    classes = 80 if text else 10
    module = build(name, shape, classes, seed=0).to(device)
    inputs = torch.randint(0, 80, (CLIENTS, batch, *shape)) if text else torch.randn(CLIENTS, batch, *shape)
    targets = torch.randint(0, classes, (CLIENTS, batch), device=device)
    weights = torch.full((CLIENTS, batch), 1 / batch, device=device)
    layout = Shape.of(module)
    tensors = layout.views(layout.flat(module).to(device).repeat(CLIENTS, 1))
    made, inputs = program(module), inputs.to(device)
    return best_time(lambda: made.gradients(tensors, inputs, targets, weights), device, budget=2.0, least=2)


def feed_forward(compiled: bool) -> tuple[float, float]:
    """Seconds to prepare, and seconds for ten steps of the MLP replayed as a CUDA graph."""
    module = build("mlp", (784,), 10, seed=0)
    layout, program = Shape.of(module), FeedForward(module)
    tensors = layout.views(layout.flat(module).cuda().repeat(CLIENTS, 1))
    inputs = torch.randn(CLIENTS, 50, 784, device="cuda")
    targets = torch.randint(0, 10, (CLIENTS, 50), device="cuda")
    weights = torch.full((CLIENTS, 50), 0.002, device="cuda")
    start = perf_counter()
    one = torch.compile(program.step, dynamic=False) if compiled else program.step

    def steps() -> None:
        for _ in range(10):
            one(tensors, inputs, targets, weights)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        steps()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    wait("cuda")
    return perf_counter() - start, best_time(graph.replay, "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: all there are")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for device in devices(arguments.device):
        print(provenance(device))
        print("\n| network | batch | batched, ms | one after another, ms |\n|---|---|---|---|")
        for name in arguments.model:
            cells = [f"{1e3 * step(program, name, device):,.0f}" for program in (Batched, Sequential)]
            print(f"| {name} | {MODELS[name][1]} | {' | '.join(cells)} |", flush=True)
        if device == "cuda":
            print("\n| MLP, ten steps as a graph | to prepare, s | to replay, ms |\n|---|---|---|")
            for compiled in (False, True):
                prepared, replayed = feed_forward(compiled)
                print(
                    f"| {'compiled' if compiled else 'as it is'} | {prepared:.1f} | {1e3 * replayed:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
