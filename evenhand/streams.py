"""Everything random comes from one seed through named streams, so that no part disturbs another."""

from __future__ import annotations

import numpy as np

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
