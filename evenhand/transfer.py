"""Numbers on their way between the CPU and a device, which neither has to wait for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Floats = np.ndarray[Any, np.dtype[np.float64]]

STAGED = 64 << 10  # bytes that CUDA takes from any memory at once; more only from pinned memory


def to_numpy(found: Sequence[Tensor]) -> list[Floats]:
    """Float64 tensors on the CPU, from another device in one transfer."""
    if len(found) == 1 or found[0].device.type == "cpu":
        return [tensor.cpu().numpy() for tensor in found]
    return Awaited(found).numpy()


def sent(numbers: np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for what it is doing."""
    return moved(torch.from_numpy(numbers).to(dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for what it is doing."""
    if device.type == "cuda" and tensor.nbytes > STAGED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_places: dict[int, list[Tensor]] = {}  # of so many numbers in pinned memory, which is slow to come by: those not in use


class Awaited:
    """A copy of float64 tensors on its way to the CPU, in one transfer; what is launched later is not waited for."""

    def __init__(self, found: Sequence[Tensor], shapes: Sequence[tuple[int, ...]] | None = None) -> None:
        """shapes: into what they are taken apart, end to end, where not into the tensors given."""
        self._shapes = [tuple(tensor.shape) for tensor in found] if shapes is None else shapes
        flat = [tensor.reshape(-1) for tensor in found]
        self._joined = torch.cat(flat) if len(flat) > 1 or not flat[0].is_cuda else flat[0]
        self._arrived: Any = None
        if self._joined.is_cuda:
            there, free = self._joined, _places.setdefault(len(self._joined), [])
            self._joined = free.pop() if free else torch.empty(len(there), dtype=torch.float64, pin_memory=True)
            self._joined.copy_(there, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(there.device))

    def numpy(self) -> list[Floats]:
        joined = self._read
        edges = itertools.pairwise(itertools.accumulate(map(math.prod, self._shapes), initial=0))
        return [joined[a:b].reshape(shape) for (a, b), shape in zip(edges, self._shapes, strict=True)]

    @cached_property
    def _read(self) -> Floats:
        """All numbers; their place is free for others then."""
        if self._arrived is None:
            return self._joined.cpu().numpy()
        self._arrived.synchronize()
        found = self._joined.numpy().copy()
        _places[len(found)].append(self._joined)
        del self._joined
        return found
