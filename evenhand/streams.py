"""Everything random comes from one seed through named streams, so that no part disturbs another."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

Words = np.ndarray[Any, np.dtype[np.uint32]]

STREAMS = {
    "partition": 1,
    "split": 2,
    "initialisation": 3,
    "sampling": 4,
    "availability": 5,
    "dropout": 6,
    "stragglers": 7,
    "batches": 8,
    "data": 9,
    "shuffles": 10,
    "noise": 11,
    "correction": 12,
    "tuning": 13,
}


def stream(seed: int, name: str, *more: int) -> np.random.Generator:
    """Random numbers for one purpose (and, say, one round) under a seed."""
    return np.random.Generator(np.random.PCG64([seed, STREAMS[name], *more]))  # as default_rng, in less time


def round_stream(seed: int, name: str, round: int) -> np.random.Generator:
    """As `stream(seed, name, round)`, in a tenth of the time where rounds follow each other."""
    if not (0 <= seed < 1 << 32 and 0 <= round < 1 << 32):  # takes more than a word each
        return stream(seed, name, round)
    known = _seeded(seed, STREAMS[name], round // BLOCK)[round % BLOCK]
    return np.random.Generator(np.random.PCG64(Known(known)))  # type: ignore[arg-type]  # any ISeedSequence will do


# ------------------------------------------------------------------------------- numpy's SeedSequence, of many at once

BLOCK = 256  # rounds
POOL = 4  # words


class Known(ISeedSequence):
    """What a SeedSequence would say, known already."""

    def __init__(self, state: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self.state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        return self.state


class Hash:
    """O'Neill's hash of words, whose constant moves on with every use."""

    def __init__(self, constant: int, multiplier: int) -> None:
        self.constant, self.multiplier = constant, multiplier

    def __call__(self, words: Words) -> Words:
        words = words ^ np.uint32(self.constant)
        self.constant = self.constant * self.multiplier & 0xFFFFFFFF
        return _folded(words * np.uint32(self.constant))


def _folded(words: Words) -> Words:
    return words ^ (words >> np.uint32(16))


@lru_cache(maxsize=128)
def _seeded(seed: int, name: int, block: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SeedSequence([seed, name, round]).generate_state(4, uint64) of a block of rounds."""
    rounds = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64).astype(np.uint32)
    mixed = Hash(0x43B0D7E5, 0x931E8875)
    pool = [mixed(np.broadcast_to(np.uint32(word), rounds.shape)) for word in (seed, name)]
    pool += [mixed(rounds), mixed(np.zeros_like(rounds))]
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                hashed = mixed(pool[source])
                pool[target] = _folded(np.uint32(0xCA01F9DD) * pool[target] - np.uint32(0x4973F715) * hashed)
    said = Hash(0x8B51F9DD, 0x58F38DED)
    words = np.stack([said(pool[place % POOL]) for place in range(2 * POOL)], axis=1).astype("<u4")
    return words.view("<u8").astype(np.uint64)
