"""The min-norm point: optimal for every shape of problem, and found whichever solvers are there."""

from __future__ import annotations

import sys

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand import EvenhandError, solvers
from evenhand.solvers import LARGE, TOLERANCE, min_norm, optimality_gap, project_to_simplex

PROPERTY = settings(max_examples=80, deadline=None)
KINDS = ("full", "low rank", "duplicates", "opposites", "zero rows", "one direction", "unequal", "origin inside")
SCALES = (1e-12, 1e-6, 1.0, 1e6, 1e12)  # of the rows: 1e-24 to 1e24 in the Gram matrix


def vectors(seed, rows, kind, scale=1.0):
    """Rows whose hull is easy or awkward in a known way."""
    rng = np.random.default_rng(seed)
    columns = int(rng.integers(1, 2 * rows + 2))
    found = rng.standard_normal((rows, columns)) + 0.5 * rng.standard_normal(columns)
    if kind == "low rank":
        rank = max(1, rows // 3)
        found = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns)) + 0.3
    elif kind == "duplicates":
        found = found[rng.integers(0, max(1, rows // 2), rows)]
    elif kind == "opposites":
        found[rows // 2 :] = -found[: rows - rows // 2]
    elif kind == "zero rows":
        found[rng.random(rows) < 0.3] = 0.0
    elif kind == "one direction":
        found = rng.uniform(0.5, 2.0, (rows, 1)) * found[:1]
    elif kind == "unequal":
        found *= 10.0 ** rng.uniform(-1, 1, (rows, 1))
    elif kind == "origin inside":
        found = rng.standard_normal((rows, max(1, rows // 4)))
    return found * scale


def problems(max_rows=60):
    return st.builds(
        vectors,
        seed=st.integers(0, 2**32 - 1),
        rows=st.integers(1, max_rows),
        kind=st.sampled_from(KINDS),
        scale=st.sampled_from(SCALES),
    )


def box(seed, rows, width):
    """Bounds around random weights, so that they can be met."""
    centre = np.random.default_rng(seed).dirichlet(np.ones(rows))
    return np.maximum(centre - width, 0.0), np.minimum(centre + width, 1.0)


def assert_feasible(weights, low, high):
    assert abs(weights.sum() - 1.0) <= 1e-12
    assert (weights >= low).all()
    assert (weights <= high).all()


def shortest_square(rows):
    """Of the rows that move."""
    squares = np.square(rows).sum(axis=1)
    return squares[squares > 0.0].min(initial=squares.max())


def assert_optimal(solved, rows, low, high):
    """Verified, and so it should be: nothing is gained by moving weight from any row to any other."""
    assert solved.verified, solved.note()
    assert_feasible(solved.weights, low, high)
    point = solved.weights @ rows
    slopes = rows @ point
    movable = np.minimum.outer(solved.weights - low, high - solved.weights)
    rounding = 1e-13 * np.square(rows).sum(axis=1).max()
    unit = max(shortest_square(rows), solved.square)
    assert (movable * np.subtract.outer(slopes, slopes)).max() <= TOLERANCE * unit + rounding
    assert abs(solved.square - point @ point) <= rounding


def assert_same_point(solved, expected, rows, other_gap=0.0):
    """The weights may differ where rows depend on each other; the points only by what the gap leaves open."""
    open_square = 4.0 * (solved.gap + other_gap) * max(shortest_square(rows), solved.square)
    off = np.linalg.norm((solved.weights - expected) @ rows)
    assert off <= np.sqrt(open_square) + 1e-7 * np.linalg.norm(rows, axis=1).max()


# ---------------------------------------------------------------------------------------------- optimality


@PROPERTY
@given(problems())
def test_the_simplex_is_solved(rows):
    solved = min_norm(rows @ rows.T)
    assert_optimal(solved, rows, np.zeros(len(rows)), np.ones(len(rows)))
    assert_same_point(solved, oracles.min_norm_simplex(rows), rows)


@PROPERTY
@given(problems(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 0.05, 0.3, 1.0]))
def test_the_box_is_solved(rows, seed, width):
    low, high = box(seed, len(rows), width)
    solved = min_norm(rows @ rows.T, low, high)
    assert_optimal(solved, rows, low, high)
    assert_same_point(solved, oracles.min_norm_box(rows, low, high), rows)


@PROPERTY
@given(problems(20), st.sampled_from([1e-24, 1e-7, 3.0, 1e24]))
def test_the_weights_do_not_depend_on_the_unit(rows, factor):
    gram = rows @ rows.T
    one, other = min_norm(gram), min_norm(factor * gram)
    assert other.verified
    assert_same_point(one, other.weights, rows, other.gap)
    assert other.square == pytest.approx(factor * one.square, rel=1e-6, abs=1e-9 * factor * np.trace(gram))


@PROPERTY
@given(problems(25), st.randoms(use_true_random=False))
def test_the_point_does_not_depend_on_the_order_of_the_rows(rows, random):
    order = random.sample(range(len(rows)), len(rows))
    shuffled = min_norm(rows[order] @ rows[order].T)
    straight = min_norm(rows @ rows.T)
    assert_same_point(shuffled, straight.weights[order], rows[order], straight.gap)


@PROPERTY
@given(problems())
def test_no_row_is_opposed(rows):
    """What the min-norm point is for: a step along it raises no client's loss."""
    solved = min_norm(rows @ rows.T)
    point = solved.weights @ rows
    assert (rows @ point).min() >= point @ point - 1e-8 * np.square(rows).sum(axis=1).max()


@PROPERTY
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_independent_rows_are_solved_to_the_last_digits(seed, rows):
    """No trace of the ridge that the solvers need."""
    given = np.random.default_rng(seed).standard_normal((rows, 3 * rows + 5)) + 0.3
    solved = min_norm(given @ given.T)
    assert solved.gap <= 1e-13
    np.testing.assert_allclose(solved.weights, oracles.min_norm_simplex(given), atol=1e-12)


@PROPERTY
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_rows_of_very_unequal_lengths_are_solved_in_the_unit_of_the_shortest(seed, rows):
    given = vectors(seed, rows, "full") * 10.0 ** np.random.default_rng(seed).uniform(-3, 3, (rows, 1))
    solved = min_norm(given @ given.T)
    off = np.linalg.norm((solved.weights - oracles.min_norm_simplex(given)) @ given)
    assert off <= 1e-6 * np.sqrt(shortest_square(given))


@pytest.mark.parametrize("length", [1e-6, 1e-4, 1e4, 1e6])
def test_a_row_of_another_length_is_not_lost(length):
    """Two orthogonal rows: the point nearest the origin is known, and lies by the shorter one."""
    solved = min_norm(np.diag([1.0, length**2]))
    assert solved.verified
    weight = length**2 / (1.0 + length**2)
    np.testing.assert_allclose(solved.weights, [weight, 1.0 - weight], rtol=1e-9, atol=1e-15)


def test_one_row_and_none_that_moves_have_a_closed_form():
    alone = min_norm(np.array([[4.0]]))
    assert (alone.weights.tolist(), alone.square, alone.solver) == ([1.0], 4.0, "closed form")
    still = min_norm(np.zeros((3, 3)))
    assert still.square == 0.0
    assert still.weights.sum() == pytest.approx(1.0)
    some = min_norm(np.diag([1.0, 0.0, 2.0, 0.0]))
    np.testing.assert_allclose(some.weights, [0.0, 0.5, 0.0, 0.5])
    assert some.square == 0.0


def test_a_box_without_room_is_its_only_point():
    centre = np.array([0.2, 0.3, 0.5])
    solved = min_norm(np.diag([1.0, 2.0, 3.0]), centre, centre)
    np.testing.assert_allclose(solved.weights, centre, atol=1e-12)
    assert solved.verified


def test_one_bound_may_be_left_out():
    gram = np.diag([1.0, 1.0, 100.0])
    np.testing.assert_allclose(min_norm(gram, lower=np.full(3, 0.2)).weights, [0.4, 0.4, 0.2], atol=1e-9)
    np.testing.assert_allclose(min_norm(gram, upper=np.full(3, 0.45)).weights, [0.45, 0.45, 0.1], atol=1e-9)


@pytest.mark.parametrize("rank", [30, 1000], ids=["low rank", "full rank"])
@pytest.mark.parametrize("boxed", [False, True])
def test_a_thousand_rows_are_verified(rank, boxed):
    rng = np.random.default_rng(rank)
    rows = rng.standard_normal((1000, rank)) / np.sqrt(rank) + 0.3 * rng.standard_normal(rank) / np.sqrt(rank)
    low, high = (np.zeros(1000), np.full(1000, 0.002)) if boxed else (np.zeros(1000), np.ones(1000))
    solved = min_norm(rows @ rows.T, low, high) if boxed else min_norm(rows @ rows.T)
    assert_optimal(solved, rows, low, high)


# --------------------------------------------------------------------------------------------- solver paths

ROWS = vectors(7, 12, "full")
GRAM = ROWS @ ROWS.T
BOX = box(3, 12, 0.1)


def absent(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # the import fails


@pytest.mark.parametrize(
    ("missing", "boxed", "used"),
    [
        ((), False, "daqp"),
        ((), True, "daqp"),
        (("daqp",), False, "nnls"),
        (("daqp",), True, "piqp"),
        (("piqp",), False, "daqp"),
        (("piqp",), True, "daqp"),
        (("daqp", "piqp"), False, "nnls"),
        (("daqp", "piqp"), True, "slsqp"),
    ],
)
def test_a_missing_library_is_made_up_for(monkeypatch, missing, boxed, used):
    if "piqp" not in missing and used == "piqp":
        pytest.importorskip("piqp")
    absent(monkeypatch, *missing)
    monkeypatch.setattr(solvers, "_pivoting", gives_up)
    low, high = BOX if boxed else (np.zeros(12), np.ones(12))
    solved = min_norm(GRAM, *BOX) if boxed else min_norm(GRAM)
    assert solved.solver.split()[0] == used
    assert solved.note().startswith(used)
    assert_optimal(solved, ROWS, low, high)
    assert_same_point(solved, oracles.min_norm_box(ROWS, low, high), ROWS)


@pytest.mark.parametrize(
    ("missing", "boxed", "used"),
    [((), False, "nnls"), ((), True, "piqp"), (("piqp",), True, "daqp"), (("daqp", "piqp"), False, "nnls")],
)
def test_large_problems_take_another_way(monkeypatch, missing, boxed, used):
    if used == "piqp":
        pytest.importorskip("piqp")
    absent(monkeypatch, *missing)
    monkeypatch.setattr(solvers, "_pivoting", gives_up)
    rows = vectors(1, LARGE + 10, "full")
    low, high = box(2, len(rows), 0.01) if boxed else (np.zeros(len(rows)), np.ones(len(rows)))
    solved = min_norm(rows @ rows.T, low, high) if boxed else min_norm(rows @ rows.T)
    assert solved.solver.split()[0] == used
    assert_optimal(solved, rows, low, high)


@pytest.mark.parametrize("kind", ["full", "duplicates"])
@pytest.mark.parametrize("count", [2, 12, 60, LARGE + 10])
def test_pivoting_alone_finds_the_point(monkeypatch, count, kind):
    """The first choice needs none of the others where the hull stays away from the origin."""
    for name in ("_daqp", "_nnls", "_piqp"):
        monkeypatch.setattr(solvers, name, gives_up)
    for seed in range(5):
        rows = np.random.default_rng(seed).standard_normal((count, 300))
        rows += np.random.default_rng(seed + 9).standard_normal(rows.shape[1]) * (seed / 5)
        if kind == "duplicates":
            rows[1:] = np.where(np.arange(1, count)[:, None] % 3 == 0, rows[:1], rows[1:])
        solved = min_norm(rows @ rows.T)
        assert solved.solver.startswith("pivoting")
        assert_optimal(solved, rows, np.zeros(count), np.ones(count))


def gives_up(problem):
    return None


def nonsense(problem):
    return np.full(len(problem), np.nan)


def far_off(problem):
    """A vertex, and not the right one."""
    answer = np.zeros(len(problem))
    answer[int(np.argmax(np.diagonal(GRAM)))] = 1.0
    return answer


@pytest.mark.parametrize("answer", [gives_up, nonsense, far_off])
@pytest.mark.parametrize(
    ("failing", "boxed", "used"),
    [(("_pivoting",), False, "daqp"), (("_pivoting", "_daqp"), False, "nnls"), (("_daqp",), True, "piqp")],
)
def test_a_failing_or_wrong_solver_is_followed_by_the_next(monkeypatch, answer, failing, boxed, used):
    if used == "piqp":
        pytest.importorskip("piqp")
    for name in failing:
        monkeypatch.setattr(solvers, name, answer)
    low, high = BOX if boxed else (np.zeros(12), np.ones(12))
    solved = min_norm(GRAM, *BOX) if boxed else min_norm(GRAM)
    assert solved.solver.split()[0] == used
    assert_optimal(solved, ROWS, low, high)


def test_an_answer_that_is_not_optimal_says_so(monkeypatch):
    for name in ("_pivoting", "_daqp", "_nnls", "_piqp"):
        monkeypatch.setattr(solvers, name, far_off)
    solved = min_norm(GRAM)
    assert not solved.verified
    assert "NOT verified" in solved.note()
    assert_feasible(solved.weights, np.zeros(12), np.ones(12))


def test_no_answer_at_all_is_an_error(monkeypatch):
    for name in ("_pivoting", "_daqp", "_nnls", "_piqp"):
        monkeypatch.setattr(solvers, name, gives_up)
    with pytest.raises(EvenhandError, match="no solver found the min-norm point of 12 rows"):
        min_norm(GRAM)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gram_matrix_that_is_not_finite_is_refused(bad):
    gram = GRAM.copy()
    gram[3, :] = gram[:, 3] = bad
    with pytest.raises(EvenhandError, match="NaN or Inf"):
        min_norm(gram)


@pytest.mark.parametrize(
    ("low", "high"),
    [([0.5, 0.5, 0.5], [1.0, 1.0, 1.0]), ([0.0, 0.0, 0.0], [0.3, 0.3, 0.3]), ([0.4, 0.0, 0.0], [0.3, 1.0, 1.0])],
)
def test_a_box_that_no_weights_fit_is_refused(low, high):
    with pytest.raises(EvenhandError, match=r"no weights fit the box: lower bounds add up to .*, upper bounds to"):
        min_norm(np.eye(3), np.array(low), np.array(high))


# ------------------------------------------------------------------------------------------- optimality gap


@PROPERTY
@given(problems(12), st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.3, 1.0]))
def test_the_gap_bounds_what_is_left_to_gain(rows, seed, width):
    """At any feasible weights: the squared length minus the least one is at most twice the gap."""
    low, high = box(seed, len(rows), width)
    gram = rows @ rows.T
    weights = solvers._inside(np.random.default_rng(seed).dirichlet(np.ones(len(rows))), low, high)
    gap = optimality_gap(gram @ weights, weights, (low, high))
    least = oracles.min_norm_box(rows, low, high)
    gain = weights @ gram @ weights - least @ gram @ least
    unit = np.trace(gram)
    assert -1e-9 * unit <= gain <= 2.0 * gap + 1e-9 * unit


# ------------------------------------------------------------------------------------------------- simplex

points = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40).map(np.array)


@PROPERTY
@given(points)
def test_a_projected_point_lies_on_the_simplex(point):
    found = project_to_simplex(point)
    assert (found >= 0.0).all()
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(found, oracles.project_to_simplex(point), atol=1e-8)


@PROPERTY
@given(points, st.integers(0, 2**32 - 1))
def test_no_point_of_the_simplex_is_nearer(point, seed):
    found = project_to_simplex(point)
    others = np.random.default_rng(seed).dirichlet(np.ones(len(point)), size=20)
    away = point - found
    assert ((others - found) @ away <= 1e-6 * (1.0 + np.abs(point).max())).all()  # the projection's inequality


@PROPERTY
@given(points, st.floats(-1e3, 1e3))
def test_projection_keeps_order_ignores_shifts_and_keeps_the_simplex(point, shift):
    found = project_to_simplex(point)
    order = np.argsort(point, kind="stable")
    assert (np.diff(found[order]) >= 0.0).all()
    np.testing.assert_allclose(project_to_simplex(point + shift), found, atol=1e-9)
    np.testing.assert_allclose(project_to_simplex(found), found, atol=1e-12)


@pytest.mark.parametrize("huge", [1e16, 1e17, 1e100, 1e300])
def test_a_huge_entry_takes_everything(huge):
    np.testing.assert_array_equal(project_to_simplex(np.array([0.0, huge, 1.0])), [0.0, 1.0, 0.0])
    np.testing.assert_array_equal(project_to_simplex(np.array([-huge, 0.25, 0.75])), [0.0, 0.25, 0.75])
