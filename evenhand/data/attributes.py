"""Sensitive attributes: columns that say who somebody is, as named groups with a number for every sample."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from evenhand.checks import EvenhandError, near_miss

UNKNOWN = "unknown"
MOST_GROUPS = 50  # so many different words may still be groups to compare
MOST_NUMBERS = 20  # so many different numbers
SAME = {"gender": "sex", "sex": "gender"}
NUMBER = re.compile(r"(<?)([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
DERIVED = re.compile(r"_(band|group)$")  # age_band and age_group are drawn from age


@dataclass(frozen=True, eq=False)
class Attribute:
    """One way to sort samples into groups: the groups' names in order, and the place of each sample's among them."""

    name: str
    values: tuple[str, ...]
    """Sorted (numbers as numbers); samples without a value are the last group, `unknown`."""
    codes: np.ndarray
    """(n,) int64."""

    @classmethod
    def of(cls, name: str, column: np.ndarray) -> Attribute:
        """The groups of a column of words or numbers."""
        words = spoken(column)
        found, place = np.unique(np.where(words == "", UNKNOWN, words), return_inverse=True)
        values = in_order(found.tolist())
        values.sort(key=lambda word: word == UNKNOWN)
        order = np.array([values.index(word) for word in found.tolist()], np.int64)
        return cls(name, tuple(values), order[place])

    @property
    def counts(self) -> np.ndarray:
        """How many samples each group has."""
        return np.bincount(self.codes, minlength=len(self.values))


@dataclass(frozen=True, eq=False)
class Groups:
    """The sensitive attributes of a data set, one by one and crossed with each other."""

    attributes: tuple[Attribute, ...]

    def __len__(self) -> int:
        return len(self.attributes)

    def __iter__(self) -> Iterator[Attribute]:
        return iter(self.attributes)

    def __getitem__(self, name: str) -> Attribute:
        known = {attribute.name: attribute for attribute in self.attributes}
        if name not in known:
            raise EvenhandError(
                f"no sensitive attribute {name!r}{near_miss(name, known)} (there are: {_listed(known)})"
            )
        return known[name]

    @cached_property
    def joint(self) -> Attribute:
        """All attributes crossed, `Female & 25-40`: the combinations that occur, in the order of the attributes."""
        if not self.attributes:
            raise EvenhandError("no sensitive attribute is named, so there are no groups; name some (sensitive=...)")
        if len(self) == 1:
            return self.attributes[0]
        shape = [len(attribute.values) for attribute in self]
        crossed = np.ravel_multi_index([attribute.codes for attribute in self], shape)
        found, codes = np.unique(crossed, return_inverse=True)
        places = zip(*np.unravel_index(found, shape), strict=True)
        words = [" & ".join(one.values[place] for one, place in zip(self, row, strict=True)) for row in places]
        return Attribute(" & ".join(attribute.name for attribute in self), tuple(words), codes.astype(np.int64))


def sensitive_columns(said: str, table: Mapping[str, np.ndarray], wanted: str | Sequence[str]) -> dict[str, np.ndarray]:
    """The wanted columns (`"sex,race"`) by name.

    `"age:25,41,65"` puts a number into bands, as column `age_band`; `"race:White|Black"` names the groups that are
    wanted and puts everyone else into `other`, as column `race_group`.
    """
    found = {}
    for word in attribute_names(wanted):
        name, _, edges = (word, "", "") if word in table else word.partition(":")
        if name not in table:
            other = SAME.get(name.lower())
            close = f"; did you mean {other!r}?" if other in table else near_miss(name, table)
            raise EvenhandError(f"{said} has no column {name!r}{close} (it has {_listed(table)})")
        column = table[name]
        numbers = column.dtype.kind in "fiu"
        if edges and numbers:
            found[f"{name}_band"] = _banded(said, name, column, edges)
            continue
        if edges:
            found[f"{name}_group"] = _grouped(said, name, column, edges)
            continue
        kinds = len(np.unique(column))
        if kinds > (MOST_NUMBERS if numbers else MOST_GROUPS):
            way_out = f"{MOST_GROUPS} are the most"
            if numbers:
                ready = "".join(f", or take {other}" for other in table if other in (f"{name}_band", f"{name}_group"))
                way_out = f"give the edges of bands, such as {name}:{_thirds(column)}{ready}"
            raise EvenhandError(
                f"{said}: column {name!r} holds {kinds:,} different values, too many groups to compare; {way_out}"
            )
        found[name] = column
    return found


def attribute_names(text: str | Sequence[str]) -> list[str]:
    """`"sex, age:25,41, race"` -> `["sex", "age:25,41", "race"]`: the edges of bands stay with their column."""
    found: list[str] = []
    for piece in split_names(text):
        if found and ":" in found[-1] and NUMBER.fullmatch(piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def split_names(text: str | Sequence[str]) -> list[str]:
    """`"a, b"` or `["a", "b"]` -> `["a", "b"]`."""
    pieces = text.split(",") if isinstance(text, str) else text
    return [piece.strip() for piece in pieces if piece.strip()]


def drawn_from(name: str) -> str:
    """The column that a band or group of values was drawn from: `age_band` -> `age`."""
    return DERIVED.sub("", name)


def bands(values: np.ndarray, edges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which closed interval a number lies in, as text (`25-40`), or `other`; missing: the empty text."""
    found = np.full(len(values), "other", dtype=f"<U{max(8, *(len(f'{a}-{b}') for a, b in edges))}")
    for low, high in edges:
        found[(values >= low) & (values <= high)] = f"{low}-{high}"
    return np.where(np.isnan(values), "", found)


def _banded(said: str, name: str, column: np.ndarray, edges: str) -> np.ndarray:
    """Each number's band: below the first edge, from each edge up to the next, from the last one on."""
    try:
        limits = [float(edge) for edge in edges.split(",")]
    except ValueError:
        limits = []
    if not limits or not all(map(math.isfinite, limits)) or limits != sorted(set(limits)):
        raise EvenhandError(f"{said}: {name}:{edges} needs the edges of the bands, rising, such as {name}:25,41,65")
    values = column.astype(np.float64)
    known = values[~np.isnan(values)]
    whole = all(edge.is_integer() for edge in limits) and bool((known == np.round(known)).all())
    names = [f"<{_short(limits[0])}"]
    for low, high in pairwise(limits):
        upper = f" to <{_short(high)}" if not whole else f"-{_short(high - 1)}" if high > low + 1 else ""
        names.append(_short(low) + upper)
    names.append(f"{_short(limits[-1])}+")
    placed = np.array(names)[np.searchsorted(limits, values, side="right")]
    return np.where(np.isnan(values), "", placed)


def _grouped(said: str, name: str, column: np.ndarray, wanted: str) -> np.ndarray:
    """Each word that is one of those wanted (`White|Black`), `other` in the place of any other; missing: empty."""
    words, there = spoken(column), [word.strip() for word in wanted.split("|")]
    known = sorted({*words.tolist()} - {""})
    for word in there:
        if word not in known:
            raise EvenhandError(
                f"{said}: nobody's {name} is {word!r}{near_miss(word, known)} (it is one of {_listed(known)}); name "
                f"the groups like {name}:{'|'.join(known[:2])}, or write {name!r} alone for all"
            )
    return np.where(np.isin(words, ["", *there]), words, "other")


def _thirds(column: np.ndarray) -> str:
    """Edges that cut a column into three bands of about equal size."""
    known = column[np.isfinite(column)]
    whole = (known == np.round(known)).all()
    rounded = {round(edge) if whole else float(f"{edge:.3g}") for edge in np.quantile(known, (1 / 3, 2 / 3))}
    return ",".join(map(_short, sorted(map(float, rounded))))


def _short(value: float) -> str:
    return str(int(value)) if value.is_integer() else str(value)


def spoken(values: np.ndarray) -> np.ndarray:
    """Values as text, whole numbers without a decimal point, missing ones as the empty text."""
    if values.dtype.kind == "f":
        known = values[~np.isnan(values)]
        write = _short if (np.isfinite(known) & (known == np.round(known))).all() else str
        return np.array(["" if math.isnan(value) else write(value) for value in values.tolist()])
    if values.dtype.kind == "O":
        return np.array(["" if value is None else str(value) for value in values.tolist()])
    return values.astype(str)


def in_order(words: Iterable[str]) -> list[str]:
    """Sorted by the number a word begins with (`9`, `<25`, `25-40`, `65+`), words without one last.

    >>> in_order(["other", "65+", "<25", "25-40", "9"])
    ['9', '<25', '25-40', '65+', 'other']
    """
    return sorted(words, key=_rank)


def _rank(word: str) -> tuple[float, bool, str]:
    begins = NUMBER.match(word)
    return (math.inf, True, word) if begins is None else (float(begins[2]), begins[1] != "<", word)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
