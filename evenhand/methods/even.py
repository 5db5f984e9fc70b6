"""even: our own and the default. In every layer all clients' losses fall, in proportion to their size, and draw level.

Not from a paper: AdaFed's proportion, FedLF's layers, levelling objective and memory of absent clients, and a ridge, in
one small problem a layer. There are unit updates u_k of the layer (present and remembered clients) with b_k =
(f_k / max f)^gamma, and one more row with b = 1: the unit vector along the gradient of -cos(1, F), which pulls the
present losses level. d is the shortest that meets u_k . d >= b_k, where falling short is paid for and falling faster is
free:
    minimise  |d|^2 / 2 + sum_k max(0, b_k - u_k . d)^2 / (2 ridge).
Its dual is a min-norm point: d = sum_k w_k u_k / b_k, where w on the simplex minimises |d|^2 + ridge |w / b|^2.
This d is short where clients disagree; it counts as much as the layer's mean length, and all of them together get the
length of the mean update. A larger ridge listens more to what many clients say alike; without one d goes against nobody
in any layer. Of a remembered client's b_k counts the share `recall`: what it said was said of an older model, and at 0
it asks that its loss does not rise, no more. With recall="learnt" the share is c^2, the part of an update that the
client's last one explains: c is the mean cosine of the two in this layer, over the last HEARD or so answers of clients
that came back. With `caution` the step is shorter the less d has in common with the mean update m: its length is
|m| cos(d, m)^caution, at 1 that of m's component along d.

The model to use is the mean of recent ones (server step `recent`): a round's model has just been taught by its own
cohort, the mean by about everybody.

A client whose loss is nearly zero asks for LEAST at least, so that nobody's loss is paid for by another's; no cosine
counts less than LEAST, so that something always moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from evenhand.checks import EvenhandError, flag, number
from evenhand.geometry import Floats
from evenhand.methods.base import (
    Memo,
    Round,
    Rule,
    Weights,
    check_absent,
    combined_length,
    hull_of,
    nonnegative_losses,
    towards_equality,
    unit,
)
from evenhand.solvers import min_norm

LEAST = 1e-3  # of the fall asked of the largest loss; of the cosine
LEARNT = "learnt"
HEARD = 100  # answers over which a mean cosine goes


@dataclass(frozen=True)
class Even(Rule):
    """In every layer all clients' losses, absent ones included, fall together, larger ones faster, and draw level."""

    gamma: float = 0.5  # 0: all losses fall alike; larger: large losses fall faster
    ridge: float = 0.001  # 0: against nobody; larger: nearer to the mean of unit updates, weighed by the losses
    layerwise: bool = True  # a problem for every layer; false: one for the whole model
    level: bool = True  # pull the present clients' losses level
    recall: float | str = 1.0  # a remembered client asks for this share of its fall; 0: for no harm; or learnt
    caution: float = 0.0  # 0: steps as long as the mean update; larger: shorter where d has little in common with it
    absent: str = "expected"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "even"
    paper: ClassVar[str] = "this library"
    when: ClassVar[str] = (
        "The default: one model that should serve all clients about equally well, above all where few of many take "
        "part in a round, since the others keep a say."
    )
    when_not: ClassVar[str] = (
        "Where a large loss does not mean badly served (wrong labels, losses on different scales): it follows large "
        "losses, whoever has them. Where clients are alike it learns more slowly at first (level=false does not). The "
        "server keeps an update of every remembered client, and solves a quadratic programme a layer."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("gamma", self.gamma, low=0.0)
        number("ridge", self.ridge, low=0.0)
        if isinstance(self.recall, str) and self.recall != LEARNT:
            raise EvenhandError(f"recall={self.recall!r} must be a number from 0 to 1, or {LEARNT!r}")
        if self.recall != LEARNT:
            number("recall", self.recall, low=0.0, high=1.0)
        number("caution", self.caution, low=0.0)
        flag("layerwise", self.layerwise)
        flag("level", self.level)
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        losses = nonnegative_losses(round, "even")
        learnt = self._learn(round, memo) if self.recall == LEARNT else {}
        largest = losses.max()
        if largest == 0.0:
            return Weights(np.zeros(round.rows), learnt, ("every loss is zero: the update is zero",))
        falls = (losses / largest) ** self.gamma
        pull = towards_equality(losses[: round.present]) if self.level else None
        grams = round.gram if self.layerwise else round.total[None]
        asked = np.tile(falls, (len(grams), 1))
        asked[:, round.present :] *= self._shares(learnt)
        asked = np.maximum(asked, LEAST)
        found = (self._direction(gram, own, pull, round) for gram, own in zip(grams, asked, strict=True))
        rows, notes = zip(*found, strict=True)
        coefficients = np.stack(rows)
        square = sum(row @ gram @ row for row, gram in zip(coefficients, grams, strict=True))
        if square <= 0.0:
            return Weights(coefficients, learnt, ("the updates cancel out: the update is zero",))
        length = round.length(round.mean)
        if self.caution and length:
            along = sum(row @ gram @ round.mean for row, gram in zip(coefficients, grams, strict=True))
            length *= np.clip(along / (length * np.sqrt(square)), LEAST, 1.0) ** self.caution
        return Weights(coefficients * (length / np.sqrt(square)), learnt, tuple(sorted(set(notes))))

    def _learn(self, round: Round, memo: Memo) -> dict[str, Any]:
        """The mean cosine of clients' updates with their last ones, by layer, after what this round adds to it."""
        echoes = round.echoes(self.layerwise)
        back = np.isfinite(echoes).all(axis=0)
        count = int(back.sum())
        if not count:
            return dict(memo)
        heard = min(int(memo.get("heard", 0)) + count, HEARD)
        new = echoes[:, back].mean(axis=1)
        before = np.asarray(memo.get("cosines", new))
        return {"cosines": before + (new - before) * min(1.0, count / heard), "heard": heard}

    def _shares(self, learnt: Mapping[str, Any]) -> Floats | float:
        """What a remembered client asks for, of its fall; learnt, a column by layer, and 1 before anybody came back."""
        if self.recall != LEARNT:
            return float(self.recall)
        return np.clip(learnt["cosines"], 0.0, 1.0)[:, None] ** 2 if learnt else 1.0

    def _direction(self, gram: Floats, falls: Floats, pull: Floats | None, round: Round) -> tuple[Floats, str]:
        """Coefficients of one layer's direction."""
        norms = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        moving, present = np.flatnonzero(norms > 0.0), round.present
        coefficients, level = np.zeros(len(gram)), None
        if not len(moving):
            return coefficients, "a layer stands still"
        scale, asked = unit(norms) / falls, falls[moving]
        if pull is not None:
            level = coefficients.copy()
            level[:present] = pull * unit(norms[:present])
            length = combined_length(gram, level, round.resolution)
            level = None if length == 0.0 else level / length
        hull = hull_of(gram, moving, scale, level)
        ridge = self.ridge / (asked if level is None else np.append(asked, 1.0)) ** 2
        solved = min_norm(hull + np.diag(ridge))
        if combined_length(hull, solved.weights, round.resolution) == 0.0:
            return coefficients, "in a layer the updates cancel out: it stands still"
        coefficients[moving] = solved.weights[: len(moving)] * scale[moving]
        if level is not None:
            coefficients += solved.weights[-1] * level
        return coefficients * norms[:present].mean(), f"min-norm point: {solved.note()}"
