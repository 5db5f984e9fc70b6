"""The measures of group fairness: an oracle that loops over rows, fairlearn, properties, intervals, and bad input."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evenhand as eh
from evenhand import predictions as rows_ready
from evenhand.chance import area_interval, newcombe, sidak, wilson
from evenhand.checks import EvenhandError
from evenhand.columns import coded
from evenhand.counts import CLIENT_MEASURES, FORMS, KINDS, MEASURES, batched_measures, measures_from_counts
from evenhand.groups import BEYOND, TOO_FEW, WITHIN, Deviations, GroupFairness, group_fairness

NAN = float("nan")


@st.composite
def tables(draw, classes=(2, 4), clients=(1, 3)):
    """Counts of clients x groups x labels x predictions, some of them empty."""
    shape = draw(st.integers(*clients)), draw(st.integers(1, 4)), (size := draw(st.integers(*classes))), size
    flat = draw(st.lists(st.integers(0, 6), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    counts = np.array(flat).reshape(shape)
    if not counts.sum():
        counts[0, 0, 0, 0] = 1
    return counts


def as_rows(counts):
    """One (client, group, label, prediction) a person."""
    return np.repeat(np.array(list(product(*map(range, counts.shape)))), counts.ravel(), axis=0)


# ------------------------------------------------------------------------------------------- the oracle


def share(people, test):
    """The share of those that pass the test; None of nobody."""
    people = list(people)
    return sum(map(test, people)) / len(people) if people else None


def oracle(people, classes, positive=None):
    """The definitions, with loops over rows."""
    groups = sorted({person[1] for person in people})
    labels = range(classes)
    wanted = [positive] if positive is not None else [1] if classes == 2 else list(labels)
    compared = {
        "dp": [(lambda person: True, lambda person, c=c: person[3] == c) for c in labels],
        "eodds": [
            (lambda person, y=y: person[2] == y, lambda person, c=c: person[3] == c) for y, c in product(labels, labels)
        ],
        "eopp": [(lambda person, y=y: person[2] == y, lambda person, y=y: person[3] == y) for y in wanted],
        "ap": [(lambda person: True, lambda person: person[2] == person[3])],
    }
    found = {}
    for kind, pairs in compared.items():
        deviations, gaps = [], []
        for within, hit in pairs:
            everyone = share(filter(within, people), hit)
            rates = [share((p for p in people if p[1] == group and within(p)), hit) for group in groups]
            rates = [rate for rate in rates if rate is not None]
            if rates:
                deviations += [abs(rate - everyone) for rate in rates]
                gaps.append(max(rates) - min(rates))
        found[kind] = max(deviations, default=NAN)
        found[f"{kind}_mean"] = sum(deviations) / len(deviations) if deviations else NAN
        found[f"{kind}_gap"] = max(gaps, default=NAN)
    clients = sorted({person[0] for person in people})
    right = [share((p for p in people if p[0] == client), lambda p: p[2] == p[3]) for client in clients]
    everyone = share(people, lambda p: p[2] == p[3])
    found["client_deviation"] = max(abs(rate - everyone) for rate in right)
    found["client_gap"] = max(right) - min(right)
    found["client_std"] = (sum((rate - sum(right) / len(right)) ** 2 for rate in right) / len(right)) ** 0.5
    return found


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name


@given(tables())
@settings(deadline=None)
def test_measures_from_counts_follow_their_definitions(counts):
    same(measures_from_counts(counts), oracle(as_rows(counts).tolist(), counts.shape[-1]))


@given(tables(), st.data())
@settings(deadline=None)
def test_a_positive_class_is_the_one_that_equal_opportunity_looks_at(counts, data):
    positive = data.draw(st.integers(0, counts.shape[-1] - 1))
    same(measures_from_counts(counts, positive), oracle(as_rows(counts).tolist(), counts.shape[-1], positive))


@given(tables())
@settings(deadline=None)
def test_rows_give_what_their_counts_give(counts):
    client, group, label, prediction = as_rows(counts).T
    try:
        found = group_fairness(label, prediction, {"g": group}, clients=client)
    except EvenhandError:  # one class only, or no prediction that is a label
        return
    if len(found.classes) == counts.shape[-1]:
        wanted = measures_from_counts(counts)
        same({**found.measures["g"], **found.measures["clients"]}, wanted)


def test_each_client_by_itself_is_what_its_own_rows_give(monkeypatch):
    counts = np.random.default_rng(0).integers(0, 5, (7, 3, 3, 3))
    client, group, label, prediction = as_rows(counts).T
    found = group_fairness(label, prediction, {"g": group}, clients=client).attributes["g"].by_client
    for place in range(7):
        one = measures_from_counts(counts[place])
        for name, value in one.items():
            assert found[name][place] == pytest.approx(value, abs=1e-12)
    monkeypatch.setattr(rows_ready, "CELLS", 60)  # two clients at a time
    again = group_fairness(label, prediction, {"g": group}, clients=client).attributes["g"].by_client
    for name, values in found.items():
        assert np.array_equal(values, again[name])
    batched = batched_measures(counts)
    assert np.allclose(batched["eodds"], found["eodds"])


# ------------------------------------------------------------------------------------------- properties


@given(tables(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_clients_groups_and_classes_does_not_matter(counts, random):
    def order(size):
        return random.sample(range(size), size)

    clients, groups, classes = (order(size) for size in counts.shape[:3])
    moved = counts[clients][:, groups][:, :, classes][:, :, :, classes]
    positive = None if counts.shape[-1] > 2 else classes.index(1)
    same(measures_from_counts(moved, positive), measures_from_counts(counts))


@given(tables())
@settings(deadline=None)
def test_a_deviation_is_no_larger_than_the_gap_and_no_smaller_than_the_mean(counts):
    found = measures_from_counts(counts)
    for kind in KINDS:
        if not np.isnan(found[kind]):
            assert found[f"{kind}_mean"] <= found[kind] + 1e-12
            assert found[kind] <= found[f"{kind}_gap"] + 1e-12
            assert 0 <= found[kind] <= 1
    assert found["client_deviation"] <= found["client_gap"] + 1e-12


@given(tables(clients=(1, 1)), st.integers(2, 5))
@settings(deadline=None)
def test_predictions_that_ignore_the_group_are_exactly_fair(counts, groups):
    """Every group a multiple of the same table: all rates are the same fractions."""
    table = counts[0, 0] + np.eye(counts.shape[-1], dtype=int)
    found = measures_from_counts(np.stack([(group + 1) * table for group in range(groups)]))
    assert set(found.values()) == {0.0}


@given(tables(clients=(1, 1)))
@settings(deadline=None)
def test_empty_groups_and_clients_change_nothing(counts):
    wider = np.zeros((3, counts.shape[1] + 2, *counts.shape[2:]), dtype=int)
    wider[1, 1:-1] = counts[0]
    same(measures_from_counts(wider), measures_from_counts(counts))


def test_nothing_gives_not_a_number_and_no_warning():
    found = measures_from_counts(np.zeros((2, 3, 2, 2)))
    assert set(found) == set(MEASURES)
    assert all(np.isnan(value) for value in found.values())


def test_client_fairness_agrees_with_the_measures_of_client_fairness():
    counts = np.random.default_rng(0).integers(1, 20, (6, 2, 2, 2))
    found = measures_from_counts(counts)
    rows = counts.sum((1, 2, 3))
    right = counts.diagonal(axis1=2, axis2=3).sum((1, 2)) / rows
    wanted = eh.client_fairness(right, sizes=rows)
    assert found["client_deviation"] == pytest.approx(wanted.weighted.max_deviation)
    assert found["client_gap"] == pytest.approx(wanted.gap)
    assert found["client_std"] == pytest.approx(wanted.std)


def test_the_papers_form_by_hand():
    """FedFB's disparity, max_z |P(1|z) - P(1)|; fairlearn's difference is their distance."""
    found = group_fairness([0, 0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 0], {"sex": list("FFFFMM")}).measures["sex"]
    assert found["dp"] == pytest.approx(0.5)  # M 0 of 2, everyone 3 of 6, F 3 of 4
    assert found["dp_mean"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["dp_gap"] == pytest.approx(0.75)
    assert found["eopp"] == pytest.approx(2 / 3)
    assert found["ap_gap"] == pytest.approx(0.25)


def test_intersections_are_the_attributes_crossed():
    rng = np.random.default_rng(0)
    label, prediction = rng.integers(2, size=(2, 300))
    sex, race, age = rng.choice(["F", "M"], 300), rng.choice(["a", "b", "c"], 300), rng.choice(["<25", "25+"], 300)
    found = group_fairness(label, prediction, {"sex": sex, "race": race, "age": age})
    assert list(found.crossed) == ["sex & race", "sex & age", "race & age", "sex & race & age"]
    crossed = np.char.add(np.char.add(sex, " & "), race)
    alone = group_fairness(label, prediction, {"both": crossed}).measures["both"]
    assert found.measures["sex & race"] == alone
    assert found.crossed["sex & race"].names == ("F & a", "F & b", "F & c", "M & a", "M & b", "M & c")
    assert not group_fairness(label, prediction, {"sex": sex, "race": race}, intersections=False).crossed


# ------------------------------------------------------------------------------------------- fairlearn


def test_the_gaps_are_fairlearns_differences():
    fairlearn = pytest.importorskip("fairlearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(5):
        label, prediction, group = rng.integers(2, size=400), rng.integers(2, size=400), rng.integers(4, size=400)
        found = group_fairness(label, prediction, {"g": group})
        measures, about = found.measures["g"], {"y_true": label, "y_pred": prediction, "sensitive_features": group}
        assert measures["dp_gap"] == pytest.approx(fairlearn.demographic_parity_difference(**about))
        assert measures["eodds_gap"] == pytest.approx(fairlearn.equalized_odds_difference(**about))
        assert measures["eopp_gap"] == pytest.approx(fairlearn.equal_opportunity_difference(**about))
        metrics = {
            "selection_rate": fairlearn.selection_rate,
            "true_positive_rate": fairlearn.true_positive_rate,
            "false_positive_rate": fairlearn.false_positive_rate,
            "accuracy": lambda y_true, y_pred: float((y_true == y_pred).mean()),
        }
        frame = fairlearn.MetricFrame(metrics=metrics, **about)
        ours = found.groups.set_index("group")
        for name in metrics:
            assert np.allclose(ours[name], frame.by_group[name])
        assert measures["ap_gap"] == pytest.approx(frame.difference()["accuracy"])


def test_calibration_and_ranking_are_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    group, score = rng.integers(3, size=500), rng.random(500).round(2)  # with ties
    label = (rng.random(500) < score).astype(int)
    found = group_fairness(label, (score > 0.5).astype(int), {"g": group}, scores=score).attributes["g"].calibration
    for place in range(3):
        mine = group == place
        assert found.auc[place] == pytest.approx(metrics.roc_auc_score(label[mine], score[mine]))
        assert found.mean_score[place] == pytest.approx(score[mine].mean())
        off = score[mine] - label[mine]
        assert found.gap[place] == pytest.approx(off.mean())
        wanted = scipy.stats.ttest_1samp(off, 0.0).confidence_interval()
        assert (found.gap_low[place], found.gap_high[place]) == pytest.approx((wanted.low, wanted.high))
        assert found.auc_low[place] < found.auc[place] < found.auc_high[place]


# ------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(("hits", "of"), [(0, 1), (0, 12), (5, 12), (12, 12), (70, 100), (999, 1000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_wilson_is_scipys(hits, of, confidence):
    wanted = scipy.stats.binomtest(hits, of).proportion_ci(confidence, method="wilson")
    assert wilson(hits, of, confidence) == (pytest.approx(wanted.low), pytest.approx(wanted.high))


def test_no_rows_have_no_interval():
    assert np.isnan(wilson(0, 0)).all()
    assert np.isnan(newcombe(0, 0, 1, 2)).all()


def test_newcombes_interval_turns_round_with_the_difference():
    """The paper's examples, and both ways round."""
    low, high = newcombe(9, 10, 3, 10)
    assert (round(float(low), 4), round(float(high), 4)) == (0.1705, 0.8090)
    back = newcombe(3, 10, 9, 10)
    assert back == (pytest.approx(-high), pytest.approx(-low))
    assert newcombe(0, 10, 10, 10)[0] == -1.0


def test_an_area_of_one_is_not_certain():
    low, high = area_interval(np.array([1.0, 1.0, 0.8]), np.array([3, 300, 50]), np.array([3, 300, 50]))
    assert high[:2].tolist() == [1.0, 1.0]
    assert low[0] < 0.75 < 0.95 < low[1]
    assert 0.68 < low[2] < 0.8 < high[2] < 0.88  # two of Hanley and McNeil's standard errors are 0.089


def test_the_deviations_intervals_hold_together():
    """Eight equal groups of thirty: in about one of twenty tables any interval leaves out zero."""
    rng = np.random.default_rng(0)
    alarms = 0
    for hits in rng.binomial(30, 0.3, (400, 8)):
        found = Deviations.measured(hits[None, :, None], np.full((1, 8), 30), 0.95)
        alarms += bool(found.beyond(0.95).any())
    assert 3 <= alarms <= 34


def test_the_interval_of_a_measure_holds_it():
    """True rates 0.2, 0.3 and 0.5 in groups of 80, 40 and 20: the largest deviation is 0.5 - 38/140."""
    rng = np.random.default_rng(0)
    sizes, true = np.array([80, 40, 20]), np.array([0.2, 0.3, 0.5])
    everyone = (sizes * true).sum() / sizes.sum()
    wanted = {
        "": np.abs(true - everyone).max(),
        "_mean": np.abs(true - everyone).mean(),
        "_gap": 0.3,
    }
    missed = dict.fromkeys(FORMS, 0)
    for hits in rng.binomial(sizes, true, (300, 3)):
        ends = Deviations.measured(hits[None, :, None], sizes[None], 0.95).intervals(0.95)
        for form, value in wanted.items():
            missed[form] += not ends[form][0] <= value <= ends[form][1]
    assert max(missed.values()) <= 300 * 0.05 + 3 * (300 * 0.05 * 0.95) ** 0.5


def test_levels_multiply():
    assert sidak(0.95, 10) ** 10 == pytest.approx(0.95)
    assert sidak(0.95, 0) == 0.95


def test_few_rows_are_said_to_be_few():
    label = [0, 1] * 500
    group = ["many"] * 500 + ["also"] * 490 + ["few"] * 10
    prediction = np.array(label)
    prediction[:100] = 1 - prediction[:100]
    prediction[-3:] = 1 - prediction[-3:]
    found = group_fairness(label, prediction, {"g": group}).attributes["g"]
    verdicts = dict(zip(found.names, (one.verdict for one in found.findings("ap")), strict=True))
    assert verdicts == {"many": BEYOND, "also": BEYOND, "few": TOO_FEW}
    assert found.largest("ap").group == "few"
    assert found.surest("ap").group in ("many", "also")
    assert found.worst_served().group == "many"
    fair = group_fairness(label * 10, label * 10, {"g": group * 10}).attributes["g"]
    assert {one.verdict for one in fair.findings("ap")} == {WITHIN}


# ------------------------------------------------------------------------------------------- what comes in


def test_undefined_rates_are_left_out_and_said_to_be():
    found = group_fairness([1, 0, 0, 0], [1, 0, 1, 0], {"sex": list("FFMM")})
    assert found.notes == ("sex: no row is labelled '1' in 'M'; that rate is left out there",)
    assert found.measures["sex"]["eopp"] == 0.0  # F alone, against everyone, who is F
    assert list(found.attributes["sex"].findings("eopp"))[1] is None
    assert "NaN" not in json.dumps(json.loads(json.dumps(found.to_dict()).replace("NaN", "null")))


def test_numbers_words_truth_values_and_tensors_are_all_classes():
    pandas = pytest.importorskip("pandas")
    label, prediction, sex = [0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 1, 0], list("FFFMMM")
    wanted = group_fairness(label, prediction, {"sex": sex}).measures
    forms = [
        (np.array(label, float), [str(value) for value in prediction]),
        (torch.tensor(label), np.array(prediction, np.int8)),
        (np.array(label, bool), np.array(prediction, bool)),
        (pandas.Series(label), pandas.Series(prediction).astype("category")),
        ([f"{value}.0" for value in label], prediction),
        (np.array(["no", "yes"])[label], pandas.array(np.array(["no", "yes"])[prediction], dtype="string")),
    ]
    for labels, predictions in forms:
        assert group_fairness(labels, predictions, pandas.DataFrame({"sex": sex})).measures == wanted


def test_the_last_class_in_order_is_positive_unless_named():
    def positive(labels, **options):
        return group_fairness(labels, labels, {"g": [0, 1] * (len(labels) // 2)}, **options).positive

    assert positive(["no", "yes"]) == "yes"
    assert positive([-1, 1]) == "1"
    assert positive(["<=50K", ">50K"]) == ">50K"
    assert positive([10, 9]) == "10"
    assert positive([True, False]) == "True"
    assert positive([0, 1], positive=0.0) == "0"
    assert positive(["a", "b", "c", "a"]) is None
    assert positive(["a", "b", "c", "a"], positive="b") == "b"


def test_missing_values_are_counted_and_named():
    found = group_fairness([0, 1, None, 1, 0, NAN], [0, 1, 1, "NA", 0, 1], {"sex": ["F", None, "M", "M", "M", "F"]})
    assert found.rows == 3
    assert found.attributes["sex"].names == ("F", "M", "unknown")
    assert found.notes[:3] == (
        "2 rows have no 'labels': left out",
        "1 row has no 'predictions' (written 'NA'): left out",
        "1 row has no 'sex': a group of their own, 'unknown'",
    )


def test_what_is_odd_is_noted():
    found = group_fairness([0, 1, 1, 0], [0, 1, 2, 0], {"a": list("FFMM"), "b": list("xxxx")}, clients=[1, 1, 1, 1])
    assert "1 predictions ('2') are no label of any row: they count as wrong" in found.notes
    assert "'b' holds one group only, 'x': there is nothing to compare it with" in found.notes
    assert "there is one client only, '1': there is nothing to compare it with" in found.notes
    assert list(found.crossed) == []
    single = group_fairness([1, 1, 1], [0, 1, 1], {"a": list("FMM")})
    assert "every label is '1', so rates within other labels are undefined and left out" in single.notes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([0, 1], [0, 1]), "nothing to compare"),
        (([0, 1], [0, 1], ["F", "M"]), 'attributes need names: give {"sex": values} or a data frame, not list'),
        (([0, 1], [0, 1], {"sex": ["F"]}), "'labels' has 2, 'predictions' has 2, 'sex' has 1"),
        (([], [], {"sex": []}), "no row has a label and a prediction"),
        (([None, 1], [0, None], {"sex": ["F", "M"]}), "no row has a label and a prediction (1 row has no 'labels'"),
        (([1, 1], [1, 1], {"sex": ["F", "M"]}), "every label and every prediction is '1'"),
        (([0, 1], ["no", "yes"], {"sex": ["F", "M"]}), "no prediction is among the labels"),
        (([0, 1], 1, {"sex": ["F", "M"]}), "'predictions' must hold one value per row, not 1"),
        (([0, 1], "01", {"sex": ["F", "M"]}), "'predictions' must hold one value per row"),
        (([[0], [1]], [0, 1], {"sex": ["F", "M"]}), "'labels' has shape (2, 1)"),
        (([0, 1] * 50, np.linspace(0, 1, 100), {"sex": ["F", "M"] * 50}), "if they are probabilities, give them as"),
        (([0, 1] * 50, [0, 1] * 50, {"age": range(100)}), "'age' holds 100 different numbers, too many groups"),
        (([0, 1], [0, 1], {"sex": [["F"], ["M", "F"]]}), "'sex'"),
    ],
)
def test_bad_input_is_named(arguments, said):
    with pytest.raises(EvenhandError) as caught:
        group_fairness(*arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positive": "yse"}, "positive='yse' is no class; did you mean 'yes'? (the classes are 'no', 'yes')"),
        ({"scores": [0.5, 1.2]}, "scores are probabilities in [0, 1], but 1.2 was given"),
        ({"scores": ["a", "b"]}, "'scores' should hold numbers"),
        ({"scores": [0.5]}, "'scores' has 1"),
        ({"clients": ["a"]}, "'clients' has 1"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"intersections": "all"}, "intersections='all'"),
    ],
)
def test_bad_options_are_named(options, said):
    with pytest.raises(EvenhandError) as caught:
        group_fairness(["no", "yes"], ["no", "yes"], {"sex": ["F", "M"]}, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("counts", [np.zeros((2, 2)), np.zeros((2, 2, 3)), np.zeros((1, 2, 2, 2, 2))])
def test_counts_of_another_shape_are_refused(counts):
    with pytest.raises(EvenhandError, match="groups x labels x predictions is needed"):
        measures_from_counts(counts)
    with pytest.raises(EvenhandError, match="positive=2"):
        measures_from_counts(np.ones((2, 2, 2)), positive=2)


def test_columns_of_words():
    found = coded("c", np.array(["b", "10", "9", "", "b", "NA"]))
    assert found.words == ("9", "10", "b")
    assert found.codes.tolist() == [2, 1, 0, -1, 2, -1]
    assert found.marks == ("NA",)
    assert found.take([1, 4]).words == ("10", "b")
    assert coded("c", [1, "1", 1.0, "1.0", "1.00"]).words == ("1",)
    assert coded("c", [2**60, 3]).words == ("3", str(2**60))


# ------------------------------------------------------------------------------------------- what comes out


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)
    rows = 600
    sex, age = rng.choice(["F", "M"], rows), rng.choice(["<25", "25-40", "41+"], rows)
    label = rng.integers(2, size=rows)
    prediction = np.where(rng.random(rows) < np.where(sex == "F", 0.7, 0.95), label, 1 - label)
    return group_fairness(
        label, prediction, {"sex": sex, "age": age}, clients=rng.integers(4, size=rows), scores=rng.random(rows)
    )


def test_it_prints_tables(found):
    said = str(found)
    assert "Served worst" in said
    assert "demographic parity" in said
    assert "sex within clients" in said
    assert max(map(len, said.splitlines())) < 180
    assert "nan" not in said


def test_frames(found):
    pytest.importorskip("pandas")
    groups = found.groups
    assert groups.attribute.unique().tolist() == ["sex", "age", "sex & age"]
    assert len(groups) == 2 + 3 + 6
    assert (groups.accuracy_low <= groups.accuracy).all()
    assert groups.auc.between(0, 1).all()
    clients = found.by_client
    assert len(clients) == 3 * 4
    assert clients.groupby("attribute").rows.sum().eq(600).all()
    assert set(KINDS) <= set(clients.columns)


def test_it_becomes_json(found):
    plain = json.loads(json.dumps(found.to_dict()))
    assert set(plain["attributes"]["sex"]["measures"]) == set(MEASURES) - set(CLIENT_MEASURES)
    assert set(plain["clients"]["measures"]) == set(CLIENT_MEASURES)
    assert plain["attributes"]["sex"]["groups"][0]["accuracy"]["low"] < 1
    assert plain["worst_served"][1]["group"] == "F"


def test_it_is_frozen(found):
    assert isinstance(found, GroupFairness)
    with pytest.raises(AttributeError):
        found.rows = 1
    with pytest.raises(EvenhandError, match="no clients were given"):
        _ = group_fairness([0, 1], [0, 1], {"sex": ["F", "M"]}).by_client


def test_many_classes_without_a_positive_one():
    rng = np.random.default_rng(0)
    label, prediction, group = rng.choice(list("abc"), 300), rng.choice(list("abc"), 300), rng.choice(list("xy"), 300)
    found = group_fairness(label, prediction, {"g": group})
    assert found.positive is None
    assert set(found.attributes["g"].tallies) == {"accuracy"}
    assert "of label" in str(found.attributes["g"].largest("eodds"))
    assert group_fairness(label, prediction, {"g": group}, positive="b").attributes["g"].largest("eopp").label == "b"
