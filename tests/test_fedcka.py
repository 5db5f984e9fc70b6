"""FedCKA: its term and gradient from the paper's words, and whole runs against one client after another in torch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import evenhand as eh
from evenhand.checks import EvenhandError
from evenhand.engine.batches import plan
from evenhand.engine.checkpoint import restore, save
from evenhand.engine.programs import Batched, FeedForward, Likeness, Sequential, layers_of, relations
from evenhand.engine.training import Shape
from evenhand.experiment import Experiment, prepare
from evenhand.methods import method
from evenhand.models import build
from evenhand.streams import stream

SMALL = {"data": "digits", "clients": 4, "partition": "dir:0.5", "rounds": 4, "eval_every": 4, "lr": 0.1}
SMALL |= {"sampling.participation": 0.75, "work.batch_size": 64, "device": "cpu"}


def linear_cka(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|Y'X|^2 / (|X'X| |Y'Y|) of features whose columns are centred (Kornblith et al., eq. 2 and section 3)."""
    one, other = one - one.mean(0), other - other.mean(0)
    return (other.T @ one).square().sum() / torch.linalg.norm(one.T @ one) / torch.linalg.norm(other.T @ other)


def first_layers(model: nn.Sequential, inputs: torch.Tensor, count: int) -> list[torch.Tensor]:
    """What the first layers with weights answer, by walking through them."""
    found = []
    for layer in model:
        inputs = layer(inputs)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            found.append(inputs.flatten(1))
    return found[:count]


def term(model, received, previous, inputs, count):
    """The mean of -log(e^near / (e^near + e^far)) over layers."""
    own, theirs, past = (first_layers(net, inputs, count) for net in (model, received, previous))
    found = []
    for layer in range(count):
        near, far = linear_cka(own[layer], theirs[layer].detach()), linear_cka(own[layer], past[layer].detach())
        found.append(-torch.log(near.exp() / (near.exp() + far.exp())))
    return torch.stack(found).mean()


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.GELU(), nn.GroupNorm(1, 3), nn.Flatten(),
        nn.Linear(36, 4),
    )  # fmt: skip


def noisy_copy(module: nn.Module, scale: float) -> nn.Module:
    found = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return found


@pytest.mark.parametrize("kind", ["mlp", "convolution"])
@pytest.mark.parametrize("program", [FeedForward, Batched, Sequential])
def test_gradients_of_every_row_are_those_of_its_own_real_samples(kind, program):
    if kind == "convolution" and program is FeedForward:
        return
    base = convolutional() if kind == "convolution" else build("mlp", (12,), 4, seed=1)
    torch.manual_seed(1)
    own, theirs, past = ([noisy_copy(base, scale) for _ in range(3)] for scale in (0.1, 0.1, 0.2))
    shape, chosen = Shape.of(base), program(base)
    inputs, targets = torch.randn(3, 10, 12), torch.randint(0, 4, (3, 10))
    sizes = [10, 7, 3]
    real = torch.stack([(torch.arange(10) < size).float() for size in sizes])
    weights = real / real.sum(1, keepdim=True)
    views = [shape.views(torch.stack([shape.flat(net) for net in nets])) for nets in (own, theirs, past)]
    like = Likeness(torch.full((3, 2), 1.5), real, *(chosen.relations(2, view, inputs, real) for view in views[1:]))
    found, scores = chosen.gradients(views[0], inputs, targets, weights, None, like)
    for row, size in enumerate(sizes):
        said = own[row](inputs[row, :size])
        loss = functional.cross_entropy(said, targets[row, :size])
        loss = loss + 3.0 * term(own[row], theirs[row], past[row], inputs[row, :size], 2)
        torch.testing.assert_close(scores[row, :size], said.detach(), rtol=1e-4, atol=1e-5)
        for mine, expected in zip(found, torch.autograd.grad(loss, list(own[row].parameters())), strict=True):
            torch.testing.assert_close(mine[row], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("program", [FeedForward, Batched, Sequential])
def test_what_stands_in_the_place_of_padding_changes_no_bit(program):
    module = build("mlp", (12,), 4, seed=1)
    torch.manual_seed(2)
    shape, chosen = Shape.of(module), program(module)
    own, theirs, past = (shape.views(torch.stack([shape.flat(noisy_copy(module, 0.1))])) for _ in range(3))
    inputs, targets = torch.randn(1, 10, 12), torch.randint(0, 4, (1, 10))
    real = (torch.arange(10) < 6).float().unsqueeze(0)
    given = []
    for padding in (0.0, 7.0):
        inputs[:, 6:] = padding
        held = [chosen.relations(2, view, inputs, real) for view in (theirs, past)]
        like = Likeness(torch.ones(1, 2), real, *held)
        found, scores = chosen.gradients(own, inputs, targets, real / real.sum(), None, like)
        given.append([*held, *found, scores[:, :6]])
    for one, other in zip(*given, strict=True):
        assert torch.equal(one, other)


def test_the_term_has_the_gradient_that_differences_give():
    torch.manual_seed(0)
    real = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    others = [torch.stack([relations(torch.randn(8, 5).double(), real) for _ in range(2)]) for _ in range(2)]
    like = Likeness(torch.tensor([1.0, 0.5]).double(), real, *others)
    layers = [torch.randn(8, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda *seen: like.loss(list(seen)), layers)
    scaled = like.loss([1e6 * layers[0], 1e-6 * layers[1]])
    torch.testing.assert_close(scaled, like.loss(layers), rtol=1e-6, atol=0)  # CKA knows no scale


@pytest.mark.parametrize("size", [0, 1])
def test_samples_that_are_all_alike_push_nowhere(size):
    real = (torch.arange(4) < size).float()
    layer = torch.randn(4, 3, requires_grad=True)
    own = relations(layer, real)
    loss = Likeness(torch.ones(1), real, torch.rand(1, 4, 4), torch.rand(1, 4, 4)).loss([layer])
    assert not own.any()
    assert loss.item() == pytest.approx(np.log(2))
    (found,) = torch.autograd.grad(loss, layer)
    assert not found.any()


def test_layers_are_what_holds_weights():
    assert [type(layer).__name__ for layer in layers_of(convolutional())] == ["Conv2d", "Linear"]
    assert len(layers_of(build("mlp", (12,), 4))) == 3


# --------------------------------------------------------------------------------------------------------- whole runs


def by_hand(chosen: Experiment, simulation) -> tuple[torch.Tensor, list[float]]:
    """FedCKA with torch's own SGD, client after client; the batches are drawn as the simulator draws them."""
    objective, data, replica = chosen.method.objective, simulation.dataset, simulation.replicas[0]
    shared = build(chosen.model, data.shape, data.classes, seed=replica.seed)
    previous: dict[int, nn.Module] = {}
    sizes, terms = replica.partition.train.sizes, []
    for index in range(chosen.rounds):
        asked = chosen.sampling.draw(replica.seed, index, sizes)
        failed = chosen.sampling.failed(replica.seed, index, asked)
        epochs = np.full(len(asked), float(chosen.work.epochs))
        steps = plan(
            [replica.partition.train[client] for client in asked],
            epochs=epochs,
            batch_size=chosen.work.batch_size,
            rng=stream(replica.seed, "batches", index),
        )
        trained = []
        for row, client in enumerate(asked.tolist()):
            model = copy.deepcopy(shared)
            last = previous.get(client, shared)
            optimiser = torch.optim.SGD(model.parameters(), lr=chosen.work.lr)
            for samples, weights in zip(steps.indices[row], steps.weights[row], strict=True):
                used = samples[weights > 0]
                if not len(used):
                    continue
                optimiser.zero_grad()
                loss = functional.cross_entropy(model(data.inputs[used]), data.targets[used])
                if len(used) > 1:
                    extra = term(model, shared, last, data.inputs[used], objective.layers)
                    terms.append(extra.item())
                    loss = loss + objective.mu * extra
                loss.backward()
                optimiser.step()
            trained.append(model)
        kept = np.flatnonzero(~failed)
        for row in kept:
            previous[int(asked[row])] = trained[row]
        shares = torch.tensor(sizes[asked[kept]] / sizes[asked[kept]].sum()).float()
        mean = copy.deepcopy(shared)
        with torch.no_grad():
            for name, parameter in mean.named_parameters():
                parameter.copy_(sum(s * trained[row].get_parameter(name) for s, row in zip(shares, kept, strict=True)))
        shared = mean
    return Shape.of(shared).flat(shared), terms


@pytest.mark.parametrize("more", [{}, {"method.layers": 3, "work.epochs": 2}, {"sampling.dropout": 0.4}])
def test_a_run_is_the_papers_algorithm_client_by_client(more):
    chosen = Experiment().with_settings({**SMALL, "method": "fedcka", **more})
    simulation = prepare(chosen)
    expected, terms = by_hand(chosen, simulation)
    assert max(terms) - min(terms) > 1e-3  # the term is at work
    simulation.run()
    found = simulation.replicas[0].model
    assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def final(**settings) -> torch.Tensor:
    simulation = prepare(Experiment().with_settings({**SMALL, **settings}))
    simulation.run()
    return simulation.replicas[0].model


@pytest.mark.parametrize("program", ["batched", "sequential"])
def test_every_program_gives_the_same_run(program):
    expected, found = (final(method="fedcka", program=kind) for kind in ("feed-forward", program))
    assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def test_without_its_term_it_is_fedavg():
    fedavg = final(method="fedavg")
    assert torch.equal(final(method="fedcka:mu=0"), fedavg)
    assert torch.equal(final(method="fedcka:quirk=weights"), fedavg)
    assert not torch.allclose(final(method="fedcka"), fedavg, atol=1e-4)


def test_who_takes_part_for_the_first_time_does_what_fedavg_does():
    one = {"rounds": 1, "eval_every": 1}
    expected, found = (final(method=name, **one) for name in ("fedavg", "fedcka"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("more", [{"chunk": 2}, {"work.momentum": 0.5, "work.clip": 1.0}])
def test_seeds_and_methods_together_give_what_each_gives_alone(more):
    wanted = Experiment().with_settings({**SMALL, "rounds": 3, "seeds": [0, 3], **more})
    several = [method("fedcka:layers=1"), method("fedavg"), method("fedprox"), method("fedcka:layers=2")]
    together = prepare(wanted, several)
    together.together = True
    together.run()
    for replica in together.replicas:
        alone = prepare(wanted.with_settings({"method": replica.method, "seeds": [replica.seed]}))
        alone.run()
        torch.testing.assert_close(replica.model, alone.replicas[0].model, rtol=0, atol=2e-5)


def test_a_run_goes_on_to_the_same_bits(tmp_path):
    chosen = Experiment().with_settings({**SMALL, "method": "fedcka"})
    whole, half, rest = (prepare(chosen) for _ in range(3))
    whole.run()
    half.run(until=2)
    save(half, tmp_path / "half")
    restore(rest, tmp_path / "half")
    assert sorted(rest.replicas[0].previous) == sorted(half.replicas[0].previous)
    rest.run()
    assert torch.equal(whole.replicas[0].model, rest.replicas[0].model)


def test_its_clients_go_with_any_rule_and_bad_settings_are_refused():
    mixed = eh.method("adafed", objective="similarity:mu=1")
    assert method(mixed.to_dict()) == mixed
    prepare(Experiment().with_settings({**SMALL, "method": mixed})).run(until=2)
    with pytest.raises(EvenhandError, match="first 2 layers, and the model has 1; take layers=1"):
        prepare(Experiment().with_settings({**SMALL, "method": "fedcka", "model": "logistic"}))
    for wrong in ("mu=-1", "layers=0", "quirk=some"):
        with pytest.raises(EvenhandError, match=wrong.partition("=")[0]):
            method(f"fedcka:{wrong}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_on_a_gpu_gives_the_same_run():
    expected, found = (final(method="fedcka", device=device) for device in ("cpu", "cuda"))
    assert torch.linalg.norm(found.cpu() - expected) <= 1e-3 * torch.linalg.norm(expected)
