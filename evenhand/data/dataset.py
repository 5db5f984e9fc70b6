"""A data set: inputs, class numbers, and what is known of each sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from evenhand.checks import EvenhandError, near_miss
from evenhand.data.attributes import Attribute, Groups, split_names

Fractions = tuple[float, float, float]  # train, validation, test
LOCAL_SPLIT: Fractions = (0.8, 0.0, 0.2)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples of one classification task, ready to be handed out to clients."""

    name: str
    inputs: torch.Tensor
    """(n, *shape), float32; or int64 token numbers."""
    targets: torch.Tensor
    """(n,) int64 class numbers."""
    classes: int
    class_names: tuple[str, ...] = ()
    train_rows: int | None = None
    """Rows [0, train_rows) are the official training set, the rest the official test set; None: no official split."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """One value per sample: natural clients (`client`), sensitive attributes, ..."""
    sensitive: tuple[str, ...] = ()
    """The columns that say who somebody is, by name; see `groups`."""
    source: str = ""
    """Where the data came from, for the record of a run."""
    split: Fractions | str = LOCAL_SPLIT
    """How a partition divides each client's samples unless told otherwise: shares, or "official"."""
    partition: str = ""
    """Who holds what unless told otherwise, such as "shares:high"; empty: the data has no opinion."""
    vocabulary: tuple[str, ...] = ()
    """What the token numbers stand for, when the inputs are tokens."""
    feature_names: tuple[str, ...] = ()
    """What the input columns stand for, when the inputs are a table."""
    refit: Callable[[np.ndarray], Dataset] | None = None
    """Prepares the features again from the given training rows; see `fitted_on`."""

    def __post_init__(self) -> None:
        count = len(self.targets)
        if self.inputs.dtype not in (torch.float32, torch.int64):
            raise EvenhandError(f"{self.name}: inputs must be float32 or int64 tokens, not {self.inputs.dtype}")
        if self.targets.dtype != torch.int64 or self.targets.ndim != 1:
            raise EvenhandError(f"{self.name}: targets must be one int64 class number per sample")
        if len(self.inputs) != count:
            raise EvenhandError(f"{self.name}: {len(self.inputs)} inputs but {count} targets")
        if count == 0:
            raise EvenhandError(f"{self.name}: there are no samples")
        low, high = int(self.targets.min()), int(self.targets.max())
        if low < 0 or high >= self.classes:
            raise EvenhandError(f"{self.name}: class numbers go from {low} to {high}, expected 0 to {self.classes - 1}")
        if self.class_names and len(self.class_names) != self.classes:
            raise EvenhandError(f"{self.name}: {len(self.class_names)} class names for {self.classes} classes")
        if self.train_rows is not None and not 0 < self.train_rows <= count:
            raise EvenhandError(f"{self.name}: train_rows={self.train_rows} of {count} rows")
        for column, values in self.columns.items():
            if len(values) != count:
                raise EvenhandError(f"{self.name}: column {column!r} has {len(values)} values for {count} samples")
        for name in self.sensitive:
            self.column(name)

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        return f"<Dataset {self.describe()}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's input."""
        return tuple(self.inputs.shape[1:])

    @property
    def labels(self) -> np.ndarray:
        """The class numbers as a numpy array (shares the memory of `targets`)."""
        return self.targets.numpy()

    def describe(self) -> str:
        """One line: name, samples, classes, shape, official split, columns, sensitive ones."""
        words = [f"{self.name}: {len(self):,} samples, {self.classes} classes, shape {shape_text(self.shape)}"]
        if self.vocabulary:
            words.append(f"{len(self.vocabulary):,} tokens")
        if self.train_rows is not None:
            words.append(f"official split {self.train_rows:,} / {len(self) - self.train_rows:,}")
        if self.columns:
            words.append("columns " + ", ".join(self.columns))
        if self.sensitive:
            words.append("sensitive " + ", ".join(self.sensitive))
        return "; ".join(words)

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change with any input, target, column, the official split or `sensitive`."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        words = (tuple(self.inputs.shape), self.classes, self.train_rows, *self.sensitive)
        digest = hashlib.sha256(" ".join(map(str, words)).encode())
        for tensor in (self.inputs, self.targets):
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
        for column in sorted(self.columns):
            digest.update(column.encode())
            digest.update(np.ascontiguousarray(self.columns[column].astype(str)).tobytes())
        return digest.hexdigest()[:16]

    def column(self, name: str) -> np.ndarray:
        """One per-sample attribute by name."""
        if name not in self.columns:
            listed = ", ".join(self.columns) or "none"
            raise EvenhandError(
                f"{self.name} has no column {name!r}{near_miss(name, self.columns)} (its columns: {listed})"
            )
        return self.columns[name]

    def groups(self, names: str | Sequence[str] | None = None) -> Groups:
        """The groups of the sensitive columns, or of any columns by name, with a number for every sample.

        >>> sex, town = np.array(["F", "M", "M"]), np.array(["Ulm", "", "Ulm"])
        >>> data = Dataset("three", torch.zeros(3, 1), torch.tensor([0, 1, 1]), 2, columns={"sex": sex, "town": town})
        >>> found = data.groups("sex,town")
        >>> found["sex"].values, found["sex"].codes
        (('F', 'M'), array([0, 1, 1]))
        >>> found.joint.values, found.joint.codes
        (('F & Ulm', 'M & Ulm', 'M & unknown'), array([0, 2, 1]))
        """
        chosen = self.sensitive if names is None else split_names(names)
        return Groups(tuple(Attribute.of(name, self.column(name)) for name in chosen))

    def select(self, rows: np.ndarray) -> Dataset:
        """The same data set with some rows only; official training rows must stay in front."""
        train_rows = self.train_rows
        if train_rows is not None:
            official = np.asarray(rows) < train_rows
            train_rows = int(official.sum())
            if not official[:train_rows].all():
                raise EvenhandError(f"{self.name}: official training rows must come before the test rows")
        return replace(
            self,
            inputs=self.inputs[rows],
            targets=self.targets[rows],
            train_rows=train_rows or None,
            columns={name: values[rows] for name, values in self.columns.items()},
            refit=None,
        )

    def fitted_on(self, rows: np.ndarray) -> Dataset:
        """The features prepared from these training rows alone (`partition.train.indices`); others are unchanged.

        Only tables learn anything from data (categories, means, deviations), so every other data set is returned as is.
        """
        return self if self.refit is None else self.refit(np.unique(rows))


def shape_text(shape: tuple[int, ...]) -> str:
    """`(1, 28, 28)` -> `1x28x28`."""
    return "x".join(map(str, shape)) or "scalar"
