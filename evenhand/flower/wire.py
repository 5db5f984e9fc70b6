"""What goes over the wire: the names of messages, records and numbers, and how arrays are read.

A model travels as an ArrayRecord named `arrays`, as in every Flower app. What the server wants to know of it stands in
the ConfigRecord `config` (the user's own, the same for all) and in `task` (what differs from client to client).
Numbers come back in the MetricRecord `metrics`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from evenhand.checks import EvenhandError
from evenhand.constraints import Cells, Sums
from evenhand.engine.training import Shape

DESCRIBE, SURVEY, TRIAL, CORRECT = "query.describe", "query.survey", "query.trial", "query.correct"
TRAIN, EVALUATE = "train", "evaluate"

ARRAYS, UPDATE, DIRECTION, TOLD = "arrays", "update", "direction", "told"
CONFIG, TASK, METRICS, CLIENT, SUMS = "config", "task", "metrics", "client", "sums"

ROUND, METHOD, WANT, LENGTHS, MEMO = "server-round", "method", "want", "lengths", "memo"
EXPERIMENT, KNOWN, LOST = "experiment", "known", "state-lost"  # what clients keep between rounds
BEFORE, AFTER, BY_CELL = "before", "after", "sums"  # what a round's task may want besides the trained model

SAMPLES, LOSS, ACCURACY, TRAINED_LOSS = "num-examples", "loss", "accuracy", "trained-loss"
TRIAL_LOSSES, PREDICTED, TEST_SAMPLES = "trial-losses", "predicted", "num-test-examples"

Numbers = np.ndarray[Any, np.dtype[Any]]
Record = TypeVar("Record", ArrayRecord, MetricRecord)
FLOATS = (np.float16, np.float32, np.float64)


class Unusable(EvenhandError):
    """A reply that cannot be used; the message says why."""


# ------------------------------------------------------------------------------------------------------------ arrays


def numbers_of(array: Array) -> Numbers:
    """An array as it lies in the message, without copying it; not to be written to."""
    if array.stype != "numpy.ndarray":
        raise Unusable(f"an array was sent as {array.stype!r}, which is not numpy's format")
    head = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(head)
        if dtype.hasobject:
            raise Unusable("an array holds Python objects")
        count = int(np.prod(shape))
        flat = np.frombuffer(array.data, dtype=dtype, count=count, offset=head.tell())
    except ValueError as error:
        raise Unusable(f"an array cannot be read: {error}") from error
    return flat.reshape(shape, order="F" if fortran else "C")


class Form:
    """Which arrays a model has, and how they lie in a flat row; whole numbers (counters) are kept out of it."""

    def __init__(self, arrays: ArrayRecord) -> None:
        read = {name: numbers_of(array) for name, array in arrays.items()}
        if not read:
            raise EvenhandError("initial_arrays is empty: start from a model, such as ArrayRecord(model.state_dict())")
        self.dtypes = {name: values.dtype for name, values in read.items()}
        self.shapes = {name: values.shape for name, values in read.items()}
        self.kept = {name: values for name, values in read.items() if values.dtype not in FLOATS}
        moving = [name for name in read if name not in self.kept]
        if not moving:
            raise EvenhandError("initial_arrays holds no floating-point array, so there is nothing to train")
        wide = any(self.dtypes[name] == np.float64 for name in moving)
        self.dtype = torch.float64 if wide else torch.float32
        owners = [name.rpartition(".")[0] or name for name in moving]
        order = sorted(range(len(moving)), key=lambda place: owners.index(owners[place]))  # a module's lie side by side
        self.shape = Shape.named({moving[place]: torch.Size(self.shapes[moving[place]]) for place in order})

    def zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.shape.total, dtype=self.dtype)

    def read(self, arrays: ArrayRecord) -> Tensor:
        """A model as a flat row."""
        row = self.zeros(1)
        self.place(arrays, row)
        return row[0]

    def place(self, arrays: ArrayRecord, row: Tensor, start: Tensor | None = None) -> None:
        """Write arrays (or start - arrays) into one row of a matrix (1 x total); those of another form are refused."""
        missing = [name for name in self.dtypes if name not in arrays]
        more = [name for name in arrays if name not in self.dtypes]
        if missing or more:
            said = f"it lacks {missing[0]!r}" if missing else f"it has {more[0]!r} besides"
            raise Unusable(f"its arrays are not the model's: {said}")
        views = self.shape.views(row)
        starts = None if start is None else self.shape.views(start.unsqueeze(0))
        for name, view in views.items():
            values = numbers_of(arrays[name])
            if values.shape != self.shapes[name]:
                raise Unusable(f"its array {name!r} has shape {values.shape}, the model's has {self.shapes[name]}")
            if values.dtype not in FLOATS:
                raise Unusable(f"its array {name!r} holds {values.dtype}, the model's {self.dtypes[name]}")
            target = view[0].numpy()
            if starts is None:
                target[...] = values
            else:
                np.subtract(starts[name][0].numpy(), values, out=target, casting="same_kind")

    def write(self, row: Tensor) -> ArrayRecord:
        """A flat row as a model; what is not trained is as it was at the start."""
        views = self.shape.views(row.unsqueeze(0))
        found = {}
        for name, dtype in self.dtypes.items():
            moved = views[name][0].numpy().astype(dtype, copy=False) if name in views else self.kept[name]
            found[name] = Array(np.ascontiguousarray(moved))
        return ArrayRecord(found)

    def words(self, row: Tensor) -> dict[str, Tensor]:
        """The same as tensors by name."""
        return {name: view[0].clone() for name, view in self.shape.views(row.unsqueeze(0)).items()}


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()})


def tensors_of(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Arrays as tensors of their own, which may be written to."""
    return {name: torch.from_numpy(np.array(numbers_of(array))) for name, array in arrays.items()}


# ----------------------------------------------------------------------------------------------------------- numbers


def number_in(content: RecordDict, name: str, *, low: float = float("-inf")) -> float:
    """One number of a reply's metrics."""
    metrics = metrics_in(content)
    if name not in metrics:
        raise Unusable(f"its metrics lack {name!r} (they are {', '.join(sorted(metrics)) or 'empty'})")
    value = metrics[name]
    if isinstance(value, (list, tuple)):
        raise Unusable(f"its {name!r} is a list, not a number")
    if not np.isfinite(value) or value < low:
        raise Unusable(f"its {name!r} is {value:g}")
    return float(value)


def numbers_in(content: RecordDict, name: str, count: int) -> Numbers:
    """A list of so many numbers of a reply's metrics."""
    values = metrics_in(content).get(name)
    if not isinstance(values, (list, tuple)) or len(values) != count:
        found = "missing" if values is None else f"of length {len(values) if isinstance(values, (list, tuple)) else 1}"
        raise Unusable(f"its {name!r} should be a list of {count} numbers and is {found}")
    return np.asarray(values, dtype=np.float64)


def metrics_in(content: RecordDict) -> MetricRecord:
    """The metrics of a reply: the record of that name, or the only one there is."""
    return _record_in(content.metric_records, METRICS, "MetricRecord")


def model_in(content: RecordDict, name: str = ARRAYS) -> ArrayRecord:
    """The model of a message: the record of that name, or the only one there is."""
    return _record_in(content.array_records, name, "ArrayRecord")


def _record_in(records: Mapping[str, Record], name: str, kind: str) -> Record:
    if name in records:
        return records[name]
    if len(records) != 1:
        raise Unusable(f"it should hold one {kind} and holds {len(records)}")
    return next(iter(records.values()))


def write_sums(sums: Sums) -> MetricRecord:
    """One client's sums by cell."""
    parts = {"probabilities": sums.probabilities, "losses": sums.losses, "hits": sums.hits}
    return MetricRecord({name: np.asarray(part[0]).reshape(-1).tolist() for name, part in parts.items()})


def read_sums(content: RecordDict, cells: Cells) -> Sums:
    """What `write_sums` wrote, for these cells."""
    record = content.metric_records.get(SUMS)
    if record is None:
        raise Unusable("it says nothing about groups; its node should run evenhand's own client (site_client)")
    shapes = {
        "probabilities": (1, cells.count, cells.classes),
        "losses": (1, cells.count),
        "hits": (1, cells.count, cells.classes),
    }
    found = {}
    for name, shape in shapes.items():
        values = np.asarray(record.get(name, []), dtype=np.float64)
        if values.size != int(np.prod(shape)):
            raise Unusable(f"its sums by cell have {values.size} {name} where {int(np.prod(shape))} are needed")
        if not np.isfinite(values).all():
            raise Unusable(f"its sums by cell hold {name} that are not finite")
        found[name] = values.reshape(shape)
    if found["hits"].sum() <= 0:
        raise Unusable("its sums by cell count no sample")
    return Sums(found["probabilities"], found["losses"], found["hits"])


def joined_sums(parts: Sequence[Sums]) -> Sums:
    """Several clients' sums, a row each."""
    names = ("probabilities", "losses", "hits")
    return Sums(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


# ------------------------------------------------------------------------------------------------------------- tasks


def write_task(values: Mapping[str, Any]) -> ConfigRecord:
    """What a client is asked, in plain values; what is nested travels as JSON."""
    return ConfigRecord({name: json.dumps(v) if isinstance(v, Mapping) else v for name, v in values.items()})


def read_task(content: RecordDict) -> dict[str, Any]:
    """What `write_task` wrote; a message of another strategy has none."""
    record = content.config_records.get(TASK)
    if record is None:
        raise EvenhandError(
            "the message carries no task: this client answers evenhand's FairStrategy, and the ServerApp uses another"
        )
    values: dict[str, Any] = dict(record)
    for name in (METHOD, MEMO):
        if name in values:
            values[name] = json.loads(values[name])
    return values


def write_memo(memo: Mapping[str, Any]) -> dict[str, Any]:
    """A client's part of an objective's memo in plain values."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in memo.items()}


def read_memo(memo: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value) if name == "multipliers" else value for name, value in memo.items()}
