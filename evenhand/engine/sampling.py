"""Who takes part in a round, who fails in the middle of it, and who does only part of the work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError, choice, number
from evenhand.streams import round_stream

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Sampling:
    """Client sampling. `cohort` clients a round, or the share `participation` of all of them."""

    participation: float = 0.1
    cohort: int | None = None
    kind: str = "uniform"  # "uniform" or "size": with probability proportional to the number of samples
    availability: float = 1.0  # chance that a client can be reached in a round (Bernoulli)
    dropout: float = 0.0  # chance that a sampled client fails before it answers
    drop: dict[str, list[int]] = field(default_factory=dict)  # scheduled failures: round -> client numbers
    stragglers: float = 0.0  # chance that a sampled client does only part of its epochs

    def __post_init__(self) -> None:
        number("participation", self.participation, above=0.0, high=1.0)
        if self.cohort is not None:
            number("cohort", self.cohort, low=1, whole=True)
        choice("sampling", self.kind, ("uniform", "size"))
        number("availability", self.availability, above=0.0, high=1.0)
        number("dropout", self.dropout, low=0.0, high=1.0)
        number("stragglers", self.stragglers, low=0.0, high=1.0)

    def count(self, clients: int) -> int:
        wanted = self.cohort if self.cohort is not None else max(1, int(clients * self.participation + 1e-9))
        if wanted > clients:
            raise EvenhandError(f"cohort={wanted} clients a round is more than the {clients} there are")
        return wanted

    def draw(self, seed: int, round: int, sizes: Indices) -> Indices:
        """Clients asked in a round, in ascending order; the work depends on the cohort, not on the population."""
        clients, wanted = len(sizes), self.count(len(sizes))
        rng = round_stream(seed, "sampling", round)
        if self.availability < 1.0:
            return self._among_available(seed, round, sizes, wanted, rng)
        if wanted == clients:
            return np.arange(clients)
        if self.kind == "size":
            return np.sort(rng.choice(clients, wanted, replace=False, p=sizes / sizes.sum()))
        return np.sort(rng.choice(clients, wanted, replace=False, shuffle=False))

    def _among_available(self, seed: int, round: int, sizes: Indices, wanted: int, rng: np.random.Generator) -> Indices:
        reached = np.flatnonzero(round_stream(seed, "availability", round).random(len(sizes)) < self.availability)
        if len(reached) <= wanted:
            return reached
        share = sizes[reached] / sizes[reached].sum() if self.kind == "size" else None
        return np.sort(rng.choice(reached, wanted, replace=False, p=share))

    def failed(self, seed: int, round: int, cohort: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the asked clients never answer; at least one always does unless the schedule says otherwise."""
        scheduled = self.drop.get(str(round), [])
        lost = np.isin(cohort, scheduled) if scheduled else np.zeros(len(cohort), dtype=bool)
        if self.dropout > 0.0 and len(cohort):
            chances = round_stream(seed, "dropout", round).random(len(cohort))
            lost |= chances < self.dropout
            if lost.all() and not np.isin(cohort, scheduled).all():
                lost[np.argmax(chances)] = False
        return lost

    def epochs(self, seed: int, round: int, cohort: Indices, epochs: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Epochs each client manages: all of them, or for a straggler a uniform share (FedProx: at least one step)."""
        managed = np.full(len(cohort), float(epochs))
        if self.stragglers > 0.0 and len(cohort):
            rng = round_stream(seed, "stragglers", round)
            slow = rng.random(len(cohort)) < self.stragglers
            managed[slow] = epochs * rng.uniform(0.0, 1.0, len(cohort))[slow]
            managed = np.maximum(managed, 1e-6)
        return managed
