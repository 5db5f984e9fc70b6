"""GPU kernels for convolutions in which every row has filters of its own (Triton), each followed by 2x2 max-pooling.

A library's convolutions know no row. Here a layer is one kernel forwards, in which pooling, bias and ReLU happen where
the sums are formed, and backwards one for the gradients' shares, one that adds these up and takes them off the filters,
and one for the error below. Nothing is added up by atomics. Images and errors are in float16 (or float32), sums and
weights in float32.

Rows come first everywhere; images have their channels last. Of the four places that are pooled together the winner (0
to 3; 4 where ReLU cut it off) is kept in a byte. Of images that are padding, behind the last one that counts, the
outcome is zero, and nothing else is looked at. With many channels a filter is gone through place by place; with few,
as in a first layer, all that four places see is read once, as a patch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.engine.kernels import fit, reach, skipping


@triton.jit
def _put_out(
    largest, which, out, winner, row, p, o, places, known, OUT: tl.constexpr, RELU: tl.constexpr, SKIP: tl.constexpr
):
    """The outcome at some of a row's pooled places (p), of some outputs (o), and which of four won there.

    Behind the known places come those of padding.
    """
    if SKIP:
        largest = tl.where(p[:, None] < known, largest, 0.0)
    if RELU:
        which = tl.where(largest > 0.0, which, 4)
        largest = tl.maximum(largest, 0.0)
    there = row * places * OUT + p[:, None] * OUT + o[None, :]
    real = (p[:, None] < places) & (o[None, :] < OUT)
    tl.store(out + there, largest, mask=real)
    tl.store(winner + there, which.to(tl.uint8), mask=real)


@triton.jit
def _convolve(
    x, weight, bias, out, winner, active, images, bias_row, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Places in fours that are pooled together; weight is rows x OUT x (SIZE * SIZE * C), and C whole BKs."""
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    PARTS: tl.constexpr = C // BK
    row = tl.program_id(1).to(tl.int64)
    known, steps = images, SIZE * SIZE * PARTS
    if SKIP:
        known = reach(active + row * active_row, images, BA)
        steps = tl.where(tl.program_id(0) * (BM // 4) < known * (HP * WP), steps, 0)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    place = m // 4
    image, y, c = place // (HP * WP), 2 * ((place // WP) % HP) + (m % 4) // 2 - PAD, 2 * (place % WP) + m % 2 - PAD
    own, base = x + row * images * (H * W * C), image * (H * W * C) + y * (W * C) + c * C
    o, lane = tl.arange(0, BN), tl.arange(0, BK)
    filters = weight + row * (SIZE * SIZE * C * OUT) + o[:, None] * (SIZE * SIZE * C) + lane[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, steps):
        tap, part = step // PARTS, step % PARTS
        i, j = tap // SIZE, tap % SIZE
        real = image < known
        if PAD > 0:
            real = real & (y + i >= 0) & (y + i < H) & (c + j >= 0) & (c + j < W)
        first = base + ((i * W + j) * C + part * BK)
        a = tl.load(own + first[:, None] + lane[None, :], mask=real[:, None], other=0.0)
        b = tl.load(filters + step * BK, mask=o[:, None] < OUT, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    largest, which = tl.max(tl.reshape(total, (BM // 4, 4, BN)), axis=1, return_indices=True)
    largest += tl.load(bias + row * bias_row + o, mask=o < OUT, other=0.0)[None, :]
    p = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    _put_out(largest, which, out, winner, row, p, o, images * HP * WP, known * HP * WP, OUT, RELU, SKIP)


@triton.jit
def _patch(
    x, p, start, images,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    BK: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """What the four places that are pooled together at p see, all of it once: (SIZE + 1) x (SIZE + 1) x C numbers.

    Behind them comes a one, then zeros; of all these BK from `start` on. PAIRED: x are pairs of float16 numbers.
    """
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    EACH: tl.constexpr = 2 if PAIRED else 1
    ACROSS: tl.constexpr = (SIZE + 1) * C // EACH
    k = start // EACH + tl.arange(0, BK // EACH)
    image, y, c = p // (HP * WP), 2 * ((p // WP) % HP) - PAD, 2 * (p % WP) - PAD
    i, j = k // ACROSS, k % ACROSS
    inside = image[:, None] < images
    real = inside & (k[None, :] < (SIZE + 1) * ACROSS)
    if PAD > 0:
        down, along = y[:, None] + i[None, :], c[:, None] + (EACH * j // C)[None, :]
        real = real & (down >= 0) & (down < H) & (along >= 0) & (along < W)
    place = (image * (H * W * C) + y * (W * C) + c * C) // EACH
    seen = tl.load(x + place[:, None] + (i * (W * C // EACH) + j)[None, :], mask=real, other=0)
    behind = inside & (k[None, :] == (SIZE + 1) * ACROSS)
    if PAIRED:
        seen = tl.where(behind, 0x3C00, seen)  # one and zero in float16
        first = (seen & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        second = ((seen >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        found = tl.reshape(tl.join(first, second), (p.shape[0], BK))
    else:
        found = tl.where(behind, 1.0, seen).to(x.dtype.element_ty)
    return found


@triton.jit
def _filter_part(filters, quarter, o, k, OUT: tl.constexpr, ALL: tl.constexpr):
    """Some numbers (k) of the filters at one of four places in a patch, ready to be multiplied by patches."""
    there = filters + quarter * (OUT * ALL) + o[:, None] * ALL + k[None, :]
    return tl.trans(tl.load(there, mask=o[:, None] < OUT, other=0.0))


@triton.jit
def _convolve_patches(
    x, weight, bias, out, winner, active, images, bias_row, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ALL: tl.constexpr, BLOCKS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """As `_convolve`, by patches: weight is rows x 4 x OUT x ALL, a filter for each of four places in its patch."""
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    row = tl.program_id(1).to(tl.int64)
    begin, known, blocks = tl.program_id(0) * (BLOCKS * BM), images, BLOCKS
    if SKIP:
        known = reach(active + row * active_row, images, BA)
        blocks = tl.minimum(tl.maximum(tl.cdiv(known * (HP * WP) - begin, BM), 0), BLOCKS)
    o, k = tl.arange(0, BN), tl.arange(0, BK)
    own, filters = x + row * images * (H * W * C // (2 if PAIRED else 1)), weight + row * (4 * OUT * ALL)
    # The first parts of the filters, most often all there is, are read once for all blocks of places.
    b0, b1 = _filter_part(filters, 0, o, k, OUT, ALL), _filter_part(filters, 1, o, k, OUT, ALL)
    b2, b3 = _filter_part(filters, 2, o, k, OUT, ALL), _filter_part(filters, 3, o, k, OUT, ALL)
    shift = tl.load(bias + row * bias_row + o, mask=o < OUT, other=0.0)[None, :]
    a = _patch(own, begin + tl.arange(0, BM), 0, known, H, W, C, SIZE, PAD, BK, PAIRED)
    for block in tl.range(blocks, num_stages=1):
        p = begin + block * BM + tl.arange(0, BM)
        ahead = _patch(own, p + BM, 0, known, H, W, C, SIZE, PAD, BK, PAIRED)  # on its way while this one is multiplied
        one = tl.dot(a, b0, input_precision=PRECISION)
        two = tl.dot(a, b1, input_precision=PRECISION)
        three = tl.dot(a, b2, input_precision=PRECISION)
        four = tl.dot(a, b3, input_precision=PRECISION)
        for start in range(BK, ALL, BK):
            a = _patch(own, p, start, known, H, W, C, SIZE, PAD, BK, PAIRED)
            one = tl.dot(a, _filter_part(filters, 0, o, start + k, OUT, ALL), one, input_precision=PRECISION)
            two = tl.dot(a, _filter_part(filters, 1, o, start + k, OUT, ALL), two, input_precision=PRECISION)
            three = tl.dot(a, _filter_part(filters, 2, o, start + k, OUT, ALL), three, input_precision=PRECISION)
            four = tl.dot(a, _filter_part(filters, 3, o, start + k, OUT, ALL), four, input_precision=PRECISION)
        upper, lower = tl.maximum(one, two), tl.maximum(three, four)
        which = tl.where(upper >= lower, tl.where(one >= two, 0, 1), tl.where(three >= four, 2, 3))
        largest = tl.maximum(upper, lower) + shift  # of equal ones the first wins
        _put_out(largest, which, out, winner, row, p, o, images * HP * WP, known * HP * WP, OUT, RELU, SKIP)
        a = ahead
    if SKIP:
        for block in range(blocks, BLOCKS):
            p = begin + block * BM + tl.arange(0, BM)
            none = tl.zeros((BM, BN), dtype=tl.float32)
            _put_out(none, none.to(tl.int32), out, winner, row, p, o, images * HP * WP, 0, OUT, RELU, SKIP)


@triton.jit
def _errors(errors, winners, p, o, end, OUT: tl.constexpr):
    """Errors at some pooled places (p) before `end`, of some outputs, and which of four places won there."""
    inside = (p[:, None] < end) & (o[None, :] < OUT)
    there = p[:, None] * OUT + o[None, :]
    return tl.load(errors + there, mask=inside, other=0.0), tl.load(winners + there, mask=inside, other=4)


@triton.jit
def _unpooled(e, won):
    """Pooled places x (4 x outputs, the four places of an output side by side): the error at the place that won."""
    zero = tl.zeros_like(e)
    even = tl.join(tl.where(won == 0, e, zero), tl.where(won == 2, e, zero))
    odd = tl.join(tl.where(won == 1, e, zero), tl.where(won == 3, e, zero))
    return tl.reshape(tl.join(even, odd), (e.shape[0], 4 * e.shape[1]))


@triton.jit
def _patches_back(
    x, error, winner, out, active, images, rows, share, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """Gradients of the filters of patches over one share of the places (shares x rows x 4 x OUT x ALL).

    Of the one behind a patch it is the bias's. The error is that after pooling.
    """
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    row = tl.program_id(1).to(tl.int64)
    piece, column = tl.program_id(2), tl.program_id(0) * BK
    o = tl.arange(0, BN)
    own = x + row * images * (H * W * C // (2 if PAIRED else 1))
    errors, winners = error + row * images * (HP * WP * OUT), winner + row * images * (HP * WP * OUT)
    total = tl.zeros((4 * BN, BK), dtype=tl.float32)
    known = images
    if SKIP:
        known = reach(active + row * active_row, images, BA)
    end = tl.minimum(piece * share + share, known * (HP * WP))
    p = piece * share + tl.arange(0, BM)
    e, won = _errors(errors, winners, p, o, end, OUT)
    a = _patch(own, p, column, known, H, W, C, SIZE, PAD, BK, PAIRED)
    for start in tl.range(piece * share, end, BM, num_stages=1):
        p = start + BM + tl.arange(0, BM)
        e_ahead, won_ahead = _errors(errors, winners, p, o, end, OUT)  # on their way while these are multiplied
        a_ahead = _patch(own, p, column, known, H, W, C, SIZE, PAD, BK, PAIRED)
        total = tl.dot(tl.trans(_unpooled(e, won)), a, total, input_precision=PRECISION)
        e, won, a = e_ahead, won_ahead, a_ahead
    m = tl.arange(0, 4 * BN)
    place = ((piece * rows + row) * 4 + m % 4) * OUT + m // 4
    k = column + tl.arange(0, BK)
    tl.store(out + place[:, None] * ALL + k[None, :], total, mask=(m // 4 < OUT)[:, None])


@triton.jit
def _filters_back(
    x, error, bias_out, out, active, images, rows, share, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of filters (shares x rows x OUT x (SIZE * SIZE * C)) and biases over one share of the places.

    The error is that before pooling.
    """
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    ALL: tl.constexpr = SIZE * SIZE * C
    EACH: tl.constexpr = 4 * HP * WP  # places of an image
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    k, o = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BN)
    i, j = k // (SIZE * C), k % (SIZE * C)
    own, errors = x + row * images * (H * W * C), error + row * images * (EACH * OUT)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    known = images
    if SKIP:
        known = reach(active + row * active_row, images, BA)
    end = tl.minimum(piece * share + share, known * EACH)
    for start in range(piece * share, end, BM):
        m = start + tl.arange(0, BM)
        image, y, c = m // EACH, (m // (2 * WP)) % (2 * HP) - PAD, m % (2 * WP) - PAD
        inside = m[:, None] < known * EACH
        e = tl.load(errors + m[:, None] * OUT + o[None, :], mask=inside & (o[None, :] < OUT), other=0.0)
        real = inside & (k[None, :] < ALL)
        if PAD > 0:
            down, along = y[:, None] + i[None, :], c[:, None] + (j // C)[None, :]
            real = real & (down >= 0) & (down < H) & (along >= 0) & (along < W)
        place = image * (H * W * C) + y * (W * C) + c * C
        a = tl.load(own + place[:, None] + (i * (W * C) + j)[None, :], mask=real, other=0.0)
        total = tl.dot(tl.trans(e), a, total, input_precision=PRECISION)
    place = (piece * rows + row) * OUT + o
    tl.store(out + place[:, None] * ALL + k[None, :], total, mask=(o[:, None] < OUT) & (k[None, :] < ALL))
    if tl.program_id(0) == 0:  # in a loop of its own: Triton 3.6 reads an error that the next one has overwritten
        summed = tl.zeros((BN,), dtype=tl.float32)
        for start in range(piece * share, end, BM):
            m = start + tl.arange(0, BM)
            inside = (m[:, None] < known * EACH) & (o[None, :] < OUT)
            e = tl.load(errors + m[:, None] * OUT + o[None, :], mask=inside, other=0.0)
            summed += tl.sum(e.to(tl.float32), axis=0)
        tl.store(bias_out + place, summed, mask=o < OUT)


@triton.jit
def _unpool(
    error, winner, out, images, HP: tl.constexpr, WP: tl.constexpr, OUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The error before pooling: what it is after it at the place that won, nothing at the other three."""
    row = tl.program_id(1).to(tl.int64)
    m, o = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    image, y, c = m // (HP * WP), (m // WP) % HP, m % WP
    here = row * images * (HP * WP * OUT) + m[:, None] * OUT + o[None, :]
    real = (image[:, None] < images) & (o[None, :] < OUT)
    e = tl.load(error + here, mask=real, other=0.0)
    won = tl.load(winner + here, mask=real, other=4)
    for quarter in tl.static_range(4):
        there = (image * (2 * HP) + 2 * y + quarter // 2) * (2 * WP) + 2 * c + quarter % 2
        start = out + row * images * (4 * HP * WP * OUT)
        tl.store(start + there[:, None] * OUT + o[None, :], tl.where(won == quarter, e, 0.0), mask=real)


@triton.jit
def _images_back(
    error, weight, out, active, images, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The error at a convolution's input, of that before pooling; weight is rows x OUT x (SIZE * SIZE * C).

    Places go line by line through all images, so that only those lines of a filter are looked at which reach them.
    """
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    PARTS: tl.constexpr = (OUT + BK - 1) // BK
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * BM
    m = begin + tl.arange(0, BM)
    y, image, c = m // (images * W) + PAD, (m // W) % images, m % W + PAD
    known = images
    if SKIP:
        known = reach(active + row * active_row, images, BA)
        if tl.min(image) >= known:
            return
    own, base = error + row * images * (4 * HP * WP * OUT), ((image * (2 * HP) + y) * (2 * WP) + c) * OUT
    channel, lane = tl.arange(0, BN), tl.arange(0, BK)
    filters = weight + row * (SIZE * SIZE * C * OUT) + lane[:, None] * (SIZE * SIZE * C) + channel[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    last = tl.minimum((begin + BM - 1) // (images * W), H - 1) + PAD
    low, high = tl.maximum(begin // (images * W) + PAD - (2 * HP - 1), 0), tl.minimum(last, SIZE - 1)
    for step in range(low * (SIZE * PARTS), (high + 1) * (SIZE * PARTS)):
        tap, part = step // PARTS, step % PARTS
        i, j = tap // SIZE, tap % SIZE
        real = (m < images * (H * W)) & (y >= i) & (y - i < 2 * HP) & (c >= j) & (c - j < 2 * WP)
        if SKIP:
            real = real & (image < known)
        output = part * BK + lane < OUT
        first = base - (i * (2 * WP) + j) * OUT + part * BK
        e = tl.load(own + first[:, None] + lane[None, :], mask=real[:, None] & output[None, :], other=0.0)
        b = tl.load(
            filters + part * (BK * SIZE * SIZE * C) + tap * C,
            mask=output[:, None] & (channel[None, :] < C), other=0.0,
        )  # fmt: skip
        total = tl.dot(e, b, total, input_precision=PRECISION)
    there = row * images * (H * W * C) + ((image * H + y - PAD) * W + c - PAD) * C
    shown = (m[:, None] < images * (H * W)) & (channel[None, :] < C)
    tl.store(out + there[:, None] + channel[None, :], total, mask=shown)


@triton.jit
def _settle(
    found, summed, scale, weight, bias, weight_out, bias_out, pieces, rows,
    weight_row, bias_row, weight_out_row, bias_out_row,
    C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PATCHED: tl.constexpr, ALL: tl.constexpr,
    STEP: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Shares of one filter's gradient and its bias's added up and brought to scale; with STEP, taken off the filter."""
    row, o = tl.program_id(1).to(tl.int64), tl.program_id(0)
    tap, c = tl.arange(0, BT), tl.arange(0, BC)
    i, j = tap // SIZE, tap % SIZE
    real = (tap[:, None] < SIZE * SIZE) & (c[None, :] < C)
    total = tl.zeros((BT, BC), dtype=tl.float32)
    lean = 0.0
    for piece in range(pieces):
        if PATCHED:
            for quarter in tl.static_range(4):
                here = found + (((piece * rows + row) * 4 + quarter) * OUT + o) * ALL
                place = ((i + quarter // 2) * (SIZE + 1) + j + quarter % 2) * C
                total += tl.load(here + place[:, None] + c[None, :], mask=real, other=0.0)
                lean += tl.load(here + (SIZE + 1) * (SIZE + 1) * C)
        else:
            here = found + ((piece * rows + row) * OUT + o) * ALL
            total += tl.load(here + tap[:, None] * C + c[None, :], mask=real, other=0.0)
            lean += tl.load(summed + (piece * rows + row) * OUT + o)
    factor = tl.load(scale + row)
    place = o * (C * SIZE * SIZE) + c[:, None] * (SIZE * SIZE) + tap[None, :]
    change, shown = tl.trans(total) * factor, (tap[None, :] < SIZE * SIZE) & (c[:, None] < C)
    lean = lean * factor
    if STEP:
        change = tl.load(weight + row * weight_row + place, mask=shown, other=0.0) - change
        lean = tl.load(bias + row * bias_row + o) - lean
    tl.store(weight_out + row * weight_out_row + place, change, mask=shown)
    tl.store(bias_out + row * bias_out_row + o, lean)


class Kept(NamedTuple):
    """What a convolution's way back needs of its way forward."""

    images: Tensor
    winner: Tensor
    filters: Tensor  # in the images' format, laid out for the kernels


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    padding: int,
    relu: bool,
    precision: str,
    stored: torch.dtype | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Kept]:
    """Convolution, bias, pooling and ReLU of every row's images (rows x images x H x W x C).

    Filters are read in the images' format; the outcome is in that, too, where none is given to be `stored` in.
    """
    rows, images, height, width, channels = x.shape
    outputs, size = weight.shape[1], weight.shape[-1]
    high, wide = ((side + 2 * padding - size + 1) // 2 for side in (height, width))
    out = x.new_empty(rows, images, high, wide, outputs, dtype=stored)
    winner = torch.empty_like(out, dtype=torch.uint8)
    filters = laid_out(weight.permute(0, 1, 3, 4, 2), x.dtype)
    moving, moving_row, skip = skipping(active, x)
    given = (bias, out, winner, moving, images, bias.stride(0), moving_row)
    sizes = {"H": height, "W": width, "C": channels, "OUT": outputs, "SIZE": size, "PAD": padding}
    how = {**skip, **sizes, "RELU": relu, "PRECISION": precision, "BN": fit(outputs), "num_warps": 4}
    if _is_wide(channels):
        _convolve[(triton.cdiv(4 * images * high * wide, 128), rows)](
            x, filters, *given, **how, BM=128, BK=_part(channels, x), num_stages=3
        )
    else:
        bk, columns = _patch_columns(size, channels)
        placed = filters.new_zeros(rows, 4, outputs, columns)
        for view in _quarters(placed, size, channels):
            view.copy_(filters)
        blocks = triton.cdiv(images * high * wide, 64)
        each = max(1, min(16, rows * blocks // 700))  # at least two programs for every place on a GPU
        seen, paired = _pairs(x, size, padding)
        _convolve_patches[(triton.cdiv(blocks, each), rows)](
            seen, placed, *given, **how | {"num_warps": 8},
            BM=64, BK=bk, ALL=columns, BLOCKS=each, PAIRED=paired, num_stages=1,
        )  # fmt: skip
    return out, Kept(x, winner, filters)


def convolution_back(
    error: Tensor,
    kept: Kept,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    step: bool,
    below: bool,
    padding: int,
    precision: str,
    active: Tensor | None = None,
) -> Tensor | None:
    """A convolution's gradients, or with `step` its filters and biases less these, are put out.

    error: that of the outcome, in the images' format, of which each row's is to be multiplied by its `scale`. Returned
    is, where it is wanted, the error at the images, to the same scale.
    """
    x = kept.images
    rows, images, height, width, channels = x.shape
    outputs, size = weight.shape[1], weight.shape[-1]
    wide = _is_wide(channels)
    moving, moving_row, skip = skipping(active, x)
    sizes = {"H": height, "W": width, "C": channels, "OUT": outputs, "SIZE": size, "PAD": padding}
    how = {**skip, **sizes, "PRECISION": precision}
    spread = before_pooling(error, kept.winner) if below or wide else error
    bm, (bk, columns) = 64, (128, size * size * channels) if wide else _patch_columns(size, channels)
    blocks, places = triton.cdiv(columns, bk), (spread if wide else error)[0, ..., 0].numel()
    # Sums over places are shared out among as many programs as a GPU has room for; shares are added up afterwards.
    if wide:
        pieces = max(1, min(triton.cdiv(1584, rows * blocks), 8, places // (8 * bm)))
    else:
        pieces = _pieces(rows * blocks, places, max(1, min(26, places // (8 * bm))))
    share = triton.cdiv(triton.cdiv(places, pieces), bm) * bm
    found = x.new_empty(pieces, rows, 1 if wide else 4, outputs, columns, dtype=torch.float32)
    summed = found.new_empty(pieces, rows, outputs)
    given, grid = (found, moving, images, rows, share, moving_row), (blocks, rows, pieces)
    if wide:
        _filters_back[grid](x, spread, summed, *given, **how, BM=bm, BN=fit(outputs), BK=bk, num_warps=4, num_stages=3)
    else:
        seen, paired = _pairs(x, size, padding)
        _patches_back[grid](
            seen, error, kept.winner, *given, **how,
            BM=bm, BN=fit(outputs), BK=bk, ALL=columns, PAIRED=paired, num_warps=8, num_stages=1,
        )  # fmt: skip
    down = torch.empty_like(x) if below else None
    if down is not None:
        _images_back[(triton.cdiv(images * height * width, 128), rows)](
            spread, kept.filters, down, moving, images, moving_row,
            **how, BM=128, BN=fit(channels), BK=_part(outputs, x), num_warps=4, num_stages=3,
        )  # fmt: skip
    _settle[(outputs, rows)](
        found, summed, scale, weight, bias, weight_out, bias_out, pieces, rows,
        weight.stride(0), bias.stride(0), weight_out.stride(0), bias_out.stride(0),
        C=channels, OUT=outputs, SIZE=size, PATCHED=not wide, ALL=columns, STEP=step,
        BC=triton.next_power_of_2(channels), BT=triton.next_power_of_2(size * size), num_warps=4,
    )  # fmt: skip
    return down


def before_pooling(error: Tensor, winner: Tensor) -> Tensor:
    """The error before pooling (rows x images x H x W x outputs)."""
    rows, images, high, wide, outputs = error.shape
    out = error.new_empty(rows, images, 2 * high, 2 * wide, outputs)
    _unpool[(triton.cdiv(images * high * wide, 32), rows)](
        error, winner, out, images, HP=high, WP=wide, OUT=outputs, BM=32, BN=fit(outputs), num_warps=4
    )
    return out


def laid_out(view: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in the order in which they are shown, by one copy."""
    return view.new_empty(view.shape, dtype=dtype).copy_(view)


def _is_wide(channels: int) -> bool:
    """Whether channels fill the reads of a kernel that goes through a filter place by place."""
    return channels % 16 == 0


def _part(channels: int, like: Tensor) -> int:
    """How many channels are read at once: 64, 32 or 16, and 128 bytes at most."""
    return min(128 // like.element_size(), 64 if channels % 64 == 0 else 32 if channels % 32 == 0 else 16)


def _patch_columns(size: int, channels: int) -> tuple[int, int]:
    """How many of a patch's numbers are read at once, and how many there are: whole such parts, with room for a one."""
    count = (size + 1) ** 2 * channels + 1
    at_once = fit(count)
    return at_once, -(-count // at_once) * at_once


def _pairs(x: Tensor, size: int, padding: int) -> tuple[Tensor, bool]:
    """Images as pairs of numbers, which are read at once where no pair of a patch's is half inside and half outside."""
    width, channels = x.shape[3:]
    even = padding % 2 == 0 and (width * channels) % 2 == 0 and ((size + 1) * channels) % 2 == 0
    if x.dtype != torch.float16 or not even:
        return x, False
    return x.flatten().view(torch.int32), True


def _pieces(programs: int, places: int, most: int) -> int:
    """Into how many shares sums are cut: all of an H200's multiprocessors busy to the end, and little to add up."""
    return min(
        range(1, most + 1), key=lambda count: -(-programs * count // 132) / count + 2 * programs * count / places
    )


def _quarters(patches: Tensor, size: int, channels: int) -> list[Tensor]:
    """Filters at the four places in a patch (of rows x 4 x outputs x columns), in the order of `Kept.filters`."""
    side = size + 1
    whole = patches[..., : side * side * channels].unflatten(-1, (side, side, channels))
    return [whole[:, 2 * i + j, :, i : i + size, j : j + size] for i in range(2) for j in range(2)]
