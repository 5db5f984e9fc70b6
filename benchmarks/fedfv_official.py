"""FedFV's server step as its authors publish it (package flgo) beside ours, on the same updates, in one run.

    pip install --no-deps flgo
    python benchmarks/fedfv_official.py --clients 100 --parameters 2000000

Only flgo's FedFV and its model arithmetic are loaded; the communication around them is replaced by a list of models.
The comparison checks the results against each other too (flgo's window of absent clients is left out by tau = 0).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from pathlib import Path
from time import perf_counter

import torch
from machine import best_time, provenance
from torch import nn

import evenhand as eh


def official() -> tuple[type, types.ModuleType]:
    """flgo's FedFV server class and its model arithmetic, without importing the rest of the package."""
    found = importlib.util.find_spec("flgo")
    if found is None or found.origin is None:
        sys.exit("flgo is not installed: pip install --no-deps flgo")
    root = Path(found.origin).parent
    for name in ("flgo", "flgo.utils", "flgo.algorithm"):
        package = types.ModuleType(name)
        package.__path__ = [str(root / Path(*name.split(".")[1:]))]
        sys.modules[name] = package
    base = types.ModuleType("flgo.algorithm.fedbase")
    base.BasicServer, base.BasicClient = object, object
    sys.modules[base.__name__] = base
    arithmetic = importlib.import_module("flgo.utils.fmodule")
    sys.modules["flgo.utils"].fmodule = arithmetic
    return importlib.import_module("flgo.algorithm.fedfv").Server, arithmetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=2_000_000)
    arguments = parser.parse_args()
    server_class, arithmetic = official()
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(arguments.clients, arguments.parameters, generator=generator)
    losses = (torch.rand(arguments.clients, generator=generator) + 0.1).tolist()

    class Vector(arithmetic.FModule):
        """One linear layer that holds all parameters: flgo makes models without arguments and fills them."""

        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.layer = nn.Linear(arguments.parameters, 1, bias=False)
            self.layer = self.layer.to_empty(device="cpu")

        def get_device(self) -> torch.device:
            return torch.device("cpu")

    def model(values: torch.Tensor) -> nn.Module:
        made = Vector()
        made.layer.weight.data = values[None, :]
        return made

    server = server_class.__new__(server_class)
    server.alpha, server.tau, server.current_round = 0.1, 0, 0
    ids = list(range(arguments.clients))
    server.received_clients = server.sampled = ids
    server.client_last_sample_round = [-1] * arguments.clients
    server.client_grads_history = [0] * arguments.clients
    server.num_clients = arguments.clients
    server.model = model(torch.zeros(arguments.parameters))
    server.sample = lambda: ids
    server.communicate = lambda selected: {"model": [model(-row) for row in updates], "loss": losses}
    start = perf_counter()
    with torch.no_grad():
        server.iterate()
    theirs = perf_counter() - start

    def ours() -> eh.Aggregate:
        return eh.aggregate("fedfv", updates, losses=losses, alpha=0.1, tau=0)

    seconds = best_time(ours)
    moved = server.model.layer.weight.detach()[0]
    difference = torch.linalg.norm(ours().update + moved) / torch.linalg.norm(moved)
    print(provenance())
    print(
        f"{arguments.clients} clients, {arguments.parameters:,} parameters: flgo {theirs:.1f} s, "
        f"evenhand {seconds:.3f} s, {theirs / seconds:.0f}x; relative difference of the results {difference:.1e}"
    )


if __name__ == "__main__":
    main()
