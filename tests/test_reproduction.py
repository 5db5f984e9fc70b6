"""Papers' tables: every recipe that ships is sound, and one that is run says honestly what it found."""

from __future__ import annotations

import csv
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from alive import alive, gone

import evenhand as eh
from evenhand import cli, recipe, reproduction, reruns
from evenhand.checks import EvenhandError
from evenhand.experiment import Experiment
from evenhand.figures import _bins
from evenhand.recipe import FOLDER, find_recipe, read_recipe
from evenhand.reproduction import FAILS, HOLDS, UNTOLD, Result, reproduce

ROOT = Path(__file__).resolve().parents[1]
OUR_PARTS = ("CIFAR-10 with label noise",)  # in which the paper has no numbers

TINY = """
title = "Digits, tiny"
paper = "A paper (2000), Table 1"
citation = "Somebody: Something. 2000."
plus_minus = "Over two seeds."

[experiment]
data = "digits"
partition = "pat:2"
clients = 10
model = "logistic"
rounds = 3
seeds = [0, 1]
work = { lr = 0.1 }
sampling = { participation = 0.5 }

[choose]
says = "The highest mean under another seed."
by = "mean - std"
seeds = [1000]

[[columns]]
title = "Ave."
measure = "mean"
scale = 100
higher = true

[[columns]]
title = "Spread"
measure = "std_pp"
higher = false

[[quirks]]
name = "double_softmax"
says = "softmax twice"
settings = { "model_options.double_softmax" = true }

[[quirks]]
name = "root"
says = "a root too many"
measures = { Spread = "sqrt(std_pp)" }

[[rows]]
name = "FedAvg"
method = "fedavg"
numbers = [50.0, 20.0]
spread = [1.0, 0.5]

[[rows]]
name = "q-FFL"
method = "qffl"
grid = { lr = [0.05, 0.1], "method.q" = [0.1, 1] }
numbers = [51.0, "none"]
spread = [1.0, "none"]

[[rows]]
name = "Mystery"
unavailable = "nobody has published it"
numbers = [99.0, 1.0]

[[claims]]
says = "q-FFL is better"
column = "Ave."
rows = ["q-FFL"]
than = ["FedAvg"]
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def changed(tiny: Path, old: str, new: str) -> Path:
    text = tiny.read_text()
    assert old in text
    tiny.write_text(text.replace(old, new, 1))
    return tiny


def lines_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "results.csv").read_text().splitlines()))


# ------------------------------------------------------------------------------------------------ what ships


def written(name: str) -> recipe.Recipe:
    """What a recipe's file says; that its runs can be run takes longest, and is tried once."""
    return read_recipe(FOLDER / f"{name}.toml", name, runs=False)


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_is_sound(name):
    found = find_recipe(name)  # checks methods, settings, data, partitions, models and the number of numbers
    assert found.title
    assert found.citation
    assert found.claims or found.figure
    assert not any(row.numbers for row in found.rows if row.added)
    for row in found.rows:
        if not row.added and found.figure is None:
            assert set(row.numbers) == {part.name for part in found.parts}
        for part, values in row.numbers.items():
            assert len(values) == len(found.columns)
            assert any(value is not None for value in values) or part in OUR_PARTS
            if row.spread:
                assert all(value is None or value >= 0 for value in row.spread[part])
    for part in found.parts:
        for place, column in enumerate(found.columns):  # accuracies are accuracies in the paper's unit
            printed = [row.numbers[part.name][place] for row in found.rows if row.numbers]
            if column.measure.startswith(("mean", "worst", "best", "client", "pooled_accuracy")):
                assert all(value is None or 0 <= value <= column.scale for value in printed)


@pytest.mark.parametrize("name", recipe.names())
def test_the_stated_number_of_runs_is_right(name):
    found = written(name)
    variants = (True, False) if found.quirky else (False,)
    whole = reproduction.Reproduction(found, found.experiment.seeds, None, found.rows, variants, {})
    trials = {task.digest for task in reproduction._tasks(whole, {}, "trial") if len(task.row.tries()) > 1}
    final = {(t.part.name, t.row.name, t.quirks): t.digest for t in reproduction._tasks(whole, {}, "final")}
    seeds = 0 if found.choose is None else len(found.choose.seeds)
    runs = len(trials) * seeds + len(set(final.values())) * len(found.experiment.seeds)
    assert found.takes.startswith(f"{runs:,} runs of ") if runs else found.takes == "nothing to run"


def test_the_papers_tables_and_figures_are_there():
    wanted = {"fedfv/fig2", "fedlf/fig2", "fedlf/fig3", "fedlf/fig4", "adafed/theorems", "fedfa/table2", "fedfa/fig2"}
    wanted |= {f"fedfv/table{n}" for n in (2, 3, 4)} | {f"fedlf/table{n}" for n in range(1, 10)}
    wanted |= {f"adafed/table{n}" for n in (*range(1, 5), *range(7, 20))} | {f"adafed/fig{n}" for n in range(2, 8)}
    wanted |= {f"mfairfl/{n}" for n in ("table1", "table2", "table3", "tableS2", "tableS3", "figS1")}
    wanted |= {f"fedfa/fig{n}" for n in (6, 7, 8, 9)} | {"adafed/table1-setup2", "adafed/table10-setup2"}
    assert wanted <= set(recipe.names())


COMPARING = [name for name in recipe.names() if len({row.method.split(":")[0] for row in written(name).rows}) > 1]


@pytest.mark.parametrize("name", COMPARING)
def test_our_method_stands_in_every_comparison_and_in_no_claim_of_the_paper(name):
    found = written(name)
    if not all(part.unavailable for part in found.parts) or found.paper.startswith("AdaFed"):
        assert any(row.method.startswith("even") and row.added for row in found.rows)
    added = {row.name for row in found.rows if row.added}
    for claim in found.claims:
        if not claim.says.startswith("Asked by us"):
            assert not added & {*claim.rows, *claim.than}


def test_every_method_has_the_learning_rates_of_the_others():
    for name in recipe.names():
        rows = written(name).rows
        grids = {str(row.grid.get("lr")) for row in rows if row.added and row.grid}
        others = {str(row.grid.get("lr")) for row in rows if not row.added and row.grid}
        assert not grids or not others or grids <= others


@pytest.mark.parametrize(
    ("name", "row", "part", "numbers", "spread"),
    [
        ("fedfv/table2", "FedFV α=0.1, τ=10", "", (50.42, 9.70, 32.24, 69.68), (0.55, 0.96, 2.10, 2.84)),  # noqa: RUF001
        ("fedfv/table2", "qFedAvg q=5.0", "", (45.25, 9.59, 26.56, 63.60), (0.42, 0.36, 1.03, 1.13)),
        ("fedfv/table3", "FedFV α=2/3, τ=0", "", (77.91, 81.46, 81.46, 80.28, 1.77), (0.80, 1.99, 1.51, 1.09, 0.87)),  # noqa: RUF001
        ("fedfv/table4", "FedFV Reverse", "FashionMNIST", (22.05,), (0.68,)),
        ("fedlf/table1", "FedLF", "FMNIST Pat-1", (0.894, 0.089, 0.717, 0.996), (0.001, 0.002, 0.008, 0.001)),
        ("fedlf/table2", "FedMDFG", "CIFAR-10 Pat-2", (0.714, 0.153, 0.535, 0.859), (0.001, 0.013, 0.024, 0.013)),
        ("fedlf/table4", "FedFa", "CIFAR-10 Pat-1", (0.357, 0.581, 4.3, 4.4, 4.8, 4.7, 4.5, 4.4), None),
        ("adafed/table1", "AdaFed", "", (46.42, 3.01, 31.12, 69.41), None),
        ("adafed/table10", "AdaFed γ=10", "", (46.00, 2.88, 35.21, 67.35), None),  # noqa: RUF001
        ("fedfa/table2", "FedFa", "Synthetic_1_1", (76.88, 37.03, 100.00, 603.69), None),
        ("mfairfl/tableS2", "mFairFL (DP)", "Bank", (0.853, 0.003, 0.002, 0.004, 0.026), None),
        ("mfairfl/table1", "CenFL (AP)", "Adult", (0.812, 0.014, 0.008, 0.013, None), None),
        ("mfairfl/tableS3", "FairFed", "Bank", (0.804, 0.004, 0.013, 0.007, 0.009, 0.005, 0.009, 0.135), None),
        ("adafed/table1-setup2", "TERM", "", (64.15, 5.90, 56.21, 72.20), None),
        ("adafed/table3", "AdaFed", "FEMNIST-skewed", (92.21, 7.56, 9.44, 0.011), None),
        ("adafed/table8", "DITTO", "", (86.31, 15.14, 56.91, 100.00), None),
        ("adafed/table9", "FEDMGDA+", "", (14.00, 2.71, 9.88, 19.21), None),
        ("adafed/table15", "AdaFed γ=0.01", "", (85.87, 15.54, 56.12, 99.95), None),  # noqa: RUF001
        ("adafed/table16", "AdaFed γ=10", "", (17.05, 2.38, 12.58, 23.67), None),  # noqa: RUF001
        ("adafed/fig5", "AdaFed", "", (None, 400), None),
        ("fedlf/table9", "FedFV", "CIFAR-10 - 100% Online", (24806, 87105), None),
    ],
)
def test_numbers_are_the_papers(name, row, part, numbers, spread):
    found = next(entry for entry in written(name).rows if entry.name == row)
    assert found.numbers[part] == numbers
    assert found.spread.get(part) == spread


def test_fedfvs_quirks_are_turned_on_and_off():
    found = find_recipe("fedfv/table3")
    on, off = (found.described(found.parts[0], found.rows[0], quirks, {}) for quirks in (True, False))
    assert (on.model, on.split, dict(on.model_options)) == ("logistic", (0.8, 0.1, 0.1), {"double_softmax": True})
    assert (off.model, off.split, dict(off.model_options)) == ("mlp", "official", {})


def test_settings_that_must_agree_are_set_together():
    found = find_recipe("fedfa/table2")
    row = next(entry for entry in found.rows if entry.name == "FedFa")
    tried = [found.described(found.parts[0], row, False, one).method.rule for one in row.tries()]
    assert [(rule.alpha, rule.beta) for rule in tried] == [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)]
    momenta = [found.described(part, row, False, {}).method.objective.client_momentum for part in found.parts[:4]]
    assert momenta == [0.9, 0.9, 0.5, 0.5]


@pytest.mark.wheel
def test_the_wheel_holds_the_recipes(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("evenhand-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {f"evenhand/recipes/{name}.toml" for name in recipe.names()} <= set(inside)


# ------------------------------------------------------------------------------------------------ running


def test_a_table_is_run_and_not_run_again(tiny, tmp_path):
    out = tmp_path / "out"
    first = reproduce(tiny, out=out)
    # q-FFL: four trials, with quirks and without; then two rows, two seeds, with quirks and without
    assert (first.ran, first.found) == (8 + 8, 0)
    assert first.scaled_down() == []
    lines = lines_of(out)
    assert len(lines) == 16
    assert {line["stage"] for line in lines} == {"trial", "final"}
    page = (out / "results.md").read_text()
    for said in ("Digits, tiny", "50.00 ± 1.00", "quirks on", "quirks off", "not available: nobody", "softmax twice"):
        assert said in page
    assert "Scaled down" not in page
    again = reproduce(tiny, out=out)
    assert (again.ran, again.found) == (0, 16)
    assert [cell.mean for _, _, cell in again.cells(True)] == [cell.mean for _, _, cell in first.cells(True)]
    assert len(lines_of(out)) == 16
    assert "All 16 runs (a row, a setting and a seed each) were there already. The cells' 8 runs took " in str(again)
    assert ", the 8 trials that chose their settings " in str(again)
    times = {line["stage"]: 0.0 for line in lines}
    for line in lines:
        times[line["stage"]] += float(line["seconds"])
    assert sum(again.results[who].seconds for who in again.trials) == pytest.approx(times["trial"], abs=0.01)
    kept = (out / "results.csv").read_text().splitlines()
    (out / "results.csv").write_text("\n".join(kept[:-2]) + "\n" + kept[-1][:40])  # cut in the middle of a line
    third = reproduce(tiny, out=out)
    assert third.ran == 2
    assert [cell.mean for _, _, cell in third.cells(False)] == [cell.mean for _, _, cell in first.cells(False)]


def test_the_page_of_what_is_there_runs_nothing(tiny, tmp_path):
    out = tmp_path / "out"
    nothing = reproduce(tiny, out=out, stored=True)
    assert (nothing.ran, nothing.found, nothing.missing) == (0, 0, 4)
    assert not (out / "results.csv").exists()
    whole = reproduce(tiny, out=out)
    lines = (out / "results.csv").read_text().splitlines()
    trial = next(line for line in lines if "q-FFL,trial,on" in line)
    last = next(line for line in reversed(lines) if "FedAvg,final,off" in line)
    (out / "results.csv").write_text("\n".join(line for line in lines if line not in (trial, last)) + "\n")
    found = reproduce(tiny, out=out, stored=True)
    assert (found.ran, found.missing) == (0, 2)
    assert len(lines_of(out)) == 14
    page = (out / "results.md").read_text()
    assert "2 of 4 rows, counted in every part, not run yet" in page
    for table in (page, str(found)):
        assert table.count("not run yet") == 3
    assert found.tasks.keys() == {("", "FedAvg", True), ("", "q-FFL", False)}
    there = [cell.mean for _, row, cell in whole.cells(True) if row.name == "FedAvg"]
    assert [cell.mean for _, row, cell in found.cells(True) if row.name == "FedAvg"] == there
    assert [entry.verdict for entry in found.judged(True)] == ["cannot be told"]
    again = reproduce(tiny, out=out)
    assert again.ran == 2
    assert again.missing == 0


def test_several_processes_find_the_same(tiny, tmp_path):
    alone, beside = reproduce(tiny), reproduce(tiny, jobs=2, out=tmp_path)
    assert alone.results.keys() == beside.results.keys()
    for key, result in alone.results.items():
        assert result.measures == pytest.approx(beside.results[key].measures, rel=1e-5)
    assert reproduce(tiny, jobs=2, out=tmp_path).ran == 0
    with pytest.raises(eh.EvenhandError, match="jobs"):
        reproduce(tiny, jobs=0)


def test_the_seeds_of_a_single_row_are_shared_out(tiny, tmp_path):
    bars: dict[str, int] = {}
    found = reproduce(
        tiny,
        only=["FedAvg"],
        quirks="off",
        seeds=[0, 1, 2],
        jobs=2,
        out=tmp_path,
        device="cpu",
        progress=lambda status: bars.update({status.label: status.rounds}),
    )
    assert found.ran == 3
    assert bars == {"3 programs, 2 at a time": 3}


def test_it_is_what_compare_finds(tiny):
    found = reproduce(tiny, only=["FedAvg"], quirks="off")
    settings = {"data": "digits", "partition": "pat:2", "clients": 10, "model": "logistic", "rounds": 3, "lr": 0.1}
    runs = eh.simulate(method="fedavg", **settings, participation=0.5, seeds=2)
    (_, _, mean), (_, _, spread) = found.cells(False)
    assert np.allclose(mean.values, 100 * runs.measured("mean"))
    assert np.allclose(spread.values, runs.measured("std_pp"))


def test_a_quirk_of_the_measure_needs_no_other_run(tiny):
    changed(tiny, 'settings = { "model_options.double_softmax" = true }', "")
    found = reproduce(tiny, only=["FedAvg"])
    assert found.ran == 2
    spreads = [found.cells(quirks)[1][2].values for quirks in (True, False)]
    assert np.allclose(spreads[0], np.sqrt(spreads[1]))


def test_less_than_the_table_is_called_so(tiny):
    found = reproduce(tiny, rounds=2, seeds=1, only=["fed"], quirks="off")
    said = found.scaled_down()
    assert said == ["2 rounds instead of 3", "seeds 0 instead of 0, 1", "1 of 3 rows"]
    for text in (str(found), found.markdown()):
        assert "Scaled down: 2 rounds instead of 3" in text
        assert "no cell gets a verdict" in text
        assert ") ✓" not in text
        assert ") ✗" not in text
    assert "no verdict on the cells" in found.summary()[0]
    assert "Scaled down" not in str(reproduce(tiny, rounds=3, quirks="off"))


def planted(tiny: Path, fedavg: list[float], qffl: list[float]) -> reproduction.Reproduction:
    """The tiny table with these mean accuracies in the place of what was measured."""
    found = reproduce(tiny, quirks="off")
    for row, values in (("FedAvg", fedavg), ("q-FFL", qffl)):
        digest = found.tasks["", row, False].digest
        for seed, value in enumerate(values):
            found.results[digest, seed] = Result({"mean": value, "std_pp": 19.1, "std": 0.191})
    return replace(found, seeds=tuple(range(len(fedavg))))


def test_verdicts_on_planted_numbers(tiny):
    better = planted(tiny, [0.515, 0.517, 0.516, 0.516], [0.571, 0.575, 0.573, 0.573])
    ((_, _, close), (_, _, spread), (_, _, far), (_, _, none)) = better.cells(False)
    assert close.spreads_off == pytest.approx(1.6)
    assert close.within is True
    assert "(+1.6) ✓" in close.ours(True)
    assert spread.spreads_off == pytest.approx(-1.8)
    assert far.spreads_off == pytest.approx(6.3)
    assert far.within is False
    assert "(+6.3) ✗" in far.ours(True)
    assert none.within is None  # the paper has no number there
    assert better.judged(False)[0].verdict == HOLDS
    assert "2 of 3 cells are within 2 spreads" in better.summary()[0]
    worse = planted(tiny, [0.571, 0.575, 0.573, 0.573], [0.515, 0.517, 0.516, 0.516])
    assert worse.judged(False)[0].verdict == FAILS
    alike = planted(tiny, [0.51, 0.53, 0.50, 0.52], [0.53, 0.50, 0.52, 0.51])
    assert alike.judged(False)[0].verdict == UNTOLD
    one = planted(tiny, [0.51], [0.57])
    assert one.judged(False)[0].verdict == UNTOLD
    assert "Mystery" not in one.judged(False)[0].why
    apart = planted(tiny, [0.51, np.nan], [np.nan, 0.57])  # no seed that both got through
    assert (apart.judged(False)[0].verdict, apart.judged(False)[0].why) == (UNTOLD, "q-FFL and FedAvg diverged")


def test_a_claim_about_rows_that_were_not_run_cannot_be_told(tiny):
    (judged,) = reproduce(tiny, only=["FedAvg"], quirks="off").judged(False)
    assert (judged.verdict, judged.why) == (UNTOLD, "not run: q-FFL")


def test_without_a_spread_in_the_paper_our_own_is_the_unit(tiny):
    changed(tiny, "spread = [1.0, 0.5]\n", "")
    found = planted(tiny, [0.50, 0.52], [0.5, 0.5])
    cell = found.cells(False)[0][2]
    assert cell.unit == pytest.approx(100 * np.std([0.50, 0.52], ddof=1))
    assert "own)" in cell.ours(True)


WORKER = """
import os, time
from evenhand.processes import pool_of
if __name__ == "__main__":
    with pool_of(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


def test_workers_do_not_outlive_a_killed_command(tmp_path):
    (tmp_path / "many.py").write_text(WORKER)
    with subprocess.Popen([sys.executable, "many.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        if not alive(worker):
            command.kill()
            pytest.skip("no /proc to look at")
        command.kill()
    assert gone([worker], seconds=10), "the worker goes on"


def test_files_without_the_machine_are_read_and_completed(tiny, tmp_path):
    """Before it was kept; and a page names all machines where there are several."""
    out = tmp_path / "out"
    first = reproduce(tiny, only=["FedAvg"], out=out)
    lines = list(csv.reader((out / "results.csv").read_text().splitlines()))
    place = lines[0].index("machine")
    assert {line[place] for line in lines[1:]} == {first.device}
    with (out / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows([*line[:place], *line[place + 1 :]] for line in lines)
    again = reproduce(tiny, out=out)
    assert again.found > 0
    known = {line["machine"] for line in csv.DictReader((out / "results.csv").read_text().splitlines())}
    assert known == {"", first.device}
    assert "a machine that was not written down (" in str(again)


def test_what_is_too_much_for_a_gpu_is_run_in_halves(tiny, tmp_path, monkeypatch):
    whole = reproduce(tiny, out=tmp_path / "whole", together=20)
    played, most = reruns.played, [0]

    def little_memory(program, *rest):
        if len(program.tasks) * len(program.seeds) > 1 + most[0]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return played(program, *rest)

    monkeypatch.setattr(reruns, "played", little_memory)
    apart = reproduce(tiny, out=tmp_path / "apart", together=20)
    assert str(apart).splitlines()[:12] == str(whole).splitlines()[:12]
    most[0] = -1
    with pytest.raises(EvenhandError, match="too much for the GPU's memory"):
        reproduce(tiny, out=tmp_path / "none")


def test_what_diverges_takes_nobody_with_it(tiny, tmp_path):
    wild = 'name = "Wild"\nmethod = "fedavg"\nsettings = { lr = 1e30, "model" = "mlp" }\nnumbers = [1, 1]\n'
    changed(tiny, "[[claims]]", f"[[rows]]\n{wild}\n[[claims]]")
    found = reproduce(tiny, only=["FedAvg", "Wild"], quirks="off", out=tmp_path / "out")
    assert "diverged under 2 of 2 seeds" in str(found)
    assert np.isfinite(found.cells(False)[0][2].mean)
    assert reproduce(tiny, only=["FedAvg", "Wild"], quirks="off", out=tmp_path / "out").ran == 0


def test_rows_that_differ_in_learning_rates_share_a_program_on_a_gpu(tiny, monkeypatch):
    apart, seen, played = reproduce(tiny, quirks="off"), [], reruns.played

    def watched(program, *rest):
        seen.append([task.experiment.work.lr for task in program.tasks])
        return played(replace(program, experiment=replace(program.experiment, device="cpu")), *rest)

    monkeypatch.setattr(Experiment, "torch_device", lambda chosen: torch.device(chosen.device.replace("auto", "meta")))
    monkeypatch.setattr(reruns, "played", watched)
    together = reproduce(tiny, quirks="off", together=20)
    assert any(len(set(rates)) > 1 for rates in seen)
    assert {who: one.measures for who, one in together.results.items()} == {
        who: pytest.approx(one.measures) for who, one in apart.results.items()
    }


# ------------------------------------------------------------------------------------------------ rows and parts


ADDED = """
[[rows]]
name = "even"
method = "even"
added = "our own method"

[[claims]]
says = "q-FFL is better than all"
column = "Ave."
rows = ["q-FFL"]

[[claims]]
says = "q-FFL is over 40"
column = "Ave."
rows = ["q-FFL"]
bound = 40
"""


def test_a_claim_about_all_others_does_not_mean_our_own_rows(tiny):
    tiny.write_text(tiny.read_text() + ADDED)
    found = planted(tiny, [0.40, 0.41, 0.40, 0.42], [0.45, 0.46, 0.47, 0.45])
    digest = found.tasks["", "even", False].digest
    for seed in range(4):
        found.results[digest, seed] = Result({"mean": 0.9, "std_pp": 1.0, "std": 0.01})
    _, everyone, number = found.judged(False)
    assert (everyone.verdict, everyone.why) == (UNTOLD, "not run: Mystery")
    assert "even" not in everyone.why
    assert number.verdict == HOLDS
    assert "q-FFL against 40: +5.75" in number.why
    low = planted(tiny, [0.40, 0.41, 0.40, 0.42], [0.35, 0.36, 0.37, 0.35])
    assert low.judged(False)[2].verdict == FAILS
    page = found.markdown()
    assert "even is not in the paper: our own method." in page
    assert "| even | ours, quirks off |" in page  # and no line of the paper's
    assert "| even | paper |" not in page


def test_parts_are_run_one_by_one(tiny, tmp_path):
    two = '[[parts]]\nname = "Here"\n\n[[parts]]\nname = "There"\nsettings = { data = "sent140" }\n\n[[rows]]'
    changed(tiny, "[[rows]]", two)
    text = tiny.read_text()
    for numbers in ("[50.0, 20.0]", '[51.0, "none"]', "[99.0, 1.0]", "[1.0, 0.5]", '[1.0, "none"]'):
        text = text.replace(f"= {numbers}", f"= {{ Here = {numbers}, There = {numbers} }}")
    tiny.write_text(text)
    with pytest.raises(eh.EvenhandError, match=r"parts are run one by one with --part: Here, There"):
        reproduce(tiny, only=["FedAvg"], quirks="off", data_dir=tmp_path)
    found = reproduce(tiny, only=["FedAvg"], parts=["her"], quirks="off")
    assert found.scaled_down() == ["1 of 3 rows", "1 of 2 parts"]
    assert "There" not in found.markdown().split("## How")[0]
    assert "There" not in str(found)
    every = reproduce(tiny, only=["FedAvg"], parts=["Here", "There"], quirks="off", stored=True, data_dir=tmp_path)
    assert not [said for said in every.scaled_down() if "parts" in said]
    with pytest.raises(eh.EvenhandError, match="has no part 'Nowhere'"):
        reproduce(tiny, parts=["Nowhere"])


def test_a_quirk_may_hold_in_one_part(tiny):
    found = find_recipe("fedlf/table5")
    ditto = next(row for row in found.rows if row.name == "Ditto")
    steps = [found.described(part, ditto, True, {}).method.server.eta for part in found.parts]
    assert np.allclose(steps, [1 - 0.99**20, 1 - 0.99**50, 1 - 0.99**100], atol=1e-6)
    assert found.described(found.parts[0], ditto, False, {}).method.server.eta == 1.0
    changed(tiny, 'method = "fedavg"', 'method = "fedavg"\nquirks = { Nowhere = { lr = 1 } }')
    with pytest.raises(eh.EvenhandError, match=r"rows\[0\].quirks.Nowhere: is not a part of the table"):
        read_recipe(tiny)


def test_settings_that_came_later_leave_earlier_results_valid():
    """The committed results of FedFV's Table 3 are still those of the recipe, but for the row that has a new quirk."""
    with (ROOT / "docs" / "results" / "fedfv-table3" / "results.csv").open() as file:
        kept = {line["row"]: line["digest"] for line in csv.DictReader(file) if line["quirks"] == "on"}
    found = find_recipe("fedfv/table3")
    whole = reproduction.Reproduction(found, found.experiment.seeds, None, found.rows, (True,), {})
    tasks = {task.row.name: task for task in reproduction._tasks(whole, {}, "final")}
    assert {name for name in kept if tasks[name].digest != kept[name]} <= {"FedFa"}
    afl = next(task for name, task in tasks.items() if name.startswith("AFL"))
    changed = afl.experiment.with_settings({"method.fedlf_code": True})
    assert replace(afl, experiment=changed).digest != afl.digest


# ------------------------------------------------------------------------------------------------ figures


FIGURE = """
[figure]
kind = "curves"
columns = ["Spread"]
points = 3

[[columns]]
title = "Ave."
"""


def test_a_figure_is_drawn_and_not_run_again(tiny, tmp_path):
    changed(tiny, '\n[[columns]]\ntitle = "Ave."\n', FIGURE)
    out = tmp_path / "out"
    first = reproduce(tiny, only=["FedAvg"], out=out)
    assert first.ran == 4
    with (out / "series.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["at"] for line in lines if line["seed"] == "0" and line["quirks"] == "off"] == ["0", "1", "2", "3"]
    column = first.recipe.columns[1]
    at, off = first.curve(first.recipe.parts[0], first.rows[0], column, False)
    _, on = first.curve(first.recipe.parts[0], first.rows[0], column, True)
    assert off.shape == (2, 4)
    runs = eh.simulate(
        data="digits", partition="pat:2", clients=10, model="logistic", rounds=3, lr=0.1, participation=0.5,
        seeds=2, eval_every=1, method="fedavg",
    )  # fmt: skip
    assert np.allclose(off, [run.curves["std_pp"] for run in runs])
    assert np.array_equal(at, [0, 1, 2, 3])
    assert not np.allclose(on, off)
    picture = (out / "figure.svg").read_text()
    assert picture.count('class="band"') == 2
    assert "![Digits, tiny](figure.svg)" in (out / "results.md").read_text()
    again = reproduce(tiny, only=["FedAvg"], out=out)
    assert (again.ran, again.found) == (0, 4)
    assert np.allclose(again.curve(again.recipe.parts[0], again.rows[0], column, False)[1], off)
    (out / "series.csv").unlink()  # a number without its curve is run again
    assert reproduce(tiny, only=["FedAvg"], out=out).ran == 4


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ('kind = "curvs"', "figure.kind: 'curvs' must be one of curves, distribution, points"),
        ('kind = "curves"\ncolumns = ["Averge"]', "figure.columns: the table has no 'Averge'"),
        ('kind = "curves"\npoints = 1', "figure.points: 1 is too few"),
        ('kind = "points"', "figure.x: is missing"),
        ('kind = "points"\nx = "alpha"', "figure.x: 'alpha' is no column, and no row says where it stands"),
        ('kind = "curves"\nwidth = 3', "figure.width: is not a key"),
    ],
)
def test_a_bad_figure_is_refused(tiny, new, said):
    changed(tiny, "[[columns]]", f"[figure]\n{new}\n\n[[columns]]")
    with pytest.raises(eh.EvenhandError) as refused:
        read_recipe(tiny)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("figure", "charts", "inside"),
    [
        ('kind = "distribution"', 1, "accuracy, %"),
        ('kind = "points"\nx = "Spread"', 1, "Ave. against Spread"),
        ('kind = "points"\nx = "share"', 2, "share"),
        ('kind = "curves"\nlines = "columns"', 2, "Ave., Spread over rounds"),
    ],
)
def test_every_kind_of_figure(tiny, tmp_path, figure, charts, inside):
    changed(tiny, "[[columns]]", f"[figure]\n{figure}\n\n[[columns]]")
    changed(tiny, 'name = "FedAvg"', 'name = "FedAvg"\nat = 0.5')
    changed(tiny, 'name = "q-FFL"', 'name = "q-FFL"\nat = 0.75')
    reproduce(tiny, quirks="off", out=tmp_path)
    picture = (tmp_path / "figure.svg").read_text()
    assert picture.count("<svg ") == 1 + charts
    assert inside in picture


@pytest.mark.parametrize(
    ("least", "first", "width"),
    [(0.0, 0.0, 5.0), (0.031, 0.0, 5.0), (0.5, 45.0, 5.0), (0.56, 50.0, 2.5), (1.0, 95.0, 2.5)],
)
def test_a_distribution_begins_below_the_lowest_accuracy(least, first, width):
    edges = _bins([np.array([1.0, np.nan]), np.array([least, 1.0])])
    assert (edges[0], edges[-1]) == (first, 100.0)
    assert np.diff(edges) == pytest.approx(width)
    assert _bins([]).tolist() == list(range(0, 101, 5))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "Digits, tiny"', "", "title: is missing"),
        ('title = "Digits, tiny"', "titel = 1", "title: is missing"),
        ("plus_minus", "plusminus", "plusminus: is not a key that is known here; did you mean 'plus_minus'?"),
        ('data = "digits"', 'data = "digitz"', "experiment: "),
        ('partition = "pat:2"', 'partition = "pet:2"', "unknown partition 'pet'"),
        ('model = "logistic"', 'model = "logistics"', "unknown model 'logistics'"),
        ('measure = "mean"', 'measure = "meen"', "columns[0].measure: unknown measure 'meen'"),
        ('method = "fedavg"', 'method = "fedagv"', "rows[0] (FedAvg): unknown method 'fedagv'"),
        ('"method.q"', '"method.p"', "rows[1] (q-FFL): qffl has no setting 'p'"),
        ("numbers = [50.0, 20.0]", "numbers = [50.0]", "rows[0].numbers: must be a list of 2 numbers"),
        ("numbers = [50.0, 20.0]", 'numbers = [50.0, "x"]', "rows[0].numbers: 'x' is not a number"),
        ('name = "q-FFL"', 'name = "FedAvg"', "rows: 'FedAvg' is there twice"),
        ('column = "Ave."', 'column = "Avg."', "claims[0].column: the table has no 'Avg.'"),
        ('than = ["FedAvg"]', 'than = ["FedAgv"]', "claims[0].than: the table has no 'FedAgv'"),
        ('by = "mean - std"', 'by = "mean - sdt"', "choose.by: unknown measure 'sdt'"),
        ('measures = { Spread = "sqrt', 'measures = { Var = "sqrt', "quirks[1].measures.Var: is not the title"),
        ("higher = true", 'higher = "yes"', "columns[0].higher: is 'yes'; it must be true or false"),
    ],
)
def test_a_bad_recipe_is_refused_by_file_and_key(tiny, old, new, said):
    text = tiny.read_text()
    assert old in text
    tiny.write_text(text.replace(old, new, 1))
    with pytest.raises(eh.EvenhandError) as refused:
        read_recipe(tiny)
    assert str(tiny) in str(refused.value)
    assert said in str(refused.value)


def test_unknown_names_are_refused(tiny):
    with pytest.raises(eh.EvenhandError, match="no recipe 'fedfv/table22'; did you mean 'fedfv/table2'"):
        find_recipe("fedfv/table22")
    with pytest.raises(eh.EvenhandError, match="has no row 'Fedx'"):
        reproduce(tiny, only=["Fedx"])
    with pytest.raises(eh.EvenhandError, match="quirks='maybe'"):
        reproduce(tiny, quirks="maybe")


def test_another_tables_folder_is_not_mixed_in(tiny, tmp_path):
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(eh.EvenhandError, match="written for another table"):
        reproduce(tiny, out=tmp_path)


# ------------------------------------------------------------------------------------------------ the command line


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_the_commands(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert all(name in out for name in recipe.names())
    code, out, _ = run(
        capsys, "reproduce", str(tiny), "--rounds", "1", "--seeds", "1", "--only", "FedAvg", "--no-quirks"
    )
    assert code == 0
    assert "Scaled down: 1 round instead of 3" in out
    assert (tmp_path / out.split("page")[-1].split()[0]).is_file()
    code, _, err = run(capsys, "reproduce", str(tiny), "--quirks", "--both")
    assert code == 2
    assert "exclude each other" in err


def test_python_has_both():
    assert {entry.name for entry in eh.recipes()} == set(recipe.names())
    assert eh.reproduce is reproduce
    assert "fedfv/table2" in repr(eh.recipes())
    assert (FOLDER / "fedfv" / "table2.toml").is_file()


def test_a_part_is_picked_by_its_name_its_first_words_or_its_beginning():
    from evenhand.reproduction import _picked

    recipe = find_recipe("adafed/fig3")
    ten, hundred = recipe.parts
    for wanted, expected in [
        ("CIFAR-10", [ten]),
        ("cifar-10, set", [ten]),
        ("CIFAR-100", [hundred]),
        ("CIFAR-100, set-up 1", [hundred]),
        ("CIFAR", [ten, hundred]),
        ("CIF", [ten, hundred]),
    ]:
        assert _picked(recipe, "part", recipe.parts, [wanted]) == expected, wanted
