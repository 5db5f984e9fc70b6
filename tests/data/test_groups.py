"""Sensitive attributes: samples as named groups, bands of numbers, and FedFB's people in the plane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official import small
from scipy.stats import multivariate_normal

import evenhand as eh
from evenhand.data import load, partition
from evenhand.data.attributes import Attribute, attribute_names, drawn_from, in_order, sensitive_columns

WORDS = st.lists(st.sampled_from(["F", "M", "", "unknown", "10", "9", "<9", "9-12"]), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(one=WORDS, seed=st.integers(0, 100))
def test_groups_name_every_sample(one, seed):
    other = np.random.default_rng(seed).choice(["a", "b", ""], len(one))
    columns = {"one": np.array(one, dtype=str), "other": other}
    data = small(len(one), classes=1, columns=columns, sensitive=("one", "other"))
    groups = data.groups()
    for attribute, values in zip(groups, (one, other.tolist()), strict=True):
        assert attribute.codes.dtype == np.int64
        assert [attribute.values[code] for code in attribute.codes] == [value or "unknown" for value in values]
        assert (attribute.counts > 0).all()
        assert attribute.counts.sum() == len(one)
        assert "unknown" not in attribute.values[:-1]
    joint = groups.joint
    assert (joint.counts > 0).all()
    crossed = [
        f"{groups['one'].values[a]} & {groups['other'].values[b]}"
        for a, b in zip(groups["one"].codes, groups["other"].codes, strict=True)
    ]
    assert [joint.values[code] for code in joint.codes] == crossed
    # The order of the samples changes nothing but their own numbers.
    order = np.random.default_rng(seed).permutation(len(one))
    again = data.select(order).groups().joint
    assert again.values == joint.values
    np.testing.assert_array_equal(again.codes, joint.codes[order])


def test_groups_are_sorted_as_people_sort():
    assert in_order(["10", "9", "2.5", "-1"]) == ["-1", "2.5", "9", "10"]
    assert in_order(["other", "65+", "25-40", "<25", "41-64"]) == ["<25", "25-40", "41-64", "65+", "other"]
    numbers = Attribute.of("grade", np.array([2.0, 10.0, np.nan, 2.0]))
    assert numbers.values == ("2", "10", "unknown")
    assert numbers.codes.tolist() == [0, 1, 2, 0]
    assert Attribute.of("yes", np.array([True, False])).values == ("False", "True")
    assert Attribute.of("any", np.array(["a", None], dtype=object)).values == ("a", "unknown")
    assert Attribute.of("far", np.array([np.inf, 1.0])).values == ("1.0", "inf")


def test_any_column_can_be_grouped_and_a_wrong_one_is_named():
    columns = {"sex": np.array(["F", "M", "M"]), "town": np.array(["Ulm", "Bonn", "Ulm"])}
    data = small(3, classes=2, columns=columns, sensitive=("sex",))
    assert [attribute.name for attribute in data.groups()] == ["sex"]
    assert data.groups().joint.name == "sex"
    assert data.groups("town").joint.values == ("Bonn", "Ulm")
    assert data.groups(["town", "sex"]).joint.name == "town & sex"
    with pytest.raises(eh.EvenhandError, match="small has no column 'twon'; did you mean 'town'"):
        data.groups("twon")
    with pytest.raises(eh.EvenhandError, match=r"no sensitive attribute 'town' \(there are: sex\)"):
        data.groups()["town"]
    with pytest.raises(eh.EvenhandError, match="has no column 'race'"):
        small(3, classes=2, columns=columns, sensitive=("race",))
    plain = small(3, classes=2)
    assert len(plain.groups()) == 0
    with pytest.raises(eh.EvenhandError, match="no sensitive attribute is named"):
        _ = plain.groups().joint


def test_the_fingerprint_knows_who_is_who():
    columns = {"sex": np.array(["F", "M", "M"]), "town": np.array(["Ulm", "Bonn", "Ulm"])}
    prints = {
        small(3, classes=2, columns=columns, sensitive=names).fingerprint() for names in ((), ("sex",), ("sex", "town"))
    }
    swapped = {**columns, "sex": np.array(["M", "F", "M"])}
    assert len(prints | {small(3, classes=2, columns=swapped, sensitive=("sex",)).fingerprint()}) == 4


def test_edges_of_bands_stay_with_their_column():
    assert attribute_names("sex, age:25,41 ,race") == ["sex", "age:25,41", "race"]
    assert attribute_names(["sex", "dose:0.5"]) == ["sex", "dose:0.5"]
    assert attribute_names("") == []


@settings(max_examples=60, deadline=None)
@given(
    edges=st.lists(st.integers(-50, 50), min_size=1, max_size=5, unique=True),
    values=st.lists(st.integers(-60, 60), min_size=1, max_size=30),
    half=st.booleans(),
)
def test_bands_hold_what_their_names_say(edges, values, half):
    edges = sorted(edges)
    numbers = np.array(values) + (0.5 if half else 0.0)
    written = ",".join(map(str, edges))
    (found,) = sensitive_columns("t", {"age": numbers}, f"age:{written}").values()
    names = in_order({*found})
    lows = [min(numbers[found == name]) for name in names]
    assert lows == sorted(lows)  # bands in order
    for number, name in zip(numbers, found, strict=True):
        if name.startswith("<"):
            assert number < edges[0]
        elif name.endswith("+"):
            assert number >= edges[-1] == int(name[:-1])
        elif " to <" in name:
            low, high = name.split(" to <")
            assert half
            assert int(low) <= number < int(high)
        else:
            low = next(edge for edge in reversed(edges) if edge <= number)
            high = edges[edges.index(low) + 1]
            assert name == (f"{low}-{high - 1}" if high > low + 1 else str(low))


def test_a_missing_number_is_in_no_band():
    (found,) = sensitive_columns("t", {"age": np.array([20.0, np.nan, 1e6])}, "age:25,1000000").values()
    assert Attribute.of("age_band", found).values == ("<25", "1000000+", "unknown")


def test_groups_may_be_named_and_all_others_are_one():
    table = {"race": np.array(["White", "Black", "Asian", "", "Other"]), "age": np.arange(5.0)}
    found = sensitive_columns("t", table, "race: White|Black , age:2")
    assert {name: column.tolist() for name, column in found.items()} == {
        "race_group": ["White", "Black", "other", "", "other"],
        "age_band": ["<2", "<2", "2+", "2+", "2+"],
    }
    assert sensitive_columns("t", table, ["race:White"])["race_group"].tolist() == [
        "White",
        "other",
        "other",
        "",
        "other",
    ]
    assert drawn_from("race_group") == "race"
    with pytest.raises(eh.EvenhandError, match=r"t: nobody's race is 'Whit'; did you mean 'White'.*race:Asian\|Black"):
        sensitive_columns("t", table, "race:Whit|Black")
    with pytest.raises(eh.EvenhandError, match="age:White needs the edges of the bands"):
        sensitive_columns("t", table, "age:White")


def test_too_many_groups_are_refused():
    table = {"age": np.arange(30.0), "age_band": np.array(["a", "b"] * 15), "name": np.arange(30).astype(str)}
    with pytest.raises(eh.EvenhandError, match=r"'age' holds 30 different values.*such as age:10,19, or take age_band"):
        sensitive_columns("my.csv", table, "age")
    assert [*sensitive_columns("my.csv", table, "age_band,name")] == ["age_band", "name"]
    many = {"name": np.arange(60).astype(str)}
    with pytest.raises(
        eh.EvenhandError, match=r"'name' holds 60 different values, too many groups to compare; 50 are the most"
    ):
        sensitive_columns("my.csv", many, "name")


# ------------------------------------------------------------------------------------------- FedFB's population

CLASSES = [multivariate_normal([-2, -2], [[10, 1], [1, 3]]), multivariate_normal([2, 2], [[5, 1], [1, 5]])]


def ratio(x: np.ndarray) -> np.ndarray:
    below, above = (one.pdf(x) for one in CLASSES)
    return above / (above + below)


def expected(group: int, label: int, degrees: float) -> float:
    """P(z = group | y = label) by a sum over a grid."""
    turn = np.radians(degrees)
    steps = np.linspace(-16, 16, 401)
    x = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1).reshape(-1, 2)
    turned = np.stack(
        [x[:, 0] * np.cos(turn) - x[:, 1] * np.sin(turn), x[:, 0] * np.sin(turn) + x[:, 1] * np.cos(turn)], axis=1
    )
    chance = ratio(turned)
    return float((CLASSES[label].pdf(x) * (chance if group else 1 - chance)).sum() * (steps[1] - steps[0]) ** 2)


def test_synthetic_groups_has_the_published_moments():
    data = load("synthetic-groups", samples=200_000)
    y, x, z = data.labels, data.inputs[:, :2].double().numpy(), data.columns["z"]
    assert y.mean() == pytest.approx(0.6, abs=0.005)
    for label, (mean, covariance) in enumerate([((-2, -2), [[10, 1], [1, 3]]), ((2, 2), [[5, 1], [1, 5]])]):
        np.testing.assert_allclose(x[y == label].mean(axis=0), mean, atol=0.05)
        np.testing.assert_allclose(np.cov(x[y == label].T), covariance, atol=0.12)
        assert z[y == label].mean() == pytest.approx(expected(1, label, 45), abs=0.006)


@pytest.mark.parametrize("degrees", [0, 45, 80])
def test_the_group_follows_the_turned_density_ratio(degrees):
    data = load("synthetic-groups", samples=100_000, angle=degrees, include_sensitive=False, seed=1)
    turn = np.radians(degrees)
    x = data.inputs.double().numpy()
    turned = np.stack(
        [x[:, 0] * np.cos(turn) - x[:, 1] * np.sin(turn), x[:, 0] * np.sin(turn) + x[:, 1] * np.cos(turn)], axis=1
    )
    chance, z = ratio(turned), data.columns["z"]
    tenths = np.minimum((chance * 10).astype(int), 9)
    for tenth in range(10):
        met = tenths == tenth
        assert z[met].mean() == pytest.approx(chance[met].mean(), abs=4 * 0.5 / np.sqrt(met.sum()))


def test_a_smaller_angle_ties_group_and_class():
    tied = []
    for degrees in (0, 45, 90):
        data = load("synthetic-groups", samples=20_000, angle=degrees)
        tied.append(np.corrcoef(data.columns["z"], data.labels)[0, 1])
    assert tied[0] > tied[1] > tied[2]


def test_synthetic_groups_as_fedfb_hands_it_out():
    data = load("synthetic-groups")
    assert (len(data), data.train_rows, data.shape) == (5_000, 3_500, (3,))
    assert data.feature_names == ("x1", "x2", "z")
    np.testing.assert_array_equal(data.inputs[:, 2], data.columns["z"])
    assert load("synthetic-groups", include_sensitive=False).shape == (2,)
    found = partition(data, data.partition)
    z = data.groups()["z"]
    np.testing.assert_allclose(found.group_counts(z) / z.counts, [[0.2, 0.5], [0.4, 0.3], [0.4, 0.2]], atol=0.001)
    assert found.test.indices.min() == 3_500
    again, other = load("synthetic-groups"), load("synthetic-groups", seed=1)
    assert data.fingerprint() == again.fingerprint() != other.fingerprint()


def test_three_groups_and_two_attributes():
    three = load("synthetic-groups", groups=3, samples=60_000)
    r = ratio(three.inputs[:, :2].double().numpy())
    z = three.columns["z"]
    for group, chance in enumerate((0.7 * r, np.full(len(r), 0.3), 0.7 * (1 - r))):
        low = r < 0.5
        assert (z[low] == group).mean() == pytest.approx(chance[low].mean(), abs=0.01)
        assert (z[~low] == group).mean() == pytest.approx(chance[~low].mean(), abs=0.01)
    assert partition(three, three.partition).clients == 4
    two = load("synthetic-groups", angle="45,90")
    assert two.sensitive == ("z1", "z2")
    assert two.shape == (4,)
    assert two.groups().joint.values == ("0 & 0", "0 & 1", "1 & 0", "1 & 1")
    assert partition(two, two.partition).clients == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 3}, "samples=3 must be a whole number, at least 10"),
        ({"groups": 4}, "groups=4 must be a whole number, at least 2 and at most 3"),
        ({"angle": "north"}, "angle='north' must be degrees"),
        ({"angle": []}, "must be degrees"),
        ({"groups": 3, "angle": 30}, "groups=3 turns nothing"),
        ({"test": 0}, "test=0 must be a number, at least 0.01"),
    ],
)
def test_a_bad_option_of_synthetic_groups_is_explained(options, message):
    with pytest.raises(eh.EvenhandError, match=message):
        load("synthetic-groups", **options)
