"""What the clients' own files have in common, so that every one of them is read the same way.

    [schema]
    shape = [64]                              # of a sample, where files are .npz
    classes = ["no", "yes"]                   # or how many: classes = 2
    target = "y"                              # the column or array to predict

    [schema.numbers]                          # columns of a .csv file: what to subtract, what to divide by
    age = [40, 15]
    [schema.words]                            # columns that become one input a word; any other word is none of them
    ward = ["north", "south"]
    [schema.sensitive]                        # groups of people, by column
    sex = ["female", "male"]

Nothing here is learnt from data: whoever writes the description decides on round numbers, and no client's file shapes
another's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.checks import EvenhandError, near_miss, number
from evenhand.constraints import Cells
from evenhand.data import Dataset, Partition, Split, partition
from evenhand.data.attributes import spoken
from evenhand.data.files import read_npz
from evenhand.data.tabular import read_csv, typed
from evenhand.engine.groups import cells_of

PARTS = ("train", "validation", "test")  # of the array `part` in an npz file: 0, 1, 2
PART, LABELS = "part", "training_labels"


@dataclass(frozen=True)
class Schema:
    """How files are read: inputs, classes, groups."""

    classes: tuple[str, ...]
    shape: tuple[int, ...] = ()
    target: str = "y"
    inputs: str = "x"
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sensitive: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        known = list(cls.__dataclass_fields__)
        for name in values:
            if name not in known:
                raise EvenhandError(f"schema has no entry {name!r}{near_miss(name, known)} (known: {', '.join(known)})")
        if "classes" not in values:
            raise EvenhandError("schema needs classes: how many, or their names")
        given = dict(values)
        classes = given["classes"]
        if isinstance(classes, int):
            number("schema.classes", classes, low=2, whole=True)
            classes = range(classes)
        given["classes"] = tuple(map(str, classes))
        if len(given["classes"]) < 2 or len(set(given["classes"])) != len(given["classes"]):
            raise EvenhandError(f"schema.classes={values['classes']!r} must name at least two different classes")
        given["shape"] = tuple(given.get("shape", ()))
        given["numbers"] = {name: _scale(name, pair) for name, pair in _table("numbers", given).items()}
        for part in ("words", "sensitive"):
            given[part] = {name: _levels(part, name, words) for name, words in _table(part, given).items()}
        made = cls(**given)
        if bool(made.shape) == bool(made.numbers or made.words):
            raise EvenhandError(
                "schema describes either arrays (shape, for .npz files) or columns (numbers and words, for .csv files)"
            )
        for size in made.shape:
            number("a size in schema.shape", size, low=1, whole=True)
        return made

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"classes": list(self.classes), "target": self.target, "inputs": self.inputs}
        if self.shape:
            plain["shape"] = list(self.shape)
        tables = {
            "numbers": {name: list(pair) for name, pair in self.numbers.items()},
            "words": {name: list(words) for name, words in self.words.items()},
            "sensitive": {name: list(words) for name, words in self.sensitive.items()},
        }
        return plain | {name: table for name, table in tables.items() if table}

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of one sample's input."""
        return self.shape or (len(self.numbers) + sum(map(len, self.words.values())),)

    @property
    def cells(self) -> Cells | None:
        """The groups of people and the cells they make with the labels: the same at the server and at every client."""
        return cells_of(self._dataset("groups", None, None, self._people()))[0] if self.sensitive else None

    def _people(self) -> dict[str, np.ndarray[Any, Any]]:
        """One person of every kind, so that all groups are there and in the same order everywhere."""
        grid = np.meshgrid(*(np.arange(len(words)) for words in self.sensitive.values()), indexing="ij")
        codes = [axis.reshape(-1) for axis in grid]
        return {name: np.array(words)[code] for (name, words), code in zip(self.sensitive.items(), codes, strict=True)}

    def _dataset(
        self,
        name: str,
        inputs: torch.Tensor | None,
        labels: np.ndarray[Any, Any] | None,
        people: Mapping[str, np.ndarray[Any, Any]],
        columns: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> Dataset:
        """Samples, followed by one person of every kind who belongs to nobody."""
        kinds = self._people()
        extra = len(next(iter(kinds.values()))) if kinds and inputs is not None else 0
        if inputs is None or labels is None:
            count = len(next(iter(people.values())))
            inputs, labels = torch.zeros(count, *self.width), np.zeros(count, dtype=np.int64)
        joined = {column: np.concatenate([values, kinds[column][:extra]]) for column, values in people.items()}
        pad = torch.zeros(extra, *self.width, dtype=inputs.dtype)
        return Dataset(
            name=name,
            inputs=torch.cat([inputs, pad]) if extra else inputs,
            targets=torch.from_numpy(np.concatenate([labels, np.zeros(extra, dtype=np.int64)])),
            classes=len(self.classes),
            class_names=self.classes,
            columns=joined,
            sensitive=tuple(self.sensitive),
        )

    # ---- a client's file

    def read(
        self, path: Path, *, seed: int, split: tuple[float, float, float] | str | None
    ) -> tuple[Dataset, Partition]:
        """A client's data, and which of it is for training and testing."""
        if not path.is_file():
            raise EvenhandError(f"there is no file {str(path)!r}; data-path of the node's configuration names it")
        if self.shape:
            inputs, labels, people, parts, noisy = self._arrays(path)
        else:
            inputs, labels, people = self._columns(path)
            parts, noisy = None, None
        dataset = self._dataset(path.name, inputs, labels, people)
        count = len(labels)
        if parts is None:
            own = Dataset(path.name, inputs, torch.from_numpy(labels), len(self.classes))
            drawn = partition(own, "iid", clients=1, seed=seed, split=split)
            return dataset, drawn
        places = np.arange(count)
        train, validation, test = (
            Split(places[parts == code], np.array([0, int((parts == code).sum())])) for code in range(len(PARTS))
        )
        labels_had = None if noisy is None else noisy[parts == 0]
        return dataset, Partition("own file", 1, train, validation, test, labels=labels_had)

    def _arrays(self, path: Path) -> tuple[Any, ...]:
        if path.suffix != ".npz":
            raise EvenhandError(f"{path.name}: schema.shape describes .npz files; for columns give numbers and words")
        arrays = read_npz(path)
        for name in (self.inputs, self.target, *self.sensitive):
            if name not in arrays:
                raise EvenhandError(f"{path.name} has no array {name!r} (it has {', '.join(arrays)})")
        inputs, labels = arrays[self.inputs], arrays[self.target]
        if inputs.shape[1:] != self.shape:
            raise EvenhandError(f"{path.name}: samples have shape {inputs.shape[1:]}, the schema says {self.shape}")
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise EvenhandError(f"{path.name}: some inputs are NaN or infinite; fill them in or leave them out")
        tensor = torch.from_numpy(
            inputs.astype(np.int64) if inputs.dtype.kind in "iu" and inputs.dtype != np.uint8 else _pixels(inputs)
        )
        people = {name: self._known(path, name, arrays[name], words) for name, words in self.sensitive.items()}
        parts = arrays.get(PART)
        if parts is not None and (parts.shape != labels.shape or not np.isin(parts, range(len(PARTS))).all()):
            raise EvenhandError(
                f"{path.name}: {PART!r} should say 0 (train), 1 (validation) or 2 (test) of each sample"
            )
        noisy = arrays.get(LABELS)
        return tensor, self._codes(path, labels), people, parts, None if noisy is None else self._codes(path, noisy)

    def _columns(self, path: Path) -> tuple[Any, ...]:
        if path.suffix not in (".csv", ".tsv"):
            raise EvenhandError(f"{path.name}: the schema describes columns, so a client's file is a .csv or .tsv")
        raw = read_csv(path, delimiter="\t" if path.suffix == ".tsv" else ",")
        for name in (self.target, *self.numbers, *self.words, *self.sensitive):
            if name not in raw.columns:
                known = ", ".join(raw.columns)
                raise EvenhandError(
                    f"{path.name} has no column {name!r}{near_miss(name, raw.columns)} (it has {known})"
                )
        table = typed(raw)
        parts = []
        for name, (middle, spread) in self.numbers.items():
            values = table[name]
            if values.dtype.kind != "f":
                raise EvenhandError(f"{path.name}: column {name!r} of schema.numbers holds words")
            if not np.isfinite(values).all():
                raise EvenhandError(f"{path.name}: column {name!r} lacks {int((~np.isfinite(values)).sum())} values")
            parts.append(((values - middle) / spread)[:, None])
        for name, words in self.words.items():
            parts.append((spoken(raw[name])[:, None] == np.array(words)[None]).astype(np.float64))
        inputs = torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))
        people = {name: self._known(path, name, spoken(raw[name]), words) for name, words in self.sensitive.items()}
        return inputs, self._codes(path, spoken(raw[self.target])), people

    def _codes(self, path: Path, labels: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        if labels.dtype.kind in "iu":
            if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(self.classes):
                raise EvenhandError(
                    f"{path.name}: classes go from 0 to {len(self.classes) - 1}, and {labels.max()} is there"
                )
            return labels.astype(np.int64)
        place = {word: code for code, word in enumerate(self.classes)}
        unknown = sorted(set(labels.astype(str).tolist()) - set(place))
        if unknown:
            raise EvenhandError(f"{path.name}: the class {unknown[0]!r} is not in schema.classes")
        return np.array([place[word] for word in labels.astype(str).tolist()], dtype=np.int64)

    @staticmethod
    def _known(path: Path, name: str, values: np.ndarray[Any, Any], words: tuple[str, ...]) -> np.ndarray[Any, Any]:
        found = values.astype(str)
        unknown = sorted(set(found.tolist()) - set(words))
        if unknown:
            raise EvenhandError(f"{path.name}: {name} {unknown[0]!r} is not in schema.sensitive.{name}")
        return found


def _pixels(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Bytes are pixels and scaled to [0, 1]."""
    return values.astype(np.float32) / np.float32(255.0) if values.dtype == np.uint8 else values.astype(np.float32)


def _table(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, Mapping):
        raise EvenhandError(f"schema.{name}={found!r} must be a table by column")
    return found


def _scale(name: str, pair: Any) -> tuple[float, float]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise EvenhandError(f"schema.numbers.{name}={pair!r} must be two numbers: what to subtract, what to divide by")
    number(f"schema.numbers.{name}", pair[0])
    number(f"schema.numbers.{name}", pair[1], above=0.0)
    return float(pair[0]), float(pair[1])


def _levels(part: str, name: str, words: Any) -> tuple[str, ...]:
    if not isinstance(words, (list, tuple)) or not words or len(set(map(str, words))) != len(words):
        raise EvenhandError(f"schema.{part}.{name}={words!r} must list different words")
    return tuple(map(str, words))
