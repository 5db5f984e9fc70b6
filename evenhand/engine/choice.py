"""Which program trains a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenhand.checks import EvenhandError
from evenhand.engine.fused import Fused
from evenhand.engine.programs import Batched, FeedForward, Program, Sequential, feed_forward_layers
from evenhand.engine.recurrent import Recurrent, recurrent_parts

PROGRAMS = ("auto", "fused", "feed-forward", "recurrent", "batched", "sequential")

SMALL = 400_000  # parameters up to which a CPU is faster with all rows of a convolutional network at once


def choose_program(
    module: nn.Module,
    wanted: str = "auto",
    device: torch.device | None = None,
    precision: str = "tf32",
    inputs: Tensor | None = None,
) -> Program:
    """The program that trains this module; 'auto' takes the one that is faster for its kind.

    The choice follows the kind of network and not a stopwatch, so that the same command gives the same numbers.
    Convolutions with a filter for every row are slow, on a CPU once they are large (docs/benchmarks.md). inputs: the
    samples, where a program is to refuse those that it cannot hold.
    """
    if wanted not in PROGRAMS:
        raise EvenhandError(f"program={wanted!r} is not one of {', '.join(map(repr, PROGRAMS))}")
    plain = bool(feed_forward_layers(module))
    fused = Fused.fits(module, device) and precision == "tf32"  # in float32 a library's are faster or sooner ready
    if wanted == "fused" or (wanted == "auto" and fused):
        program = Fused(module, device, precision)
        if inputs is not None:
            program.check_range(inputs)
        return program
    if wanted == "feed-forward" or (wanted == "auto" and plain):
        return FeedForward(module)
    if wanted == "recurrent" or (wanted == "auto" and recurrent_parts(module)):
        return Recurrent(module, device, precision)
    convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    large = sum(parameter.numel() for parameter in module.parameters()) > SMALL
    on_cpu = device is None or device.type == "cpu"
    if wanted == "sequential" or (wanted == "auto" and convolves and (large or not on_cpu)):
        return Sequential(module)
    return Batched(module)
