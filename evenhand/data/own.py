"""The user's own data: a CSV, Parquet or npz file, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.checks import EvenhandError, near_miss, number
from evenhand.data.attributes import in_order, sensitive_columns, split_names, spoken
from evenhand.data.dataset import LOCAL_SPLIT, Dataset
from evenhand.data.files import read_npz
from evenhand.data.optional import need
from evenhand.data.tabular import MOST_LEVELS, Table, holdout, read_csv, table_dataset, typed

MOST_CLASSES = 1000
MOST_FRACTIONS = 20  # so many different numbers with fractions may still be classes
INPUT_NAMES = ("x", "inputs", "data", "images", "features")
IMAGE_NAMES = ("image", "img", "pixel_values")


def own_file(
    path: Path,
    *,
    target: str = "y",
    client_column: str = "",
    sensitive: str | Sequence[str] = "",
    include_sensitive: bool = True,
    drop: str | Sequence[str] = (),
    inputs: str = "",
    delimiter: str = "",
    max_levels: int = MOST_LEVELS,
    test: float = 0.2,
    order: str = "random",
    seed: int = 0,
) -> Dataset:
    """Your own table or arrays, with a target column and perhaps a client column.

    In a table every other column is an input: text columns one-hot, numbers standardised, both fitted on the training
    rows (`test` of the rows are drawn as the test set; `order="file"`: the last ones; 0: no split, fitted on all).
    `sensitive` columns say who somebody is: `sex,race`, or `age:25,41,65` for bands of a number, or
    `race:White|Black` for these groups and all others as one. The client column, the
    `drop` columns and, with include_sensitive=False, the sensitive ones are no inputs. In an npz file `inputs` names
    the array of inputs, `target` the labels, and other arrays with one value per sample become columns.
    """
    if not path.is_file():
        raise EvenhandError(f"there is no file {path}")
    if path.suffix == ".npz":
        return _own_npz(path, target, inputs, client_column, sensitive)
    if path.suffix == ".parquet":
        raw = _read_parquet(path)
    else:
        raw = read_csv(path, delimiter=delimiter or ("\t" if path.suffix == ".tsv" else ","))
    rows, train_rows = holdout(len(raw), test, seed, order)
    return own_table(
        path.name,
        raw.take(rows),
        target=target,
        client_column=client_column,
        sensitive=sensitive,
        include_sensitive=include_sensitive,
        drop=drop,
        max_levels=max_levels,
        train_rows=train_rows,
        source=str(path),
    )


def own_table(
    name: str,
    raw: Table,
    *,
    target: str,
    client_column: str,
    sensitive: str | Sequence[str],
    include_sensitive: bool,
    drop: str | Sequence[str],
    max_levels: int,
    train_rows: int | None,
    source: str,
) -> Dataset:
    """A data set from any table: which columns are inputs, which describe the samples, which is the target."""
    number("max_levels", max_levels, low=2, whole=True)
    wanted = [target, *split_names(client_column), *split_names(drop)]
    for column in wanted:
        if column not in raw.columns:
            hint = "; name the column to predict with --target (target=...)" if column == target else ""
            raise EvenhandError(
                f"{source} has no column {column!r}{near_miss(column, raw.columns)} "
                f"(it has {', '.join(raw.columns)}){hint}"
            )
    labels = spoken(raw[target])
    if (labels == "").any():
        raise EvenhandError(
            f"{source}: column {target!r} lacks {int((labels == '').sum())} values; a target cannot be missing"
        )
    class_names = in_order(np.unique(labels).tolist())
    if not 2 <= len(class_names) <= MOST_CLASSES:
        raise EvenhandError(
            f"{source}: column {target!r} holds {len(class_names)} different values; "
            f"a target has 2 to {MOST_CLASSES} classes"
        )
    if len(class_names) > MOST_FRACTIONS and any(_is_fraction(word) for word in class_names):
        raise EvenhandError(
            f"{source}: column {target!r} holds {len(class_names)} different numbers with fractions, which is a "
            "quantity rather than a class; write it as a few classes first (low, middle, high)"
        )
    table = typed(raw).with_columns({target: labels})
    hidden = {target, *split_names(client_column), *split_names(drop)}
    features = [column for column in table.columns if column not in hidden]
    clients = {name: spoken(raw[client_column]) for name in (client_column, "client") if client_column}
    return table_dataset(
        name,
        table,
        target,
        features,
        class_names=class_names,
        train_rows=train_rows,
        sensitive=sensitive,
        include_sensitive=include_sensitive,
        source=source,
        columns=clients,
        max_levels=max_levels,
    )


def _is_fraction(word: str) -> bool:
    try:
        return not float(word).is_integer()
    except ValueError:
        return False


def _read_parquet(path: Path) -> Table:
    parquet = need("pyarrow.parquet", f"reading {path.name}")
    try:
        content = parquet.read_table(path)
    except Exception as failure:  # pyarrow has its own hierarchy of errors
        reason = str(failure).split("\n")[0]
        raise EvenhandError(f"{path} is truncated or not a Parquet file ({reason})") from failure
    if content.num_rows == 0:
        raise EvenhandError(f"{path} holds no rows")
    return Table({name: plain_column(content.column(name).to_pylist(), name) for name in content.column_names})


def plain_column(values: Sequence[Any], name: str) -> np.ndarray:
    """Python values as a column: numbers and truth values as float64, the rest as text; None is missing."""
    if all(value is None or isinstance(value, (bool, int, float)) for value in values):
        return np.array([np.nan if value is None else float(value) for value in values])
    if any(isinstance(value, (list, dict)) for value in values):
        raise EvenhandError(f"column {name!r} holds lists or records, not one value per row; leave it out")
    return np.array(["" if value is None else str(value) for value in values])


def _own_npz(path: Path, target: str, inputs: str, client_column: str, sensitive: str | Sequence[str]) -> Dataset:
    arrays = read_npz(path)
    key = inputs or next((name for name in INPUT_NAMES if name in arrays), "")
    for name, said in ((key or "x", "inputs"), (target, "target")):
        if name not in arrays:
            raise EvenhandError(f"{path} has no array {name!r} (it has {', '.join(arrays)}); name it with {said}=...")
    labels = arrays[target]
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise EvenhandError(f"{path}: {target!r} should be one class per sample, it is {labels.shape} {labels.dtype}")
    names, numbers = np.unique(labels, return_inverse=True)
    columns = {
        name: values for name, values in arrays.items() if name not in (key, target) and values.shape == labels.shape
    }
    if client_column:
        if client_column not in columns:
            raise EvenhandError(f"{path} has no client column {client_column!r} with one value per sample")
        columns["client"] = columns[client_column]
    people = sensitive_columns(path.name, columns, sensitive)
    return Dataset(
        name=path.name,
        inputs=_as_inputs(arrays[key], str(path)),
        targets=torch.from_numpy(numbers.astype(np.int64)),
        classes=len(names),
        class_names=tuple(map(str, names)),
        columns=columns | people,
        sensitive=tuple(people),
        source=str(path),
    )


def _as_inputs(values: np.ndarray, said: str) -> torch.Tensor:
    """Bytes are pixels and scaled to [0, 1]; other whole numbers are tokens; the rest becomes float32."""
    if values.dtype == np.uint8:
        return torch.from_numpy(values).to(torch.float32).div_(255.0)
    if values.dtype.kind in "iu":
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise EvenhandError(
            f"{said}: {int((~np.isfinite(values)).sum()):,} inputs are NaN or infinite; fill them in or leave them out"
        )
    if values.dtype.kind in "fb":
        return torch.from_numpy(values.astype(np.float32))
    raise EvenhandError(f"{said}: inputs of type {values.dtype} cannot be used; give numbers")


def hub(
    name: str,
    *,
    config: str = "",
    input: str = "",
    target: str = "label",
    client_column: str = "",
    sensitive: str | Sequence[str] = "",
    include_sensitive: bool = True,
    drop: str | Sequence[str] = (),
    max_levels: int = MOST_LEVELS,
) -> Dataset:
    """Any Hugging Face data set of images or a table.

    `input` names the column of images (or number lists); without one the columns are a table. Its split `train` is
    the training set and `test` (else `validation`) the official test set. FEMNIST by writer, say, is
    `load("hub:flwrlabs/femnist", input="image", target="character", client_column="writer_id")`.
    """
    library = need("datasets", f"hub:{name}")
    try:
        content = library.load_dataset(name, config) if config else library.load_dataset(name)
    except Exception as failure:  # network, unknown name, scripts no longer supported, ...
        reason = str(failure).strip().split("\n")[0]
        raise EvenhandError(f"hub:{name} could not be loaded ({type(failure).__name__}: {reason})") from failure
    known = list(content)
    chosen = [split for split in ("train", "test") if split in known] or known[:1]
    if chosen == ["train"] and "validation" in known:
        chosen.append("validation")
    parts = [content[split] for split in chosen]
    train_rows = len(parts[0]) if len(parts) == 2 else None
    names = list(parts[0].column_names)
    source = f"Hugging Face {name}" + (f" ({config})" if config else "") + f": {' + '.join(chosen)}"
    key = input or next((column for column in IMAGE_NAMES if column in names), "")
    for column in filter(None, (key, target, client_column)):
        if column not in names:
            raise EvenhandError(
                f"hub:{name} has no column {column!r}{near_miss(column, names)} (it has {', '.join(names)})"
            )
    scalar = {
        column: plain_column([value for part in parts for value in part[column]], column)
        for column in names
        if column != key and not _is_nested(parts[0], column)
    }
    if target not in scalar:
        raise EvenhandError(f"hub:{name}: column {target!r} should hold one class per sample")
    if not key:
        return own_table(
            f"hub:{name}",
            Table(scalar),
            target=target,
            client_column=client_column,
            sensitive=sensitive,
            include_sensitive=include_sensitive,
            drop=drop,
            max_levels=max_levels,
            train_rows=train_rows,
            source=source,
        )
    labels = spoken(scalar.pop(target))
    class_names = in_order(np.unique(labels).tolist())
    people = sensitive_columns(f"hub:{name}", scalar, sensitive)
    columns = {column: spoken(values) for column, values in (scalar | people).items()}
    if client_column:
        columns["client"] = columns[client_column]
    index = {word: place for place, word in enumerate(class_names)}
    return Dataset(
        name=f"hub:{name}",
        inputs=_stacked([value for part in parts for value in part[key]], f"hub:{name}, column {key!r}"),
        targets=torch.tensor([index[word] for word in labels], dtype=torch.int64),
        classes=len(class_names),
        class_names=_hub_names(parts[0], target, class_names),
        train_rows=train_rows,
        columns=columns,
        sensitive=tuple(people),
        source=source,
        split=LOCAL_SPLIT,
    )


def _is_nested(part: Any, column: str) -> bool:
    """Whether a column holds anything but one number or text per sample."""
    return len(part) > 0 and not isinstance(part[0][column], (str, bool, int, float, type(None)))


def _hub_names(part: Any, target: str, numbers: Sequence[str]) -> tuple[str, ...]:
    """The class names the hub knows for the label numbers, where it knows them."""
    features: Mapping[str, Any] = getattr(part, "features", None) or {}
    names = getattr(features.get(target), "names", None)
    if names and all(number.isdigit() and int(number) < len(names) for number in numbers):
        return tuple(names[int(number)] for number in numbers)
    return tuple(numbers)


def _stacked(values: Sequence[Any], said: str) -> torch.Tensor:
    """Pictures (height x width x channels, or height x width) or lists of numbers, as one tensor."""
    if isinstance(values[0], str):
        raise EvenhandError(f"{said} holds text; turn it into numbers first and give an npz file")
    pieces = [np.asarray(value) for value in values]
    if len({piece.shape for piece in pieces}) != 1:
        shapes = sorted({piece.shape for piece in pieces})[:3]
        raise EvenhandError(f"{said} holds inputs of different shapes ({', '.join(map(str, shapes))}, ...)")
    stacked = np.stack(pieces)
    if stacked.dtype == np.uint8 and stacked.ndim == 3:
        stacked = stacked[:, None]
    elif stacked.dtype == np.uint8 and stacked.ndim == 4:
        stacked = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
    elif stacked.dtype.kind in "iu" and stacked.dtype != np.uint8:
        stacked = stacked.astype(np.float32)
    return _as_inputs(stacked, said)
