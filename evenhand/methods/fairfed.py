"""FairFed: clients whose local group fairness is close to the global one weigh more.

Paper: Ezzeldin et al., FairFed: Enabling Group Fairness in Federated Learning, AAAI 2023, eqs. 6 and 7:
    D_k = |F_global - F_k|  (|Acc_global - Acc_k| where client k cannot measure F_k),
    w_k <- w_k - beta (D_k - mean_j D_j),  starting at n_k / n;  aggregate with w / sum w.

Departures: a weight that would become negative becomes zero (the paper has no guard); if every present weight
is zero the plain mean is taken; a newcomer starts with its share of the present samples; in the simulator, where
a round's clients together lack a group, accuracy decides for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from evenhand.checks import EvenhandError, choice, number
from evenhand.counts import KINDS
from evenhand.geometry import Floats
from evenhand.methods.base import Memo, Round, Rule, Weights, carry, recall, spread


@dataclass(frozen=True)
class FairFed(Rule):
    """Weights drift towards clients whose group fairness resembles the population's."""

    beta: float = 1.0  # how fast the weights drift
    measure: str = "eopp"  # what the simulator measures for it: dp, eodds, eopp or ap, from hard predictions

    name: ClassVar[str] = "fairfed"
    paper: ClassVar[str] = "Ezzeldin et al., AAAI 2023"
    when: ClassVar[str] = (
        "Group fairness where the server may only reweigh clients, by how fair the model is on each one's own data."
    )
    when_not: ClassVar[str] = (
        "Where the gap must get small: on Adult, COMPAS and Bank it leaves 0.04 to 0.08 of demographic parity where "
        "constraints leave 0.02 to 0.03. It needs groups that clients can measure."
    )
    needs: ClassVar[tuple[str, ...]] = ("sizes", "fairness", "fairness_global")
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("beta", self.beta, low=0.0)
        choice("measure", self.measure, KINDS)

    def shares(self, sizes: Floats) -> Floats:
        return sizes / sizes.sum()

    def weigh(self, round: Round, memo: Memo) -> Weights:
        present, clients = round.present, round.clients[: round.present]
        gaps = np.abs(round.globals["fairness_global"] - round.values["fairness"][:present])
        unmeasured = np.isnan(gaps)
        if unmeasured.any():
            gaps = np.where(unmeasured, self._accuracy_gaps(round, unmeasured), gaps)
        sizes = round.values["sizes"][:present]
        before = recall(memo, "weights", clients)
        before = np.where(np.isnan(before), sizes / sizes.sum(), before)
        weights = np.maximum(before - self.beta * (gaps - gaps.mean()), 0.0)
        notes: tuple[str, ...] = ()
        shares = weights
        if weights.sum() == 0.0:
            shares, notes = np.ones(present), ("every present client's weight is zero: plain mean taken",)
        return Weights(spread(round, shares / shares.sum()), carry(memo, clients, weights=weights), notes)

    @staticmethod
    def _accuracy_gaps(round: Round, unmeasured: np.ndarray[Any, Any]) -> Floats:
        who = round.clients[int(np.argmax(unmeasured))]
        if "accuracies" not in round.values:
            raise EvenhandError(
                f"client {who!r} has no fairness value (NaN), so fairfed falls back on accuracy: pass accuracies=..."
            )
        accuracies = round.values["accuracies"][: round.present]
        sizes = round.values["sizes"][: round.present]
        overall = round.globals.get("accuracy_global", float(accuracies @ sizes / sizes.sum()))
        return np.asarray(np.abs(overall - accuracies))
