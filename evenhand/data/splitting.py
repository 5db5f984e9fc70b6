"""Who holds which sample, as flat arrays, and each client's own train / validation / test split.

Everything works on whole arrays: a million clients cost a few sorts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evenhand.checks import EvenhandError, number
from evenhand.data.dataset import Fractions

TRAIN, VALIDATION, TEST, UNUSED = 0, 1, 2, -1


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """The sample numbers of every client: client k holds `indices[offsets[k]:offsets[k + 1]]`."""

    indices: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __repr__(self) -> str:
        return f"<Split of {len(self.indices):,} samples over {len(self):,} clients>"

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many samples each client holds."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """The client of each entry of `indices`."""
        return np.repeat(np.arange(len(self)), self.sizes)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Sizes -> the boundaries of consecutive runs."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def check_fractions(split: object) -> Fractions:
    """Insist on three shares that make up the whole, with something to train on."""
    if not isinstance(split, (tuple, list)) or len(split) != 3:
        raise EvenhandError(f"split={split!r} must be three shares (train, validation, test), or 'official'")
    for name, share in zip(("train", "validation", "test"), split, strict=True):
        number(f"split: {name} share", share, low=0, high=1)
    if abs(sum(split) - 1) > 1e-9 or split[0] == 0:
        raise EvenhandError(f"split={tuple(split)!r} must sum to 1 and leave something to train on")
    return float(split[0]), float(split[1]), float(split[2])


def part_sizes(sizes: np.ndarray, fractions: Fractions) -> tuple[np.ndarray, np.ndarray]:
    """How many validation and test samples clients of these sizes have: rounded, but one at least where possible."""
    _, validation_share, test_share = fractions
    test = np.floor(sizes * test_share + 0.5).astype(np.int64)
    if test_share > 0:
        test = np.maximum(test, sizes >= 2)
    validation = np.floor(sizes * validation_share + 0.5).astype(np.int64)
    if validation_share > 0:
        validation = np.maximum(validation, sizes >= 3)
    # Something to train on comes first, then something to test on.
    test = np.minimum(test, np.maximum(sizes - 1, 0))
    validation = np.minimum(validation, np.maximum(sizes - test - 1, 0))
    return validation, test


def assign_parts(
    owner: np.ndarray, labels: np.ndarray, clients: int, classes: int, fractions: Fractions, rng: np.random.Generator
) -> np.ndarray:
    """TRAIN, VALIDATION or TEST for each sample (UNUSED where owner is -1), stratified by label inside each client.

    A client's samples of one label are shuffled and given evenly spaced marks in (0, 1); the lowest marks of the
    client are its test set. So each label's share of the test set is its share of the client, and a label with at
    least 1 / test share samples always occurs in both.
    """
    part = np.full(len(owner), UNUSED, np.int8)
    used = rng.permutation(np.flatnonzero(owner >= 0))
    group = owner[used] * classes + labels[used]
    order = np.argsort(group, kind="stable")
    used, group = used[order], group[order]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    counts = np.diff(starts, append=len(group))
    rank = np.arange(len(group)) - np.repeat(starts, counts)
    marks = (rank + 0.5) / np.repeat(counts, counts)
    # Equal marks of different labels are put in random order.
    holder = owner[used]
    order = np.argsort(holder + marks * (1 - 1e-6) + 1e-6 * rng.random(len(marks)), kind="stable")
    used, holder = used[order], holder[order]
    sizes = np.bincount(holder, minlength=clients)
    place = np.arange(len(holder)) - offsets_of(sizes)[holder]
    validation, test = part_sizes(sizes, fractions)
    part[used] = np.where(
        place < test[holder], TEST, np.where(place < (test + validation)[holder], VALIDATION, TRAIN)
    ).astype(np.int8)
    return part


def collect(owner: np.ndarray, chosen: np.ndarray, clients: int, order: np.ndarray) -> Split:
    """The chosen samples by client, each client's in the given overall order."""
    picked = order[chosen[order]]
    by_client = np.argsort(owner[picked], kind="stable")
    sizes = np.bincount(owner[picked], minlength=clients)
    return Split(picked[by_client], offsets_of(sizes))


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Whole numbers that sum to `total`, in proportion to the weights (largest remainders rounded up)."""
    exact = total * (weights / weights.sum())
    whole = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    if short > 0:
        whole[np.argsort(whole - exact, kind="stable")[:short]] += 1
    return whole
