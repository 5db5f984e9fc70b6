"""AFL: weights on the simplex climb towards the clients with the largest losses (a minimax game).

Paper: Mohri et al., Agnostic Federated Learning, ICML 2019, Algorithm 1:
    theta <- theta - sum_k lambda_k g_k,   lambda <- projection onto the simplex of (lambda + step * F),
and the average of all iterates theta is the model to use (`average` server step).

Departures: with partial participation (the paper has none) the present clients' lambdas are renormalised, only
they climb, and a newcomer enters with the mean lambda. `fedlf_code=True` is the mistake behind FedLF's AFL rows: a
lambda belongs to a place in the cohort, whoever stands there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import flag, number
from evenhand.methods.base import Client, Memo, Round, Rule, Weights, carry, recall, spread
from evenhand.solvers import project_to_simplex


@dataclass(frozen=True)
class AFL(Rule):
    """Weights move towards the worst-off clients every round; the averaged model is the one to use."""

    step: float = 0.1  # how fast the weights climb
    fedlf_code: bool = False  # as FedLF's code has it: weights by place in the cohort, not by client

    name: ClassVar[str] = "afl"
    paper: ClassVar[str] = "Mohri et al., ICML 2019"
    when: ClassVar[str] = (
        "Few clients that all take part, where the worst one decides: in FedFV's Table 3 its accuracies are among the "
        "most level."
    )
    when_not: ClassVar[str] = (
        "With many clients of which few take part: weights move only for those present, and the paper has no such "
        "case. It costs mean accuracy (two points less than FedFV in that table)."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("step", self.step, low=0.0)
        flag("fedlf_code", self.fedlf_code)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        clients: tuple[Client, ...] = tuple(range(round.present)) if self.fedlf_code else round.clients[: round.present]
        known = np.asarray(memo.get("shares", ()), dtype=np.float64)
        newcomer = known.mean() if len(known) else 1.0 / round.present
        everyone = carry(memo, clients, shares=recall(memo, "shares", clients, default=newcomer))
        shares = everyone["shares"] / everyone["shares"].sum()
        here = np.array([everyone["clients"].index(client) for client in clients])
        weights = shares[here]
        notes: tuple[str, ...] = ()
        if weights.sum() <= 0.0:
            weights, notes = np.ones(round.present), ("every present client's weight is zero: plain mean taken",)
        climbed = shares.copy()
        climbed[here] += self.step * round.losses[: round.present]
        new = {"clients": everyone["clients"], "shares": project_to_simplex(climbed)}
        return Weights(spread(round, weights / weights.sum()), new, notes)
