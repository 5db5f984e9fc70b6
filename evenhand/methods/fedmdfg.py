"""FedMDFG: min-norm direction with a fairness objective that switches on when the losses drift apart, and a
line search.

Paper: Pan et al., FedMDFG: Federated Learning with Multi-Gradient Descent and Fair Guidance, AAAI 2023,
Algorithms 1 and 2. All updates are rescaled to their mean length, and
    d = min-norm point of the hull of { g_k } (present and remembered clients) and sum_k h_k g_k,
    h = (p . F^) F^ - p,   p = 1 / |1|,   F^ = F / |F|.
The fair guidance h joins when the angle between F and p exceeds theta, or when some but not all clients do worse than
they used to; clients of the previous round that are absent now take part with their last update.

Departures: the line search accepts a true Armijo decrease (the released code has its sign reversed) and
compares cosines by Euclidean norms (the code divides by the sum). Without a way to ask clients for trial
losses the full step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from evenhand.checks import number
from evenhand.geometry import Floats
from evenhand.methods.base import (
    Ask,
    Client,
    Memo,
    Round,
    Rule,
    ServerStep,
    Weights,
    carry,
    check_absent,
    combined_length,
    recall,
    rescaled,
    towards_equality,
    unit,
)
from evenhand.solvers import min_norm


@dataclass(frozen=True)
class FedMDFG(Rule):
    """A common descent direction, with fair guidance when losses drift apart, and a line search on trial losses."""

    theta: float = 11.25  # degrees between the losses and equality above which fair guidance is on
    absent: str = "last:1"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "fedmdfg"
    paper: ClassVar[str] = "Pan et al., AAAI 2023"
    when: ClassVar[str] = (
        "Clients that can answer more than once a round: the step's length is then searched on their own losses, and "
        "needs no tuning."
    )
    when_not: ClassVar[str] = (
        "Where a further exchange with all participants is dear: a round may take 2 s + 1 of them. Without them it "
        "takes the full step."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("theta", self.theta, low=0.0, high=180.0)
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        present = round.present
        worse, expected = expected_losses(memo, round.clients[:present], round.losses[:present])
        moving = np.flatnonzero(round.norms > 0.0)
        here = moving[moving < present]
        if not len(here):
            return Weights(np.zeros(round.rows), expected, ("every present update is zero: the update is zero",))
        scale = float(round.norms[here].mean()) * unit(round.norms)
        mix = np.zeros((len(moving), round.rows))
        mix[np.arange(len(moving)), moving] = scale[moving]
        angle = loss_angle(round.losses[here])
        active = angle > self.theta or (worse.any() and not worse.all())
        guided = np.zeros(round.rows)
        if active:
            guided[here] = fair_guidance(round.losses[here]) * scale[here]
            active = combined_length(round.total, guided, round.resolution) > 0.0
        if active:
            mix = np.vstack([mix, guided])
        solved = min_norm(mix @ round.total @ mix.T)
        plain = np.zeros(round.rows)
        plain[here] = scale[here] / len(here)
        coefficients, notes = rescaled(round, solved.weights @ mix, round.length(plain))
        notes = (f"min-norm point: {solved.note()}", f"fair guidance {'on' if active else 'off'}", *notes)
        return Weights(coefficients, expected, notes, {"fair_guidance": bool(active), "loss_angle": angle})


def loss_angle(losses: Floats) -> float:
    """Degrees between the vector of losses and perfect equality; 0 where all losses are zero."""
    size = float(np.linalg.norm(losses))
    if size == 0.0:
        return 0.0
    cosine = losses.sum() / (size * np.sqrt(len(losses)))
    return float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))


def fair_guidance(losses: Floats) -> Floats:
    """h of the paper, of unit length; zero where all losses are equal."""
    pull = towards_equality(losses)
    return np.zeros(len(losses)) if pull is None else np.asarray(pull / np.linalg.norm(pull))


def expected_losses(
    memo: Memo, clients: tuple[Any, ...], losses: Floats
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Who does worse than its running expected loss, and the expectations after this round."""
    expected, joins = recall(memo, "expected", clients), recall(memo, "joins", clients, default=0.0)
    new, better = np.isnan(expected), losses <= expected
    joins = joins + 1.0
    moved = np.where(better, expected + (losses - expected) / joins, expected)
    return losses > expected, carry(memo, clients, expected=np.where(new, losses, moved), joins=joins)


def _sorted(clients: Sequence[Client]) -> list[str]:
    return sorted(map(str, clients))


@dataclass(frozen=True)
class LineSearch(ServerStep):
    """FedMDFG's step: try lengths from 2^s down to 2^-s times the direction, on the clients' own losses."""

    s: int = 5  # lengths from 2^s down to 2^-s are tried
    armijo: float = 1e-4  # share of the predicted fall of each loss that is enough

    name: ClassVar[str] = "line-search"

    def __post_init__(self) -> None:
        number("s", self.s, low=0, high=30, whole=True)
        number("armijo", self.armijo, low=0.0, high=1.0)

    def apply(
        self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None
    ) -> tuple[list[Tensor], Memo, tuple[str, ...]]:
        here = round.clients[: round.present]
        same, carried = self._same(memo, here), {"clients": _sorted(here)}
        if ask is None:
            return direction, carried, ("no line search: aggregate was given no evaluate=",)
        if not weights.coefficients.any():
            return direction, carried, ()
        losses, falls = round.losses[: round.present], self._predicted(round, weights)
        fair = bool(weights.facts.get("fair_guidance"))
        tried: dict[float, Floats] = {}
        for scale in self.lengths(memo, here):
            trial = tried[scale] = ask(scale)
            enough = (losses - trial >= self.armijo * scale * falls).all()
            if enough and (not fair or loss_angle(trial) < loss_angle(losses)):
                break
        else:
            lower = [scale for scale, trial in tried.items() if trial.sum() < losses.sum() and (same or scale <= 1.0)]
            scale = lower[0] if lower else min(tried, key=lambda length: float(tried[length].sum()))
        note = f"line search: {len(tried)} trials, step {scale:g}"
        return [tensor * scale for tensor in direction], carried, (note,)

    def lengths(self, memo: Memo, clients: Sequence[Client]) -> tuple[float, ...]:
        first = -self.s if self._same(memo, clients) else 0
        return tuple(2.0**-halvings for halvings in range(first, self.s + 1))

    @staticmethod
    def _same(memo: Memo, clients: Sequence[Client]) -> bool:
        """Whether the last round had the same clients."""
        return bool(memo.get("clients") == _sorted(clients))

    @staticmethod
    def _predicted(round: Round, weights: Weights) -> Floats:
        """First-order fall of each present loss along the direction (updates are gradients times lr)."""
        coefficients = np.broadcast_to(weights.coefficients, (len(round.gram), round.rows))
        falls = np.einsum("bij,bj->i", round.gram[:, : round.present], coefficients)
        return np.asarray(falls / (round.lr or 1.0))
