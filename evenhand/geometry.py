"""Client updates as geometry: inner products per layer, and linear combinations.

A rule never sees a long vector. It sees the Gram matrix of the rows (one pass over the updates) and
answers with coefficients, which are applied in one more pass. This file holds those two passes and the
reading of whatever form the updates come in.

Accuracy: products of float32 (or narrower) rows are formed in float32 over short stretches of columns,
with TF32 and autocast switched off, and the stretches are added up in float64; float64 rows stay float64.
The error is about 1e-7 of the two rows' lengths, and a few 1e-6 at worst, where all terms round the same way.
Rows so small or large that float32 products would under- or overflow are done again in float64.
Memory: a dense input is read in place; rows that live in separate tensors are gathered through one small
buffer. No second copy of the updates is ever made (several cohorts' products pass through a small one).
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.checks import EvenhandError, near_miss

Floats = np.ndarray[Any, np.dtype[np.float64]]
Layers = str | Callable[[str], str] | Mapping[str, Any] | Sequence[Any] | None

STRETCH = 512  # columns whose products are summed at once; these sums are added up in float64
PARTIALS = 1 << 20  # bytes of such sums held at once: a cache's worth
BUFFER = 16 << 20  # bytes of the gather buffer
SIDE_BY_SIDE = 64 << 20  # bytes of several cohorts' rows copied at once
STAGED = 64 << 10  # bytes that CUDA takes from any memory at once; more only from pinned memory
FEW, WIDE = 0.8, 1 << 14  # of a combination's rows, and their columns: from where on it is made row by row on a CPU
TILE = 256  # rows per tile when only the upper triangle of a large Gram matrix is computed
TINY, HUGE = 1e-28, 1e34  # squared norms outside this range are not trusted in float32

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
            width = size if in_place else max(256, BUFFER // (max(count, 1) * dtype.itemsize))
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


# ---------------------------------------------------------------------------------------------- reading


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


# ------------------------------------------------------------------------------------------- two passes


def exact_products(updates: Updates) -> AbstractContextManager[None]:
    """Products in true float32: no TF32, no bfloat16 shortcuts, no autocast, no autograd."""
    kinds = {updates.device_of(part).type for part in range(len(updates.parts))}
    return torch.no_grad() if all(map(_is_exact, kinds)) else _made_exact(kinds)


def _backend(kind: str) -> Any:
    """Where a kind of device's precision of matrix products is set; None before torch 2.9."""
    owner: Any = torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn
    backend = getattr(owner, "matmul", None)
    return backend if hasattr(backend, "fp32_precision") else None


def _is_exact(kind: str) -> bool:
    backend = _backend(kind)
    if backend is None:
        exact = torch.get_float32_matmul_precision() == "highest"
    else:
        exact = backend.fp32_precision in ("ieee", "none")
    return exact and not torch.is_autocast_enabled(kind)


@contextmanager
def _made_exact(kinds: Collection[str]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in kinds:
            backend = _backend(kind)
            if backend is not None:
                stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                backend.fp32_precision = "ieee"
            else:  # torch before 2.9 has this switch alone
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("highest")
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _products(left: Tensor, right: Tensor, layers: Tensor | None = None) -> Tensor:
    """left @ right.T in float64, from float32 products over stretches of STRETCH columns; the rest in float64.

    With `layers` (blocks x stretches, zeros and ones) the stretches are added up per block, and the columns must be
    stretches without a rest.
    """
    width = left.shape[1]
    if width <= STRETCH and layers is None:
        return left.double() @ right.double().T
    pairs = left.shape[0], right.shape[0]
    whole = width // STRETCH
    room = PARTIALS
    if left.device.type != "cpu":  # no cache to stay in: fewer, larger pieces, yet little beside the rows themselves
        room = max(PARTIALS, min(64 * PARTIALS, left.element_size() * width * (pairs[0] + pairs[1]) // 40))
    at_once = max(1, room // (left.element_size() * pairs[0] * pairs[1]))
    total: Tensor | None = None
    for start in range(0, whole, at_once):
        count = min(at_once, whole - start)
        columns = slice(start * STRETCH, (start + count) * STRETCH)
        batches = [
            torch.unflatten(rows[:, columns], 1, (count, STRETCH)).transpose(0, 1)
            for rows in ((left,) if right is left else (left, right))
        ]
        partial = torch.bmm(batches[0], batches[-1].transpose(1, 2))
        if layers is None:
            summed = partial.sum(0, dtype=torch.float64)
        else:
            chosen = layers if count == whole else layers[:, start : start + count]
            summed = (chosen @ partial.view(count, -1).double()).view(-1, *pairs)
        total = summed if total is None else total.add_(summed)
    assert total is not None
    if whole * STRETCH < width:
        total += left[:, whole * STRETCH :].double() @ right[:, whole * STRETCH :].double().T
    return total


def _symmetric_products(rows: Tensor, layers: Tensor | None = None) -> Tensor:
    """rows @ rows.T; above TILE rows only the upper triangle of tiles is computed."""
    count = rows.shape[0]
    if count <= TILE:
        return _products(rows, rows, layers)
    shape = (count, count) if layers is None else (len(layers), count, count)
    total = torch.empty(shape, dtype=torch.float64, device=rows.device)
    tiles = torch.split(rows, TILE)
    for i, left in enumerate(tiles):
        for j, right in enumerate(tiles[i:], start=i):
            here = slice(i * TILE, i * TILE + len(left)), slice(j * TILE, j * TILE + len(right))
            total[..., here[0], here[1]] = _products(left, right, layers)
            if i != j:
                total[..., here[1], here[0]] = total[..., here[0], here[1]].mT
    return total


@lru_cache(maxsize=32)
def _layer_stretches(spans: tuple[tuple[int, int], ...], blocks: int, device: torch.device) -> Tensor | None:
    """Which stretches belong to which block (blocks x stretches), where every span is made of whole ones.

    spans: each one's block and the column where it ends.
    """
    if len(spans) == 1 or any(stop % STRETCH for _, stop in spans):
        return None
    members = torch.zeros(blocks, spans[-1][1] // STRETCH, dtype=torch.float64)
    start = 0
    for block, stop in spans:
        members[block, start // STRETCH : stop // STRETCH] = 1.0
        start = stop
    return members.to(device)


def _accumulate(left: Updates, right: Updates | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Inner products per block of left's rows with right's (with themselves when right is None)."""
    layout = left.layout
    shape = (len(layout.blocks), len(left), len(left if right is None else right))
    totals: dict[torch.device, Tensor] = {}
    spare, other = Spare(), Spare()
    with exact_products(left):
        for part, spans in enumerate(layout.spans):
            device, kind = left.device_of(part), dtype or left.compute_dtype(part)
            layers = _layer_stretches(tuple((block, span.stop) for block, span in spans), shape[0], device)
            rows, others = left.in_place(part, kind), None if right is None else right.in_place(part, kind)
            if layers is not None and rows is not None and (right is None or others is not None):
                found = _symmetric_products(rows, layers) if others is None else _products(rows, others, layers)
                totals[device] = found if device not in totals else totals[device] + found
                continue
            if device not in totals:
                totals[device] = torch.zeros(shape, dtype=torch.float64, device=device)
            for block, span in spans:
                total = totals[device][block]
                if right is None:
                    for _, rows in left.stretches(part, kind, spare, span):
                        total += _symmetric_products(rows)
                    continue
                width = max(256, BUFFER // (max(shape[1:]) * kind.itemsize))
                ours = left.stretches(part, kind, spare, span, width)
                theirs = right.stretches(part, kind, other, span, width)
                for (_, rows), (_, others) in zip(ours, theirs, strict=True):
                    total += _products(rows, others)
    found, *elsewhere = totals.values()
    for total in elsewhere:
        found = found + total.to(found.device)
    return found


def gram(updates: Updates) -> Floats:
    """K[b, i, j] = <row i, row j> over block b, float64 on the CPU; a row with NaN or Inf has such a diagonal."""
    return products(updates)[0]


def products(updates: Updates, past: Sequence[Updates] = ()) -> tuple[Floats, list[Floats]]:
    """The rows' Gram matrix per block, and their inner products with each of some sets of remembered rows."""
    return settle(updates, past, to_numpy(launch(updates, past)))


def launch(updates: Updates, past: Sequence[Updates] = (), *, own: bool = True) -> list[Tensor]:
    """The products of `products` where they are computed, which an accelerator may not have finished yet.

    own: the rows' products with each other, too.
    """
    return [*([_accumulate(updates)] if own else []), *(_accumulate(updates, rows) for rows in past)]


def settle(updates: Updates, past: Sequence[Updates], found: Sequence[Floats]) -> tuple[Floats, list[Floats]]:
    """What was launched, once it is on the CPU; anew in float64 where float32 products under- or overflowed."""
    own, *rest = found
    if all(dtype == torch.float64 for dtype in updates.layout.dtypes):
        return own, rest
    if not in_range(own):
        squares = np.diagonal(own, axis1=1, axis2=2)
        doubtful = np.argwhere(~((squares > TINY) & (squares < HUGE)))
        # Not so for a true zero, NaN or Inf: float64 would find the same.
        if any(0.0 < _largest(updates, block, row) < np.inf for block, row in doubtful):
            own = _accumulate(updates, dtype=torch.float64).cpu().numpy()
    for place, rows in enumerate(past):
        sizes = np.abs(rest[place])
        if not sizes.max(initial=0.0) < HUGE or (sizes.min(initial=1.0) < TINY and _underflowed(sizes, updates, rows)):
            rest[place] = _accumulate(updates, rows, dtype=torch.float64).cpu().numpy()
    return own, rest


def in_range(products: Floats) -> bool:
    """Whether float32 could hold the rows' squared lengths (..., rows, rows); not so of NaN."""
    squares = np.diagonal(products, axis1=-2, axis2=-1)
    return bool(squares.min() > TINY and squares.max() < HUGE)


def to_numpy(found: Sequence[Tensor]) -> list[Floats]:
    """Float64 tensors on the CPU, from another device in one transfer."""
    if len(found) == 1 or found[0].device.type == "cpu":
        return [tensor.cpu().numpy() for tensor in found]
    return Awaited(found).numpy()


def sent(numbers: np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for what it is doing."""
    return moved(torch.from_numpy(numbers).to(dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for what it is doing."""
    if device.type == "cuda" and tensor.nbytes > STAGED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_places: dict[int, list[Tensor]] = {}  # of so many numbers in pinned memory, which is slow to come by: those not in use


class Awaited:
    """A copy of float64 tensors on its way to the CPU, in one transfer; what is launched later is not waited for."""

    def __init__(self, found: Sequence[Tensor], shapes: Sequence[tuple[int, ...]] | None = None) -> None:
        """shapes: into what they are taken apart, end to end, where not into the tensors given."""
        self._shapes = [tuple(tensor.shape) for tensor in found] if shapes is None else shapes
        flat = [tensor.reshape(-1) for tensor in found]
        self._joined = torch.cat(flat) if len(flat) > 1 or not flat[0].is_cuda else flat[0]
        self._arrived: Any = None
        if self._joined.is_cuda:
            there, free = self._joined, _places.setdefault(len(self._joined), [])
            self._joined = free.pop() if free else torch.empty(len(there), dtype=torch.float64, pin_memory=True)
            self._joined.copy_(there, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(there.device))

    def numpy(self) -> list[Floats]:
        joined = self._read
        edges = itertools.pairwise(itertools.accumulate(map(math.prod, self._shapes), initial=0))
        return [joined[a:b].reshape(shape) for (a, b), shape in zip(edges, self._shapes, strict=True)]

    @cached_property
    def _read(self) -> Floats:
        """All numbers; their place is free for others then."""
        if self._arrived is None:
            return self._joined.cpu().numpy()
        self._arrived.synchronize()
        found = self._joined.numpy().copy()
        _places[len(found)].append(self._joined)
        del self._joined
        return found


def _largest(updates: Updates, block: int, row: int) -> float:
    """The largest absolute number of a row in a block."""
    flat = updates.row(row)
    sizes = [
        float(flat[part][span].abs().max())
        for part, spans in enumerate(updates.layout.spans)
        for owner, span in spans
        if owner == block
    ]
    return float(np.max(sizes))


def _underflowed(sizes: Floats, updates: Updates, past: Updates) -> bool:
    """Whether an inner product may be faint because float32 products underflowed, not because rows are orthogonal."""
    for block, faint in enumerate(sizes < TINY):
        here = np.array([_largest(updates, block, row) for row in np.flatnonzero(faint.any(axis=1)).tolist()])
        if not here.any():
            continue
        there = np.array([_largest(past, block, row) for row in np.flatnonzero(faint.any(axis=0)).tolist()])
        terms = np.outer(here, there)
        if ((terms > 0.0) & (terms < 0.01 * TINY)).any():
            return True
    return False


def combine(
    coefficients: Floats,
    updates: Updates,
    past: Sequence[tuple[Updates, Floats]] = (),
    *,
    precise: bool = False,
    own: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The rows' linear combination, one flat tensor per entry; coefficients are blocks x rows.

    `past` are remembered rows with coefficients of their own. `precise` accumulates in float64, for combinations whose
    terms nearly cancel. own: the combination without the past, where it is there already; the past is added in place.
    """
    if own is not None and not past:
        return list(own)
    layout = updates.layout
    sources = [*past] if own is not None else [(updates, coefficients), *past]
    alike = all((scales == scales[:1]).all() for _, scales in sources)  # one combination for the whole model
    combined, spare = [], Spare()
    placed: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # the coefficients where they are needed
    with exact_products(updates):
        for part, spans in enumerate(layout.spans):
            kind = torch.float64 if precise else updates.compute_dtype(part)
            device, size = updates.device_of(part), layout.sizes[part]
            if (kind, device) not in placed:
                placed[kind, device] = [sent(scales[:1] if alike else scales, kind, device) for _, scales in sources]
            out: Tensor | None = None if own is None else own[part]
            for (source, scales), weights in zip(sources, placed[kind, device], strict=True):
                for block, span in [(0, slice(0, size))] if alike else spans:
                    few = _few(scales[block], span, device)
                    for columns, rows in source.stretches(part, kind, spare, span):
                        if out is None and few is None and columns == slice(0, size):
                            out = torch.mv(rows.T, weights[block])
                            continue
                        if out is None:
                            out = torch.zeros(size, dtype=kind, device=device)
                        if few is None:
                            out[columns].addmv_(rows.T, weights[block])
                            continue
                        for row in few:
                            out[columns].add_(rows[row], alpha=float(scales[block, row]))
            assert out is not None
            combined.append(out)
    return combined


def _few(scales: Floats, span: slice, device: torch.device) -> list[int] | None:
    """The rows that count, where it is less work to read them alone."""
    if device.type != "cpu" or span.stop - span.start < WIDE or np.count_nonzero(scales) > FEW * len(scales):
        return None
    return np.flatnonzero(scales).tolist()


# Several cohorts' rows in one matrix, as many of each, one cohort after another: one launch in place of many.


def products_within(rows: Tensor, layout: Layout, cohorts: int) -> Tensor:
    """The Gram matrices of several cohorts (cohorts x blocks x rows x rows); layers must be whole stretches of columns.

    The rows pass through a copy, as many columns at a time as keep it small.
    """
    members = _members(layout, rows.device)
    count, stretches = len(rows) // cohorts, rows.shape[1] // STRETCH
    apart = rows.view(cohorts, count, stretches, STRETCH).transpose(1, 2)
    at_once = max(1, SIDE_BY_SIDE // (rows.element_size() * len(rows) * STRETCH))
    total = torch.zeros(cohorts, len(members), count * count, dtype=torch.float64, device=rows.device)
    with exact_products(Updates(layout, (rows,), len(rows))):
        for start in range(0, stretches, at_once):
            part = slice(start, start + at_once)
            dense = apart[:, part].reshape(-1, count, STRETCH)
            partial = torch.bmm(dense, dense.transpose(1, 2)).view(cohorts, -1, count * count)
            total += members[:, part] @ partial.double()
    return total.view(cohorts, -1, count, count)


def summed(shares: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """Each cohort's sum by shares that are on the device already (cohorts x rows), as `combine` would find it."""
    with exact_products(Updates(layout, (rows,), len(rows))):
        if len(shares) == 1:
            return torch.mv(rows.T, shares[0]).unsqueeze(0)
        return torch.bmm(shares.unsqueeze(1), rows.view(len(shares), -1, rows.shape[1])).squeeze(1)


def combine_within(coefficients: Floats, rows: Tensor, layout: Layout) -> Tensor:
    """Each cohort's linear combination (cohorts x columns); coefficients are cohorts x blocks x rows."""
    if (coefficients == coefficients[:, :1]).all():
        return summed(sent(coefficients[:, 0], rows.dtype, rows.device), rows, layout)
    apart = rows.view(len(coefficients), -1, rows.shape[1])
    scales = sent(coefficients, rows.dtype, rows.device)
    with exact_products(Updates(layout, (rows,), len(rows))):
        parts = [torch.bmm(scales[:, block : block + 1], apart[:, :, span]) for block, span in layout.spans[0]]
        return torch.cat(parts, dim=2).squeeze(1)


def _members(layout: Layout, device: torch.device) -> Tensor:
    """Which stretches belong to which layer, of one matrix of updates."""
    spans = tuple((block, span.stop) for block, span in layout.spans[0])
    found = _layer_stretches(spans, len(layout.blocks), device)
    return torch.ones(1, spans[-1][1] // STRETCH, dtype=torch.float64, device=device) if found is None else found


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
