"""Who holds what: every client's samples by part and by class, as a run keeps them for its report."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.data import Dataset, Partition

Integers = np.ndarray[Any, np.dtype[np.int64]]

HEAD = ("client", "train", "validation", "test", "labels")


@dataclass(frozen=True, eq=False)
class Holdings:
    """Samples of every client."""

    classes: tuple[str, ...]
    """What the classes are called."""
    train: Integers
    validation: Integers
    test: Integers
    labels: Integers
    """Clients x classes, of all parts; where labels are noisy, the true ones."""

    @classmethod
    def of(cls, drawn: Partition, dataset: Dataset) -> Holdings:
        return cls(
            class_names(dataset),
            drawn.train.sizes,
            drawn.validation.sizes,
            drawn.test.sizes,
            drawn.label_counts(dataset),
        )

    def text(self, names: Sequence[str]) -> str:
        """One row a client; its labels as class number and count: `3:40 7:12`."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(HEAD)
        for name, *sizes, counts in zip(names, self.train, self.validation, self.test, self.labels, strict=True):
            held = " ".join(f"{label}:{counts[label]}" for label in np.flatnonzero(counts))
            table.writerow((name, *sizes, held))
        return text.getvalue()

    @classmethod
    def read(cls, path: Path, classes: Sequence[str]) -> Holdings:
        """Read back what `text` wrote."""
        _, *rows = csv.reader(path.read_text().splitlines())
        sizes = np.array([row[1:4] for row in rows], dtype=np.int64).reshape(-1, 3)
        labels = np.zeros((len(rows), len(classes)), dtype=np.int64)
        for client, row in enumerate(rows):
            for pair in row[4].split():
                label, count = map(int, pair.split(":"))
                labels[client, label] = count
        return cls(tuple(classes), sizes[:, 0], sizes[:, 1], sizes[:, 2], labels)


def class_names(dataset: Dataset) -> tuple[str, ...]:
    return dataset.class_names or tuple(map(str, range(dataset.classes)))
