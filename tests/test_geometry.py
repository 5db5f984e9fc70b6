"""The two passes over the updates: inner products, linear combinations, and every form the updates come in."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st

import evenhand as eh
from evenhand.geometry import STRETCH, TILE, combine, combine_within, exact_products, gram, products, products_within
from evenhand.updates import past_updates, read_updates, restore

ROOT = Path(__file__).resolve().parents[1]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = {"conv.weight": (4, 3, 2, 2), "conv.bias": (4,), "norm.weight": (4,), "head.weight": (2, 4), "scale": ()}


# ------------------------------------------------------------------------------------------- references


def flat(update):
    """One client's update as a long float64 vector, whatever its form; integer entries left out."""
    if isinstance(update, dict):
        entries = list(update.values())
    else:
        entries = list(update) if isinstance(update, (list, tuple)) else [update]
    vectors = []
    for entry in entries:
        tensor = torch.from_numpy(entry.copy()) if isinstance(entry, np.ndarray) else entry.detach()
        if tensor.is_floating_point():
            vectors.append(tensor.double().cpu().contiguous().flatten().numpy())
    return np.concatenate(vectors)


def reference(rows):
    """The Gram matrix of long float64 vectors."""
    rows = np.asarray(rows, dtype=np.float64)
    return rows @ rows.T


def worst(found, wanted, left, right=None):
    """The largest error of an inner product, relative to the lengths of the two rows."""
    left = np.linalg.norm(left, axis=1)
    right = left if right is None else np.linalg.norm(right, axis=1)
    return (np.abs(found - wanted) / np.outer(left, right)).max()


def random(rows, columns, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * scale).to(dtype)


def state_dict(seed, dtype=torch.float32, kind=dict):
    """One client's update: floating-point tensors of all ranks, an empty one, and an integer counter."""
    generator = torch.Generator().manual_seed(seed)
    entries = {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}
    entries["nothing"] = torch.zeros((0, 3), dtype=dtype)
    entries["norm.num_batches_tracked"] = torch.tensor(seed)
    return kind(entries)


def as_numpy(update):
    return type(update)((name, tensor.numpy()) for name, tensor in update.items())


# -------------------------------------------------------------------------------- every form, there and back


def matrix(dtype):
    return random(5, 12, dtype)


def stack(dtype):
    return random(5, 24, dtype).reshape(5, 4, 3, 2)


def stacked_mapping(dtype):
    rows = [state_dict(seed, dtype) for seed in range(5)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arrays(dtype):
    return list(stack(dtype))


def lists(dtype):
    return [list(state_dict(seed, dtype).values()) for seed in range(5)]


def dicts(dtype):
    return [state_dict(seed, dtype) for seed in range(5)]


def ordered_dicts(dtype):
    return tuple(state_dict(seed, dtype, OrderedDict) for seed in range(5))


FORMS = [matrix, stack, stacked_mapping, arrays, lists, dicts, ordered_dicts]


def in_numpy(updates):
    if isinstance(updates, torch.Tensor):
        return updates.numpy()
    if isinstance(updates, dict):
        return as_numpy(updates)
    if isinstance(updates[0], torch.Tensor):
        return [row.numpy() for row in updates]
    if isinstance(updates[0], list):
        return [[tensor.numpy() for tensor in row] for row in updates]
    return [as_numpy(row) for row in updates]


def client(updates, position):
    """One client's update, in the form in which a round's outcome should come."""
    if isinstance(updates, dict):
        return {name: rows[position, ...] for name, rows in updates.items()}
    return updates[position]


def assert_same(found, wanted):
    """The same structure, types, shapes, dtypes, device and numbers; integer entries of `found` are zero."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
        return
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    floating = torch.as_tensor(wanted).is_floating_point()
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted) if floating else torch.as_tensor(wanted) * 0)
    if isinstance(wanted, torch.Tensor):
        assert found.device == wanted.device
        assert not found.requires_grad


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("torch", dtype) for dtype in FLOATS] + [("numpy", dtype) for dtype in FLOATS if dtype != torch.bfloat16],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_and_given_back(form, library, dtype):
    given = form(dtype) if library == "torch" else in_numpy(form(dtype))
    updates = read_updates(given)
    rows = [flat(client(given, k)) for k in range(5)]
    assert len(updates) == 5
    np.testing.assert_allclose(gram(updates).sum(axis=0), reference(rows), rtol=1e-13, atol=1e-13)
    for k in range(5):
        alone = np.zeros((len(updates.layout.blocks), 5))
        alone[:, k] = 1.0
        assert_same(restore(updates.layout, combine(alone, updates)), client(given, k))


@pytest.mark.parametrize("form", FORMS)
def test_some_of_the_rows_are_the_rows_themselves(form):
    given = form(torch.float32)
    updates = read_updates(given)
    for keep in ([3, 0], [4], [0, 1, 2, 3, 4]):
        some = updates.select(keep)
        rows = [flat(client(given, k)) for k in keep]
        assert len(some) == len(keep)
        np.testing.assert_allclose(gram(some).sum(axis=0), reference(rows), rtol=1e-13, atol=1e-13)
        alone = np.zeros((len(updates.layout.blocks), len(keep)))
        alone[:, 0] = 1.0
        assert_same(restore(some.layout, combine(alone, some)), client(given, keep[0]))
    twice = updates.select([4, 2, 0]).select([2, 0])
    np.testing.assert_array_equal(gram(twice), gram(updates.select([0, 4])))


def test_a_round_gives_back_the_form_of_one_client():
    """A BatchNorm-like state dict: counters get a zero update and a note, empty tensors stay without one."""
    rows = [state_dict(seed, kind=OrderedDict) for seed in range(4)]
    out = eh.aggregate("fedavg", rows, weights="uniform")
    assert type(out.update) is OrderedDict
    assert list(out.update) == list(rows[0])
    for name, tensor in rows[0].items():
        assert (out.update[name].shape, out.update[name].dtype) == (tensor.shape, tensor.dtype)
    assert out.update["norm.num_batches_tracked"] == 0
    assert out.diagnostics.notes == ("entries that are not floating-point get a zero update: norm.num_batches_tracked",)
    np.testing.assert_allclose(flat(out.update), np.mean([flat(row) for row in rows], axis=0), atol=1e-6)


def test_entries_of_mixed_precision_keep_their_own():
    rows = [
        {"a": random(1, 8, torch.float64, k)[0], "b": random(1, 8, torch.bfloat16, k)[0], "c": random(1, 8, seed=k)[0]}
        for k in range(3)
    ]
    out = eh.aggregate("fedavg", rows, weights="uniform", layers="model")
    assert [tensor.dtype for tensor in out.update.values()] == [torch.float64, torch.bfloat16, torch.float32]
    np.testing.assert_allclose(
        out.update["a"].numpy(), np.mean([row["a"].numpy() for row in rows], axis=0), rtol=1e-14, atol=1e-15
    )
    assert out.diagnostics.resolution == 1e-7  # the narrower part decides


# ---------------------------------------------------------------------------------------- awkward memory


def channels_last(rows):
    return [{"w": row.reshape(4, 3, 5, 2).to(memory_format=torch.channels_last)} for row in rows]


def channels_last_stack(rows):
    return {"w": rows.reshape(len(rows), 4, 6, 5).to(memory_format=torch.channels_last)}


def requires_grad(rows):
    return [{"w": torch.nn.Parameter(row.clone())} for row in rows]


def transposed(rows):
    return rows.T.contiguous().T


def every_second_column(rows):
    wide = torch.zeros(len(rows), 2 * rows.shape[1], dtype=rows.dtype)
    wide[:, ::2] = rows
    return wide[:, ::2]


def every_second_column_each(rows):
    return list(every_second_column(rows))


def one_row_expanded(rows):
    return rows[:1].expand(len(rows), -1)


def negative_strides(rows):
    return rows.numpy()[:, ::-1].copy()[:, ::-1]


def negative_strides_each(rows):
    return [row[::-1].copy()[::-1] for row in rows.numpy()]


def read_only(rows):
    array = rows.numpy().copy()
    array.flags.writeable = False
    return array


def fortran_order(rows):
    return np.asfortranarray(rows.numpy())


AWKWARD = [
    channels_last,
    channels_last_stack,
    requires_grad,
    transposed,
    every_second_column,
    every_second_column_each,
    one_row_expanded,
    negative_strides,
    negative_strides_each,
    read_only,
    fortran_order,
]


@pytest.mark.parametrize("awkward", AWKWARD)
def test_the_layout_in_memory_does_not_matter(awkward):
    rows = random(6, 120)
    given = awkward(rows)
    if awkward is one_row_expanded:
        rows = given
    updates = read_updates(given)
    np.testing.assert_allclose(gram(updates)[0], reference(rows.numpy()), rtol=1e-13, atol=1e-13)
    coefficients = np.random.default_rng(0).standard_normal((1, 6))
    found = flat(restore(updates.layout, combine(coefficients, updates)))
    np.testing.assert_allclose(found, coefficients[0] @ rows.double().numpy(), atol=1e-5)


def channels_last_long(rows):
    """Every row a channels-last image, read in stretches that begin and end inside a channel."""
    return [row.reshape(96, 5, -1).permute(2, 0, 1).contiguous().permute(1, 2, 0).unsqueeze(0) for row in rows]


@pytest.mark.parametrize("awkward", [every_second_column, every_second_column_each, transposed, channels_last_long])
def test_long_rows_of_any_stride_are_read_right(awkward, monkeypatch):
    monkeypatch.setattr("evenhand.updates.BUFFER", 1 << 16)
    rows = random(6, 96 * 5 * 50)
    updates = read_updates(awkward(rows))
    assert worst(gram(updates)[0], reference(rows), rows.numpy()) <= 2e-7
    coefficients = np.random.default_rng(0).standard_normal((1, 6))
    found = flat(restore(updates.layout, combine(coefficients, updates)))
    np.testing.assert_allclose(found, coefficients[0] @ rows.double().numpy(), atol=1e-5)


@pytest.mark.parametrize("awkward", [requires_grad, read_only, channels_last])
def test_a_round_leaves_the_updates_as_they_were(awkward):
    given = awkward(random(4, 120))
    before = [flat(client(given, k)) for k in range(4)]
    eh.aggregate("even", given, losses=[1.0, 2.0, 3.0, 4.0], clients=list("abcd"))
    np.testing.assert_array_equal([flat(client(given, k)) for k in range(4)], before)


# ---------------------------------------------------------------------------------------------- accuracy

COLUMNS = [1, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH, 8 * STRETCH - 1, 8 * STRETCH, 20 * STRETCH + 1, 300_001]


def allowed(columns):
    """Rows of one stretch are exact, long ones right to 2e-7; a few stretches have not averaged their errors yet."""
    if columns <= STRETCH:
        return 1e-14
    return 1e-6 if columns < 8 * STRETCH else 2e-7


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_float32_products_are_right_to_2e_7(rows, columns):
    signed = random(rows, columns)
    unequal = signed * torch.logspace(-3, 3, rows)[:, None]
    positive = signed.abs() + 0.5
    for given in (signed, unequal, positive):
        assert worst(gram(read_updates(given))[0], reference(given), given.numpy()) <= allowed(columns)
        past = past_updates(read_updates(given), (positive.flip(1),), rows)
        wanted = given.double().numpy() @ positive.flip(1).double().numpy().T
        found = products(read_updates(given), [past])[1][0][0]
        assert worst(found, wanted, given.numpy(), positive.numpy()) <= allowed(columns)


@pytest.mark.parametrize("columns", [100, 3 * STRETCH + 17, 300_001])
def test_float64_products_are_right_to_1e_14(columns):
    given = random(7, columns, torch.float64)
    exact = np.array([[np.longdouble(1) * (a.astype(np.longdouble) @ b) for b in given.numpy()] for a in given.numpy()])
    assert worst(gram(read_updates(given))[0], exact.astype(np.float64), given.numpy()) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_multiplied_in_float32(dtype):
    given = random(9, 100_003, dtype)
    assert worst(gram(read_updates(given))[0], reference(given.double()), given.double().numpy()) <= 2e-7
    each = [{"w": row} for row in given]
    assert worst(gram(read_updates(each))[0], reference(given.double()), given.double().numpy()) <= 2e-7


def test_rows_of_equal_numbers_are_seen_as_dependent():
    """Equal terms round the same way every time, the worst case for a float32 sum."""
    given = torch.arange(1, 8)[:, None].sqrt() * torch.full((7, 30_000), 1 / 3)
    assert worst(gram(read_updates(given))[0], reference(given), given.numpy()) <= 5e-6
    out = eh.aggregate("adafed", given, losses=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert any("rank 1 of 7" in note for note in out.diagnostics.notes)
    torch.testing.assert_close(out.update, given.mean(dim=0))


@pytest.mark.parametrize("rows", [TILE - 1, TILE, TILE + 1, 2 * TILE + 3])
@pytest.mark.parametrize("columns", [50, 2 * STRETCH + 9])
def test_large_cohorts_are_tiled(rows, columns):
    given = random(rows, columns)
    found = gram(read_updates(given))[0]
    assert worst(found, reference(given), given.numpy()) <= allowed(columns)
    np.testing.assert_allclose(found, found.T, rtol=1e-6, atol=1e-3)


@cases(
    rows=st.integers(1, 12),
    columns=st.one_of(st.integers(1, 30), st.integers(STRETCH - 3, STRETCH + 3), st.integers(1, 5 * STRETCH)),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_dense_and_separate_rows_agree(rows, columns, seed, dtype, data):
    """The same numbers as one matrix, as separate tensors cut at any place, and in part."""
    dense = random(rows, columns, dtype, seed)
    cut = data.draw(st.integers(0, columns))
    separate = read_updates([{"a": row[:cut].clone(), "b": row[cut:].clone()} for row in dense], layers="model")
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    found = gram(read_updates(dense))[0]
    assert worst(gram(separate)[0], found, dense.double().numpy()) <= tolerance
    keep = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    assert worst(gram(separate.select(keep))[0], found[np.ix_(keep, keep)], dense[keep].double().numpy()) <= tolerance
    coefficients = np.random.default_rng(seed).standard_normal((1, rows))
    ours = torch.cat(combine(coefficients, separate)).double().numpy()
    bound = np.abs(coefficients) @ np.abs(dense.double().numpy())
    assert (np.abs(ours - coefficients[0] @ dense.double().numpy()) <= tolerance * (1.0 + bound[0]) * rows).all()


# ------------------------------------------------------------------------------------------------- scale

SCALES = [1e-30, 1e-25, 1e-12, 1e12, 1e25, 1e30]


@pytest.mark.parametrize("columns", [40, 12 * STRETCH + 1])
@pytest.mark.parametrize("scale", SCALES)
def test_any_scale_of_float32_is_right(scale, columns):
    given = random(5, columns, scale=scale)
    assert worst(gram(read_updates(given))[0], reference(given), given.double().numpy()) <= 2e-7
    each = read_updates([{"w": row} for row in given])
    assert worst(gram(each)[0], reference(given), given.double().numpy()) <= 2e-7


@pytest.mark.parametrize("columns", [40, 12 * STRETCH + 1])
@pytest.mark.parametrize("here", [1e-30, 1e-25, 1.0, 1e25])
@pytest.mark.parametrize("there", [1e-30, 1e-25, 1.0, 1e25])
def test_any_scale_of_remembered_rows_is_right(here, there, columns):
    now, then = random(4, columns, scale=here), random(3, columns, seed=1, scale=there)
    updates = read_updates(now)
    found = products(updates, [past_updates(updates, (then,), len(then))])[1][0][0]
    wanted = now.double().numpy() @ then.double().numpy().T
    assert worst(found, wanted, now.double().numpy(), then.double().numpy()) <= 2e-7


def test_rows_of_very_different_scales_are_right_together():
    scales = torch.tensor([1e-30, 1e-25, 1e-12, 1.0, 1e12, 1e25, 1e30])
    given = random(7, 12 * STRETCH + 1) * scales[:, None]
    assert worst(gram(read_updates(given))[0], reference(given), given.double().numpy()) <= 2e-7
    blocks = read_updates([{"first.w": row, "second.w": row.flip(0)} for row in given])
    for block in gram(blocks):
        assert worst(block, reference(given), given.double().numpy()) <= 2e-7


@pytest.mark.parametrize("rows", [1, 3, TILE + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[STRETCH, 2 * STRETCH, STRETCH], [STRETCH, STRETCH + 1, 3], [5, 2 * STRETCH]])
def test_layers_of_a_matrix_are_told_apart(rows, dtype, sizes):
    """Layers made of whole stretches are multiplied in one go, others one by one: the same products, to rounding."""
    matrix = random(rows, sum(sizes)).to(dtype)
    then = random(4, sum(sizes)).to(dtype)
    updates = read_updates(matrix, sizes)
    own, (past,) = products(updates, [past_updates(updates, (then,), len(then))])
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    pieces = zip(matrix.double().split(sizes, dim=1), then.double().split(sizes, dim=1), strict=True)
    for block, (now, before) in enumerate(pieces):
        lengths, others = now.norm(dim=1), before.norm(dim=1)
        for found, other, size in ((own, now, lengths), (past, before, others)):
            errors = np.abs(found[block] - (now @ other.T).numpy()) / torch.outer(lengths, size).numpy()
            assert errors.max() <= tolerance


def test_zero_rows_have_zero_products():
    given = random(4, 12 * STRETCH)
    given[1] = 0.0
    found = gram(read_updates(given))[0]
    assert (found[1] == 0.0).all()
    assert (found[:, 1] == 0.0).all()
    assert worst(np.delete(np.delete(found, 1, 0), 1, 1), reference(given[[0, 2, 3]]), given[[0, 2, 3]].numpy()) <= 2e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("columns", [10, 12 * STRETCH])
def test_a_bad_row_shows_on_the_diagonal_and_spoils_no_other(bad, scale, columns):
    given = random(5, columns, scale=scale)
    given[2, columns // 2] = bad
    found = gram(read_updates(given))[0]
    assert not np.isfinite(found[2, 2])
    rest = [0, 1, 3, 4]
    assert worst(found[np.ix_(rest, rest)], reference(given[rest]), given[rest].double().numpy()) <= 2e-7


# ----------------------------------------------------------------------------------- the caller's switches


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_reach_the_products(kind):
    given = random(6, 20_011)
    with torch.autocast("cpu", dtype=kind):
        assert (given @ given.T).dtype == kind  # it is on
        found = gram(read_updates(given))[0]
        combined = combine(np.full((1, 6), 1 / 6), read_updates(given))[0]
        assert (given @ given.T).dtype == kind  # and on again
    assert worst(found, reference(given), given.numpy()) <= 2e-7
    torch.testing.assert_close(combined, given.double().mean(dim=0).float())


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_lower_matmul_precision_does_not_reach_the_products(matmul_precision, precision):
    given = random(100, 20_011)
    matmul_precision(precision)
    found = gram(read_updates(given))[0]
    combined = combine(np.full((1, 100), 0.01), read_updates(given))[0]
    assert torch.get_float32_matmul_precision() == precision
    assert worst(found, reference(given), given.numpy()) <= 2e-7
    torch.testing.assert_close(combined, given.double().mean(dim=0).float())


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_switches_are_set_for_the_products_and_put_back(matmul_precision, precision):
    """Whether this machine's kernels would use TF32 or bfloat16 or not."""
    matmul_precision(precision)
    backends = [getattr(torch.backends.mkldnn, "matmul", None)]  # of the device where the updates are
    backends = [backend for backend in backends if hasattr(backend, "fp32_precision")]

    def now():
        return [torch.get_float32_matmul_precision(), *(backend.fp32_precision for backend in backends)]

    def inside():
        with exact_products(read_updates(random(2, 3))):
            assert all(backend.fp32_precision in ("ieee", "none") for backend in backends)
            assert backends or torch.get_float32_matmul_precision() == "highest"
            raise ZeroDivisionError

    before = now()
    with pytest.raises(ZeroDivisionError):
        inside()
    assert now() == before


def test_no_graph_is_recorded():
    given = random(3, 50).requires_grad_()
    updates = read_updates(given)
    assert not combine(np.ones((1, 3)), updates)[0].requires_grad
    gram(updates)
    assert given.grad is None


def test_default_dtype_and_inference_mode_do_not_matter():
    given = random(4, 30)
    wanted = gram(read_updates(given))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode():
            np.testing.assert_array_equal(gram(read_updates(given)), wanted)
            assert combine(np.ones((1, 4)), read_updates(given))[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu_even_where_tf32_is_on(matmul_precision):
    given = random(100, 100_003)
    matmul_precision("highest")  # put back afterwards; the next line is what people write
    torch.backends.cuda.matmul.allow_tf32 = True
    there = given.cuda()
    assert worst((there @ there.T).cpu().double().numpy(), reference(given), given.numpy()) > 1e-6  # it is on
    updates = read_updates(there)
    assert worst(gram(updates)[0], reference(given), given.numpy()) <= 2e-7
    combined = combine(np.full((1, 100), 0.01), updates)[0]
    assert combined.is_cuda
    torch.testing.assert_close(combined.cpu(), given.double().mean(dim=0).float())
    assert torch.backends.cuda.matmul.allow_tf32
    out = eh.aggregate("fedlf", [{"a.w": row} for row in there], losses=np.arange(1.0, 101.0), clients=range(100))
    again = eh.aggregate(
        "fedlf", [{"a.w": row} for row in there[:5]], losses=np.arange(1.0, 6.0), clients=range(5), state=out.state
    )
    assert again.update["a.w"].is_cuda
    assert worst(again.diagnostics.gram[0], reference(given), given.numpy()) <= 2e-7


# ------------------------------------------------------------------------------------------------ layers

NETWORK = {
    "body.conv.weight": (3, 2),
    "body.conv.bias": (3,),
    "body.norm.weight": (3,),
    "head.weight": (4,),
    "temp": (),
}


def network(count=4):
    generator = torch.Generator().manual_seed(3)
    return [{n: torch.randn(s, generator=generator) for n, s in NETWORK.items()} for _ in range(count)]


BY_MODULE = {
    "body.conv": ["body.conv.weight", "body.conv.bias"],
    "body.norm": ["body.norm.weight"],
    "head": ["head.weight"],
    "temp": ["temp"],
}
GROUPINGS = [
    (None, BY_MODULE),
    ("module", BY_MODULE),
    ("tensor", {name: [name] for name in NETWORK}),
    ("model", {"model": list(NETWORK)}),
    (
        {"body.conv.weight": 1, "body.conv.bias": 2, "body.norm.weight": 1, "head.weight": 2, "temp": 2},
        {"1": ["body.conv.weight", "body.norm.weight"], "2": ["body.conv.bias", "head.weight", "temp"]},
    ),
    (
        lambda name: name.split(".")[0],
        {"body": ["body.conv.weight", "body.conv.bias", "body.norm.weight"], "head": ["head.weight"], "temp": ["temp"]},
    ),
]


@pytest.mark.parametrize(("layers", "wanted"), GROUPINGS)
@pytest.mark.parametrize("stacked", [False, True])
def test_tensors_form_layers(layers, wanted, stacked):
    rows = network()
    given = {name: torch.stack([row[name] for row in rows]) for name in NETWORK} if stacked else rows
    updates = read_updates(given, layers)
    products = gram(updates)
    assert updates.layout.blocks == tuple(wanted)
    for found, names in zip(products, wanted.values(), strict=True):
        part = [flat([row[name] for name in names]) for row in rows]
        np.testing.assert_allclose(found, reference(part), rtol=1e-12, atol=1e-14)
    whole = reference([flat(row) for row in rows])
    np.testing.assert_allclose(products.sum(axis=0), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ([5, 2, 13], ("layer1", "layer2", "layer3")),
        ({"a": 5, "b": 2, "c": np.int64(13)}, ("a", "b", "c")),
        ("model", ("update",)),
        (None, ("update",)),
    ],
)
def test_columns_form_layers(layers, names):
    given = random(4, 20)
    updates = read_updates(given, layers)
    products = gram(updates)
    assert updates.layout.blocks == names
    edges = [0, 5, 7, 20] if len(names) == 3 else [0, 20]
    for found, start, stop in zip(products, edges[:-1], edges[1:], strict=True):
        np.testing.assert_allclose(found, reference(given[:, start:stop]), rtol=1e-12, atol=1e-14)
    alone = np.zeros((len(names), 4))
    alone[:, 2] = 1.0
    assert_same(restore(updates.layout, combine(alone, updates)), given[2])


def test_layers_of_a_stack_keep_its_shape():
    given = random(4, 24).reshape(4, 2, 3, 4)
    out = eh.aggregate("fedlf", given, losses=[1.0, 2.0, 3.0, 4.0], layers=[10, 14])
    assert out.update.shape == (2, 3, 4)
    assert out.coefficients.shape == (2, 4)


@pytest.mark.parametrize(
    ("given", "layers", "said"),
    [
        (random(2, 6), [2, 3], r"\[2, 3\] must be positive and add up to the 6 columns"),
        (random(2, 6), [7, -1], "must be positive"),
        (random(2, 6), [3.0, 3.0], "must be positive"),
        (random(2, 6), "module", "sizes of its consecutive columns"),
        (network(), "modul", "'modul' not understood"),
        (network(), 7, "7 not understood"),
        (network(), {name: "x" for name in NETWORK if name != "temp"}, "no layer for 'temp'"),
        (network(), {("haed.weight" if n == "head.weight" else n): "x" for n in NETWORK}, "did you mean 'haed.weight'"),
    ],
)
def test_layers_that_do_not_fit_are_refused(given, layers, said):
    with pytest.raises(eh.EvenhandError, match=said):
        read_updates(given, layers)


# ---------------------------------------------------------------------------------------------- combining


def test_each_block_has_its_own_combination():
    rows = network()
    updates = read_updates(rows)
    rng = np.random.default_rng(0)
    coefficients = rng.standard_normal((4, 4))
    found = restore(updates.layout, combine(coefficients, updates))
    for row, names in zip(coefficients, BY_MODULE.values(), strict=True):
        for name in names:
            wanted = sum(c * r[name].double() for c, r in zip(row, rows, strict=True))
            torch.testing.assert_close(found[name].double(), wanted, rtol=1e-5, atol=1e-6)


def test_remembered_rows_come_after_the_present_ones():
    now, then = random(3, 5_000), random(2, 5_000, seed=1)
    updates = read_updates(now)
    past = past_updates(updates, (then,), len(then))
    coefficients = np.array([[1.0, -2.0, 0.5, 3.0, -1.0]])
    present = len(updates)
    found = combine(coefficients[:, :present], updates, [(past, coefficients[:, present:])])[0]
    wanted = torch.tensor(coefficients[0]) @ torch.cat([now, then]).double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    only = combine(coefficients[:, [1]], updates.select([1]), [(past, coefficients[:, present:])])[0]
    wanted = torch.tensor(coefficients[0, [1, 3, 4]]) @ torch.cat([now[1:2], then]).double()
    torch.testing.assert_close(only.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_rows_that_do_not_count_are_not_read(dtype, precise, given):
    """Wide rows of which few have a coefficient, per layer, remembered ones too; the others may hold anything."""
    now, then = random(6, 40_000, dtype), random(9, 40_000, dtype, seed=1)
    updates = read_updates(now, [20_000, 20_000])
    past = past_updates(updates, (then,), len(then))
    coefficients = np.zeros((2, 15))
    coefficients[0, [1, 4, 7, 14]], coefficients[1, [0, 8]] = [1.0, -2.0, 0.5, 3.0], [-1.0, 2.5]
    whole = torch.cat([now, then]).double()
    wanted = torch.cat(
        [torch.tensor(own) @ half for own, half in zip(coefficients, whole.split(20_000, 1), strict=True)]
    )
    then[3] = torch.nan
    parts = coefficients[:, :6], updates, [(past, coefficients[:, 6:])]
    own = combine(*parts[:2], precise=precise) if given else None
    found = combine(*parts, precise=precise, own=own)[0]
    assert found.dtype == (torch.float64 if precise or dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    nobody = combine(np.zeros((2, 6)), updates, precise=precise)[0]
    assert not nobody.any()
    assert nobody.shape == (40_000,)


def test_the_precise_path_survives_cancellation():
    """Terms a million times longer than their sum: float32 would lose it, float64 does not."""
    common, small = random(1, 4_000), 1e-6 * random(1, 4_000, seed=1)
    given = torch.cat([common, common + small])
    updates = read_updates(given)
    wanted = 1e6 * (given[1].double() - given[0].double())
    coefficients = np.array([[-1e6, 1e6]])
    precise = combine(coefficients, updates, precise=True)[0]
    assert precise.dtype == torch.float64
    torch.testing.assert_close(precise, wanted, rtol=1e-8, atol=1e-8)
    past = past_updates(updates, (given[:1],), 1)
    from_memory = combine(np.array([[1e6]]), updates.select([1]), [(past, np.array([[-1e6]]))], precise=True)[0]
    torch.testing.assert_close(from_memory, wanted, rtol=1e-8, atol=1e-8)


def test_a_round_takes_the_precise_path_where_its_terms_cancel():
    """Two nearly opposite updates: their min-norm point is a ten-thousandth of their length."""
    common, small = random(1, 2_000, torch.float64), 1e-4 * random(1, 2_000, torch.float64, seed=1)
    given = torch.cat([common + small, small - common]).float()
    out = eh.aggregate("fedmgda+", given, epsilon=1.0, reference="uniform")
    wanted = out.coefficients[0] @ given.double().numpy()
    assert np.linalg.norm(wanted) < 2e-4
    assert np.linalg.norm(out.update.double().numpy() - wanted) <= 1e-6 * np.linalg.norm(wanted)


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "updates is empty"),
        ({}, "empty mapping"),
        (np.zeros((0, 3)), "updates is empty"),
        (np.zeros((3, 0)), "holds no numbers"),
        (np.zeros((3, 2, 0)), "holds no numbers"),
        (np.zeros(3), "first axis counts clients"),
        (np.ones((2, 2), dtype=int), "floating-point numbers are needed"),
        (torch.ones(2, 2, dtype=torch.int32), "floating-point numbers are needed"),
        (np.ones((2, 2), dtype=complex), "floating-point numbers are needed"),
        (np.array([["a", "b"]]), "floating-point numbers are needed"),
        (np.ones((2, 2), dtype=">f4"), "torch does not know"),
        (torch.eye(3).to_sparse(), "sparse tensor; pass value.to_dense"),
        ("weights", "type str not understood"),
        (3.5, "type float not understood"),
        ([[1.0, 2.0], [3.0, 4.0]], "type list not understood"),
        ([[], []], "type list not understood"),
        ([{"n": torch.tensor(1)}, {"n": torch.tensor(2)}], "hold no floating-point numbers"),
        ([{"a": torch.ones(2)}, {"a": 1.0}], r"updates\[1\]\['a'\] is a float"),
        ([{0: torch.ones(2)}, {0: torch.ones(2)}], r"updates\[0\] has the key 0, a int"),
        ({0: torch.ones(2, 2)}, "updates has the key 0"),
        ([{"a": torch.ones(2)}, [torch.ones(2)]], r"updates\[1\] is a list, updates\[0\] is a mapping"),
        ([torch.ones(2), torch.ones(3)], r"updates\[1\].* has shape \(3,\), updates\[0\].* has \(2,\)"),
        ([torch.ones(2), torch.ones(2).double()], r"updates\[1\].* has dtype torch.float64"),
        ([[torch.ones(2)], [torch.ones(2), torch.ones(2)]], r"updates\[1\] has 2 tensors, updates\[0\] has 1"),
        ([[torch.ones(2)], 5], r"updates\[1\] has int tensors"),
        ({"a": torch.ones(2, 3), "b": torch.ones(4, 3)}, r"updates\['b'\] has 4 clients.*updates\['a'\] has 2"),
        ({"a": torch.tensor(1.0)}, "has 0 clients on its first axis"),
        (
            [{"head.w": torch.ones(2)}, {"haed.w": torch.ones(2)}],
            r"updates\[1\] lacks \['head.w'\].*did you mean 'head.w'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(given, said):
    with pytest.raises(eh.EvenhandError, match=said):
        read_updates(given)


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("layers", [[4], [1, 3, 2]])  # in stretches
@pytest.mark.parametrize("bytes_at_once", [1, 1 << 30])
def test_several_cohorts_at_once_find_what_each_finds(layers, bytes_at_once, monkeypatch):
    monkeypatch.setattr("evenhand.geometry.SIDE_BY_SIDE", bytes_at_once)
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((15, STRETCH * sum(layers)))).float()
    layout = read_updates(rows, [STRETCH * size for size in layers]).layout
    cohorts = [read_updates(own, [STRETCH * size for size in layers]) for own in rows.split(5)]
    for found, own in zip(products_within(rows, layout, 3), cohorts, strict=True):
        np.testing.assert_allclose(found, gram(own), rtol=1e-6, atol=1e-3)
    each = np.random.default_rng(1).standard_normal((3, len(layers), 5))
    for coefficients in (each, np.repeat(each[:, :1], len(layers), axis=1)):
        for found, scales, own in zip(combine_within(coefficients, rows, layout), coefficients, cohorts, strict=True):
            torch.testing.assert_close(found, combine(scales, own)[0], rtol=1e-5, atol=1e-5)
            past = [(cohorts[0], scales[:, ::-1].copy())]
            both = combine(scales, own, past, own=[found])[0]
            torch.testing.assert_close(both, combine(scales, own, past)[0], rtol=1e-5, atol=1e-5)


MEASURE = """
import numpy as np, torch
from evenhand.geometry import combine, gram
from evenhand.updates import read_updates

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

def passes(updates, some):
    read = read_updates(updates)
    if some:
        read = read.select(range(1, len(read)))
    found = gram(read)
    combine(np.full((len(found), len(read)), 0.01), read)

def make(form, columns):
    if form == "separate":
        sizes = [columns // 2 - 700, 512, columns // 4, 188, columns // 4]
        return [{f"layer{i}.weight": torch.ones(size) for i, size in enumerate(sizes)} for _ in range(100)]
    if form == "dense":
        return torch.ones(100, columns)
    if form == "every second column":
        return torch.ones(100, 2 * columns)[:, ::2]
    return torch.ones(100, 4, 4, columns // 16).permute(0, 3, 1, 2)  # channels last

for form, columns, some in CASES:
    passes(make(form, 4_000), some)  # threads, libraries and their buffers
    updates = make(form, columns)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak is what there is now
    before = kilobytes("VmRSS")
    passes(updates, some)
    print(kilobytes("VmHWM") - before)
    del updates
"""
CASES = [
    ("dense", 400_000, False),
    ("separate", 400_000, False),
    ("dense", 400_000, True),
    ("every second column", 400_000, False),
    ("channels last", 100_000, False),
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's own account of peak memory")
def test_no_second_copy_of_the_updates_is_made():
    """100 clients x 400,000 numbers are 160 MB; both passes together need a tenth of that and a fixed buffer."""
    script = MEASURE.replace("CASES", repr(CASES))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for case, said in zip(CASES, done.stdout.splitlines(), strict=True):
        extra = int(said) * 1024
        assert extra < 0.1 * (400 * case[1]) + 24e6, f"{case}: {extra / 1e6:.0f} MB"
