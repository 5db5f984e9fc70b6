"""Tuning: what is held back, how trials are judged, searched, kept and continued."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

import evenhand as eh
from evenhand import tuning
from evenhand.checks import EvenhandError
from evenhand.data import Noise, load, partition
from evenhand.experiment import Experiment, prepare
from evenhand.methods import METHODS, method
from evenhand.runs import Run
from evenhand.tuning import SPACES, Judgement, held_back, tune

SMALL = {"clients": 8, "rounds": 3, "participation": 0.5, "device": "cpu"}


# ------------------------------------------------------------------------------------------------ what is held back


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_a_share_of_every_clients_training_data_is_held_back(share):
    data = load("digits")
    drawn = partition(data, "dir:0.3", clients=20, seed=0)
    held = held_back(drawn, share, seed=1)
    for client in range(20):
        before, train, judged = drawn.train[client], held.train[client], held.test[client]
        assert sorted([*train, *judged]) == sorted(before)
        assert len(train) >= 1 or not len(before)
        assert abs(len(judged) - share * len(before)) <= 1
    assert not set(held.test.indices) & set(drawn.test.indices)
    again, other = held_back(drawn, share, seed=1), held_back(drawn, share, seed=2)
    assert np.array_equal(again.test.indices, held.test.indices)
    assert not np.array_equal(other.test.indices, held.test.indices)


def test_validation_data_that_is_there_is_used():
    drawn = partition(load("digits"), "iid", clients=5, seed=0, split=(0.6, 0.2, 0.2))
    held = held_back(drawn, 0.5, seed=0)
    assert np.array_equal(held.train.indices, drawn.train.indices)
    assert np.array_equal(held.test.indices, drawn.validation.indices)


def test_the_test_data_has_no_say(monkeypatch):
    """Other test labels, the same choice and the same scores."""
    data = load("digits")
    found = tune("qffl", space={"q": [0.0, 5.0], "lr": [0.05, 0.3]}, **SMALL)
    drawn = prepare(Experiment().with_settings({**SMALL})).replicas[0].partition
    spoiled = replace(data, targets=data.targets.clone())
    spoiled.targets[drawn.test.indices] = 0
    monkeypatch.setattr(tuning, "load_data", lambda experiment: spoiled)
    monkeypatch.setattr(
        tuning,
        "prepare",
        lambda chosen, methods, dataset, redraw, **how: prepare(
            chosen, methods, dataset, lambda _, seed: redraw(drawn, seed), **how
        ),
    )
    other = tune("qffl", space={"q": [0.0, 5.0], "lr": [0.05, 0.3]}, **SMALL)
    assert [trial.settings for trial in other.trials] == [trial.settings for trial in found.trials]
    assert [trial.scores for trial in other.trials] == [trial.scores for trial in found.trials]


def test_wrong_labels_go_with_their_samples():
    data = load("digits")
    drawn = Noise(1.0, 0.5).apply(partition(data, "iid", clients=4, seed=0), data, 0)
    held = held_back(drawn, 0.3, seed=1)
    for client in range(4):
        places = slice(*drawn.train.offsets[client : client + 2])
        taken = dict(zip(drawn.train[client], drawn.labels[places], strict=True))
        kept = held.labels[slice(*held.train.offsets[client : client + 2])]
        assert [taken[sample] for sample in held.train[client]] == kept.tolist()


def test_labels_that_are_corrected_can_be_tuned():
    chosen = {"clients": 6, "rounds": 8, "participation": 1.0, "noise": "0.5,0.5", "model": "logistic", "device": "cpu"}
    space = {"iterations": [2, 3], "together": [3]}
    assert len(tune("fedcorr", space=space, **chosen).trials) == 2


# ------------------------------------------------------------------------------------------------ how it is judged


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("mean", ((1.0, "mean"),)),
        ("0.5*mean+0.5*worst", ((0.5, "mean"), (0.5, "worst"))),
        (" .25 * mean - 2*std ", ((0.25, "mean"), (-2.0, "std"))),
        ("-loss_mean", ((-1.0, "loss_mean"),)),
        ("pooled_accuracy - dp:sex", ((1.0, "pooled_accuracy"), (-1.0, "dp:sex"))),
    ],
)
def test_a_rule_is_a_weighted_sum(text, terms):
    judged = Judgement.read(text)
    assert judged.terms == terms
    values = {name: 0.1 * place + 0.3 for place, (_, name) in enumerate(terms)}
    assert judged.score(values) == pytest.approx(sum(weight * values[name] for weight, name in terms))
    assert judged.score(dict.fromkeys(values, np.nan)) == -np.inf


@pytest.mark.parametrize("text", ["", "mean worst", "mean*2", "2*", "mean + ", "(mean)"])
def test_what_is_no_sum_is_refused(text):
    with pytest.raises(EvenhandError, match="by="):
        Judgement.read(text)


def test_an_unknown_measure_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(tuning, "prepare", lambda *given: pytest.fail("nothing should run"))
    with pytest.raises(EvenhandError, match=r"no measure 'wurst'.*did you mean 'worst'"):
        tune("qffl", by="mean + wurst", **SMALL)
    with pytest.raises(EvenhandError, match="no measure 'dp'"):
        tune("qffl", by="mean - dp", **SMALL)


# ------------------------------------------------------------------------------------------------ what is found


def test_trials_are_what_each_run_gives_alone():
    found = tune("fedfv", space={"alpha": [0.0, 0.5], "lr": [0.05, 0.2]}, seeds=2, by="0.3*mean + 0.7*worst", **SMALL)
    assert len(found.trials) == 4
    assert [trial.score for trial in found.trials] == sorted((t.score for t in found.trials), reverse=True)
    for trial in found.trials:
        chosen = Experiment().with_settings({**SMALL, "lr": trial.settings["lr"], "eval_every": 3, "seeds": [0, 1]})
        one = method("fedfv", alpha=trial.settings["alpha"])
        made = prepare(chosen, [one], redraw=lambda drawn, seed: held_back(drawn, 0.2, seed))
        made.run()
        for replica, score in zip(made.replicas, trial.scores, strict=True):
            said = Run(chosen, replica.seed, (), replica.partition.test.sizes, [], replica.evaluations).measures()
            assert score == pytest.approx(0.3 * said["mean"] + 0.7 * said["worst"], abs=1e-9)
    best = found.best.settings
    assert found.method == method("fedfv", alpha=best["alpha"])
    assert found.experiment.work.lr == best["lr"]
    assert found.command() == f"evenhand run fedfv:alpha={best['alpha']} --lr {best['lr']:g}"
    assert len(found.table) == 8
    assert "0.3*mean + 0.7*worst" in str(found)


def test_settings_written_with_the_method_stay():
    found = tune("fedfv:tau=1", space={"alpha": [0.5]}, **SMALL)
    assert (found.method.rule.tau, found.method.rule.alpha) == (1, 0.5)
    assert found.command() == "evenhand run fedfv:alpha=0.5,tau=1"
    found = tune("fedavg:server=recent,rounds=4", space={"weights": ["uniform"]}, **SMALL)
    assert found.command() == "evenhand run fedavg:weights=uniform,server=recent,rounds=4"


def test_group_fairness_can_be_weighed():
    chosen = {"data": "synthetic-groups", "model": "logistic", "participation": 1.0, "rounds": 25, "device": "cpu"}
    found = tune("fpfl", space={"gamma": [0.0, 1.0], "damping": [0.0]}, by="pooled_accuracy - 3*dp", **chosen)
    assert found.best.settings["gamma"] == 1.0


@pytest.mark.parametrize("name", SPACES)
def test_every_declared_setting_exists(name):
    assert name in METHODS
    for setting, values in SPACES[name].items():
        for value in values:
            method(name).with_settings({setting: value})


# ------------------------------------------------------------------------------------------------ how it is searched


def test_random_draws_some_of_the_grid():
    space = {"q": [0.0, 0.1, 1.0, 5.0], "lr": [0.05, 0.1]}
    found, again = (tune("qffl", space=space, search="random", trials=3, **SMALL) for _ in range(2))
    assert len(found.trials) == 3
    assert len({tuple(trial.settings.items()) for trial in found.trials}) == 3
    assert [trial.settings for trial in again.trials] == [trial.settings for trial in found.trials]
    assert len(tune("qffl", space=space, search="random", trials=99, **SMALL).trials) == 8


def test_optuna_searches_between_the_values():
    pytest.importorskip("optuna")
    space = {"alpha": [0.0, 0.5], "tau": [1, 3], "order": ["loss", "reverse"], "lr": [0.01, 0.3]}
    found = tune("fedfv", space=space, search="optuna", trials=10, **SMALL)
    assert len(found.trials) == 10
    for trial in found.trials:
        assert 0.0 <= trial.settings["alpha"] <= 0.5
        assert trial.settings["tau"] in (1, 2, 3)
        assert trial.settings["order"] in ("loss", "reverse")
        assert 0.01 <= trial.settings["lr"] <= 0.3
    again = tune("fedfv", space=space, search="optuna", trials=10, **SMALL)
    assert [trial.settings for trial in again.trials] == [trial.settings for trial in found.trials]


def test_a_setting_that_diverges_loses_and_the_others_go_on():
    with np.errstate(all="ignore"):
        found = tune("qffl", space={"lr": [0.1, 1e30], "q": [0.0, 1.0]}, **SMALL)
    scores = {trial.settings["lr"]: trial.score for trial in found.trials}
    assert len(found.trials) == 4
    assert scores[1e30] == -np.inf
    assert np.isfinite(scores[0.1])
    assert "-inf" in str(found)
    with pytest.raises(EvenhandError, match="no trial reached a finite score"):
        tune("qffl", space={"lr": [1e30]}, **SMALL)


# ------------------------------------------------------------------------------------------------ on disk


def test_a_search_goes_on_where_it_stopped(tmp_path, monkeypatch):
    place, space = tmp_path / "trials.csv", {"q": [0.1, 1.0], "lr": [0.05, 0.1]}
    first = tune("qffl", space={**space, "lr": [0.05]}, seeds=2, out=place, **SMALL)
    played, play = [], tuning._Desk._played
    monkeypatch.setattr(
        tuning._Desk, "_played", lambda self, wanted, places: played.extend(wanted) or play(self, wanted, places)
    )
    found = tune("qffl", space=space, seeds=2, out=place, **SMALL)
    assert sorted(played, key=str) == [{"q": 0.1, "lr": 0.1}, {"q": 1.0, "lr": 0.1}]
    kept = {tuple(trial.settings.items()): trial.scores for trial in first.trials}
    assert all(
        trial.scores == kept[tuple(trial.settings.items())] for trial in found.trials if trial.settings["lr"] == 0.05
    )
    with place.open() as file:
        assert len(list(csv.DictReader(file))) == 8
    played.clear()
    tune("qffl", space=space, seeds=2, out=place, by="worst", **SMALL)
    assert not played
    tune("qffl", space=space, seeds=2, out=place, **{**SMALL, "rounds": 2})
    assert len(played) == 4  # another experiment


def test_a_file_that_holds_no_trials_is_refused(tmp_path):
    place = tmp_path / "trials.csv"
    place.write_text("a,b\n1,2\n")
    with pytest.raises(EvenhandError, match="not a file of trials"):
        tune("qffl", space={"q": [1.0]}, out=place, **SMALL)
    assert place.read_text() == "a,b\n1,2\n"


# ------------------------------------------------------------------------------------------------ bad input, command


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"p": [1]}}, "no setting 'p'"),
        ({"space": {"q": []}}, "no value for 'q'"),
        ({"space": {}}, "names no setting"),
        ({"space": {"q": [-1.0]}}, "q=-1"),
        ({"search": "gird"}, "did you mean 'grid'"),
        ({"search": "random"}, "how many trials"),
        ({"trials": 3}, "a grid tries all"),
        ({"search": "random", "trials": 0}, "trials=0"),
        ({"hold_out": 0.0}, "hold_out=0"),
        ({"hold_out": 1.0}, "hold_out=1"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes, said):
    with pytest.raises(EvenhandError, match=said):
        tune("qffl", **{**SMALL, **changes})


def test_the_command(tmp_path, monkeypatch, capsys):
    pytest.importorskip("typer")
    from evenhand import cli

    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "qffl", "--space", "q=0.1,1", "--clients", "8", "--rounds", "2", "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert {trial["settings"]["q"] for trial in found["trials"]} == {0.1, 1}
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "train   evenhand run qffl:q=" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--space", "q"])
    assert end.value.code == 2
    assert "is not of the form NAME=VALUES" in capsys.readouterr().err


def test_tuning_is_found_at_the_top():
    assert eh.tune is tune
