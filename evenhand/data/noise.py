"""Wrong labels in some clients' training data, as FedCorr (Xu et al., CVPR 2022, section 3.1) makes them.

A client is noisy with probability rho; a noisy client's level is uniform in (tau, 1), and that share of its training
labels is replaced by one drawn uniformly over all classes. It may be the true one, so that of C classes a share of
level * (C - 1) / C is really wrong. Test and validation labels stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenhand.checks import EvenhandError, number
from evenhand.data.dataset import Dataset
from evenhand.data.partitioning import Partition
from evenhand.streams import stream


@dataclass(frozen=True)
class Noise:
    """Who mislabels, and how much."""

    rho: float
    """The probability that a client is noisy."""
    tau: float = 0.0
    """The least level of a noisy client."""

    def __post_init__(self) -> None:
        number("rho (noise)", self.rho, low=0.0, high=1.0)
        number("tau (noise)", self.tau, low=0.0, high=1.0)

    @classmethod
    def parse(cls, text: str) -> Noise:
        """`"0.6,0.5"`: six clients of ten are noisy, each with at least half of its labels drawn anew.

        >>> Noise.parse("0.6,0.5")
        Noise(rho=0.6, tau=0.5)
        """
        try:
            values = [float(piece) for piece in text.split(",")]
        except (AttributeError, ValueError):
            values = []
        if len(values) not in (1, 2):
            raise EvenhandError(
                f"noise={text!r} must be RHO,TAU such as 0.6,0.5: the share of noisy clients, and the least share of "
                "labels that a noisy client has drawn anew"
            )
        return cls(*values)

    def apply(self, drawn: Partition, dataset: Dataset, seed: int = 0) -> Partition:
        """The partition with wrong labels in its training part; everything follows from the seed.

        Who is noisy, and how much, does not depend on how many samples anybody has.
        """
        rng = stream(seed, "noise")
        noisy = rng.random(drawn.clients) < self.rho
        levels = np.where(noisy, rng.uniform(self.tau, 1.0, drawn.clients), 0.0)
        labels = dataset.labels[drawn.train.indices].copy()
        for client in np.flatnonzero(noisy):
            start, end = drawn.train.offsets[client : client + 2]
            chosen = rng.permutation(end - start)[: round(levels[client] * (end - start))]
            labels[start + chosen] = rng.integers(0, dataset.classes, len(chosen))
        wrong = int((labels != dataset.labels[drawn.train.indices]).sum())
        note = f"{int(noisy.sum()):,} of {drawn.clients:,} clients have noisy labels"
        if noisy.any():
            low, high = levels[noisy].min(), levels[noisy].max()
            note += f" (levels {low:.2f} to {high:.2f}); {wrong:,} of {len(labels):,} training labels are wrong"
        return replace(drawn, labels=labels, noise=levels, notes=(*drawn.notes, note))
