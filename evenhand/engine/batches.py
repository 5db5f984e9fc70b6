"""Which samples each client sees at each local step, packed for one batched program.

A cohort's local work is a plan of steps x rows x batch sample indices with weights: padding has weight zero, and the
weights of a real batch add up to one, so that a batch's loss is its mean. A client with less data than the
largest takes fewer steps; on the steps that it does not take all its weights are zero and it stands still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Indices = np.ndarray[Any, np.dtype[np.int64]]
Floats32 = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Plan:
    """Local steps of a cohort: sample indices and weights, steps x rows x batch."""

    indices: Indices
    weights: Floats32

    @property
    def rows(self) -> int:
        return int(self.indices.shape[1])

    def part(self, rows: slice) -> Plan:
        """The same plan for some of the rows."""
        return Plan(np.ascontiguousarray(self.indices[:, rows]), np.ascontiguousarray(self.weights[:, rows]))


def plan(
    samples: Sequence[Indices],
    *,
    epochs: np.ndarray[Any, np.dtype[np.float64]],
    batch_size: int | None,
    rng: np.random.Generator,
) -> Plan:
    """Shuffle every client's samples each epoch and cut them into batches; the last batch of an epoch may be short.

    A client with fractional epochs stops after that share of its steps, but never before the first.
    """
    rows = len(samples)
    sizes = np.array([len(entry) for entry in samples], dtype=np.int64)
    widest = int(sizes.max(initial=1)) or 1
    batch = widest if batch_size is None else min(batch_size, widest)
    per_epoch = -(-sizes // batch)
    steps_of = np.maximum(np.ceil(per_epoch * epochs - 1e-9).astype(np.int64), np.minimum(per_epoch, 1))
    longest = int(per_epoch.max(initial=0))
    padded = np.zeros((rows, longest * batch), dtype=np.int64)
    real = np.arange(longest * batch)[None, :] < sizes[:, None]
    padded[real] = np.concatenate(samples) if rows else 0
    indices = np.zeros((int(steps_of.max(initial=0)), rows, batch), dtype=np.int64)
    weights = np.zeros(indices.shape, dtype=np.float32)
    for epoch in range(int(np.ceil(epochs.max(initial=0.0) - 1e-9))):
        order = padded
        if batch_size is not None:
            keys = np.where(real, rng.random(padded.shape), 2.0)
            order = np.take_along_axis(padded, np.argsort(keys, axis=1, kind="stable"), axis=1)
        cut, kept = (part.reshape(rows, longest, batch).transpose(1, 0, 2) for part in (order, real))
        share = kept / np.maximum(kept.sum(axis=2, keepdims=True), 1)
        for row, count in enumerate(per_epoch):  # a client's epochs follow each other without a gap
            start = epoch * count
            stop = min(start + count, steps_of[row])
            if stop > start:
                indices[start:stop, row] = cut[: stop - start, row]
                weights[start:stop, row] = share[: stop - start, row]
    return Plan(indices, weights)


def join(plans: Sequence[Plan]) -> Plan:
    """Several cohorts' plans beside each other, padded to the longest and widest."""
    if len(plans) == 1:
        return plans[0]
    steps = max(entry.indices.shape[0] for entry in plans)
    batch = max(entry.indices.shape[2] for entry in plans)
    rows = sum(entry.rows for entry in plans)
    indices, weights = np.zeros((steps, rows, batch), dtype=np.int64), np.zeros((steps, rows, batch), dtype=np.float32)
    start = 0
    for entry in plans:
        here = (slice(0, entry.indices.shape[0]), slice(start, start + entry.rows), slice(0, entry.indices.shape[2]))
        indices[here], weights[here] = entry.indices, entry.weights
        start += entry.rows
    return Plan(indices, weights)


@dataclass(frozen=True)
class Samples:
    """Several clients' samples end to end, for evaluation: indices, whose each is, and how many each has."""

    indices: Tensor
    owners: Tensor
    counts: np.ndarray[Any, np.dtype[np.int64]]


def gather(samples: Sequence[Indices], device: torch.device) -> Samples:
    """Several clients' samples end to end."""
    counts = np.array([len(entry) for entry in samples], dtype=np.int64)
    joined = np.concatenate(samples).astype(np.int64) if len(samples) else np.zeros(0, dtype=np.int64)
    owners = np.repeat(np.arange(len(samples)), counts)
    return Samples(torch.from_numpy(joined).to(device), torch.from_numpy(owners).to(device), counts)
