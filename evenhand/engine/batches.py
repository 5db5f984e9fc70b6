"""Which samples each client sees at each local step, packed for one batched program.

A cohort's local work is a plan of rows x steps x batch sample indices with weights: padding has weight zero, and the
weights of a real batch add up to one, so that a batch's loss is its mean. A client with less data than the
largest takes fewer steps; on the steps that it does not take all its weights are zero and it stands still. The first
epoch is always there in full, so that every client's loss at the received model can be measured on the same samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evenhand.transfer import moved

Indices = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Floats32 = np.ndarray[Any, np.dtype[np.float32]]


OPTIONAL = ("labels", "partners", "blend")
ARRAYS = ("indices", "weights", "shares", *OPTIONAL)
SHARED = ("weights", "shares")  # the same in every round where all clients have as much data
FILLED, NEAR = 0.95, 4  # rows that have so much of the widest one's samples, or so few less, are as wide
FILLED_ON_A_GPU = 0.6  # which would rather do more than launch more
PLACES = 9  # bits of a 63-bit number that random numbers of 53, and 1, leave
ALIGNED = 256  # bytes: where the pieces of a transfer begin


@dataclass(frozen=True)
class Plan:
    """Local steps of a cohort: sample indices and their weights, rows x steps x batch."""

    indices: Indices
    weights: Floats32  # in training
    shares: Floats32  # in the mean over a client's own data: the first epoch's steps alone
    steps: int  # how many of the steps anybody trains on
    labels: Indices | None = None  # of the samples, where they are not the data set's own
    partners: Indices | None = None  # mixup: with which other place of its batch each sample is mixed
    blend: Floats32 | None = None  # rows x steps x 1: its own share in the mixture

    @property
    def rows(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Cohort:
    """Clients of a round: each one's samples and epochs, and the random numbers that shuffle them."""

    samples: Sequence[Indices]
    epochs: Floats
    rng: np.random.Generator


def plan(samples: Sequence[Indices], *, epochs: Floats, batch_size: int | None, rng: np.random.Generator) -> Plan:
    """Shuffle every client's samples each epoch and cut them into batches; the last batch of an epoch may be short.

    A client with fractional epochs stops after that share of its steps, but never before the first.
    """
    return plan_together([Cohort(samples, epochs, rng)], batch_size)


def plan_together(cohorts: Sequence[Cohort], batch_size: int | None) -> Plan:
    """Several cohorts' plans one after another, padded to the longest and widest; each is what it would be alone."""
    samples = [own for cohort in cohorts for own in cohort.samples]
    epochs = np.concatenate([cohort.epochs for cohort in cohorts])
    sizes = tuple(map(len, samples))
    frame = _frame(sizes, batch_size)
    padded = frame.filled(samples)
    if epochs.max(initial=0.0) == 1.0 == epochs.min(initial=1.0):  # nothing to line up
        order = padded if batch_size is None else _shuffled(padded, frame, _keys(cohorts, padded.shape, batch_size))
        return Plan(order.reshape(frame.weights.shape), frame.weights, frame.shares, frame.longest)
    per_epoch, rows = frame.per_epoch, len(samples)
    steps_of = np.maximum(np.ceil(per_epoch * epochs - 1e-9).astype(np.int64), np.minimum(per_epoch, 1))
    steps = int(steps_of.max(initial=0))
    indices = np.zeros((rows, max(steps, frame.longest), frame.batch), dtype=np.int64)
    weights = np.zeros(indices.shape, dtype=np.float32)
    step = np.arange(frame.longest)
    for epoch in range(_rounded_up(epochs)):
        cut = padded
        if batch_size is not None:
            cut = _shuffled(padded, frame, _keys(cohorts, padded.shape, batch_size, epoch))
        cut = cut.reshape(frame.weights.shape)
        here = step + epoch * per_epoch[:, None]  # a client's epochs follow each other without a gap
        row, column = np.nonzero((step < per_epoch[:, None]) & (here < np.maximum(steps_of, per_epoch)[:, None]))
        indices[row, here[row, column]] = cut[row, column]
        row, column = np.nonzero((step < per_epoch[:, None]) & (here < steps_of[:, None]))
        weights[row, here[row, column]] = frame.weights[row, column]
    return Plan(indices, weights, frame.shares, steps)


@dataclass(frozen=True)
class Frame:
    """An epoch of clients with so much data, whatever their samples: what rounds of equal clients share."""

    batch: int
    per_epoch: Indices  # steps of each client
    real: np.ndarray[Any, np.dtype[np.bool_]] | None  # rows x places: no padding; None where there is none
    weights: Floats32  # rows x steps x batch
    shares: Floats32

    @property
    def longest(self) -> int:
        return self.weights.shape[1]

    def filled(self, samples: Sequence[Indices]) -> Indices:
        """The samples side by side (rows x places), padding at the end."""
        joined = np.concatenate(samples) if samples else np.zeros(0, dtype=np.int64)
        if self.real is None:
            return joined.reshape(len(samples), -1)
        padded = np.zeros(self.real.shape, dtype=np.int64)
        padded[self.real] = joined
        return padded


@lru_cache(maxsize=4)
def _frame(counts: tuple[int, ...], batch_size: int | None) -> Frame:
    sizes = np.array(counts, dtype=np.int64)
    batch = _batch(sizes, batch_size)
    per_epoch = -(-sizes // batch)
    longest = int(per_epoch.max(initial=0))
    real = np.arange(longest * batch) < sizes[:, None]
    kept = real.reshape(len(sizes), longest, batch)
    filled = np.clip(sizes[:, None] - batch * np.arange(longest), 1, batch)  # samples in each batch
    return Frame(
        batch,
        per_epoch,
        None if real.all() and real.size else real,
        kept * (np.float32(1.0) / filled.astype(np.float32))[:, :, None],
        kept * (np.float32(1.0) / np.maximum(sizes, 1).astype(np.float32))[:, None, None],
    )


def _batch(sizes: Indices, batch_size: int | None) -> int:
    """Samples in the largest batch of clients of these sizes."""
    widest = int(sizes.max(initial=1)) or 1
    return widest if batch_size is None else min(batch_size, widest)


def _rounded_up(epochs: Floats) -> int:
    """Epochs that anybody begins."""
    return max(1, int(np.ceil(epochs.max(initial=0.0) - 1e-9)))


def _keys(cohorts: Sequence[Cohort], shape: tuple[int, ...], batch_size: int, epoch: int = 0) -> Floats:
    """Random numbers by which an epoch's samples are sorted; every cohort draws as many as it would alone."""
    if len(cohorts) == 1:
        return cohorts[0].rng.random(shape)
    keys, start = np.zeros(shape), 0
    for cohort in cohorts:
        rows, most = len(cohort.samples), max(map(len, cohort.samples), default=0)
        batch = min(batch_size, most or 1)
        width = -(-most // batch) * batch
        if epoch < _rounded_up(cohort.epochs):
            if width == shape[1]:
                cohort.rng.random(out=keys[start : start + rows])
            else:
                keys[start : start + rows, :width] = cohort.rng.random((rows, width))
        start += rows
    return keys


def _shuffled(padded: Indices, frame: Frame, keys: Floats) -> Indices:
    """Every row's samples in the order of their keys, padding last."""
    order = _order(keys if frame.real is None else np.where(frame.real, keys, 1.0))
    order += np.arange(0, padded.size, padded.shape[1])[:, None] if padded.size else 0
    return padded.take(order)


def _order(keys: Floats) -> Indices:
    """As argsort, of random numbers below 1 and ones: multiples of 2^-53, which leave room for a place beside each."""
    width = keys.shape[1]
    if width > 1 << PLACES:
        return np.argsort(keys, axis=1)
    found = (keys * 2.0 ** (53 + PLACES)).astype(np.int64)
    found |= np.arange(width)
    found.sort(axis=1)
    found &= (1 << PLACES) - 1
    return found


def relabelled(slots: Plan, samples: Indices, labels: Indices) -> Plan:
    """A plan over places in a list of samples, as one over these samples with the labels given for the places."""
    return replace(slots, indices=samples[slots.indices], labels=labels[slots.indices])


def mixed(steps: Plan, alpha: float, rng: np.random.Generator) -> Plan:
    """The plan with mixup (Zhang et al., ICLR 2018): a random other sample of the batch for each.

    A batch's share comes from Beta(alpha, alpha). alpha 0: every sample stays as it is, beside plans that mix.
    """
    shape = steps.weights.shape
    if alpha == 0.0:
        places = np.broadcast_to(np.arange(shape[2]), shape).copy()
        return replace(steps, partners=places, blend=np.ones((*shape[:2], 1), dtype=np.float32))
    keys = np.where(steps.weights > 0, rng.random(shape), 2.0)  # a batch's samples come before its padding
    share = rng.beta(alpha, alpha, (*shape[:2], 1)).astype(np.float32)
    return replace(steps, partners=np.argsort(keys, axis=2, kind="stable"), blend=share)


def join(plans: Sequence[Plan]) -> Plan:
    """Several cohorts' plans one after another, padded to the longest and widest."""
    if len(plans) == 1:
        return plans[0]
    found: dict[str, Any] = {"steps": max(entry.steps for entry in plans)}
    for name in ARRAYS:
        given = [getattr(entry, name) for entry in plans]
        found[name] = _stacked(given) if given[0] is not None else None  # all plans have it, or none
    return Plan(**found)


def _stacked(pieces: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    shape = (sum(len(piece) for piece in pieces), *(max(piece.shape[axis] for piece in pieces) for axis in (1, 2)))
    whole = np.zeros(shape, dtype=pieces[0].dtype)
    start = 0
    for piece in pieces:
        whole[start : start + len(piece), : piece.shape[1], : piece.shape[2]] = piece
        start += len(piece)
    return whole


def filled_up(steps: Plan, unit: int) -> Plan:
    """The same with steps on which everybody stands still, up to a multiple of `unit`: fewer different shapes."""

    def longer(array: np.ndarray[Any, Any] | None) -> Any:
        missing = 0 if array is None else -array.shape[1] % unit
        return array if array is None or not missing else np.pad(array, ((0, 0), (0, missing), (0, 0)))

    named = {name: longer(getattr(steps, name)) for name in ARRAYS}
    return replace(steps, **named, steps=-(-steps.steps // unit) * unit)


class Patch(NamedTuple):
    """Some rows at some steps, and how many samples a batch has at most there."""

    rows: list[int]
    steps: slice
    width: int


class Extents(NamedTuple):
    """How many steps each row takes, and how many samples its largest batch has."""

    lengths: Indices
    widths: Indices

    @classmethod
    def of(cls, weights: Any) -> Extents:
        """By the weights of the samples."""
        real = np.asarray(weights) > 0
        return cls(real.any(2).sum(1), real.sum(2).max(1, initial=0))

    def part(self, rows: slice | Indices) -> Extents:
        return Extents(self.lengths[rows], self.widths[rows])


def unpadded(extents: Extents, filled: float = FILLED) -> Iterator[list[Patch]]:
    """Rows that are about as wide, and of each such group what is not padding.

    Patches of a group follow each other, each with as many of its rows as still move, the longest ones first.
    """
    lengths, widths = (found.tolist() for found in extents)
    groups: list[list[int]] = []
    busy = [row for row, width in enumerate(widths) if width]
    for row in sorted(busy, key=lambda row: (-widths[row], -lengths[row])):
        widest = widths[groups[-1][0]] if groups else 0
        if groups and widths[row] >= min(filled * widest, widest - NEAR):
            groups[-1].append(row)
        else:
            groups.append([row])
    for group in groups:
        group.sort(key=lambda row: -lengths[row])
        edges = itertools.pairwise(sorted({0, *(lengths[row] for row in group)}))
        moving = [([row for row in group if lengths[row] > start], start, stop) for start, stop in edges]
        yield [Patch(rows, slice(start, stop), max(widths[row] for row in rows)) for rows, start, stop in moving]


@dataclass(frozen=True)
class Batches:
    """A plan on the device where it is carried out."""

    indices: Tensor
    weights: Tensor
    shares: Tensor
    steps: int
    steady: bool  # every row moves at every step
    full: bool  # and nothing is padding
    whole: bool  # the first step shows every client all its data
    labels: Tensor | None = None  # as in Plan
    partners: Tensor | None = None
    blend: Tensor | None = None
    extents: Extents | None = None  # of training; None where nothing is padding, or where that is not known

    @classmethod
    def of(cls, steps: Plan, device: torch.device, last: tuple[Plan, Batches] | None = None) -> Batches:
        """last: another plan and its batches, which share what is the same in both."""
        named = {name: getattr(steps, name) for name in ARRAYS}
        known = {} if last is None else {name: getattr(last[1], name) for name in SHARED if _same(name, steps, last[0])}
        trained = steps.weights[:, : steps.steps]
        full = bool((trained[..., -1] > 0).all())
        return cls(
            **known,
            **_sent({name: array for name, array in named.items() if array is not None and name not in known}, device),
            steps=steps.steps,
            steady=bool((trained[..., 0] > 0).all()),  # a batch's padding comes last
            full=full,
            whole=steps.shares.shape[1] == 1,
            extents=None if full else Extents.of(trained),
        )

    def tensors(self) -> dict[str, Tensor]:
        found = {"indices": self.indices, "weights": self.weights, "shares": self.shares}
        return found | {name: getattr(self, name) for name in OPTIONAL if getattr(self, name) is not None}

    def stretch(self, start: int, count: int) -> Batches:
        """`count` of the training steps; those that are missing at the end are such that everybody stands still."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            if name != "shares":
                piece = tensor[:, start : min(start + count, self.steps)]
                found[name] = functional.pad(piece, (0, 0, 0, count - piece.shape[1]))
        given: dict[str, Any] = {**found, "shares": found["weights"], "steps": count}
        return replace(self, **given, steady=False, full=False, whole=False, extents=None)

    def only(self, patch: Patch) -> Batches:
        """A patch of it, in which every row moves at every step."""
        rows = torch.tensor(patch.rows)
        cut = {name: tensor[rows, patch.steps, : patch.width] for name, tensor in self.tensors().items()}
        given: dict[str, Any] = {**cut, "steps": patch.steps.stop - patch.steps.start, "steady": True}
        return replace(self, **given, extents=None)

    def part(self, rows: slice | Tensor, known: Indices | None = None) -> Batches:
        """The same for some of the rows, or for rows by number; known: these numbers on the CPU."""
        chosen: dict[str, Any] = {name: tensor[rows] for name, tensor in self.tensors().items()}
        here = rows if isinstance(rows, slice) else known
        extents = None if self.extents is None or here is None else self.extents.part(here)
        return replace(self, **chosen, extents=extents)


def _same(name: str, one: Plan, other: Plan) -> bool:
    ours, theirs = getattr(one, name), getattr(other, name)
    return ours is theirs or np.array_equal(ours, theirs)


def _sent(arrays: dict[str, np.ndarray[Any, Any]], device: torch.device) -> dict[str, Any]:
    """Arrays on the device; to another one than the CPU all at once, without waiting for what it is doing."""
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return found if device.type == "cpu" else packed(found, device)


def packed(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors on another device in one transfer: pieces of one buffer there."""
    if len(tensors) == 1 and device.type == "cuda":
        return {name: moved(tensor, device) for name, tensor in tensors.items()}
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors.values()]
    starts = np.cumsum([0, *sizes]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def pieces(buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(tensors.items(), starts, strict=False)
        }

    for name, piece in pieces(buffer).items():
        piece.copy_(tensors[name])
    return pieces(buffer.to(device, non_blocking=True))


@dataclass(frozen=True)
class Samples:
    """Several clients' samples end to end, for evaluation, and how many each has."""

    indices: Tensor
    counts: np.ndarray[Any, np.dtype[np.int64]]
    lengths: Tensor  # the same counts, on the device


def gather(samples: Sequence[Indices], device: torch.device) -> Samples:
    """Several clients' samples end to end."""
    counts = np.array([len(entry) for entry in samples], dtype=np.int64)
    joined = np.concatenate(samples).astype(np.int64) if len(samples) else np.zeros(0, dtype=np.int64)
    return Samples(torch.from_numpy(joined).to(device), counts, torch.from_numpy(counts).to(device))
