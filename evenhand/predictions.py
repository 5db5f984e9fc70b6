"""Predictions ready to be counted: rows with numbers of classes, groups and clients, checked at the door."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError, flag, near_miss
from evenhand.columns import Column, Floats, Ints, coded
from evenhand.data.attributes import in_order

CELLS = 4_000_000  # counts in a working array
MOST_CLASSES = 1000
MOST_GROUPS = 1000  # of one attribute, and of attributes crossed
MOST_NUMBERS = 20  # so many different numbers may still be classes or groups


@dataclass(frozen=True, eq=False)
class Predictions:
    """Rows ready to be counted: numbers of classes, groups and clients."""

    classes: tuple[str, ...]
    positive: int | None
    labels: Ints
    predictions: Ints
    attributes: Mapping[str, Column]
    crossed: Mapping[str, Column]
    clients: Column | None
    scores: Floats | None
    notes: tuple[str, ...] = ()

    @classmethod
    def prepared(
        cls,
        labels: Column,
        predictions: Column,
        attributes: Mapping[str, Column],
        *,
        clients: Column | None = None,
        scores: Floats | None = None,
        positive: Any = None,
        intersections: bool = True,
    ) -> Predictions:
        """The door's checks; rows that cannot be used are left out with a note."""
        flag("intersections", intersections)
        columns = [labels, predictions, *attributes.values(), *([] if clients is None else [clients])]
        sizes = {column.name: len(column) for column in columns} | ({} if scores is None else {"scores": len(scores)})
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name!r} has {size:,}" for name, size in sizes.items())
            raise EvenhandError(f"one value per row is needed everywhere, but {told}")
        if not attributes and clients is None:
            raise EvenhandError("nothing to compare: name at least one sensitive attribute, or the clients")
        labels, predictions, attributes, clients, scores, notes = _usable(
            labels, predictions, attributes, clients, scores
        )
        classes = _classes(labels, predictions, notes)
        chosen = _positive(positive, classes)
        if chosen is not None and classes[chosen] not in labels.words:
            notes.append(f"no row is labelled {classes[chosen]!r}, so no true positive rate is defined")
        for column in (*attributes.values(), *([] if clients is None else [clients])):
            if column.missing:
                notes.append(
                    f"{_rows(column.missing)} no {column.name!r}{_marks(column)}: a group of their own, 'unknown'"
                )
        people = {name: _grouped(column.known()) for name, column in attributes.items()}
        for name, column in people.items():
            if len(column.words) == 1:
                notes.append(f"{name!r} holds one group only, {column.words[0]!r}: there is nothing to compare it with")
        if clients is not None and len(clients.known().words) == 1:
            notes.append(f"there is one client only, {clients.known().words[0]!r}: there is nothing to compare it with")
        crossings = _crossed(people, notes) if intersections else {}
        return cls(
            tuple(classes),
            chosen,
            labels.among(classes),
            predictions.among(classes),
            people,
            crossings,
            None if clients is None else clients.known(),
            scores,
            tuple(notes),
        )

    @property
    def views(self) -> dict[str, Column]:
        """The attributes and the intersections."""
        return {**self.attributes, **self.crossed}

    def counts(self, column: Column) -> Ints:
        """Groups x labels x predictions."""
        return self._counted(column.codes, len(column.words), slice(None))

    def _counted(self, codes: Ints, size: int, rows: Any) -> Ints:
        classes = len(self.classes)
        place = (codes * classes + self.labels[rows]) * classes + self.predictions[rows]
        return np.bincount(place, minlength=size * classes**2).reshape(size, classes, classes)

    def by_client(self, column: Column) -> Iterator[Ints]:
        """Clients x groups x labels x predictions, some clients at a time; without clients, all rows as one."""
        size = len(column.words)
        if self.clients is None:
            yield self.counts(column)[None]
            return
        every = len(self.clients.words)
        per = max(1, CELLS // (size * len(self.classes) ** 2))
        if per >= every:
            order: Any = slice(None)
            bounds = {0: slice(None)}
        else:
            order = self.clients.codes.argsort(kind="stable")
            starts = np.searchsorted(self.clients.codes[order], np.arange(0, every + per, per))
            bounds = {place * per: slice(*starts[place : place + 2]) for place in range(len(starts) - 1)}
        for first, part in bounds.items():
            rows = order[part] if per < every else order
            some = min(per, every - first)
            codes = (self.clients.codes[rows] - first) * size + column.codes[rows]
            yield self._counted(codes, some * size, rows).reshape(some, size, len(self.classes), len(self.classes))

    def outcomes(self, column: Column) -> Ints:
        """Groups x labelled positive x predicted positive x right, each no or yes (no, where no class is positive)."""
        size = len(column.words)
        return np.bincount(column.codes * 8 + self._outcome, minlength=8 * size).reshape(size, 2, 2, 2)

    @cached_property
    def _outcome(self) -> Ints:
        right = (self.labels == self.predictions).astype(np.int64)
        if self.positive is None:
            return right
        return right + 2 * (self.predictions == self.positive) + 4 * (self.labels == self.positive)

    @cached_property
    def by_score(self) -> Ints:
        """The rows in rising order of the score."""
        assert self.scores is not None
        return self.scores.argsort(kind="stable")


def crossing(name: str, columns: Sequence[Column], joint: str = " & ") -> Column:
    """Columns crossed: the combinations that occur, in the columns' order."""
    shape = [len(column.words) for column in columns]
    codes = np.ravel_multi_index([column.codes for column in columns], shape)
    if np.prod(shape) <= CELLS:
        there = np.bincount(codes, minlength=int(np.prod(shape))) > 0
        found, place = np.flatnonzero(there), (there.cumsum() - 1)[codes]
    else:
        found, place = np.unique(codes, return_inverse=True)
    rows = zip(*np.unravel_index(found, shape), strict=True)
    words = [joint.join(column.words[code] for column, code in zip(columns, row, strict=True)) for row in rows]
    return Column(name, tuple(words), place)


def _crossed(people: Mapping[str, Column], notes: list[str]) -> dict[str, Column]:
    """The attributes two by two, and all together."""
    several = [column for column in people.values() if len(column.words) > 1]
    sets = [*combinations(several, 2), *([tuple(several)] if len(several) > 2 else [])]
    found = {}
    for columns in sets:
        name = " & ".join(column.name for column in columns)
        crossed = crossing(name, columns)
        if len(crossed.words) > MOST_GROUPS:
            notes.append(f"{name} makes {len(crossed.words):,} groups, too many to compare: left out")
        else:
            found[name] = crossed
    return found


def _usable(
    labels: Column,
    predictions: Column,
    attributes: Mapping[str, Column],
    clients: Column | None,
    scores: Floats | None,
) -> tuple[Column, Column, Mapping[str, Column], Column | None, Floats | None, list[str]]:
    """The rows that have a label, a prediction and a score, and notes about those that have not."""
    notes = []
    lost = {column: column.codes < 0 for column in (labels, predictions)}
    gone = np.zeros(len(labels), dtype=bool)
    for column, missing in lost.items():
        if missing.any():
            notes.append(f"{_rows(int(missing.sum()))} no {column.name!r}{_marks(column)}: left out")
            gone |= missing
    if scores is not None:
        if (wrong := scores[(scores < 0.0) | (scores > 1.0)]).size:
            raise EvenhandError(
                f"scores are probabilities in [0, 1], but {wrong[0]:g} was given ({wrong.size:,} are outside)"
            )
        if (missing := np.isnan(scores)).any():
            notes.append(f"{_rows(int(missing.sum()))} no score: left out")
            gone |= missing
    if gone.all():
        why = f" ({'; '.join(notes)})" if notes else ""
        raise EvenhandError(f"no row has a label and a prediction{why}; there is nothing to measure")
    if not gone.any():
        return labels, predictions, attributes, clients, scores, notes
    kept = ~gone
    return (
        labels.take(kept),
        predictions.take(kept),
        {name: column.take(kept) for name, column in attributes.items()},
        None if clients is None else clients.take(kept),
        None if scores is None else scores[kept],
        notes,
    )


def _rows(count: int) -> str:
    return f"{count:,} row{' has' if count == 1 else 's have'}"


def _marks(column: Column) -> str:
    return f" (written {', '.join(map(repr, column.marks[:3]))})" if column.marks else ""


def _classes(labels: Column, predictions: Column, notes: list[str]) -> list[str]:
    """The classes in order, from the labels and the predictions."""
    strange = [word for word in predictions.words if word not in labels.words]
    if len(predictions.words) > MOST_NUMBERS and len(strange) > len(predictions.words) / 2:
        raise EvenhandError(
            f"{predictions.name!r} holds {len(predictions.words):,} different values, most of them no label (such as "
            f"{strange[0]!r}); if they are probabilities, give them as scores"
        )
    if len(strange) == len(predictions.words):
        raise EvenhandError(
            f"no prediction is among the labels: {predictions.name!r} holds {few(predictions.words)}, "
            f"{labels.name!r} holds {few(labels.words)}; write both the same way"
        )
    classes = in_order({*labels.words, *predictions.words})
    if len(classes) > MOST_CLASSES:
        raise EvenhandError(
            f"{labels.name!r} and {predictions.name!r} hold {len(classes):,} different values; classes are at most "
            f"{MOST_CLASSES:,}"
        )
    if len(classes) == 1:
        raise EvenhandError(f"every label and every prediction is {classes[0]!r}; with one class nothing can be unfair")
    if strange:
        count = int(np.isin(predictions.codes, [predictions.words.index(word) for word in strange]).sum())
        notes.append(f"{count:,} predictions ({few(strange)}) are no label of any row: they count as wrong")
    if len(labels.words) == 1:
        notes.append(f"every label is {labels.words[0]!r}, so rates within other labels are undefined and left out")
    return classes


def _positive(wanted: Any, classes: Sequence[str]) -> int | None:
    if wanted is None:
        return 1 if len(classes) == 2 else None
    word = coded("positive", [wanted]).words
    if not word or word[0] not in classes:
        raise EvenhandError(
            f"positive={wanted!r} is no class{near_miss(wanted, classes)} (the classes are {few(classes, 10)})"
        )
    return list(classes).index(word[0])


def _grouped(column: Column) -> Column:
    """An attribute whose groups are few enough to compare."""
    figures = sum(word.replace(".", "", 1).lstrip("-").isdigit() for word in column.words)
    if figures > MOST_NUMBERS:
        raise EvenhandError(
            f"{column.name!r} holds {figures:,} different numbers, too many groups to compare; make bands of them "
            f"first (evenhand audit: --sensitive {column.name}:25,41,65)"
        )
    if len(column.words) > MOST_GROUPS:
        raise EvenhandError(
            f"{column.name!r} holds {len(column.words):,} different values, too many groups to compare (at most "
            f"{MOST_GROUPS:,})"
        )
    return column


def few(words: Sequence[str], most: int = 5) -> str:
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(map(repr, words[:most])) + more
