"""The networks: the papers' sizes, batched training equal to one-by-one, seeded starts, and what cannot be batched."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from evenhand.checks import EvenhandError
from evenhand.models import LSTM, MODELS, build, models, must_fit, validate
from evenhand.models.networks import RELU_GAIN, NormFreeResidual, StandardisedConv2d

# Every network at a size that trains in a moment.
SMALL = {
    "logistic": ((60,), 10, {"zero_bias": True}),
    "mlp": ((3, 8, 8), 10, {}),
    "mlp4": ((99,), 2, {"width": 16}),
    "cnn": ((3, 16, 16), 10, {}),
    "cnn-mnist": ((64,), 10, {"hidden": 32, "padding": 2}),
    "resnet18-gn": ((3, 8, 8), 10, {"width": 8, "groups": 4}),
    "nf-resnet18": ((192,), 100, {}),
    "cct": ((3, 8, 8), 10, {"layers": 2, "width": 32}),
    "char-lstm": ((9,), 30, {"hidden": 16}),
}
CLIENTS, BATCH, LR = 3, 5, 0.1


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny networks: threads that wait for a busy core cost more than they help."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(name: str, seed: int = 0, **options) -> nn.Module:
    shape, classes, settings = SMALL[name]
    return build(name, shape, classes, seed=seed, **{**settings, **options})


def samples(name: str, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, classes, _ = SMALL[name]
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(*leading, *shape, generator=generator)
    if name == "char-lstm":
        inputs = torch.randint(classes, (*leading, *shape), generator=generator)
    return inputs, torch.randint(classes, leading, generator=generator)


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# ------------------------------------------------------------------------------------------- batched training


@pytest.mark.parametrize("double_softmax", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_batched_training_equals_one_by_one(name, double_softmax):
    """One SGD step of three different models on their own batches, to 1e-5 of the step's length."""
    inputs, labels = samples(name, CLIENTS, BATCH)
    clients = [small(name, seed=seed, double_softmax=double_softmax) for seed in range(CLIENTS)]
    stacked = {
        key: torch.stack([dict(client.named_parameters())[key].detach() for client in clients])
        for key, _ in clients[0].named_parameters()
    }

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(clients[0], parameters, (x,)), y)

    slopes = vmap(grad(loss))(stacked, inputs, labels)
    batched = torch.cat([(stacked[key] - LR * slope).flatten(1) for key, slope in slopes.items()], dim=1)
    for client, trained, x, y in zip(clients, batched, inputs, labels, strict=True):
        start = weights(client)
        optimiser = torch.optim.SGD(client.parameters(), lr=LR)
        F.cross_entropy(client(x), y).backward()
        optimiser.step()
        alone = weights(client)
        step = (alone - start).norm()
        assert step > 0
        assert (trained - alone).norm() <= 1e-5 * max(step, 1e-2 * alone.norm())


@pytest.mark.parametrize("name", SMALL)
def test_every_network_is_valid_and_learns(name):
    """The validator has nothing to say, and a few steps on one batch lower the loss."""
    model = small(name)
    inputs, labels = samples(name, 16)
    assert validate(model, inputs[:2]) == []
    assert isinstance(model, nn.Sequential)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(
        parameter.grad.abs().sum() > 0 for key, parameter in model.named_parameters() if key != "pool.score.bias"
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("cnn", {"dropout": True}), ("cct", {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.1})],
)
def test_dropout_is_remarked_on_and_different_for_every_client(name, options):
    model = small(name, **options)
    inputs, _ = samples(name, 4)
    findings = validate(model, inputs)
    assert findings
    assert not any(finding.blocking for finding in findings)
    stacked = {key: torch.stack([entry.detach()] * 3) for key, entry in model.named_parameters()}
    out = vmap(lambda p: functional_call(model, p, (inputs,)), randomness="different")(stacked)
    assert not torch.equal(out[0], out[1])
    model.eval()
    assert validate(model) == []
    assert torch.equal(model(inputs), small(name).eval()(inputs))


# ------------------------------------------------------------------------------------------- the papers' sizes


@pytest.mark.parametrize("entry", models(), ids=lambda entry: entry.name)
def test_the_table_counts_the_parameters(entry):
    model = build(entry.name, entry.shape, entry.classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.parameters
    assert not list(model.buffers())


def test_published_sizes():
    sizes = {entry.name: entry.parameters for entry in models()}
    assert sizes["mlp"] == 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
    assert sizes["resnet18-gn"] == 11_173_962  # ResNet-18 for CIFAR-10
    cct = build("cct", (3, 32, 32), 10)
    assert round(sum(p.numel() for p in cct.parameters()) / 1e6, 2) == 3.76  # CCT-7/3x1
    cnn = build("cnn", (3, 32, 32), 10)
    assert cnn.fc1.in_features == 1600
    mnist = build("cnn-mnist", (1, 28, 28), 10, outputs=62, conv_relu=False)
    assert (mnist.fc.in_features, mnist.fc.out_features, mnist.head.out_features) == (1024, 512, 62)
    assert [type(layer) for layer in mnist].count(nn.ReLU) == 1
    lstm = build("char-lstm", (80,), 80, layers=1)
    assert lstm.embedding.weight.shape == (80, 8)
    assert set(dict(lstm.lstm.named_parameters())) == {
        f"{p}_l0" for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }


@pytest.mark.parametrize("name", ["logistic", "mlp", "mlp4"])
def test_feed_forward_networks_are_plain(name):
    model = small(name)
    assert type(model) is nn.Sequential
    kinds = [type(layer) for layer in model]
    hidden = {"logistic": 0, "mlp": 2, "mlp4": 4}[name]
    assert kinds == [nn.Flatten] + [nn.Linear, nn.ReLU] * hidden + [nn.Linear]
    assert [type(layer) for layer in small(name, double_softmax=True)] == [*kinds, nn.Softmax]


def test_logistic_bias_starts_at_zero_when_asked():
    assert build("logistic", (784,), 3, zero_bias=True).head.bias.abs().sum() == 0
    assert build("logistic", (784,), 3).head.bias.abs().sum() > 0


@pytest.mark.parametrize("classes", [3, 10, 62])
def test_double_softmax_squeezes_the_loss(classes):
    """Losses lie in [ln(e + K - 1) - 1, ln(e + K - 1)], as in FedFV's published logs, and predictions stay."""
    plain, squeezed = (build("mlp", (20,), classes, double_softmax=double) for double in (False, True))
    inputs = 100 * torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
    losses = F.cross_entropy(squeezed(inputs), torch.zeros(200, dtype=torch.long), reduction="none")
    top = math.log(math.e + classes - 1)
    assert losses.min() >= top - 1 - 1e-5
    assert losses.max() <= top + 1e-5
    assert losses.max() - losses.min() > 0.9
    assert torch.equal(plain(inputs).argmax(1), squeezed(inputs).argmax(1))


# ------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_lstm_is_torchs(layers):
    torch.manual_seed(0)
    theirs = nn.LSTM(5, 7, layers, batch_first=True)
    ours = LSTM(5, 7, layers)
    ours.load_state_dict(theirs.state_dict())
    inputs = torch.randn(4, 11, 5)
    outputs, _ = theirs(inputs)
    torch.testing.assert_close(ours(inputs), outputs, rtol=1e-5, atol=1e-6)
    outputs.square().sum().backward()
    ours(inputs).square().sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_standardised_filters_have_mean_zero_and_variance_one_over_fan_in():
    torch.manual_seed(0)
    layer = StandardisedConv2d(6, 4, 3)
    with torch.no_grad():
        layer.weight.mul_(7.0).add_(3.0)
    unit = torch.eye(6 * 9).reshape(54, 6, 3, 3)
    filters = layer(unit)[:, :, 1, 1].T.detach()  # the response to each tap is the filter
    torch.testing.assert_close(filters.mean(1), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(filters.var(1, correction=0), torch.full((4,), 1 / 54), rtol=1e-4, atol=0)


def test_the_gain_keeps_the_variance_behind_a_relu():
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    assert (RELU_GAIN * F.relu(values)).var().item() == pytest.approx(1.0, abs=5e-3)


def test_a_norm_free_block_adds_a_small_branch():
    torch.manual_seed(0)
    block = NormFreeResidual(8, 8, 1, alpha=0.2, beta=1.0)
    x = torch.randn(64, 8, 16, 16)
    added = block(x) - x
    assert added.std().item() == pytest.approx(0.2, rel=0.25)


def test_group_norm_does_not_mix_samples():
    model = small("resnet18-gn")
    inputs, _ = samples("resnet18-gn", 4)
    torch.testing.assert_close(model(inputs)[:1], model(inputs[:1]), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", ["cnn", "cnn-mnist", "resnet18-gn", "nf-resnet18", "cct"])
@pytest.mark.parametrize(("shape", "image"), [((400,), (1, 20, 20)), ((20, 20), (1, 20, 20)), ((1200,), (3, 20, 20))])
def test_flat_samples_are_folded_into_images(name, shape, image):
    options = {key: value for key, value in SMALL[name][2].items() if key != "padding"}
    flat, folded = build(name, shape, 4, **options), build(name, image, 4, **options)
    inputs = torch.randn(2, *image, generator=torch.Generator().manual_seed(0))
    assert torch.equal(flat(inputs.reshape(2, *shape)), folded(inputs))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("cnn", (60,), "not samples of shape (60,); use 'mlp'"),
        ("cnn", (64,), "'cnn-mnist' with padding=2"),
        ("cnn", (32, 32, 3), "channels first"),
        ("cnn", (3, 4, 32, 32), "takes images"),
        ("resnet18-gn", (3, 4, 4), "at least 8 x 8"),
        ("char-lstm", (1, 28, 28), "rows of whole-number tokens"),
        ("mlp", (), "one sample's shape"),
        ("mlp", 784, "shape=784"),
        ("mlp", "784", "one sample's shape"),
        ("mlp", (0,), "a size in shape=0"),
        ("mlp", (7.5,), "a size in shape=7.5"),
    ],
)
def test_a_shape_that_does_not_fit_is_explained(name, shape, said):
    with pytest.raises(EvenhandError) as caught:
        build(name, shape, 10)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mpl", {}, "did you mean 'mlp'?"),
        ("mlp", {"widht": 3}, "did you mean 'width'? (its options: width, depth, outputs, double_softmax)"),
        ("mlp", {"width": 0}, "width=0"),
        ("mlp", {"depth": 1.5}, "depth=1.5"),
        ("mlp", {"outputs": 9}, "outputs=9"),
        ("mlp", {"double_softmax": 1}, "double_softmax=1"),
        ("mlp", {"seed": -1}, "seed=-1"),
        ("logistic", {"zero_bias": "yes"}, "zero_bias='yes'"),
        ("cnn", {"dropout": 0.2}, "dropout=0.2"),
        ("cnn-mnist", {"padding": 3}, "padding=3"),
        ("resnet18-gn", {"groups": 5}, "groups=5 does not divide width=64"),
        ("cct", {"heads": 3}, "heads=3 does not divide width=256"),
        ("cct", {"dropout": 1.0}, "dropout=1.0"),
        ("mlp:width=3", {}, "options are given apart from the name"),
        ("nowhere.at.all:Net", {}, "cannot import 'nowhere.at.all'"),
        ("torch.nn:Linaer", {}, "did you mean 'Linear'?"),
        ("torch.nn:Linear", {}, "missing a required argument: 'in_features'"),
        ("torch.nn:functional", {}, "not a class or function"),
        ("builtins:dict", {}, "made a dict, not a torch.nn.Module"),
        (None, {}, "unknown model None"),
    ],
)
def test_bad_names_and_options_are_named(name, options, said):
    with pytest.raises(EvenhandError) as caught:
        build(name, (3, 32, 32), 10, **options)
    assert said in str(caught.value)


def test_one_class_is_refused():
    with pytest.raises(EvenhandError, match="classes=1"):
        build("mlp", (4,), 1)


# ------------------------------------------------------------------------------------------- your own


class Told(nn.Module):
    def __init__(self, shape, classes, width=5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(math.prod(shape), width), nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)


class Untold(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)


def made(classes):
    return nn.Linear(4, classes)


def test_your_own_class_by_import_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "ours", sys.modules[__name__])
    told = build("ours:Told", (4,), 3, width=7, outputs=6)
    assert [tuple(p.shape) for p in told.parameters()] == [(7, 4), (7,), (6, 7), (6,)]
    assert isinstance(build("ours:Untold", (4,), 2), Untold)
    assert build("ours:made", (4,), 9).out_features == 9
    assert torch.equal(weights(build("ours:Told", (4,), 3, seed=5)), weights(build("ours:Told", (4,), 3, seed=5)))
    softened = build("ours:Untold", (4,), 2, double_softmax=True)
    torch.testing.assert_close(softened(torch.ones(1, 4)).sum(), torch.tensor(1.0))
    with pytest.raises(EvenhandError, match=r"unexpected keyword argument 'depth'.*Told\(shape, classes, width=5\)"):
        build("ours:Told", (4,), 3, depth=2)


def broken():
    raise ZeroDivisionError("no width")


def test_a_failure_in_your_own_code_is_named_with_its_place(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ours", sys.modules[__name__])
    with pytest.raises(
        EvenhandError, match=r"'ours:broken' fails when it is made \(ZeroDivisionError: no width; test_mod"
    ):
        build("ours:broken", (4,), 3)
    (tmp_path / "half_written.py").write_text("\nclass Net(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EvenhandError, match=r"'half_written' fails when it is imported \(SyntaxError: "):
        build("half_written:Net", (4,), 3)


def test_a_network_that_does_not_fit_the_data_is_refused():
    must_fit("ours:Told", Told((4,), 3), torch.ones(2, 4), 3)
    must_fit("ours:Told", Told((4,), 3), torch.ones(2, 4), 2)  # a score too many does no harm
    with pytest.raises(EvenhandError, match=r"batch of shape \(2, 5\) \(RuntimeError: .*; test_models\.py, line \d+\)"):
        must_fit("ours:Told", Told((4,), 3), torch.ones(2, 5), 3)
    with pytest.raises(EvenhandError, match=r"with shape \(2, 3\); it should be scores of shape \(2, 4\)"):
        must_fit("ours:Told", Told((4,), 3), torch.ones(2, 4), 4)
    with pytest.raises(EvenhandError, match=r"with shape \(2, 1, 3\)"):
        must_fit("ours:Told", Told((4,), 3), torch.ones(2, 1, 4), 3)
    random, before = nn.Sequential(nn.Dropout(), Told((4,), 3)), torch.random.get_rng_state()
    must_fit("ours:Told", random, torch.ones(2, 4), 3)
    assert torch.equal(torch.random.get_rng_state(), before)


# ------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("name", SMALL)
def test_the_start_follows_from_the_seed_alone(name):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(small(name, seed=3))
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's draws are disturbed
    torch.manual_seed(2)
    torch.rand(5)
    assert torch.equal(weights(small(name, seed=3)), first)
    assert not torch.equal(weights(small(name, seed=4)), first)


def test_the_start_is_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        model = build("mlp", (4,), 2)
    assert torch.equal(weights(model), weights(build("mlp", (4,), 2)))


def test_the_start_does_not_change_between_releases():
    """A published run repeats only while these stay: first weights of seed 0, uniform and normal."""
    uniform = build("mlp", (784,), 10).hidden1.weight.flatten()[:3]
    normal = build("cct", (3, 32, 32), 10).head.weight.flatten()[:3]
    torch.testing.assert_close(uniform, torch.tensor([-0.00026739, 0.01915870, -0.02939447]), rtol=0, atol=1e-7)
    torch.testing.assert_close(normal, torch.tensor([-0.01028760, -0.00078569, 0.00829378]), rtol=0, atol=1e-7)


# ------------------------------------------------------------------------------------------- the validator


class Branch(Untold):
    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Counts(Untold):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "1 (BatchNorm1d) shares statistics"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True)),
            "track_running_stats=False",
        ),
        (nn.LSTM(4, 4), "evenhand.models.LSTM"),
        (nn.GRU(4, 4), "evenhand.models.LSTM"),
        (nn.Embedding(4, 2, sparse=True), "sparse=False"),
        (nn.Embedding(4, 2, max_norm=1.0), "max_norm=None"),
        (nn.Sequential(nn.Linear(4, 4), nn.RReLU()), "nn.LeakyReLU"),
        (nn.LazyLinear(3), "no sizes yet"),
        (nn.ReLU(), "no parameters"),
        (Counts(), "holds buffers (seen)"),
        (nn.DataParallel(nn.Linear(2, 2)), "give the module inside"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_batched_is_explained(module, said):
    (finding,) = validate(module)
    assert finding.blocking
    assert said in finding


def test_a_branch_on_the_data_shows_when_run():
    assert validate(Branch()) == []
    (finding,) = validate(Branch(), torch.randn(3, 4))
    assert finding.blocking
    assert "branches on the data" in finding


@pytest.mark.parametrize("module", [nn.Dropout(0.3), nn.MultiheadAttention(4, 2, dropout=0.1)])
def test_dropout_is_a_remark_in_training_only(module):
    model = nn.Sequential(nn.Linear(4, 4), module)
    (finding,) = validate(model)
    assert not finding.blocking
    assert "random numbers" in finding
    assert validate(model.eval()) == []


def test_the_validator_leaves_the_module_and_the_generator_alone():
    model = small("cnn", dropout=True)
    start, state = weights(model), torch.random.get_rng_state()
    validate(model, samples("cnn", 2)[0])
    assert torch.equal(weights(model), start)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


# ------------------------------------------------------------------------------------------- the table


def test_the_table_prints_every_network_and_its_options():
    text = repr(models())
    assert [entry.name for entry in models()] == list(MODELS) == list(SMALL)
    for entry in models():
        assert entry.name in text
        assert f"{entry.parameters:,}" in text
        assert entry.summary in text
        assert entry.summary
        assert entry.paper
        assert set(entry.options) == set(inspect.getfullargspec(MODELS[entry.name].make).kwonlyargs)
    assert models()[1].options == {"width": 200, "depth": 2}


def test_importing_the_networks_needs_torch_alone():
    blocked = """
import sys
for name in ("torchvision", "timm", "pandas", "sklearn"):
    sys.modules[name] = None
import evenhand.models, evenhand.fairness
print(evenhand.fairness.client_fairness([0.5, 0.7]), evenhand.models.models())
"""
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
