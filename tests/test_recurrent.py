"""The program of character models against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.checks import EvenhandError
from evenhand.engine.choice import choose_program
from evenhand.engine.programs import Batched, Lean, Sequential
from evenhand.engine.recurrent import Recurrent, recurrent_parts
from evenhand.engine.training import Shape, samples_at_once
from evenhand.models import LSTM, build
from evenhand.models.recurrent import LastStep

ROWS, SAMPLES, LETTERS, CLASSES = 3, 7, 9, 30


def drawn(layers: int, letters: int = LETTERS):
    """A small character model, rows of it that differ, and a batch for each."""
    module = build("char-lstm", (letters,), CLASSES, seed=0, hidden=20, layers=layers)
    torch.manual_seed(1)
    shape = Shape.of(module)
    rows = shape.flat(module).repeat(ROWS, 1)
    rows += 0.1 * torch.randn_like(rows)
    inputs, targets = torch.randint(0, CLASSES, (ROWS, SAMPLES, letters)), torch.randint(0, CLASSES, (ROWS, SAMPLES))
    return module, shape, rows, (inputs, targets, torch.rand(ROWS, SAMPLES))


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 2e-6 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("letters", [1, 2, 9])
@pytest.mark.parametrize("leaning", [False, True])
def test_gradients_are_autograds(layers, letters, leaning):
    module, shape, rows, batch = drawn(layers, letters)
    lean = Lean(torch.randn(ROWS, SAMPLES, CLASSES), torch.full((ROWS, 1, 1), 2.0)) if leaning else None
    expected, said = Sequential(module).gradients(shape.views(rows), *batch, lean)
    program, before = Recurrent(module), rows.clone()
    found, scores = program.gradients(shape.views(rows), *batch, lean)
    if letters == 1:  # weights of the state that was never there; autograd leaves zeros
        assert not any(one.any() for one, name in zip(found, shape.names, strict=True) if "weight_hh" in name)
        found, expected = ([one for one in many if one.any()] for many in (found, expected))
    close([*found, scores], [*expected, said])
    assert torch.equal(rows, before)
    close([program.scores(shape.views(rows), batch[0])], [said])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_takes_the_gradients_off(layers):
    module, shape, rows, batch = drawn(layers)
    batch[2][1] = 0.0  # this row stands still
    program, moved = Recurrent(module), rows.clone()
    gradients, _ = program.gradients(shape.views(rows), *batch)
    program.step(shape.views(moved), *batch)
    for view, start, gradient in zip(shape.views(moved).values(), shape.views(rows).values(), gradients, strict=True):
        torch.testing.assert_close(view, start - gradient, rtol=1e-5, atol=1e-7)
    assert torch.equal(moved[1], rows[1])
    assert not torch.equal(moved[0], rows[0])


def test_what_the_layers_relate_is_as_in_other_programs():
    module, shape, rows, (inputs, _, weights) = drawn(2)
    close(
        [Recurrent(module).relations(2, shape.views(rows), inputs, weights)],
        [Batched(module).relations(2, shape.views(rows), inputs, weights)],
    )


def network(**parts) -> nn.Sequential:
    own = {"table": nn.Embedding(5, 3), "lstm": LSTM(3, 4), "last": LastStep(), "head": nn.Linear(4, 5)} | parts
    return nn.Sequential(*own.values())


def test_character_models_are_recognised_and_others_are_not():
    module = build("char-lstm", (9,), 30, hidden=16)
    program = choose_program(module)
    assert program.name == "recurrent"
    assert program.kernels is None
    assert [samples_at_once(program, torch.device(kind)) for kind in ("cpu", "cuda")] == [256, 8192]
    assert choose_program(module, "batched").name == "batched"
    assert recurrent_parts(network()) == ("0", "1", "3")
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    others = [
        frozen,
        network(table=nn.Embedding(5, 3, padding_idx=0)),
        network(table=nn.Embedding(5, 3, max_norm=1.0)),
        network(head=nn.Sequential(nn.Linear(4, 5))),
        network(more=nn.ReLU()),
        nn.Linear(3, 2),
    ]
    for other in others:
        assert recurrent_parts(other) is None
        with pytest.raises(EvenhandError, match=r"Embedding, evenhand\.models\.LSTM, its last step and Linear alone"):
            choose_program(other, "recurrent")


@pytest.mark.parametrize("biased", [True, False])
def test_any_network_of_these_parts_trains(biased):
    module = network(head=nn.Linear(4, 5, bias=biased))
    shape = Shape.of(module)
    rows, inputs = shape.flat(module).repeat(2, 1), torch.randint(0, 5, (2, 6, 4))
    given = shape.views(rows), inputs, torch.randint(0, 5, (2, 6)), torch.ones(2, 6)
    close(Recurrent(module).gradients(*given)[0], Sequential(module).gradients(*given)[0])


@pytest.mark.parametrize("method", ["fedavg", "fedprox:mu=0.1", "fedcka"])
def test_a_run_is_the_same_by_every_program(method, tmp_path):
    said = {"ANNA": "to be or not to be ", "BERT": "all the world is a stage ", "CARL": "a rose by any name "}
    play = "\n".join(f"{role}:\n{line * (2 * len(line) - 12)}\n" for role, line in said.items())
    (tmp_path / "input.txt").write_text(play)
    settings = {
        "data": "shakespeare",
        "data_dir": str(tmp_path),
        "partition": "natural",
        "split": "official",
        "model": "char-lstm",
        "model_options": {"hidden": 8, "layers": 2},
        "clients": 3,
        "rounds": 2,
        "batch_size": 200,
        "lr": 0.1,
    }
    found = {}
    for program in ("recurrent", "batched", "sequential"):
        run = eh.simulate(method=method, **settings, program=program)
        found[program] = run[0].model
    for program in ("batched", "sequential"):
        torch.testing.assert_close(found["recurrent"], found[program], rtol=1e-4, atol=1e-5)
