"""What FedLF's public code makes of its baselines, each beside a small oracle; and that none of it is a default."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from test_rounds import agree, play, rounds
from torch.nn.functional import cross_entropy

import evenhand as eh
from evenhand.data import load
from evenhand.experiment import Experiment, prepare
from evenhand.models import build

SMALL = {"data": "digits", "partition": "pat:2", "clients": 4, "participation": 1.0, "model": "logistic", "seeds": 1}
OWNERS = ("afl", "fedfv", "fedfa", "fedprox", "ditto")


def test_it_is_off_unless_asked_for():
    for entry in eh.methods():
        assert entry.settings.get("fedlf_code", False) is False
    assert {entry.name for entry in eh.methods() if "fedlf_code" in entry.settings} == set(OWNERS)


@pytest.mark.parametrize("name", OWNERS)
def test_it_is_a_switch(name):
    with pytest.raises(eh.EvenhandError, match="fedlf_code='maybe'"):
        eh.method(name, fedlf_code="maybe")


@pytest.mark.parametrize("seed", range(3))
def test_afl_weighs_places(seed):
    state = theirs = None
    for index, clients, updates, losses, _ in rounds(seed, smallest=5, largest=5):
        given = {"losses": losses, "clients": clients, "round": index, "step": 0.1}
        out = eh.aggregate("afl", updates, **given, fedlf_code=True, state=state)
        expected, theirs = oracles.afl_by_place(updates, losses, theirs, 0.1)
        agree(out.update, expected)
        state = out.state
    assert state.rule_memo["clients"] == list(range(5))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("alpha", "tau"), [(0.1, 1), (0.1, 3), (0.5, 2), (0.0, 4)])
def test_fedfv_takes_the_present_for_absent(seed, alpha, tau):
    def oracle(updates, losses, clients, index, state, _):
        return oracles.fedfv_late_window(updates, losses, clients, index, state, alpha, tau)

    outcomes = play(seed, "fedfv", oracle, alpha=alpha, tau=tau, fedlf_code=True)
    assert max(out.diagnostics.ages.max() for out in outcomes) == tau - 1


@pytest.mark.parametrize("seed", range(3))
def test_fedfa_weighs_the_accurate_more_and_rolls(seed):
    def oracle(updates, _losses, clients, index, state, more):
        return oracles.fedfa_inverted(updates, more["accuracies"], clients, index, state, 0.5, 0.5, 0.9)

    def inputs(rng, count):
        return {"accuracies": rng.uniform(0.05, 1, count)}

    play(seed, "fedfa", oracle, inputs=inputs, gamma=0.9, fedlf_code=True, momentum="heavy-ball")
    out = eh.aggregate("fedfa", np.eye(2), accuracies=[0.9, 0.3], lr=0.1, fedlf_code=True)
    assert out.coefficients[0, 0] > out.coefficients[0, 1]
    for accuracies in ([0.0, 0.0], [1.0, 0.0]):
        assert np.isfinite(
            eh.aggregate("fedfa", np.eye(2), accuracies=accuracies, lr=0.1, fedlf_code=True).update
        ).all()


# ------------------------------------------------------------------------------------------------ in the simulator


class Clients:
    """The clients of a run, whose training is played again step by step."""

    def __init__(self, run):
        self.data = load("digits")
        self.run = run
        self.module = build("logistic", self.data.shape, self.data.classes, seed=0)
        self.start = [tensor.detach().clone() for tensor in self.module.parameters()]

    def samples(self, client):
        return torch.from_numpy(self.run.partition.train[client])

    def loss(self, model, samples):
        scores = self.data.inputs[samples].flatten(1) @ model[0].T + model[1]
        return cross_entropy(scores, self.data.targets[samples])

    def gradient(self, model, samples):
        model = [tensor.clone().requires_grad_() for tensor in model]
        return torch.autograd.grad(self.loss(model, samples), model)

    def agrees(self, model):
        for found, expected in zip(self.run.model.values(), model, strict=True):
            assert torch.allclose(found, expected, atol=1e-5)


def test_fedprox_makes_one_step_on_the_same_batch():
    (run,) = eh.simulate(**SMALL, method="fedprox:fedlf_code=true", batch_size=20, epochs=3, rounds=3, lr=0.5)
    clients = Clients(run)
    model, sizes = clients.start, torch.tensor(run.partition.train.sizes, dtype=torch.float32)
    for _ in range(3):
        steps = [clients.gradient(model, clients.samples(k)[:20]) for k in range(4)]
        means = [sum(w * step[i] for w, step in zip(sizes / sizes.sum(), steps, strict=True)) for i in (0, 1)]
        model = [tensor - 0.5 * mean for tensor, mean in zip(model, means, strict=True)]
    clients.agrees(model)


def test_ditto_has_no_personal_models_and_steps_twice():
    settings = {"batch_size": 0, "epochs": 3, "rounds": 2, "lr": 0.3, "lr_decay": 0.5}
    (run,) = eh.simulate(**SMALL, method="ditto:fedlf_code=true,lam=0.7,eta=0.25", **settings)
    assert run.personal is None
    clients = Clients(run)
    model = clients.start
    for index in range(2):
        rate, ends = 0.3 * 0.5**index, []
        for k in range(4):
            own = model
            for _ in range(3):
                found = clients.gradient(own, clients.samples(k))
                own = [tensor - rate * step for tensor, step in zip(own, found, strict=True)]
                own = [
                    tensor - rate * (step + 0.7 * (tensor - received))
                    for tensor, step, received in zip(own, found, model, strict=True)
                ]
            ends.append(own)
        means = [torch.stack([end[i] for end in ends]).mean(0) for i in (0, 1)]
        model = [tensor + 0.25 * (mean - tensor) for tensor, mean in zip(model, means, strict=True)]
    clients.agrees(model)


def test_fedfa_may_ask_for_accuracies_after_training():
    method = "fedfa:alpha=1,beta=0,client_momentum=0"
    (before,) = eh.simulate(**SMALL, method=method, batch_size=0, rounds=1, lr=0.5)
    (run,) = eh.simulate(**SMALL, method=f"{method},accuracies=trained", batch_size=0, rounds=1, lr=0.5)
    clients, right = Clients(run), []
    for k in range(4):
        samples = clients.samples(k)
        found = clients.gradient(clients.start, samples)
        own = [tensor - 0.5 * step for tensor, step in zip(clients.start, found, strict=True)]
        scores = clients.data.inputs[samples].flatten(1) @ own[0].T + own[1]
        right.append(float((scores.argmax(1) == clients.data.targets[samples]).double().mean()))
    expected = oracles.fedfa_weights(np.array(right), np.ones(4), 1.0, 0.0, constant=1e-6)
    assert np.allclose(np.ravel(run.rounds[0]["coefficients"]), expected)
    assert not np.allclose(np.ravel(before.rounds[0]["coefficients"]), expected)


def test_methods_that_train_otherwise_share_a_program():
    """As on a GPU: the plans of FedProx's one batch and of everybody else's epochs do not touch each other."""
    experiment = Experiment().with_settings({**SMALL, "batch_size": 20, "rounds": 2, "seeds": 2})
    named = ("fedavg", "fedprox:fedlf_code=true", "ditto:fedlf_code=true", "fedfa:accuracies=trained")
    methods = [eh.method(name) for name in named]
    apart, together = prepare(experiment, methods), prepare(experiment, methods)
    together.together = True
    apart.run()
    together.run()
    for one, other in zip(apart.replicas, together.replicas, strict=True):
        assert torch.allclose(one.model, other.model, atol=1e-5)
        assert np.allclose(one.evaluations[-1]["losses"], other.evaluations[-1]["losses"], atol=1e-4)
