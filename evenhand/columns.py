"""Columns of words as numbers: each value once, in order, and for every row which one it is.

Labels, predictions, groups and clients come as text, numbers or truth values; all are treated as words, whole numbers
without a decimal point, so that 1, 1.0 and "1" are one class. What is missing stays missing.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError, near_miss
from evenhand.data.attributes import UNKNOWN, in_order
from evenhand.data.files import read_text
from evenhand.data.optional import need

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none", "<na>", "nat"))
WHOLE = re.compile(r"(-?\d+)\.0+")
DELIMITERS = ",;\t|"
CHUNK = 20_000  # lines of a file at a time
SPAN = 10_000  # whole numbers this close together are counted rather than sorted


@dataclass(frozen=True, eq=False)
class Column:
    """The words of a column in order, and for every row the place of its word, -1 where it has none."""

    name: str
    words: tuple[str, ...]
    codes: Ints
    marks: tuple[str, ...] = ()
    """How missing values were written, as far as they were written at all."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def missing(self) -> int:
        """Rows without a value."""
        return int((self.codes < 0).sum())

    def take(self, rows: Any) -> Column:
        """Some of the rows; words that none of them has are forgotten."""
        return settled(self.name, self.words, self.codes[rows])

    def known(self) -> Column:
        """The column with a word, `unknown`, for those that have none."""
        if not self.missing:
            return self
        words = self.words if UNKNOWN in self.words else (*self.words, UNKNOWN)
        return Column(self.name, words, np.where(self.codes < 0, words.index(UNKNOWN), self.codes))

    def among(self, words: Sequence[str]) -> Ints:
        """For every row the place of its word among other words, which hold all of these."""
        places = {word: place for place, word in enumerate(words)}
        return np.array([*(places[word] for word in self.words), -1], dtype=np.int64)[self.codes]


def coded(name: str, values: Any) -> Column:
    """A column from a list, array, tensor or series.

    >>> coded("y", ["yes", "no", None, "yes"])
    Column(name='y', words=('no', 'yes'), codes=array([ 1,  0, -1,  1]), marks=())
    """
    if isinstance(values, Column):
        return values
    array = _array(name, values)
    if array.dtype.kind in "iu" and len(array) and array.max() - array.min() < SPAN:
        first = int(array.min())
        return settled(name, range(first, int(array.max()) + 1), (array - first).astype(np.int64))
    if array.dtype.kind in "biuf":
        found, codes = np.unique(array, return_inverse=True)
        return settled(name, found.tolist(), codes)
    words = _Codes()
    try:
        codes = np.fromiter(map(words.__getitem__, array.tolist()), np.int64, len(array))
    except TypeError as error:
        raise EvenhandError(f"{name!r} must hold one number or word per row ({error})") from error
    return settled(name, list(words), codes)


def numbers(name: str, values: Any) -> Floats:
    """A column of numbers; not-a-number where there is none."""
    array = _array(name, values)
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        pass
    try:
        blank = [str(value).strip().lower() in MISSING for value in array.tolist()]
        return np.where(blank, "nan", array.astype(str)).astype(np.float64)
    except ValueError as error:
        raise EvenhandError(f"{name!r} should hold numbers ({error})") from error


def settled(name: str, values: Iterable[Any], codes: Ints) -> Column:
    """A column from values as they were met: words in order, alike ones joined, unused ones and missing ones gone."""
    values = list(values)
    used = np.bincount(codes[codes >= 0], minlength=len(values)) > 0
    spoken = [_word(value) if seen else None for value, seen in zip(values, used, strict=True)]
    words = in_order({word for word in spoken if word is not None})
    places = {word: place for place, word in enumerate(words)}
    table = [-1 if word is None else places[word] for word in spoken]
    lost = zip(values, spoken, used, strict=True)
    marks = [value for value, word, seen in lost if seen and word is None and isinstance(value, str) and value.strip()]
    return Column(name, tuple(words), np.array([*table, -1], dtype=np.int64)[codes], tuple(marks))


class _Codes(dict[Any, int]):
    """Numbers values in the order in which they are first asked for."""

    def __missing__(self, value: Any) -> int:
        self[value] = place = len(self)
        return place


def _word(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    word = str(value).strip()
    if word.lower() in MISSING:
        return None
    whole = WHOLE.fullmatch(word)
    return whole[1] if whole else word


def _array(name: str, values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise EvenhandError(f"{name!r} must hold one value per row, not {values!r}")
    if hasattr(values, "detach"):  # a tensor, on whatever device
        values = values.detach().cpu().numpy()
    mixed = isinstance(values, (list, tuple)) and len({type(value) for value in values}) > 1  # numpy would make text
    try:
        array = np.asarray(values, dtype=object if mixed else None)
    except ValueError as error:
        raise EvenhandError(f"{name!r} must hold one number or word per row ({error})") from error
    if array.ndim != 1:
        raise EvenhandError(f"{name!r} has shape {array.shape}; one value per row is needed")
    return array


# ------------------------------------------------------------------------------------------- files and tables


def read(
    data: Any, words: Sequence[str], figures: Sequence[str] = (), said: Mapping[str, str] | None = None
) -> tuple[dict[str, Column], dict[str, Floats]]:
    """Columns of words and columns of numbers from a CSV, TSV or Parquet file, a data frame or a mapping of arrays.

    `said` says for a column how it was asked for (`--label y`), for the error when there is none.
    """
    path = Path(data) if isinstance(data, (str, Path)) else None
    if path is None:
        there = list(data.columns) if hasattr(data, "columns") else list(data)
        _insist("the data", there, [*words, *figures], said)
        lengths = {name: len(data[name]) for name in (*words, *figures)}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise EvenhandError(f"the columns differ in length: {told}")
        if not any(lengths.values()):
            raise EvenhandError("the data hold no rows")
        return {name: coded(name, data[name]) for name in words}, {name: numbers(name, data[name]) for name in figures}
    if not path.is_file():
        raise EvenhandError(f"there is no file {str(path)!r}")
    if path.suffix == ".parquet":
        return _parquet(path, words, figures, said)
    return _csv(path, words, figures, said)


def _insist(place: str, there: Sequence[str], wanted: Sequence[str], said: Mapping[str, str] | None) -> None:
    for name in wanted:
        if name not in there:
            asked = f" ({said[name]})" if said and name in said else ""
            listed = ", ".join(map(str, there))
            raise EvenhandError(f"{place} has no column {name!r}{asked}{near_miss(name, there)} (it has {listed})")


def _csv(
    path: Path, words: Sequence[str], figures: Sequence[str], said: Mapping[str, str] | None
) -> tuple[dict[str, Column], dict[str, Floats]]:
    text = io.StringIO(read_text(path).removeprefix("\ufeff"), newline="")
    first = text.readline()
    text.seek(0)
    delimiter = "\t" if path.suffix == ".tsv" else max(DELIMITERS, key=first.count)
    lines = csv.reader(text, delimiter=delimiter, skipinitialspace=True)
    heads: list[str] | None = None
    codes: dict[str, _Codes] = {name: _Codes() for name in words}
    places_of: dict[str, list[Ints]] = {name: [] for name in words}
    pieces: dict[str, list[Floats]] = {name: [] for name in figures}
    try:
        while piece := list(islice(lines, CHUNK)):
            rows = [row for row in piece if row]
            if heads is None and rows:
                heads = [head.strip() for head in rows.pop(0)]
                _insist(str(path), heads, [*words, *figures], said)
            if heads is None:
                continue
            if {*map(len, rows)} - {len(heads)}:
                raise EvenhandError(_wrong_line(path, delimiter, len(heads)))
            for name in words:
                place = heads.index(name)
                numbered = map(codes[name].__getitem__, [row[place] for row in rows])
                places_of[name].append(np.fromiter(numbered, np.int64, len(rows)))
            for name in figures:
                place = heads.index(name)
                pieces[name].append(_figures(path, name, [row[place] for row in rows]))
    except csv.Error as failure:
        raise EvenhandError(f"{path}, line {lines.line_num}: not CSV ({failure})") from failure
    if heads is None or not any(map(len, places_of[words[0]])):
        raise EvenhandError(f"{path} holds no rows")
    columns = {name: settled(name, list(codes[name]), np.concatenate(places_of[name])) for name in words}
    return columns, {name: np.concatenate(pieces[name]) for name in figures}


def _wrong_line(path: Path, delimiter: str, fields: int) -> str:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        for row in lines:
            if row and len(row) != fields:
                return f"{path}, line {lines.line_num}: {len(row)} fields, but the first line has {fields}"
    return f"{path}: lines differ in length"


def _figures(path: Path, name: str, cells: list[str]) -> Floats:
    try:
        return np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        pass
    try:
        return np.array([np.nan if cell.strip().lower() in MISSING else float(cell) for cell in cells])
    except ValueError as failure:
        raise EvenhandError(f"{path}: column {name!r} should hold numbers ({failure})") from failure


def _parquet(
    path: Path, words: Sequence[str], figures: Sequence[str], said: Mapping[str, str] | None
) -> tuple[dict[str, Column], dict[str, Floats]]:
    parquet = need("pyarrow.parquet", f"reading {path.name}")
    try:
        _insist(str(path), parquet.read_schema(path).names, [*words, *figures], said)
        table = parquet.read_table(path, columns=list(dict.fromkeys((*words, *figures))))
    except EvenhandError:
        raise
    except Exception as failure:  # pyarrow has its own hierarchy of errors
        reason = str(failure).split("\n")[0]
        raise EvenhandError(f"{path} is truncated or not a Parquet file ({reason})") from failure
    if not table.num_rows:
        raise EvenhandError(f"{path} holds no rows")
    columns = {}
    for name in words:
        column = table.column(name).combine_chunks()
        if not hasattr(column, "dictionary"):
            column = column.dictionary_encode()
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        columns[name] = settled(name, column.dictionary.to_pylist(), codes)
    return columns, {name: numbers(name, table.column(name).to_numpy()) for name in figures}
