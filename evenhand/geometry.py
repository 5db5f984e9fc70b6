"""Client updates as geometry: inner products per layer, and linear combinations.

A rule never sees a long vector. It sees the Gram matrix of the rows (one pass over the updates) and
answers with coefficients, which are applied in one more pass. This file holds those two passes.

Accuracy: products of float32 (or narrower) rows are formed in float32 over short stretches of columns,
with TF32 and autocast switched off, and the stretches are added up in float64; float64 rows stay float64.
The error is about 1e-7 of the two rows' lengths, and a few 1e-6 at worst, where all terms round the same way.
Rows so small or large that float32 products would under- or overflow are done again in float64.
Memory: a dense input is read in place; rows that live in separate tensors are gathered through one small
buffer. No second copy of the updates is ever made (several cohorts' products pass through a small one).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.transfer import sent, to_numpy
from evenhand.updates import Layout, Spare, Updates, columns_at_once

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

STRETCH = 512  # columns whose products are summed at once; these sums are added up in float64
PARTIALS = 1 << 20  # bytes of such sums held at once: a cache's worth
SIDE_BY_SIDE = 64 << 20  # bytes of several cohorts' rows copied at once
FEW, WIDE = 0.8, 1 << 14  # of a combination's rows, and their columns: from where on it is made row by row on a CPU
TILE = 256  # rows per tile when only the upper triangle of a large Gram matrix is computed
TINY, HUGE = 1e-28, 1e34  # squared norms outside this range are not trusted in float32


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
                width = columns_at_once(max(shape[1:]), kind)
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
        doubtful = ~((squares > TINY) & (squares < HUGE))
        sizes = [_largest(updates, block, np.flatnonzero(rows)) for block, rows in enumerate(doubtful) if rows.any()]
        # Not so for a true zero, NaN or Inf: float64 would find the same.
        if any(((found > 0.0) & (found < np.inf)).any() for found in sizes):
            own = _accumulate(updates, dtype=torch.float64).cpu().numpy()
    for place, rows in enumerate(past):
        terms = np.abs(rest[place])
        if not terms.max(initial=0.0) < HUGE or (terms.min(initial=1.0) < TINY and _underflowed(terms, updates, rows)):
            rest[place] = _accumulate(updates, rows, dtype=torch.float64).cpu().numpy()
    return own, rest


def in_range(products: Floats) -> bool:
    """Whether float32 could hold the rows' squared lengths (..., rows, rows); not so of NaN."""
    squares = np.diagonal(products, axis1=-2, axis2=-1)
    return bool(squares.min() > TINY and squares.max() < HUGE)


def _largest(updates: Updates, block: int, rows: Integers) -> Floats:
    """The largest absolute number of each of some rows in a block; a device is asked once."""
    flat = [updates.row(row) for row in rows.tolist()]
    sizes = [
        torch.stack([one[part][span].abs().amax() for one in flat]).double()
        for part, spans in enumerate(updates.layout.spans)
        for owner, span in spans
        if owner == block
    ]
    return np.maximum.reduce([found.cpu().numpy() for found in sizes])


def _underflowed(sizes: Floats, updates: Updates, past: Updates) -> bool:
    """Whether an inner product may be faint because float32 products underflowed, not because rows are orthogonal."""
    for block, faint in enumerate(sizes < TINY):
        here = _largest(updates, block, np.flatnonzero(faint.any(axis=1))) if faint.any() else np.zeros(0)
        if not here.any():
            continue
        there = _largest(past, block, np.flatnonzero(faint.any(axis=0)))
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
