"""FedCorr: its parts from their definitions, its stages, and whole runs against one client after another in torch."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import nn
from torch.nn import functional

import evenhand as eh
from evenhand.checks import EvenhandError
from evenhand.engine.batches import mixed, plan
from evenhand.engine.checkpoint import restore, save
from evenhand.engine.correction import dimensions, upper
from evenhand.engine.graphs import Replayed
from evenhand.engine.training import Shape
from evenhand.experiment import Experiment, prepare
from evenhand.methods import method
from evenhand.models import build
from evenhand.running import simulate
from evenhand.streams import stream

SMALL = {"data": "digits", "clients": 6, "partition": "iid", "rounds": 20, "eval_every": 20, "lr": 0.1}
SMALL |= {"noise": "0.5,0.6", "sampling.participation": 0.5, "work.batch_size": 20, "work.epochs": 2, "device": "cpu"}
FEDCORR = "fedcorr:iterations=2"


def experiment(name=FEDCORR, **more) -> Experiment:
    return Experiment().with_settings({**SMALL, "method": method(name), **more})


# ------------------------------------------------------------------------------------------------------- its parts


def test_the_dimension_is_the_maximum_likelihood_estimate():
    rng = np.random.default_rng(0)
    points = rng.standard_normal((40, 3))
    expected = []
    for point in points:
        nearest = sorted(math.dist(point, other) for other in points)[1:8]
        mean = sum(math.log(distance / nearest[-1]) for distance in nearest) / 7
        expected.append(-1.0 / mean)
    np.testing.assert_allclose(dimensions(points, 7), expected, rtol=1e-4)


@pytest.mark.parametrize("true", [1, 2, 4])
def test_the_dimension_of_a_cloud_is_that_of_the_space_it_fills(true):
    flat = np.random.default_rng(1).random((2000, true))
    found = dimensions(flat @ np.eye(true, 6), 20)  # embedded in six dimensions
    assert np.median(found) == pytest.approx(true, rel=0.15)


def test_answers_that_are_all_alike_have_no_dimension():
    assert dimensions(np.ones((30, 4)), 20).tolist() == [0.0] * 30
    assert dimensions(np.ones((1, 4)), 20).tolist() == [0.0]


def test_two_groups_of_numbers_are_told_apart():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(1, 0.1, 20), rng.normal(3, 0.1, 10)])
    assert upper(values, seed=0).tolist() == [False] * 20 + [True] * 10
    assert not upper(np.full(5, 2.0), seed=0).any()
    assert not upper(np.array([1.0]), seed=0).any()
    assert not upper(np.array([1.0, np.nan]), seed=0).any()


# ------------------------------------------------------------------------------------------------------- its stages


@pytest.mark.parametrize("together", [1, 4, 6])
def test_every_stage_asks_whom_it_should(together):
    simulation = prepare(experiment(f"fedcorr:iterations=2,together={together},fine_tuning=0.25"))
    course = simulation.replicas[0].course
    simulation.run()
    rounds = simulation.replicas[0].rounds
    turns = -(-6 // together)
    stages = [entry["stage"] for entry in rounds]
    assert stages == sorted(stages)
    assert stages.count(1) == course.first == 2 * turns
    assert stages.count(2) == round(0.25 * (20 - 2 * turns))
    for start in (0, turns):
        asked = [client for entry in rounds[start : start + turns] for client in entry["asked"]]
        assert sorted(asked) == list(range(6))
    judged = rounds[course.first - 1]["correction"]
    levels = dict(zip(judged["noisy"], judged["levels"], strict=True))
    clean = {client for client in range(6) if levels.get(client, 0.0) <= 0.1}
    for entry in rounds[course.first : course.first + course.second]:
        assert set(entry["asked"]) <= clean
        assert len(entry["asked"]) == min(3, len(clean))
    usual = prepare(experiment("fedavg"))
    usual.run()
    assert [e["asked"] for e in rounds[-3:]] == [e["asked"] for e in usual.replicas[0].rounds[-3:]]


def test_where_nothing_is_corrected_and_nobody_is_pulled_it_is_fedavg():
    everyone = {"sampling.participation": 1.0, "rounds": 4}
    idle = "fedcorr:iterations=2,together=6,fine_tuning=0,beta=0,confidence=1,mixup=0"
    found, expected = (prepare(experiment(name, **everyone)) for name in (idle, "fedavg"))
    for simulation in (found, expected):
        simulation.run()
    assert torch.equal(found.replicas[0].model, expected.replicas[0].model)


def test_noisy_clients_are_found_their_labels_corrected_and_all_are_served_better():
    wanted = {**SMALL, "clients": 10, "rounds": 60, "eval_every": 60, "epochs": 5, "batch_size": 10}
    fedavg, fedcorr = (simulate(method=name, **wanted)[0] for name in ("fedavg", "fedcorr:iterations=3"))
    noise = fedcorr.partition.noise
    wrong = int((fedcorr.partition.labels != eh.data.load("digits").labels[fedcorr.partition.train.indices]).sum())
    corrected = [entry["correction"] for entry in fedcorr.rounds if "correction" in entry]
    assert len(corrected) == 4
    assert set(np.flatnonzero(noise > 0)) <= set(corrected[-1]["noisy"])
    assert corrected[-1]["wrong"] < wrong / 5
    assert fedcorr.accuracies.mean() > fedavg.accuracies.mean() + 0.1


# --------------------------------------------------------------------------- whole runs, one client after another


def answers(model: nn.Module, inputs: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return torch.softmax(model(inputs).double(), dim=1).numpy()


def code_lid(points: np.ndarray, k: int = 20) -> float:
    """The mean LID over samples, as the released code writes it."""
    found = []
    for point in points:
        near = np.sort(np.sqrt(((points - point) ** 2).sum(1)))[1 : k + 1]
        with np.errstate(divide="ignore"):
            found.append(-len(near) / (np.log(near / (near[-1] + 1e-6)).sum() + 1e-6))
    return float(np.mean(found))


def by_hand(chosen: Experiment, simulation):
    """FedCorr's Algorithm 1 with torch's own SGD; cohorts and batches are drawn as the simulator draws them."""
    settings, data, replica = chosen.method.objective, simulation.dataset, simulation.replicas[0]
    drawn, seed = replica.partition, replica.seed
    inputs, labels = data.inputs[drawn.train.indices], drawn.labels.copy()
    places = [np.arange(*drawn.train.offsets[client : client + 2]) for client in range(drawn.clients)]
    sizes = drawn.train.sizes
    shared = build(chosen.model, data.shape, data.classes, seed=seed)
    clock = 0

    def trained(asked, pulls):
        nonlocal shared, clock
        epochs = np.full(len(asked), float(chosen.work.epochs))
        rng = stream(seed, "batches", clock)
        steps = plan([places[k] for k in asked], epochs=epochs, batch_size=chosen.work.batch_size, rng=rng)
        steps, models = mixed(steps, settings.mixup, rng), []
        for row, client in enumerate(asked):
            model = copy.deepcopy(shared)
            mixing = zip(steps.partners[row], steps.blend[row, :, 0], strict=True)
            optimiser = torch.optim.SGD(model.parameters(), lr=chosen.work.lr, momentum=chosen.work.momentum)
            for samples, weights, (partners, lam) in zip(steps.indices[row], steps.weights[row], mixing, strict=True):
                used = samples[weights > 0]
                if not len(used):
                    continue
                optimiser.zero_grad()
                others = samples[partners[weights > 0]]
                assert sorted(others) == sorted(used)  # a permutation of the batch
                said = model(float(lam) * inputs[used] + (1 - float(lam)) * inputs[others])
                loss = float(lam) * functional.cross_entropy(said, torch.from_numpy(labels[used]))
                loss = loss + (1 - float(lam)) * functional.cross_entropy(said, torch.from_numpy(labels[others]))
                pairs = zip(model.parameters(), shared.parameters(), strict=True)
                distance = torch.stack([(own - theirs.detach()).square().sum() for own, theirs in pairs]).sum()
                if distance > 0:
                    loss = loss + pulls[client] * distance.sqrt()
                loss.backward()
                optimiser.step()
            models.append(model)
        share = sizes[asked] / sizes[asked].sum()
        shared = copy.deepcopy(shared)
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                parameter.copy_(sum(float(s) * m.get_parameter(name) for s, m in zip(share, models, strict=True)))
        clock += 1
        return models

    def high(values):
        mixture = GaussianMixture(n_components=2, random_state=seed).fit(np.reshape(values, (-1, 1)))
        return mixture.predict(np.reshape(values, (-1, 1))) != np.argsort(mixture.means_[:, 0])[0]

    lids, levels, noisy = np.zeros(drawn.clients), np.zeros(drawn.clients), []
    for iteration in range(settings.iterations):
        losses = np.zeros(len(labels))
        order = stream(seed, "correction", iteration).permutation(drawn.clients)
        for start in range(0, drawn.clients, settings.together):
            asked = np.sort(order[start : start + settings.together])
            for client, model in zip(asked, trained(asked, settings.beta * levels), strict=True):
                said = answers(model, inputs[places[client]])
                lids[client] += code_lid(said, settings.neighbours)
                losses[places[client]] = -np.log(said[np.arange(len(said)), labels[places[client]]])
        noisy, levels = np.flatnonzero(high(lids)), np.zeros(drawn.clients)
        for client in noisy:
            own = places[client]
            levels[client] = high(losses[own]).mean()
            said = answers(shared, inputs[own])
            worst = (-losses[own]).argsort()[: int(len(own) * levels[client] * settings.ratio)]
            for place in set(np.flatnonzero(said.max(1) > settings.confidence)) & set(worst):
                labels[own[place]] = said[place].argmax()
    left = chosen.rounds - clock
    tuning = round(settings.fine_tuning * left)
    clean = np.flatnonzero(levels <= settings.clean)
    for _ in range(tuning):
        count = min(3, len(clean))
        rng = stream(seed, "sampling", clock)
        places_of = np.sort(rng.choice(len(clean), count, replace=False, shuffle=False)) if count < len(clean) else None
        trained(clean if places_of is None else clean[places_of], np.zeros(drawn.clients))
    for client in noisy:
        said = answers(shared, inputs[places[client]])
        sure = said.max(1) > settings.confidence
        labels[places[client][sure]] = said.argmax(1)[sure]
    for _ in range(left - tuning):
        trained(chosen.sampling.draw(seed, clock, sizes), np.zeros(drawn.clients))
    return Shape.of(shared).flat(shared), labels, levels


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    "more",
    ["together=2,beta=1,ratio=0.8,confidence=0.4", "together=3,mixup=0,confidence=0.3,fine_tuning=0.2,clean=0.5"],
)
def test_a_run_is_the_papers_algorithm_client_by_client(more, momentum):
    """On a network without kinks, at which rounding would tip a unit over and make two runs part."""
    chosen = experiment(
        f"fedcorr:iterations=3,{more}", model="logistic", lr=0.05, rounds=26, **{"work.momentum": momentum}
    )
    simulation = prepare(chosen)
    model, labels, levels = by_hand(chosen, simulation)
    simulation.run()
    replica = simulation.replicas[0]
    assert (labels != replica.partition.labels).sum() > 20  # labels were corrected
    assert levels.max() > 0.2
    np.testing.assert_allclose(replica.memo["levels"], levels, atol=1e-12)
    np.testing.assert_array_equal(replica.memo["labels"], labels)
    assert torch.linalg.norm(replica.model - model) <= 1e-5 * torch.linalg.norm(model)


# ------------------------------------------------------------------------------------------- with everything else


@pytest.mark.parametrize("name", [FEDCORR, "fedcorr:iterations=2,mixup=0"])
def test_what_a_graph_would_replay_is_the_round(name):
    plain, replayed = (prepare(experiment(name)) for _ in range(2))
    replayed.worker.replayed = Replayed()
    replayed.worker.replayed.LIMIT = 0  # nothing is captured
    plain.run()
    replayed.run()
    assert torch.equal(plain.replicas[0].model, replayed.replicas[0].model)


def test_mixup_pairs_the_samples_of_a_batch():
    samples = [np.arange(23), np.arange(23, 30)]
    steps = plan(samples, epochs=np.ones(2), batch_size=10, rng=stream(0, "batches"))
    found = mixed(steps, 1.0, stream(1, "batches"))
    real = steps.weights > 0
    for row, step in np.argwhere(real.any(2)):
        count = int(real[row, step].sum())
        assert sorted(found.partners[row, step, :count]) == list(range(count))
    assert ((found.blend >= 0) & (found.blend <= 1)).all()
    wide = mixed(
        plan([np.arange(4000)], epochs=np.ones(1), batch_size=1, rng=stream(0, "batches")), 1.0, stream(2, "batches")
    )
    assert np.quantile(wide.blend, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.03)  # Beta(1, 1)


@pytest.mark.parametrize("program", ["batched", "sequential"])
def test_every_program_gives_the_same_run(program):
    found, expected = (prepare(experiment(model="logistic", program=kind)) for kind in (program, "feed-forward"))
    for simulation in (found, expected):
        simulation.run()
    torch.testing.assert_close(found.replicas[0].model, expected.replicas[0].model, rtol=0, atol=1e-5)


def test_any_rule_takes_over_in_the_third_stage():
    mixed = method("adafed", objective="correction:iterations=2")
    assert method(mixed.to_dict()) == mixed
    alone, both = (prepare(Experiment().with_settings({**SMALL, "method": one})) for one in (method(FEDCORR), mixed))
    start = alone.replicas[0].course.first + alone.replicas[0].course.second
    for simulation in (alone, both):
        simulation.run(until=start)
    assert torch.equal(alone.replicas[0].model, both.replicas[0].model)
    assert both.replicas[0].state is None
    for simulation in (alone, both):
        simulation.run()
    assert not torch.equal(alone.replicas[0].model, both.replicas[0].model)
    last = both.replicas[0].rounds[-1]
    assert np.sum(last["coefficients"]) != pytest.approx(1.0)  # AdaFed's direction, not a mean


@pytest.mark.parametrize("until", [4, 13, 17])
def test_a_run_goes_on_to_the_same_bits(until, tmp_path):
    chosen = Experiment().with_settings({**SMALL, "method": method("fedfv", objective="correction:iterations=2")})
    whole, half, rest = (prepare(chosen) for _ in range(3))
    whole.run()
    half.run(until=until)
    save(half, tmp_path / "half")
    restore(rest, tmp_path / "half")
    rest.run()
    assert torch.equal(whole.replicas[0].model, rest.replicas[0].model)
    np.testing.assert_array_equal(whole.replicas[0].memo["labels"], rest.replicas[0].memo["labels"])


def test_seeds_and_methods_together_give_what_each_gives_alone():
    wanted = experiment(model="logistic", seeds=[0, 3], **{"sampling.dropout": 0.3, "chunk": 4})
    several = [method("fedcorr:iterations=3,together=2,confidence=0.3"), method("fedavg"), method(FEDCORR)]
    together = prepare(wanted, several)
    together.together = True
    together.run()
    for replica in together.replicas:
        alone = prepare(wanted.with_settings({"method": replica.method, "seeds": [replica.seed]}))
        alone.run()
        torch.testing.assert_close(replica.model, alone.replicas[0].model, rtol=0, atol=1e-5)
        assert [e.get("stage") for e in replica.rounds] == [e.get("stage") for e in alone.replicas[0].rounds]


def test_clean_data_and_a_run_on_disk_are_no_trouble(tmp_path):
    chosen = experiment(noise=None)
    (run,) = simulate(chosen, out=tmp_path / "run")
    assert [entry["stage"] for entry in eh.load_runs(tmp_path / "run")[0].rounds] == [e["stage"] for e in run.rounds]


def test_what_cannot_be_is_refused():
    with pytest.raises(
        EvenhandError, match=r"takes 12 rounds .2 iterations over 6 clients, 1 a round., and there are 12"
    ):
        prepare(experiment(rounds=12))
    alone = Experiment().with_settings(
        {"data": "synthetic-groups", "method": method("cenfair", objective="correction")}
    )
    with pytest.raises(EvenhandError, match="no rounds of clients"):
        prepare(alone)
    for wrong in ("iterations=0", "together=0", "beta=-1", "confidence=2", "fine_tuning=1.5"):
        with pytest.raises(EvenhandError, match=wrong.partition("=")[0]):
            method(f"fedcorr:{wrong}")
