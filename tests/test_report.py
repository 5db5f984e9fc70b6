"""The report: what its panels say, that it stands alone, that its figures can be had by name."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from pages import checked
from typer.testing import CliRunner

from evenhand import EvenhandError, compare, simulate
from evenhand.cli import app
from evenhand.commands import compare_command, run_command
from evenhand.comparison import load_comparison, side_by_side
from evenhand.experiment import Experiment
from evenhand.methods import method
from evenhand.report import COMPARISON_FIGURES, RUN_FIGURES, comparison_page, figures_of, run_page
from evenhand.report.charts import Client, cloud_chart, histogram, pareto_front
from evenhand.report.colours import DARK, LIGHT, SERIES
from evenhand.report.run_figures import shares_of
from evenhand.report.svg import Axis, Point, apart
from evenhand.report.words import at_the_end, headline, make_up
from evenhand.running import load_runs
from evenhand.terminal import blocks

SMALL = {"clients": 12, "rounds": 12, "eval_every": 4, "batch_size": 16}
NAMES = {"group-accuracy", "group-predictions", "group-gaps", "multipliers", "group-trade-off"}
PEOPLE = {"trade-off-dp", "trade-off-eodds", "trade-off-ap", "parity"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compared") / "here"
    compare("fedavg", "fedlf", "qffl:q=2", **SMALL, seeds=2, out=folder)
    return folder


@pytest.fixture(scope="module")
def people(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("people") / "here"
    compare("fedavg", "mfairfl", data="synthetic-groups", rounds=6, eval_every=2, seeds=2, out=folder)
    return folder


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        return result.exit_code, result.stdout, result.stderr

    return call


def section(text: str, name: str) -> str:
    return re.search(rf'<section id="{name}">.*?</section>', text, flags=re.DOTALL)[0]


# ------------------------------------------------------------------------------------------------------ what is kept


def test_a_run_keeps_who_holds_what(compared):
    fresh, kept = simulate(method="fedlf", **SMALL, seeds=2)[1], load_runs(compared / "fedlf")[1]
    for part in ("train", "validation", "test", "labels"):
        np.testing.assert_array_equal(getattr(fresh.holdings, part), getattr(kept.holdings, part))
    assert kept.holdings.classes == tuple("0123456789")
    assert (np.count_nonzero(kept.holdings.labels, axis=1) <= 2).all()  # pat:2
    assert kept.holdings.labels.sum(1).tolist() == (kept.holdings.train + kept.holdings.test).tolist()
    assert kept.facts["data_fingerprint"] == fresh.facts["data_fingerprint"]
    assert kept.facts["layers"] == list(fresh.facts["layers"]) == ["hidden1", "hidden2", "head"]
    assert len(kept.seconds) == 12
    assert all(seconds > 0 for seconds in kept.seconds)


def test_a_round_says_what_it_did_to_the_losses(compared):
    for record in load_runs(compared / "fedlf")[0].rounds:
        before, after = np.array(record["losses"]), np.array(record["losses_after"])
        assert record["fell"] == pytest.approx((after < before).mean())
        assert len(record["coefficients"][0]) == len(before) + len(record["remembered_clients"])
        assert not set(record["remembered_clients"]) & set(record["asked"])


def test_whoever_is_remembered_is_listened_to(compared):
    run, beyond = load_runs(compared / "fedlf")[0], 0
    for number, clients, shares in shares_of(run):
        record = run.rounds[number]
        assert clients == record["asked"] + record["remembered_clients"]
        assert shares.sum() == pytest.approx(1.0)
        beyond += bool(shares[len(record["asked"]) :].any())
    assert beyond > 0
    fedavg = load_runs(compared / "fedavg")[0]
    for number, clients, shares in shares_of(fedavg):
        assert clients == fedavg.rounds[number]["asked"]
        sizes = fedavg.holdings.train[clients]
        np.testing.assert_allclose(shares, sizes / sizes.sum())


# ------------------------------------------------------------------------------------------------------- the run page


def test_the_headline_names_the_worst_the_best_and_fedavg(compared):
    runs, fedavg = load_runs(compared / "fedlf"), load_runs(compared / "fedavg")
    worst, best = at_the_end(runs)
    assert worst == pytest.approx(100 * np.mean([run.accuracies.min() for run in runs]))  # 10% of 12 is one
    text = run_page(runs)
    there = at_the_end(fedavg)[0]
    said = f"The worst client reaches {worst:.0f}%, the best {best:.0f}%; FedAvg's worst reaches {there:.0f}%."
    assert f"<p class='lead'>{said.replace(chr(39), '&#x27;')} On average 12 clients get" in text
    assert "FedAvg" not in headline(runs, None)
    assert "FedAvg's worst" not in run_page(fedavg)


def test_only_a_fedavg_run_of_the_same_setting_is_a_baseline(tmp_path):
    simulate(method="fedavg", **{**SMALL, "rounds": 4}, out=tmp_path / "fedavg")
    runs = simulate(method="qffl", **{**SMALL, "rounds": 8}, out=tmp_path / "qffl")
    assert "FedAvg" not in run_page(runs)
    simulate(method="fedavg", **{**SMALL, "rounds": 8}, out=tmp_path / "again-fedavg")
    assert "FedAvg&#x27;s worst" in run_page(runs)


def test_the_pages_of_a_comparison_know_fedavg_wherever_it_stands(tmp_path):
    compare("even", "fedavg", **{**SMALL, "rounds": 4}, seeds=1, out=tmp_path / "here")
    assert "FedAvg&#x27;s worst" in (tmp_path / "here" / "even" / "report.html").read_text()


def test_the_page_says_where_a_run_was_made_and_not_where_it_is_read(compared, tmp_path):
    import shutil

    moved = shutil.copytree(compared / "fedlf", tmp_path / "moved")
    versions = json.loads((moved / "versions.json").read_text())
    (moved / "versions.json").write_text(json.dumps(versions | {"torch": "0.0.1"}))
    assert "torch 0.0.1" in run_page(load_runs(moved))
    assert "torch 0.0.1" in load_runs(moved)[0].report(tmp_path / "one.html").read_text()
    (moved / "versions.json").unlink()
    assert "<dt>versions</dt><dd>not recorded</dd>" in run_page(load_runs(moved))


def test_the_page_of_a_run_has_every_panel(compared):
    text = (compared / "fedlf" / "report.html").read_text()
    checked(text)
    assert [name for name in RUN_FIGURES if name not in NAMES] == [
        name for name in RUN_FIGURES if f'<section id="{name}">' in text
    ]
    cloud = section(text, "clients")
    assert cloud.count('class="mark"') - cloud.count("<button") == 24  # clients of two seeds
    assert cloud.count("data-client=") == 12  # the other charts show the first seed
    run = load_runs(compared / "fedlf")[0]
    assert f"{100 * run.accuracies[3]:.1f}% right, loss {run.losses[3]:.3f}" in cloud
    assert make_up(run.holdings.labels[3], run.holdings.classes) in cloud
    for said in (run.facts["data_fingerprint"], "hidden2", "What the measures mean", "rounds asked", "angle"):
        assert said in text
    assert shlex.split(re.search("<code>(.*?)</code>", text)[1])[:3] == ["evenhand", "run", "fedlf"]


def test_a_page_is_reached_by_keys_and_read_aloud(compared):
    for page in (compared / "report.html", compared / "fedlf" / "report.html"):
        text = page.read_text()
        charts = re.findall(r'<svg viewBox="0 0 560[^>]*>', text)
        assert len(charts) > 5
        assert all('tabindex="0"' in chart and 'role="img"' in chart and "aria-label=" in chart for chart in charts)
        assert '<html lang="en">' in text
        assert "@media print" in text
        assert "prefers-color-scheme: dark" in text


def test_names_from_the_data_are_text_wherever_they_stand(tmp_path):
    data, evil = tmp_path / "own.csv", "</title><script>alert(1)</script><b onload=x>&'"
    rng = np.random.default_rng(0)
    quoted = '"' + evil + '{}"'
    rows = [f"{quoted.format(i % 3)},{rng.normal():.3f},{quoted.format(i % 2)}" for i in range(90)]
    data.write_text("site,x,y\n" + "\n".join(rows) + "\n")
    settings = {"data_options.client_column": "site", "data_options.target": "y"}
    runs = simulate(data=data, rounds=3, model="logistic", **settings)
    text = run_page(runs)
    checked(text)
    assert evil not in text
    assert "&lt;script&gt;alert(1)" in section(text, "partition")  # classes and clients
    for name, figure in figures_of(runs).items():
        path = runs.figure(name, tmp_path / f"{name}.svg")
        ElementTree.parse(path)
        assert evil not in figure.drawing


def test_the_page_of_many_clients_is_small():
    rng = np.random.default_rng(0)
    runs = simulate(method="fedavg", **{**SMALL, "rounds": 4}, seeds=1)
    (run,) = runs
    many = 3000
    run.names = tuple(f"hospital number {place}" for place in range(many))
    run.test_samples = np.full(many, 9)
    for entry in run.evaluations:
        entry["accuracies"], entry["losses"] = rng.random(many), rng.random(many)
    labels = rng.integers(0, 50, (many, 10))
    kind = type(run.holdings)
    sizes = labels.sum(1)
    run.holdings = kind(tuple("0123456789"), sizes, 0 * sizes, sizes // 5, labels)
    run.rounds = [
        {**run.rounds[0], "asked": rng.choice(many, 2, replace=False).tolist(), "round": number}
        for number in range(900)
    ]
    text = run_page(runs)
    checked(text)
    assert len(text.encode()) < 3_000_000
    assert section(text, "clients").count("data-client=") == many
    assert section(text, "listened").count("<rect") <= 60
    assert section(text, "partition").count("<rect") <= 120


def test_few_clients_get_a_bar_each():
    runs = simulate(method="fedavg", **{**SMALL, "clients": 3, "rounds": 2}, seeds=2)
    text = run_page(runs)
    checked(text)
    assert section(text, "distribution").count('<rect class="bar"') == 3
    assert "The worst client reaches" in text


def test_a_run_that_measured_little_leaves_panels_out():
    runs = simulate(method="fedavg", **{**SMALL, "rounds": 3}, measure="needed")
    drawn = figures_of(runs)
    assert "losses" not in drawn
    with pytest.raises(
        EvenhandError, match=r"'losses' needs something that was not recorded here \(there are accuracy"
    ):
        runs.figure("losses", "losses.svg")
    checked(run_page(runs))
    for name in ("indfair", "cenfair"):  # nobody's update is weighed
        other = simulate(method=name, data="synthetic-groups", rounds=3)
        assert "listened" not in figures_of(other)
        checked(run_page(other))


def test_a_folder_of_an_older_version_is_still_shown(compared, tmp_path):
    import shutil

    old = tmp_path / "old"
    shutil.copytree(compared / "fedlf", old)
    (old / "facts.json").unlink()
    for place in old.glob("seed-*"):
        (place / "holdings.csv").unlink()
        lines = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
        for entry in lines:
            del entry["losses_after"], entry["remembered_clients"]
        (place / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    text = run_page(load_runs(old))
    checked(text)
    assert "not recorded" in text
    assert '<section id="partition">' not in text


# ------------------------------------------------------------------------------------------------ the comparison page


def test_the_page_of_a_comparison_has_every_panel(compared):
    text = (compared / "report.html").read_text()
    checked(text)
    assert [name for name in COMPARISON_FIGURES if name not in PEOPLE] == [
        name for name in COMPARISON_FIGURES if f'<section id="{name}">' in text
    ]
    found = load_comparison(compared)
    served = {label: at_the_end(runs)[0] for label, runs in found.runs.items()}
    best = max(served, key=served.get)
    assert f"With {best} the worst client reaches {served[best]:.0f}%" in text
    assert "On the Pareto front of mean accuracy and evenness: " in text
    assert section(text, "accuracy").count('class="band') == 3
    for label in found.labels:
        assert f"{label}</button>" in text
        assert f">{label}</text>" in section(text, "distribution")
    assert "evenhand compare fedavg fedlf qffl:q=2" in text


def test_people_have_panels_of_their_own(people):
    text = (people / "mfairfl" / "report.html").read_text()
    checked(text)
    assert all(f'<section id="{name}">' in text for name in NAMES)
    assert "multipliers" not in figures_of(load_runs(people / "fedavg"))
    both = (people / "report.html").read_text()
    checked(both)
    assert all(f'<section id="{name}">' in both for name in PEOPLE)
    assert "On the Pareto front of accuracy and demographic parity" in both
    assert "Groups are treated most alike with " in both


def test_a_method_that_diverged_is_named_and_repeated(tmp_path):
    found = compare("fedavg", "fedadam:eta=1e30", **SMALL, seeds=2, out=tmp_path / "here")
    text = comparison_page(found)
    checked(text)
    assert "diverged in round 2" in text
    assert "evenhand compare fedavg fedadam:eta=1e30" in text
    assert "fedadam" in load_comparison(tmp_path / "here").description()


def test_runs_of_several_folders_are_set_beside_each_other(compared, tmp_path, command):
    found = side_by_side([compared / "fedavg", compared / "fedlf"])
    assert found.labels == ("fedavg", "fedlf")
    whole = load_comparison(compared)
    assert found.cells["fedlf"][0].first == whole.cells["fedlf"][0].first
    code, said, _ = command("report", compared / "fedavg", compared / "fedlf")
    assert (code, said) == (0, "report.html\n")
    checked(Path("report.html").read_text())
    assert side_by_side([compared, compared / "fedlf"]).labels[-1].startswith("fedlf (")
    simulate(method="even", **{**SMALL, "clients": 9}, out=tmp_path / "other")
    code, _, complained = command("report", compared / "fedavg", tmp_path / "other")
    assert code == 2
    assert "even cannot be set beside fedavg: they differ in clients, seeds, not in the method alone" in complained


def test_the_front_holds_what_nothing_beats():
    points = [Point("a", 1, 5), Point("b", 2, 9), Point("c", 2, 8), Point("d", 3, 9), Point("e", 0.5, 5)]
    assert [point.name for point in pareto_front(points)] == ["b", "e"]
    assert [point.name for point in pareto_front([Point("a", 1, 5), Point("b", 1, 5)])] == ["a", "b"]


# ----------------------------------------------------------------------------------------------------------- figures


def test_every_figure_is_a_file_of_its_own(compared, people, tmp_path):
    drawn: set[str] = set()
    for folder in (compared / "fedlf", people / "mfairfl"):
        runs = load_runs(folder)
        for name in figures_of(runs):
            drawn.add(name)
            root = ElementTree.parse(runs.figure(name, tmp_path / f"{name}.svg")).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            text = (tmp_path / f"{name}.svg").read_text()
            assert "var(--" not in text
            assert "nan" not in text
    assert drawn == set(RUN_FIGURES)
    drawn = set()
    for folder in (compared, people):
        found = load_comparison(folder)
        for name in figures_of(found):
            drawn.add(name)
            ElementTree.parse(found.figure(name, tmp_path / f"{name}.svg"))
    assert drawn == set(COMPARISON_FIGURES)


def test_figures_as_pdf_and_png(compared, tmp_path):
    pytest.importorskip("vl_convert")
    found = load_comparison(compared)
    pdf = found.figure("distribution", tmp_path / "f.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile" in pdf or b"/ObjStm" in pdf  # its letters travel with it
    png = found.figure("pareto", tmp_path / "f.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == 3 * 560


def test_the_command_lists_draws_and_refuses(compared, command):
    code, said, _ = command("figure", compared)
    assert code == 0
    assert re.search(r"^pareto +Accuracy against fairness$", said, flags=re.MULTILINE)
    assert command("figure", compared, "pareto", "--out", "p.svg")[:2] == (0, "p.svg\n")
    assert command("figure", compared / "fedlf", "clients")[:2] == (0, "clients.svg\n")
    code, _, complained = command("figure", compared, "paretto", "--out", "p.svg")
    assert code == 2
    assert "there is no figure 'paretto'; did you mean 'pareto'? (there are distribution, pareto, " in complained
    code, _, complained = command("figure", compared, "pareto", "--out", "p.jpg")
    assert (code, complained) == (2, "error: a figure is written as .svg, .pdf, .png, not as 'p.jpg'\n")
    assert command("figure", "nowhere", "pareto")[2] == "error: there is no folder 'nowhere'\n"
    code, _, complained = command("figure", compared, "pareto", "--out", "no/such/p.svg")
    assert code == 2
    assert "cannot write to 'no/such/p.svg'" in complained


def test_without_the_library_the_way_to_get_it_is_named(compared, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, _, complained = command("figure", compared, "pareto", "--out", "p.pdf")
    assert code == 2
    assert "pip install 'evenhand[figures]' (or write it as .svg)" in complained


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "fedfv:alpha=0.2,tau=3", "lr": 0.05, "seeds": [3, 7], "cohort": 4, "clients": 20},
        {"method": "qffl", "batch_size": None, "split": [0.5, 0.0, 0.5], "partition": "dir:0.1", "seeds": [7]},
        {"data": "synthetic:1,1", "data_options.clients": 40, "momentum": 0.9, "noise": "0.2,0.5", "split": "official"},
        {"method": "fedfv:server=fedadam,eta=0.01", "rounds": 3},
        {"method": "fedavg:weights=uniform,server=recent,rounds=7,objective=proximal,mu=0.1"},
        {"method": "mfairfl:beta=0.5,server=momentum:beta=0.25,eta=0.5,gamma=2"},
        {"model_options.width": 12, "measure": "losses", "participation": 0.4, "data_dir": "/some where"},
    ],
)
def test_the_command_of_a_run_repeats_it(settings, monkeypatch):
    chosen, seen = Experiment().with_settings(settings), []
    monkeypatch.setattr("evenhand.running.simulate", lambda experiment, **_: seen.append(experiment) or 1 / 0)
    words = shlex.split(run_command(chosen))
    CliRunner().invoke(app, [*words[1:], "--out", "nowhere"])
    assert seen == [chosen]


def test_what_a_line_cannot_say_is_in_the_description():
    mixed = method("fedfa", objective="group-constraints:alpha=0.05,gamma=2")  # the rule and the server have these, too
    assert run_command(Experiment(method=mixed)) == "evenhand run --config experiment.toml"
    assert compare_command(Experiment(), {"a": mixed}) == "evenhand compare --config comparison.toml"


# -------------------------------------------------------------------------------------------------- small parts


def test_a_histogram_in_letters_hides_nobody():
    assert blocks([1.0] * 1000 + [0.0]) == "▁        █"
    assert blocks([np.nan, 0.55]) == "     █    "
    assert blocks([]) == " " * 10


def test_a_histogram_counts_everybody():
    values = np.array([0.0, 4.9, 5.0, 99.9, 100.0, np.nan])
    shares = histogram(values)
    assert shares.sum() == pytest.approx(100.0)
    assert (shares[0], shares[1], shares[-1]) == pytest.approx((40.0, 20.0, 40.0))


def test_names_are_pushed_apart_within_the_chart():
    places = apart([10.0, 11.0, 98.0, 99.0], 14.0, 100.0)
    assert (np.diff(places) >= 14.0 - 1e-9).all()
    assert max(places) <= 100.0


def test_clients_of_very_different_sizes_are_all_seen():
    sizes = [1, 10, 100, 100_000]
    drawing = cloud_chart(
        [Client(place, size, 50.0, 0, "") for place, size in enumerate(sizes)], x_title="samples", y_title="%"
    )
    places = [float(at) for at in re.findall(r'cx="([0-9.]+)"', drawing)]
    assert all(np.diff(places) > 30)
    assert Axis(0, 10, 0, 100).ticks() == [0, 2, 4, 6, 8, 10]


def channels(colour: str) -> np.ndarray:
    value = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """OKLab, in which equal distances look about equal."""
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    axes = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.cbrt(np.clip(light, 0, 1) @ cones.T) @ axes.T


SIGHTS = {  # Machado, Oliveira and Fernandes 2009, severity 1
    "normal": "1 0 0 0 1 0 0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
}


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_the_colours_are_told_apart_by_everybody(colours, sight):
    series = np.array([channels(colours[f"c{number}"]) for number in range(SERIES)])
    seen = lab(series @ np.array(SIGHTS[sight].split(), dtype=float).reshape(3, 3).T)
    apart = [math.dist(seen[a], seen[b]) for a in range(SERIES) for b in range(a)]
    assert min(apart) > 0.13  # Okabe and Ito's seven reach 0.076


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_the_colours_stand_out_from_the_paper(colours):
    def contrast(name: str) -> float:
        bright = [float(channels(colours[entry]) @ [0.2126, 0.7152, 0.0722]) for entry in (name, "paper")]
        return (max(bright) + 0.05) / (min(bright) + 0.05)

    assert all(contrast(f"c{number}") >= 3.0 for number in range(SERIES))
    assert all(contrast(name) >= 4.5 for name in ("ink", "soft", *(f"t{number}" for number in range(SERIES))))


DOCUMENT = Path(__file__).parents[1] / "docs" / "report.md"


def test_the_commands_in_the_document_work(command):
    pytest.importorskip("vl_convert")
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("evenhand ")]
    assert len(lines) == 7
    for line in lines:
        code, _, complained = command(*shlex.split(line, comments=True)[1:])
        assert code == 0, f"{line}\n{complained}"


def test_the_document_names_every_figure():
    text = DOCUMENT.read_text()
    for name in RUN_FIGURES:
        assert f"`{name}`" in text or name in NAMES
