"""Client updates in whatever form they come: read as rows, tensor by tensor, and given back in the same form."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.checks import EvenhandError, near_miss

Layers = str | Callable[[str], str] | Mapping[str, Any] | Sequence[Any] | None

BUFFER = 16 << 20  # bytes of the gather buffer

# Relative error to expect in an entry K[i, j] / (|g_i| |g_j|), by the dtype products are formed in.
RESOLUTION = {torch.float32: 1e-7, torch.float64: 1e-14}

Span = tuple[int, slice]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """In which dtype products of such numbers are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Layout:
    """The form of one client's update: its tensors, their layers, and how to give it back."""

    form: str  # "array", "stacked", "mapping" or "sequence"
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    blocks: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]  # per tensor: which of its numbers, in order, belong to which block
    keys: tuple[str, ...]  # every entry in the caller's order, the integer ones included
    integers: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    numpy: bool
    ordered: bool

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def signature(self) -> list[list[Any]]:
        """What two rounds must share for their rows to be compared (JSON-ready)."""
        return [
            [name, list(shape), [[self.blocks[block], columns.stop] for block, columns in spans]]
            for name, shape, spans in zip(self.names, self.shapes, self.spans, strict=True)
        ]


@dataclass(frozen=True)
class Updates:
    """Rows of client updates, tensor by tensor: dense (rows x size) or one flat-able tensor a row."""

    layout: Layout
    parts: tuple[Tensor | tuple[Tensor, ...], ...]
    rows: int
    keep: tuple[int, ...] | None = None  # rows in use; None is all of them
    devices: tuple[torch.device, ...] | None = None  # where each part is computed, if not where it lies

    def __len__(self) -> int:
        return self.rows if self.keep is None else len(self.keep)

    def select(self, keep: Sequence[int]) -> Updates:
        """The same updates restricted to some rows, without copying any."""
        if self.keep is not None:
            keep = [self.keep[i] for i in keep]
        chosen = tuple(int(i) for i in keep)
        return replace(self, keep=None if chosen == tuple(range(self.rows)) else chosen)

    def device_of(self, part: int) -> torch.device:
        if self.devices is not None:
            return self.devices[part]
        rows = self.parts[part]
        return rows.device if isinstance(rows, Tensor) else rows[0].device

    def compute_dtype(self, part: int) -> torch.dtype:
        return computed_in(self.layout.dtypes[part])

    @property
    def resolution(self) -> float:
        """Relative error of the Gram matrix's entries (see RESOLUTION)."""
        return max(RESOLUTION[self.compute_dtype(p)] for p in range(len(self.parts)))

    def row(self, index: int) -> tuple[Tensor, ...]:
        """One row as flat tensors, one per entry of the layout."""
        if self.keep is not None:
            index = self.keep[index]
        return tuple(part[index].reshape(-1) for part in self.parts)

    def dense(self, part: int, device: torch.device | None = None, *, copy: bool = True) -> Tensor:
        """The rows in use of one part as one matrix (rows x size), on a device where one is named."""
        rows = self.parts[part]
        where = device if device is not None else rows[0].device
        if not copy and isinstance(rows, Tensor) and self.keep is None and rows.device == where:
            return rows
        matrix = torch.empty(len(self), self.layout.sizes[part], dtype=self.layout.dtypes[part], device=where)
        if isinstance(rows, Tensor) and self.keep is None:
            return matrix.copy_(rows)
        for position, row in enumerate(range(self.rows) if self.keep is None else self.keep):
            matrix[position].copy_(rows[row].reshape(-1))
        return matrix

    def in_place(self, part: int, dtype: torch.dtype) -> Tensor | None:
        """The rows of one part as they lie, where matrix products can read them so."""
        rows = self.parts[part]
        if isinstance(rows, Tensor) and self.keep is None and rows.dtype == dtype and _multipliable(rows):
            return rows if self.devices is None or rows.device == self.devices[part] else None
        return None

    def stretches(
        self, part: int, dtype: torch.dtype, spare: Spare, span: slice, width: int | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """A span of one part's columns as (columns, dense rows x columns) pieces of the given dtype.

        Dense rows of that dtype come as a view, whole unless a width is given; others pass through a spare buffer.
        """
        rows, size, count = self.parts[part], span.stop - span.start, len(self)
        device = self.device_of(part)
        in_place = self.in_place(part, dtype) is not None
        if width is None:
            width = size if in_place else columns_at_once(count, dtype)
        width = min(width, size)
        index = list(range(self.rows)) if self.keep is None else list(self.keep)
        chosen = None if self.keep is None else torch.as_tensor(index, device=device)
        buffer = None if in_place else spare.take(count * width, dtype, device)
        for start in range(span.start, span.stop, width):
            columns = slice(start, min(start + width, span.stop))
            if buffer is None:
                yield columns, rows[:, columns]  # type: ignore[call-overload]
                continue
            dense = buffer[: count * (columns.stop - columns.start)].view(count, -1)
            if not isinstance(rows, Tensor):
                for position, row in enumerate(index):
                    dense[position].copy_(_flat(rows[row], columns))
            elif chosen is None:
                dense.copy_(rows[:, columns])
            elif rows.dtype == dtype and rows.device == device:
                torch.index_select(rows[:, columns], 0, chosen, out=dense)
            else:
                for position, row in enumerate(index):
                    dense[position].copy_(rows[row, columns])
            yield columns, dense


def columns_at_once(rows: int, dtype: torch.dtype) -> int:
    """Columns of so many rows that a buffer holds."""
    return max(256, BUFFER // (max(rows, 1) * dtype.itemsize))


class Spare:
    """One buffer for a whole pass over the parts, so that their buffers do not add up."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._held.pop((dtype, device), None)
        if held is None or held.numel() < size:
            del held
            held = torch.empty(size, dtype=dtype, device=device)
        self._held[dtype, device] = held
        return held[:size]


def _multipliable(rows: Tensor) -> bool:
    """Whether matrix products read these rows as they lie, without copying them first."""
    count, size = rows.shape
    down, along = rows.stride()
    return (along == 1 and down >= size) or (down == 1 and along >= count)


def _flat(tensor: Tensor, columns: slice) -> Tensor:
    """Some of a tensor's numbers in order; of one that is not contiguous only the slab around them is copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)[columns]
    each = tensor[0].numel()
    first, last = columns.start // each, -(-columns.stop // each)
    return tensor[first:last].reshape(-1)[columns.start - first * each : columns.stop - first * each]


def _by_row(stack: Tensor) -> Tensor | tuple[Tensor, ...]:
    """A stack as (rows x size) where that needs no copy, else its rows one by one."""
    try:
        return stack.view(len(stack), -1)
    except RuntimeError:
        return tuple(stack)


def read_updates(updates: Any, layers: Layers = None) -> Updates:
    """Accept a matrix, a stack, a stacked state dict, or a sequence of arrays, lists or state dicts."""
    if isinstance(updates, Updates):
        return updates
    if isinstance(updates, Mapping):
        return _read_stacked(updates, layers)
    if isinstance(updates, (Tensor, np.ndarray)):
        return _read_array(updates, layers)
    if isinstance(updates, Sequence) and not isinstance(updates, (str, bytes)):
        if len(updates) == 0:
            raise EvenhandError("updates is empty: a round needs at least one client's update")
        first = updates[0]
        if isinstance(first, Mapping):
            return _read_mappings(updates, layers)
        if isinstance(first, (Tensor, np.ndarray)):
            read = _read_mappings([{"update": row} for row in updates], "model")
            names, spans = _column_layers(None if layers == "tensor" else layers, math.prod(first.shape))
            return replace(read, layout=replace(read.layout, form="array", blocks=names, spans=(spans,)))
        if isinstance(first, Sequence) and first and isinstance(first[0], (Tensor, np.ndarray)):
            _same_lengths(updates)
            named = [{str(i): tensor for i, tensor in enumerate(row)} for row in updates]
            read = _read_mappings(named, layers)
            return replace(read, layout=replace(read.layout, form="sequence"))
    raise EvenhandError(
        f"updates of type {type(updates).__name__} not understood; give a (clients x parameters) array or tensor, "
        "a mapping name -> (clients x ...) tensor, or a sequence with one array, list of arrays or state dict a client"
    )


def _same_lengths(rows: Sequence[Any]) -> None:
    for position, row in enumerate(rows):
        if not isinstance(row, Sequence) or len(row) != len(rows[0]):
            found = len(row) if isinstance(row, Sequence) else type(row).__name__
            raise EvenhandError(f"updates[{position}] has {found} tensors, updates[0] has {len(rows[0])}")


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_sparse or value.layout != torch.strided:
            raise EvenhandError(f"{where} is a sparse tensor; pass value.to_dense()")
        return value.detach()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiub":
            raise EvenhandError(f"{where} has dtype {value.dtype}; floating-point numbers are needed")
        if not value.flags.writeable or any(stride < 0 for stride in value.strides):
            value = value.copy()  # torch cannot borrow such memory
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise EvenhandError(f"{where} has dtype {value.dtype}, which torch does not know: {error}") from error
    raise EvenhandError(f"{where} is a {type(value).__name__}; a torch tensor or numpy array is needed")


def _read_array(array: Tensor | np.ndarray[Any, Any], layers: Layers) -> Updates:
    tensor = _tensor(array, "updates")
    if tensor.ndim < 2:
        raise EvenhandError(
            f"updates has shape {tuple(tensor.shape)}; the first axis counts clients and the others hold one update"
        )
    if tensor.shape[0] == 0:
        raise EvenhandError("updates is empty: a round needs at least one client's update")
    if not tensor.is_floating_point():
        raise EvenhandError(f"updates has dtype {tensor.dtype}; floating-point numbers are needed")
    if tensor.numel() == 0:
        raise EvenhandError(f"updates has shape {tuple(tensor.shape)}: it holds no numbers")
    rows, shape = tensor.shape[0], tuple(tensor.shape[1:])
    names, spans = _column_layers(layers, math.prod(shape))
    layout = Layout(
        form="array",
        names=("update",),
        shapes=(shape,),
        dtypes=(tensor.dtype,),
        blocks=names,
        spans=(spans,),
        keys=("update",),
        integers={},
        numpy=isinstance(array, np.ndarray),
        ordered=False,
    )
    return Updates(layout, (_by_row(tensor),), rows)


def _column_layers(layers: Layers, columns: int) -> tuple[tuple[str, ...], tuple[Span, ...]]:
    """Layers of a matrix: its consecutive columns, by size."""
    if layers is None or layers == "model":
        return ("update",), ((0, slice(0, columns)),)
    if isinstance(layers, Mapping):
        names, sizes = tuple(map(str, layers)), tuple(layers.values())
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        sizes = tuple(layers)
        names = tuple(f"layer{i + 1}" for i in range(len(sizes)))
    else:
        raise EvenhandError(
            "layers for a matrix of updates are the sizes of its consecutive columns, e.g. layers=[800, 10] "
            "or layers={'hidden': 800, 'head': 10}"
        )
    if not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes) or sum(sizes) != columns:
        raise EvenhandError(f"layers {list(sizes)} must be positive and add up to the {columns} columns of updates")
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return names, tuple((block, slice(int(start), int(stop))) for block, (start, stop) in enumerate(edges))


def _read_stacked(stacked: Mapping[str, Any], layers: Layers) -> Updates:
    if not stacked:
        raise EvenhandError("updates is an empty mapping: a round needs at least one tensor")
    _check_names(stacked, "updates")
    tensors = {name: _tensor(value, f"updates[{name!r}]") for name, value in stacked.items()}
    counts = {name: tensor.shape[0] if tensor.ndim else -1 for name, tensor in tensors.items()}
    first, rows = next(iter(counts.items()))
    for name, count in counts.items():
        if count != rows or count < 1:
            raise EvenhandError(
                f"updates[{name!r}] has {max(count, 0)} clients on its first axis, "
                f"updates[{first!r}] has {max(rows, 0)}"
            )
    example = {name: tensor[0] for name, tensor in tensors.items()}
    numpy = isinstance(next(iter(stacked.values())), np.ndarray)
    layout = _layout(example, layers, "stacked", numpy, isinstance(stacked, OrderedDict))
    return Updates(layout, tuple(_by_row(tensors[name]) for name in layout.names), rows)


def _read_mappings(rows: Sequence[Any], layers: Layers) -> Updates:
    first = rows[0]
    _check_names(first, "updates[0]")
    example = {name: _tensor(value, f"updates[0][{name!r}]") for name, value in first.items()}
    numpy = isinstance(next(iter(first.values()), None), np.ndarray)
    layout = _layout(example, layers, "mapping", numpy, isinstance(first, OrderedDict))
    columns: list[list[Tensor]] = [[example[name]] for name in layout.names]
    for position, row in enumerate(rows[1:], start=1):
        if not isinstance(row, Mapping) or row.keys() != first.keys():
            raise EvenhandError(f"updates[{position}] {_difference(first, row)}")
        for column, name in zip(columns, layout.names, strict=True):
            where = f"updates[{position}][{name!r}]"
            tensor, expected = _tensor(row[name], where), column[0]
            for what in ("shape", "dtype", "device"):
                if getattr(tensor, what) != getattr(expected, what):
                    raise EvenhandError(
                        f"{where} has {what} {_plain(getattr(tensor, what))}, "
                        f"updates[0][{name!r}] has {_plain(getattr(expected, what))}"
                    )
            column.append(tensor)
    return Updates(layout, tuple(map(tuple, columns)), len(rows))


def _check_names(entries: Mapping[Any, Any], where: str) -> None:
    for name in entries:
        if not isinstance(name, str):
            raise EvenhandError(
                f"{where} has the key {name!r}, a {type(name).__name__}; tensors are known by name (text)"
            )


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _difference(first: Mapping[str, Any], row: Any) -> str:
    if not isinstance(row, Mapping):
        return f"is a {type(row).__name__}, updates[0] is a mapping"
    missing, extra = sorted(first.keys() - row.keys()), sorted(row.keys() - first.keys())
    said = [f"lacks {missing[:3]}"] if missing else []
    said += [f"has unknown {extra[:3]}{near_miss(extra[0], list(first))}"] if extra else []
    return " and ".join(said)


def _layout(example: Mapping[str, Tensor], layers: Layers, form: str, numpy: bool, ordered: bool) -> Layout:
    floating = {name: tensor for name, tensor in example.items() if tensor.is_floating_point()}
    if sum(tensor.numel() for tensor in floating.values()) == 0:
        raise EvenhandError("updates hold no floating-point numbers")
    floating = {name: tensor for name, tensor in floating.items() if tensor.numel()}
    group = _grouping(layers, list(floating))
    groups = [group(name) for name in floating]
    blocks = tuple(dict.fromkeys(groups))
    return Layout(
        form=form,
        names=tuple(floating),
        shapes=tuple(tuple(tensor.shape) for tensor in floating.values()),
        dtypes=tuple(tensor.dtype for tensor in floating.values()),
        blocks=blocks,
        spans=tuple(
            ((blocks.index(group), slice(0, tensor.numel())),)
            for group, tensor in zip(groups, floating.values(), strict=True)
        ),
        keys=tuple(example),
        integers={
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in example.items() if name not in floating
        },
        numpy=numpy,
        ordered=ordered,
    )


def _grouping(layers: Layers, names: list[str]) -> Callable[[str], str]:
    """From a tensor's name to its layer's: by default the module that owns it."""
    if layers is None or layers == "module":
        return lambda name: name.rpartition(".")[0] or name
    if layers == "tensor":
        return lambda name: name
    if layers == "model":
        return lambda name: "model"
    if isinstance(layers, Mapping):
        missing = [name for name in names if name not in layers]
        if missing:
            raise EvenhandError(f"layers gives no layer for {missing[0]!r}{near_miss(missing[0], list(layers))}")
        return lambda name: str(layers[name])
    if callable(layers):
        return lambda name: str(layers(name))
    raise EvenhandError(
        f"layers={layers!r} not understood; use 'module', 'tensor', 'model', "
        "a mapping tensor name -> layer, or a function"
    )


def restore(layout: Layout, flat: Sequence[Tensor]) -> Any:
    """Flat tensors back in the form, dtype and (for numpy) kind that one client's update came in."""
    shaped = {
        name: tensor.to(dtype).reshape(shape)
        for name, tensor, shape, dtype in zip(layout.names, flat, layout.shapes, layout.dtypes, strict=True)
    }
    if layout.form == "array":
        whole = shaped["update"]
        return whole.numpy() if layout.numpy else whole
    device = flat[0].device
    for name, (shape, dtype) in layout.integers.items():
        shaped[name] = torch.zeros(shape, dtype=dtype, device=device)
    entries = {key: shaped[key].numpy() if layout.numpy else shaped[key] for key in layout.keys}
    if layout.form == "sequence":
        return list(entries.values())
    return OrderedDict(entries) if layout.ordered else entries


def past_updates(like: Updates, parts: tuple[Tensor | tuple[Tensor, ...], ...], rows: int) -> Updates:
    """Remembered rows beside these updates; they may lie on another device."""
    devices = tuple(like.device_of(part) for part in range(len(like.parts)))
    return Updates(like.layout, parts, rows, devices=devices)
