"""GPU kernels for an LSTM's steps in which every row has weights of its own (Triton).

A character is one kernel forwards and one back: the product with the state, the gates and the cell together. A program
holds some units of one row with all four gates of theirs. Nothing is added up by atomics, so the same input gives the
same bits. A row that stands still gets zeros and nothing else is done for it. Rows come first everywhere; characters
follow, then samples, then units. Sizes of blocks are those found fastest on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.engine.kernels import skipping, still


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _forwards(
    driven, places, weight, gates, cells, hidden, active, step, steps, samples, driven_row, weight_row, active_row,
    UNITS: tl.constexpr, FIRST: tl.constexpr, LOOKUP: tl.constexpr, KEEP: tl.constexpr, SKIP: tl.constexpr,
    BA: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    real = (m[:, None] < samples) & (n[None, :] < UNITS)
    here = (row * steps + step) * samples + m
    own = here[:, None] * UNITS + n[None, :]
    if SKIP:
        if still(active + row * active_row, samples, BA):
            tl.store(hidden + own, tl.zeros((BM, BN), dtype=tl.float32), mask=real)
            return
    place = step * samples + m
    if LOOKUP:
        place = tl.load(places + here, mask=m < samples, other=0)
    from_below = driven + row * driven_row + place.to(tl.int64)[:, None] * (4 * UNITS) + n[None, :]
    into = tl.load(from_below, mask=real, other=0.0)
    forget = tl.load(from_below + UNITS, mask=real, other=0.0)
    candidate = tl.load(from_below + 2 * UNITS, mask=real, other=0.0)
    out = tl.load(from_below + 3 * UNITS, mask=real, other=0.0)
    if not FIRST:
        before = hidden + (here - samples)[:, None] * UNITS
        for start in range(0, UNITS, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(before + k[None, :], mask=(m[:, None] < samples) & (k[None, :] < UNITS), other=0.0)
            w = weight + row * weight_row + n[:, None] * UNITS + k[None, :]
            inside = (n[:, None] < UNITS) & (k[None, :] < UNITS)
            into = tl.dot(a, tl.trans(tl.load(w, mask=inside, other=0.0)), into, input_precision=PRECISION)
            b = tl.load(w + UNITS * UNITS, mask=inside, other=0.0)
            forget = tl.dot(a, tl.trans(b), forget, input_precision=PRECISION)
            b = tl.load(w + 2 * UNITS * UNITS, mask=inside, other=0.0)
            candidate = tl.dot(a, tl.trans(b), candidate, input_precision=PRECISION)
            b = tl.load(w + 3 * UNITS * UNITS, mask=inside, other=0.0)
            out = tl.dot(a, tl.trans(b), out, input_precision=PRECISION)
    into, forget, candidate, out = tl.sigmoid(into), tl.sigmoid(forget), _tanh(candidate), tl.sigmoid(out)
    cell = into * candidate
    if not FIRST:
        cell += forget * tl.load(cells + own - samples * UNITS, mask=real, other=0.0)
    tl.store(cells + own, cell, mask=real)
    tl.store(hidden + own, out * _tanh(cell), mask=real)
    if KEEP:
        kept = gates + here[:, None] * (4 * UNITS) + n[None, :]
        tl.store(kept, into, mask=real)
        tl.store(kept + UNITS, forget, mask=real)
        tl.store(kept + 2 * UNITS, candidate, mask=real)
        tl.store(kept + 3 * UNITS, out, mask=real)


@triton.jit
def _backwards(
    error, turned, gates, cells, pulled, active, step, steps, samples, turned_row, active_row,
    UNITS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, GIVEN: tl.constexpr, ALL: tl.constexpr,
    SKIP: tl.constexpr, BA: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gates of a character become their errors; those of the next one are by now.

    turned: weights, a unit's to all gates side by side, as matrix units want them.
    """
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    real = (m[:, None] < samples) & (n[None, :] < UNITS)
    here = (row * steps + step) * samples + m
    own = here[:, None] * UNITS + n[None, :]
    kept = gates + here[:, None] * (4 * UNITS) + n[None, :]
    if SKIP:
        if still(active + row * active_row, samples, BA):
            nothing = tl.zeros((BM, BN), dtype=tl.float32)
            tl.store(kept, nothing, mask=real)
            tl.store(kept + UNITS, nothing, mask=real)
            tl.store(kept + 2 * UNITS, nothing, mask=real)
            tl.store(kept + 3 * UNITS, nothing, mask=real)
            return
    carried = pulled + (row * samples + m)[:, None] * UNITS + n[None, :]
    down = tl.zeros((BM, BN), dtype=tl.float32)
    if GIVEN:
        if ALL:
            down = tl.load(error + own, mask=real, other=0.0)
        else:
            down = tl.load(error + (row * samples + m)[:, None] * UNITS + n[None, :], mask=real, other=0.0)
    if not LAST:
        after = gates + (here + samples)[:, None] * (4 * UNITS)
        for start in range(0, 4 * UNITS, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(after + k[None, :], mask=(m[:, None] < samples) & (k[None, :] < 4 * UNITS), other=0.0)
            w = turned + row * turned_row + n[:, None] * (4 * UNITS) + k[None, :]
            b = tl.load(w, mask=(n[:, None] < UNITS) & (k[None, :] < 4 * UNITS), other=0.0)
            down = tl.dot(a, tl.trans(b), down, input_precision=PRECISION)
    into = tl.load(kept, mask=real, other=0.0)
    forget = tl.load(kept + UNITS, mask=real, other=0.0)
    candidate = tl.load(kept + 2 * UNITS, mask=real, other=0.0)
    out = tl.load(kept + 3 * UNITS, mask=real, other=0.0)
    bent = _tanh(tl.load(cells + own, mask=real, other=0.0))
    through = down * out * (1.0 - bent * bent)
    if not LAST:
        through += tl.load(carried, mask=real, other=0.0)
    tl.store(kept, through * candidate * into * (1.0 - into), mask=real)
    if FIRST:
        tl.store(kept + UNITS, tl.zeros((BM, BN), dtype=tl.float32), mask=real)
    else:
        before = tl.load(cells + own - samples * UNITS, mask=real, other=0.0)
        tl.store(kept + UNITS, through * before * forget * (1.0 - forget), mask=real)
        tl.store(carried, through * forget, mask=real)
    tl.store(kept + 2 * UNITS, through * into * (1.0 - candidate * candidate), mask=real)
    tl.store(kept + 3 * UNITS, down * bent * out * (1.0 - out), mask=real)


def _blocks(rows: int, samples: int, units: int) -> tuple[int, bool]:
    """Samples that one program holds, and whether programs of 32 units are few for the device."""
    bm = max(16, min(64, triton.next_power_of_2(samples)))
    return bm, rows * triton.cdiv(samples, bm) * triton.cdiv(units, 32) <= 264


def forwards(
    driven: Tensor,
    places: Tensor | None,
    shape: torch.Size,
    weight: Tensor,
    *,
    active: Tensor | None = None,
    keep: bool = True,
    precision: str = "tf32",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `evenhand.engine.recurrent.forwards`."""
    rows, characters, samples = shape
    units = weight.shape[2]
    hidden, cells = driven.new_empty(*shape, units), driven.new_empty(*shape, units)
    gates = driven.new_empty(*shape, 4 * units) if keep else None
    moving, moving_row, skip = skipping(active, driven)
    bm, few = _blocks(rows, samples, units)
    bn = 16 if few else 32
    for step in range(characters):
        _forwards[(triton.cdiv(units, bn), rows, triton.cdiv(samples, bm))](
            driven, driven if places is None else places, weight, cells if gates is None else gates, cells, hidden,
            moving, step, characters, samples, driven.stride(0), weight.stride(0), moving_row,
            UNITS=units, FIRST=step == 0, LOOKUP=places is not None, KEEP=keep, **skip, PRECISION=precision,
            BM=bm, BN=bn, BK=32, num_warps=4, num_stages=3,
        )  # fmt: skip
    return hidden, cells, gates


def backwards(
    course: tuple[Tensor, Tensor, Tensor | None],
    error: Tensor,
    weight: Tensor,
    *,
    active: Tensor | None = None,
    precision: str = "tf32",
) -> Tensor:
    """As `evenhand.engine.recurrent.backwards`; the gates' errors take the gates' place."""
    hidden, cells, gates = course
    assert gates is not None
    rows, characters, samples, units = hidden.shape
    pulled, error, turned = hidden.new_empty(rows, samples, units), error.contiguous(), weight.mT.contiguous()
    moving, moving_row, skip = skipping(active, error)
    bm, few = _blocks(rows, samples, units)
    for step in reversed(range(characters)):
        last = step + 1 == characters
        _backwards[(triton.cdiv(units, 32), rows, triton.cdiv(samples, bm))](
            error, turned, gates, cells, pulled, moving, step, characters, samples, turned.stride(0), moving_row,
            UNITS=units, FIRST=step == 0, LAST=last, GIVEN=last or error.dim() == 4, ALL=error.dim() == 4,
            **skip, PRECISION=precision, BM=bm, BN=32, BK=64, num_warps=4 if few else 8, num_stages=3 if few else 4,
        )  # fmt: skip
    return gates
