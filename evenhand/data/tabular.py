"""Tables as inputs, without leaks: categories, means and deviations are learned from training rows alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from evenhand.checks import EvenhandError, choice, flag, near_miss, number
from evenhand.data.attributes import drawn_from, sensitive_columns
from evenhand.data.dataset import LOCAL_SPLIT, Dataset
from evenhand.data.files import read_text
from evenhand.streams import stream

MOST_LEVELS = 200  # words of one column that may become one-hot inputs
MISSING = ("", "?", "na", "n/a", "nan", "null", "none")


@dataclass(frozen=True)
class Table:
    """Named columns of equal length: float64 (missing: nan) or text (missing: the empty text)."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            raise EvenhandError(
                f"no column {name!r}{near_miss(name, self.columns)} (there are: {', '.join(self.columns)})"
            )
        return self.columns[name]

    def is_text(self, name: str) -> bool:
        """Whether a column holds categories rather than numbers."""
        return self[name].dtype.kind == "U"

    def take(self, rows: np.ndarray) -> Table:
        """Some rows, in the given order."""
        return Table({name: values[rows] for name, values in self.columns.items()})

    def with_columns(self, more: Mapping[str, np.ndarray]) -> Table:
        """The table with columns added or replaced."""
        return Table({**self.columns, **more})


@dataclass(frozen=True)
class Preparation:
    """What was learned from training rows: mean and deviation of each number, the values of each category."""

    numbers: Mapping[str, tuple[float, float]]
    categories: Mapping[str, np.ndarray]

    @classmethod
    def fit(cls, table: Table, features: Sequence[str], rows: np.ndarray) -> Preparation:
        """Learn from the given rows and no others."""
        numbers, categories = {}, {}
        for name in features:
            values = table[name][rows]
            if table.is_text(name):
                categories[name] = np.unique(values[values != ""])
            else:
                known = values[~np.isnan(values)]
                mean, deviation = (float(known.mean()), float(known.std())) if len(known) else (0.0, 0.0)
                numbers[name] = mean, deviation if deviation > 0 else 1.0
        return cls(numbers, categories)

    @property
    def names(self) -> tuple[str, ...]:
        """One name per input column."""
        return (*self.numbers, *(f"{name}={value}" for name, values in self.categories.items() for value in values))

    def apply(self, table: Table) -> np.ndarray:
        """Numbers standardised (missing: the training mean), categories one-hot (missing or never seen: all zeros)."""
        blocks = [
            np.nan_to_num((table[name] - mean) / deviation, nan=0.0)[:, None].astype(np.float32)
            for name, (mean, deviation) in self.numbers.items()
        ]
        blocks += [(table[name][:, None] == values).astype(np.float32) for name, values in self.categories.items()]
        return np.concatenate(blocks, axis=1)


def table_dataset(
    name: str,
    table: Table,
    target: str,
    features: Sequence[str],
    *,
    class_names: Sequence[str],
    train_rows: int | None,
    sensitive: str | Sequence[str],
    include_sensitive: bool,
    source: str,
    columns: Mapping[str, np.ndarray] | None = None,
    max_levels: int = MOST_LEVELS,
) -> Dataset:
    """A data set from a table; `target` holds class names as text. Features are fitted on the training rows.

    All text columns, the sensitive ones and `columns` describe the samples. Without `include_sensitive` the sensitive
    columns, and those that their bands were drawn from, are no features.
    """
    flag("include_sensitive", include_sensitive)
    people = sensitive_columns(name, {word: table[word] for word in table.columns if word != target}, sensitive)
    if not include_sensitive:
        hidden = {*people, *map(drawn_from, people)}
        features = [feature for feature in features if feature not in hidden]
    if not features:
        raise EvenhandError(f"{name}: no feature columns are left")
    for feature in features:
        levels = len(np.unique(table[feature])) if table.is_text(feature) else 0
        if levels > max_levels:
            raise EvenhandError(
                f"{source}: text column {feature!r} holds {levels:,} different values, too many for one-hot inputs; "
                f"leave it out with drop={feature!r}, or raise max_levels={max_levels}"
            )
    numbers = {word: index for index, word in enumerate(class_names)}
    targets = torch.tensor([numbers[word] for word in table[target]], dtype=torch.int64)
    words = {word: table[word] for word in table.columns if word != target and table.is_text(word)}

    def fitted(rows: np.ndarray) -> Dataset:
        prepared = Preparation.fit(table, features, rows)
        return Dataset(
            name=name,
            inputs=torch.from_numpy(prepared.apply(table)),
            targets=targets,
            classes=len(class_names),
            class_names=tuple(class_names),
            train_rows=train_rows,
            columns={**words, **people, **(columns or {})},
            sensitive=tuple(people),
            source=source,
            split="official" if train_rows is not None else LOCAL_SPLIT,
            feature_names=prepared.names,
        )

    first = fitted(np.arange(len(table) if train_rows is None else train_rows))
    return replace(first, refit=fitted)


def holdout(count: int, test: float, seed: int, order: str) -> tuple[np.ndarray, int | None]:
    """Row order and number of training rows for a table without an official split; test=0 makes none."""
    number("test", test, low=0, high=0.9)
    choice("order", order, ("random", "file"))
    number("seed", seed, low=0, whole=True)
    rows = np.arange(count)
    if test == 0:
        return rows, None
    if order == "random":
        rows = stream(seed, "data", 1).permutation(count)
    return rows, max(1, round((1 - test) * count))


def read_csv(path: Path, delimiter: str = ",", header: Sequence[str] = (), skip: int = 0) -> Table:
    """A CSV file as text columns; a line of the wrong length is named. Of columns of one name the first counts."""
    stream = io.StringIO(read_text(path).removeprefix("\ufeff"), newline="")
    for _ in range(skip):
        stream.readline()
    lines = csv.reader(stream, delimiter=delimiter, skipinitialspace=True)
    try:
        rows = [(lines.line_num + skip, row) for row in lines if row]
    except csv.Error as failure:
        raise EvenhandError(f"{path}, line {lines.line_num + skip}: not CSV ({failure})") from failure
    names = list(header) or ([name.strip() for name in rows.pop(0)[1]] if rows else [])
    if not rows:
        raise EvenhandError(f"{path} holds no rows")
    for line, row in rows:
        if len(row) != len(names):
            raise EvenhandError(
                f"{path}, line {line}: {len(row)} fields, expected {len(names)} ({', '.join(names[:3])}, ...)"
            )
    cells = list(zip(*(row for _, row in rows), strict=True))
    return Table({name: np.char.strip(np.array(cells[names.index(name)], dtype=str)) for name in dict.fromkeys(names)})


def typed(table: Table, numeric: Sequence[str] | None = None, said: str = "") -> Table:
    """Text columns made numbers where they are numbers (or where `numeric` says so); missing marks made missing."""
    columns = {}
    for name, values in table.columns.items():
        if values.dtype.kind != "U":
            columns[name] = values
            continue
        blank = np.isin(np.char.lower(values), MISSING)
        try:
            if numeric is not None and name not in numeric:
                raise ValueError
            columns[name] = np.where(blank, "nan", values).astype(np.float64)
        except ValueError as failure:
            if numeric is not None and name in numeric:
                raise EvenhandError(f"{said}: column {name!r} should hold numbers ({failure})") from failure
            columns[name] = np.where(blank, "", values)
    return Table(columns)
