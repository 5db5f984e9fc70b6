"""A program of a table's rows that was stopped goes on where it was, to the same numbers."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from evenhand import reruns, storage, unfinished
from evenhand.engine import checkpoint
from evenhand.experiment import Experiment
from evenhand.reproduction import reproduce

TABLE = """
title = "Digits, tiny"
paper = "A paper (2000), Fig. 1"
citation = "Somebody: Something. 2000."
plus_minus = "Over two seeds."

[experiment]
data = "digits"
partition = "pat:2"
clients = 12
model = "logistic"
rounds = 9
seeds = [0, 1]
eval_every = 2
work = { lr = 0.1 }
sampling = { participation = 0.5 }

[figure]
kind = "curves"
columns = ["Ave.", "Conflicts", "Goes with"]

[[columns]]
title = "Ave."
measure = "mean"
higher = true

[[columns]]
title = "Conflicts"
measure = "conflicts"
higher = false

[[columns]]
title = "Goes with"
measure = "fell_like:1"
higher = true

[[rows]]
name = "even"
method = "even"
added = "ours"

[[rows]]
name = "Too fast"
method = "fedavg"
settings = { lr = 1e38 }
added = "diverges"

[[rows]]
name = "Ditto"
method = "ditto"
added = "personal models, and so a program of its own"
"""
ROWS = ["even", "Ditto"]  # the first of each program


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TABLE)
    return path


@pytest.fixture(autouse=True)
def after_every_round(monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)


@pytest.fixture(autouse=True)
def programs_as_on_a_gpu(monkeypatch):
    played = reruns.played

    def on_a_cpu(program, *rest):
        return played(replace(program, experiment=replace(program.experiment, device="cpu")), *rest)

    monkeypatch.setattr(Experiment, "torch_device", lambda chosen: torch.device(chosen.device.replace("auto", "meta")))
    monkeypatch.setattr(reruns, "played", on_a_cpu)


@pytest.fixture
def through(table, tmp_path):
    out = tmp_path / "through"
    reproduce(table, out=out)
    assert [line["diverged"] != "" for line in lines_of(out)] == [False, False, True, True, False, False]
    return out


def lines_of(out, name=reruns.CSV):
    with (out / name).open(newline="") as file:
        return [{key: value for key, value in line.items() if key != "seconds"} for line in csv.DictReader(file)]


def run(table, out, stop=("", 0), **more):
    """The rounds that were played, until one program was stopped after one of its rounds, if it was."""
    played = []

    def progress(status):
        played.append((status.label.partition(" and ")[0], status.round))
        if played[-1] == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if stop[0] else nullcontext():
        reproduce(table, out=out, progress=progress, **more)
    return played


def same(out, through):
    for name in (reruns.CSV, reruns.SERIES):
        assert lines_of(out, name) == lines_of(through, name)
    assert not (out / reruns.UNFINISHED).exists()


@pytest.mark.parametrize("row", ROWS)
def test_a_stopped_program_goes_on_to_the_same_numbers(row, table, through, tmp_path):
    out = tmp_path / "out"
    assert run(table, out, (row, 5))[-1] == (row, 5)
    assert len(list((out / reruns.UNFINISHED).iterdir())) == 1
    assert (out / reruns.CSV).exists() == (row == "Ditto")
    assert run(table, out, (row, 7)) == [(row, 6), (row, 7)]
    left = [(name, round) for name in ROWS[ROWS.index(row) :] for round in range(8 if name == row else 1, 10)]
    assert run(table, out) == left
    same(out, through)


def test_a_program_that_was_stopped_while_it_was_kept_goes_back_a_little(table, through, tmp_path, monkeypatch):
    out, save, times = tmp_path / "out", checkpoint.save, []

    def stopped(simulation, path):
        times.append(simulation.round)
        if len(times) == 4:
            raise KeyboardInterrupt
        save(simulation, path)

    with monkeypatch.context() as there:
        there.setattr(checkpoint, "save", stopped)
        with pytest.raises(KeyboardInterrupt):
            reproduce(table, out=out)
    assert times == [1, 2, 3, 4]
    assert run(table, out)[0] == ("even", 4)
    same(out, through)


def cut_short(place):
    path = place / unfinished.STATES
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_part(place):
    (place / unfinished.HISTORY.format(3)).unlink()


def lose_the_newest_part(place):
    (place / unfinished.HISTORY.format(5)).unlink()


def of_another_program(place):
    kept = storage.read(place / unfinished.STATES, "checkpoint")
    storage.write(place / unfinished.STATES, "checkpoint", {**kept, "replicas": kept["replicas"][::-1]})


def without_a_key(place):
    storage.write(place / unfinished.HISTORY.format(2), "history", {"after": 1, "spent": 0.0})


DAMAGE = {
    cut_short: "truncated or corrupt",
    lose_a_part: "lacks what came before history-4",
    lose_the_newest_part: "lacks what came after round 4",
    of_another_program: "another seed, method or partition",
    without_a_key: "replicas",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_used_is_said_and_the_program_starts_anew(damage, table, through, tmp_path):
    out = tmp_path / "out"
    run(table, out, ("even", 5))
    (place,) = (out / reruns.UNFINISHED).iterdir()
    damage(place)
    with pytest.warns(UserWarning, match=f"cannot be used .*{DAMAGE[damage]}.*it starts anew"):
        assert run(table, out)[0] == ("even", 1)
    same(out, through)


def test_a_full_disk_stops_no_training(table, through, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as there:
        there.setattr(checkpoint, "save", full)
        with pytest.warns(UserWarning, match="cannot be kept in .*No space left on device") as said:
            run(table, out)
    assert len(said) == 2  # once a program
    same(out, through)


def test_another_command_leaves_what_is_unfinished_alone(table, through, tmp_path):
    out = tmp_path / "out"
    run(table, out, ("even", 5))
    (place,) = (out / reruns.UNFINISHED).iterdir()
    assert run(table, out, only=["Ditto"])[0] == ("Ditto", 1)
    assert place.is_dir()
    assert run(table, out)[0] == ("even", 6)
    assert sorted(map(str, lines_of(out))) == sorted(map(str, lines_of(through)))
    assert not (out / reruns.UNFINISHED).exists()


def test_what_was_finished_by_other_programs_is_swept(table, tmp_path):
    out = tmp_path / "out"
    run(table, out, ("even", 5))
    run(table, out, together=1)
    assert not (out / reruns.UNFINISHED).exists()


def test_another_machine_or_version_starts_anew(table, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(table, out, ("even", 5))
    monkeypatch.setattr("evenhand.__version__", "999")
    assert run(table, out, ("even", 5))[0] == ("even", 1)
    monkeypatch.setattr(reruns, "machine_of", lambda experiment: "another GPU")
    assert run(table, out, ("even", 5))[0] == ("even", 1)


def test_the_time_of_all_commands_counts(table, tmp_path):
    out = tmp_path / "out"
    run(table, out, ("even", 5), only=["even"])
    (place,) = (out / reruns.UNFINISHED).iterdir()
    path = place / unfinished.HISTORY.format(5)
    kept = storage.read(path, "history")
    assert kept["spent"] > 0.0
    storage.write(path, "history", {**kept, "spent": 5000.0})
    run(table, out, only=["even"])
    with (out / reruns.CSV).open(newline="") as file:
        assert all(2500.0 < float(line["seconds"]) < 2600.0 for line in csv.DictReader(file))


def test_nothing_is_kept_of_a_short_program_or_without_a_folder(table, tmp_path, monkeypatch):
    run(table, None)
    monkeypatch.setattr(unfinished, "EVERY", 60.0)
    run(table, tmp_path / "out", ("even", 5))
    assert not (tmp_path / "out" / reruns.UNFINISHED).exists()
