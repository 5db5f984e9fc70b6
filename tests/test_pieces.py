"""Runs and comparisons in pieces, in processes of this machine (over a Ray cluster: flower/test_ray.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from alive import gone

import evenhand as eh
from evenhand import pieces
from evenhand.callbacks import Callback
from evenhand.checks import EvenhandError
from evenhand.comparison import compare, load_comparison, resume_comparison
from evenhand.experiment import Experiment
from evenhand.methods import method
from evenhand.processes import side_by_side, threads_each
from evenhand.recording import Diverged

SMALL = {"data": "digits", "clients": 5, "rounds": 3, "eval_every": 2, "seeds": 3, "device": "cpu"}


@pytest.fixture
def as_many_threads():
    """As many as two processes side by side have each, since sums depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_each(2))
    yield
    torch.set_num_threads(before)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything but when it was, how long it took, and the folder's own name."""
    timed = ("versions.json", "timing.jsonl", "report.html")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in timed]
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(folder.name.encode(), b"the folder") for path in files
    }


@pytest.mark.usefixtures("as_many_threads")
def test_side_by_side_a_comparison_gives_the_numbers_of_one_in_turn(tmp_path):
    seen = []
    beside = compare("fedavg", "ditto", "even", out=tmp_path / "beside", jobs=2, progress=seen.append, **SMALL)
    in_turn = compare("fedavg", "ditto", "even", out=tmp_path / "in-turn", **SMALL)
    assert list(beside.runs) == ["fedavg", "ditto", "even"]
    assert contents(tmp_path / "beside") == contents(tmp_path / "in-turn")
    assert len(contents(tmp_path / "beside")) > 40
    assert (tmp_path / "beside/report.html").is_file()
    assert beside.notes == in_turn.notes
    reached = {label: [status.round for status in seen if status.label == label] for label in beside.runs}
    assert reached == {label: [1, 2, 3] for label in beside.runs}  # a third of a method's rounds with every seed


def test_in_memory_alone(as_many_threads):
    beside = compare("fedavg", "qffl:q=1", jobs=2, **{**SMALL, "seeds": 1})
    in_turn = compare("fedavg", "qffl:q=1", **{**SMALL, "seeds": 1})
    for label, runs in in_turn.runs.items():
        np.testing.assert_array_equal(beside.runs[label][0].accuracies, runs[0].accuracies)
        assert beside.runs[label][0].partition is not None
        for name, tensor in runs[0].model.items():
            assert torch.equal(beside.runs[label][0].model[name], tensor)


@pytest.mark.usefixtures("as_many_threads")
def test_seeds_of_one_run_side_by_side(tmp_path):
    beside = eh.simulate(method="even", out=tmp_path / "beside", jobs=2, **SMALL)
    in_turn = eh.simulate(method="even", out=tmp_path / "in-turn", **SMALL)
    assert contents(tmp_path / "beside") == contents(tmp_path / "in-turn")
    assert beside.summary() == in_turn.summary()
    assert eh.resume(tmp_path / "beside").summary() == beside.summary()
    with pytest.raises(EvenhandError, match="holds a finished run"):
        eh.simulate(method="even", out=tmp_path / "beside", jobs=2, **SMALL)
    assert eh.simulate(method="even", jobs=2, **SMALL).summary() == beside.summary()


@pytest.mark.parametrize("backwards", [False, True])
def test_a_run_whose_seeds_diverge_side_by_side_says_what_one_in_turn_says(tmp_path, monkeypatch, backwards):
    def arriving(*args):
        return sorted(side_by_side(*args), key=lambda found: found[0].seeds, reverse=backwards)

    said = []
    monkeypatch.setattr(pieces, "side_by_side", arriving)
    for jobs in (1, 2):
        with pytest.raises(Diverged) as error:
            eh.simulate(method="fedavg", lr=1e30, out=tmp_path / str(jobs), jobs=jobs, **SMALL)
        said.append(str(error.value).replace(str(tmp_path / str(jobs)), "the folder"))
        assert (tmp_path / str(jobs) / "diverged.json").is_file()
    assert said[0] == said[1]


def test_one_that_diverges_does_not_take_the_others_with_it(tmp_path):
    wild = method("fedavg", server={"name": "average", "eta": 1e30})
    found = compare({"wild": wild, "fedavg": method("fedavg")}, out=tmp_path / "run", jobs=2, **SMALL)
    assert list(found.runs) == ["fedavg"]
    assert found.diverged == {"wild": json.loads((tmp_path / "run/wild/diverged.json").read_text())["round"]}
    assert load_comparison(tmp_path / "run").diverged == found.diverged


def test_what_was_cut_short_goes_on(tmp_path, as_many_threads):
    compare("fedavg", "even", out=tmp_path / "cut", **SMALL)
    whole = contents(tmp_path / "cut")
    for name in ("summary.json", "even/summary.json"):
        (tmp_path / "cut" / name).unlink()
    assert list(resume_comparison(tmp_path / "cut", jobs=2).runs) == ["fedavg", "even"]
    assert contents(tmp_path / "cut") == whole
    (tmp_path / "cut/summary.json").unlink()
    for path in (tmp_path / "cut/fedavg").rglob("*"):  # as if it had not been begun
        if path.is_file():
            path.unlink()
    resume_comparison(tmp_path / "cut", jobs=2)
    assert contents(tmp_path / "cut") == whole


def test_on_a_gpu_seeds_stay_together_where_all_jobs_have_work_anyway(monkeypatch):
    chosen = Experiment().with_settings({"seeds": 5})
    methods = {name: method(name) for name in ("fedavg", "fedfv", "even")}
    assert [len(piece.seeds) for piece in pieces.pieces_of(chosen, methods, 2)] == [1] * 15
    assert [len(piece.seeds) for piece in pieces.pieces_of(chosen, methods)] == [1] * 15
    monkeypatch.setattr(Experiment, "torch_device", lambda self: torch.device("cuda"))
    assert [len(piece.seeds) for piece in pieces.pieces_of(chosen, methods, 3)] == [5, 5, 5]
    assert [len(piece.seeds) for piece in pieces.pieces_of(chosen, methods, 8)] == [2, 2, 1] * 3
    assert [len(piece.seeds) for piece in pieces.pieces_of(chosen, methods, 50)] == [1] * 15
    some = pieces.pieces_of(chosen, methods, 8)
    assert {(piece.label, seed) for piece in some for seed in piece.seeds} == {
        (name, seed) for name in methods for seed in range(5)
    }
    assert str(some[0]) == "fedavg, seeds 0, 1"


def test_a_process_that_dies_is_told_of():
    with pytest.raises(EvenhandError, match=r"died in the middle of its work.*--jobs"):
        list(side_by_side(os._exit, [1], 1))


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="no /proc to look at")
def test_ctrl_c_ends_all_processes_and_says_how_to_go_on(tmp_path):
    words = ["compare", "fedavg", "even", "--rounds", "100000", "--clients", "5", "--jobs", "2", "--out", "cut"]
    with subprocess.Popen(
        [sys.executable, "-m", "evenhand", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as command:
        for _ in range(600):
            if (tmp_path / "cut/comparison.toml").is_file() and len(workers_of(command.pid)) >= 2:
                break
            time.sleep(0.1)
        workers = workers_of(command.pid)
        time.sleep(1.0)
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        said = command.stderr.read()
        assert command.wait(30) == 130
    assert "stopped; what is finished is kept, and evenhand compare --resume cut runs the rest" in said
    assert workers
    assert gone(workers, seconds=5), "a process goes on"


def workers_of(parent: int) -> list[int]:
    """The forks of the process from which a command's workers are made."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if "forkserver" in path.with_name("cmdline").read_text():
                name, rest = path.read_text().rpartition(")")[::2]
                parents[int(name.split()[0])] = int(rest.split()[1])
    return [number for number, above in parents.items() if parents.get(above) == parent]


def test_an_error_reaches_the_caller_as_it_is():
    with pytest.raises(EvenhandError, match="unknown data set"):
        list(side_by_side(_load, ["nothing"], 2))


def _load(name: str) -> None:
    from evenhand.data import load

    load(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"jobs": 0}, "jobs=0"),
        ({"jobs": 1.5}, "jobs=1.5"),
        ({"jobs": 2, "engine": "ray"}, "jobs are processes of this machine"),
        ({"jobs": 2, "callbacks": [Callback()]}, "no log is kept by several processes"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(EvenhandError, match=said):
        eh.compare("fedavg", "even", **given, **SMALL)
    if "engine" not in given:
        with pytest.raises(EvenhandError, match=said):
            eh.simulate(**given, **SMALL)
