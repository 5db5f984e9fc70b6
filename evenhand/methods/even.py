"""even: our own and the default. Every present and remembered client's loss falls at least in proportion to its size.

Not from a paper: FedMGDA+'s hull of unit updates, AdaFed's proportion and FedLF's memory of absent clients in one small
problem. With unit updates u_k (present and remembered) and b_k = (f_k / max f)^gamma it is the shortest d that meets
u_k . d >= b_k, where falling short is paid for and falling faster is free:
    minimise  |d|^2 / 2 + sum_k max(0, b_k - u_k . d)^2 / (2 ridge).
Its dual is a min-norm point: d = sum_k w_k u_k / b_k, where w on the simplex minimises |d|^2 + ridge |w / b|^2.
No update is ever used backwards (w >= 0), and d gets the length of the mean update. A larger ridge listens more to
what many clients say alike; without one d is the hull's nearest point itself, and goes against nobody.

A client whose loss is nearly zero asks for LEAST at least, so that nobody's loss is paid for by another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import number
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean, nonnegative_losses, unit
from evenhand.solvers import min_norm, submatrix

LEAST = 1e-3  # of the fall asked of the largest loss


@dataclass(frozen=True)
class Even(Rule):
    """All clients' losses, absent ones included, fall together, larger ones faster: one min-norm point."""

    gamma: float = 1.0  # 0: all losses fall alike; larger: large losses fall faster
    ridge: float = 0.1  # 0: against nobody; larger: nearer to the mean of unit updates, weighed by the losses
    absent: str = "expected"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "even"
    paper: ClassVar[str] = "this library"
    when: ClassVar[str] = (
        "The default: one model that should serve all clients about equally well, above all where few of many take "
        "part in a round, since the others keep a say."
    )
    when_not: ClassVar[str] = (
        "Where a large loss does not mean badly served (wrong labels, losses on different scales): it follows large "
        "losses, whoever has them. The server keeps an update of every remembered client."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        number("gamma", self.gamma, low=0.0)
        number("ridge", self.ridge, low=0.0)
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        losses = nonnegative_losses(round, "even")
        largest = losses.max()
        if largest == 0.0:
            return Weights(np.zeros(round.rows), notes=("every loss is zero: the update is zero",))
        coefficients = np.zeros(round.rows)
        moving = np.flatnonzero(round.norms > 0.0)
        if not len(moving):
            return Weights(coefficients, notes=("every update is zero: the update is zero",))
        falls = np.maximum((losses[moving] / largest) ** self.gamma, LEAST)
        scale = unit(round.norms[moving]) / falls
        hull = submatrix(round.total, moving) * np.outer(scale, scale)
        hull.ravel()[:: len(hull) + 1] += self.ridge / falls**2
        solved = min_norm(hull)
        coefficients[moving] = solved.weights * scale
        coefficients, notes = like_the_mean(round, coefficients)
        return Weights(coefficients, notes=(f"min-norm point: {solved.note()}", *notes))
