"""Device work on CUDA, captured once per shape and replayed: one launch in place of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from evenhand.engine.programs import Program


@dataclass(frozen=True)
class Captured:
    """A graph and the tensors it reads and writes."""

    graph: Any
    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    copied: dict[str, tuple[ref[Tensor], int]] = field(default_factory=dict)  # what the inputs hold, as it was then

    def takes(self, name: str, given: Tensor) -> bool:
        """Whether a tensor has to be copied to where the graph reads it; remembers that it was."""
        held, before = self.inputs[name], self.copied.get(name)
        if given is held:
            return False
        changed = any(held is out for out in self.outputs)  # by the graph itself
        if not changed and before is not None and before[0]() is given and before[1] == given._version:
            return False
        self.copied[name] = ref(given), given._version
        return True


@contextmanager
def nothing_collected() -> Iterator[None]:
    """The end of an older graph, when its owner is garbage, would break a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Replayed:
    """Replays work that was captured at its first appearance; the outputs are good until the next replay.

    Work may change its inputs in place and give them out, to go on with them at the next replay.
    """

    LIMIT = 32  # kept; work of ever new shapes runs without a graph after that
    ROOM = 0.15  # of the device's memory that they may keep, before the last one

    def __init__(self) -> None:
        self.captured: dict[Hashable, Captured] = {}
        self.bytes = 0  # of the device's memory that they keep
        self._pool: Any = None  # where those that give out nothing but their inputs have what they need on their way

    @staticmethod
    def possible(device: torch.device, program: Program) -> bool:
        """Graphs would freeze the random numbers of dropout."""
        return device.type == "cuda" and not program.random

    def __call__(
        self, key: Hashable, work: Callable[..., tuple[Tensor, ...]], inputs: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """work(**inputs), where everything in the key and the inputs' shapes decide what it does."""
        key = (key, *((name, tensor.shape) for name, tensor in inputs.items()))
        if key not in self.captured:
            if not self._has_room():
                return work(**inputs)
            self.captured[key] = self._capture(work, inputs)
        kept = self.captured[key]
        new = [(kept.inputs[name], given) for name, given in inputs.items() if kept.takes(name, given)]
        if new:
            torch._foreach_copy_([held for held, _ in new], [given for _, given in new], non_blocking=True)
        kept.graph.replay()
        return kept.outputs

    def _has_room(self) -> bool:
        """Whether one more may be captured; the first one always."""
        if len(self.captured) >= self.LIMIT:
            return False
        return not self.captured or self.bytes < self.ROOM * torch.cuda.get_device_properties("cuda").total_memory

    def _capture(self, work: Callable[..., tuple[Tensor, ...]], inputs: dict[str, Tensor]) -> Captured:
        held = {name: tensor.clone() for name, tensor in inputs.items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = work(**held)  # libraries set themselves up outside the capture
        in_place = all(any(one is own for own in held.values()) for one in found)
        del found
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # as a capture does anyway, so that what is new is the graph's
        before = torch.cuda.memory_reserved()
        if in_place and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with nothing_collected(), torch.cuda.graph(graph, pool=self._pool if in_place else None):
            outputs = work(**held)
        self.bytes += torch.cuda.memory_reserved() - before
        return Captured(graph, held, outputs)
