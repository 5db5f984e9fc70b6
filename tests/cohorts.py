"""Random cohorts for property tests: any size, planted conflicts, dependent rows, any scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class Cohort:
    updates: np.ndarray
    losses: np.ndarray
    sizes: np.ndarray
    layers: list[int]
    rng: np.random.Generator

    @property
    def rows(self) -> int:
        return len(self.updates)

    @property
    def slices(self) -> list[tuple[int, int]]:
        edges = np.cumsum([0, *self.layers])
        return [(int(a), int(b)) for a, b in pairwise(edges)]


KINDS = ("random", "conflicting", "similar", "dependent", "unequal", "sparse")


def make(seed: int, rows: int, columns: int, kind: str = "random", scale: float = 1.0, layers: int = 1) -> Cohort:
    rng = np.random.default_rng(seed)
    updates = rng.standard_normal((rows, columns))
    common = rng.standard_normal(columns)
    if kind == "conflicting":  # two camps pulling opposite ways
        updates += 2.0 * np.where(rng.random(rows) < 0.5, 1.0, -1.0)[:, None] * common
    elif kind == "similar":
        updates = 0.3 * updates + common
    elif kind == "dependent":
        rank = max(1, rows // 2)
        updates = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns)) + 0.5 * common
    elif kind == "unequal":
        updates *= 10.0 ** rng.uniform(-3, 3, size=(rows, 1))
    elif kind == "sparse":  # zero updates among the others, never all of them
        updates[1:][rng.random(rows - 1) < 0.3] = 0.0
    losses = rng.uniform(0.05, 3.0, rows)
    cuts = np.sort(rng.choice(np.arange(1, columns), min(layers, columns) - 1, replace=False)) if columns > 1 else []
    sizes = np.diff([0, *cuts, columns]).astype(int).tolist()
    return Cohort(updates * scale, losses, rng.integers(1, 500, rows).astype(float), sizes, rng)


def cohorts(
    max_rows: int = 60, max_columns: int = 2000, kinds: tuple[str, ...] = KINDS, max_layers: int = 1, min_rows: int = 1
) -> st.SearchStrategy[Cohort]:
    return st.builds(
        make,
        seed=st.integers(0, 2**32 - 1),
        rows=st.integers(min_rows, max_rows),
        columns=st.one_of(st.integers(1, 40), st.integers(1, max_columns)),
        kind=st.sampled_from(kinds),
        scale=st.sampled_from([1e-12, 1e-6, 1.0, 1e6, 1e12]),
        layers=st.integers(1, max_layers),
    )


def independent(max_rows: int = 40) -> st.SearchStrategy[Cohort]:
    """Rows that are safely independent, as AdaFed's orthogonalisation needs them."""
    return st.builds(
        lambda seed, rows, extra, kind, scale: make(seed, rows, 2 * rows + extra, kind, scale),
        seed=st.integers(0, 2**32 - 1),
        rows=st.integers(1, max_rows),
        extra=st.integers(2, 200),
        kind=st.sampled_from(("random", "conflicting", "similar")),
        scale=st.sampled_from([1e-12, 1.0, 1e12]),
    )


def equal_sizes(drawn, seed, each=50):
    """The partition with as much training data for every client."""
    kept = np.concatenate([own[:each] for own in drawn.train])
    assert len(kept) == drawn.clients * each
    return replace(drawn, train=replace(drawn.train, indices=kept, offsets=each * np.arange(drawn.clients + 1)))
