"""Groups of people in a round: which cell each sample is in, what the rows said by cell and what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.checks import EvenhandError
from evenhand.constraints import Cells, Leaning, Sums, View, signed_gap
from evenhand.data import Dataset
from evenhand.methods import Method

Floats = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Told:
    """What the rows said of the received models by cell, and what they are told in return."""

    cells: Cells
    sums: Sums  # a row each
    leanings: list[Leaning | None]  # per replica
    columns: dict[str, Tensor]  # what is told, by the names of `Columns`

    @property
    def measured(self) -> tuple[Floats, Floats]:
        """Mean loss and accuracy of the received models."""
        rows, cells, classes = self.sums.hits.shape
        right = np.einsum("rgyy->r", self.sums.hits.reshape(rows, cells // classes, classes, classes))
        return self.sums.losses.sum(axis=1) / self.sums.sizes, right / self.sums.sizes

    def fairness(self, method: Method, rows: Indices) -> dict[str, Any]:
        """Group fairness of the received model, row by row and over all, for the rules that ask for it."""
        if "fairness" not in method.rule.inputs:
            return {}
        kind, own = str(getattr(method.rule, "measure", "eopp")), self.sums.rows(rows)
        overall = float(signed_gap(self.cells, own.pooled(), kind)[0])
        if np.isnan(overall):  # all of them together lack a group: nobody can be compared, and accuracy decides
            return {"fairness": np.full(len(rows), np.nan), "fairness_global": 0.0}
        return {"fairness": signed_gap(self.cells, own, kind), "fairness_global": overall}

    def bytes(self, asked: int, answered: int) -> tuple[int, int]:
        """Sent down and up besides the models."""
        cells, classes = self.cells.count, self.cells.classes
        return 4 * asked * cells * (classes + 1), 8 * answered * cells * (2 * classes + 1)


def told_columns(
    cells: Cells, rows: int, told: Sequence[tuple[Indices, Leaning]], device: torch.device
) -> dict[str, Tensor]:
    """What all rows are told, from what some of them are: others keep the plain risk and follow no gap."""
    if not told:
        return {}
    found = {"tables": cells.plain(rows)}
    followed = [(which, leaning.followed) for which, leaning in told if leaning.followed is not None]
    if followed:
        gaps, wide = max(entry.gaps.shape[1] for _, entry in followed), cells.count * cells.classes
        found |= {"slopes": np.zeros((rows, gaps, wide)), "changes": np.zeros((rows, gaps, wide))}
        found |= {"means": np.zeros((rows, wide)), "gaps": np.zeros((rows, 3, gaps)), "limits": np.zeros((rows, 3))}
    for which, leaning in told:
        found["tables"][which] = leaning.tables
    for which, entry in followed:
        count = entry.gaps.shape[1]
        found["slopes"][which, :count] = entry.slopes.reshape(len(which), count, wide)
        found["changes"][which, :count] = entry.changes.reshape(len(which), count, wide)
        found["means"][which] = entry.means.reshape(len(which), wide)
        found["gaps"][which, :, :count] = np.stack([entry.gaps, entry.up, entry.down], axis=1)
        found["limits"][which] = (entry.alpha, entry.damping, entry.one_sided)
    return {name: torch.from_numpy(values.astype(np.float32)).to(device) for name, values in found.items()}


def cells_of(dataset: Dataset) -> tuple[Cells | None, Tensor | None]:
    """The groups that a data set's sensitive attributes make, and the cell of each sample."""
    if not dataset.sensitive:
        return None, None
    groups = dataset.groups()
    joint = groups.joint
    names, members = [], []
    for attribute in groups:
        for code, value in enumerate(attribute.values):
            names.append(f"{attribute.name}={value}")
            members.append(np.bincount(joint.codes[attribute.codes == code], minlength=len(joint.values)) > 0)
    cells = Cells(tuple(names), np.array(members, dtype=np.int64), dataset.classes, joint.values, dataset.class_names)
    return cells, torch.from_numpy(joint.codes) * dataset.classes + dataset.targets


def looks_at_groups(method: Method) -> bool:
    """Whether the objective or the rule asks how groups of people are treated."""
    return method.objective.grouped or "fairness" in method.rule.inputs


def check_groups(method: Method, dataset: Dataset, cells: Cells | None = None) -> None:
    """Insist, before the first round, on sensitive attributes where a method looks at groups, and on what it can do.

    cells: of the data set, where they are known already.
    """
    if looks_at_groups(method) and not dataset.sensitive:
        other = f"{method.name}:measure=off" if hasattr(method.objective, "measure") else "another method"
        raise EvenhandError(
            f"{method.name} looks at groups of people, and {dataset.name} names no sensitive attribute; name one "
            f"(--sensitive sex, sensitive='sex'), or take {other}"
        )
    cells = cells or (cells_of(dataset)[0] if method.objective.grouped else None)
    if method.objective.grouped and cells is not None:  # asked once, about one person of every kind
        one = np.broadcast_to(np.eye(cells.classes)[:1], (1, cells.count, cells.classes))
        method.objective.lean(View(cells, Sums(one, one[..., 0], one), (0,), np.ones(1), 0), {})


def sharpness(method: Method) -> float:
    """Of the probabilities that a method's objective looks at."""
    return float(getattr(method.objective, "sharpness", 1.0))


def said(leaning: Leaning | None) -> dict[str, Any]:
    """What an objective says of its part in a round."""
    return {} if leaning is None or leaning.facts is None else {"told": leaning.facts}
