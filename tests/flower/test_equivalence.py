"""The same experiment gives the same model in the simulator and on Flower.

With clients trained one at a time (chunk=1) it is the same to the last bit. The simulator's usual program trains the
whole cohort at once, and adds in another order: up to TOLERANCE over these few rounds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")

import torch
from flowing import GROUPS, federated, small

from evenhand.checks import EvenhandError
from evenhand.engine.simulation import Simulation
from evenhand.experiment import prepare
from evenhand.flower import FairStrategy
from evenhand.methods import METHODS, method

TOLERANCE = 2e-6
FEDERATED = [name for name, entry in METHODS.items() if entry.training == "federated"]
LONE = [name for name, entry in METHODS.items() if entry.training != "federated"]
CHANGES = {
    **dict.fromkeys(("mfairfl", "fpfl", "fedfb", "fairfed", "fedavg-f"), GROUPS),
    "fedcorr": {"method": "fedcorr:iterations=2,together=2", "noise": "0.6,0.5", "rounds": 10},
}
MESSAGES = {  # a round, per client asked
    **{key: ["query.survey", "train"] for key in ("mfairfl", "fpfl", "fedfb")},
    "fedmdfg": ["train", "query.trial"],
}


def simulated(experiment, **changes) -> Simulation:
    found = prepare(replace(experiment, **changes))
    found.run()
    return found


def experiment_of(name):
    changes = dict(CHANGES.get(name, {}))
    return small(changes.pop("method", name), **changes)


@pytest.mark.parametrize("name", [*FEDERATED, "even:recall=learnt,turns=8"])
def test_every_method_gives_the_simulators_model_to_the_last_bit(name):
    experiment = experiment_of(name)
    strategy, _grid = federated(experiment)
    there = simulated(experiment, chunk=1).replicas[0]
    assert torch.equal(strategy.model, there.model)
    assert not torch.equal(strategy.model, prepare(experiment).replicas[0].model)
    for ours, theirs in zip(strategy.evaluations, there.evaluations, strict=True):
        assert ours["round"] == theirs["round"]
        np.testing.assert_array_equal(ours["accuracies"], theirs["accuracies"])
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-6)
        if "predicted" in theirs:
            np.testing.assert_array_equal(ours["predicted"], theirs["predicted"])
    for ours, theirs in zip(strategy.rounds, there.rounds, strict=True):
        assert ours["asked"] == theirs["asked"]
        assert ours["losses"] == theirs["losses"]
        assert ours["coefficients"] == theirs["coefficients"]
        assert ours.get("told") == theirs.get("told")


@pytest.mark.parametrize("name", ["even", "fedlf", "fedmdfg", "ditto", "mfairfl", "fedcka"])
def test_the_simulators_batched_program_agrees_up_to_rounding(name):
    experiment = experiment_of(name)
    strategy, _ = federated(experiment)
    there = simulated(experiment).replicas[0]
    torch.testing.assert_close(strategy.model, there.model, rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "fedmdfg", "mfairfl", "fairfed", "fedavg-f", "ditto"])
def test_a_method_uses_as_few_messages_as_it_can(name):
    experiment = experiment_of(name)
    strategy, grid = federated(experiment)
    asked = sum(len(record["asked"]) for record in strategy.rounds)
    assert asked > 0
    sent = [kind for kind in grid.sent if kind not in ("query.describe", "evaluate")]
    assert sorted(sent) == sorted(asked * MESSAGES.get(name, ["train"]))
    assert grid.sent.count("evaluate") == len(strategy.names) * len(strategy.evaluations)
    assert [entry["round"] for entry in strategy.evaluations] == [0, 2, experiment.rounds]


@pytest.mark.parametrize("name", LONE)
def test_a_method_without_a_federation_is_refused(name):
    with pytest.raises(EvenhandError, match="trains without a federation"):
        FairStrategy(name)


@pytest.mark.parametrize("name", ["fedprox:fedlf_code=true", "ditto:fedlf_code=true", "fedfa:accuracies=trained"])
def test_what_published_code_does_stays_in_the_simulator(name):
    with pytest.raises(EvenhandError, match="runs in the simulator alone"):
        FairStrategy(name)


def test_parts_mix_as_in_the_simulator():
    composed = method("adafed", gamma=1, server="fedadam", objective="proximal")
    experiment = small(composed)
    strategy, _ = federated(experiment)
    assert torch.equal(strategy.model, simulated(experiment, chunk=1).replicas[0].model)


@pytest.mark.parametrize(
    "settings",
    [
        {"work.batch_size": 0},
        {"work.epochs": 2, "work.momentum": 0.5, "work.weight_decay": 0.01, "work.lr_decay": 0.9},
        {"sampling.kind": "size", "partition": "sizes:lognormal"},
        {"noise": "0.5,0.5"},
        {"model": "logistic", "work.clip": 0.5},
        {"method.losses": "trained"},
    ],
    ids=",".join,
)
def test_every_kind_of_local_work_agrees(settings):
    experiment = small("qffl", **settings)
    strategy, _ = federated(experiment)
    assert torch.equal(strategy.model, simulated(experiment, chunk=1).replicas[0].model)


def test_a_stop_and_a_checkpoint_change_nothing(tmp_path):
    """Clients' own models too: Ditto's are on the nodes' disks."""
    from flowing import InProcessGrid, SiteStrategy, started

    from evenhand.flower import Deployment, site_client

    class Stop(Exception):
        pass

    deployment = Deployment(small("ditto"))
    nodes = [{"partition-id": client, "state-dir": str(tmp_path / str(client))} for client in range(6)]

    def played(stop_after=None, checkpoint=None):
        strategy = SiteStrategy(deployment, checkpoint=checkpoint)
        strategy.after_round = None if stop_after is None else lambda now: _stop(now, stop_after, Stop)
        strategy.start(InProcessGrid(site_client(deployment), nodes), started(deployment), num_rounds=4)
        return strategy

    whole = played()
    with pytest.raises(Stop):
        played(stop_after=2, checkpoint=tmp_path / "state")
    resumed = played(checkpoint=tmp_path / "state")
    assert torch.equal(resumed.model, whole.model)
    assert [record["round"] for record in resumed.rounds] == [0, 1, 2, 3]
    np.testing.assert_array_equal(resumed.evaluations[-1]["accuracies"], whole.evaluations[-1]["accuracies"])
    np.testing.assert_array_equal(resumed.evaluations[-1]["losses"], whole.evaluations[-1]["losses"])


def _stop(strategy, round, error):
    if strategy.round == round:
        raise error
