"""Audits: shuffles against brute force, false alarms and power, files of every kind, bounds, pages, the command."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pages import checked

import evenhand as eh
from evenhand import auditing, chance
from evenhand.auditing import audit, read_bounds
from evenhand.checks import EvenhandError
from evenhand.columns import read
from evenhand.groups import BEYOND, BY_CLIENT, TOO_FEW, WITHIN, group_fairness

ROOT = Path(__file__).resolve().parents[1]
ROLES = {"label": "y", "prediction": "yhat"}


def people(rows=400, seed=0, **gaps):
    """Predictions that are right four times out of five, and less often for those with a planted gap (`F=0.3`)."""
    rng = np.random.default_rng(seed)
    table = {
        "hospital": rng.choice(["north", "south", "west"], rows),
        "sex": rng.choice(["F", "M"], rows),
        "age": rng.integers(18, 90, rows),
        "y": rng.integers(2, size=rows),
    }
    right = np.full(rows, 0.8)
    for who, gap in gaps.items():
        right[(table["sex"] == who) | (table["hospital"] == who)] -= gap
    table["yhat"] = np.where(rng.random(rows) < right, table["y"], 1 - table["y"])
    table["p"] = np.clip(0.5 + (table["yhat"] - 0.5) * rng.random(rows), 0, 1).round(3)
    return table


def write(table, path, delimiter=","):
    rows = zip(*(np.asarray(values).astype(str) for values in table.values()), strict=True)
    path.write_text("\n".join(map(delimiter.join, [list(table), *rows])) + "\n")
    return path


# ------------------------------------------------------------------------------------------- chance


def test_shuffled_counts_keep_their_margins_and_their_distribution():
    """Against shuffles of rows: two strata, four groups, three outcomes."""
    rng = np.random.default_rng(0)
    groups, outcomes = rng.integers(4, size=(2, 40)), rng.integers(3, size=(2, 40))
    hits = np.array([[(groups[s] == g) @ np.eye(3)[outcomes[s]] for g in range(4)] for s in range(2)]).astype(int)
    of = hits.sum(-1)
    drawn = chance._drawn(hits[:, :, :2].sum(1), of, 4000, rng)
    assert drawn.shape == (4000, 2, 4, 2)
    assert (drawn.sum(2) == hits[:, :, :2].sum(1)).all()
    assert (drawn.sum(3) <= of).all()
    assert (drawn >= 0).all()
    brute = np.zeros((4000, 2, 4, 2))
    for place in range(4000):
        for s in range(2):
            np.add.at(brute[place, s], (rng.permutation(groups[s])[outcomes[s] < 2], outcomes[s][outcomes[s] < 2]), 1)
    middle, variance = chance._moments(hits[:, :, :2], of)
    for found in (drawn, brute):
        assert np.abs(found.mean(0) - middle).max() < 0.1
        assert np.abs(found.var(0) - variance).max() < 0.15
    for one, other in zip(drawn.reshape(4000, -1).T, brute.reshape(4000, -1).T, strict=True):
        shares = [np.bincount(counts.astype(int), minlength=30) / 4000 for counts in (one, other)]
        assert np.abs(shares[0] - shares[1]).max() < 0.05


def test_p_is_what_shuffling_rows_gives():
    """The max statistic within strata, computed row by row."""
    rng = np.random.default_rng(1)
    groups, strata, hit = rng.integers(3, size=60), rng.integers(2, size=60), rng.random(60) < 0.4
    hit |= (groups == 0) & (rng.random(60) < 0.5)

    def table(groups):
        cells = [[(groups == g) & (strata == s) for g in range(3)] for s in range(2)]
        return np.array([[[[(cell & hit).sum()] for cell in row]] for row in cells])

    of = np.array([[[((groups == g) & (strata == s)).sum() for g in range(3)]] for s in range(2)])
    middle, variance = chance._moments(table(groups), of)

    def farthest(groups):
        return np.abs((table(groups) - middle).sum(0)) / np.sqrt(variance.sum(0))

    seen, beaten, order = farthest(groups), np.zeros((1, 3, 1)), groups.copy()
    for _ in range(600):
        for s in range(2):
            order[strata == s] = rng.permutation(order[strata == s])
        beaten += farthest(order).max() >= seen - 1e-9
    found = chance.shuffled(table(groups), of, 4000, rng)
    assert np.abs(found.p - (1 + beaten) / 601).max() < 0.06


def test_false_alarms_are_as_rare_as_they_should_be():
    """Five groups and a few rows, nothing but chance: p is at most 0.05 in about one of twenty tables."""
    rng = np.random.default_rng(0)
    smallest = []
    for _ in range(400):
        of = rng.integers(1, 25, (2, 1, 5))
        hits = rng.binomial(of, rng.uniform(0.1, 0.9, (2, 1, 1)))[..., None]
        found = chance.shuffled(hits, of, 99, rng)
        smallest.append(found.p.min())
    smallest = np.array(smallest)
    for level in (0.05, 0.2):
        assert (smallest <= level).mean() <= level + 3 * (level * (1 - level) / 400) ** 0.5
    assert (smallest <= 0.2).mean() > 0.1  # and it does not sleep


def test_a_planted_gap_is_found():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        of = np.full((1, 1, 4), 100)
        hits = rng.binomial(of, [0.8, 0.8, 0.8, 0.55])[..., None]
        result = chance.shuffled(hits, of, 99, rng)
        found += result.p[0, 3, 0] <= 0.05
    assert found >= 42


def test_a_small_group_does_not_hide_a_large_one():
    """Three people who are all wrong are within chance; the max statistic is on one scale, so the others still show."""
    of = np.array([[[3, 2000, 2000]]])
    hits = np.array([[[1, 1600, 1400]]])[..., None]
    found = chance.shuffled(hits, of, 999, np.random.default_rng(0))
    assert found.p[0, :, 0].tolist() == [pytest.approx(0.5, abs=0.4), 0.001, 0.001]
    assert found.p[0, 0, 0] > 0.05


def test_what_cannot_be_shuffled_is_never_beyond_chance():
    for hits, of in (([[[[3]]]], [[[5]]]), ([[[[5], [2]]]], [[[5, 2]]]), ([[[[0], [0]]]], [[[5, 0]]])):
        found = chance.shuffled(hits, of, 99, np.random.default_rng(0))
        assert found.p.min() == 1.0
        assert found.block_p.tolist() == [1.0]
        assert chance.draws(hits, of) == 0


def test_what_the_clients_explain_is_not_blamed_on_the_groups():
    """Women are mostly at the bad hospital, and served there exactly like the men."""
    rng = np.random.default_rng(0)
    bad = rng.random(4000) < 0.5
    table = {
        "hospital": np.where(bad, "bad", "good"),
        "sex": np.where(rng.random(4000) < np.where(bad, 0.8, 0.2), "F", "M"),
    }
    table["y"] = rng.integers(2, size=4000)
    table["yhat"] = np.where(rng.random(4000) < np.where(bad, 0.6, 0.9), table["y"], 1 - table["y"])
    alone = audit(table, **ROLES, sensitive="sex")
    assert alone.fairness.attributes["sex"].worst_served().verdict == BEYOND
    both = audit(table, **ROLES, sensitive="sex", client="hospital", bounds={"ap": 0.05})
    women = both.fairness.attributes["sex"].worst_served()
    assert (women.group, women.verdict) == ("F", BY_CLIENT)
    assert women.p > 0.05
    assert both.fairness.clients.worst_served().verdict == BEYOND
    assert both.bounds[0].broken
    assert BY_CLIENT in str(both.bounds[0])


def test_a_difference_within_one_client_is_found_there():
    table = people(3000)
    cell = (table["sex"] == "F") & (table["hospital"] == "west")
    table["yhat"] = np.where(cell & (np.arange(3000) % 2 == 0), 1 - table["y"], table["yhat"])
    found = audit(table, **ROLES, sensitive="sex", client="hospital")
    assert found.fairness.within["sex"].worst_served().group == "F at west"
    entry = found.fairness.attributes["sex"]
    assert entry.by_client_p["ap"].tolist() == [pytest.approx(0.5, abs=0.49), pytest.approx(0.5, abs=0.49), 0.001]
    (inside,) = [one for one in found.inside if one.kind == "ap"]
    assert inside.against == "everyone at west"


def test_the_same_seed_gives_the_same_p():
    first, again, other = (audit(people(), **ROLES, sensitive="sex", seed=seed).to_dict() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_many_groups_and_clients_are_shuffled_less_often(monkeypatch):
    monkeypatch.setattr(auditing, "BUDGET", 10_000)
    found = audit(people(), **ROLES, sensitive="sex", client="hospital")
    assert 99 <= found.shuffles < 999
    assert f"{found.shuffles} shuffles instead of 999" in found.notes[-1]
    monkeypatch.setattr(auditing, "MOST_CELLS", 10)
    found = audit(people(), **ROLES, sensitive="sex", client="hospital")
    assert "too many classes, groups or clients to shuffle" in " ".join(found.notes)
    assert found.fairness.attributes["sex"].deviations["eodds"].p is None
    str(found)


def test_without_shuffles_the_intervals_judge():
    found = audit(people(4000, F=0.3), **ROLES, sensitive="sex", shuffles=0)
    assert found.shuffles == 0
    assert found.fairness.attributes["sex"].worst_served().verdict == BEYOND
    assert "Nothing was shuffled" in str(found)


# ------------------------------------------------------------------------------------------- files and tables


def test_every_form_of_the_data_gives_the_same(tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    table = people()
    options = {**ROLES, "score": "p", "client": "hospital", "sensitive": "sex,age:25,41,65"}
    wanted = audit(table, **options).to_dict()
    frame = pandas.DataFrame(table)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.astype({"sex": "category"}).to_parquet(tmp_path / "b.parquet")
    (tmp_path / "bom.csv").write_text("\ufeff" + write(table, tmp_path / "a.csv").read_text(), encoding="utf-8")
    forms = [
        frame,
        tmp_path / "a.csv",
        str(tmp_path / "bom.csv"),
        write(table, tmp_path / "a.tsv", "\t"),
        write(table, tmp_path / "semicolons.csv", ";"),
        tmp_path / "a.parquet",
        tmp_path / "b.parquet",
    ]
    for form in forms:
        found = audit(form, **options).to_dict()
        assert found.pop("source") != ""
        assert found == {name: value for name, value in wanted.items() if name != "source"}, form
    assert list(wanted["attributes"]) == ["sex", "age_band"]
    assert [group["group"] for group in wanted["attributes"]["age_band"]["groups"]] == ["<25", "25-40", "41-64", "65+"]


def test_an_audit_measures_what_group_fairness_measures():
    table = people()
    found = audit(table, **ROLES, client="hospital", sensitive=["sex"]).fairness
    wanted = group_fairness(table["y"], table["yhat"], {"sex": table["sex"]}, clients=table["hospital"])
    assert found.measures == wanted.measures
    assert found.attributes["sex"].by_client.keys() == wanted.attributes["sex"].by_client.keys()


def test_a_large_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("evenhand.columns.CHUNK", 7)
    table = people(50)
    path = write(table, tmp_path / "a.csv")
    path.write_text(path.read_text().replace("\n", "\n\n" + "\n" * 9, 1))
    words, figures = read(path, ["sex", "y", "p"], ["p"])
    assert len(words["p"].words) == len(set(table["p"].tolist()))
    assert [words["sex"].words[code] for code in words["sex"].codes] == table["sex"].tolist()
    assert figures["p"].tolist() == table["p"].tolist()


def test_scores_make_predictions(tmp_path):
    table = people()
    table["yhat"] = (table["p"] >= 0.3).astype(int)
    wanted = audit(table, **ROLES, score="p", sensitive="sex")
    found = audit(table, label="y", score="p", sensitive="sex", threshold=0.3)
    assert found.fairness.measures == wanted.fairness.measures
    assert found.roles["prediction from"] == "p >= 0.3"
    assert "AUC" in str(found)
    turned = audit(table, label="y", score="p", sensitive="sex", positive=0, threshold=0.3)
    assert turned.fairness.positive == "0"
    assert turned.fairness.accuracy == pytest.approx(1 - found.fairness.accuracy)


def test_clients_alone_and_attributes_alone():
    alone = audit(people(2000, south=0.4), **ROLES, client="hospital")
    assert [one.group for one in alone.fairness.worst_served()] == ["south"]
    assert alone.fairness.worst_served()[0].verdict == BEYOND
    assert "client_gap" in str(alone)
    assert "hospital" not in str(audit(people(), **ROLES, sensitive="sex"))


def test_missing_cells_in_a_file_are_counted(tmp_path):
    path = tmp_path / "holes.csv"
    path.write_text("y,yhat,sex\n1,1,F\n0,0,M\n,1,F\nNA,0,M\n1,,F\n0,1,\n1,1,M\n")
    found = audit(path, **ROLES, sensitive="sex", shuffles=9)
    assert found.notes[:3] == (
        "2 rows have no 'y' (written 'NA'): left out",
        "1 row has no 'yhat': left out",
        "1 row has no 'sex': a group of their own, 'unknown'",
    )
    assert found.fairness.rows == 4
    lines = str(found).splitlines()
    assert "note: 1 row has no 'yhat': left out" in lines


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "holds no rows"),
        ("y,yhat,sex\n", {}, "holds no rows"),
        ("y,yhat,sex\n0,1\n", {}, "line 2: 2 fields, but the first line has 3"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"label": "yy"}, "no column 'yy' (--label yy); did you mean 'y'?"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"prediction": "pred"}, "no column 'pred' (--prediction pred)"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"sensitive": "sex,rase"}, "no column 'rase' (--sensitive rase)"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"sensitive": "sex:3,5"}, "'sex' should hold numbers"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"sensitive": ()}, "nothing to compare"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"client": "site"}, "no column 'site' (--client site)"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"prediction": None}, "name the column of predictions (--prediction), or of"),
        ("y,p,sex\n0,0.2,F\n1,1.7,M\n", {"prediction": None, "score": "p"}, "but 1.7 was given"),
        ("y,p,sex\n0,0.2,F\n1,high,M\n", {"prediction": None, "score": "p"}, "column 'p' should hold numbers"),
        ("y,p,sex\n0,0.2,F\n1,.3,M\n2,.3,M\n", {"prediction": None, "score": "p"}, "of two classes, but 'y' holds 3"),
        ("y,p,sex\n0,0.2,F\n1,.3,M\n", {"prediction": None, "score": "p", "positive": "5"}, "positive='5' is no label"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"threshold": 2}, "threshold=2"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"shuffles": -1}, "shuffles=-1"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"bounds": {"dpp": 0.1}}, "unknown measure 'dpp'; did you mean 'dp'?"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"bounds": {"dp": 10}}, "the bound of dp=10 must be a number"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"bounds": {"race.dp": 0.1}}, "no attribute 'race'"),
        ("y,yhat,sex\n0,1,F\n1,1,M\n", {"bounds": {"client_gap": 0.1}}, "needs the client column (--client)"),
        ("y,yhat,sex\n0,1,F\n0,0,M\n", {"bounds": {"eopp": 0.1}}, "nothing can be measured"),
        ("y,yhat,sex\n1,yes,F\n0,no,M\n", {}, "no prediction is among the labels"),
        ("y,yhat,sex\n\xff", {}, "not a text file"),
    ],
)
def test_bad_files_and_options_are_named(tmp_path, text, options, said):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(EvenhandError) as caught:
        audit(path, **{**ROLES, "sensitive": "sex", **options})
    assert said in str(caught.value)


def test_other_bad_data_is_named(tmp_path):
    with pytest.raises(EvenhandError, match="there is no file"):
        audit(tmp_path / "none.csv", **ROLES, sensitive="sex")
    with pytest.raises(EvenhandError, match="the columns differ in length: 'y' has 2, 'yhat' has 1"):
        audit({"y": [0, 1], "yhat": [1], "sex": ["F", "M"]}, **ROLES, sensitive="sex")
    with pytest.raises(EvenhandError, match="the data hold no rows"):
        audit({"y": [], "yhat": [], "sex": []}, **ROLES, sensitive="sex")
    with pytest.raises(EvenhandError, match="'age' should hold numbers"):
        audit({"y": [0, 1], "yhat": [1, 1], "age": ["old", "new"]}, **ROLES, sensitive="age:3")
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(EvenhandError, match="truncated or not a Parquet file"):
        audit(tmp_path / "a.parquet", **ROLES, sensitive="sex")


# ------------------------------------------------------------------------------------------- bounds


def test_bounds_are_read_and_spelled():
    assert read_bounds("dp=0.1, sex & race.eodds_gap=0.2") == {"dp": 0.1, "sex & race.eodds_gap": 0.2}
    assert read_bounds("") == {}
    for wrong in ("dp", "dp=much", "=0.1"):
        with pytest.raises(EvenhandError, match="MEASURE=NUMBER"):
            read_bounds(wrong)
    bounds = {"demographic_parity_difference": 0.1, "equalized_odds_gap": 0.1, "accuracy_parity": 0.2}
    found = audit(people(), **ROLES, sensitive="sex", bounds=bounds, shuffles=0).bounds
    assert [bound.measure for bound in found] == ["dp_gap", "eodds_gap", "ap"]


def test_a_bound_holds_for_every_attribute_or_for_one():
    table = people()
    table["race"] = np.random.default_rng(1).choice(["a", "b"], 400)
    options = {**ROLES, "sensitive": "sex,race", "shuffles": 0}
    found = audit(table, **options, bounds={"dp": 0.5}).bounds
    assert [bound.attribute for bound in found] == ["sex", "race"]
    found = audit(table, **options, bounds={"race.dp": 0.5, "sex&race.ap_gap": 0.9}).bounds
    assert [(bound.attribute, bound.broken) for bound in found] == [("race", False), ("sex & race", False)]


def test_a_break_says_whether_it_is_chance():
    sure = audit(people(4000, F=0.4), **ROLES, sensitive="sex", bounds={"ap": 0.1}).bounds[0]
    assert (sure.broken, sure.verdict) == (True, BEYOND)
    assert "lies above it" in str(sure)
    table = people(400)
    table["sex"][:3], table["yhat"][:3] = "X", [*1 - table["y"][:2], table["y"][2]]
    bounds = {"ap": 0.1, "client_std": 0.0, "dp": 1.0}
    found = audit(table, **ROLES, sensitive="sex", client="hospital", bounds=bounds)
    small, spread, kept = found.bounds
    assert (small.broken, small.verdict) == (True, WITHIN)
    assert "reaches below it" in str(small)
    assert f"it is of X, which has {TOO_FEW}" in str(small)
    assert spread.verdict == WITHIN
    assert "for any difference" in str(spread)
    assert (kept.broken, str(kept).endswith("kept")) == (False, True)
    assert found.broken == (small, spread)
    assert found.failed()
    assert not found.failed(beyond_chance=True)


# ------------------------------------------------------------------------------------------- the page


def test_the_page_stands_alone(tmp_path):
    table = people(2000, F=0.2)
    found = audit(table, **ROLES, score="p", client="hospital", sensitive="sex,age:25,41,65", bounds={"dp": 0.01})
    text = found.report(tmp_path / "page.html").read_text()
    checked(text)
    for word in (
        "Served worst",
        "Bounds",
        "Every hospital",
        "Scores, by sex",
        "sex within hospital",
        "sex &amp; age_band",
    ):
        assert word in text
    assert len(re.findall("<svg", text)) == 6


def test_a_page_of_very_little_can_be_written(tmp_path):
    found = audit({"y": [0, 1], "yhat": [0, 1], "sex": ["F", "F"], "h": [1, 2]}, **ROLES, sensitive="sex", client="h")
    checked(found.report(tmp_path / "page.html").read_text())
    found = audit({"y": list("abc"), "yhat": list("abb"), "h": [1, 2, 2]}, **ROLES, client="h", shuffles=0)
    checked(found.report(tmp_path / "page.html").read_text())


def test_hostile_words_are_text_and_nothing_else(tmp_path):
    table = people()
    bad = "<script>alert(1)</script>\"'&"
    renamed = {
        f"{bad}{name}": np.where(np.arange(400) < 200, f"{bad}{name}", f"</td><img src=http:{name}>")
        for name in ("sex", "hospital")
    }
    renamed[f"{bad}y"] = np.where(table["y"], f"{bad}yes", "<b>no")
    renamed[f"{bad}yhat"] = np.where(table["yhat"], f"{bad}yes", "<b>no")
    found = audit(
        renamed,
        label=f"{bad}y",
        prediction=f"{bad}yhat",
        client=f"{bad}hospital",
        sensitive=[f"{bad}sex"],
        bounds={f"{bad}sex.dp": 0.0},
    )
    text = found.report(tmp_path / "page.html").read_text()
    tags = checked(text.replace("http:", ""))
    assert "img" not in tags.seen
    assert "<b>no" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text


def test_many_groups_do_not_flood_the_page(tmp_path):
    table = people(3000)
    table["hospital"] = np.random.default_rng(0).integers(200, size=3000)
    found = audit(table, **ROLES, client="hospital", sensitive="sex", shuffles=99)
    text = found.report(tmp_path / "page.html").read_text()
    checked(text)
    assert len(text) < 200_000
    assert "The 30 with the lowest accuracy of 200" in text
    assert "... and 188 more, served better" in str(found)


# ------------------------------------------------------------------------------------------- the command


@pytest.fixture
def evenhand(evenhand, tmp_path):
    """Audits a file of predictions: exit code, stdout, stderr."""
    write(people(2000, F=0.2, south=0.2), tmp_path / "predictions.csv")
    return partial(evenhand, "audit", "predictions.csv", "--label", "y")


WHOLE = ["--prediction", "yhat", "--client", "hospital", "--sensitive", "sex,age:25,41,65"]


def test_the_command_prints_who_is_served_worst_and_writes_the_page(evenhand):
    code, said, complained = evenhand(*WHOLE, "--score", "p")
    assert (code, complained) == (0, "")
    assert re.search(r"hospital +south \([\d,]+ rows\): \d\d\.\d% right, -\d", said)
    assert re.search(r"sex +F \(.*beyond chance", said)
    assert re.search(r"sex within hospital +F at south", said)
    assert said.splitlines()[-1] == "report  predictions-audit.html  (open it in a browser)"
    checked(Path("predictions-audit.html").read_text())


def test_json_is_all_there_is_on_stdout(evenhand):
    code, said, complained = evenhand(*WHOLE, "--json", "--max", "dp=0.9")
    found = json.loads(said)
    assert (code, complained) == (0, "")
    assert found["bounds"][0]["verdict"] == "kept"
    assert found["clients"]["measures"]["client_gap"] > 0.1
    assert sorted(path.name for path in Path().iterdir()) == ["predictions.csv"]


def test_a_broken_bound_is_exit_code_1(evenhand):
    code, said, _ = evenhand(*WHOLE, "--max", "ap=0.05,client_gap=0.9")
    assert code == 1
    assert "ap of sex: 0." in said
    assert "broken, beyond chance" in said
    assert evenhand(*WHOLE, "--max", "ap=0.9,client_gap=0.9")[0] == 0
    code, said, complained = evenhand(*WHOLE, "--max", "client_gap=0.01", "--quiet", "--out", "page.html")
    assert (code, said) == (1, "")
    assert complained.startswith("client_gap of clients: 0.")
    assert Path("page.html").is_file()


def test_a_break_within_chance_can_be_let_pass(evenhand):
    table = people(120)
    write(table, Path("predictions.csv"))
    options = ["--prediction", "yhat", "--sensitive", "sex", "--max", "dp=0.0", "--quiet"]
    assert evenhand(*options)[0] == 1
    assert evenhand(*options, "--beyond-chance")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the column of predictions"),
        (["--prediction", "yhat"], "nothing to compare"),
        (["--prediction", "yhatt", "--client", "hospital"], "did you mean 'yhat'?"),
        ([*WHOLE, "--max", "client_gp=0.1"], "did you mean 'client_gap'?"),
        ([*WHOLE, "--max", "dp"], "MEASURE=NUMBER"),
        ([*WHOLE, "--out", "no/page.html"], "cannot write to 'no/page.html'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(evenhand, arguments, said):
    code, printed, complained = evenhand(*arguments)
    assert (code, printed) == (2, "")
    assert complained.startswith("error: ")
    assert complained.count("\n") == 1
    assert said in complained


def test_it_explains_itself(evenhand):
    code, said, _ = evenhand("--help")
    assert code == 0
    assert "evenhand audit predictions.csv --label y --prediction yhat --client hospital" in said


def test_the_door_stays_a_function():
    """Also after its module was imported, which a module of the same name would not survive."""
    assert eh.audit is audit
    assert eh.group_fairness is group_fairness
