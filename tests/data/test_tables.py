"""Tables as inputs: nothing is learned from test rows; the three sets about people; the user's own files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from official import write_csv

import evenhand as eh
from evenhand.data import load, partition, people
from evenhand.data.attributes import bands
from evenhand.data.tabular import Preparation, Table, read_csv, typed

ADULT = [
    "39, State-gov, 77516, Bachelors, 13, Never-married, Tech-support, Unmarried, White, Male, 2174, 0, 40, Cuba, {}",
    "50, ?, 83311, Masters, 14, Married-civ-spouse, ?, Husband, Black, Male, 0, 0, 13, United-States, {}",
    "28, Private, 338409, Bachelors, 13, Divorced, Sales, Wife, White, Female, 0, 0, 40, United-States, {}",
]


@pytest.fixture
def adult_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(people, "ADULT_ROWS", (6, 3))
    labels = ["<=50K", ">50K", "<=50K"]
    lines = [line.format(label) for line, label in zip(ADULT, labels, strict=True)]
    (tmp_path / "adult.data").write_text("\n".join(lines * 2) + "\n\n")
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + "".join(f"{line}.\n" for line in lines))
    return tmp_path


def test_adult_is_read_with_its_official_split(adult_folder):
    data = load("adult", data_dir=adult_folder)
    assert (len(data), data.train_rows, data.class_names) == (9, 6, ("<=50K", ">50K"))
    assert data.targets.tolist() == [0, 1, 0] * 3
    assert data.sensitive == ("sex",)
    assert data.columns["sex"].tolist() == ["Male", "Male", "Female"] * 3
    assert data.columns["age_band"].tolist() == ["25-40", "41-65", "25-40"] * 3
    assert "fnlwgt" not in data.feature_names
    private = data.feature_names.index("workclass=Private")
    assert data.inputs[:3, private].tolist() == [0, 0, 1]
    unknown = [i for i, name in enumerate(data.feature_names) if name.startswith(("workclass", "occupation"))]
    assert data.inputs[1, unknown].sum() == 0  # "?" is no category
    assert set(partition(data, "iid", clients=2).test.indices) == {6, 7, 8}


def test_the_sensitive_attribute_can_stay_out_of_the_inputs(adult_folder):
    data = load("adult", data_dir=adult_folder, sensitive="sex,race", include_sensitive=False)
    assert not [name for name in data.feature_names if name.startswith(("sex", "race"))]
    assert data.sensitive == ("sex", "race")
    assert data.groups().joint.values == ("Female & White", "Male & Black", "Male & White")
    assert data.groups().joint.codes[:3].tolist() == [2, 1, 0]
    for ages in ("age_band", "age:30,50"):
        by_age = load("adult", data_dir=adult_folder, sensitive=ages, include_sensitive=False)
        assert by_age.sensitive == ("age_band",)
        assert "age" not in by_age.feature_names
    assert by_age.columns["age_band"].tolist()[:3] == ["30-49", "50+", "<30"]
    plain = load("adult", data_dir=adult_folder, features="categorical")
    assert set(plain.inputs.unique().tolist()) == {0.0, 1.0}
    with pytest.raises(eh.EvenhandError, match=r"adult has no column 'gender'; did you mean 'sex'\? \(it has age,"):
        load("adult", data_dir=adult_folder, sensitive="gender")
    with pytest.raises(eh.EvenhandError, match="include_sensitive='no' must be True or False"):
        load("adult", data_dir=adult_folder, include_sensitive="no")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n".join(ADULT).format(*["<=50K"] * 3),
            r"adult.data has 3 rows, expected 6: it is cut short or another file",
        ),
        ("1, 2, 3\n", r"adult.data, line 1: 3 fields, expected 15 \(age, workclass, fnlwgt, ...\)"),
        ("\n".join(ADULT * 2).format(*["rich"] * 6), "column 'income' holds 'rich', expected <=50K, >50K"),
        ("", "adult.data holds no rows"),
        ("\n".join(ADULT * 2).format(*["<=50K"] * 6).replace("39", "old"), "column 'age' should hold numbers"),
    ],
)
def test_a_bad_adult_file_is_named(adult_folder, text, message):
    (adult_folder / "adult.data").write_text(text)
    with pytest.raises(eh.EvenhandError, match=message):
        load("adult", data_dir=adult_folder)


def write_compas(folder, monkeypatch):
    """Twenty rows with ProPublica's doubled column names; three fail its filter."""
    monkeypatch.setattr(people, "COMPAS_ROWS", 20)
    header = [*people.COMPAS_FEATURES, "age_cat", "days_b_screening_arrest", "is_recid", "score_text", "priors_count"]
    rows = [
        [
            "Male" if i % 2 else "Female",
            20 + i,
            "Other",
            0,
            0,
            0,
            i,
            "FM"[i % 2],
            "25 - 45",
            i % 4,
            i % 2,
            "Low",
            99,
            i % 2,
        ]
        for i in range(20)
    ]
    rows[0][9], rows[1][9], rows[2][7] = 31, "", "O"
    return write_csv(folder / "compas-scores-two-years.csv", [*header, "two_year_recid"], rows)


def test_compas_and_its_filter(tmp_path, monkeypatch):
    write_compas(tmp_path, monkeypatch)
    data = load("compas", data_dir=tmp_path, test=0.3, order="file")
    assert (len(data), data.train_rows) == (20, 14)
    assert data.targets.tolist() == [i % 2 for i in range(20)]
    priors = data.inputs[:, data.feature_names.index("priors_count")]
    assert torch.all(priors[1:] > priors[:-1])  # the first column of that name, not the second
    assert len(load("compas", data_dir=tmp_path, filtered=True)) == 17
    shuffled = load("compas", data_dir=tmp_path, seed=1)
    assert shuffled.train_rows == 16
    assert shuffled.fingerprint() != load("compas", data_dir=tmp_path, seed=2).fingerprint()


def write_bank(folder, monkeypatch, rows=12):
    monkeypatch.setattr(people, "BANK_ROWS", 12)
    header = [*people.BANK_NUMBERS, "job", "marital", "education", "y"]
    lines = [
        [18 + 5 * i, i, 1, 100, 1, -1, 0, "maid", "single", "primary", "yes" if i % 3 else "no"] for i in range(rows)
    ]
    return write_csv(folder / "bank-full.csv", header, lines, delimiter=";")


def test_bank_hides_the_duration_and_bands_the_ages(tmp_path, monkeypatch):
    write_bank(tmp_path, monkeypatch)
    data = load("bank", data_dir=tmp_path, order="file")
    assert "duration" not in data.feature_names
    assert "duration" in load("bank", data_dir=tmp_path, duration=True).feature_names
    assert data.sensitive == ("age_group",)
    assert data.columns["age_group"].tolist() == ["other"] * 2 + ["25-60"] * 7 + ["other"] * 3
    assert "age" not in load("bank", data_dir=tmp_path, include_sensitive=False).feature_names
    assert data.columns["age_band"].tolist()[:3] == ["other", "20-40", "20-40"]
    write_bank(tmp_path, monkeypatch, rows=11)
    with pytest.raises(eh.EvenhandError, match=r"bank-full.csv has 11 rows, expected 12"):
        load("bank", data_dir=tmp_path)
    write_csv(tmp_path / "bank-full.csv", ["a", "b"], [[1, 2]], delimiter=";")
    with pytest.raises(eh.EvenhandError, match=r"bank-full.csv has no column 'age'; its first are a, b"):
        load("bank", data_dir=tmp_path)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), train=st.integers(2, 30))
def test_features_depend_on_training_rows_alone(seed, train):
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(40, train, replace=False))
    others = np.setdiff1d(np.arange(40), rows)
    table = {"age": rng.normal(40, 10, 40), "town": rng.choice(["a", "b", "c", ""], 40)}
    changed = {name: values.copy() for name, values in table.items()}
    changed["age"][others] = 1e6
    changed["town"][others] = "z"
    one, two = (Preparation.fit(Table(t), ["age", "town"], rows) for t in (table, changed))
    assert one.names == two.names
    np.testing.assert_array_equal(one.apply(Table(table))[rows], two.apply(Table(changed))[rows])
    numbers = one.apply(Table(table))[rows, 0]
    assert abs(numbers.mean()) < 1e-5
    assert numbers.std() == pytest.approx(1.0, abs=1e-4)
    assert (two.apply(Table(changed))[others, 1:] == 0).all()  # a category never seen in training


def test_missing_values_and_constant_columns():
    table = Table({"x": np.array([1.0, np.nan, 3.0]), "same": np.ones(3), "void": np.full(3, np.nan)})
    prepared = Preparation.fit(table, ["x", "same", "void"], np.arange(3)).apply(table)
    np.testing.assert_allclose(prepared, [[-1, 0, 0], [0, 0, 0], [1, 0, 0]], atol=1e-6)


OWN = [[20 + i, "MN"[i % 2], 0.5 * i, f"site-{i % 3}", "yes" if i % 4 == 0 else "no"] for i in range(40)]
HEADER = ["age", "sex", "dose", "site", "y"]


def test_a_csv_of_ones_own(tmp_path):
    path = write_csv(tmp_path / "my.csv", HEADER, OWN)
    data = load(str(path), client_column="site", sensitive="sex")
    assert data.feature_names == ("age", "dose", "sex=M", "sex=N")
    assert data.class_names == ("no", "yes")
    assert (len(data), data.train_rows) == (40, 32)
    np.testing.assert_allclose(data.inputs[:32, :2].mean(dim=0), 0, atol=1e-6)
    assert partition(data, "natural").names == ("site-0", "site-1", "site-2")
    assert {*data.columns} == {"sex", "site", "client"}
    assert data.sensitive == ("sex",)
    assert load(path, client_column="site").sensitive == ()
    in_order = load(path, client_column="site", order="file", test=0.25)
    assert in_order.columns["client"].tolist() == [row[3] for row in OWN]
    assert load(path, test=0).train_rows is None
    assert "sex=M" not in load(path, sensitive="sex", include_sensitive=False).feature_names
    assert load(path, drop="dose,sex,site").feature_names == ("age",)


def test_features_can_be_fitted_on_a_partitions_training_rows(tmp_path):
    path = write_csv(tmp_path / "my.csv", HEADER, OWN)
    data = load(path, client_column="site", test=0)
    found = partition(data, "natural")
    fitted = data.fitted_on(found.train.indices)
    np.testing.assert_allclose(fitted.inputs[found.train.indices, 0].mean(), 0, atol=1e-6)
    assert abs(fitted.inputs[:, 0].mean()) > 1e-6
    torch.testing.assert_close(data.targets, fitted.targets)
    assert any("rows that clients are tested on" in note for note in found.notes)
    assert not partition(fitted, "natural").notes
    assert not partition(load(path, client_column="site"), "natural").notes  # the official split keeps them apart
    image = load("synthetic-iid", clients=2)
    assert image.fitted_on(np.arange(3)) is image


def test_a_parquet_file_equals_its_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {name: [row[i] for row in OWN] for i, name in enumerate(HEADER)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "my.parquet")
    write_csv(tmp_path / "my.csv", HEADER, OWN)
    from_parquet, from_csv = (load(tmp_path / f"my.{end}", client_column="site") for end in ("parquet", "csv"))
    assert from_parquet.fingerprint() == from_csv.fingerprint()
    (tmp_path / "my.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(eh.EvenhandError, match=r"my.parquet is truncated or not a Parquet file"):
        load(tmp_path / "my.parquet")


def test_an_npz_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(10, 3, 4)), "y": np.arange(10) % 3, "site": np.arange(10) % 2, "other": np.zeros(4)}
    np.savez(tmp_path / "my.npz", **arrays)
    data = load(tmp_path / "my.npz", client_column="site")
    assert data.inputs.dtype == torch.float32
    assert (data.shape, data.classes) == ((3, 4), 3)
    assert {*data.columns} == {"site", "client"}
    assert partition(data, "natural").clients == 2
    assert load(tmp_path / "my.npz", sensitive="site").groups()["site"].values == ("0", "1")
    np.savez(tmp_path / "tokens.npz", tokens=np.arange(20).reshape(10, 2), label=np.array(list("abababcccc")))
    tokens = load(tmp_path / "tokens.npz", inputs="tokens", target="label")
    assert tokens.inputs.dtype == torch.int64
    assert tokens.class_names == ("a", "b", "c")
    np.savez(tmp_path / "bytes.npz", images=np.full((4, 2, 2), 255, np.uint8), y=np.arange(4))
    assert load(tmp_path / "bytes.npz").inputs.max() == 1.0
    with pytest.raises(eh.EvenhandError, match=r"my.npz has no array 'label' \(it has x, y, site, other\)"):
        load(tmp_path / "my.npz", target="label")
    np.savez(tmp_path / "holes.npz", x=np.array([[0.0, np.nan], [np.inf, 1.0]]), y=np.arange(2))
    with pytest.raises(eh.EvenhandError, match=r"holes.npz: 2 inputs are NaN or infinite"):
        load(tmp_path / "holes.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "z"}, r"my.csv has no column 'z' \(it has age, sex.*name the column to predict with --target"),
        ({"client_column": "sites"}, "has no column 'sites'; did you mean 'site'"),
        ({"sensitive": "sexe"}, r"my.csv has no column 'sexe'; did you mean 'sex'\?"),
        ({"sensitive": "sex,dose"}, "'dose' holds 40 different values, too many .* such as dose:6.5,13"),
        ({"sensitive": "age:40,30"}, "age:40,30 needs the edges of the bands, rising"),
        ({"sensitive": "age:old"}, "age:old needs the edges of the bands"),
        ({"sensitive": "sex:1,2"}, "nobody's sex is '1,2'"),
        ({"max_levels": 2}, "text column 'site' holds 3 different values.*drop='site', or raise max_levels=2"),
        ({"drop": "age,sex,dose,site"}, "no feature columns are left"),
        ({"test": 1.5}, "test=1.5 must be a number"),
        ({"order": "sorted"}, "order='sorted' is not one of"),
        ({"clients": 3}, "has no option 'clients'"),
    ],
)
def test_a_bad_request_for_ones_own_file_is_explained(tmp_path, options, message):
    path = write_csv(tmp_path / "my.csv", HEADER, OWN)
    with pytest.raises(eh.EvenhandError, match=message):
        load(path, **options)


def test_targets_must_be_classes(tmp_path):
    many = write_csv(tmp_path / "many.csv", ["x", "y"], [[i, i * 0.37] for i in range(1500)])
    with pytest.raises(eh.EvenhandError, match="'y' holds 1500 different values; a target has 2 to 1000 classes"):
        load(many)
    quantity = write_csv(tmp_path / "quantity.csv", ["x", "y"], [[i, i % 21 / 4] for i in range(60)])
    with pytest.raises(eh.EvenhandError, match="'y' holds 21 different numbers with fractions, which is a quantity"):
        load(quantity)
    halves = write_csv(tmp_path / "halves.csv", ["x", "y"], [[i, i % 20 / 4] for i in range(60)])
    assert load(halves).classes == 20
    gaps = write_csv(tmp_path / "gaps.csv", ["x", "y"], [[1, "a"], [2, ""], [3, "b"]])
    with pytest.raises(eh.EvenhandError, match="'y' lacks 1 values"):
        load(gaps)
    numbers = write_csv(tmp_path / "numbers.csv", ["x", "y"], [[i, 10 - i] for i in range(10)])
    assert load(numbers).class_names[0] == "1"
    assert load(numbers).class_names[-1] == "10"
    with pytest.raises(eh.EvenhandError, match="there is no file"):
        load(tmp_path / "none.csv")


def test_csv_quirks(tmp_path):
    path = tmp_path / "odd.csv"
    path.write_bytes('\ufeff"na,me",b\r\n"x ""y""\nz", 1\r\n?,NA\r\n'.encode())
    raw = read_csv(path)
    assert raw["na,me"].tolist() == ['x "y"\nz', "?"]
    table = typed(raw)
    assert table["na,me"].tolist() == ['x "y"\nz', ""]
    np.testing.assert_array_equal(table["b"], [1.0, np.nan])
    path.write_text("a,b\n1,2\n3\n")
    with pytest.raises(eh.EvenhandError, match=r"odd.csv, line 3: 1 fields, expected 2"):
        read_csv(path)


def test_bands_are_closed_intervals():
    ages = np.array([24, 25, 40, 41, 65, 66, np.nan])
    assert bands(ages, ((25, 40), (41, 65))).tolist() == ["other", "25-40", "25-40", "41-65", "41-65", "other", ""]
