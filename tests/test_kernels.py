"""Kernels of the fused program against autograd, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")

from evenhand.checks import EvenhandError
from evenhand.engine import convolution_kernels, kernels, recurrent_kernels
from evenhand.engine.choice import choose_program
from evenhand.engine.fused import Fused
from evenhand.engine.programs import Batched, Likeness
from evenhand.engine.recurrent import Course, Recurrent, backwards, forwards
from evenhand.engine.training import Shape, arithmetic
from evenhand.models import build
from evenhand.models.networks import PooledConv2d

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, CLOSE = 2, 2e-5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def near(found: torch.Tensor | None, expected: torch.Tensor | None, close: float = CLOSE) -> None:
    assert found is not None
    assert expected is not None
    assert torch.linalg.vector_norm(found - expected) <= close * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(
    ("rows", "samples", "outputs", "inputs"),
    # Of the last two a program of the gradients goes through some blocks of inputs, and through all.
    [(2, 50, 20, 70), (2, 3, 130, 33), (2, 70, 10, 200), (100, 5, 20, 520), (90, 6, 70, 70)],
)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_linear_layers(rows, samples, outputs, inputs, biased, gated):
    flat = drawn(rows, outputs * inputs + outputs + 5)  # weights are views of longer rows
    weight = flat[:, : outputs * inputs].view(rows, outputs, inputs)
    bias = flat[:, outputs * inputs : outputs * inputs + outputs] if biased else None
    x, error = drawn(rows, samples, inputs).relu(), drawn(rows, samples, outputs)
    plain = torch.bmm(x, weight.transpose(1, 2)) + (0.0 if bias is None else bias.unsqueeze(1))
    near(kernels.linear(x, weight, bias, relu=True, precision="ieee"), plain.relu())
    near(
        kernels.down(error, x, weight, gated=gated, precision="ieee"),
        torch.bmm(error, weight) * (x > 0 if gated else 1),
    )
    found = torch.empty(rows, outputs, inputs, device=DEVICE), torch.empty(rows, outputs, device=DEVICE)
    kernels.gradient(error, x, weight, bias, found[0], found[1] if biased else None, step=False, precision="ieee")
    near(found[0], torch.bmm(error.transpose(1, 2), x))
    before = flat.clone()
    kernels.gradient(error, x, weight, bias, weight, bias, step=True, precision="ieee")
    near(weight, before[:, : outputs * inputs].view_as(weight) - found[0])
    if bias is not None:
        near(found[1], error.sum(1))
        near(bias, before[:, outputs * inputs : outputs * inputs + outputs] - found[1])
    assert torch.equal(flat[:, outputs * inputs + outputs :], before[:, outputs * inputs + outputs :])


def formed(program: Fused, x: torch.Tensor) -> torch.Tensor:
    """Every row's samples as the program reads them."""
    return program.form(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def gradients_of(error, kept, weight, bias, *, below=False, scale=1.0, **how) -> tuple[torch.Tensor, ...]:
    """A convolution's gradients, and where it is wanted the error below."""
    found, scales = (torch.empty_like(weight), torch.empty_like(bias)), bias.new_full((len(bias),), scale)
    down = convolution_kernels.convolution_back(
        error, kept, scales, weight, bias, *found, step=False, below=below, **how
    )
    assert (down is not None) == below
    before = weight.clone(), bias.clone()
    convolution_kernels.convolution_back(error, kept, scales, *before, *before, step=True, below=False, **how)
    near(before[0], weight - found[0])
    near(before[1], bias - found[1])
    return found if down is None else (*found, down)


@pytest.mark.parametrize("channels", [2, 16])
def test_rows_without_weight_stand_still(channels):
    x, weight, bias, error = drawn(ROWS, 9, 20), drawn(ROWS, 8, 20), drawn(ROWS, 8), drawn(ROWS, 9, 8)
    active = torch.ones(ROWS, 9, device=DEVICE)
    active[1] = 0.0
    how = {"precision": "ieee", "active": active}
    near(kernels.linear(x, weight, bias, relu=False, **how)[0], (x[0] @ weight[0].T) + bias[0])
    moved = weight.clone(), bias.clone()
    kernels.gradient(error, x, weight, bias, *moved, step=True, **how)
    near(moved[0][0], weight[0] - error[0].T @ x[0])
    assert torch.equal(moved[0][1], weight[1])
    assert torch.equal(moved[1][1], bias[1])
    images, filters = drawn(ROWS, 9, 8, 8, channels), drawn(ROWS, 4, channels, 3, 3)
    biases = drawn(ROWS, 4)
    out, kept = convolution_kernels.convolve(images, filters, biases, padding=0, relu=True, precision="ieee")
    error = drawn(*out.shape)
    expected = gradients_of(error, kept, filters, biases, padding=0, precision="ieee")
    for found, whole in zip(gradients_of(error, kept, filters, biases, padding=0, **how), expected, strict=True):
        assert torch.equal(found[0], whole[0])
        assert not found[1].any()


@pytest.mark.parametrize(("classes", "inputs"), [(11, 70), (100, 20), (2, 130)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_the_last_layer(classes, inputs, biased, below, gated):
    x, weight, bias = drawn(ROWS, 50, inputs), drawn(ROWS, classes, inputs), drawn(ROWS, classes) if biased else None
    weights = drawn(ROWS, 50).abs()
    weights[:, 40:] = 0.0  # padding
    targets = torch.randint(0, classes, (ROWS, 50), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores = torch.bmm(x, weight.transpose(1, 2)) + (0.0 if bias is None else bias.unsqueeze(1))
    error = (torch.softmax(scores, -1) - functional.one_hot(targets, classes)) * weights.unsqueeze(2)
    how = {"below": below, "gated": gated, "precision": "ieee"}
    found = kernels.head(x, weight, bias, targets, weights, **how)
    near(found[0], scores)
    near(found[1], error)
    assert not found[1][:, 40:].any()
    assert (found[2] is not None) == below
    if below:
        near(found[2], torch.bmm(error, weight) * (x > 0 if gated else 1))
    weights[1] = 0.0
    again = kernels.head(x, weight, bias, targets, weights, skip=True, **how)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(found, again, strict=True) if one is not None)


@pytest.mark.parametrize(
    ("side", "channels", "outputs", "size", "padding", "relu"),
    [
        (12, 3, 8, 5, 0, True),
        (10, 4, 6, 5, 2, True),
        (11, 2, 5, 3, 1, False),
        (9, 1, 32, 3, 0, True),  # an odd side: the last places are not pooled
        (9, 9, 6, 3, 1, True),  # a patch of more numbers than are read at once
        (8, 16, 20, 3, 1, True),  # channels in sixteens and in thirty-twos are read without a look at single ones
        (9, 32, 32, 3, 1, False),
    ],
)
@pytest.mark.parametrize(("stored", "close"), [(torch.float32, CLOSE), (torch.float16, 5e-4)])
def test_pooled_convolutions(side, channels, outputs, size, padding, relu, stored, close):
    given = drawn(ROWS, 3, side, side, channels), drawn(ROWS, outputs, channels, size, size), drawn(ROWS, outputs)
    given[0][:, 0] = 0.0  # of equal ones the first wins
    given[0].copy_(given[0].to(stored))  # numbers that both know
    given[1].copy_(given[1].to(stored))
    x, weight, bias = (tensor.clone().requires_grad_() for tensor in given)
    with arithmetic("float32"):
        rows = [
            functional.max_pool2d(functional.conv2d(x[row].permute(0, 3, 1, 2), weight[row], padding=padding), 2)
            + bias[row][:, None, None]
            for row in range(ROWS)
        ]
        expected = torch.stack(rows).permute(0, 1, 3, 4, 2)
        expected = expected.relu() if relu else expected
        error = drawn(*expected.shape).to(stored)
        expected.backward(error.float())
    how = {"padding": padding, "precision": "ieee"}
    images = given[0].to(stored)
    out, kept = convolution_kernels.convolve(images, *given[1:], relu=relu, **how)
    assert out.dtype == stored
    near(out, expected.detach(), close)
    near(convolution_kernels.convolve(images, *given[1:], relu=relu, stored=torch.float32, **how)[0], expected.detach())
    filters, biases, down = gradients_of(error, kept, *given[1:], below=True, **how)
    near(filters, weight.grad)
    near(biases, bias.grad)
    near(down, x.grad, close)
    filters, biases = gradients_of(error, kept, *given[1:], scale=0.25, **how)
    near(filters, weight.grad / 4)
    near(biases, bias.grad / 4)


def in_float64(module, layout, rows, inputs, targets, weights) -> list[torch.Tensor]:
    """Gradients and scores."""
    views = layout.views(rows.double())
    found, scores = Batched(module).gradients(views, inputs.double(), targets, weights.double())
    return [*found, scores]


def shaken(given: torch.Tensor) -> torch.Tensor:
    """Every number off by about as much as sums in float32 are."""
    noise = drawn(*given.shape, 1).squeeze(-1)  # not the numbers that `drawn` gave for this very shape
    return given.double() * (1.0 + 1e-5 * noise)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (784,), {}),
        ("logistic", (30,), {}),
        ("cnn", (3, 32, 32), {}),
        ("cnn-mnist", (784,), {"padding": 2}),
        ("cnn-mnist", (28, 28), {"conv_relu": False}),
    ],
)
@pytest.mark.parametrize("samples", [50, 200])
def test_the_fused_program_gives_autograds_gradients(name, shape, options, samples):
    module = build(name, shape, 10, seed=0, **options).to(DEVICE)
    layout = Shape.of(module)
    rows = layout.flat(module).to(DEVICE).repeat(3, 1)
    inputs, weights = drawn(3, samples, *shape), torch.full((3, samples), 1.0 / samples, device=DEVICE)
    targets = torch.arange(3 * samples, device=DEVICE).view(3, samples) % 10
    exact = in_float64(module, layout, rows, inputs, targets, weights)
    # Rounding decides which of two nearly equal pixels wins, and whether a unit close to zero is on: as far as that
    # moves the exact gradients, a right one may be off.
    nudged = in_float64(module, layout, shaken(rows), shaken(inputs), targets, weights)
    for precision, tolerance in (("float32", 2e-3), ("tf32", 5e-3)):
        program = Fused(module, DEVICE, precision)
        with arithmetic(precision):
            library, plain = Batched(module).gradients(layout.views(rows), inputs, targets, weights)
            read = formed(program, inputs)
            found, scores = program.gradients(layout.views(rows), read, targets, weights)
            moved = rows.clone()
            program.step(layout.views(moved), read, targets, weights)
        for one, same, right, other in zip((*found, scores), (*library, plain), exact, nudged, strict=True):
            allowed = tolerance * torch.linalg.vector_norm(right) + torch.linalg.vector_norm(other - right)
            allowed += 3.0 * torch.linalg.vector_norm(same - right)  # the library's own error
            assert torch.linalg.vector_norm(one - right) <= allowed
        for view, start, gradient in zip(layout.views(moved).values(), layout.views(rows).values(), found, strict=True):
            torch.testing.assert_close(view, start - gradient)


def linear_layers(*sizes: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def convolutions(channels: int) -> nn.Sequential:
    """Of images of 14 x 14, which end as 2 x 2 places of five channels."""
    torch.manual_seed(0)
    first, second = PooledConv2d(1, channels, 3), PooledConv2d(channels, 5, 3, relu=False)
    return nn.Sequential(nn.Unflatten(1, (1, 14, 14)), first, second, nn.Flatten(), *linear_layers(20, 9, 4))


@pytest.mark.parametrize(
    ("precision", "close"), [("float32", CLOSE), ("tf32", 2e-2)]
)  # rounding decides which pixels win
@pytest.mark.parametrize("samples", [6, 140])
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (linear_layers(30, 4), 30),
        (linear_layers(30, 20, 18, 4), 30),
        (convolutions(3), 196),
        (convolutions(16), 196),
    ],
    ids=["one layer", "layers", "convolutions", "wide convolutions"],
)
def test_small_networks_train_by_the_kernels(module, inputs, samples, precision, close, monkeypatch):
    """In the interpreter, too; of two rows the second may stand still."""
    if module[0].__class__ is nn.Unflatten and samples > 100 and not torch.cuda.is_available():
        pytest.skip("slow in the interpreter")
    monkeypatch.setattr("evenhand.engine.fused.served", lambda device: True)
    layout = Shape.of(module)
    rows = layout.flat(module.cpu()).to(DEVICE).repeat(ROWS, 1)
    module = module.to(DEVICE)
    x, weights = drawn(ROWS, samples, inputs), drawn(ROWS, samples).abs() / samples
    targets = torch.arange(ROWS * samples, device=DEVICE).view(ROWS, samples) % 4
    program = Fused(module, DEVICE, precision)
    with arithmetic("float32"):
        expected, scores = Batched(module).gradients(layout.views(rows), x, targets, weights)
    with arithmetic(precision):
        x = formed(program, x)
        found, said = program.gradients(layout.views(rows), x, targets, weights)
        moved, half, full, beside = rows.clone(), rows.clone(), rows.clone(), torch.zeros_like(rows)
        program.step(layout.views(moved), x, targets, weights)
        program.step(layout.views(full), x, targets, weights, full=True)
        before = rows.clone()
        program.step(layout.views(rows), x, targets, weights, off=layout.views(beside))
        assert torch.equal(rows, before)
        weights[1] = 0.0
        program.step(layout.views(half), x, targets, weights)
    near(said, scores, close)
    for one, right in zip(found, expected, strict=True):
        near(one, right, close)
    for view, start, own in zip(layout.views(moved).values(), layout.views(rows).values(), found, strict=True):
        torch.testing.assert_close(view, start - own)
    for view, own in zip(layout.views(beside).values(), found, strict=True):
        torch.testing.assert_close(view, -own)
    assert torch.equal(full, moved)
    torch.testing.assert_close(half[0], moved[0])
    assert torch.equal(half[1], rows[1])


@pytest.fixture
def spoiled(monkeypatch):
    """Memory that nobody has written to holds NaN."""

    def filled(make):
        def made(*given, **named):
            found = make(*given, **named)
            return found.fill_(torch.nan if found.is_floating_point() else 3)

        return made

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))


@pytest.mark.parametrize("samples", [7, 133])  # of more than 128 the linear layers are the library's
@pytest.mark.parametrize("module", [linear_layers(30, 20, 4), convolutions(3), convolutions(16)])
def test_padding_changes_nothing(module, samples, spoiled, monkeypatch):
    """Behind the samples that count: of some a few, of some most, of some all are padding."""
    convolved = module[0].__class__ is nn.Unflatten
    if convolved and samples > 100 and not torch.cuda.is_available():
        pytest.skip("slow in the interpreter")
    monkeypatch.setattr("evenhand.engine.fused.served", lambda device: True)
    layout = Shape.of(module)
    rows = layout.flat(module.cpu()).to(DEVICE).repeat(4, 1)
    module = module.to(DEVICE)
    x = drawn(4, samples, 196 if convolved else 30)
    targets = torch.arange(4 * samples, device=DEVICE).view(4, samples) % 4
    counts = [samples, samples - 2, 1, 0]
    weights = torch.tensor([[1.0 / max(n, 1)] * n + [0.0] * (samples - n) for n in counts], device=DEVICE)
    program = Fused(module, DEVICE, "float32")
    x = formed(program, x)
    whole, answers = program.gradients(layout.views(rows), x, targets, torch.ones_like(weights))
    found, said = program.gradients(layout.views(rows), x, targets, weights)
    moved = rows.clone()
    program.step(layout.views(moved), x, targets, weights)
    measured = program.scores(layout.views(rows), x, weights)
    assert all(torch.isfinite(one).all() for one in whole)
    for row, count in enumerate(counts):
        part = slice(row, row + 1)
        near(said[part, :count], answers[part, :count])
        near(measured[part, :count], answers[part, :count])
        views = layout.views(rows[part])
        alone = [torch.zeros_like(view) for view in views.values()]
        if count:
            alone, _ = program.gradients(views, x[part, :count], targets[part, :count], weights[part, :count])
        for one, own in zip(found, alone, strict=True):
            near(one[row : row + 1], own)
        for view, start, one in zip(layout.views(moved).values(), views.values(), found, strict=True):
            torch.testing.assert_close(view[row], start[0] - one[row])
    assert torch.equal(moved[3], rows[3])


@pytest.mark.parametrize(("precision", "close"), [("float32", CLOSE), ("tf32", 3e-2)])
@pytest.mark.parametrize("layers", [1, 2, 3])  # the first convolution, both, and a linear layer besides
@pytest.mark.parametrize("channels", [3, 16])
def test_layers_are_held_against_other_models(channels, layers, precision, close, monkeypatch):
    monkeypatch.setattr("evenhand.engine.fused.served", lambda device: True)
    module = convolutions(channels)
    layout = Shape.of(module)
    rows = layout.flat(module).to(DEVICE).repeat(ROWS, 1)
    module = module.to(DEVICE)
    x, targets = drawn(ROWS, 7, 196), torch.arange(ROWS * 7, device=DEVICE).view(ROWS, 7) % 4
    real = torch.tensor([[1.0] * 7, [1.0] * 5 + [0.0] * 2], device=DEVICE)  # of the second row two are padding
    weights = 1e-3 * real / real.sum(1, keepdim=True)  # so that the term is most of the gradient
    others = [layout.views(rows + scale * drawn(*rows.shape)) for scale in (0.02, 0.05)]
    found = []
    for program, how in ((Batched(module), "float32"), (Fused(module, DEVICE, precision), precision)):
        read = formed(program, x) if isinstance(program, Fused) else x
        with arithmetic(how):
            relations = [program.relations(layers, other, read, real) for other in others]
            like = Likeness(torch.full((ROWS, layers), 2.0, device=DEVICE), real, *relations)
            gradients, scores = program.gradients(layout.views(rows), read, targets, weights, None, like)
        whole = torch.cat(
            [one.flatten(1) for one in gradients], dim=1
        )  # a shift of all samples is not held, so that a bias has rounding
        found.append([*relations, whole, scores * real.unsqueeze(2)])
    for right, one in zip(*found, strict=True):
        near(one, right, close)


@pytest.mark.parametrize(("samples", "units"), [(6, 20), (70, 33)])
@pytest.mark.parametrize("looked_up", [True, False])
def test_recurrences(samples, units, looked_up):
    letters, alphabet = 4, 9
    shape = torch.Size([ROWS, letters, samples])
    flat = drawn(ROWS, 4 * units * units + 3)  # weights are views of longer rows
    weight = flat[:, : 4 * units * units].view(ROWS, 4 * units, units) / units**0.5
    driven = drawn(ROWS, alphabet if looked_up else letters * samples, 4 * units)
    places = torch.arange(shape.numel(), device=DEVICE).view(shape) % alphabet if looked_up else None
    expected = forwards(driven, places, shape, weight)
    found = recurrent_kernels.forwards(driven, places, shape, weight, precision="ieee")
    for one, right in zip(found, expected, strict=True):
        near(one, right)
    unkept = recurrent_kernels.forwards(driven, places, shape, weight, keep=False, precision="ieee")
    assert torch.equal(unkept[0], found[0])
    assert unkept[2] is None
    active = torch.ones(ROWS, samples, device=DEVICE)
    active[1] = 0.0
    still = recurrent_kernels.forwards(driven, places, shape, weight, active=active, precision="ieee")
    assert torch.equal(still[0][0], found[0][0])
    assert not still[0][1].any()
    for error in (drawn(ROWS, samples, units), drawn(*shape, units)):  # of the last state, or of all
        gates = [tuple(tensor.clone() for tensor in course) for course in (found, still)]
        right = backwards(Course(*expected), error, weight)
        near(recurrent_kernels.backwards(gates[0], error, weight, precision="ieee"), right)
        halted = recurrent_kernels.backwards(gates[1], error, weight, active=active, precision="ieee")
        near(halted[0], right[0])
        assert not halted[1].any()


@pytest.mark.parametrize("layers", [1, 2])
def test_character_models_train_by_the_kernels(layers, monkeypatch):
    """In the interpreter, too; of two rows the second may stand still."""
    monkeypatch.setattr("evenhand.engine.recurrent.served", lambda device: True)
    module = build("char-lstm", (5,), 12, seed=0, hidden=18, layers=layers)
    layout = Shape.of(module)
    rows, module = layout.flat(module).to(DEVICE).repeat(ROWS, 1), module.to(DEVICE)
    inputs = torch.arange(ROWS * 6 * 5, device=DEVICE).view(ROWS, 6, 5) * 7 % 12
    targets, weights = inputs[:, :, 2], drawn(ROWS, 6).abs() / 6
    program = Recurrent(module, DEVICE, "tf32")
    assert program.kernels is recurrent_kernels
    moved, half = rows.clone(), rows.clone()
    expected, scores = Batched(module).gradients(layout.views(rows), inputs, targets, weights)
    with arithmetic("tf32"):
        found, said = program.gradients(layout.views(rows), inputs, targets, weights)
        program.step(layout.views(moved), inputs, targets, weights)
        weights[1] = 0.0
        program.step(layout.views(half), inputs, targets, weights)
    for one, right in zip([*found, said], [*expected, scores], strict=True):
        assert torch.linalg.vector_norm(one - right) <= 5e-3 * torch.linalg.vector_norm(right)
    for view, start, own in zip(layout.views(moved).values(), layout.views(rows).values(), found, strict=True):
        torch.testing.assert_close(view, start - own, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(half[0], moved[0])
    assert torch.equal(half[1], rows[1])


def test_samples_that_float16_cannot_follow_are_refused(monkeypatch):
    monkeypatch.setattr("evenhand.engine.fused.served", lambda device: True)
    x = drawn(4, 196).clamp(-3.0, 3.0)
    for module, factor, precision in [
        (convolutions(3), 300.0, "tf32"),
        (convolutions(3), 1e5, "float32"),
        (linear_layers(196, 4), 1e5, "tf32"),  # these keep their numbers in float32
    ]:
        choose_program(module, "fused", DEVICE, precision, factor * x)
    with pytest.raises(EvenhandError, match=r"up to 30000, .*divide by 30000.*precision='float32'"):
        choose_program(convolutions(3), "fused", DEVICE, "tf32", 1e4 * x)
