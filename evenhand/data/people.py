"""Adult, COMPAS and Bank Marketing: tables about people, with their sensitive attributes, from the raw official files.

Preparation is fitted on the training rows alone. `sensitive` names the attributes: columns of words, `race:Caucasian`
for some words and all others as one group, `age:25,41,65` for bands of a number. `include_sensitive=False` keeps them,
and what they were drawn from, out of the inputs.

mFairFL looks at these (its tables 1, 2 and S2 at the first, its table S3 at the second):

    adult   sex        sex,age_band         ages 25-40, 41-65, other
    compas  sex        sex,race:Caucasian   the paper does not say how many groups it makes; two, as FedFB's code has
                                            it, since of the six in the file two have 32 and 18 people
    bank    age_group  age_band,marital     ages 20-40, 41-60, other; where it cuts age in two it does not say, so
                                            age_group is 25-60 or other, the custom since Zafar et al. (2017)

It does not say how it tests either: here Adult keeps its official test set, and the others draw a fifth of the rows.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evenhand.checks import EvenhandError, choice, flag
from evenhand.data.attributes import bands
from evenhand.data.dataset import Dataset
from evenhand.data.files import Remote, Shelf, cache_folder, fetch
from evenhand.data.tabular import Table, holdout, read_csv, table_dataset, typed

UCI = "https://archive.ics.uci.edu/"

ADULT_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_ROWS = (32_561, 16_281)
ADULT_FORMS = {"files": [("adult.data",), ("adult.test",)]}
ADULT_REMOTES = (
    Remote(
        "adult.data", UCI + "ml/machine-learning-databases/adult/adult.data", "md5:5d7c39d7b8804f071cdd1f2a7c460872"
    ),
    Remote(
        "adult.test", UCI + "ml/machine-learning-databases/adult/adult.test", "md5:35238206dfdf7f1fe215bbb874adecdc"
    ),
)

COMPAS_ROWS = 7_214
COMPAS_FORMS = {"file": [("compas-scores-two-years.csv",)]}
COMPAS_REMOTE = Remote(
    "compas-scores-two-years.csv",
    "https://raw.githubusercontent.com/propublica/compas-analysis/master/compas-scores-two-years.csv",
    "md5:9165d40c400bba93a8cffece2b74622b",
)
# What was known at the screening. Not the scores under examination, nor anything that happened later.
COMPAS_FEATURES = (
    "sex",
    "age",
    "race",
    "juv_fel_count",
    "juv_misd_count",
    "juv_other_count",
    "priors_count",
    "c_charge_degree",
)
COMPAS_NUMBERS = ("age", "juv_fel_count", "juv_misd_count", "juv_other_count", "priors_count")

BANK_ROWS = 45_211
BANK_FORMS = {"file": [("bank-full.csv",)]}
BANK_REMOTE = Remote("bank-marketing.zip", UCI + "static/public/222/bank+marketing.zip")
BANK_CONTENT = "d1513ec63b385506f7cfce9f2c5caa9fe99e7ba4e8c3fa264b3aaf0f849ed32d"  # sha256 of bank-full.csv
BANK_NUMBERS = ("age", "balance", "day", "duration", "campaign", "pdays", "previous")


def adult(
    shelf: Shelf, *, features: str = "all", sensitive: str | Sequence[str] = "sex", include_sensitive: bool = True
) -> Dataset:
    """People of the 1994 census: income above 50K or not (official split 32,561 / 16,281).

    `sensitive`: sex, race, marital-status, age_band (mFairFL's 25-40, 41-65, other), age:30,50 or any other column, and
    several, `sex,age_band`. `features="categorical"` gives q-FFL's 99 binary inputs. The survey weight fnlwgt is never
    an input.
    """
    choice("features", features, ("all", "categorical"))
    _, paths = shelf.require(["adult"], ADULT_FORMS, remotes=ADULT_REMOTES)
    parts = [read_csv(path, header=ADULT_COLUMNS, skip=skip) for path, skip in zip(paths, (0, 1), strict=True)]
    for path, part, rows in zip(paths, parts, ADULT_ROWS, strict=True):
        _expect_rows(path, part, rows)
        _expect_values(path, part, "income", ("<=50K", ">50K", "<=50K.", ">50K."))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ADULT_COLUMNS}
    joined["income"] = np.char.rstrip(joined["income"], ".")  # the test file's labels end in a dot
    table = typed(Table(joined), ADULT_NUMBERS, str(paths[0].parent))
    table = table.with_columns({"age_band": bands(table["age"], ((25, 40), (41, 65)))})
    inputs = [name for name in ADULT_COLUMNS if name not in ("fnlwgt", "income")]
    return table_dataset(
        "adult",
        table,
        "income",
        [name for name in inputs if features == "all" or table.is_text(name)],
        class_names=("<=50K", ">50K"),
        train_rows=len(parts[0]),
        sensitive=sensitive,
        include_sensitive=include_sensitive,
        source=str(paths[0].parent),
    )


def compas(
    shelf: Shelf,
    *,
    filtered: bool = False,
    sensitive: str | Sequence[str] = "sex",
    include_sensitive: bool = True,
    test: float = 0.2,
    order: str = "random",
    seed: int = 0,
) -> Dataset:
    """Defendants in Florida: reoffended within two years or not.

    `sensitive`: sex, race, age_band (ProPublica's below 25, 25 to 45, above) or age:30,50; several as `sex,race`.
    `filtered`: the 6,172 rows of ProPublica's own analysis. No official split: `test` of the rows are drawn as the
    test set (`order="file"`: the last ones, as FedFB's code does).
    """
    flag("filtered", filtered)
    _, (path,) = shelf.require(["compas"], COMPAS_FORMS, remotes=[COMPAS_REMOTE])
    raw = read_csv(path)
    needed = (*COMPAS_FEATURES, "age_cat", "two_year_recid", "days_b_screening_arrest", "is_recid", "score_text")
    _expect_columns(path, raw, needed)
    _expect_rows(path, raw, COMPAS_ROWS)
    _expect_values(path, raw, "two_year_recid", ("0", "1"))
    if filtered:
        days = typed(Table({"days": raw["days_b_screening_arrest"]}), ("days",), str(path))["days"]
        kept = (np.abs(days) <= 30) & (raw["is_recid"] != "-1") & (raw["c_charge_degree"] != "O")
        raw = raw.take(np.flatnonzero(kept & (raw["score_text"] != "N/A")))
    rows, train_rows = holdout(len(raw), test, seed, order)
    known = {name: raw[name] for name in (*COMPAS_FEATURES, "two_year_recid")} | {"age_band": raw["age_cat"]}
    return table_dataset(
        "compas",
        typed(Table(known), COMPAS_NUMBERS, str(path)).take(rows),
        "two_year_recid",
        COMPAS_FEATURES,
        class_names=("0", "1"),
        train_rows=train_rows,
        sensitive=sensitive,
        include_sensitive=include_sensitive,
        source=str(path),
    )


def bank(
    shelf: Shelf,
    *,
    duration: bool = False,
    sensitive: str | Sequence[str] = "age_group",
    include_sensitive: bool = True,
    test: float = 0.2,
    order: str = "random",
    seed: int = 0,
) -> Dataset:
    """Calls of a Portuguese bank: term deposit subscribed or not.

    `sensitive`: age_group (25-60, other), age_band (mFairFL's 20-40, 41-60, other), marital, age:30,50 or any other
    column; several as `age_band,marital`. `duration` of the call is known only when the outcome is, so it is left out
    unless asked for. No official split: `test` of the rows are drawn as the test set (`order="file"`: the last ones).
    """
    flag("duration", duration)
    path = _bank_file(shelf)
    raw = read_csv(path, delimiter=";")
    _expect_columns(path, raw, (*BANK_NUMBERS, "job", "marital", "education", "y"))
    _expect_rows(path, raw, BANK_ROWS)
    _expect_values(path, raw, "y", ("no", "yes"))
    rows, train_rows = holdout(len(raw), test, seed, order)
    table = typed(raw.take(rows), BANK_NUMBERS, str(path))
    groups = {"age_group": bands(table["age"], ((25, 60),)), "age_band": bands(table["age"], ((20, 40), (41, 60)))}
    table = table.with_columns(groups)
    return table_dataset(
        "bank",
        table,
        "y",
        [name for name in raw.columns if name != "y" and (duration or name != "duration")],
        class_names=("no", "yes"),
        train_rows=train_rows,
        sensitive=sensitive,
        include_sensitive=include_sensitive,
        source=str(path),
    )


def _bank_file(shelf: Shelf) -> Path:
    """bank-full.csv; UCI publishes it inside a zip file inside a zip file."""
    found = shelf.find(["bank"], BANK_FORMS)
    if found is None and shelf.given is None:
        archive = fetch(BANK_REMOTE, cache_folder() / "bank")
        try:
            with zipfile.ZipFile(archive) as outer, zipfile.ZipFile(io.BytesIO(outer.read("bank.zip"))) as inner:
                content = inner.read("bank-full.csv")
        except (zipfile.BadZipFile, KeyError) as failure:
            raise EvenhandError(f"{archive} does not hold bank.zip with bank-full.csv ({failure})") from failure
        digest = hashlib.sha256(content).hexdigest()
        if digest != BANK_CONTENT:
            raise EvenhandError(f"{archive}: bank-full.csv has sha256 {digest}, expected {BANK_CONTENT}")
        (archive.parent / "bank-full.csv").write_bytes(content)
    _, (path,) = shelf.require(["bank"], BANK_FORMS, advice=f"put bank-full.csv there (from {BANK_REMOTE.url})")
    return path


def _expect_columns(path: Path, table: Table, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise EvenhandError(f"{path} has no column {missing[0]!r}; its first are {', '.join(list(table.columns)[:5])}")


def _expect_rows(path: Path, table: Table, rows: int) -> None:
    if len(table) != rows:
        raise EvenhandError(f"{path} has {len(table):,} rows, expected {rows:,}: it is cut short or another file")


def _expect_values(path: Path, table: Table, name: str, allowed: Sequence[str]) -> None:
    strange = sorted(set(np.unique(table[name])) - set(allowed))
    if strange:
        raise EvenhandError(f"{path}: column {name!r} holds {str(strange[0])!r}, expected {', '.join(allowed)}")
