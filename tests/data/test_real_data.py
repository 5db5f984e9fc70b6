"""The real files, where they are at hand: the counts their owners publish."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from evenhand.data import datasets, load, partition
from evenhand.data.text import speeches

FOLDER = Path(os.environ.get("EVENHAND_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def at_hand(name: str, **options):
    """The data set from the data folder or where packages put it; the test is skipped without its files."""
    for place in (FOLDER, None):
        if place is None or place.is_dir():
            (here,) = (entry.available for entry in datasets(place) if entry.name == name)
            if os.sep in here:
                return load(name, data_dir=place, **options)
    return pytest.skip(f"no files of {name} in {FOLDER} or where packages put them")


def test_adult():
    data = at_hand("adult")
    assert (len(data), data.train_rows) == (48_842, 32_561)
    assert data.targets[:32_561].sum() == 7_841
    assert data.targets[32_561:].sum() == 3_846
    assert len(at_hand("adult", features="categorical").feature_names) == 99  # q-FFL's inputs
    assert abs(data.inputs[:32_561, 0].mean()) < 1e-5


@pytest.mark.parametrize(
    ("name", "sensitive", "disadvantaged", "groups"),
    [
        ("adult", "sex", "Female", 2),
        ("adult", "sex,age_band", "Female", 6),
        ("compas", "sex", "Female", 2),
        ("compas", "sex,race", "Female", 12),
        ("bank", "age_group", "other", 2),
        ("bank", "age_band,marital", "other", 9),
    ],
)
@pytest.mark.parametrize("table", ["low", "high"])
def test_mfairfls_five_clients(name, sensitive, disadvantaged, groups, table):
    data = at_hand(name, sensitive=sensitive)
    found = partition(data, f"shares:{table}")
    first = data.groups().attributes[0]
    held = 100 * found.group_counts(first) / first.counts
    rows = {"low": ([30, 30, 20, 10, 10], [10, 20, 20, 20, 30]), "high": ([50, 10, 10, 20, 10], [10, 40, 30, 10, 10])}
    for place, group in enumerate(first.values):
        np.testing.assert_allclose(held[:, place], rows[table][group != disadvantaged], atol=0.1)
    assert len(data.groups().joint.values) == groups
    assert not found.notes
    assert data.train_rows is not None
    assert found.test.indices.min() >= data.train_rows


@pytest.mark.parametrize(
    ("name", "sensitive", "hidden"),
    [
        ("adult", "sex,age_band", ("sex", "age")),
        ("compas", "sex,race", ("sex", "race")),
        ("bank", "age_band,marital", ("age", "marital")),
    ],
)
def test_people_can_be_prepared_from_a_partitions_training_rows(name, sensitive, hidden):
    data = at_hand(name, sensitive=sensitive, include_sensitive=False)
    drawn = partition(data, "iid", clients=5, split=(0.8, 0.0, 0.2), seed=3)
    assert any("tested on" in note for note in drawn.notes)
    fitted = data.fitted_on(drawn.train.indices)
    assert not {feature.partition("=")[0] for feature in fitted.feature_names} & {*hidden}
    trained = fitted.inputs[drawn.train.indices].double()
    numbers = [place for place, feature in enumerate(fitted.feature_names) if "=" not in feature]
    np.testing.assert_allclose(trained[:, numbers].mean(dim=0), 0, atol=1e-4)
    np.testing.assert_allclose(trained[:, numbers].std(dim=0, correction=0), 1, atol=1e-4)
    words = [place for place, feature in enumerate(fitted.feature_names) if "=" in feature]
    assert (trained[:, words].sum(dim=0) > 0).all()  # every category was met in training
    assert fitted.sensitive == data.sensitive


def test_compas():
    data = at_hand("compas")
    assert len(data) == 7_214
    assert data.targets.sum() == 3_251
    assert len(at_hand("compas", filtered=True)) == 6_172  # ProPublica's own count


def test_bank():
    data = at_hand("bank")
    assert len(data) == 45_211
    assert data.targets.sum() == 5_289


def test_letters():
    data = at_hand("letters")
    assert (len(data), data.classes, data.shape) == (52_152, 26, (1, 16, 8))
    assert len(at_hand("letters", keep="a-j")) == 23_185


def test_shakespeare():
    data = at_hand("shakespeare", stride=40)
    path = Path(data.source.partition(" (")[0])
    if path.name != "input.txt":
        pytest.skip(f"{path} is not the plain text")
    roles = speeches(path.read_text(), str(path))
    assert len(roles) == 299
    assert data.shape == (80,)
    assert len({*data.columns["client"]}) > 150
    found = partition(data, "natural", min_size=200)
    assert (found.test.sizes > 0).all()


def test_fashion_mnist():
    data = at_hand("fashion-mnist")
    assert (len(data), data.train_rows) == (70_000, 60_000)
    assert {*np.bincount(data.labels)} == {7_000}
    found = partition(data, "pat:2", clients=100, split=(6 / 7, 0.0, 1 / 7))  # FedLF's sizes
    assert {*found.train.sizes} == {600}
    assert {*found.test.sizes} == {100}
    assert ((found.label_counts(data) > 0).sum(axis=1) == 2).all()


def test_three_classes_of_fashion_mnist():
    data = at_hand("fashion-mnist-3")
    whole = partition(data, "natural", split=(0.8, 0.1, 0.1))  # FedFV's sizes
    assert {*whole.train.sizes} == {5_600}
    assert {*whole.test.sizes} == {*whole.validation.sizes} == {700}
    apart = partition(data, "natural", split="official")  # AFL's and q-FFL's
    assert {*apart.train.sizes} == {6_000}
    assert {*apart.test.sizes} == {1_000}


def test_mnist():
    data = at_hand("mnist")
    assert (len(data), data.train_rows) == (70_000, 60_000)
    assert data.targets[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]


def test_cifar10():
    data = at_hand("cifar10")
    assert (len(data), data.train_rows, data.shape) == (60_000, 50_000, (3, 32, 32))
    assert data.targets[:5].tolist() == [6, 9, 9, 4, 1]
    assert abs(data.inputs[:50_000].mean()) < 0.01
