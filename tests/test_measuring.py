"""What a recipe measures of a run, on runs whose records and evaluations are made up."""

from __future__ import annotations

import numpy as np
import pytest

import evenhand as eh
from evenhand.experiment import Experiment
from evenhand.measuring import check_measure, curve, curve_of, measured, needs_all
from evenhand.runs import Run


def made(means, rounds=()) -> Run:
    """Two clients whose accuracies lie 0.1 around the given means, evaluated every second round."""
    evaluations = [
        {
            "round": 2 * place,
            "accuracies": np.array([mean - 0.1, mean + 0.1]),
            "losses": np.array([3.0 - place, 1.0]),
            "pooled_accuracy": mean,
            "pooled_loss": 1.0,
        }
        for place, mean in enumerate(means)
    ]
    return Run(Experiment(), 0, ("a", "b"), np.array([5, 5]), list(rounds), evaluations)


def test_numbers_from_a_curve():
    run = made([0.1, 0.3, 0.5, 0.4])
    assert measured(run, "mean") == pytest.approx(0.4)
    assert measured(run, "over:mean") == pytest.approx(0.325)
    assert measured(run, "late:mean") == pytest.approx(0.4)
    assert measured(run, "left:mean") == pytest.approx(4.0)
    assert measured(run, "swing:mean") == pytest.approx(0.05)
    assert measured(run, "rounds_to:0.5") == 4
    assert measured(run, "rounds_to:0.6") == 7  # never: one more than were played
    assert measured(run, "worst:50") == pytest.approx(0.3)
    assert measured(run, "client:b") == pytest.approx(0.5)
    assert np.allclose(curve(run, "loss_of:highest"), [3, 2, 1, 0])
    assert np.allclose(curve(run, "loss_of:gap"), [2, 1, 0, -1])
    assert measured(run, "loss_of:lowest") == 1.0


def test_what_rounds_tell():
    rounds = [{"round": n, "fell": n / 10, "direction": 8.0 / 2**n, "conflicts": 1} for n in range(6)]
    rounds[3] = {"round": 3, "note": "nobody answered"}
    run = made([0.1, 0.2, 0.3, 0.4], rounds)
    assert measured(run, "fell") == pytest.approx((0 + 0.1 + 0.2 + 0.4 + 0.5) / 5)
    assert measured(run, "late:fell") == pytest.approx(0.5)
    assert measured(run, "left:direction") == pytest.approx(1 / 32)
    assert np.allclose(curve(run, "fell"), [np.nan, 0.05, 0.2, 0.45], equal_nan=True)
    assert np.isnan(measured(made([0.1, 0.2]), "fell"))


def test_falls_in_proportion_to_a_power_of_the_loss():
    before = np.array([1.0, 2.0, 3.0, 4.0])
    entry = {"round": 0, "losses": before, "losses_after": before - 0.1 * before**2}
    run = made([0.1, 0.2], [entry, {"round": 1}])
    assert measured(run, "fell_like:2") == pytest.approx(1.0)
    assert 0.9 < measured(run, "fell_like:1") < 1.0
    against = {"round": 0, "losses": before, "losses_after": before - 1.0 / before}
    assert measured(made([0.1, 0.2], [against]), "over:fell_like:1") < 0
    alike = {"round": 0, "losses": before, "losses_after": before - 1.0}
    assert np.isnan(measured(made([0.1, 0.2], [alike]), "fell_like:1"))


def test_a_run_keeps_the_losses_after_each_round():
    (run,) = eh.simulate(method="adafed", data="digits", clients=6, participation=1.0, rounds=3, batch_size=0)
    for one, following in zip(run.rounds, run.rounds[1:], strict=False):
        assert np.allclose(one["losses_after"], following["losses"], atol=1e-5)
    fell = np.mean(np.array(run.rounds[0]["losses_after"]) < np.array(run.rounds[0]["losses"]))
    assert run.rounds[0]["fell"] == fell


def test_group_fairness_of_each_attribute(tmp_path):
    rng = np.random.default_rng(0)
    words = "sex,region,x,y,client\n"
    for n in range(400):
        words += f"{'fm'[n % 2]},{'nsw'[n % 3]},{rng.normal():.4f},{int(rng.random() < 0.5)},{n % 4}\n"
    (tmp_path / "people.csv").write_text(words)
    (run,) = eh.simulate(
        method="fedavg",
        data=str(tmp_path / "people.csv"),
        data_options={"target": "y", "sensitive": "sex,region", "client_column": "client"},
        partition="natural",
        model="logistic",
        rounds=1,
    )
    assert measured(run, "dp:1") == measured(run, "dp:sex")
    assert measured(run, "dp:2") == measured(run, "dp:region")
    assert measured(run, "dp") == max(measured(run, "dp:1"), measured(run, "dp:2"))
    with pytest.raises(eh.EvenhandError, match="no sensitive attribute 3"):
        measured(run, "dp:3")


def test_names():
    assert curve_of("late:fell_like:1") == "fell_like:1"
    assert curve_of("rounds_to:0.4") == "mean"
    assert curve_of("sqrt(std_pp)") == "std_pp"
    assert needs_all("over:fell")
    assert needs_all("fell_like:2")
    assert not needs_all("late:direction")
    for good in ("mean", "over:worst:10", "dp:sex", "loss_of:gap", "sqrt(std_pp)", "layer_conflicts:2", "left:fell"):
        check_measure(good)
    for bad, said in (
        ("over:meen", "unknown measure 'meen'"),
        ("over:late:mean", "is a number, not a curve"),
        ("late:rounds_to:0.4", "is a number, not a curve"),
        ("rounds_to:soon", "needs an accuracy"),
        ("loss_of:middle", "needs 'highest', 'lowest' or 'gap'"),
        ("dp:", "unknown measure 'dp:'"),
        ("mean:3", "unknown measure 'mean:3'"),
    ):
        with pytest.raises(eh.EvenhandError, match=said):
            check_measure(bad)
