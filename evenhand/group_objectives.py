"""Local objectives for group fairness: constraints with multipliers, weights by group and label, reweighting.

Before a round's training the clients report sums over their cells (evenhand.constraints), and each objective turns
these into a table for every client. In the round the client minimises, over its own samples i of cell c(i),
    mean_i  table[c(i), last] * crossentropy_i  +  sum_y table[c(i), y] * p_i(y).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from evenhand.checks import EvenhandError, choice, flag, number
from evenhand.constraints import Constraints, Floats, Followed, Leaning, Sums, View
from evenhand.counts import KINDS
from evenhand.objectives import Client, Memo, Objective

OFF = "off"


@dataclass(frozen=True)
class GroupConstraints(Objective):
    """Risk under the constraint that no group's rate is further than alpha from everyone's, by multipliers.

    mFairFL (Su et al., AAAI 2024, eqs. 10 to 12) and, with damping, FPFL (Rodriguez-Galvez et al., 2021: the modified
    method of differential multipliers): with gaps d_j = F(D) - F(D^s) and h_j = |d_j| - alpha,
        lambda_j <- max(0, lambda_j + gamma h_j),
        minimise  L + sum_j max(0, lambda_j + damping h_j) sign(d_j) d_j.
    Multipliers and gaps are everybody's (`multipliers="server"`) or each client's own ("client"). Multipliers move once
    a round. Gaps start the round as those of the received model; a client follows them through its local steps by what
    it sees of its own samples, taking it that others' cells move as its own do (`follow=False`: they stay as they are).

    `form="two-sided"` gives d_j <= alpha and -d_j <= alpha a multiplier each, so that a gap that has changed its sign
    is not pushed back with all the force that brought it there. `sharpness` s takes softmax(s scores) for the
    probabilities: the larger, the closer to hard predictions.

    Departures: multipliers are kept non-negative (the paper does not say so, its theory needs it); they move once a
    round, for the papers send gradients yet mFairFL trains 20 local epochs; a group that nobody has moves nothing.
    """

    measure: str = "dp"  # dp, eodds, eopp, ap, several as "dp+ap", or "off"
    alpha: float = 0.01  # the gap that is allowed
    gamma: float = 1.0  # step of the multipliers
    damping: float = 0.0  # added force in proportion to a broken constraint
    multipliers: str = "server"  # "server" (everybody's) or "client" (each its own)
    form: str = "two-sided"  # or "absolute", the papers' single multiplier
    relaxation: str = "probability"  # "loss" compares the groups' losses (ap alone: the paper's eq. 5 as written)
    sharpness: float = 1.0  # larger: probabilities nearer to hard predictions
    follow: bool = True  # gaps follow a client's local steps

    name: ClassVar[str] = "group-constraints"

    def __post_init__(self) -> None:
        for kind in self.kinds:
            choice("measure", kind, KINDS)
        number("alpha", self.alpha, low=0.0, high=1.0)
        number("gamma", self.gamma, low=0.0)
        number("damping", self.damping, low=0.0)
        choice("multipliers", self.multipliers, ("server", "client"))
        choice("form", self.form, ("absolute", "two-sided"))
        choice("relaxation", self.relaxation, ("probability", "loss"))
        number("sharpness", self.sharpness, above=0.0)
        flag("follow", self.follow)

    @property
    def kinds(self) -> tuple[str, ...]:
        return () if self.measure == OFF else tuple(part.strip() for part in str(self.measure).split("+"))

    @property
    def grouped(self) -> bool:
        return bool(self.kinds)

    @property
    def alone(self) -> bool:
        return self.multipliers == "client"

    def part(self, memo: Memo, client: Client) -> dict[str, Any]:
        ids = list(memo.get("clients", ()))
        if client not in ids:
            return {}
        place = ids.index(client)
        return {"clients": [client], "multipliers": np.asarray(memo["multipliers"])[:, place : place + 1]}

    def lean(self, view: View, memo: Memo) -> Leaning:
        constraints = Constraints.of(view.cells, self.kinds, self.relaxation)
        alone = self.alone
        sums = view.sums if alone else view.sums.pooled()
        gaps = constraints.gaps(sums)
        known = np.isfinite(gaps)
        off = np.where(known, gaps, 0.0)
        sides = np.stack([off, -off]) if self.form == "two-sided" else np.abs(off)[None]
        over = np.where(known, sides - self.alpha, 0.0)  # sides x rows x gaps
        before = self._before(view, memo, over.shape, alone)
        multipliers = np.maximum(before + self.gamma * over, 0.0)
        # A client's mean counts by its share, so its part of the whole is weighed by its samples against the share.
        scale = sums.sizes if alone else view.sums.sizes / view.shares
        tables, followed = view.cells.plain(len(view.clients)), None
        if self.follow and self.relaxation == "probability":
            slopes = constraints.slopes(sums) * scale[:, None, None, None]
            followed = self._followed(view.sums, sums, slopes, scale, off, multipliers)
        else:
            force = np.maximum(multipliers + self.damping * over, 0.0)
            signed = force[0] - force[1] if len(force) == 2 else force[0] * np.sign(off)
            tables = tables + constraints.push(sums, signed) * scale[:, None, None]
        carried = self._after(view, memo, multipliers, alone)
        facts: dict[str, Any] = {"constraints": list(constraints.names)}
        if not alone:
            net = multipliers[0, 0] - multipliers[1, 0] if len(multipliers) == 2 else multipliers[0, 0]
            facts |= {"multipliers": net.tolist(), "gaps": [None if np.isnan(gap) else float(gap) for gap in gaps[0]]}
        return Leaning(tables, carried, followed, facts=facts)

    def _followed(
        self, own: Sums, everyone: Sums, slopes: Floats, scale: Floats, gaps: Floats, multipliers: Floats
    ) -> Followed:
        slopes, there = slopes[..., :-1], own.counts > 0
        counts = np.where(there, everyone.counts, 0.0)  # a client that lacks a cell does not see it move
        means = np.divide(
            own.probabilities, own.counts[..., None], out=np.zeros_like(own.probabilities), where=there[..., None]
        )
        rows = slopes.shape[:2]
        return Followed(
            slopes=slopes,
            changes=slopes * (counts / scale[:, None])[:, None, :, None],
            gaps=np.broadcast_to(gaps, rows),
            means=means,
            up=np.broadcast_to(multipliers[0], rows),
            down=np.broadcast_to(multipliers[-1], rows),
            alpha=self.alpha,
            damping=self.damping,
            one_sided=self.form == "absolute",
        )

    def _before(self, view: View, memo: Memo, shape: tuple[int, ...], alone: bool) -> Floats:
        held = memo.get("multipliers")
        if held is None:
            return np.zeros(shape)
        held = np.asarray(held, dtype=np.float64)
        if not alone:
            return held
        place = {client: position for position, client in enumerate(memo["clients"])}
        found = np.zeros(shape)
        for row, client in enumerate(view.clients):
            if client in place:
                found[:, row] = held[:, place[client]]
        return found

    def _after(self, view: View, memo: Memo, multipliers: Floats, alone: bool) -> dict[str, Any]:
        if not alone:
            return {"multipliers": multipliers}
        ids = list(memo.get("clients", ()))
        ids += [client for client in view.clients if client not in set(ids)]
        held = np.zeros((len(multipliers), len(ids), multipliers.shape[2]))
        if "multipliers" in memo:
            held[:, : len(memo["clients"])] = memo["multipliers"]
        held[:, [ids.index(client) for client in view.clients]] = multipliers
        return {"clients": ids, "multipliers": held}


@dataclass(frozen=True)
class FairBatch(Objective):
    """FedFB: samples weigh by group and label, and the weights move until the groups' positive rates meet.

    Zeng et al., Improving Fairness via Federated Learning, 2021 (demographic parity, two classes): a sample of group z
    and label y weighs lambda_yz / n_z, lambda_0z + lambda_1z = 2 n_z / n, starting at n_z / n; after round r
        f_z = (L_1,0 - L_0,0) / n_0 + (L_0,z - L_1,z) / n_z + n_0,0 / n_0 - n_0,z / n_z,
        lambda_0z += step / sqrt(r + 1) f_z  for z > 0,  lambda_00 -= step / sqrt(r + 1) sum_z f_z,
    where L_y,z adds up the losses and n_y,z counts the samples of a cell. Clients count in the mean by their weights.

    Departures: lambda_0z is kept within [0, 2 n_z / n] for each group's own size, and the counts enter f_z once (the
    authors' code takes group 0's size, and adds the counts once for every client). What is carried on is lambda_0z as a
    share of 2 n_z / n, which means the same whoever takes part in a round. Several attributes are crossed.
    """

    step: float = 0.3  # how fast the weights move

    name: ClassVar[str] = "fair-batch"
    when: ClassVar[str] = (
        "Demographic parity with two classes, by weights of samples and without a penalty in the loss."
    )
    when_not: ClassVar[str] = (
        "With more classes, with other measures, or with few rounds: the weights move once a round, and after ten they "
        "leave 0.04 to 0.08 of demographic parity on Adult, COMPAS and Bank where constraints leave 0.02 to 0.03."
    )

    def __post_init__(self) -> None:
        number("step", self.step, low=0.0)

    @property
    def grouped(self) -> bool:
        return True

    def lean(self, view: View, memo: Memo) -> Leaning:
        cells, pooled = view.cells, view.sums.pooled()
        if cells.classes != 2:
            raise EvenhandError(f"fedfb weighs two classes against each other; the data has {cells.classes} classes")
        counts = pooled.counts.reshape(cells.joint, 2)
        sizes = counts.sum(axis=1)
        total = sizes.sum()
        held = memo.get("shares")
        zero = np.full(cells.joint, 0.5) if held is None else np.asarray(held, dtype=np.float64)
        if held is not None:
            moved = self.step / np.sqrt(view.round) * _towards_parity(pooled, counts, sizes) * total
            zero = np.clip(zero + np.divide(moved, 2.0 * sizes, out=np.zeros_like(sizes), where=sizes > 0), 0.0, 1.0)
        scale = 2.0 * np.stack([zero, 1.0 - zero], axis=1)  # joint groups x labels
        weights = scale * (sizes / total)[:, None]
        tables = cells.plain(len(view.clients))
        tables[..., -1] = scale.reshape(-1)
        weighed = np.einsum("rc,c->r", view.sums.counts, scale.reshape(-1))
        return Leaning(tables, {"shares": zero}, sizes=weighed, facts={"weights": weights.tolist()})


def _towards_parity(pooled: Sums, counts: Floats, sizes: Floats) -> Floats:
    """FedFB's gradient by lambda_0z; a group that nobody has stays as it is."""
    losses = pooled.losses.reshape(counts.shape)
    there = sizes > 0
    mean = np.divide(losses[:, 0] - losses[:, 1], sizes, out=np.zeros_like(sizes), where=there)
    share = np.divide(counts[:, 0], sizes, out=np.zeros_like(sizes), where=there)
    first = int(np.argmax(there))  # the group the others are compared with
    found = np.where(there, mean - mean[first] + share[first] - share, 0.0)
    found[first] = -found.sum()
    return np.asarray(found)


@dataclass(frozen=True)
class Reweighted(Objective):
    """Kamiran and Calders' reweighting within each client: group and label look independent, n_y n_z / (n n_yz).

    The local debiasing that FairFed (Ezzeldin et al., AAAI 2023) builds upon. Several attributes are crossed.
    """

    debias: bool = True  # off: the plain risk

    name: ClassVar[str] = "reweighted"

    def __post_init__(self) -> None:
        flag("debias", self.debias)

    @property
    def grouped(self) -> bool:
        return self.debias

    @property
    def alone(self) -> bool:
        return True

    def lean(self, view: View, memo: Memo) -> Leaning:
        counts = view.sums.counts.reshape(len(view.clients), view.cells.joint, view.cells.classes)
        expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=2, keepdims=True)
        there = counts * counts.sum(axis=(1, 2), keepdims=True)
        weights = np.divide(expected, there, out=np.ones_like(there), where=there > 0)
        tables = view.cells.plain(len(view.clients))
        tables[..., -1] = weights.reshape(len(view.clients), -1)
        return Leaning(tables, {})
