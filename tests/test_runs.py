"""Runs on disk: what a folder holds, what survives a sudden end, and what a comparison says."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import checked

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.comparison import Comparison, compare, load_comparison, resume_comparison
from evenhand.experiment import Experiment, load_toml
from evenhand.fairness import MEASURES
from evenhand.folders import CURRENT, PREVIOUS, RunFolder, file_name, new_folder
from evenhand.methods import method
from evenhand.recording import Diverged, Interrupted
from evenhand.running import load_runs, resume, simulate
from evenhand.toml import read_value, to_toml

SMALL = {"clients": 12, "rounds": 12, "eval_every": 4, "batch_size": 16, "seeds": 2}
DATED = ("versions.json", "timing.jsonl", "report.html")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that must not depend on when and how often the run was interrupted."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if Path(name).name not in DATED}


def stop_at(round: int, number: int = signal.SIGINT):
    def progress(status):
        if status.round == round:
            os.kill(os.getpid(), number)

    return progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbed, of a method that remembers absent clients' updates."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    simulate(method="fedlf", **SMALL, out=folder)
    return folder


# --------------------------------------------------------------------------------------------------------- the folder


def test_a_run_folder_holds_everything_about_the_run(whole):
    names = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    each = {"rounds.jsonl", "timing.jsonl", "clients.csv", "holdings.csv", "model.safetensors"}
    above = {"experiment.toml", "versions.json", "facts.json", "partition.txt", "summary.json", "report.html"}
    assert names == above | {f"seed-{seed}/{name}" for seed in (0, 1) for name in each}
    rounds = [json.loads(line) for line in (whole / "seed-1/rounds.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in rounds] == list(range(12))
    assert "seconds" not in rounds[0]
    rows = list(csv.DictReader((whole / "seed-0/clients.csv").read_text().splitlines()))
    assert len(rows) == 12 * 4  # clients x evaluations
    assert {int(row["round"]) for row in rows} == {0, 4, 8, 12}
    versions = json.loads((whole / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert "seed 1" in (whole / "partition.txt").read_text()


def test_the_description_repeats_the_run(whole, tmp_path):
    simulate(load_toml(whole / "experiment.toml"), out=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(whole)


def test_a_run_read_back_says_the_same(whole):
    fresh, kept = simulate(method="fedlf", **SMALL), load_runs(whole)
    assert kept.summary() == fresh.summary()
    for one, other in zip(fresh, kept, strict=True):
        np.testing.assert_array_equal(one.accuracies, other.accuracies)
        assert one.rounds == other.rounds
        assert one.fairness == other.fairness
        for name, tensor in one.load_model().items():
            assert torch.equal(tensor, other.load_model()[name])


def test_the_summary_holds_every_measure_of_every_seed(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert set(summary["seeds"]) == {"0", "1"}
    for name in MEASURES:
        values = [summary["seeds"][seed][name] for seed in ("0", "1")]
        assert summary["mean"][name] == pytest.approx(np.mean(values))
        assert summary["std"][name] == pytest.approx(np.std(values, ddof=1))


def test_several_seeds_speak_together(whole):
    runs = load_runs(whole)
    assert runs.fairness.mean == pytest.approx(np.mean([run.fairness.mean for run in runs]))
    assert runs.fairness.losses.worst == pytest.approx(np.mean([run.fairness.losses.worst for run in runs]))
    assert "12 clients: on average" in str(runs)
    pandas = pytest.importorskip("pandas")
    assert list(runs.history["round"]) == [0, 4, 8, 12] * 2
    last = runs.clients[(runs.clients["round"] == 12) & (runs.clients["seed"] == 1)]
    np.testing.assert_array_equal(last["accuracy"], runs[1].accuracies)
    assert isinstance(runs[0].history, pandas.DataFrame)


def test_without_pandas_a_table_says_how_to_get_it(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    runs = load_runs(whole)
    assert runs.fairness.clients == 12
    for wanted in ("history", "clients"):
        with pytest.raises(EvenhandError, match="pip install"):
            getattr(runs, wanted)


def test_a_finished_run_is_not_overwritten_unless_asked(tmp_path):
    folder = tmp_path / "run"
    simulate(method="fedavg", **{**SMALL, "rounds": 2}, out=folder)
    before = contents(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(EvenhandError, match=r"finished run.*--force"):
        simulate(method="even", **SMALL, out=folder)
    with pytest.raises(EvenhandError, match="unknown data set"):
        simulate(data="digist", out=folder, force=True)
    assert contents(folder) == {**before, "notes.txt": b"mine"}  # a mistake costs nothing
    simulate(method="even", **{**SMALL, "rounds": 3, "seeds": [5]}, out=folder, force=True)
    assert load_toml(folder / "experiment.toml").seeds == (5,)
    assert not (folder / "seed-0").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(EvenhandError, match="holds other files"):
        simulate(**SMALL, out=tmp_path, force=True)
    with pytest.raises(EvenhandError, match="is a file"):
        simulate(**SMALL, out=tmp_path / "thesis.tex")
    (tmp_path / "download").mkdir()
    (tmp_path / "download" / "film.part").write_text("half of it")
    with pytest.raises(EvenhandError, match="holds other files"):
        simulate(**SMALL, out=tmp_path / "download", force=True)
    with pytest.raises(EvenhandError, match=r"no experiment\.toml"):
        resume(tmp_path)
    with pytest.raises(EvenhandError, match="there is no folder"):
        load_runs(tmp_path / "nothing")


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    with pytest.raises(EvenhandError, match="unknown data set"):
        simulate(data="digist", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_new_folders_are_numbered(tmp_path):
    names = [new_folder("synthetic:1,1-even", tmp_path).name for _ in range(3)]
    assert names == ["synthetic-1,1-even-1", "synthetic-1,1-even-2", "synthetic-1,1-even-3"]
    assert file_name("../..") == "run"


def test_two_programs_cannot_write_into_one_folder(tmp_path):
    pytest.importorskip("fcntl")
    said = []

    def meddle(status):
        with pytest.raises(EvenhandError, match="another process") as error:
            resume(tmp_path / "run")
        said.append(str(error.value))

    simulate(method="fedavg", **{**SMALL, "rounds": 1}, out=tmp_path / "run", progress=meddle)
    assert said


# ------------------------------------------------------------------------------------------------------- sudden ends

KILLER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from evenhand.experiment import Experiment
from evenhand.running import resume, simulate
from evenhand.folders import RunFolder

folder, settings, patience = RunFolder(sys.argv[1]), eval(sys.argv[2]), random.Random(int(sys.argv[3]))
kills = 0
while not folder.finished:
    child = os.fork()
    if child == 0:
        if folder.started:
            resume(folder.path, checkpoint_every=0.0)
        else:
            simulate(**settings, out=folder.path, checkpoint_every=0.0)
        os._exit(0)
    if kills < 12:
        time.sleep(patience.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        kills += 1
    os.waitpid(child, 0)
print(kills)
"""


@pytest.mark.parametrize("name", ["fedlf", "fedfa"])
def test_a_run_killed_at_any_moment_goes_on_to_the_same_files(name, tmp_path):
    settings = {**SMALL, "method": name, "rounds": 25}
    simulate(**settings, out=tmp_path / "whole")
    command = [sys.executable, "-c", KILLER, str(tmp_path / "killed"), repr(settings), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


class Killed(BaseException):
    """Stands for a sudden end: nothing may tidy up after it."""


@contextmanager
def killed_at(count: int, target, name: str):
    """The program ends at the so-many-th call of a function that touches the disk."""
    real, calls = getattr(target, name), []

    def touch(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == count:
            if name == "write_bytes":
                Path(f"{path}abc.part").write_bytes(b"half")
            raise Killed
        return real(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target, name, touch)
        with pytest.raises(Killed):
            yield


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_run_killed_while_it_begins_can_be_begun_again(count, whole, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with killed_at(count, storage, "write_bytes"):
        simulate(method="fedlf", **SMALL, out=folder.path)
    if folder.started:
        resume(folder.path)
    else:
        simulate(method="fedlf", **SMALL, out=folder.path)
    assert contents(folder.path) == contents(whole)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9, 12])
def test_a_run_killed_while_it_replaces_another_can_be_begun_again(count, whole, tmp_path):
    folder = tmp_path / "run"
    simulate(method="fedavg", **{**SMALL, "rounds": 1}, out=folder)
    with killed_at(count, Path, "unlink"):
        simulate(method="fedlf", **SMALL, out=folder, force=True)
    simulate(method="fedlf", **SMALL, out=folder, force=True)
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize(("name", "count"), [("write_bytes", 1), ("write_bytes", 2), ("write_bytes", 3), ("unlink", 6)])
def test_a_comparison_killed_while_it_begins_can_be_begun_again(name, count, tmp_path):
    folder, settings = tmp_path / "comparison", {**SMALL, "rounds": 2}
    compare("fedavg", "fedgini", **settings, out=folder)
    before = contents(folder)
    with killed_at(count, storage if name == "write_bytes" else Path, name):
        compare("fedavg", "fedgini", **settings, out=folder, force=True)
    if name == "write_bytes" and count > 1:
        resume_comparison(folder)
    else:
        compare("fedavg", "fedgini", **settings, out=folder, force=True)
    assert contents(folder) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_loses_nothing(whole, tmp_path, number):
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped after round 6 of 12; nothing is lost") as stopped:
        simulate(method="fedlf", **SMALL, out=folder, progress=stop_at(5, number))
    assert stopped.value.signal_number == number
    assert (folder / CURRENT).is_file()
    partial = load_runs(folder)
    assert len(partial[0].rounds) == 6
    partial.report(tmp_path / "so far.html")
    with pytest.raises(EvenhandError, match="can go on"):
        simulate(method="fedlf", **SMALL, out=folder)
    runs = resume(folder)
    assert "continued after round 6 of 12" in runs.notes
    assert contents(folder) == contents(whole)
    assert len(json.loads((folder / "versions.json").read_text())["resumed"]) == 1
    assert resume(folder).summary() == runs.summary()  # once finished it is read back


def interrupted(folder: Path) -> None:
    with pytest.raises(Interrupted):
        simulate(method="fedlf", **SMALL, out=folder, checkpoint_every=0.0, progress=stop_at(6))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(whole, tmp_path):
    folder = tmp_path / "run"
    interrupted(folder)
    data = (folder / CURRENT).read_bytes()
    (folder / CURRENT).write_bytes(data[: len(data) // 2])
    runs = resume(folder)
    assert any("checkpoint.safetensors" in note and "truncated or corrupt" in note for note in runs.notes)
    assert any("went back to the checkpoint before it, at round 6" in note for note in runs.notes)
    assert contents(folder) == contents(whole)


def test_when_no_checkpoint_can_be_read_all_are_named(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder)
    for name in (CURRENT, PREVIOUS):
        (folder / name).write_bytes(b"nonsense")
    with pytest.raises(EvenhandError, match=r"checkpoint\.safetensors.*checkpoint\.previous\.safetensors.*--force"):
        resume(folder)


def test_half_a_line_in_a_log_is_cut_off(whole, tmp_path):
    folder = tmp_path / "run"
    interrupted(folder)
    for name in ("rounds.jsonl", "timing.jsonl", "clients.csv"):
        with (folder / "seed-1" / name).open("ab") as file:
            file.write(b'{"round": 99, "as')
    resume(folder)
    assert contents(folder) == contents(whole)


def test_a_lost_log_is_noticed(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder)
    (folder / "seed-1" / "rounds.jsonl").unlink()
    with pytest.raises(EvenhandError, match="lacks part of the log"):
        resume(folder)


def test_a_full_disk_stops_the_run_and_loses_nothing(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    real, calls = storage.write, []

    def full(*args):
        calls.append(args)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(storage, "write", full)
    with pytest.raises(EvenhandError, match=f"cannot write to '{folder}': No space left.*--resume {folder}"):
        simulate(method="fedlf", **SMALL, out=folder, checkpoint_every=0.0)
    monkeypatch.undo()
    runs = resume(folder)
    assert "continued after round 4 of 12" in runs.notes
    assert contents(folder) == contents(whole)


def test_a_disk_that_is_full_at_the_end_loses_nothing(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    real = storage.write_bytes

    def full(path, data):
        if Path(path).name == "summary.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(storage, "write_bytes", full)
    with pytest.raises(EvenhandError, match="No space left"):
        simulate(method="fedlf", **SMALL, out=folder)
    monkeypatch.undo()
    resume(folder)
    assert contents(folder) == contents(whole)


def test_a_folder_that_cannot_be_written_to_is_named():
    with pytest.raises(EvenhandError, match="cannot write to '/proc/evenhand'"):
        simulate(**SMALL, out="/proc/evenhand")


def test_resuming_notes_another_version(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder)
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps({**versions, "torch": "2.0.0"}))
    assert any("torch was 2.0.0 at the start" in note for note in resume(folder).notes)


# ------------------------------------------------------------------------------------------------------- descriptions


def test_what_is_none_stays_none_in_the_file(tmp_path):
    chosen = Experiment().with_settings(
        {"batch_size": 0, "clip": None, "clients": None, "split": "official", "method": "fedfv:alpha=0.2"}
    )
    assert chosen.work.batch_size is None
    (tmp_path / "experiment.toml").write_text(chosen.to_toml())
    assert load_toml(tmp_path / "experiment.toml") == chosen


@pytest.mark.parametrize(
    "value", ['quote " and \\ and\nline', "ünïcödé \x7f 😀", 1e-05, 1e22, float("inf"), -3, True, None, [1, "a", 0.5]]
)
def test_every_plain_value_survives_toml(value, tmp_path):
    path = tmp_path / "values.toml"
    nested = {"a": value, "table": {"ä key": value, "inner": {"b": value}}}
    path.write_text(to_toml(nested), encoding="utf-8")
    from evenhand.toml import read_toml

    assert read_toml(path) == nested


def test_values_are_read_as_people_write_them():
    written = {"0.2": 0.2, "3": 3, "none": None, "True": True, "last:5": "last:5", "[0.6, 0, 0.4]": [0.6, 0, 0.4]}
    assert {text: read_value(text) for text in written} == written


def test_a_person_may_write_a_short_description(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('rounds = 7\nseeds = 3\n[method]\nname = "fedfv"\nalpha = 0.3\n[work]\nbatch_size = 0\n')
    chosen = load_toml(path)
    assert (chosen.rounds, chosen.seeds, chosen.work.batch_size) == (7, (0, 1, 2), None)
    assert chosen.method == method("fedfv:alpha=0.3")
    path.write_text('method = "fedfv:alpha=0.3"\n')
    assert load_toml(path).method == method("fedfv:alpha=0.3")


def test_settings_have_short_names():
    chosen = Experiment().with_settings({"lr": 0.3, "cohort": 4, "method.server": "fedadam:eta=0.5"})
    assert (chosen.work.lr, chosen.sampling.cohort, chosen.method.server.name) == (0.3, 4, "fedadam")
    assert chosen.with_settings({"participation": 0.5}).sampling.cohort is None
    with pytest.raises(EvenhandError, match="give one of them"):
        chosen.with_settings({"participation": 0.5, "cohort": 3})


def test_clients_without_test_data_are_refused_if_they_are_all():
    with pytest.raises(EvenhandError, match="no client has test data"):
        simulate(**{**SMALL, "split": [1.0, 0.0, 0.0]})


def test_clients_without_test_data_do_not_count_as_measured(tmp_path):
    rows = [f"{site},{row % 7},{row % 2}" for site, count in (("a", 40), ("b", 40), ("c", 1)) for row in range(count)]
    (tmp_path / "own.csv").write_text("\n".join(["site,x,y", *rows]) + "\n")
    settings = {"data": tmp_path / "own.csv", "data_options.client_column": "site", "model": "logistic"}
    found = compare("fedavg", "even", **settings, participation=1.0, rounds=1, seeds=1)
    assert len(found.runs["even"][0].names) == 3
    assert found.clients == 2
    assert found.words()[0].startswith("2 clients")


def test_natural_clients_are_taken_where_the_data_has_them():
    (run,) = simulate(data="synthetic:1,1", model="logistic", rounds=1, **{"data_options.clients": 7})
    assert run.partition.spec == "natural"
    assert len(run.accuracies) == 7


def test_a_run_that_diverges_says_so():
    with pytest.raises(
        Diverged, match=r"fedavg diverged in round 1: .*NaN.*a smaller learning .*\(--lr, now 1e\+30\)$"
    ):
        simulate(method="fedavg", **{**SMALL, "lr": 1e30})
    runs = simulate(method="fedavg", **{**SMALL, "lr": 3e18, "rounds": 1, "batch_size": 0})
    assert not np.isfinite(runs[0].losses).any()
    assert any("a smaller lr may help" in note for note in runs.notes)
    assert runs.summary()["mean"]["mean"] <= 1


def test_a_run_that_diverges_keeps_what_it_measured(tmp_path):
    folder, settings = tmp_path / "run", {**SMALL, "method": "fedadam:eta=1e30", "eval_every": 1}
    with pytest.raises(Diverged, match=f"in round 2: .*what was measured before is in '{folder}'"):
        simulate(**settings, out=folder)
    kept = load_runs(folder)
    assert [len(run.rounds) for run in kept] == [1, 1]
    assert [entry["round"] for entry in kept[0].evaluations] == [0, 1]
    assert kept.notes == ("the training diverged in round 2; a smaller lr helps",)
    assert "diverged in round 2" in kept.report().read_text()
    with pytest.raises(EvenhandError, match=r"holds a run that diverged in round 2; choose another folder.*--force"):
        simulate(**settings, out=folder)
    with pytest.raises(Diverged, match="in round 2"):  # it would again
        resume(folder)
    simulate(**{**settings, "method": "fedavg", "rounds": 1}, out=folder, force=True)
    assert not (folder / "diverged.json").exists()
    assert load_runs(folder).notes == ()


# -------------------------------------------------------------------------------------------------------- comparisons

METHODS = ("fedavg", "fedfv:alpha=0.2,tau=3", "fedfa")


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Comparison:
    return compare(*METHODS, **{**SMALL, "seeds": 3}, out=tmp_path_factory.mktemp("compared") / "comparison")


def test_methods_of_a_comparison_share_everything_random(compared):
    one, *others = compared.runs.values()
    for other in others:
        for run, twin in zip(one, other, strict=True):
            assert run.partition.fingerprint() == twin.partition.fingerprint()
            assert [entry["asked"] for entry in run.rounds] == [entry["asked"] for entry in twin.rounds]
            assert run.rounds[0]["losses"] == twin.rounds[0]["losses"]


def test_each_method_is_a_run_that_can_be_repeated(compared, tmp_path):
    folder = compared.folder / "fedfv-alpha=0.2,tau=3"
    simulate(load_toml(folder / "experiment.toml"), out=tmp_path / "alone")
    assert contents(tmp_path / "alone") == contents(folder)


def test_a_comparison_repeats_and_reads_back(compared):
    kept = load_comparison(compared.folder)
    assert kept.summary() == compared.summary()
    assert list(kept.runs) == list(METHODS)
    assert {path.name for path in compared.folder.glob("table.*")} == {"table.md", "table.tex", "table.csv"}


def test_an_interrupted_comparison_goes_on(compared, tmp_path):
    folder = tmp_path / "comparison"

    def stop(status):
        if (status.label, status.round) == (METHODS[1], 5):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"evenhand compare --resume {folder}"):
        compare(*METHODS, **{**SMALL, "seeds": 3}, out=folder, progress=stop)
    with pytest.raises(EvenhandError, match="holds a comparison"):
        resume(folder)
    assert list(load_comparison(folder).runs) == ["fedavg"]
    resume_comparison(folder)
    assert contents(folder) == contents(compared.folder)


def test_a_method_that_diverges_leaves_the_others_their_turn(tmp_path):
    folder, wild = tmp_path / "comparison", "fedadam:eta=1e30"
    found = compare("fedavg", wild, "even", **{**SMALL, "rounds": 4}, out=folder)
    assert found.diverged == {wild: 2}
    assert list(found.runs) == ["fedavg", "even"]
    assert f"| {wild} | diverged in round 2 | - | - | - | - |" in found.markdown()
    assert "fedadam:eta=1e30 & diverged in round 2 & - & - & - & - " in found.latex()
    assert f"Diverged: {wild} in round 2" in found.words()[-1]
    assert "diverged in round 2" in (folder / "report.html").read_text()
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert [(row["method"], row["diverged"], row["mean"] == "") for row in rows] == [
        ("fedavg", "", False),
        (wild, "2", True),
        ("even", "", False),
    ]
    assert load_comparison(folder).summary() == found.summary()
    before = contents(folder)
    (folder / "summary.json").unlink()  # as if it had been killed at the very end
    played = []
    assert resume_comparison(folder, progress=played.append).diverged == {wild: 2}
    assert contents(folder) == before
    assert played == []


def test_when_the_first_method_diverges_nothing_is_tested_against_it():
    found = compare("fedadam:eta=1e30", "fedavg", "even", **{**SMALL, "rounds": 4})
    assert found.first in found.diverged
    assert all(cell.first is None for row in found.cells.values() for cell in row)
    assert "differs from fedadam" not in found.markdown()
    assert "† differs from the best" in found.markdown()


def test_when_every_method_diverges_there_is_no_table(tmp_path):
    wild = ("fedadam:eta=1e30", "fedyogi:eta=1e30")
    said = (
        r"every method diverged \(fedadam:eta=1e30 in round 2, fedyogi:eta=1e30 in round 2\); a smaller learning rate"
    )
    with pytest.raises(EvenhandError, match=said):
        compare(*wild, **SMALL, out=tmp_path / "comparison")
    with pytest.raises(EvenhandError, match=said):
        resume_comparison(tmp_path / "comparison")


def test_what_the_simulator_cannot_measure_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(EvenhandError, match="fairfed looks at groups of people, and digits names no sensitive"):
        compare("fedavg", "fairfed", **SMALL, out=tmp_path / "comparison")
    assert not (tmp_path / "comparison").exists()


def fixed(values: dict[str, list[float]]) -> Comparison:
    """A comparison whose clients all have the given accuracy, one a seed."""

    class Fixed:
        notes = ()

        def __init__(self, means):
            self.means = np.array(means)

        def measured(self, name):
            return self.means if name in ("mean", "worst", "best") else np.zeros(len(self.means))

        def __getitem__(self, index):
            return type("Run", (), {"measured_clients": 4, "cells": None})

    count = len(next(iter(values.values())))
    return Comparison(Experiment(seeds=tuple(range(count))), {name: Fixed(means) for name, means in values.items()})


def test_marks_say_what_the_seeds_can_tell_apart():
    found = fixed({"a": [0.70, 0.72, 0.71, 0.69], "b": [0.80, 0.83, 0.81, 0.79], "c": [0.60, 0.95, 0.80, 0.84]})
    first = {label: row[0] for label, row in found.cells.items()}
    assert [cell.marks for cell in first.values()] == ["†", "*", ""]  # b beats a; c could be anything
    assert [cell.bold for cell in first.values()] == [False, True, False]
    assert "**80.8** ± 1.7\\*" in found.markdown()
    assert r"\textbf{80.8} $\pm$ 1.7$^{*}$" in found.latex()
    assert r"70.5 $\pm$ 1.3$^{\dagger}$" in found.latex()
    rows = list(csv.DictReader(found.csv().splitlines()))
    assert float(rows[1]["mean"]) == pytest.approx(0.8075)
    assert float(rows[1]["mean_p_first"]) < 0.05
    assert rows[0]["mean_p_first"] == ""
    assert "differs from a" in found.words()[1]
    said = "against a: mean accuracy is better with b; std differs with none; worst client is better with b."
    assert f"Beyond chance, {said}" in found.markdown()
    worse = fixed({"b": [0.80, 0.83, 0.81, 0.79], "a": [0.70, 0.72, 0.71, 0.69]})
    assert "mean accuracy is worse with a" in worse.verdict()


def test_one_seed_gets_no_marks():
    found = fixed({"a": [0.7], "b": [0.9]})
    assert [cell.marks for row in found.cells.values() for cell in row] == [""] * 10
    assert "±" not in found.markdown()
    assert "more (--seeds 5)" in found.words()[1]


def test_equal_results_are_all_bold():
    found = fixed({"a": [0.7, 0.8], "b": [0.7, 0.8]})
    assert all(row[0].bold for row in found.cells.values())


def test_the_table_is_a_frame_too(compared):
    pytest.importorskip("pandas")
    assert list(compared.table.index) == list(METHODS)
    assert {"mean", "mean_sd", "std_pp_p_first", "worst_p_best"} <= set(compared.table.columns)
    tests = compared.tests
    assert set(tests["against"]) == {"first", "best"}
    assert (tests["p"].dropna() <= 1).all()


def test_names_are_escaped_in_latex_and_markdown():
    found = fixed({"a_b%": [0.7, 0.8], "x|y*": [0.7, 0.8]})
    assert r"a\_b\%" in found.latex()
    assert r"x\|y\*" in found.markdown()


@pytest.mark.parametrize(
    ("methods", "settings", "said"),
    [
        (("fedavg",), {}, "at least two"),
        (("fedavg", "fedavg"), {}, "twice"),
        (("fedavg", "fedavgg"), {}, "did you mean 'fedavg'"),
        (("fedavg", "even"), {"method.alpha": 1}, "with its name"),
    ],
)
def test_a_wrong_comparison_is_refused(methods, settings, said):
    with pytest.raises(EvenhandError, match=said):
        compare(*methods, **settings)


def test_methods_are_named_by_what_was_changed():
    found = compare(method("fedfv", alpha=0.3), method("fedavg"), **{**SMALL, "rounds": 1})
    assert list(found.runs) == ["fedfv:alpha=0.3", "fedavg"]
    assert found.seeds == (0, 1)


# ------------------------------------------------------------------------------------------------------------ reports


def test_the_report_of_a_run_stands_alone(whole):
    text = (whole / "report.html").read_text()
    checked(text)
    assert "The worst-served clients" in text
    assert "prefers-color-scheme: dark" in text


def test_the_report_of_a_comparison_stands_alone(compared):
    text = (compared.folder / "report.html").read_text()
    checked(text)
    for label in METHODS:
        assert label in text


def test_names_in_a_report_are_text_and_nothing_else(tmp_path):
    data = tmp_path / "own.csv"
    rng = np.random.default_rng(0)
    rows = [f'"<script>alert({i % 3})</script>",{rng.normal():.3f},{rng.integers(2)}' for i in range(90)]
    data.write_text("site,x,y\n" + "\n".join(rows) + "\n")
    runs = simulate(
        data=data, rounds=3, model="logistic", out=tmp_path / "run", **{"data_options.client_column": "site"}
    )
    assert len(runs[0].names) == 3
    text = (tmp_path / "run" / "report.html").read_text()
    checked(text)
    assert "&lt;script&gt;alert(0)" in text


def test_clients_with_models_of_their_own_keep_them(tmp_path):
    ditto = "fedavg", "personal:lam=0.5"
    settings = {**SMALL, "method.objective": ditto[1], "rounds": 6, "seeds": 1}
    (run,) = simulate(method=ditto[0], **settings, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        simulate(method=ditto[0], **settings, out=tmp_path / "run", progress=stop_at(2))
    resume(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    (kept,) = load_runs(tmp_path / "run")
    shared = kept.load_model()
    for name, tensor in kept.load_personal().items():
        assert tensor.shape == (12, *shared[name].shape)
        assert torch.equal(tensor, run.personal[name])
    (plain,) = simulate(method="fedavg", **{**SMALL, "rounds": 1, "seeds": 1})
    with pytest.raises(EvenhandError, match="no models of their own"):
        plain.load_personal()


def test_a_report_of_very_little_can_be_written(tmp_path):
    runs = simulate(method="fedavg", clients=2, rounds=1, seeds=1, cohort=1)
    checked(runs.report(tmp_path / "little.html").read_text())
    text = runs[0].report(tmp_path / "one.html").read_text()
    checked(text)
    curve = re.search(r'<section id="losses">.*?</section>', text, flags=re.DOTALL)[0]
    assert curve.count("<circle") == 2  # a line through one point is none
    assert "<path" not in curve
    assert not re.search(r'"middle"[^>]*>0\.2</text>', text)  # there is no fifth of a round
    assert RunFolder(tmp_path).finished is False
