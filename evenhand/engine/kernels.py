"""GPU kernels for local training in which every row has weights of its own (Triton): linear layers.

A library's batched products need a launch for every product, bias, ReLU and update. Here a layer is one kernel forwards
and two backwards, one for the error below and one for the gradient, which it takes off the weights; the last layer's
scores, their error and the error below are one. Nothing is added up by atomics, so the same input gives the same bits.
A row that stands still at a step is not even looked at (its gradients, where they are asked for, are zero). Sizes of
blocks are those found fastest on an H200.

Rows come first everywhere; weights are views of the rows' flat parameters. `convolution_kernels` and
`recurrent_kernels` hold the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 128  # samples, and channels, that one program holds at once


@triton.jit
def reach(weights, samples, BA: tl.constexpr):
    """How many of a row's samples there are up to the last one that counts."""
    last = tl.zeros((BA,), dtype=tl.int32)
    for start in range(0, samples, BA):
        sample = start + tl.arange(0, BA)
        counts = tl.load(weights + sample, mask=sample < samples, other=0.0)
        last = tl.maximum(last, tl.where(counts > 0.0, sample + 1, 0))
    return tl.max(last)


@triton.jit
def still(weights, samples, BA: tl.constexpr):
    """Whether none of a row's samples counts in this step."""
    return reach(weights, samples, BA) == 0


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
    known = samples
    if SKIP:
        known = reach(active + row * active_row, samples, BA)
        if STEP:
            if known == 0:
                return
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    e = tl.load(
        error + row * samples * OUTPUTS + m[:, None] * OUTPUTS + n[None, :],
        mask=(m[:, None] < known) & (n[None, :] < OUTPUTS),
        other=0.0,
    )
    turned = tl.trans(e)
    for block in tl.range(0, BLOCKS, num_stages=AHEAD):
        k = (tl.program_id(0) * BLOCKS + block) * BK + tl.arange(0, BK)
        inside = (n[:, None] < OUTPUTS) & (k[None, :] < INPUTS)
        a = tl.load(
            x + row * x_row + m[:, None] * INPUTS + k[None, :],
            mask=(m[:, None] < known) & (k[None, :] < INPUTS),
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
def _products(
    x, out, samples, rows, share, x_row, FEATURES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Inner products of a row's samples over one share of the features (shares x rows x samples x samples)."""
    row, piece, m = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, BM)
    total = tl.zeros((BM, BM), dtype=tl.float32)
    end = tl.minimum(piece * share + share, FEATURES)
    for start in range(piece * share, end, BK):
        k = start + tl.arange(0, BK)
        inside = (m[:, None] < samples) & (k[None, :] < end)
        a = tl.load(x + row * x_row + m[:, None] * FEATURES + k[None, :], mask=inside, other=0.0)
        total = tl.dot(a, tl.trans(a), total)
    there = ((piece * rows + row) * samples + m)[:, None] * samples + m[None, :]
    tl.store(out + there, total, mask=(m[:, None] < samples) & (m[None, :] < samples))


def fit(count: int, most: int = WIDEST) -> int:
    return max(16, min(most, triton.next_power_of_2(count)))


def skipping(active: Tensor | None, like: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
    """The samples' weights (rows x samples), by which kernels see which are padding; None: none is."""
    if active is None:
        return like, 0, {"SKIP": False, "BA": 16}
    return active, active.stride(0), {"SKIP": True, "BA": min(1024, triton.next_power_of_2(active.shape[1]))}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool, precision: str, active: Tensor | None = None
) -> Tensor:
    """x W' + b of every row (rows x samples x outputs)."""
    moving, moving_row, skip = skipping(active, x)
    rows, samples, inputs = x.shape
    outputs = weight.shape[1]
    out = x.new_empty(rows, samples, outputs)
    bm = fit(samples, 64)
    few = rows * outputs * (samples // bm + 1) <= 16 * 264
    bn = 16 if few else fit(outputs)
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
        BM=16, BN=fit(classes), BK=64, num_warps=4, num_stages=3,
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
    bm = fit(samples, 64)
    few = rows * inputs * (samples // bm + 1) <= 16 * 264
    bk = 16 if few else 32
    _down[(triton.cdiv(inputs, bk), rows, triton.cdiv(samples, bm))](
        error, x, weight, out, moving, samples, x.stride(0), weight.stride(0), moving_row,
        OUTPUTS=outputs, INPUTS=inputs, **skip, GATED=gated, PRECISION=precision,
        BM=bm, BN=fit(outputs, 64), BK=bk, num_warps=4, num_stages=3 if few else 2,
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
    bn = fit(outputs, 32)
    few = rows * triton.cdiv(outputs, bn) <= 264
    bm, bk = fit(samples), 32 if few else 64
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


def products(x: Tensor) -> Tensor:
    """Inner products of every row's samples (float16), each exact, summed up in float32."""
    rows, samples, features = x.shape
    x = x.contiguous()
    pieces = max(1, min(triton.cdiv(528, rows), features // 512))
    share = triton.cdiv(triton.cdiv(features, pieces), 64) * 64
    out = x.new_empty(pieces, rows, samples, samples, dtype=torch.float32)
    _products[(pieces, rows)](
        x, out, samples, rows, share, x.stride(0), FEATURES=features, BM=fit(samples), BK=64, num_warps=4, num_stages=3
    )
    return out.sum(0)
