"""mFairFL's conflict rule: updates are turned towards each other until learned similarity goals are met.

Paper: Su et al., Multi-dimensional Fair Federated Learning, AAAI 2024, Algorithm 1 lines 10 to 12 and Algorithm 2:
    phi = cos(g_k, g_i);  if phi < goal_ki: adjust g_k by eq. 17 so that its cosine with g_i becomes goal_ki;
    goal_ki <- delta goal_ki + (1 - delta) phi     (eq. 15, starting at 0);
average, and give the result the length of the mean update.

Departures: beta is the share of clients, lowest losses first, that are ADJUSTED (Algorithm 2; the text says it
of those that keep their gradients, yet beta = 1 means all mitigate); goals are used clipped to [0, 1) as the
text demands of them, while the moving average itself is kept as it is; a client is not compared with itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import choice, number
from evenhand.methods.base import Memo, Round, Rule, Weights, check_absent, like_the_mean
from evenhand.methods.projection import projection_order, share_of, sweep


@dataclass(frozen=True)
class MFairFL(Rule):
    """Conflicts are repaired up to a learned similarity of each pair of clients."""

    beta: float = 1.0  # share of the clients, lowest losses first, whose updates are adjusted
    delta: float = 0.01  # share of the old goal in the moving average
    order: str = "loss"  # "loss" (ascending), "random" or "reverse": order of the targets
    absent: str = "off"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "mfairfl"
    paper: ClassVar[str] = "Su et al., AAAI 2024"
    when: ClassVar[str] = (
        "Fair to groups of people and to clients at once: on Adult, COMPAS and Bank it brings the largest deviation "
        "from demographic parity (0.13 to 0.24 under FedAvg) down to 0.02 to 0.03, for about a point of accuracy."
    )
    when_not: ClassVar[str] = (
        "Where simpler does: fpfl reaches the same in most cells, and its damped multipliers hold where those of "
        "mfairfl failed (Bank, low heterogeneity, two seeds of five). It needs sensitive attributes."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("beta", self.beta, low=0.0, high=1.0)
        number("delta", self.delta, low=0.0, high=1.0)
        choice("order", self.order, ("loss", "random", "reverse"))
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        present = round.present
        ids = list(memo.get("clients", ()))
        ids += [client for client in round.clients if client not in set(ids)]
        goals = np.zeros((len(ids), len(ids)))
        known = len(memo.get("clients", ()))
        goals[:known, :known] = memo.get("goals", np.zeros((0, 0)))
        here = np.ix_(*(2 * [[ids.index(client) for client in round.clients]]))

        order = projection_order(round, self.order, round.rows)
        adjusted = order[order < present][: share_of(present, self.beta)]
        free = np.zeros(round.rows, dtype=bool)
        free[adjusted] = True
        swept = sweep(round.total, order, free, goals[here])
        met = np.isfinite(swept.cosines)
        goals[here] = np.where(
            met, self.delta * goals[here] + (1.0 - self.delta) * np.nan_to_num(swept.cosines), goals[here]
        )
        combined, notes = like_the_mean(round, swept.coefficients[:present].mean(axis=0))
        return Weights(combined, {"clients": ids, "goals": goals}, notes)
