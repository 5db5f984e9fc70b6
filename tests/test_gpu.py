"""The simulator on a GPU: the same bits every time, after a stop too, and the CPU's numbers up to rounding."""

from __future__ import annotations

import pytest
import torch
from cohorts import equal_sizes

from evenhand.engine.checkpoint import restore, save
from evenhand.engine.simulation import Simulation
from evenhand.experiment import Experiment, prepare
from evenhand.methods import method

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SMALL = {"data": "digits", "clients": 12, "rounds": 8, "eval_every": 4, "work.batch_size": 16, "seeds": [0, 1]}
EXACT = {"precision": "float32"}


def simulation_of(name: str, device: str = "cuda", *, equal: bool = False, **settings) -> Simulation:
    experiment = Experiment().with_settings({**SMALL, **EXACT, "device": device, **settings, "method": method(name)})
    return prepare(experiment, redraw=equal_sizes if equal else None)


def finals(made: Simulation) -> torch.Tensor:
    made.run()
    return torch.stack([replica.model for replica in made.replicas]).cpu()


def continued(tmp_path, name: str, **settings) -> Simulation:
    """A simulation that another one's checkpoint after three rounds was put into, when it had begun the fourth."""
    saved, found = simulation_of(name, **settings), simulation_of(name, **settings)
    saved.run(after_round=lambda made: save(made, tmp_path / "checkpoint") if made.round == 3 else None)
    restore(found, tmp_path / "checkpoint")
    return found


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "even", "fedfv", "ditto", "afl", "fedmdfg", "fedcka"])
@pytest.mark.parametrize("model", ["mlp", "own", "cnn-mnist"])
def test_a_run_can_be_repeated_and_resumed_to_the_last_bit(name, model, tmp_path):
    settings = {"model": f"{__name__}:convolution" if model == "own" else model, "rounds": 4, "precision": "tf32"}
    if model == "cnn-mnist":
        settings["model_options"] = {"padding": 2, "hidden": 32}
    once, again = (finals(simulation_of(name, **settings)) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(finals(continued(tmp_path, name, **settings)), once)


GROUPS = {"data": "synthetic-groups", "clients": None, "participation": 1.0, "model": "logistic"}


@pytest.mark.parametrize("name", ["mfairfl", "fpfl", "fedfb", "fairfed", "fedavg-f", "indfair", "cenfair"])
def test_group_methods_can_be_repeated_and_give_the_cpus_numbers(name, tmp_path):
    def ends(made: Simulation) -> torch.Tensor:
        made.run()
        own = [replica.model if replica.personal is None else replica.personal for replica in made.replicas]
        return torch.stack(own).cpu()

    once, again, expected = (ends(simulation_of(name, device, **GROUPS)) for device in ("cuda", "cuda", "cpu"))
    assert torch.equal(once, again)
    assert torch.linalg.norm(once - expected) <= 1e-3 * torch.linalg.norm(expected)
    assert torch.equal(ends(continued(tmp_path, name, **GROUPS)), once)


def convolution(shape, classes):
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(36, classes))


@pytest.mark.parametrize("name", ["fedavg", "fedlf", "even", "fedprox", "fedfa"])
def test_the_gpu_gives_the_cpus_numbers(name):
    found, expected = finals(simulation_of(name)), finals(simulation_of(name, "cpu"))
    assert torch.linalg.norm(found - expected) <= 1e-3 * torch.linalg.norm(expected)


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_rounds_that_are_foreseen_are_the_rounds(seeds, bad, equal):
    settings = {"seeds": seeds, "measure": "all", "participation": 0.5, "equal": equal, "rounds": 13}
    plain, early = (simulation_of("fedavg", **settings) for _ in range(2))
    assert early.preparation.repeating == equal
    plain.foresight.shares = lambda ready: None
    for made in (plain, early) if bad else ():
        made.inputs[int(made.replicas[0].partition.train[3][0])] = torch.inf
    found, expected = finals(early), finals(plain)
    assert torch.linalg.norm(found - expected) <= 1e-6 * torch.linalg.norm(expected)
    for one, other in zip(early.replicas[0].rounds, plain.replicas[0].rounds, strict=True):
        assert one.keys() == other.keys()
        assert all(one[key] == other[key] for key in ("asked", "coefficients", "excluded", "conflicts"))
    assert any(entry["excluded"] for entry in early.replicas[0].rounds) == bad


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk": 2},
        {"keep_on": "cpu"},
        *({"program": name} for name in ("fused", "feed-forward", "batched", "sequential")),
    ],
)
def test_how_it_is_computed_does_not_matter(settings):
    one, other = simulation_of("even", **settings), simulation_of("even")
    found, expected = finals(one), finals(other)
    assert torch.linalg.norm(found - expected) <= 1e-3 * torch.linalg.norm(expected)
    after = [made.replicas[0].rounds[-1]["losses_after"] for made in (one, other)]
    assert after[0] == pytest.approx(after[1], rel=1e-2)


def test_more_shapes_than_are_captured_run_without_a_graph():
    made = simulation_of("fedavg", partition="dir:0.3")
    assert made.worker.replayed is not None
    expected = finals(limited(simulation_of("fedavg", partition="dir:0.3"), 64))
    found = finals(limited(made, 1))
    assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def test_graphs_keep_no_more_memory_than_they_may():
    made, other = (simulation_of("fedavg", partition="dir:0.3") for _ in range(2))
    for one, room in ((made, 0.0), (other, 0.5)):
        assert one.worker.replayed is not None
        one.worker.replayed.ROOM = room
    found, expected = finals(made), finals(other)
    assert made.worker.replayed is not None
    assert other.worker.replayed is not None
    assert len(made.worker.replayed.captured) == 1 < len(other.worker.replayed.captured)
    assert other.worker.replayed.bytes > made.worker.replayed.bytes > 0
    assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def limited(made: Simulation, limit: int) -> Simulation:
    assert made.worker.replayed is not None
    made.worker.replayed.LIMIT = limit
    return made


@pytest.mark.parametrize("name", ["fedavg", "fedcka:layers=1", "fedcorr:iterations=2,together=6,confidence=0.3"])
def test_wrong_labels_on_a_gpu(name, tmp_path):
    settings = {"noise": "0.6,0.5", "model": "logistic"}
    once, again, expected = (finals(simulation_of(name, device, **settings)) for device in ("cuda", "cuda", "cpu"))
    assert torch.equal(once, again)
    assert torch.linalg.norm(once - expected) <= 1e-3 * torch.linalg.norm(expected)
    assert torch.equal(finals(continued(tmp_path, name, **settings)), once)


@pytest.mark.parametrize("name", ["fedavg", "even", "fedprox", "fedmdfg", "ditto", "fedcka"])
@pytest.mark.parametrize("batch_size", [4, None])
def test_convolutions_of_clients_with_unequal_data(name, batch_size):
    """Those who are done leave the program; of a single step clients of about the same size are taken together."""
    settings = {
        "model": "cnn-mnist",
        "model_options": {"padding": 2, "hidden": 32},
        "partition": "dir:0.3",
        "work.batch_size": batch_size,
        "work.lr": 0.02,
        "participation": 0.6,
        "rounds": 3,
    }
    made, again = (simulation_of(name, program="fused", **settings) for _ in range(2))
    ready = made.preparation.round(0, made.replicas)
    assert made.worker._shrinks(ready.pieces[0]) == (batch_size is not None)
    assert made.local.in_patches(ready.pieces[0]) == (batch_size is None)
    found, expected = finals(made), finals(simulation_of(name, "cpu", **settings))
    assert torch.equal(found, finals(again))
    assert torch.linalg.norm(found - expected) <= 2e-3 * torch.linalg.norm(expected)
    for one, other in zip(made.replicas, again.replicas, strict=True):
        assert one.rounds[-1]["losses"] == other.rounds[-1]["losses"]
