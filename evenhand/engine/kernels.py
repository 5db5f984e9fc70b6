"""GPU kernels for local training in which every row has weights of its own (Triton).

A library's batched products need a launch for every product, bias, ReLU and update, and its convolutions know no row.
Here a layer is one kernel forwards and two backwards, one for the error below and one for the gradient, which it takes
off the weights; the last layer's scores, their error and the error below are one. Pooling, bias and ReLU happen where
the sums of a convolution are formed. Nothing is added up by atomics, so the same input gives the same bits. A row that
stands still at a step is not even looked at. Sizes of blocks are those found fastest on an H200.

Rows come first everywhere; weights are views of the rows' flat parameters. Images have their channels last. A
convolution is followed by 2x2 max-pooling, whose winner (0 to 3; 4 where ReLU cut it off) is kept in a byte.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

WIDEST = 128  # samples, and channels, that one program holds at once


@triton.jit
def still(weights, samples, BA: tl.constexpr):
    """Whether none of a row's samples counts in this step."""
    sample = tl.arange(0, BA)
    return tl.max(tl.load(weights + sample, mask=sample < samples, other=0.0)) == 0.0


@triton.jit
def _answers(
    x, weight, bias, m, n, samples,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What some units (n) of one row's layer answer to some samples (m)."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, INPUTS, BK):
        k = start + tl.arange(0, BK)
        inside = k[None, :] < INPUTS
        a = tl.load(x + m[:, None] * INPUTS + k[None, :], mask=(m[:, None] < samples) & inside, other=0.0)
        b = tl.load(weight + n[:, None] * INPUTS + k[None, :], mask=(n[:, None] < OUTPUTS) & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + n, mask=n < OUTPUTS, other=0.0)[None, :]
    return total


@triton.jit
def _linear(
    x, weight, bias, out, active, samples, x_row, weight_row, bias_row, active_row,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SKIP: tl.constexpr, BA: tl.constexpr,
    RELU: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if SKIP:
        if still(active + row * active_row, samples, BA):
            return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    x_own, weight_own, bias_own = x + row * x_row, weight + row * weight_row, bias + row * bias_row
    total = _answers(x_own, weight_own, bias_own, m, n, samples, OUTPUTS, INPUTS, BIASED, PRECISION, BM, BN, BK)
    if RELU:
        total = tl.maximum(total, 0.0)
    here = out + row * samples * OUTPUTS + m[:, None] * OUTPUTS + n[None, :]
    tl.store(here, total, mask=(m[:, None] < samples) & (n[None, :] < OUTPUTS))


@triton.jit
def _head(
    x, weight, bias, targets, weights, scores, error, below, samples, x_row, weight_row, bias_row, targets_row,
    weights_row, CLASSES: tl.constexpr, INPUTS: tl.constexpr, SKIP: tl.constexpr, BA: tl.constexpr,
    BIASED: tl.constexpr, BELOW: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if SKIP:
        if still(weights + row * weights_row, samples, BA):
            return
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    x_own, weight_own, bias_own = x + row * x_row, weight + row * weight_row, bias + row * bias_row
    total = _answers(x_own, weight_own, bias_own, m, n, samples, CLASSES, INPUTS, BIASED, PRECISION, BM, BN, BK)
    real = (m[:, None] < samples) & (n[None, :] < CLASSES)
    place = row * samples * CLASSES + m[:, None] * CLASSES + n[None, :]
    tl.store(scores + place, total, mask=real)
    score = tl.where(n[None, :] < CLASSES, total, -float("inf"))
    share = tl.exp(score - tl.max(score, axis=1)[:, None])
    share = share / tl.sum(share, axis=1)[:, None]
    target = tl.load(targets + row * targets_row + m, mask=m < samples, other=-1)
    counts = tl.load(weights + row * weights_row + m, mask=m < samples, other=0.0)
    found = (share - tl.where(n[None, :] == target[:, None], 1.0, 0.0)) * counts[:, None]
    tl.store(error + place, found, mask=real)
    if BELOW:
        for start in range(0, INPUTS, BK):
            k = start + tl.arange(0, BK)
            inside = k[None, :] < INPUTS
            b = tl.load(weight_own + n[:, None] * INPUTS + k[None, :], mask=(n[:, None] < CLASSES) & inside, other=0.0)
            down = tl.dot(found, b, input_precision=PRECISION)
            shown = (m[:, None] < samples) & inside
            if GATED:
                a = tl.load(x_own + m[:, None] * INPUTS + k[None, :], mask=shown, other=0.0)
                down = tl.where(a > 0.0, down, 0.0)
            tl.store(below + row * samples * INPUTS + m[:, None] * INPUTS + k[None, :], down, mask=shown)


@triton.jit
def _down(
    error, x, weight, below, active, samples, x_row, weight_row, active_row,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SKIP: tl.constexpr, BA: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if SKIP:
        if still(active + row * active_row, samples, BA):
            return
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    total = tl.zeros((BM, BK), dtype=tl.float32)
    for start in range(0, OUTPUTS, BN):
        n = start + tl.arange(0, BN)
        here = error + row * samples * OUTPUTS + m[:, None] * OUTPUTS + n[None, :]
        e = tl.load(here, mask=(m[:, None] < samples) & (n[None, :] < OUTPUTS), other=0.0)
        w = tl.load(
            weight + row * weight_row + n[:, None] * INPUTS + k[None, :],
            mask=(n[:, None] < OUTPUTS) & (k[None, :] < INPUTS),
            other=0.0,
        )
        total = tl.dot(e, w, total, input_precision=PRECISION)
    real = (m[:, None] < samples) & (k[None, :] < INPUTS)
    if GATED:
        a = tl.load(x + row * x_row + m[:, None] * INPUTS + k[None, :], mask=real, other=0.0)
        total = tl.where(a > 0.0, total, 0.0)
    tl.store(below + row * samples * INPUTS + m[:, None] * INPUTS + k[None, :], total, mask=real)


@triton.jit
def _gradient(
    error, x, weight, bias, weight_out, bias_out, active, samples,
    x_row, weight_row, bias_row, weight_out_row, bias_out_row, active_row,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SKIP: tl.constexpr, BA: tl.constexpr,
    BIASED: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if SKIP:
        if still(active + row * active_row, samples, BA):
            return
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    e = tl.load(
        error + row * samples * OUTPUTS + m[:, None] * OUTPUTS + n[None, :],
        mask=(m[:, None] < samples) & (n[None, :] < OUTPUTS),
        other=0.0,
    )
    turned = tl.trans(e)
    for block in tl.range(0, BLOCKS, num_stages=AHEAD):
        k = (tl.program_id(0) * BLOCKS + block) * BK + tl.arange(0, BK)
        inside = (n[:, None] < OUTPUTS) & (k[None, :] < INPUTS)
        a = tl.load(
            x + row * x_row + m[:, None] * INPUTS + k[None, :],
            mask=(m[:, None] < samples) & (k[None, :] < INPUTS),
            other=0.0,
        )
        if STEP:
            w = tl.load(weight + row * weight_row + n[:, None] * INPUTS + k[None, :], mask=inside, other=0.0)
        change = tl.dot(turned, a, input_precision=PRECISION)
        if STEP:
            change = w - change
        tl.store(weight_out + row * weight_out_row + n[:, None] * INPUTS + k[None, :], change, mask=inside)
    if BIASED:
        if tl.program_id(0) == 0:
            summed = tl.sum(e, axis=0)
            if STEP:
                summed = tl.load(bias + row * bias_row + n, mask=n < OUTPUTS, other=0.0) - summed
            tl.store(bias_out + row * bias_out_row + n, summed, mask=n < OUTPUTS)


@triton.jit
def _convolve(
    x, weight, bias, out, winner, active, images, bias_row, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Places in fours that are pooled together; weight is rows x OUT x (SIZE * SIZE * C)."""
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    ALL: tl.constexpr = SIZE * SIZE * C
    row = tl.program_id(1).to(tl.int64)
    if SKIP:
        if still(active + row * active_row, images, BA):
            return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    place = m // 4
    image, y, c = place // (HP * WP), 2 * ((place // WP) % HP) + (m % 4) // 2 - PAD, 2 * (place % WP) + m % 2 - PAD
    own, base = x + row * images * (H * W * C), image * (H * W * C) + y * (W * C) + c * C
    o = tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, (ALL + BK - 1) // BK):
        k = step * BK + tl.arange(0, BK)
        if C % BK == 0:  # all at one of the filter's places
            PARTS: tl.constexpr = C // BK
            tap, part = step // PARTS, step % PARTS
            i, j = tap // SIZE, tap % SIZE
            real = image < images
            if PAD > 0:
                real = real & (y + i >= 0) & (y + i < H) & (c + j >= 0) & (c + j < W)
            first = base + ((i * W + j) * C + part * BK)
            a = tl.load(own + first[:, None] + tl.arange(0, BK)[None, :], mask=real[:, None], other=0.0)
        else:
            i, j = k // (SIZE * C), k % (SIZE * C)
            shown = (image[:, None] < images) & (k[None, :] < ALL)
            if PAD > 0:
                down, along = y[:, None] + i[None, :], c[:, None] + (j // C)[None, :]
                shown = shown & (down >= 0) & (down < H) & (along >= 0) & (along < W)
            a = tl.load(own + base[:, None] + (i * (W * C) + j)[None, :], mask=shown, other=0.0)
        b = tl.load(
            weight + row * (ALL * OUT) + o[:, None] * ALL + k[None, :],
            mask=(o[:, None] < OUT) & (k[None, :] < ALL), other=0.0,
        )  # fmt: skip
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    largest, which = tl.max(tl.reshape(total, (BM // 4, 4, BN)), axis=1, return_indices=True)
    largest += tl.load(bias + row * bias_row + o, mask=o < OUT, other=0.0)[None, :]
    if RELU:
        which = tl.where(largest > 0.0, which, 4)
        largest = tl.maximum(largest, 0.0)
    p = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    there = row * images * (HP * WP * OUT) + p[:, None] * OUT + o[None, :]
    real = (p[:, None] < images * HP * WP) & (o[None, :] < OUT)
    tl.store(out + there, largest, mask=real)
    tl.store(winner + there, which.to(tl.uint8), mask=real)


@triton.jit
def _filters_back(
    x, error, winner, out, bias_out, active, images, rows, share, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of filters and biases over one share of the places (shares x rows x OUT x (SIZE * SIZE * C))."""
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    ACROSS: tl.constexpr = SIZE * C
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    i, j = k // ACROSS, k % ACROSS
    o = tl.arange(0, BN)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    summed = tl.zeros((BN,), dtype=tl.float32)
    end = piece * share + share
    if SKIP:
        if still(active + row * active_row, images, BA):
            end = piece * share
    for start in range(piece * share, end, BM):
        m = start + tl.arange(0, BM)
        place = m // 4
        image, y, c = place // (HP * WP), 2 * ((place // WP) % HP) + (m % 4) // 2 - PAD, 2 * (place % WP) + m % 2 - PAD
        inside = (image < images) & (m < piece * share + share)
        there = row * images * (HP * WP * OUT) + place[:, None] * OUT + o[None, :]
        e = tl.load(error + there, mask=inside[:, None] & (o[None, :] < OUT), other=0.0)
        won = tl.load(winner + there, mask=inside[:, None] & (o[None, :] < OUT), other=4)
        e = tl.where(won == (m % 4)[:, None], e, 0.0)
        real = inside[:, None] & (k[None, :] < SIZE * ACROSS)
        if PAD > 0:
            down, along = y[:, None] + i[None, :], c[:, None] + (j // C)[None, :]
            real = real & (down >= 0) & (down < H) & (along >= 0) & (along < W)
        base = x + row * images * (H * W * C) + (image * (H * W * C) + y * (W * C) + c * C)[:, None]
        a = tl.load(base + (i * (W * C) + j)[None, :], mask=real, other=0.0)
        total = tl.dot(tl.trans(e), a, total, input_precision=PRECISION)
        summed += tl.sum(e, axis=0)
    place = (piece * rows + row) * OUT + o
    real = (o[:, None] < OUT) & (k[None, :] < SIZE * ACROSS)
    tl.store(out + place[:, None] * (SIZE * ACROSS) + k[None, :], total, mask=real)
    if tl.program_id(0) == 0:
        tl.store(bias_out + place, summed, mask=o < OUT)


@triton.jit
def _wide_filters_back(
    x, error, out, bias_out, active, images, rows, share, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `_filters_back`, of images with channels first and the error before pooling, channels first as well."""
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    ALL: tl.constexpr = SIZE * SIZE * C
    EACH: tl.constexpr = 4 * HP * WP  # places of an image
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    k, o = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BN)
    i, j = k // (SIZE * C), (k // C) % SIZE
    own = x + row * images * (H * W * C) + ((k % C) * (H * W) + i * W + j)[:, None]
    errors = error + row * images * (EACH * OUT) + o[:, None] * (images * EACH)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    end = piece * share + share
    if SKIP:
        if still(active + row * active_row, images, BA):
            end = piece * share
    for start in range(piece * share, end, BM):
        m = start + tl.arange(0, BM)
        image, y, c = m // EACH, (m // (2 * WP)) % (2 * HP) - PAD, m % (2 * WP) - PAD
        inside = m[None, :] < images * EACH
        e = tl.load(errors + m[None, :], mask=inside & (o[:, None] < OUT), other=0.0)
        real = inside & (k[:, None] < ALL)
        if PAD > 0:
            down, along = y[None, :] + i[:, None], c[None, :] + j[:, None]
            real = real & (down >= 0) & (down < H) & (along >= 0) & (along < W)
        a = tl.load(own + (image * (H * W * C) + y * W + c)[None, :], mask=real, other=0.0)
        total = tl.dot(e, tl.trans(a), total, input_precision=PRECISION)
    place = (piece * rows + row) * OUT + o
    tl.store(out + place[:, None] * ALL + k[None, :], total, mask=(o[:, None] < OUT) & (k[None, :] < ALL))
    if tl.program_id(0) == 0:  # in a loop of its own: Triton 3.6 reads an error that the next one has overwritten
        summed = tl.zeros((BN,), dtype=tl.float32)
        for start in range(piece * share, end, BM):
            m = start + tl.arange(0, BM)
            inside = (m[None, :] < images * EACH) & (o[:, None] < OUT)
            summed += tl.sum(tl.load(errors + m[None, :], mask=inside, other=0.0), axis=1)
        tl.store(bias_out + place, summed, mask=o < OUT)


@triton.jit
def _unpool(
    error, winner, out, images, HP: tl.constexpr, WP: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The error before pooling: what it is after it at the place that won, nothing at the other three.

    Channels last, or before all of a row's images.
    """
    row = tl.program_id(1).to(tl.int64)
    m, o = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    image, y, c = m // (HP * WP), (m // WP) % HP, m % WP
    here = row * images * (HP * WP * OUT) + m[:, None] * OUT + o[None, :]
    real = (image[:, None] < images) & (o[None, :] < OUT)
    e = tl.load(error + here, mask=real, other=0.0)
    won = tl.load(winner + here, mask=real, other=4)
    for quarter in tl.static_range(4):
        there = (image * (2 * HP) + 2 * y + quarter // 2) * (2 * WP) + 2 * c + quarter % 2
        found = tl.where(won == quarter, e, 0.0)
        if FIRST:
            start = out + (row * OUT + o)[:, None] * (images * (4 * HP * WP))
            shown = (image[None, :] < images) & (o[:, None] < OUT)
            tl.store(start + there[None, :], tl.trans(found), mask=shown)
        else:
            start = out + row * images * (4 * HP * WP * OUT)
            tl.store(start + there[:, None] * OUT + o[None, :], found, mask=real)


@triton.jit
def _images_back(
    error, weight, out, active, images, active_row, SKIP: tl.constexpr, BA: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The error at a convolution's input, of that before pooling; weight is rows x C x (SIZE * SIZE * PARTS * BK).

    The last of a place's parts is filled up.
    """
    HP: tl.constexpr = (H + 2 * PAD - SIZE + 1) // 2
    WP: tl.constexpr = (W + 2 * PAD - SIZE + 1) // 2
    PARTS: tl.constexpr = (OUT + BK - 1) // BK
    ALL: tl.constexpr = SIZE * SIZE * PARTS * BK
    row = tl.program_id(1).to(tl.int64)
    if SKIP:
        if still(active + row * active_row, images, BA):
            return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    image, y, c = m // (H * W), (m // W) % H + PAD, m % W + PAD
    own, base = error + row * images * (4 * HP * WP * OUT), ((image * (2 * HP) + y) * (2 * WP) + c) * OUT
    channel, lane = tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, ALL // BK):
        tap, part = step // PARTS, step % PARTS
        i, j = tap // SIZE, tap % SIZE
        real = (image < images) & (y >= i) & (y - i < 2 * HP) & (c >= j) & (c - j < 2 * WP)
        shown = real[:, None]
        if OUT % BK != 0:
            shown = shown & (part * BK + lane[None, :] < OUT)
        first = base - (i * (2 * WP) + j) * OUT + part * BK
        e = tl.load(own + first[:, None] + lane[None, :], mask=shown, other=0.0)
        b = tl.load(
            weight + row * (ALL * C) + channel[:, None] * ALL + step * BK + lane[None, :],
            mask=channel[:, None] < C, other=0.0,
        )  # fmt: skip
        total = tl.dot(e, tl.trans(b), total, input_precision=PRECISION)
    there = row * images * (H * W * C) + m[:, None] * C + channel[None, :]
    tl.store(out + there, total, mask=(image[:, None] < images) & (channel[None, :] < C))


def _fit(count: int, most: int = WIDEST) -> int:
    return max(16, min(most, triton.next_power_of_2(count)))


def _part(channels: int) -> int:
    """How many channels are read at once."""
    return 16 if channels % 32 else 32


def skipping(active: Tensor | None, like: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
    """The samples' weights (rows x samples), by which kernels see that a row stands still; None: none does."""
    if active is None:
        return like, 0, {"SKIP": False, "BA": 16}
    return active, active.stride(0), {"SKIP": True, "BA": triton.next_power_of_2(active.shape[1])}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool, precision: str, active: Tensor | None = None
) -> Tensor:
    """x W' + b of every row (rows x samples x outputs)."""
    moving, moving_row, skip = skipping(active, x)
    rows, samples, inputs = x.shape
    outputs = weight.shape[1]
    out = x.new_empty(rows, samples, outputs)
    bm = _fit(samples, 64)
    few = rows * outputs * (samples // bm + 1) <= 16 * 264
    bn = 16 if few else _fit(outputs)
    grid = (triton.cdiv(outputs, bn), rows, triton.cdiv(samples, bm))
    _linear[grid](
        x, weight, weight if bias is None else bias, out, moving, samples,
        x.stride(0), weight.stride(0), 0 if bias is None else bias.stride(0), moving_row,
        OUTPUTS=outputs, INPUTS=inputs, **skip,
        RELU=relu, BIASED=bias is not None, PRECISION=precision, BM=bm, BN=bn, BK=64 if few else 32,
        num_warps=4 if bn < 128 else 8, num_stages=3 if few else 4,
    )  # fmt: skip
    return out


def head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    *,
    below: bool,
    gated: bool,
    precision: str,
    skip: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The last layer's scores, the weighted cross-entropy's derivative by them, and the error below the layer.

    skip: rows without any weight are not looked at.
    """
    rows, samples, inputs = x.shape
    classes = weight.shape[1]
    scores, error = x.new_empty(rows, samples, classes), x.new_empty(rows, samples, classes)
    down = x.new_empty(rows, samples, inputs) if below else None
    _head[(triton.cdiv(samples, 16), rows)](
        x, weight, weight if bias is None else bias, targets, weights, scores, error, x if down is None else down,
        samples, x.stride(0), weight.stride(0), 0 if bias is None else bias.stride(0), targets.stride(0),
        weights.stride(0), CLASSES=classes, INPUTS=inputs, SKIP=skip, BA=triton.next_power_of_2(samples),
        BIASED=bias is not None, BELOW=below, GATED=gated, PRECISION=precision,
        BM=16, BN=_fit(classes), BK=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return scores, error, down


def down(
    error: Tensor, x: Tensor, weight: Tensor, *, gated: bool, precision: str, active: Tensor | None = None
) -> Tensor:
    """The error below a layer; gated: nothing where its input x is not above zero."""
    moving, moving_row, skip = skipping(active, x)
    rows, samples, inputs = x.shape
    outputs = weight.shape[1]
    out = x.new_empty(rows, samples, inputs)
    bm = _fit(samples, 64)
    few = rows * inputs * (samples // bm + 1) <= 16 * 264
    bk = 16 if few else 32
    _down[(triton.cdiv(inputs, bk), rows, triton.cdiv(samples, bm))](
        error, x, weight, out, moving, samples, x.stride(0), weight.stride(0), moving_row,
        OUTPUTS=outputs, INPUTS=inputs, **skip, GATED=gated, PRECISION=precision,
        BM=bm, BN=_fit(outputs, 64), BK=bk, num_warps=4, num_stages=3 if few else 2,
    )  # fmt: skip
    return out


def gradient(
    error: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    *,
    step: bool,
    precision: str,
    active: Tensor | None = None,
) -> None:
    """A layer's gradients, or with `step` its weights less these, are put out."""
    moving, moving_row, skip = skipping(active, x)
    rows, samples, inputs = x.shape
    outputs = weight.shape[1]
    bn = _fit(outputs, 32)
    few = rows * triton.cdiv(outputs, bn) <= 264
    bm, bk = _fit(samples), 32 if few else 64
    blocks = triton.cdiv(inputs, bk)
    if few:  # enough programs for the device come before few loads of the error
        blocks = max(1, rows * triton.cdiv(outputs, bn) * blocks // 800)
    _gradient[(triton.cdiv(inputs, bk * blocks), rows, triton.cdiv(outputs, bn))](
        error, x, weight, weight if bias is None else bias, weight_out, weight_out if bias_out is None else bias_out,
        moving, samples, x.stride(0), weight.stride(0), 0 if bias is None else bias.stride(0),
        weight_out.stride(0), 0 if bias_out is None else bias_out.stride(0), moving_row,
        OUTPUTS=outputs, INPUTS=inputs, **skip, BIASED=bias is not None, STEP=step, PRECISION=precision,
        BM=bm, BN=bn, BK=bk, BLOCKS=blocks, AHEAD=2 if few or bm > 64 else 3, num_warps=4,
    )  # fmt: skip


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    padding: int,
    relu: bool,
    precision: str,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolution, bias, pooling and ReLU of every row's images (rows x images x H x W x C): outcome and winners."""
    rows, images, height, width, channels = x.shape
    outputs, size = weight.shape[1], weight.shape[-1]
    high, wide = ((side + 2 * padding - size + 1) // 2 for side in (height, width))
    out = x.new_empty(rows, images, high, wide, outputs)
    winner = torch.empty_like(out, dtype=torch.uint8)
    filters = weight.permute(0, 1, 3, 4, 2)
    if channels % 4 and channels > 1:  # four are read at once
        x, filters = (functional.pad(part, (0, -channels % 4)) for part in (x, filters))
    x, filters, channels = x.contiguous(), filters.contiguous(), x.shape[-1]
    whole = channels % 16 == 0  # parts of the channels are side by side
    moving, moving_row, skip = skipping(active, x)
    bm, bk = (256, _part(channels)) if whole else (128, 32)
    _convolve[(triton.cdiv(4 * images * high * wide, bm), rows)](
        x, filters, bias, out, winner, moving, images, bias.stride(0), moving_row, **skip,
        H=height, W=width, C=channels, OUT=outputs, SIZE=size, PAD=padding, RELU=relu, PRECISION=precision,
        BM=bm, BN=_fit(outputs), BK=bk, num_warps=8 if whole else 4, num_stages=3 if whole else 1,
    )  # fmt: skip
    return out, winner


def filters_back(
    error: Tensor, winner: Tensor, x: Tensor, size: int, *, padding: int, precision: str, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of a convolution's filters (rows x outputs x channels x size x size) and biases."""
    rows, images, height, width, channels = x.shape
    outputs, places = error.shape[-1], 4 * error[0, ..., 0].numel()
    wide = channels % 16 == 0  # then it pays to lay out both anew
    bm, bk = (32, 128) if wide else (64, _fit(size * size * channels))
    blocks = triton.cdiv(size * size * channels, bk)
    pieces = max(1, min(32, 1056 // (rows * blocks), places // (256 if wide else 512)))
    share = triton.cdiv(triton.cdiv(places, pieces), bm) * bm
    found = x.new_empty(pieces, rows, outputs, size, size, channels)
    summed = x.new_empty(pieces, rows, outputs)
    moving, moving_row, skip = skipping(active, x)
    given = (x.permute(0, 1, 4, 2, 3).contiguous(), before_pooling(error, winner, True)) if wide else (x, error, winner)
    kernel = _wide_filters_back if wide else _filters_back
    kernel[(blocks, rows, pieces)](
        *given, found, summed, moving, images, rows, share, moving_row, **skip,
        H=height, W=width, C=channels, OUT=outputs, SIZE=size, PAD=padding, PRECISION=precision,
        BM=bm, BN=_fit(outputs), BK=bk, num_warps=4, num_stages=2,
    )  # fmt: skip
    return found.sum(0).permute(0, 1, 4, 2, 3), summed.sum(0)


def before_pooling(error: Tensor, winner: Tensor, first: bool) -> Tensor:
    """The error before pooling, as rows x images x H x W x outputs or, with channels `first`, rows x outputs x ..."""
    rows, images, high, wide, outputs = error.shape
    out = error.new_empty(rows, images, 2 * high, 2 * wide, outputs)
    _unpool[(triton.cdiv(images * high * wide, 32), rows)](
        error, winner, out, images, HP=high, WP=wide, OUT=outputs, FIRST=first, BM=32, BN=_fit(outputs), num_warps=4,
    )  # fmt: skip
    return out.view(rows, outputs, images, 2 * high, 2 * wide) if first else out


def images_back(
    error: Tensor,
    winner: Tensor,
    weight: Tensor,
    shape: torch.Size,
    *,
    padding: int,
    precision: str,
    active: Tensor | None = None,
) -> Tensor:
    """The error at a convolution's input of the given shape."""
    rows, images, height, width, channels = shape
    outputs, size = weight.shape[1], weight.shape[-1]
    bk = _part(outputs)
    out = error.new_empty(shape)
    filters = weight.permute(0, 2, 3, 4, 1)
    filters = (functional.pad(filters, (0, -outputs % bk)) if outputs % bk else filters).contiguous()
    moving, moving_row, skip = skipping(active, error)
    _images_back[(triton.cdiv(images * height * width, 128), rows)](
        before_pooling(error, winner, False), filters, out, moving, images, moving_row, **skip,
        H=height, W=width, C=channels, OUT=outputs, SIZE=size, PAD=padding, PRECISION=precision,
        BM=128, BN=_fit(channels), BK=bk, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
