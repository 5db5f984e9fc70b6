"""The measures of client fairness: values by hand, identities, the papers' own numbers, and bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand import fairness
from evenhand.checks import EvenhandError
from evenhand.fairness import MEASURES, ClientFairness, client_fairness, curves, paired_test

NAN = float("nan")
MEASURED = [name for name in MEASURES if name not in ("std_pp", "variance_pp2")]
SCALE_FREE = ["angle_radians", "angle_degrees", "kl_uniform", "gini", "jain", "entropy"]

accuracy = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(1e-3, 1.0))
cohort = st.lists(accuracy, min_size=1, max_size=30)


def close(found: float, wanted: float, tolerance: float = 1e-12) -> bool:
    return found == pytest.approx(wanted, abs=tolerance, rel=tolerance)


def same(left: object, right: object, tolerance: float = 1e-9) -> None:
    for name in MEASURED:
        assert close(getattr(left, name), getattr(right, name), tolerance), name


# ------------------------------------------------------------------------------------------- by hand


def test_values_by_hand():
    found = client_fairness([0.2, 0.4, 0.6, 0.8], worst=50, best=25)
    assert close(found.mean, 0.5)
    assert close(found.variance, 0.05)
    assert close(found.std, 0.05**0.5)
    assert close(found.std_pp, 100 * 0.05**0.5)
    assert close(found.variance_pp2, 500.0)
    assert (found.min, found.max) == (0.2, 0.8)
    assert close(found.gap, 0.6)
    assert close(found.max_deviation, 0.3)
    assert close(found.worst, 0.3)
    assert close(found.best, 0.8)
    assert close(found.gini, 0.25)  # mean |a_i - a_j| = 4.0 / 16, over twice the mean of 0.5
    assert close(found.jain, 4.0 / (4 * 1.2))
    shares = [0.1, 0.2, 0.3, 0.4]
    assert close(found.kl_uniform, sum(p * np.log(4 * p) for p in shares))
    assert close(found.entropy, -sum(p * np.log(p) for p in shares) / np.log(4))
    assert close(found.angle_degrees, np.degrees(np.arccos(2.0 / (1.2**0.5 * 2.0))))


def test_sizes_by_hand():
    found = client_fairness([1.0, 0.5], sizes=[1, 3], worst=50, best=50).weighted
    assert close(found.mean, 0.625)
    assert close(found.variance, 0.25 * 0.375**2 + 0.75 * 0.125**2)
    assert close(found.worst, 0.5)  # two of the four samples, all at the large client
    assert close(found.best, 0.75)
    assert close(found.max_deviation, 0.375)


def test_one_client_has_it_all():
    found = client_fairness([0.0, 0.0, 0.0, 0.9])
    assert close(found.gini, 0.75)
    assert close(found.jain, 0.25)
    assert close(found.entropy, 0.0)
    assert close(found.kl_uniform, np.log(4))
    assert close(found.angle_degrees, 60.0)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("clients", [1, 2, 7])
def test_equal_clients_are_exactly_equal(value, clients):
    """Also all at zero: equally badly served."""
    found = client_fairness([value] * clients, sizes=np.arange(1, clients + 1))
    for part in (found, found.weighted):
        zeros = (part.std, part.variance, part.gap, part.max_deviation, part.angle_radians, part.kl_uniform, part.gini)
        assert zeros == (0.0,) * 7
        assert (part.jain, part.entropy) == (1.0, 1.0)
        assert part.mean == part.min == part.max == value


def test_losses_have_their_own_worst():
    found = client_fairness([0.5] * 4, losses=[0.1, 0.2, 0.3, 4.0], worst=25, best=25)
    assert (found.losses.worst, found.losses.best) == (4.0, 0.1)
    assert found.weighted is None
    assert found.weighted_losses is None
    both = client_fairness([0.5] * 4, losses=[0.1, 0.2, 0.3, 4.0], sizes=[1, 1, 1, 5], worst=25, best=25)
    assert both.weighted_losses.mean > both.losses.mean


# ------------------------------------------------------------------------------------------- the papers


def test_what_fedfv_calls_variance_is_the_standard_deviation():
    """AdaFed prints 3.39 for these three accuracies: the root of their standard deviation, taken once too often."""
    found = client_fairness([0.6426, 0.8700, 0.8990])
    assert found.std_pp == pytest.approx(11.46, abs=0.005)
    assert found.std_pp**0.5 == pytest.approx(3.39, abs=0.005)


@pytest.mark.parametrize(
    ("average", "low", "high", "least"), [(46.85, 19.84, 69.28, 7.85), (46.42, 31.12, 69.41, 6.19)]
)
def test_published_tails_bound_the_published_deviation(average, low, high, least):
    """Mean and 5% tails of 100 clients force at least this deviation, more than AdaFed prints."""
    middle = (100 * average - 5 * low - 5 * high) / 90
    found = client_fairness(np.array([low] * 5 + [middle] * 90 + [high] * 5) / 100)
    assert found.std_pp == pytest.approx(least, abs=0.01)
    assert 100 * found.worst == pytest.approx(low)
    assert 100 * found.best == pytest.approx(high)
    assert 100 * found.mean == pytest.approx(average)


def test_units_of_the_variances():
    """FedFa's and q-FFL's variance is in squared percentage points."""
    found = client_fairness([0.5 - 0.334, 0.5 + 0.334])
    assert found.variance_pp2 == pytest.approx(1112.46, rel=0.01)
    assert close(found.variance_pp2, found.std_pp**2, 1e-9)
    assert close(found.variance_pp2, 1e4 * np.var([0.166, 0.834]), 1e-9)


@pytest.mark.parametrize(
    ("clients", "percent", "tail"), [(100, 5, 5), (31, 10, 3), (10, 5, 1), (1000, 2.3, 23), (3, 100, 3)]
)
def test_tails_hold_int_n_p_clients_and_at_least_one(clients, percent, tail):
    values = np.random.default_rng(0).permutation(np.linspace(0, 1, clients))
    found = client_fairness(values, worst=percent, best=percent)
    assert close(found.worst, np.sort(values)[:tail].mean())
    assert close(found.best, np.sort(values)[-tail:].mean())


# ------------------------------------------------------------------------------------------- properties


@given(cohort)
@settings(max_examples=150, deadline=None)
def test_definitions_and_identities(values):
    found = client_fairness(values)
    array = np.array(values)
    count, total = array.size, array.sum()
    assert close(found.mean, array.mean())
    assert close(found.std, array.std(), 1e-9)
    assert close(found.variance, found.std**2)
    if total > 0:
        cosine = min(1.0, total / (np.linalg.norm(array) * count**0.5))
        assert found.angle_radians == pytest.approx(np.arccos(cosine), abs=1e-6)  # arccos is blunt near 1
        assert close(found.angle_radians, np.arctan(array.std() / array.mean()), 1e-9)
        assert close(found.jain, total**2 / (count * (array**2).sum()), 1e-9)
        assert close(found.jain, 1.0 / (1.0 + (found.std / found.mean) ** 2), 1e-9)
        pairs = np.abs(array[:, None] - array[None, :]).mean()
        assert close(found.gini, pairs / (2 * array.mean()), 1e-9)
        assert close(found.kl_uniform, scipy.stats.entropy(array / total, np.full(count, 1 / count)), 1e-9)
        if count > 1:
            assert close(found.entropy, scipy.stats.entropy(array / total) / np.log(count), 1e-9)


@given(cohort)
@settings(max_examples=100, deadline=None)
def test_ranges(values):
    found = client_fairness(values)
    slack = 1e-12
    assert found.min - slack <= found.worst <= found.mean + slack
    assert found.mean - slack <= found.best <= found.max + slack
    assert 0 <= found.angle_degrees <= 90
    assert 0 <= found.gini <= 1 - 1 / found.clients + slack
    assert 1 / found.clients - slack <= found.jain <= 1
    assert 0 <= found.entropy <= 1
    assert found.kl_uniform <= np.log(found.clients) + slack
    assert found.gap / 2 - slack <= found.max_deviation <= found.gap + slack


@given(cohort, st.randoms(use_true_random=False), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_order_and_scale_do_not_matter(values, random, factor):
    found = client_fairness(values)
    shuffled = list(values)
    random.shuffle(shuffled)
    same(found, client_fairness(shuffled))
    scaled = client_fairness([factor * value for value in values])
    for name in SCALE_FREE:
        assert close(getattr(scaled, name), getattr(found, name), 1e-7), name
    assert close(scaled.std, factor * found.std, 1e-9)


@given(st.lists(st.tuples(accuracy, st.integers(0, 5)), min_size=1, max_size=15).filter(lambda c: any(s for _, s in c)))
@settings(max_examples=100, deadline=None)
def test_a_size_is_so_many_equal_clients(clients):
    """With sizes, all measures equal those of the clients repeated; the tails where the share is whole."""
    values, sizes = map(np.array, zip(*clients, strict=True))
    repeated = client_fairness(np.repeat(values, sizes), worst=100, best=100)
    weighted = client_fairness(values, sizes=sizes, worst=100, best=100).weighted
    for name in ("mean", "std", "variance", "worst", "best", "angle_radians", "kl_uniform", "gini", "jain"):
        assert close(getattr(weighted, name), getattr(repeated, name), 1e-7), name
    assert 0 <= weighted.entropy <= 1


@given(cohort, st.floats(0.1, 1e6))
@settings(max_examples=50, deadline=None)
def test_equal_sizes_change_nothing(values, size):
    found = client_fairness(values, sizes=[size] * len(values), worst=100, best=100)
    same(found, found.weighted, 1e-7)


@given(cohort, st.data())
@settings(max_examples=50, deadline=None)
def test_moving_towards_each_other_is_fairer(values, data):
    """Pigou-Dalton: a transfer from a better to a worse served client never looks less fair."""
    values = sorted(values)
    if len(values) < 2:
        return
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(values) - 1)] * 2)))
    moved = list(values)
    step = data.draw(st.floats(0, 0.5)) * (values[high] - values[low])
    moved[low] += step
    moved[high] -= step
    before, after = client_fairness(values), client_fairness(moved)
    for name, measure in MEASURES.items():
        rises = getattr(after, name) - getattr(before, name)
        if measure.direction == "lower is fairer":
            assert rises <= 1e-9 * max(1.0, abs(getattr(before, name))), name
        if measure.direction == "higher is fairer":
            assert rises >= -1e-9, name


# ------------------------------------------------------------------------------------------- missing, curves, forms


def test_clients_without_test_data_are_left_out_and_counted():
    found = client_fairness([0.2, NAN, 0.8, NAN], losses=[1.0, 9.0, NAN, 9.0], sizes=[1, 50, 2, 50])
    plain = client_fairness([0.2, 0.8], sizes=[1, 2])
    same(found, plain)
    same(found.weighted, plain.weighted)
    assert (found.clients, found.missing) == (2, 2)
    assert found.losses.clients == 1
    assert found.losses.mean == 1.0
    assert "2 more without test data" in found.sentence()


def test_a_diverged_client_does_not_spoil_the_report():
    found = client_fairness([0.2, 0.8], losses=[np.inf, 1.0])
    assert (found.losses.clients, found.losses.mean) == (1, 1.0)
    lost = client_fairness([0.2, 0.8], losses=[np.inf, NAN], bootstrap=20)
    assert lost.losses.clients == 0
    assert np.isnan(lost.losses.gini)
    assert "losses.gini" not in lost.intervals


def test_curves_are_the_rounds_one_by_one():
    generator = np.random.default_rng(3)
    accuracies, losses, sizes = generator.random((6, 40)), generator.random((6, 40)), generator.integers(1, 50, 40)
    accuracies[:, 7] = NAN
    accuracies[2, 11] = NAN
    found = curves(accuracies, losses=losses, sizes=sizes, worst=10, best=20)
    for step in range(6):
        alone = client_fairness(accuracies[step], losses=losses[step], sizes=sizes, worst=10, best=20)
        for name in MEASURES:
            assert close(found[name][step], getattr(alone, name)), name
        for name in MEASURED:
            assert close(found[f"weighted.{name}"][step], getattr(alone.weighted, name)), name
            assert close(found[f"losses.{name}"][step], getattr(alone.losses, name)), name
            assert close(found[f"weighted_losses.{name}"][step], getattr(alone.weighted_losses, name)), name


def test_a_round_without_evaluation_is_a_hole_in_the_curve():
    found = curves([[0.5, 0.7], [NAN, NAN], [0.6, 0.6]])
    for name in MEASURES:
        assert np.isnan(found[name]).tolist() == [False, True, False], name
    assert found["clients"].tolist() == [2, 0, 2]


@pytest.mark.parametrize("form", [list, tuple, np.array, np.float32, torch.tensor])
def test_any_form_of_numbers(form):
    given = form([0.25, 0.5, 0.75])
    same(client_fairness(given), client_fairness([0.25, 0.5, 0.75]))


def test_a_tensor_with_gradients_is_read():
    assert client_fairness(torch.tensor([0.5, 1.0], requires_grad=True)).mean == 0.75


def test_float32_rounding_past_one_is_forgiven():
    assert client_fairness([1.0 + 1e-7, 1.0]).max == 1.0


def test_it_goes_through_json_and_prints():
    found = client_fairness([0.2, 0.9, 0.7], losses=[1, 2, 3], sizes=[1, 2, 3], bootstrap=50)
    values = json.loads(json.dumps(found.to_dict()))
    assert values["gini"] == found.gini
    assert values["weighted"]["gini"] == found.weighted.gini
    assert values["std_pp"] == found.std_pp
    assert "losses" not in client_fairness([0.2]).to_dict()
    text = str(found)
    for name, measure in MEASURES.items():
        assert name in text
        assert measure.sentence in text
    assert "95% interval" in text
    assert "interval" not in str(client_fairness([0.2, 0.4]))


def test_every_measure_is_described_and_reported():
    directions = {"higher is fairer", "lower is fairer", "higher is better"}
    for name, measure in MEASURES.items():
        assert measure.definition
        assert measure.sentence.endswith(".")
        assert measure.direction in directions
        assert isinstance(getattr(client_fairness([0.5, 0.6]), name), float)


@pytest.mark.parametrize("name", ["mean", "std", "variance", "angle", "kl_uniform", "gini", "jain", "entropy"])
def test_the_functions_take_any_number_of_axes(name):
    values = np.random.default_rng(0).random((3, 4, 5))
    found = getattr(fairness, name)(values)
    assert found.shape == (3, 4)
    assert close(found[1, 2], getattr(fairness, name)(values[1, 2]))


# ------------------------------------------------------------------------------------------- bootstrap


def test_intervals_follow_from_the_seed():
    values = np.random.default_rng(1).random(50)
    first = client_fairness(values, bootstrap=200, seed=4).intervals
    assert first == client_fairness(values, bootstrap=200, seed=4).intervals
    assert first != client_fairness(values, bootstrap=200, seed=5).intervals


def test_intervals_do_not_depend_on_the_chunks(monkeypatch):
    values = np.random.default_rng(1).random(50)
    whole = client_fairness(values, losses=values, sizes=values, bootstrap=100).intervals
    monkeypatch.setattr(fairness, "CHUNK", 333)
    assert client_fairness(values, losses=values, sizes=values, bootstrap=100).intervals == whole
    assert {"mean", "weighted.gini", "losses.jain", "weighted_losses.entropy", "worst"} <= set(whole)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """90% intervals of 200 cohorts of 200 clients with Beta(8, 4) accuracies, against the distribution's own values."""
    distribution = scipy.stats.beta(8, 4)
    many = distribution.rvs(1_000_000, random_state=0)
    truth = {"mean": distribution.mean(), "std": distribution.std(), "gini": float(fairness.gini(many))}
    covered = dict.fromkeys(truth, 0)
    for seed in range(200):
        values = distribution.rvs(200, random_state=seed + 1)
        found = client_fairness(values, bootstrap=200, confidence=0.9, seed=seed).intervals
        for name, value in truth.items():
            covered[name] += found[name][0] <= value <= found[name][1]
    for name, count in covered.items():
        assert 0.83 <= count / 200 <= 0.96, (name, count)


def test_extremes_and_a_single_client_get_no_interval():
    found = client_fairness([0.1, 0.5, 0.9], bootstrap=20)
    assert not {"min", "max", "gap", "max_deviation", "worst", "best"} & set(found.intervals)
    assert client_fairness([0.1], bootstrap=20).intervals == {}
    assert "worst" in client_fairness(np.linspace(0, 1, 40), bootstrap=20).intervals


# ------------------------------------------------------------------------------------------- two methods


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12), st.sampled_from([0.9, 0.95, 0.99])
)
@settings(max_examples=100, deadline=None)
def test_the_paired_test_is_scipys(pairs, confidence):
    a, b = map(np.array, zip(*pairs, strict=True))
    if (a - b).std() < 1e-9:
        return
    found = paired_test(a, b, confidence=confidence)
    wanted = scipy.stats.ttest_rel(a, b)
    interval = wanted.confidence_interval(confidence)
    assert close(found.p, wanted.pvalue, 1e-9)
    assert close(found.interval[0], interval.low, 1e-9)
    assert close(found.interval[1], interval.high, 1e-9)
    assert found.significant == (wanted.pvalue < 1 - confidence)
    assert close(found.difference, (a - b).mean())


def test_what_cannot_be_tested_says_so():
    one = paired_test([0.8], [0.7])
    assert (one.p, one.interval, one.significant) == (None, None, None)
    assert close(one.difference, 0.1)
    assert "not testable" in str(one)
    alike = paired_test([0.3, 0.5], [0.2, 0.4])  # 0.1 twice, up to rounding
    assert alike.p is None
    assert "no spread" in str(alike)
    equal = paired_test([0.3, 0.5], [0.3, 0.5])
    assert (equal.p, equal.significant, equal.difference) == (1.0, False, 0.0)
    zeros = paired_test([0.0, 0.0], [0.0, 0.0])
    assert zeros.p == 1.0


def test_a_seed_that_failed_is_left_out():
    found = paired_test([0.8, NAN, 0.9, 0.7], [0.7, 0.6, 0.85, 0.5])
    assert found.pairs == 3
    assert close(found.p, paired_test([0.8, 0.9, 0.7], [0.7, 0.85, 0.5]).p)


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"accuracies": []}, "empty"),
        ({"accuracies": None}, "empty"),
        ({"accuracies": [NAN, NAN]}, "no client has an accuracy (2 given)"),
        ({"accuracies": [0.5, 87.3]}, "87.3 was given; divide percentages by 100"),
        ({"accuracies": [0.5, -0.1]}, "-0.1 was given"),
        ({"accuracies": [0.5, np.inf]}, "inf was given"),
        ({"accuracies": 0.5}, "accuracies=0.5"),
        ({"accuracies": ["good", "bad"]}, "accuracies must hold a number per client"),
        ({"accuracies": {"a": 0.5}}, "accuracies must hold a number per client, not dict"),
        ({"accuracies": [[0.5, 0.6]]}, "curves"),
        ({"accuracies": [0.5, 0.6], "losses": [1.0]}, "losses has shape (1,)"),
        ({"accuracies": [0.5, 0.6], "losses": [1.0, -2.0]}, "-2"),
        ({"accuracies": [0.5, 0.6], "sizes": [1, 2, 3]}, "sizes has shape (3,)"),
        ({"accuracies": [0.5, 0.6], "sizes": [1, -1]}, "-1 was given"),
        ({"accuracies": [0.5, 0.6], "sizes": [1, NAN]}, "nan was given"),
        ({"accuracies": [0.5, 0.6], "sizes": [0, 0]}, "size 0"),
        ({"accuracies": [0.5], "worst": 0}, "worst=0"),
        ({"accuracies": [0.5], "best": 101}, "best=101"),
        ({"accuracies": [0.5], "bootstrap": -1}, "bootstrap=-1"),
        ({"accuracies": [0.5], "bootstrap": 0.5}, "bootstrap=0.5"),
        ({"accuracies": [0.5], "confidence": 1.0}, "confidence=1.0"),
        ({"accuracies": [0.5], "seed": -3}, "seed=-3"),
    ],
)
def test_bad_input_is_named(arguments, said):
    with pytest.raises(EvenhandError) as caught:
        client_fairness(**arguments)
    assert said in str(caught.value)


def test_bad_tables_and_pairs_are_named():
    with pytest.raises(EvenhandError, match="rounds x clients"):
        curves([0.5, 0.6])
    with pytest.raises(EvenhandError, match="losses has shape"):
        curves([[0.5, 0.6]], losses=[1.0, 2.0])
    with pytest.raises(EvenhandError, match="same order"):
        paired_test([0.1, 0.2], [0.1])
    with pytest.raises(EvenhandError, match="no seed has a result"):
        paired_test([NAN, 0.2], [0.1, NAN])


def test_the_result_is_frozen():
    found = client_fairness([0.5])
    assert isinstance(found, ClientFairness)
    with pytest.raises(AttributeError):
        found.mean = 1.0
