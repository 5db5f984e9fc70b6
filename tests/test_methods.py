"""Each rule against its paper: the long-vector oracle, the limit cases, and the printed examples."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest
import torch
from cohorts import Cohort, cohorts, independent, make
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import evenhand as eh

PROPERTY = settings(max_examples=60, deadline=None)


def close(found: np.ndarray, expected: np.ndarray, cohort: Cohort, tolerance: float = 1e-9) -> None:
    """Equal relative to the length of the vectors that were combined."""
    unit = np.linalg.norm(cohort.updates, axis=1).max() + np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) <= tolerance * unit


def same_direction(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Equal length and direction, relative to the length."""
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


# ------------------------------------------------------------------------------------------ weights by size or loss


@PROPERTY
@given(cohorts())
def test_fedavg_is_the_mean(cohort):
    close(
        eh.aggregate("fedavg", cohort.updates, sizes=cohort.sizes).update,
        oracles.fedavg(cohort.updates, cohort.sizes),
        cohort,
    )
    uniform = eh.aggregate("fedavg", cohort.updates, weights="uniform").update
    close(uniform, oracles.fedavg(cohort.updates), cohort)


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 0.1, 1.0, 5.0, 15.0]), st.sampled_from([0.5, 10.0, 100.0]))
def test_qffl_follows_its_paper(cohort, q, lipschitz):
    found = eh.aggregate("qffl", cohort.updates, losses=cohort.losses, q=q, lipschitz=lipschitz).update
    close(found, oracles.qffl(cohort.updates, cohort.losses, q, lipschitz), cohort)


def test_qffl_takes_the_learning_rate_for_its_constant():
    cohort = make(1, 5, 30)
    given_rate = eh.aggregate("qffl", cohort.updates, losses=cohort.losses, q=1.0, lr=0.05).update
    given_constant = eh.aggregate("qffl", cohort.updates, losses=cohort.losses, q=1.0, lipschitz=20.0).update
    np.testing.assert_allclose(given_rate, given_constant, rtol=1e-12)
    with pytest.raises(eh.EvenhandError, match="lr"):
        eh.aggregate("qffl", cohort.updates, losses=cohort.losses, q=1.0)


@PROPERTY
@given(cohorts(), st.sampled_from([-2.0, 0.1, 1.0, 50.0]))
def test_term_follows_its_paper(cohort, t):
    found = eh.aggregate("term", cohort.updates, losses=cohort.losses, t=t).update
    close(found, oracles.term(cohort.updates, cohort.losses, t), cohort)


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 0.5, 1.0, 10.0]))
def test_drfl_follows_its_paper(cohort, q):
    found = eh.aggregate("drfl", cohort.updates, losses=cohort.losses, q=q).update
    close(found, oracles.drfl(cohort.updates, cohort.losses, q), cohort)


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans())
def test_fedgini_follows_its_paper(cohort, epsilon, tied):
    losses = np.round(cohort.losses) if tied else cohort.losses
    out = eh.aggregate("fedgini", cohort.updates, losses=losses, epsilon=epsilon)
    close(out.update, oracles.fedgini(cohort.updates, losses, epsilon), cohort)
    weights = out.coefficients[0]
    assert (np.diff(weights[np.argsort(losses)]) >= -1e-12).all()  # larger losses never weigh less


@PROPERTY
@given(cohorts())
def test_limit_cases_are_the_plain_mean(cohort):
    mean = cohort.updates.mean(axis=0)
    for name, limit in [
        ("qffl", {"q": 0.0, "lipschitz": 7.0}),
        ("term", {"t": 1e-12}),
        ("drfl", {"q": 0.0}),
        ("fedgini", {"epsilon": 1.0}),
        ("fedfv", {"alpha": 1.0, "tau": 0}),
        ("mfairfl", {"beta": 0.0}),
        ("afl", {"step": 0.0}),
    ]:
        close(eh.aggregate(name, cohort.updates, losses=cohort.losses, **limit).update, mean, cohort, 1e-8)


def test_term_with_a_large_tilt_is_the_worst_client_alone():
    cohort = make(3, 8, 20)
    found = eh.aggregate("term", cohort.updates, losses=cohort.losses, t=1e6).update
    np.testing.assert_allclose(found, cohort.updates[cohort.losses.argmax()])


# --------------------------------------------------------------------------------------------------- common descent


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.booleans())
def test_fedmgda_plus_follows_its_paper(cohort, epsilon, uniform):
    moving = np.linalg.norm(cohort.updates, axis=1) > 0
    assume(moving.all() or epsilon == 1.0)
    reference = np.full(cohort.rows, 1 / cohort.rows) if uniform else cohort.sizes / cohort.sizes.sum()
    kind = "uniform" if uniform else "size"
    out = eh.aggregate("fedmgda+", cohort.updates, sizes=cohort.sizes, epsilon=epsilon, reference=kind)
    expected = oracles.fedmgda_plus(cohort.updates, epsilon, reference)
    assert np.linalg.norm(out.update - expected) <= 1e-6  # of unit vectors
    unit = cohort.updates[moving] / np.linalg.norm(cohort.updates[moving], axis=1, keepdims=True)
    if epsilon == 1.0:  # plain MGDA: against nobody, and min-norm optimal
        assert (unit @ out.update).min() >= out.update @ out.update - 1e-7
        assert not out.diagnostics.conflicts.any()
    if epsilon == 0.0:
        norms = np.linalg.norm(cohort.updates, axis=1)
        np.testing.assert_allclose(out.coefficients[0] * norms, reference, atol=1e-8)


@PROPERTY
@given(independent(), st.sampled_from([0.0, 0.1, 1.0, 5.0]), st.booleans(), st.sampled_from(["mean", "paper"]))
def test_adafed_follows_its_paper(cohort, gamma, normalise, length):
    out = eh.aggregate("adafed", cohort.updates, losses=cohort.losses, gamma=gamma, normalise=normalise, length=length)
    scale = np.linalg.norm(cohort.updates, axis=1).mean()
    expected = oracles.adafed(cohort.updates / scale, cohort.losses, gamma, length, normalise)
    if length == "mean" or not normalise:
        expected = expected * scale  # the direction scales with the updates
    same_direction(out.update, expected, 1e-6)
    rows = cohort.updates / (np.linalg.norm(cohort.updates, axis=1, keepdims=True) if normalise else scale)
    falls = rows @ out.update / cohort.losses**gamma
    np.testing.assert_allclose(falls, falls[0], rtol=1e-4)  # g_k . d is proportional to |f_k|^gamma
    assert falls[0] > 0


def test_adafed_solves_dependent_updates_in_the_least_squares_sense_and_says_so():
    cohort = make(5, 4, 30)
    updates, losses = np.vstack([cohort.updates, cohort.updates[0]]), np.append(cohort.losses, cohort.losses[0])
    out = eh.aggregate("adafed", updates, losses=losses)
    assert any("dependent" in note for note in out.diagnostics.notes)
    falls = updates @ out.update / losses  # a copy with the same loss changes nothing in the proportions
    np.testing.assert_allclose(falls, falls[0], rtol=1e-9)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["adafed", "even:ridge=0.1"])
def test_more_clients_than_parameters_still_move(name, kind):
    """Three clients on a plane: always dependent, rarely stationary."""
    for seed in range(200):
        cohort = make(seed, 3, 2)
        updates = cohort.updates.astype(kind)
        out = eh.aggregate(name, updates, losses=cohort.losses)
        exact = eh.aggregate(name, updates.astype(np.float64), losses=cohort.losses)
        assert np.linalg.norm(exact.update) > 0
        assert np.linalg.norm(out.update - exact.update) <= 1e-2 * np.linalg.norm(exact.update)


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([1e-3, 0.1]))
@example(make(21, 21, 1, "sparse", 1e-12, 1), 0.0, 1e-3)  # as many clients to one side as to the other
@example(make(1, 52, 1, "unequal", 1e-12, 1), 3.0, 1e-3)  # nearly so
def test_even_follows_its_definition(cohort, gamma, ridge):
    found = eh.aggregate("even", cohort.updates, losses=cohort.losses, gamma=gamma, ridge=ridge, level=False).update
    lost = not found.any()  # inner products resolve less than long vectors do: 1e-6 of what cancels out
    close(found, oracles.even(cohort.updates, cohort.losses, gamma, ridge, blur=1e6 if lost else 1.0), cohort, 1e-5)


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 1.0]), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
@example(make(242, 6, 242, "sparse", 1e-12, 1), 0.0, False, 0.0)  # one client moves, and to level is to turn it back
def test_even_layer_by_layer_with_an_objective_that_levels(cohort, gamma, layered, caution):
    size = cohort.updates.shape[1]
    assume(size > 1)
    sizes = [size // 2, size - size // 2]
    given = {"losses": cohort.losses, "gamma": gamma, "layerwise": layered, "caution": caution}
    found = eh.aggregate("even", dict(zip("ab", np.split(cohort.updates, sizes[:1], axis=1), strict=True)), **given)
    settings = {"layers": sizes if layered else None, "level": True, "caution": caution}
    expected = oracles.even(cohort.updates, cohort.losses, gamma, 0.001, **settings)
    parts = [np.linalg.norm(part) for part in np.split(expected, sizes[:1])]
    assume(min(parts) > 1e-4 * max(parts) or not any(parts))  # else it is a matter of rounding what stands still
    close(np.concatenate([found.update["a"], found.update["b"]]), expected, cohort, 1e-4)


def test_even_moves_where_updates_agree_and_losses_do_not():
    row = make(1, 1, 30).updates
    out = eh.aggregate("even", np.repeat(row, 5, axis=0), losses=[1.0, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(out.update, row[0], rtol=1e-6)


@pytest.mark.parametrize(("rounds", "turns"), [(None, 1.0), (3.0, 4.0), (None, 4.0)])
def test_the_mean_of_recent_models_is_the_one_to_use(rounds, turns):
    """By hand: the offset is the weighed mean of the models so far, less the last one."""
    rng, state, model, mean = np.random.default_rng(0), None, np.zeros(6), None
    for index in range(120):
        here = [index % 4, (index + 1) % 4]
        updates, losses = rng.normal(size=(2, 6)), rng.random(2)
        given = {"losses": losses, "clients": here, "state": state}
        server = {"name": "recent", "rounds": rounds, "turns": turns}
        out = eh.aggregate(eh.method("even", server=server), updates, **given)
        model, state = model - out.update, out.state
        turn = len(out.diagnostics.clients) / 2
        back = turn if turns == 1.0 else max(turn, min(1 + 4 * (turn - 1), (index + 1) / 20))
        back = back if rounds is None else rounds
        share = 1.0 / min(index + 1, back)
        mean = model if mean is None else (1.0 - share) * mean + share * model
        np.testing.assert_allclose(model + out.evaluation_offset, mean, atol=1e-12)
    assert out.diagnostics.clients[:2] == (3, 0)


def test_where_all_take_part_the_last_model_is_the_one_to_use():
    rng, state = np.random.default_rng(0), None
    for _ in range(60):
        given = {"losses": rng.random(3), "clients": ["a", "b", "c"], "state": state}
        out = eh.aggregate("even:turns=4", rng.normal(size=(3, 6)), **given)
        state = out.state
        assert not out.evaluation_offset.any()


def test_even_is_adafed_where_nobody_falls_faster_for_free():
    """Three updates at right angles: all of them are needed, and without a ridge the falls are exact."""
    updates, losses = np.diag([1.0, 3.0, 0.5]), [1.0, 2.0, 4.0]
    even = eh.aggregate("even", updates, losses=losses, gamma=1.0, ridge=0.0, level=False).update
    same_direction(even, eh.aggregate("adafed", updates, losses=losses, normalise=True).update, 1e-9)


def test_even_without_losses_and_ridge_is_fedmgda():
    cohort = make(8, 6, 50, "conflicting")
    even = eh.aggregate("even", cohort.updates, losses=cohort.losses, gamma=0.0, ridge=0.0, level=False).update
    fedmgda = eh.aggregate("fedmgda+", cohort.updates, epsilon=1.0, reference="uniform", length="mean").update
    same_direction(even, fedmgda, 1e-7)


def test_a_large_ridge_leaves_the_mean_weighed_by_the_losses():
    cohort = make(3, 5, 40)
    even = eh.aggregate("even", cohort.updates, losses=cohort.losses, gamma=2.0, ridge=1e9, level=False).update
    units = cohort.updates / np.linalg.norm(cohort.updates, axis=1, keepdims=True)
    weighed = cohort.losses**2 @ units
    same_direction(even, weighed / np.linalg.norm(weighed) * np.linalg.norm(even), 1e-6)


@PROPERTY
@given(cohorts(), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 1e-3, 0.1, 1.0]))
def test_even_uses_nobody_backwards_and_who_is_not_needed_falls_at_least_as_asked(cohort, gamma, ridge):
    out = eh.aggregate("even", cohort.updates, losses=cohort.losses, gamma=gamma, ridge=ridge, level=False)
    norms = np.linalg.norm(cohort.updates, axis=1)
    assume(np.linalg.norm(out.update) > 1e-6 * norms.mean() > 0.0)
    coefficients = np.atleast_2d(out.coefficients)[0]
    assert (coefficients >= 0.0).all()
    moving = norms > 0.0
    asked = np.maximum((cohort.losses / cohort.losses.max()) ** gamma, 1e-3)[moving]
    weights = coefficients[moving] * norms[moving]
    falls = (cohort.updates[moving] / norms[moving, None]) @ out.update
    reached = (falls + ridge * weights) / asked  # the same for all who are needed, no less for the others
    needed = weights > 1e-6 * weights.max()
    np.testing.assert_allclose(reached[needed], reached[needed].mean(), rtol=1e-5, atol=1e-7 * np.abs(falls).max())
    assert reached[~needed].min(initial=np.inf) >= reached[needed].mean() * (1 - 1e-5) - 1e-7 * np.abs(falls).max()


def test_even_harms_nobody_whose_loss_is_zero():
    updates = np.array([[1.0, 0.0], [-1.0, 0.1]])
    out = eh.aggregate("even", updates, losses=[5.0, 0.0], ridge=0.0, level=False)
    assert (updates @ out.update > 0.0).all()


def resolved(cohort: Cohort, expected: np.ndarray) -> None:
    """Leave out cohorts so near Pareto stationarity that the direction is a matter of rounding."""
    assume(np.linalg.norm(expected) > 0 and np.linalg.norm(cohort.updates.mean(axis=0)) > 0)


@settings(max_examples=80, deadline=None)
@given(cohorts(max_rows=30, max_columns=400, max_layers=5), st.booleans(), st.booleans(), st.booleans())
def test_fedlf_follows_its_paper_and_is_against_nobody(cohort, normalise, fair, join):
    out = eh.aggregate(
        "fedlf", cohort.updates, losses=cohort.losses, layers=cohort.layers, normalise=normalise, fair=fair, join=join
    )
    ids = list(range(cohort.rows))
    expected, _ = oracles.fedlf(
        cohort.updates, cohort.losses, ids, 0, None, cohort.slices, normalise=normalise, fair=fair, join=join
    )
    coefficients = out.coefficients
    for layer, (start, stop) in enumerate(cohort.slices):
        parts = cohort.updates[:, start:stop]
        np.testing.assert_allclose(coefficients[layer] @ parts, out.update[start:stop], rtol=1e-7, atol=1e-300)
    # Small min-norm points lose relative accuracy when they are stretched to the mean's length.
    shortest = min(
        (np.linalg.norm(out.update[a:b]) for a, b in cohort.slices if np.linalg.norm(out.update[a:b]) > 0), default=0.0
    )
    assume(shortest > 1e-3 * np.linalg.norm(out.update))
    joined = any("joined" in note for note in out.diagnostics.notes)
    if not joined:
        assert not out.diagnostics.layer_conflicts.any()
    assert not out.diagnostics.conflicts.any()
    resolved(cohort, expected)
    if normalise:
        same_direction(out.update, expected, 1e-4)


def test_fedlf_joins_a_vanishing_layer_with_the_next_and_the_last_with_the_previous():
    updates = np.array([[1.0, 2.0, 1.0], [-1.0, 2.0, 1.0], [1.0, 1.0, 3.0]])
    first = eh.aggregate("fedlf", updates, losses=[1.0, 1.0, 1.0], layers={"a": 1, "b": 1, "c": 1})
    assert "layers joined: a, b" in first.diagnostics.notes
    last = eh.aggregate("fedlf", updates[:, ::-1].copy(), losses=[1.0, 1.0, 1.0], layers={"a": 1, "b": 1, "c": 1})
    assert "layers joined: b, c" in last.diagnostics.notes
    apart = eh.aggregate("fedlf", updates, losses=[1.0, 1.0, 1.0], layers=[1, 1, 1], join=False)
    assert apart.update[0] == 0.0
    assert (apart.update[1:] > 0).all()


def test_fedlf_at_a_pareto_stationary_point_stays():
    out = eh.aggregate("fedlf", np.array([[1.0, 0.0], [-1.0, 0.0]]), losses=[1.0, 1.0])
    assert (out.update == 0).all()
    assert any("Pareto" in note for note in out.diagnostics.notes)


def test_the_fedlf_appendix_two_clients_with_four_parameters():
    updates = np.array([[0.1, 0.1, 0.2, -0.1], [-0.1, 0.2, -0.1, 0.4]])
    mean = eh.aggregate("fedavg", updates, weights="uniform", layers=[2, 2])
    np.testing.assert_allclose(mean.update, [0.0, 0.15, 0.05, 0.15])
    assert mean.diagnostics.cosines[0, 1] < 0  # the clients conflict with each other
    assert not mean.diagnostics.conflicts.any()  # the mean is a common descent direction
    assert mean.diagnostics.layer_conflicts.tolist() == [
        [False, False],
        [True, False],
    ]  # yet against client 1 in layer 2
    fair = eh.aggregate("fedlf", updates, losses=[1.0, 2.0], layers=[2, 2])
    assert not fair.diagnostics.layer_conflicts.any()
    assert (updates[:, 2:] @ fair.update[2:] > 0).all()


def test_the_fedlf_appendix_figure_1():
    updates = np.array([[-1.0, 0.5, 0.0], [0.8, -1.0, 0.0], [1.0, 1.0, -1.0]])
    assert eh.aggregate("fedavg", updates, weights="uniform").diagnostics.conflicts.any()
    for losses in itertools.permutations([1.0, 2.0, 3.0]):  # FedFV cannot help it, whatever the losses
        assert eh.aggregate("fedfv", updates, losses=losses, alpha=0.0, tau=0).diagnostics.conflicts.any()
        assert not eh.aggregate("fedlf", updates, losses=losses).diagnostics.conflicts.any()
    tight = eh.aggregate("fedmgda+", updates, reference="uniform", epsilon=0.1)
    assert tight.diagnostics.conflicts.any()  # "a hyper-parameter that is hard to tune"
    assert not eh.aggregate("fedmgda+", updates, reference="uniform", epsilon=1.0).diagnostics.conflicts.any()


@PROPERTY
@given(cohorts(max_rows=30, kinds=("random", "conflicting", "similar", "unequal")), st.sampled_from([0.0, 11.25, 90.0]))
def test_fedmdfg_follows_its_paper(cohort, theta):
    ids = list(range(cohort.rows))
    expected, _ = oracles.fedmdfg(cohort.updates, cohort.losses, ids, 0, None, theta)
    out = eh.aggregate("fedmdfg", cohort.updates, losses=cohort.losses, theta=theta, clients=ids)
    assert not out.diagnostics.conflicts.any()
    combined = np.abs(out.coefficients[0]) @ np.linalg.norm(cohort.updates, axis=1)
    assume(np.linalg.norm(expected) > 1e-3 * combined)
    same_direction(out.update, expected, 1e-5)


def test_fedmdfg_asks_for_trial_losses_and_shortens_a_step_that_overshoots():
    curvature = np.array([1.0, 30.0])
    theta, optima, lr = np.array([2.0]), np.array([0.0, 0.1]), 0.2

    def losses_at(model):
        return 0.5 * curvature * (model[0] - optima) ** 2 + 0.01

    asked = []

    def evaluate(trial):
        asked.append(float(trial[0]))
        return losses_at(theta - trial)

    updates = lr * (curvature * (theta[0] - optima))[:, None]
    before = losses_at(theta)
    out = eh.aggregate("fedmdfg", updates, losses=before, clients=[0, 1], lr=lr, evaluate=evaluate, theta=90.0)
    assert len(asked) > 1
    assert (losses_at(theta - out.update) < before).all()
    assert any("line search" in note for note in out.diagnostics.notes)
    again = len(asked)
    eh.aggregate(
        "fedmdfg", updates, losses=before, clients=[0, 1], lr=lr, evaluate=evaluate, state=out.state, theta=90.0
    )
    assert asked[again] == pytest.approx(asked[0] * 2**5)  # the same clients twice: the search starts at 2^s


def test_fedmdfg_without_a_way_to_ask_takes_the_full_step_and_says_so():
    cohort = make(2, 4, 10)
    out = eh.aggregate("fedmdfg", cohort.updates, losses=cohort.losses)
    assert any("no line search" in note for note in out.diagnostics.notes)


# ------------------------------------------------------------------------------------------------------ projections


@PROPERTY
@given(cohorts(max_rows=40), st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]), st.sampled_from(["loss", "reverse"]))
def test_fedfv_internal_conflicts_follow_the_paper(cohort, alpha, order):
    expected, _ = oracles.fedfv(cohort.updates, cohort.losses, list(range(cohort.rows)), 0, None, alpha, 0, order)
    out = eh.aggregate("fedfv", cohort.updates, losses=cohort.losses, alpha=alpha, tau=0, order=order)
    assume(np.linalg.norm(expected) > 0)
    combined = np.abs(out.coefficients[0]) @ np.linalg.norm(cohort.updates, axis=1)
    assume(np.linalg.norm(expected) > 1e-5 * combined)
    same_direction(out.update, expected, 1e-7)
    np.testing.assert_allclose(np.linalg.norm(out.update), np.linalg.norm(cohort.updates.mean(axis=0)), rtol=1e-7)


@pytest.mark.parametrize(
    ("count", "alpha", "kept"),
    [(10, 0.1, 1), (10, 0.2, 2), (10, 0.5, 5), (3, 1 / 3, 1), (3, 2 / 3, 2), (7, 1.0, 7), (7, 0.0, 0), (1, 0.5, 1)],
)
def test_fedfv_keeps_as_many_clients_as_the_authors_count(count, alpha, kept):
    from evenhand.methods.fedfv import kept_clients

    assert kept_clients(count, alpha) == kept


def test_fedfv_two_conflicting_clients_end_orthogonal_safe():
    updates, losses = np.array([[1.0, 0.0], [-1.0, 1.0]]), [0.5, 2.0]
    out = eh.aggregate("fedfv", updates, losses=losses, alpha=0.0, tau=0)
    assert (updates @ out.update >= -1e-12).all()


def test_random_order_depends_on_the_seed_and_the_round_alone():
    cohort = make(4, 12, 40, "conflicting")

    def run(seed, round):
        return eh.aggregate(
            "fedfv", cohort.updates, losses=cohort.losses, order="random", tau=0, alpha=0.0, seed=seed, round=round
        ).update

    np.testing.assert_array_equal(run(1, 3), run(1, 3))
    assert not np.allclose(run(1, 3), run(2, 3))
    assert not np.allclose(run(1, 3), run(1, 4))


@PROPERTY
@given(
    cohorts(max_rows=25, kinds=("random", "conflicting", "similar", "unequal")),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from(["loss", "reverse"]),
)
def test_mfairfl_first_round_is_fedfvs_projection(cohort, beta, order):
    ids = list(range(cohort.rows))
    found = eh.aggregate("mfairfl", cohort.updates, losses=cohort.losses, clients=ids, beta=beta, order=order)
    expected, _ = oracles.mfairfl_conflicts(cohort.updates, cohort.losses, ids, None, beta, 0.01, order)
    combined = np.abs(found.coefficients[0]) @ np.linalg.norm(cohort.updates, axis=1)
    assume(np.linalg.norm(expected) > 1e-5 * combined)
    same_direction(found.update, expected, 1e-6)
    if beta == 1.0:
        fedfv = eh.aggregate("fedfv", cohort.updates, losses=cohort.losses, alpha=0.0, tau=0, order=order)
        same_direction(found.update, fedfv.update, 1e-6)


@given(st.integers(0, 10**6), st.floats(0.0, 0.95))
@settings(max_examples=50, deadline=None)
def test_mfairfl_reaches_its_target_cosine(seed, goal):
    from evenhand.methods.projection import sweep

    updates = make(seed, 2, 5).updates
    gram, goals = updates @ updates.T, np.full((2, 2), goal)
    free = np.array([True, False])
    swept = sweep(gram, np.array([1, 0]), free, goals)
    adjusted = swept.coefficients[0] @ updates
    before = gram[0, 1] / np.sqrt(gram[0, 0] * gram[1, 1])
    after = adjusted @ updates[1] / np.linalg.norm(adjusted) / np.linalg.norm(updates[1])
    assert after == pytest.approx(max(before, goal), abs=1e-9)
    assert swept.cosines[0, 1] == pytest.approx(before)


# -------------------------------------------------------------------------------------------- properties of them all

NEEDS = {"lipschitz": 10.0}
STATELESS_IN_ONE_ROUND = [entry.name for entry in eh.methods()]


def run(name: str, updates, losses, sizes, **more):
    settings_of = {"lipschitz": 10.0} if name == "qffl" else {}
    measures = {"accuracies": 1 / (1 + losses), "fairness": losses / 10, "fairness_global": 0.1, "lr": 0.1}
    return eh.aggregate(name, updates, losses=losses, sizes=sizes, **measures, **settings_of, **more)


@pytest.mark.parametrize("name", STATELESS_IN_ONE_ROUND)
@settings(max_examples=15, deadline=None)
@given(
    cohort=cohorts(max_rows=20, max_columns=200, kinds=("random", "conflicting", "similar")), seed=st.integers(0, 1000)
)
def test_permuting_the_clients_permutes_the_coefficients(name, cohort, seed):
    order = np.random.default_rng(seed).permutation(cohort.rows)
    out = run(name, cohort.updates, cohort.losses, cohort.sizes)
    permuted = run(name, cohort.updates[order], cohort.losses[order], cohort.sizes[order])
    norms = np.linalg.norm(cohort.updates, axis=1)
    weights, again = out.coefficients[0] * norms, permuted.coefficients[0] * norms[order]
    if np.linalg.matrix_rank(cohort.updates) == cohort.rows:
        np.testing.assert_allclose(again, weights[order], atol=1e-5 * np.abs(weights).max())


@pytest.mark.parametrize("name", STATELESS_IN_ONE_ROUND)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "state dicts"])
def test_every_method_agrees_across_forms_and_dtypes(name, form):
    cohort = make(11, 7, 60, "conflicting")
    exact = run(name, cohort.updates, cohort.losses, cohort.sizes, layers=[50, 10]).update
    if form == "state dicts":
        rows = [
            {"fc.weight": torch.from_numpy(row[:50].reshape(10, 5)), "fc2.bias": torch.from_numpy(row[50:])}
            for row in cohort.updates
        ]
        update = run(name, rows, cohort.losses, cohort.sizes).update
        assert list(update) == ["fc.weight", "fc2.bias"]
        assert update["fc.weight"].shape == (10, 5)
        found = np.concatenate([update["fc.weight"].numpy().ravel(), update["fc2.bias"].numpy()])
        np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-12)
        return
    kind = getattr(torch, form)
    narrow = torch.from_numpy(cohort.updates).to(kind)
    reference = run(name, narrow.double().numpy(), cohort.losses, cohort.sizes, layers=[50, 10]).update
    update = run(name, narrow, cohort.losses, cohort.sizes, layers=[50, 10]).update
    assert update.dtype == kind
    tolerance = 1e-4 if form == "float32" else 2e-2
    assert np.linalg.norm(update.double().numpy() - reference) <= tolerance * np.linalg.norm(reference)


@pytest.mark.parametrize("name", ["even", "fedfv", "fedlf", "adafed", "fedmdfg", "mfairfl", "fedmgda+"])
def test_equal_losses_and_equal_updates_are_the_update_itself(name):
    row = make(1, 1, 30).updates
    out = run(
        name, np.repeat(row, 5, axis=0), np.ones(5), np.ones(5), **({"length": "mean"} if name == "fedmgda+" else {})
    )
    np.testing.assert_allclose(out.update, row[0], rtol=1e-6)


@pytest.mark.parametrize("losses", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
def test_fedlfs_figure_1(losses):
    """Its three clients: FedLF's direction goes against none; the mean, FedFV's and FedMGDA+'s go against somebody."""
    updates = np.array([[-1.0, 0.5, 0.0], [0.8, -1.0, 0.0], [1.0, 1.0, -1.0]])
    given = {"losses": losses, "sizes": [1, 1, 1], "lr": 0.1}
    for name in ("fedlf", "fedlf:normalise=false", "even:ridge=0"):
        assert (updates @ eh.aggregate(name, updates, **given).update > 0.0).all()
    for name in ("fedavg:weights=uniform", "fedfv:alpha=0,tau=0", "fedfv:alpha=0.1,tau=0", "fedmgda+:epsilon=0.1"):
        assert (updates @ eh.aggregate(name, updates, **given).update < 0.0).any()
