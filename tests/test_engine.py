"""The simulator: one batched program, its sequential twin, and the same numbers whichever way."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cohorts import equal_sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from evenhand.checks import EvenhandError, NoUsableClient
from evenhand.engine import worker
from evenhand.engine.batches import Batches, Cohort, Extents, join, packed, plan, plan_together, unpadded
from evenhand.engine.choice import choose_program
from evenhand.engine.graphs import Captured, Replayed
from evenhand.engine.programs import Batched, FeedForward, Sequential
from evenhand.engine.sampling import Sampling
from evenhand.engine.training import Columns, Local, LocalWork, Shape, pulling
from evenhand.experiment import Experiment, prepare
from evenhand.methods import method
from evenhand.models import build
from evenhand.running import simulate
from evenhand.streams import BLOCK, STREAMS, round_stream, stream

TOLERANCE = 2e-5  # relative to the models' length, after a round of local training in float32


def cohort_of(sizes: list[int], features: int = 12, classes: int = 4, seed: int = 0):
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    inputs = torch.from_numpy(rng.standard_normal((total, features))).float()
    targets = torch.from_numpy(rng.integers(0, classes, total))
    edges = np.cumsum([0, *sizes])
    return inputs, targets, [np.arange(a, b) for a, b in itertools.pairwise(edges)]


def steps_of(sizes, work: LocalWork, epochs=None):
    epochs = np.full(len(sizes), float(work.epochs)) if epochs is None else np.asarray(epochs, dtype=float)
    samples = cohort_of(sizes)[2]
    return plan(samples, epochs=epochs, batch_size=work.batch_size, rng=stream(3, "batches", 1))


CELLS = 6  # of the samples in the cohort, by number


def told_tables(sizes, classes=4):
    """What every client is told about each cell: what its probabilities count, and what its cross-entropy does."""
    rng = np.random.default_rng(5)
    return torch.from_numpy(rng.standard_normal((len(sizes), CELLS, classes + 1))).float()


def trained(program, module, sizes, work: LocalWork, *, momentum=0.0, pull=0.0, rates=None, epochs=None, sharp=0.0):
    """Updates, and losses and accuracies of the received model; sharp: told about cells, at that sharpness."""
    inputs, targets, _ = cohort_of(sizes)
    shape = Shape.of(module)
    batches = Batches.of(steps_of(sizes, work, epochs), torch.device("cpu"))

    every = [work.lr] * len(sizes) if rates is None else rates
    momenta, pulls = (own if isinstance(own, list) else [own] * len(sizes) for own in (momentum, pull))
    told = {"rates": every, "momentum": momenta, "sharpness": [sharp] * len(sizes)}
    told |= pulling(every, pulls, momenta, work)
    local = Local(program, shape, inputs, targets, work, torch.arange(len(targets)) % CELLS, CELLS)
    model = shape.flat(module).unsqueeze(0)
    tables = told_tables(sizes) if sharp else None
    columns = Columns(**{name: torch.tensor(own).view(-1, 1) for name, own in told.items() if any(own)}, tables=tables)
    updates, measured = local.round(model, batches, columns)
    return torch.cat([view.flatten(1) for view in shape.views(model - updates).values()], dim=1), measured


def by_hand(module, sizes, work: LocalWork, *, momentum=0.0, pull=0.0, epochs=None, sharp=0.0):
    """torch's own SGD on a copy of the module, client by client, on the planned batches."""
    inputs, targets, samples = cohort_of(sizes)
    steps = steps_of(sizes, work, epochs)
    rows, measured = [], []
    for client in range(len(sizes)):
        model = copy.deepcopy(module)
        own = samples[client]
        scores = model(inputs[own]).detach()
        right = (scores.argmax(1) == targets[own]).double().mean()
        measured.append(torch.stack([nn.functional.cross_entropy(scores, targets[own]).double(), right]))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        optimiser = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=momentum)
        for index, weights in zip(steps.indices[client], steps.weights[client], strict=True):
            real = weights > 0
            if not real.any():
                continue
            optimiser.zero_grad()
            scores = model(inputs[index[real]])
            losses = nn.functional.cross_entropy(scores, targets[index[real]], reduction="none")
            if sharp:
                told = told_tables(sizes)[client][index[real] % CELLS]
                losses = told[:, -1] * losses + (told[:, :-1] * torch.softmax(sharp * scores, dim=1)).sum(1)
            losses.mean().backward()
            for parameter, first in zip(model.parameters(), start, strict=True):
                parameter.grad += pull * (parameter.detach() - first) + work.weight_decay * parameter.detach()
            if work.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.clip)
            optimiser.step()
        rows.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    return torch.stack(rows), torch.stack(measured, dim=1)


SIZES = [23, 40, 7, 40]
WORKS = {
    "plain": (LocalWork(batch_size=8, lr=0.2), {}),
    "full batch": (LocalWork(batch_size=None, lr=0.3, epochs=3), {}),
    "epochs": (LocalWork(batch_size=16, epochs=2), {}),
    "momentum": (LocalWork(batch_size=8), {"momentum": 0.9}),
    "decay and clip": (LocalWork(batch_size=8, weight_decay=0.01, clip=0.5), {}),
    "proximal": (LocalWork(batch_size=8, lr=0.2), {"pull": 0.7}),
    "pulled half the way": (LocalWork(batch_size=8, lr=0.2), {"pull": 2.5}),
    "pulled further than that": (LocalWork(batch_size=8, lr=0.2), {"pull": 4.0}),
    "proximal with momentum": (LocalWork(batch_size=8), {"pull": 0.7, "momentum": 0.5}),
    "proximal with decay": (LocalWork(batch_size=8, weight_decay=0.01), {"pull": 0.7}),
    "stragglers": (LocalWork(batch_size=8, epochs=2), {"epochs": [2.0, 0.3, 1.0, 1.5]}),
    "stragglers with momentum": (LocalWork(batch_size=8, epochs=2), {"epochs": [2.0, 0.3, 1.0, 1.5], "momentum": 0.9}),
    "proximal stragglers": (LocalWork(batch_size=8, epochs=2), {"epochs": [2.0, 0.3, 1.0, 1.5], "pull": 0.7}),
    "told": (LocalWork(batch_size=8, lr=0.2), {"sharp": 1.0}),
    "told with momentum": (LocalWork(batch_size=8, lr=0.05), {"sharp": 3.0, "momentum": 0.5}),
}


@pytest.mark.parametrize("case", WORKS)
@pytest.mark.parametrize("kind", ["mlp", "logistic", "convolution"])
@pytest.mark.parametrize("padded", [1.0, math.inf])
def test_every_program_trains_as_torch_does(case, kind, padded, monkeypatch):
    monkeypatch.setattr("evenhand.engine.training.PADDED", padded)  # in patches, or with the padding
    work, more = WORKS[case]
    if kind == "convolution":
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(36, 4)
        )
        programs = [Batched(module), Sequential(module)]
    else:
        module = build(kind, (12,), 4, seed=1)
        programs = [FeedForward(module), Batched(module), Sequential(module)]
    expected, said = by_hand(module, SIZES, work, **more)
    for program in programs:
        found, measured = trained(program, module, SIZES, work, **more)
        torch.testing.assert_close(measured, said, rtol=1e-5, atol=1e-6)
        assert torch.linalg.norm(found - expected) <= TOLERANCE * torch.linalg.norm(expected), program.name


def test_no_two_purposes_share_their_random_numbers():
    assert len(set(STREAMS.values())) == len(STREAMS)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.integers(0, 40), st.integers(0, 2**33)),
    st.sampled_from(sorted(STREAMS)),
    st.one_of(st.integers(0, 3 * BLOCK), st.integers(0, 2**33)),
)
def test_streams_of_rounds_are_the_same_seeded_together(seed, name, index):
    expected, found = stream(seed, name, index), round_stream(seed, name, index)
    assert found.random(3).tolist() == expected.random(3).tolist()
    assert found.permutation(9).tolist() == expected.permutation(9).tolist()


def test_streams_of_rounds_go_up_to_the_edges_of_a_word():
    for number in (0, BLOCK - 1, BLOCK, 2**32 - 1, 2**32):
        assert round_stream(number, "batches", number).random() == stream(number, "batches", number).random()
    with pytest.raises(ValueError, match="non-negative"):
        round_stream(-1, "batches", 0)


def test_each_client_can_have_a_learning_rate_of_its_own():
    module, work = build("mlp", (12,), 4, seed=1), LocalWork(batch_size=8)
    together, _ = trained(FeedForward(module), module, SIZES, work, rates=[0.1, 0.2, 0.3, 0.05])
    for client, rate in enumerate([0.1, 0.2, 0.3, 0.05]):
        alone = by_hand(module, SIZES, LocalWork(batch_size=8, lr=rate))[0][client]
        torch.testing.assert_close(together[client], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("momenta", [[0.9, 0.0, 0.5, 0.0], [0.9, 0.4, 0.5, 0.0]])  # of nobody who is pulled; of one
def test_some_clients_can_have_momentum_and_others_a_pull(momenta):
    module, work, pulls = build("mlp", (12,), 4, seed=1), LocalWork(batch_size=8, epochs=2), [0.0, 0.7, 0.0, 2.0]
    assert list(pulling([work.lr] * 4, pulls, momenta, work)) == ["pull" if momenta[1] else "back"]
    for program in (FeedForward(module), Batched(module)):
        together, _ = trained(program, module, SIZES, work, momentum=momenta, pull=pulls)
        for client, (momentum, pull) in enumerate(zip(momenta, pulls, strict=True)):
            alone = by_hand(module, SIZES, work, momentum=momentum, pull=pull)[0][client]
            torch.testing.assert_close(together[client], alone, rtol=1e-3, atol=1e-5)


def test_feed_forward_networks_are_recognised_and_others_are_not():
    assert choose_program(build("mlp", (12,), 4)).name == "feed-forward"
    assert choose_program(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))).name == "batched"
    assert choose_program(nn.Sequential(nn.Linear(3, 3), nn.Flatten(), nn.Linear(3, 2))).name == "batched"
    small = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    large = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(1000, 500))
    assert [choose_program(module).name for module in (small, large)] == ["batched", "sequential"]
    cuda = torch.device("cuda")
    assert [choose_program(module, device=cuda).name for module in (small, large)] == ["sequential"] * 2
    assert choose_program(large, "batched").name == "batched"
    with pytest.raises(EvenhandError, match="Flatten, Linear and ReLU"):
        choose_program(nn.Linear(3, 2), "feed-forward")
    with pytest.raises(EvenhandError, match="needs a CUDA GPU"):
        choose_program(build("mlp", (12,), 4), "fused", torch.device("cpu"))
    with pytest.raises(EvenhandError, match="pooled convolutions"):
        choose_program(small, "fused")


def test_a_model_with_buffers_is_refused_with_a_way_out():
    with pytest.raises(EvenhandError, match="GroupNorm"):
        Shape.of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


@pytest.mark.parametrize("batch_size", [None, 1, 7, 100])
def test_a_plan_shows_every_sample_once_an_epoch(batch_size):
    _, _, samples = cohort_of(SIZES)
    steps = plan(samples, epochs=np.full(4, 2.0), batch_size=batch_size, rng=stream(0, "batches"))
    for client, own in enumerate(samples):
        real = steps.weights[client] > 0
        shown = steps.indices[client][real]
        assert sorted(shown.tolist()) == sorted(own.tolist() * 2)
        counted = steps.shares[client] > 0
        assert sorted(steps.indices[client, : counted.shape[0]][counted].tolist()) == own.tolist()
        assert steps.shares[client].sum() == pytest.approx(1.0)
        sums = steps.weights[client].sum(axis=1)
        np.testing.assert_allclose(sums[sums > 0], 1.0, rtol=1e-6)  # a batch's loss is its mean


@pytest.mark.parametrize("case", WORKS)
@pytest.mark.parametrize("program", [FeedForward, Batched, Sequential])
def test_what_rounds_of_equal_clients_share_is_not_written_to(case, program):
    work, options = WORKS[case]
    module = build("mlp", (12,), 4, seed=1)
    before = steps_of(SIZES, work, options.get("epochs"))
    kept = [before.weights.copy(), before.shares.copy()]
    trained(program(module), module, SIZES, work, **options)
    after = steps_of(SIZES, work, options.get("epochs"))
    assert after.shares is before.shares
    for one, other in zip(kept, (after.weights, after.shares), strict=True):
        np.testing.assert_array_equal(one, other)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.sampled_from([None, 1, 7, 16]),
    st.floats(0.1, 3.0),
    st.integers(0, 2**31),
)
def test_patches_hold_every_sample_once_and_little_else(sizes, batch_size, epochs, seed):
    managed = np.random.default_rng(seed).uniform(0.05, epochs, len(sizes))
    samples = cohort_of(sizes)[2]
    steps = plan(samples, epochs=managed, batch_size=batch_size, rng=stream(0, "batches"))
    batches = Batches.of(steps, torch.device("cpu"))
    seen = torch.zeros_like(batches.weights)
    for patches in unpadded(Extents.of(batches.weights[:, : batches.steps])):
        assert all(set(after.rows) <= set(before.rows) for before, after in itertools.pairwise(patches))
        assert [patch.steps.start for patch in patches] == [0, *(patch.steps.stop for patch in patches[:-1])]
        for patch in patches:
            own, rows = batches.only(patch), torch.tensor(patch.rows)
            assert own.weights.shape == (len(rows), own.steps, patch.width)
            assert (own.weights[:, :, 0] > 0).all()  # every row moves at every step
            assert torch.equal(own.indices, batches.indices[rows, patch.steps, : patch.width])
            widths = (batches.weights[rows] > 0).sum(2).amax(1)
            assert widths.max() - widths.min() <= max(4, 0.05 * widths.max())
            seen[rows, patch.steps, : patch.width] += own.weights
    assert torch.equal(seen, batches.weights)


def test_joined_plans_keep_each_cohort_as_it_was():
    _, _, samples = cohort_of(SIZES)
    one = plan(samples[:2], epochs=np.ones(2), batch_size=8, rng=stream(0, "batches"))
    two = plan(samples[2:], epochs=np.ones(2), batch_size=5, rng=stream(1, "batches"))
    both = join([one, two])
    mine = both.indices[2:, : two.indices.shape[1], :5]
    np.testing.assert_array_equal(mine[two.weights > 0], two.indices[two.weights > 0])
    for name in ("weights", "shares"):
        assert getattr(both, name)[:2].sum() == pytest.approx(getattr(one, name).sum())
        assert getattr(both, name)[2:].sum() == pytest.approx(getattr(two, name).sum())


# --------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("batch_size", [1, 7, 16, 50, None])
@pytest.mark.parametrize("epochs", [1.0, 2.0, 0.4, None])
def test_plans_made_together_are_those_made_one_by_one(batch_size, epochs):
    rng = np.random.default_rng(1)
    sizes = [[30, 4, 17], [5, 6], [], [40], [33, 33, 1, 12]]
    samples = [[rng.integers(0, 1000, size) for size in cohort] for cohort in sizes]
    managed = [np.full(len(own), epochs) if epochs else rng.uniform(0.1, 3.0, len(own)) for own in sizes]

    def cohorts():
        return [
            Cohort(*given, stream(seed, "batches")) for seed, given in enumerate(zip(samples, managed, strict=True))
        ]

    together = plan_together(cohorts(), batch_size)
    alone = [plan(one.samples, epochs=one.epochs, batch_size=batch_size, rng=one.rng) for one in cohorts()]
    expected = join(alone)
    assert together.steps == expected.steps
    for name in ("indices", "weights", "shares"):
        np.testing.assert_array_equal(getattr(together, name), getattr(expected, name))
    moving = [one.weights[:, : one.steps].any(axis=2).all() for one in (together, *alone)]
    assert [Batches.of(one, torch.device("cpu")).steady for one in (together, *alone)] == moving


def test_batches_share_what_is_the_same_in_the_last_round():
    rng, device = np.random.default_rng(0), torch.device("cpu")

    def made(*sizes):
        samples = [rng.integers(0, 1000, size) for size in sizes]
        return plan(samples, epochs=np.ones(len(sizes)), batch_size=4, rng=rng)

    first, alike, other = made(8, 10), made(8, 10), made(10, 8)
    last = first, Batches.of(first, device)
    found = Batches.of(alike, device, last)
    assert found.weights is last[1].weights
    assert found.shares is last[1].shares
    np.testing.assert_array_equal(found.indices.numpy(), alike.indices)
    changed = Batches.of(other, device, last)
    for name in ("indices", "weights", "shares"):
        np.testing.assert_array_equal(getattr(changed, name).numpy(), getattr(other, name))


def test_a_graph_is_given_again_only_what_has_changed():
    kept = Captured(None, {"x": torch.zeros(3)}, ())
    given = torch.ones(3)
    assert kept.takes("x", given)
    assert not kept.takes("x", given)
    given += 1.0
    assert kept.takes("x", given)
    assert kept.takes("x", torch.ones(3))
    assert kept.takes("x", given)
    assert not kept.takes("x", kept.inputs["x"])
    changing = Captured(None, kept.inputs, (kept.inputs["x"],))  # what the graph itself writes over
    assert changing.takes("x", given)
    assert changing.takes("x", given)
    assert not changing.takes("x", kept.inputs["x"])


def test_tensors_of_several_kinds_travel_in_one_piece():
    given = {
        "indices": torch.arange(30).view(2, 3, 5),
        "weights": torch.rand(2, 3, 1),
        "nothing": torch.empty(0, 3),
        "more": torch.arange(7),
    }
    found = packed(given, torch.device("cpu"))
    assert list(found) == list(given)
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


def test_sampling_draws_the_same_clients_for_the_same_seed_and_round():
    sizes = np.arange(1, 101)
    draw = Sampling(participation=0.1)
    np.testing.assert_array_equal(draw.draw(1, 5, sizes), draw.draw(1, 5, sizes))
    assert len(draw.draw(1, 5, sizes)) == 10
    assert not np.array_equal(draw.draw(1, 5, sizes), draw.draw(1, 6, sizes))
    assert not np.array_equal(draw.draw(1, 5, sizes), draw.draw(2, 5, sizes))


def test_sampling_by_size_prefers_large_clients():
    sizes = np.array([1] * 50 + [99] * 50)
    drawn = np.concatenate([Sampling(participation=0.1, kind="size").draw(0, t, sizes) for t in range(50)])
    assert (drawn >= 50).mean() > 0.95


def test_availability_and_dropout_thin_the_cohort():
    sizes = np.full(200, 10)
    few = [len(Sampling(participation=1.0, availability=0.3).draw(0, t, sizes)) for t in range(30)]
    assert 40 < np.mean(few) < 80
    failing = Sampling(participation=0.5, dropout=0.4)
    lost = [failing.failed(0, t, failing.draw(0, t, sizes)).mean() for t in range(30)]
    assert 0.3 < np.mean(lost) < 0.5
    scheduled = Sampling(participation=1.0, drop={"3": [7, 8]})
    assert scheduled.failed(0, 3, np.arange(10)).tolist() == [False] * 7 + [True, True, False]
    assert not scheduled.failed(0, 4, np.arange(10)).any()


def test_a_cohort_larger_than_the_population_is_refused():
    with pytest.raises(EvenhandError, match="more than the 5"):
        Sampling(cohort=6).draw(0, 0, np.ones(5))


# --------------------------------------------------------------------------------------------------------- whole runs

SMALL = {"data": "digits", "clients": 12, "rounds": 8, "eval_every": 4, "work.batch_size": 16}


def finals(runs):
    return [torch.cat([tensor.reshape(-1) for tensor in run.model.values()]) for run in runs]


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "fedfa", "afl", "fedmdfg", "mfairfl:measure=off", "fedprox"])
def test_the_same_experiment_gives_the_same_numbers(name):
    one, two = (simulate(method=name, **SMALL) for _ in range(2))
    assert torch.equal(finals(one)[0], finals(two)[0])
    np.testing.assert_array_equal(one[0].accuracies, two[0].accuracies)
    assert one[0].rounds[-1]["losses"] == two[0].rounds[-1]["losses"]


@pytest.mark.parametrize("name", ["fedavg", "even", "fedfv"])
def test_replicas_run_together_give_what_each_gives_alone(name):
    together = simulate(method=name, **SMALL, seeds=[0, 5, 9])
    for run in together:
        (alone,) = simulate(method=name, **SMALL, seeds=[run.seed])
        assert [entry["asked"] for entry in run.rounds] == [entry["asked"] for entry in alone.rounds]
        found, expected = finals([run])[0], finals([alone])[0]
        assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def test_methods_of_a_comparison_share_clients_batches_and_start():
    fedavg, even = (simulate(method=name, **SMALL)[0] for name in ("fedavg", "even"))
    assert [entry["asked"] for entry in fedavg.rounds] == [entry["asked"] for entry in even.rounds]
    assert fedavg.rounds[0]["losses"] == even.rounds[0]["losses"]
    assert fedavg.evaluations[0]["pooled_accuracy"] == even.evaluations[0]["pooled_accuracy"]


def test_every_client_is_evaluated_and_every_round_recorded():
    (run,) = simulate(method="fedfv", **SMALL)
    assert [entry["round"] for entry in run.evaluations] == [0, 4, 8]
    assert all(len(entry["accuracies"]) == 12 for entry in run.evaluations)
    for entry in run.rounds:
        assert len(entry["losses"]) == len(entry["asked"])
        assert 0.0 <= entry["fell"] <= 1.0
        assert entry["bytes_up"] > 0
        assert len(entry["layer_conflicts"]) == 3
    counts = run.partition.test.sizes
    pooled = np.average(run.accuracies, weights=counts)
    assert run.evaluations[-1]["pooled_accuracy"] == pytest.approx(pooled)


def test_clients_that_fail_in_mid_round_are_left_out():
    (run,) = simulate(method="fedavg", **SMALL, **{"sampling.participation": 0.5, "sampling.dropout": 0.5})
    lost = [entry["lost"] for entry in run.rounds]
    assert any(lost)
    for entry in run.rounds:
        assert len(entry.get("losses", [])) == len(entry["asked"]) - len(entry["lost"])


def test_a_round_in_which_nobody_answers_leaves_the_model():
    everyone = list(range(12))
    (run,) = simulate(
        method="fedavg", **{**SMALL, "rounds": 1, "sampling": {"participation": 1.0, "drop": {"0": everyone}}}
    )
    assert run.rounds[0]["note"].startswith("no client answered")
    assert run.evaluations[0]["pooled_accuracy"] == run.evaluations[-1]["pooled_accuracy"]


def test_an_experiment_survives_the_round_trip_through_toml(tmp_path):
    from evenhand.experiment import load_toml, to_toml

    experiment = Experiment().with_settings(
        {"method": "fedfv:alpha=0.2", "work.lr": 0.05, "rounds": 7, "sampling.drop": {"3": [1, 2]}, "seeds": [3, 4]}
    )
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(experiment.to_dict()))
    assert load_toml(path) == experiment


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"roundz": 3}, "did you mean 'rounds'"),
        ({"work.lrr": 0.1}, "did you mean 'lr'"),
        ({"method.alfa": 0.1, "method": "fedfv"}, "did you mean 'alpha'"),
        ({"rounds": 0}, "rounds=0"),
        ({"seeds": [1, 1]}, "different"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_a_wrong_setting_is_named(settings, said):
    with pytest.raises(EvenhandError, match=said):
        simulate(**{**SMALL, **settings})


# ------------------------------------------------------------------------------ personal models, chunks, resuming


def simulation_of(name: str, chunk: int | None = None, rounds: int = 6, equal: bool = False, **settings):
    from evenhand.engine.simulation import Simulation
    from evenhand.experiment import prepare
    from evenhand.methods import method

    experiment = Experiment().with_settings({**SMALL, "rounds": rounds, **settings, "method": method(name)})
    made = prepare(experiment, redraw=equal_sizes if equal else None)
    limited = replace(made.settings, chunk=chunk)
    return Simulation(made.dataset, made.module, made.replicas, limited, made.device)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_a_cohort_trained_in_chunks_gives_the_same_models(name):
    whole, pieces = simulation_of(name), simulation_of(name, chunk=1)
    whole.run()
    pieces.run()
    found, expected = pieces.replicas[0].model, whole.replicas[0].model
    assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def test_ditto_trains_a_personal_model_beside_the_shared_one():
    ditto, fedavg = simulation_of("ditto"), simulation_of("fedavg:weights=uniform")
    ditto.run()
    fedavg.run()
    torch.testing.assert_close(
        ditto.replicas[0].model, fedavg.replicas[0].model
    )  # the shared model knows nothing of them
    personal = ditto.replicas[0].personal
    assert personal.shape[0] == 12
    asked = {client for entry in ditto.replicas[0].rounds for client in entry["asked"]}
    start = simulation_of("ditto").replicas[0].model
    for client in range(12):
        moved = not torch.equal(personal[client], start)
        assert moved == (client in asked)
    assert ditto.replicas[0].evaluations[-1]["pooled_accuracy"] > fedavg.replicas[0].evaluations[-1]["pooled_accuracy"]


def test_dittos_first_round_is_proximal_training_towards_the_received_model():
    personal, proximal = simulation_of("ditto:lam=0.7", rounds=1), simulation_of("fedprox:mu=0.7", rounds=1)
    personal.run()
    proximal.run()
    replica = personal.replicas[0]
    asked = replica.rounds[0]["asked"]
    sizes = replica.partition.train.sizes[asked].astype(float)
    mean = torch.from_numpy(sizes / sizes.sum()).float() @ replica.personal[asked]
    torch.testing.assert_close(mean, proximal.replicas[0].model, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "ditto", "afl", "fedfa", "even", "even:recall=learnt", "fedadam"])
def test_a_simulation_continues_from_a_checkpoint_to_the_same_bits(name, tmp_path):
    from evenhand.engine.checkpoint import restore, save

    through = simulation_of(name)
    through.run()
    stopped = simulation_of(name)
    stopped.run(until=3)
    save(stopped, tmp_path / "checkpoint")
    continued = simulation_of(name)
    restore(continued, tmp_path / "checkpoint")
    assert continued.round == 3
    continued.run()
    assert torch.equal(continued.replicas[0].model, through.replicas[0].model)
    for found, expected in zip(continued.replicas[0].evaluations, through.replicas[0].evaluations, strict=True):
        np.testing.assert_array_equal(found["accuracies"], expected["accuracies"])
    strip = [{key: value for key, value in entry.items() if key != "seconds"} for entry in continued.replicas[0].rounds]
    assert strip == [
        {key: value for key, value in entry.items() if key != "seconds"} for entry in through.replicas[0].rounds
    ]


def test_a_checkpoint_of_another_experiment_is_refused(tmp_path):
    from evenhand.engine.checkpoint import restore, save

    path = tmp_path / "checkpoint"
    save(simulation_of("fedavg"), path)
    with pytest.raises(EvenhandError, match="another seed, method or partition"):
        restore(simulation_of("fedlf"), path)
    with pytest.raises(EvenhandError, match="another seed, method or partition"):
        restore(simulation_of("fedavg", seeds=[4]), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EvenhandError, match="truncated or corrupt"):
        restore(simulation_of("fedavg"), path)


# ------------------------------------------------------------------------------------------------ frozen parameters


class HalfFrozen(nn.Sequential):
    """A user's network whose first layer was trained elsewhere."""

    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(shape)), 8), nn.ReLU(), nn.Linear(8, classes))
        for parameter in self[1].parameters():
            parameter.requires_grad_(False)


class Loaded(HalfFrozen):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        for parameter in self[1].parameters():
            parameter.fill_(0.01)


@pytest.mark.parametrize("program", ["auto", "sequential"])
def test_frozen_parameters_stay_as_they_are(program):
    run, _ = simulate(method="fedlf", model=f"{__name__}:Loaded", **SMALL, program=program, seeds=[0, 1])
    assert list(run.model) == ["3.weight", "3.bias", "1.weight", "1.bias"]
    assert (run.model["1.weight"] == 0.01).all()
    assert len(run.rounds[0]["layer_conflicts"]) == 1
    assert run.rounds[0]["bytes_up"] < 8 * (8 * 10 + 10) * 4
    with pytest.raises(EvenhandError, match=r"frozen parameter '1.weight' differs from seed to seed"):
        simulate(method="fedlf", model=f"{__name__}:HalfFrozen", **SMALL, seeds=[0, 1])


def test_a_model_that_is_all_frozen_is_refused():
    module = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(EvenhandError, match="no parameter to train"):
        Shape.of(module)


# --------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("name", ["fedavg", "fedfv", "fedfa"])
def test_measuring_less_changes_no_model(name):
    everything, losses, needed = (
        simulate(method=name, **SMALL, measure=kind)[0] for kind in ("all", "losses", "needed")
    )
    for run in (losses, needed):
        assert torch.equal(finals([run])[0], finals([everything])[0])
        assert not any("fell" in entry for entry in run.rounds)
        assert all(entry["answered"] == len(entry["asked"]) for entry in run.rounds)
    assert losses.rounds[-1]["losses"] == everything.rounds[-1]["losses"]
    assert bool(needed.rounds[-1]["losses"]) == (name != "fedavg")  # the others cannot do without


def test_an_unknown_measure_is_refused():
    with pytest.raises(EvenhandError, match="measure='most'"):
        simulate(**SMALL, measure="most")


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "ditto"])
def test_a_round_in_which_nobody_can_be_reached_leaves_the_model(name):
    settings = {**SMALL, "clients": 3, "sampling.availability": 0.15, "sampling.participation": 1.0}
    (run,) = simulate(method=name, **settings)
    alone = [entry for entry in run.rounds if not entry["asked"]]
    assert 0 < len(alone) < 8
    assert all(entry["note"] == "no client answered: the model stays" for entry in alone)


@pytest.mark.parametrize("name", ["fedavg", "even", "fedprox", "fedmdfg", "fedcka"])
def test_what_a_graph_would_replay_is_the_round(name):
    """Graphs need a GPU; the work they capture is the same here."""
    plain, replayed = simulation_of(name), simulation_of(name)
    replayed.worker.replayed = Replayed()
    replayed.worker.replayed.LIMIT = 0  # nothing is captured
    plain.run()
    replayed.run()
    assert torch.equal(plain.replicas[0].model, replayed.replicas[0].model)
    assert plain.replicas[0].rounds[-1]["fell"] == replayed.replicas[0].rounds[-1]["fell"]


@pytest.mark.parametrize(("limit", "room", "kept"), [(16, 0.15, 2), (3, 0.9, 3), (16, 0.0, 1), (0, 0.9, 0)])
def test_graphs_are_limited_in_number_and_in_memory(limit, room, kept, monkeypatch):
    """Each keeps a tenth of the memory here."""
    replayed, shapes = Replayed(), range(1, 7)
    replayed.LIMIT, replayed.ROOM = limit, room

    def capture(work, inputs):
        replayed.bytes += 100
        return Captured(SimpleNamespace(replay=lambda: None), {name: own.clone() for name, own in inputs.items()}, ())

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(replayed, "_capture", capture)
    found = [replayed("work", lambda x: (x + 1,), {"x": torch.ones(count)}) for count in shapes]
    assert len(replayed.captured) == kept
    assert [len(outputs) for outputs in found] == [0] * kept + [1] * (6 - kept)  # what is not captured is done


@pytest.mark.parametrize(
    ("epochs", "name"),
    [
        *itertools.product([1, 3], ["fedavg", "even", "fedprox", "fedfa:client_momentum=0.9", "ditto"]),
        (1, "fedcka"),  # whose steps take long
    ],
)
def test_long_rounds_are_played_in_stretches(name, epochs, monkeypatch):
    settings = {"partition": "dir:0.5", "work.epochs": epochs, "work.batch_size": 4, "work.lr": 0.01, "seeds": [0, 1]}
    plain, stretched = simulation_of(name, **settings), simulation_of(name, **settings)
    monkeypatch.setattr(worker, "LONGEST", 16)
    stretched.worker.replayed, stretched.together = Replayed(), True
    stretched.worker.replayed.LIMIT = 0
    assert stretched.preparation.uneven
    plain.run()
    stretched.run()
    for one, other in zip(plain.replicas, stretched.replicas, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-3, atol=1e-5)
        assert one.rounds[-1]["losses"] == pytest.approx(other.rounds[-1]["losses"], rel=1e-3)


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
@pytest.mark.parametrize(
    "name", ["fedavg", "even", "fedprox", "fedfa:client_momentum=0.9", "ditto", "fedmdfg", "fedcka"]
)
@pytest.mark.parametrize("settings", [{"partition": "dir:0.3"}, {"partition": "dir:0.3", "work.epochs": 2}])
def test_who_is_done_leaves_the_program(name, seeds, settings, monkeypatch):
    settings = {**settings, "work.batch_size": 4, "work.lr": 0.01, "seeds": seeds, "participation": 0.6, "rounds": 3}
    plain, shrinking = simulation_of(name, **settings), simulation_of(name, **settings)
    shrinking.worker.replayed, shrinking.worker.heavy, shrinking.together = Overwritten(), True, True
    trained, counts = shrinking.local._train, []
    monkeypatch.setattr(type(plain.local), "_uneven", lambda *given: False)
    plain.run()
    monkeypatch.setattr(type(plain.local), "_train", lambda *g: counts.append(len(g[1])) or trained(*g[1:]))
    shrinking.run()
    assert len(set(counts)) > 2
    assert min(counts) < max(counts) / 2
    for one, other in zip(plain.replicas, shrinking.replicas, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-3, atol=1e-5)
        assert one.rounds[-1]["losses"] == pytest.approx(other.rounds[-1]["losses"], rel=1e-3)
        if one.personal is not None:
            torch.testing.assert_close(one.personal, other.personal, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mfairfl", "fpfl", "indfair", "cenfair"])
def test_what_is_followed_goes_on_from_stretch_to_stretch(name, monkeypatch):
    settings = {**GROUPED, "work.batch_size": 4, "work.lr": 0.1, "work.epochs": 2, "rounds": 2, "seeds": [0, 1]}
    plain, stretched = simulation_of(name, **settings), simulation_of(name, **settings)
    monkeypatch.setattr(worker, "LONGEST", 16)
    stretched.worker.replayed, stretched.together = Replayed(), True
    stretched.worker.replayed.LIMIT = 0
    trained, lengths = stretched.local._train, []
    monkeypatch.setattr(type(stretched.local), "_train", lambda *g: lengths.append(g[3].steps) or trained(*g[1:]))
    stretched.run()
    assert set(lengths) == {16}
    monkeypatch.undo()
    plain.run()
    for one, other in zip(plain.replicas, stretched.replicas, strict=True):
        both = (one.model, other.model) if one.personal is None else (one.personal, other.personal)
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------- all replicas at once, rounds begun before the last is over

GROUPED = {"data": "synthetic-groups", "clients": None, "participation": 1.0, "model": "logistic"}
NOISY = {"noise": "0.6,0.5", "model": "logistic", "rounds": 9}
FEDCORR = "fedcorr:iterations=2,together=6,confidence=0.3"
MANY = {"participation": 0.4}
RUNS = [
    *((name, MANY) for name in ("fedavg", "adafed", "fedfv", "fedlf", "even", "fedmdfg", "ditto", "afl", "fedcka")),
    *((name, {**MANY, "sampling.dropout": 0.4}) for name in ("fedavg", "fedlf", "even", "fedmdfg", "ditto")),
    *((name, {**MANY, "sampling.availability": 0.2}) for name in ("fedavg", "even")),
    *((name, {**MANY, "measure": "needed"}) for name in ("fedavg", "even")),
    *((name, {**MANY, "chunk": 2}) for name in ("even", "fedmdfg")),
    *((name, GROUPED) for name in ("mfairfl", "fairfed", "indfair", "cenfair")),
    *((name, NOISY) for name in ("fedavg", FEDCORR)),
    ("qffl:q=1,losses=trained", MANY),
    ("fedadam", {**MANY, "partition": "dir:0.3", "work.epochs": 2, "sampling.stragglers": 0.5}),
]


class Overwritten(Replayed):
    """As graphs do: the outputs of work of the same shape are put into the same place every time."""

    def __call__(self, key, work, inputs):
        key = (key, *((name, tensor.shape) for name, tensor in inputs.items()))
        found = work(**inputs)
        for place, tensor in zip(self.captured.setdefault(key, [one.clone() for one in found]), found, strict=True):
            place.copy_(tensor)
        return self.captured[key]


def as_on_a_gpu(name: str, **settings):
    """A simulation that treats the CPU as it would a GPU."""
    made = simulation_of(name, **settings)
    made.together, made.worker.replayed = True, Overwritten()
    return made


def told(made):
    """Everything that a simulation found, but for the time it took."""
    return [
        {
            "rounds": [{key: value for key, value in entry.items() if key != "seconds"} for entry in replica.rounds],
            "evaluations": [{key: np.asarray(value).tolist() for key, value in e.items()} for e in replica.evaluations],
            "model": replica.model.tolist(),
            "personal": None if replica.personal is None else replica.personal.tolist(),
        }
        for replica in made.replicas
    ]


@pytest.mark.parametrize(("name", "settings"), RUNS)
def test_a_round_begun_early_is_the_round(name, settings):
    plain, early, ahead = simulation_of(name, **settings), as_on_a_gpu(name, **settings), []
    plain.run()
    early.run(after_round=lambda made: ahead.append(made._begun is not None))
    assert str(told(early)) == str(told(plain))  # as text, since NaN is not equal to itself
    assert not ahead[-1]
    assert any(ahead) == (settings is not GROUPED)


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "fedfv", "even", "ditto", "fedmdfg"])
@pytest.mark.parametrize("settings", [{}, {"sampling.dropout": 0.4}, {"partition": "dir:0.3"}])
def test_replicas_taken_together_find_what_each_finds(name, settings):
    settings = {**MANY, **settings, "seeds": [0, 5, 9], "rounds": 4}
    plain, together = simulation_of(name, **settings), as_on_a_gpu(name, **settings)
    plain.run()
    together.run()
    for found, expected in zip(together.replicas, plain.replicas, strict=True):
        assert torch.linalg.norm(found.model - expected.model) <= 1e-4 * torch.linalg.norm(expected.model)
        for one, other in zip(found.rounds, expected.rounds, strict=True):
            assert one.keys() == other.keys()
            assert (one["asked"], one["lost"]) == (other["asked"], other["lost"])
            np.testing.assert_allclose(one["coefficients"], other["coefficients"], rtol=1e-2, atol=1e-3)
            np.testing.assert_allclose(one["losses_after"], other["losses_after"], rtol=1e-3)


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, [0]) for name in ("fedavg", "fedlf", "even", "ditto", "fedcka")),
        *((name, [0, 5]) for name in ("fedavg", "fedfv", "even", "fedmdfg", FEDCORR)),
    ],
)
def test_a_stop_leaves_no_trace_of_a_round_begun_early(name, seeds, tmp_path):
    from evenhand.engine.checkpoint import restore, save

    settings = {**(NOISY if name == FEDCORR else MANY), "sampling.dropout": 0.3, "seeds": seeds}
    through, stopped, continued, pieces = (as_on_a_gpu(name, **settings) for _ in range(4))
    through.run()

    def leave(made):
        if made.round == 4:
            save(made, tmp_path / "checkpoint")
            raise Stop

    with pytest.raises(Stop):
        stopped.run(after_round=leave)
    restore(continued, tmp_path / "checkpoint")
    for until in range(1, through.round + 1):
        pieces.run(until=until)
        assert pieces._begun is None
    for made in (stopped, continued):
        made.run()
    for made in (stopped, continued, pieces):
        assert str(told(made)) == str(told(through))


def test_a_round_begun_early_is_forgotten_where_the_model_was_changed():
    def change(made):
        if made.round == 3:
            made.replicas[0].model = 0.5 * made.replicas[0].model

    plain, early = simulation_of("even", **MANY), as_on_a_gpu("even", **MANY)
    plain.run(after_round=change)
    early.run(after_round=change)
    assert str(told(early)) == str(told(plain))


@pytest.fixture
def foresight(monkeypatch):
    """What was foreseen of every round, and which rounds had to be begun again."""
    from evenhand.engine.simulation import Simulation

    kept, begin = {"foreseen": [], "again": []}, Simulation._begin
    seen = set()

    def watched(made, ready, *given):
        begun = begin(made, ready, *given)
        kept["again" if (id(made), ready.round) in seen else "foreseen"].append(begun.foreseen is not None)
        seen.add((id(made), ready.round))
        return begun

    monkeypatch.setattr(Simulation, "_begin", watched)
    return kept


@pytest.mark.parametrize("measure", ["all", "losses", "needed"])
@pytest.mark.parametrize("seeds", [[0], [0, 5]])
@pytest.mark.parametrize("name", ["fedavg", "fedavg:weights=uniform", "fedprox"])
def test_rounds_that_are_foreseen_are_the_rounds(name, seeds, measure, foresight):
    settings = {**MANY, "seeds": seeds, "measure": measure}
    plain, early = as_on_a_gpu(name, **settings), as_on_a_gpu(name, **settings)
    plain.foresight.shares = lambda ready: None
    plain.run()
    early.run()
    assert str(told(early)) == str(told(plain))
    assert foresight == {"foreseen": [False] * (plain.round + 1) + [True] * (early.round - 1), "again": []}


ALIKE = {**MANY, "equal": True, "rounds": 11}


@pytest.mark.parametrize("settings", [{}, {"work.epochs": 2}, {"work.batch_size": None}, {"chunk": 3}])
@pytest.mark.parametrize("seeds", [[0], [0, 5]])
def test_rounds_prepared_at_once_are_those_prepared_one_by_one(seeds, settings):
    single, several = (as_on_a_gpu("fedavg", **ALIKE, seeds=seeds, **settings).preparation for _ in range(2))
    assert several.repeating
    held = None
    for index in range(11):
        several.stock(index, several.replicas)
        one, other = single.round(index, single.replicas), several.round(index, several.replicas)
        for name in ("round", "even", "repeating"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("asked", "lost"):
            assert list(map(np.ndarray.tolist, getattr(one, name))) == list(
                map(np.ndarray.tolist, getattr(other, name))
            )
        assert one.edges.tolist() == other.edges.tolist()
        assert torch.equal(one.owner, other.owner)
        for ours, theirs in zip(one.pieces, other.pieces, strict=True):
            assert ours.tensors().keys() == theirs.tensors().keys()
            assert all(torch.equal(tensor, theirs.tensors()[key]) for key, tensor in ours.tensors().items())
            for name in ("steps", "steady", "full", "whole"):
                assert getattr(ours, name) == getattr(theirs, name)
        if index % 4 and "chunk" not in settings and index < 8 and len(seeds) == 1:
            assert other.pieces[0].weights is held  # a graph need not take it again
        held = other.pieces[0].weights
    assert not several._stock


def test_rounds_are_prepared_at_once_only_where_all_are_alike():
    for others in ({}, {"sampling.availability": 0.5}, {"sampling.stragglers": 0.5}, {"noise": "0.6,0.5"}):
        made = as_on_a_gpu("fedavg", **{**ALIKE, "equal": bool(others), **others})
        made.preparation.stock(0, made.replicas)
        assert not made.preparation._stock
    many = as_on_a_gpu("fedavg", **ALIKE, seeds=[0, 1, 2])
    many.preparation.stock(0, many.replicas)
    assert not many.preparation._stock  # their rounds are large enough


@pytest.mark.parametrize("measure", ["all", "losses"])
@pytest.mark.parametrize("settings", [{}, {"sampling.dropout": 0.2}, {"seeds": [0, 5]}])
def test_foreseen_rounds_of_clients_alike_are_the_rounds(settings, measure, foresight):
    plain, early, parts = (as_on_a_gpu("fedavg", **ALIKE, measure=measure, **settings) for _ in range(3))
    plain.foresight.shares = lambda ready: None
    plain.run()
    early.run()
    assert str(told(early)) == str(told(plain))
    assert sum(foresight["foreseen"]) >= 3
    for until in (3, 4, 9, 11):  # rounds that were prepared are not lost, and none is played twice
        parts.run(until=until)
    assert str(told(parts)) == str(told(plain))


@pytest.mark.parametrize("name", ["even", "fedfa", "fedadam", "ditto", "fedavg-f", "qffl:q=0", "fedcka"])
def test_a_rule_that_listens_is_not_foreseen(name, foresight):
    as_on_a_gpu(name, **(GROUPED if name == "fedavg-f" else MANY)).run()
    assert not any(foresight["foreseen"])


def several(names: list[str], rates: list[float], *, together: bool, **more):
    """Methods with a learning rate each, one after another as on a CPU or together as on a GPU."""
    chosen = Experiment().with_settings({**SMALL, **MANY, "work.lr_decay": 0.9, "rounds": 4, "device": "cpu", **more})
    made = prepare(chosen, [method(name) for name in names], rates=rates, forgiving=True)
    if together:
        made.together, made.worker.replayed = True, Overwritten()
    return made


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("names", [["fedavg", "fedprox:mu=1"], ["fedlf", "even", "fedmdfg", "ditto"]])
def test_replicas_may_have_learning_rates_of_their_own(names, together):
    rates = [0.03, 0.1, 0.2, 0.05][: len(names)]
    made = several(names, rates, together=together, seeds=[0, 5])
    made.run()
    for number, replica in enumerate(made.replicas):
        name, rate = names[number // 2], rates[number // 2]
        alone = several([name], [9.0], together=False, seeds=[replica.seed])
        alone.replicas[0].lr, alone.settings = None, replace(alone.settings, work=replace(alone.settings.work, lr=rate))
        alone.run()
        expected = alone.replicas[0].model
        assert torch.linalg.norm(replica.model - expected) <= 1e-4 * torch.linalg.norm(expected)
        np.testing.assert_allclose(replica.evaluations[-1]["losses"], alone.replicas[0].evaluations[-1]["losses"], 1e-3)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "fedlf", "fedfa", "ditto"])
def test_one_that_diverges_stands_still_and_the_others_go_on(name, together):
    made = several([name] * 3, [0.1, 1e30, 0.05], together=together)
    with np.errstate(all="ignore"):
        made.run()
    well, wild, other = made.replicas
    assert [one.diverged for one in made.replicas] == [None, 1, None]
    start = several([name], [0.1], together=False).replicas[0].model
    assert torch.equal(wild.model, start)
    assert wild.rounds[0]["note"] == "no client's update is finite: the model stays"
    for replica, rate in ((well, 0.1), (other, 0.05)):
        alone = several([name], [rate], together=False)
        alone.run()
        expected = alone.replicas[0].model
        assert torch.linalg.norm(replica.model - expected) <= 1e-4 * torch.linalg.norm(expected)
        assert len(replica.rounds) == 4


def test_where_all_have_diverged_nothing_goes_on():
    made = several(["fedavg", "fedlf"], [1e30, 1e30], together=True)
    with np.errstate(all="ignore"):
        made.run()
    assert made.round == 1
    made.settings = replace(made.settings, forgiving=False)
    for replica in made.replicas:
        replica.diverged = None
    with np.errstate(all="ignore"), pytest.raises(NoUsableClient, match="seed 0: no usable client"):
        made.run()


@pytest.mark.parametrize("case", ["bad client", "bad clients", "cancels", "faint"])
@pytest.mark.parametrize("seeds", [[0], [0, 5]])
@pytest.mark.parametrize("kind", [MANY, ALIKE])
def test_rounds_that_were_foreseen_wrongly_are_played_again(case, seeds, kind, foresight, monkeypatch):
    plain, early = (as_on_a_gpu("fedavg", **kind, seeds=seeds) for _ in range(2))
    plain.foresight.shares = lambda ready: None
    if case.startswith("bad"):
        client = int(plain.preparation.round(2, plain.replicas).asked[0][0])
        for made in (plain, early):
            own = made.replicas[0].partition.train[client]
            made.inputs[own[:1] if case == "bad client" else own] = torch.inf
    monkeypatch.setattr("evenhand.aggregation.CANCELLATION", 1e-9 if case == "cancels" else 1e3)
    monkeypatch.setattr("evenhand.geometry.TINY", 1e30 if case == "faint" else 1e-28)
    plain.run()
    early.run()
    assert str(told(early)) == str(told(plain))
    assert foresight["again"]


@pytest.mark.parametrize("settings", [{}, {"chunk": 2}, {"partition": "dir:0.3"}])
def test_a_rule_may_ask_for_losses_after_training(settings, monkeypatch):
    import evenhand.engine.simulation as module

    seen = []

    def watched(**inputs):
        seen.append((inputs["ids"], inputs["values"]["losses"], inputs["given"].parts[0].clone()))
        return Opened(**inputs)

    Opened = module.Opened
    monkeypatch.setattr(module, "Opened", watched)
    chosen = Experiment().with_settings({"clients": 6, "rounds": 1, "participation": 0.7, "device": "cpu", **settings})
    made = prepare(chosen, [method("qffl:q=2,losses=trained"), method("qffl:q=2")])
    start = made.replicas[0].model.clone()
    made.run()
    (clients, found, updates), (_, received, _) = seen
    assert len(clients) == 4
    for place, client in enumerate(clients):
        own = torch.from_numpy(made.replicas[0].partition.train[client])
        named = {name: view[0] for name, view in made.shape.views((start - updates[place]).unsqueeze(0)).items()}
        scores = functional_call(made.module, named, (made.dataset.inputs[own],))
        expected = nn.functional.cross_entropy(scores, made.dataset.targets[own]).item()
        assert found[place] == pytest.approx(expected, rel=1e-4)
        assert received[place] > expected
    assert made.replicas[0].rounds[0]["losses"] == pytest.approx(received.tolist())  # the log keeps those before


@pytest.mark.parametrize("width", [1, 2, 480, 512, 513])
def test_the_order_of_random_numbers(width):
    from evenhand.engine.batches import _order

    keys = np.random.default_rng(width).random((7, width))
    keys[:, 0] = np.array([0.0, 2.0**-53, 1.0 - 2.0**-53, 0.5, 0.25, 1.0, 1.0])
    keys[-1, width // 2 :] = 1.0
    found = _order(keys)
    np.testing.assert_array_equal(np.sort(found), np.arange(width)[None].repeat(7, axis=0))
    np.testing.assert_array_equal(np.take_along_axis(keys, found, axis=1), np.sort(keys))
