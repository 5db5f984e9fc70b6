"""Group fairness as something a client can minimise: cells, their sums, and the constraints on them.

A cell holds the samples of one joint group and one label. Every measure of group fairness, with probabilities in place
of hard predictions, is a quotient of sums over cells; so its gradient gives every sample of a cell the same push. What
a server (or a client by itself) has to say about group fairness therefore fits into one small table, cells x
(classes + 1): how much the probability of each class counts in a sample's loss, and in the last column how much its
cross-entropy does (1 is plain risk). Clients answer with sums of the same shape. No sample's group leaves its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError, choice
from evenhand.counts import KINDS, batched_measures, fractions

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Cells:
    """How samples fall into cells: cell = joint group * classes + label."""

    names: tuple[str, ...]  # of the groups, attribute by attribute: "sex=Female"
    members: Ints  # groups x joint groups: which joint groups make up each group
    classes: int
    crossed: tuple[str, ...]  # names of the joint groups
    labels: tuple[str, ...] = ()  # names of the classes

    @property
    def joint(self) -> int:
        return len(self.crossed)

    @property
    def count(self) -> int:
        return self.joint * self.classes

    @cached_property
    def attributes(self) -> dict[str, slice]:
        """Which of the groups belong to each attribute."""
        owners = [name.partition("=")[0] for name in self.names]
        return {name: slice(owners.index(name), owners.index(name) + owners.count(name)) for name in owners}

    def measures(self, predicted: Any) -> dict[str, Any]:
        """Every measure of group fairness from predictions by cell (... x cells x classes), for every leading index.

        Of several attributes the worst counts; each one's own measures carry its name ("dp:sex").
        """
        tables = self.tables(np.asarray(predicted))
        own = {name: batched_measures(tables[..., groups, :, :]) for name, groups in self.attributes.items()}
        measured = next(iter(own.values()))
        worst = {kind: np.fmax.reduce([found[kind] for found in own.values()]) for kind in measured}
        if len(own) == 1:
            return worst
        return worst | {f"{kind}:{name}": values for name, found in own.items() for kind, values in found.items()}

    def tables(self, sums: Floats) -> Floats:
        """... x cells x classes, as ... x groups x labels x classes: what `evenhand.counts` reads."""
        apart = sums.reshape(*sums.shape[:-2], self.joint, self.classes, self.classes)
        return np.einsum("gj,...jlc->...glc", self.members, apart)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON); `from_dict` gives back the same."""
        words = {name: list(getattr(self, name)) for name in ("names", "crossed", "labels")}
        return {**words, "members": self.members.tolist(), "classes": self.classes}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cells:
        words = {name: tuple(values[name]) for name in ("names", "crossed", "labels")}
        return cls(**words, members=np.array(values["members"], dtype=np.int64), classes=int(values["classes"]))

    def plain(self, rows: int) -> Floats:
        """The table that leaves the plain risk as it is."""
        table = np.zeros((rows, self.count, self.classes + 1))
        table[..., -1] = 1.0
        return table


@dataclass(frozen=True, eq=False)
class Sums:
    """What clients say of the received model on their own data: a row a client, or one row for all of them."""

    probabilities: Floats  # rows x cells x classes, added up over the samples of a cell
    losses: Floats  # rows x cells
    hits: Floats  # rows x cells x classes: how often each class is predicted

    @cached_property
    def counts(self) -> Floats:
        """Samples in each cell (rows x cells)."""
        return self.hits.sum(axis=-1)

    @property
    def sizes(self) -> Floats:
        return self.counts.sum(axis=1)

    def rows(self, which: Ints) -> Sums:
        """Some of the rows."""
        return Sums(self.probabilities[which], self.losses[which], self.hits[which])

    def pooled(self) -> Sums:
        """All rows as one."""
        return Sums(*(part.sum(axis=0, keepdims=True) for part in (self.probabilities, self.losses, self.hits)))

    @property
    def columns(self) -> Floats:
        """Probabilities and losses side by side, in the columns of a table."""
        return np.concatenate([self.probabilities, self.losses[..., None]], axis=-1)


@dataclass(frozen=True, eq=False)
class Constraints:
    """Gaps that shall vanish: everyone's rate minus a group's, each a quotient of sums over cells.

    Numerators and denominators are linear in the columns of `Sums` (gaps x cells x (classes + 1), gaps x cells).
    """

    names: tuple[str, ...]
    everyone: tuple[Floats, Floats]
    group: tuple[Floats, Floats]

    @classmethod
    def of(cls, cells: Cells, kinds: Sequence[str], relaxation: str = "probability") -> Constraints:
        """One gap for each kind, group, label and outcome that the kind looks at."""
        return _constraints(cells, tuple(kinds), relaxation)

    def __len__(self) -> int:
        return len(self.names)

    def gaps(self, sums: Sums) -> Floats:
        """rows x gaps; not-a-number where a row has nobody to compare."""
        rates = []
        for top, bottom in (self.everyone, self.group):
            of = np.einsum("rc,jc->rj", sums.counts, bottom)
            found = np.einsum("rck,jck->rj", sums.columns, top)
            rates.append(np.divide(found, of, out=np.full_like(of, np.nan), where=of > 0))
        return np.asarray(rates[0] - rates[1])

    def slopes(self, sums: Sums) -> Floats:
        """Derivative of every gap by each column of a cell's sample (rows x gaps x cells x (classes + 1)).

        A gap with nobody to compare has none.
        """
        sizes = [np.einsum("rc,jc->rj", sums.counts, bottom) for _, bottom in (self.everyone, self.group)]
        known = (sizes[0] > 0) & (sizes[1] > 0)
        shares = [np.divide(1.0, of, out=np.zeros_like(of), where=known) for of in sizes]
        return np.asarray(shares[0][:, :, None, None] * self.everyone[0] - shares[1][:, :, None, None] * self.group[0])

    def push(self, sums: Sums, multipliers: Floats) -> Floats:
        """Derivative of `multipliers @ gaps` by each column of a cell's sample (rows x cells x (classes + 1))."""
        return np.asarray(np.einsum("rj,rjck->rck", multipliers, self.slopes(sums)))


@lru_cache(maxsize=32)
def _constraints(cells: Cells, kinds: tuple[str, ...], relaxation: str) -> Constraints:
    """They follow from the cells alone, which are the same in every round."""
    parts = [_gaps(cells, kind, relaxation) for kind in kinds]

    def joined(which: int) -> tuple[Floats, Floats]:
        return np.concatenate([part[which][0] for part in parts]), np.concatenate([part[which][1] for part in parts])

    return Constraints(tuple(name for part in parts for name in part[0]), joined(1), joined(2))


def _gaps(cells: Cells, kind: str, relaxation: str) -> tuple[list[str], tuple[Floats, Floats], tuple[Floats, Floats]]:
    """The gaps of one kind, read off the definition in `evenhand.counts` by asking it about one sample at a time."""
    choice("measure", kind, KINDS)
    columns = cells.classes + 1
    if relaxation == "loss":
        if kind != "ap":
            raise EvenhandError(f"relaxation='loss' compares the groups' losses and serves 'ap' alone, not {kind!r}")
        mine = np.repeat(cells.members, cells.classes, axis=1).astype(np.float64)
        top = np.zeros((len(cells.names), cells.count, columns))
        top[:, :, -1] = mine
        whole = np.zeros_like(top)
        whole[:, :, -1] = 1.0
        return [f"ap {name}" for name in cells.names], (whole, np.ones_like(mine)), (top, mine)
    one = np.eye(cells.count * cells.classes).reshape(-1, cells.count, cells.classes)
    hits, of = fractions(cells.tables(one), kind)
    all_hits, all_of = fractions(one.reshape(-1, cells.joint, cells.classes, cells.classes).sum(1, keepdims=True), kind)
    shape = hits.shape[1:]  # conditions x groups x outcomes
    names = [
        " ".join([kind, cells.names[g], *([f"label {y}"] if shape[0] > 1 else []), *([f"class {c}"] * (shape[2] > 1))])
        for y, g, c in np.ndindex(*shape)
    ]

    def spread(hits: Floats, of: Floats) -> tuple[Floats, Floats]:
        top = np.broadcast_to(hits, (len(one), *shape)).reshape(len(one), -1).T
        bottom = np.broadcast_to(of[..., None], (len(one), *shape)).reshape(len(one), -1).T
        wide = np.zeros((len(top), cells.count, columns))
        wide[..., :-1] = top.reshape(len(top), cells.count, cells.classes)
        return wide, bottom.reshape(len(top), cells.count, cells.classes).max(axis=2)

    return names, spread(all_hits, all_of), spread(hits, of)


def signed_gap(cells: Cells, sums: Sums, kind: str) -> Floats:
    """FairFed's measure of each row from hard predictions: the second group's rate minus the first's.

    With more than two groups the largest minus the smallest; of several labels or classes the widest gap. Not-a-number
    where no gap can be measured, for want of a group or of its positives.
    """
    hits, of = fractions(cells.tables(sums.hits), kind)
    rates = np.divide(hits, of[..., None], out=np.full(hits.shape, np.nan), where=of[..., None] > 0)
    rates = np.moveaxis(rates, -2, -1).reshape(len(sums.hits), -1, len(cells.names))
    gaps = rates[..., 1] - rates[..., 0] if len(cells.names) == 2 else rates.max(axis=-1) - rates.min(axis=-1)
    widest = np.argmax(np.where(np.isnan(gaps), -1.0, np.abs(gaps)), axis=1)
    found: Floats = gaps[np.arange(len(gaps)), widest]
    return found


@dataclass(frozen=True, eq=False)
class View:
    """What an objective sees before a round's training begins."""

    cells: Cells
    sums: Sums  # a row for each client that answers
    clients: tuple[int | str, ...]
    shares: Floats  # what each client's update is meant to count in the round's mean
    round: int


@dataclass(frozen=True, eq=False)
class Followed:
    """Constraints whose gaps a client follows through its own steps; a row a client.

    Each step pushes along the slopes with the force max(0, up + damping (gap - alpha)), less that of the other side.
    """

    slopes: Floats  # rows x gaps x cells x classes: what a force on a gap is to a sample's probabilities
    changes: Floats  # rows x gaps x cells x classes: how a gap moves with the mean probabilities of the client's cells
    gaps: Floats  # rows x gaps, of the received model
    means: Floats  # rows x cells x classes: mean probabilities of the client's cells, of the received model
    up: Floats  # rows x gaps: multipliers of gap <= alpha
    down: Floats  # and of -gap <= alpha
    alpha: float
    damping: float
    one_sided: bool  # only the side that the gap is on pushes


@dataclass(frozen=True, eq=False)
class Leaning:
    """What the clients are told: a table each; how much their updates count; and what to carry on."""

    tables: Floats  # clients x cells x (classes + 1)
    memo: dict[str, Any]
    followed: Followed | None = None
    sizes: Floats | None = None  # samples as the objective weighs them
    facts: dict[str, Any] | None = None  # for the record of the round
