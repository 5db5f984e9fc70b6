"""Group fairness in training: constraints, the objectives built on them, and whole runs against the papers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

import evenhand as eh
from evenhand.checks import EvenhandError
from evenhand.constraints import Constraints, Sums, View, signed_gap
from evenhand.counts import KINDS, measures_from_counts
from evenhand.data import Dataset
from evenhand.engine import training
from evenhand.engine.checkpoint import restore, save
from evenhand.engine.graphs import Replayed
from evenhand.engine.groups import cells_of
from evenhand.experiment import Experiment, prepare
from evenhand.group_objectives import FairBatch, GroupConstraints, Reweighted
from evenhand.methods import method
from evenhand.models import build

PROPERTY = settings(max_examples=60, deadline=None)
METHODS = ("mfairfl", "fpfl", "fedavg-f", "indfair", "cenfair", "fedfb", "fairfed")


def people(count: int, classes: int, attributes: int, seed: int, clients: int = 3) -> Dataset:
    """Random people whose labels go with what they are, held by unequal clients; the first attribute has two groups."""
    rng = np.random.default_rng(seed)
    who = {f"a{place}": rng.integers(0, 2 + place, count) for place in range(attributes)}
    inputs = rng.standard_normal((count, 4)) + 0.8 * who["a0"][:, None]
    labels = (inputs @ rng.standard_normal((4, classes)) + rng.standard_normal((count, classes))).argmax(1)
    owner = rng.choice(clients, count, p=np.arange(1, clients + 1) / np.arange(1, clients + 1).sum())
    return Dataset(
        "people",
        torch.from_numpy(inputs).float(),
        torch.from_numpy(labels),
        classes,
        columns={**who, "client": owner},
        sensitive=tuple(who),
    )


def one_sided() -> Dataset:
    """Four clients, of whom one has nobody of the first group and one has a single label."""
    data = people(120, 2, 1, seed=1, clients=4)
    owner, who = data.columns["client"], data.columns["a0"]
    owner[(owner == 0) & (who == 0)] = 1
    owner[(owner == 2) & (data.labels == 1)] = 3
    return data


# ------------------------------------------------------------------------------------- gaps, straight from their words


def answers(data: Dataset, seed: int, sure: bool = False):
    """Random probabilities and losses of every sample, float64; sure: one class has it all."""
    rng = np.random.default_rng(seed)
    said = rng.dirichlet(np.ones(data.classes), len(data))
    if sure:
        said = np.eye(data.classes)[said.argmax(1)]
    return torch.tensor(said, requires_grad=True), torch.tensor(rng.exponential(1.0, len(data)), requires_grad=True)


def masks(data: Dataset) -> list[torch.Tensor]:
    return [torch.from_numpy(one.codes == code) for one in data.groups() for code in range(len(one.values))]


def summed(data: Dataset, said: torch.Tensor, losses: torch.Tensor, rows: list[np.ndarray]) -> Sums:
    """Sums over cells, sample by sample."""
    cells, place = cells_of(data)
    totals = np.zeros((len(rows), cells.count, 2 * data.classes + 1))
    for row, samples in enumerate(rows):
        for i in samples:
            hit = np.eye(data.classes)[int(said[i].argmax())]
            totals[row, int(place[i])] += [*said[i].tolist(), losses[i].item(), *hit]
    return Sums(totals[..., : data.classes], totals[..., data.classes], totals[..., data.classes + 1 :])


def rows_of(data: Dataset) -> list[np.ndarray]:
    """Everybody; one group alone; one label alone; a few."""
    first = masks(data)[0].numpy()
    return [np.arange(len(data)), np.flatnonzero(first), np.flatnonzero(data.labels == 0), np.arange(5)]


SHAPES = [(2, 1), (3, 1), (2, 2), (3, 2)]  # classes, attributes
MEASURED = [*((kind, "probability") for kind in KINDS), ("ap", "loss")]


@pytest.mark.parametrize(("classes", "attributes"), SHAPES)
@pytest.mark.parametrize(("kind", "relaxation"), MEASURED)
def test_gaps_and_their_push_follow_the_definition(classes, attributes, kind, relaxation):
    data = people(70, classes, attributes, seed=classes)
    (cells, place), (said, losses), rows = cells_of(data), answers(data, 1), rows_of(data)
    constraints, sums = Constraints.of(cells, [kind], relaxation), summed(data, said, losses, rows)
    gaps = constraints.gaps(sums)
    multipliers = np.random.default_rng(2).standard_normal(gaps.shape)
    push = constraints.push(sums, multipliers)
    assert len(set(constraints.names)) == len(constraints) == gaps.shape[1]
    assert np.isnan(gaps[1:]).any()
    assert np.isfinite(push).all()
    for row, samples in enumerate(rows):
        own = torch.from_numpy(samples)
        found = oracles.deviations(
            "loss" if relaxation == "loss" else kind,
            said[own],
            losses[own],
            data.targets[own],
            [mask[own] for mask in masks(data)],
        )
        np.testing.assert_allclose(gaps[row], [np.nan if gap is None else gap.item() for gap in found], atol=1e-12)
        terms = [m * gap for m, gap in zip(multipliers[row], found, strict=True) if gap is not None]
        total = sum(terms, 0.0 * said.sum())
        by_said, by_losses = torch.autograd.grad(total, [said, losses], allow_unused=True, materialize_grads=True)
        expected = torch.cat([by_said, by_losses[:, None]], dim=1)[own].numpy()
        np.testing.assert_allclose(push[row][place[own]], expected, atol=1e-12)


def test_nobody_is_pushed_for_a_group_that_is_not_there():
    data = people(70, 2, 1, seed=2)
    constraints = Constraints.of(cells_of(data)[0], ["dp"])
    sums = summed(data, *answers(data, 1), [np.flatnonzero(masks(data)[0].numpy())])
    assert np.isnan(constraints.gaps(sums))[0].tolist() == [False, True]
    assert not constraints.push(sums, np.array([[0.0, 7.0]])).any()


@pytest.mark.parametrize(("classes", "attributes"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_with_hard_predictions_the_widest_gap_is_the_measure(classes, attributes, kind):
    data = people(200, classes, attributes, seed=3)
    cells, _ = cells_of(data)
    sums = summed(data, *answers(data, 4, sure=True), rows_of(data))
    gaps = Constraints.of(cells, [kind]).gaps(sums)
    for row in range(len(gaps)):
        measured = measures_from_counts(cells.tables(sums.hits[row]))[kind]
        assert np.fmax.reduce(np.abs(gaps[row])) == pytest.approx(measured, abs=1e-12, nan_ok=True)
    assert np.isfinite(gaps[0]).all()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_fairfeds_gap_is_the_second_groups_rate_minus_the_firsts(classes, kind):
    data = people(200, classes, 1, seed=5)
    (cells, _), (said, losses) = cells_of(data), answers(data, 6, sure=True)
    found = signed_gap(cells, summed(data, said, losses, rows_of(data)), kind)
    gaps = [gap.item() for gap in oracles.deviations(kind, said, losses, data.targets, masks(data))]
    outcomes = 1 if classes == 2 or kind in ("eopp", "ap") else classes
    by_group = np.array(gaps).reshape(-1, 2, outcomes)
    differences = (by_group[:, 0] - by_group[:, 1]).ravel()  # everyone's rate cancels out
    assert found[0] == pytest.approx(differences[np.abs(differences).argmax()], abs=1e-12)
    assert np.isnan(found[1])  # one group alone has nothing to be compared with


def test_several_measures_are_held_at_once():
    data = people(70, 3, 2, seed=2)
    cells, _ = cells_of(data)
    sums = summed(data, *answers(data, 1), rows_of(data))
    both = Constraints.of(cells, ["dp", "ap"])
    apart = [Constraints.of(cells, [kind]) for kind in ("dp", "ap")]
    assert both.names == apart[0].names + apart[1].names
    np.testing.assert_array_equal(both.gaps(sums), np.hstack([one.gaps(sums) for one in apart]))


# ------------------------------------------------------------------------------------------- whole rounds by the papers

STEPS = {"batch_size": None, "participation": 1.0, "eval_every": 100, "lr": 0.3, "device": "cpu"}
SMALL = {"data": "synthetic-groups", "data_options": {"samples": 160}, "model": "logistic", **STEPS}
NETWORKS = {"logistic": {"model": "logistic"}, "mlp": {"model": "mlp", "model_options": {"width": 6, "depth": 1}}}


def simulation_of(name, data: Dataset | None = None, together: bool = False, **changes):
    """A simulation ready to run; together: all replicas as one program, as on a GPU."""
    chosen = {**SMALL, "rounds": 6, **changes}
    if data is not None:
        chosen |= {"data": "digits", "data_options": {}, "partition": changes.get("partition", "natural")}
    methods = [method(one) for one in ([name] if isinstance(name, str) else name)]
    made = prepare(Experiment().with_settings({**chosen, "method": methods[0]}), methods, dataset=data)
    if together:
        made.together = True
    return made


def played(name, data: Dataset | None = None, **changes):
    made = simulation_of(name, data, **changes)
    made.run()
    return made


def vector(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).double().numpy()


def model_of(made, replica: int = 0) -> np.ndarray:
    return vector(made.shape.views(made.replicas[replica].model.unsqueeze(0)))


def network(module):
    """The initial model as a vector, and the network's scores as a function of such a vector, in float64."""
    start, module = dict(module.named_parameters()), module.double()

    def scores(model: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        pieces = model.split([tensor.numel() for tensor in start.values()])
        named = {name: piece.view(start[name].shape) for name, piece in zip(start, pieces, strict=True)}
        return functional_call(module, named, (inputs,))

    return vector(start), scores


def holders(data: Dataset, partition) -> list[dict]:
    """What each client trains on, as the oracles read it."""
    each = [torch.from_numpy(partition.train[k]) for k in range(partition.clients)]
    return [
        {"inputs": data.inputs[own].double(), "labels": data.targets[own], "groups": [one[own] for one in masks(data)]}
        for own in each
    ]


def agree(found: np.ndarray, expected: np.ndarray, start: np.ndarray, tolerance: float = 1e-4) -> None:
    """Equal relative to how far the rounds have gone."""
    moved = np.linalg.norm(expected - start)
    assert moved > 1e-2
    assert np.linalg.norm(found - expected) <= tolerance * moved


def compare(name: str, oracle, data: Dataset | None = None, rounds: int = 6, lr: float = 0.3, **changes) -> None:
    made = played(name, data, rounds=rounds, lr=lr, **changes)
    replica = made.replicas[0]
    shape, options = made.dataset.shape, changes.get("model_options", {})
    start, scores = network(build(changes.get("model", "logistic"), shape, made.dataset.classes, **options))
    expected = oracle(start, holders(made.dataset, replica.partition), scores, rounds, lr)
    found = model_of(made) if expected.ndim == 1 else _personal(made)
    agree(found, expected, start)


def _personal(made) -> np.ndarray:
    views = made.shape.views(made.replicas[0].personal)
    return np.concatenate([view.flatten(1).double().numpy() for view in views.values()], axis=1)


def settings_of(text: str) -> dict:
    """The constraint's settings of a method, as the oracles take them."""
    objective = method(text).objective
    return {
        "kinds": ["loss"] if objective.relaxation == "loss" else list(objective.kinds),
        **{key: getattr(objective, key) for key in ("alpha", "gamma", "damping", "form", "sharpness")},
    }


def cenfair(model, clients, *more, **constraint):
    return oracles.fedavg_f(model, [oracles.merged(clients)], *more, **constraint)


ORACLES = {
    "mfairfl": oracles.mfairfl,
    "fpfl": oracles.fpfl,
    "fedavg-f": oracles.fedavg_f,
    "indfair": oracles.indfair,
    "cenfair": cenfair,
}
CONSTRAINED = {
    "paper": "form=absolute,gamma=0.5",
    "two-sided": "gamma=0.5,alpha=0.02",
    "odds": "form=absolute,measure=eodds",
    "opportunity": "measure=eopp,sharpness=3",
    "accuracy": "measure=dp+ap,form=absolute,alpha=0.05",
    "loss": "measure=ap,relaxation=loss,gamma=0.2",
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("case", CONSTRAINED)
@pytest.mark.parametrize("name", ["mfairfl", "fpfl", "fedavg-f", "indfair", "cenfair"])
def test_constrained_rounds_follow_the_papers(name, case, kind):
    text = f"{name}:{CONSTRAINED[case]}"
    constraint = settings_of(text)
    compare(text, lambda *given: ORACLES[name](*given, **constraint), **NETWORKS[kind])


@pytest.mark.parametrize("measure", ["dp", "eodds", "eopp", "ap", "dp+ap"])
@pytest.mark.parametrize("name", ORACLES)
def test_constrained_rounds_take_three_classes_and_two_attributes(name, measure):
    text = f"{name}:measure={measure},gamma=0.5"
    constraint = settings_of(text)
    compare(text, lambda *given: ORACLES[name](*given, **constraint), people(150, 3, 2, seed=7))


@pytest.mark.parametrize("measure", ["dp", "eodds", "ap"])
@pytest.mark.parametrize("name", ORACLES)
def test_constrained_rounds_take_clients_without_a_group_or_a_label(name, measure):
    text = f"{name}:measure={measure},gamma=0.5"
    constraint = settings_of(text)
    compare(text, lambda *given: ORACLES[name](*given, **constraint), one_sided())


@pytest.mark.parametrize("form", ["two-sided", "absolute"])
@pytest.mark.parametrize("measure", ["dp", "eodds", "dp+ap"])
@pytest.mark.parametrize("groups", [1, 2])
def test_gaps_are_followed_through_a_rounds_steps(form, measure, groups, monkeypatch):
    monkeypatch.setattr(training, "MEMORY", 1e-9)  # a full batch shows every cell as it is
    text = f"fpfl:measure={measure},form={form},gamma=0.5,damping=2,alpha=0.02"
    constraint = settings_of(text)
    oracle = partial(oracles.fpfl_followed, steps=5, **constraint)
    compare(text, oracle, people(120, 2, groups, seed=3), rounds=3, epochs=5)


def test_damping_that_follows_the_gaps_does_not_swing():
    long = {"epochs": 20, "batch_size": 32, "rounds": 8, "data_options": {"samples": 1200}, "lr": 0.2, "eval_every": 1}
    swings = {}
    for follow in ("true", "false"):
        made = played(f"fpfl:gamma=1,damping=3,follow={follow}", **long)
        cells = made.cells
        swings[follow] = [
            float(cells.measures(entry["predicted"])["dp"]) for entry in made.replicas[0].evaluations[-4:]
        ]
    assert max(swings["true"]) < 0.5 * max(swings["false"])


@pytest.mark.parametrize(("beta", "delta"), [(0.3, 0.01), (1.0, 0.9)])
def test_mfairfl_repairs_conflicts_among_constrained_updates(beta, delta):
    data = people(90, 2, 1, seed=11, clients=4)
    text = f"mfairfl:form=absolute,gamma=5,beta={beta},delta={delta}"
    constraint = settings_of(text)
    made = played(text, data, rounds=9)
    assert any(np.ptp(entry["coefficients"]) > 1e-3 for entry in made.replicas[0].rounds)
    compare(text, lambda *given: oracles.mfairfl(*given, beta, delta, **constraint), data, rounds=9)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("step", [0.3, 5.0])
def test_fedfb_follows_its_paper(kind, groups, step):
    options = {"samples": 160, "groups": groups}
    compare(
        f"fedfb:step={step}",
        lambda *given: oracles.fedfb(*given, step),
        data_options=options,
        **NETWORKS[kind],
    )


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_fairfed_follows_its_paper(kind, beta):
    compare(f"fairfed:beta={beta}", lambda *given: oracles.fairfed_rounds(*given, beta), **NETWORKS[kind])


def test_fairfed_goes_by_accuracy_where_a_client_has_one_group_alone():
    compare("fairfed:beta=0.5", lambda *given: oracles.fairfed_rounds(*given, 0.5), one_sided())


def test_fairfed_without_local_reweighting_takes_plain_steps():
    made, plain = played("fairfed:debias=false,beta=0"), played("fedavg")
    np.testing.assert_allclose(model_of(made), model_of(plain), rtol=1e-6)


def test_indfair_is_measured_as_the_mixture_of_all_models():
    made = played("indfair", **NETWORKS["mlp"])
    replica, data = made.replicas[0], made.dataset
    module = build("mlp", data.shape, 2, width=6, depth=1)
    mixture = torch.zeros(len(data), 2, dtype=torch.float64)
    assert (replica.personal != replica.model).any(1).all()  # everyone has trained
    for client in range(3):
        named = {name: view[client] for name, view in made.shape.views(replica.personal).items()}
        mixture += torch.softmax(functional_call(module, named, (data.inputs,)).detach().double(), dim=1) / 3
    losses = -mixture[torch.arange(len(data)), data.targets].log()
    right = mixture.argmax(1) == data.targets
    (start, evaluation) = replica.evaluations
    for client in range(3):
        own = replica.partition.test[client]
        assert evaluation["losses"][client] == pytest.approx(float(losses[own].mean()), rel=1e-5)
        assert evaluation["accuracies"][client] == float(right[own].double().mean())
    everyone = replica.partition.test.indices
    groups = oracles.deviations(
        "dp",
        torch.eye(2)[mixture.argmax(1)][everyone],
        None,
        data.targets[everyone],
        [m[everyone] for m in masks(data)],
    )
    found = measures_from_counts(made.cells.tables(evaluation["predicted"]))["dp"]
    assert found == pytest.approx(max(abs(float(gap)) for gap in groups), abs=1e-6)
    assert start["pooled_loss"] != evaluation["pooled_loss"]
    replica.personal *= 1e4  # models that are sure of themselves still have a finite loss
    made.evaluate()
    assert np.isfinite(replica.evaluations[-1]["losses"]).all()


@pytest.mark.parametrize("name", ["mfairfl", "fedavg-f", "indfair", "fedfb", "fairfed"])
def test_every_program_trains_the_same(name):
    several = {"batch_size": 16, "epochs": 3, "rounds": 4, **NETWORKS["mlp"]}
    expected = played(name, program="feed-forward", **several)
    for program in ("sequential", "batched"):
        found = played(name, program=program, **several)
        for one, other in zip(kept(found), kept(expected), strict=True):
            assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)


def kept(made) -> list[np.ndarray]:
    """All the models that a simulation ends with."""
    models = [model_of(made, number) for number in range(len(made.replicas))]
    return models + [replica.personal.numpy() for replica in made.replicas if replica.personal is not None]


# --------------------------------------------------------------------------------------------------------- limit cases


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("fpfl:gamma=0,damping=0", "fedavg"),
        ("fedavg-f:gamma=0", "fedavg"),
        ("fedfb:step=0", "fedavg"),
        ("mfairfl:gamma=0", "mfairfl:measure=off"),
        ("mfairfl:gamma=0,beta=0", "fedavg:weights=uniform"),
        ("cenfair:gamma=0", "cenfair:measure=off"),
    ],
)
@pytest.mark.parametrize("work", [{}, {"batch_size": 16}, {"participation": 0.34}])
def test_without_force_a_method_is_the_plain_one(name, plain, work):
    found, expected = (played(one, **{**NETWORKS["mlp"], **work}) for one in (name, plain))
    np.testing.assert_allclose(model_of(found), model_of(expected), rtol=1e-6, atol=1e-7)
    stronger = played(name.partition(":")[0], **{**NETWORKS["mlp"], **work})
    assert np.linalg.norm(model_of(stronger) - model_of(expected)) > 1e-3


def test_conflicts_can_be_repaired_without_groups():
    (run,) = eh.simulate(method="mfairfl:measure=off", data="digits", clients=6, rounds=30, participation=1.0)
    assert run.evaluations[-1]["pooled_accuracy"] > run.evaluations[0]["pooled_accuracy"] + 0.3
    assert not any("told" in entry for entry in run.rounds)
    with pytest.raises(EvenhandError, match="measure=off"):
        eh.simulate(method="mfairfl", data="digits", rounds=1)


@pytest.mark.parametrize("batch_size", [None, 16])
def test_one_client_alone_trains_as_the_pooled_data_do(batch_size):
    one = {"partition": "iid", "clients": 1, "batch_size": batch_size}
    expected = model_of(played("cenfair", **one))
    for name in ("fedavg-f", "fpfl:damping=0", "mfairfl"):
        np.testing.assert_allclose(model_of(played(name, **one)), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(_personal(played("indfair", **one))[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mfairfl", "fpfl", "cenfair"])
def test_both_forms_agree_until_a_gap_changes_its_sign(name):
    few = {"lr": 0.05, "rounds": 20, "seeds": [3]}
    both = [played(f"{name}:form={form},gamma=0.3", **few) for form in ("absolute", "two-sided")]
    if name != "cenfair":
        signs = np.sign([entry["told"]["gaps"] for entry in both[0].replicas[0].rounds])
        assert (signs == signs[0]).all()
    np.testing.assert_allclose(model_of(both[0]), model_of(both[1]), rtol=1e-6, atol=1e-7)
    apart = [played(f"{name}:form={form},gamma=5", rounds=30) for form in ("absolute", "two-sided")]
    assert np.linalg.norm(model_of(apart[0]) - model_of(apart[1])) > 1e-2  # it has, and one of them is pushed back less


def parity(made) -> float:
    """Demographic parity on the training data."""
    data, rows = made.dataset, made.replicas[0].partition.train.indices
    views = made.shape.views(made.replicas[0].model.unsqueeze(0))
    module = build("logistic", data.shape, data.classes)
    chosen = functional_call(module, {name: view[0] for name, view in views.items()}, (data.inputs[rows],)).argmax(1)
    gaps = oracles.deviations("dp", torch.eye(2)[chosen], None, data.targets[rows], [one[rows] for one in masks(data)])
    return max(abs(float(gap)) for gap in gaps)


def test_the_stronger_the_multipliers_the_smaller_the_gap():
    long = {"rounds": 40, "lr": 0.1, "data_options": {"samples": 1000}}
    plain = parity(played("fedavg", **long))
    assert plain > 0.3
    weak, strong = (parity(played(f"fpfl:gamma={gamma}", **long)) for gamma in (0.1, 1.0))
    assert strong < 0.1 < weak < 0.75 * plain
    assert parity(played("mfairfl", **long)) < 0.1
    assert parity(played("fedavg-f", **long)) < 0.1
    assert parity(played("cenfair", **long)) < 0.1
    assert parity(played("fedfb", **long)) < 0.6 * plain


# -------------------------------------------------------------------------------------------------------- any counts


OBJECTIVES = {
    "server": GroupConstraints(measure="dp+eodds+ap", damping=0.5),
    "server, absolute": GroupConstraints(measure="eopp", form="absolute"),
    "client": GroupConstraints(measure="dp+ap", multipliers="client"),
    "loss": GroupConstraints(measure="ap", relaxation="loss"),
    "fair-batch": FairBatch(step=2.0),
    "reweighted": Reweighted(),
}


@st.composite
def views(draw, classes: int, rounds: int = 3):
    """What some clients say in a few rounds: cells may be empty, clients may have one group alone, or come and go."""
    cells, _ = cells_of(people(40, classes, draw(st.integers(1, 2)), seed=0))
    found = []
    for index in range(rounds):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        clients = tuple(rng.choice(6, int(rng.integers(1, 5)), replace=False).tolist())
        counts = rng.integers(0, 12, (len(clients), cells.count)) * (rng.random((len(clients), cells.count)) < 0.5)
        counts[np.arange(len(clients)), rng.integers(0, cells.count, len(clients))] += 1  # nobody is without data
        if rng.random() < 0.3:
            counts[:, :classes] = 0  # the first group is missing from the round
            counts[:, -1] += 1
        shares = rng.dirichlet(np.ones(classes), counts.shape)
        hits = rng.multinomial(counts, shares).astype(float)
        sums = Sums(counts[..., None] * shares, counts * rng.exponential(1.0, counts.shape), hits)
        found.append(View(cells, sums, clients, rng.dirichlet(np.ones(len(clients))), index))
    return found


def classes_of(which: str) -> int:
    return 2 if which == "fair-batch" else 3


@PROPERTY
@pytest.mark.parametrize("which", OBJECTIVES)
@given(given=st.data())
def test_whatever_is_counted_everything_told_is_finite(which, given):
    memo = {}
    for view in given.draw(views(classes_of(which))):
        leaning = OBJECTIVES[which].lean(view, memo)
        memo = leaning.memo
        assert leaning.tables.shape == (len(view.clients), view.cells.count, view.cells.classes + 1)
        assert np.isfinite(leaning.tables).all()
        if leaning.followed is not None:
            followed = [value for value in vars(leaning.followed).values() if isinstance(value, np.ndarray)]
            assert all(len(value) == len(view.clients) and np.isfinite(value).all() for value in followed)
        assert (np.asarray(memo.get("multipliers", 0.0)) >= 0.0).all()
        if which in ("fair-batch", "reweighted"):
            assert (leaning.tables >= 0.0).all()
        if leaning.sizes is not None:
            assert np.isfinite(leaning.sizes).all()


@PROPERTY
@pytest.mark.parametrize("which", OBJECTIVES)
@given(given=st.data())
def test_the_order_of_the_clients_does_not_matter(which, given):
    memo = other = {}
    for view in given.draw(views(classes_of(which))):
        order = np.array(given.draw(st.permutations(range(len(view.clients)))))
        clients = tuple(view.clients[k] for k in order)
        shuffled = replace(view, sums=view.sums.rows(order), clients=clients, shares=view.shares[order])
        here, there = OBJECTIVES[which].lean(view, memo), OBJECTIVES[which].lean(shuffled, other)
        memo, other = here.memo, there.memo
        np.testing.assert_allclose(there.tables, here.tables[order], rtol=1e-9, atol=1e-9)
        if here.followed is not None:
            for name in ("slopes", "changes", "gaps", "means", "up", "down"):
                one, other_one = getattr(here.followed, name), getattr(there.followed, name)
                np.testing.assert_allclose(other_one, one[order], rtol=1e-9, atol=1e-9)
        if here.sizes is not None:
            np.testing.assert_allclose(there.sizes, here.sizes[order], rtol=1e-9)


@PROPERTY
@given(views(2, rounds=6))
def test_an_absent_client_keeps_its_multipliers(seen):
    objective, memo, held = OBJECTIVES["client"], {}, {}
    for view in seen:
        memo = objective.lean(view, memo).memo
        known = dict(zip(memo["clients"], np.moveaxis(memo["multipliers"], 1, 0), strict=True))
        for client, multipliers in held.items():
            if client not in view.clients:
                np.testing.assert_array_equal(known[client], multipliers)
        held = known


@PROPERTY
@given(views(2, rounds=1))
def test_reweighting_makes_group_and_label_independent(seen):
    (view,) = seen
    tables = Reweighted().lean(view, {}).tables[..., -1]
    for row, counts in enumerate(view.sums.counts):
        weighed = (tables[row] * counts).reshape(view.cells.joint, 2)
        if (counts.reshape(-1, 2)[counts.reshape(-1, 2).sum(1) > 0] > 0).all():  # every group has both labels
            expected = np.outer(weighed.sum(1), weighed.sum(0)) / weighed.sum()
            np.testing.assert_allclose(weighed, expected, atol=1e-9)
            assert weighed.sum() == pytest.approx(counts.sum())


def test_fedfb_keeps_the_weights_of_a_group_that_a_round_is_without():
    data = people(40, 2, 1, seed=0)
    cells, _ = cells_of(data)
    everyone, second = np.array([[6.0, 4.0, 5.0, 7.0]]), np.array([[0.0, 0.0, 5.0, 7.0]])

    def view(counts, index):
        sums = Sums(np.zeros((1, 4, 2)), counts * [[0.3, 0.5, 0.4, 0.9]], np.stack([counts, 0 * counts], axis=-1))
        return View(cells, sums, (0,), np.ones(1), index)

    objective, memo = FairBatch(step=0.0), {}
    for index, counts in enumerate((second, everyone, second, everyone)):
        leaning = objective.lean(view(counts, index), memo)
        memo = leaning.memo
        np.testing.assert_allclose(leaning.tables[0, :, -1], 1.0)  # nothing has moved


@pytest.mark.parametrize("name", [*METHODS, "fpfl:measure=eodds+ap", "fedavg-f:measure=eopp", "indfair:measure=eodds"])
def test_clients_without_a_group_or_a_label_take_part(name):
    data = one_sided()
    made = played(name, data, batch_size=8, rounds=5)
    assert all(np.isfinite(model).all() for model in kept(made))
    for entry in made.replicas[0].rounds:
        assert np.isfinite(entry["losses"]).all()
    assert np.isfinite(made.replicas[0].evaluations[-1]["losses"]).all()


# ----------------------------------------------------------------------------------- stopped, together, in pieces, less

SOME = {
    "data_options": {"samples": 240},
    "partition": "iid",
    "clients": 8,
    "batch_size": 16,
    "participation": 0.375,
    "rounds": 6,
}


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_continues_to_the_same_bits(name, tmp_path):
    through = played(name, **SOME)
    stopped, continued = simulation_of(name, **SOME), simulation_of(name, **SOME)
    stopped.run(until=3)
    save(stopped, tmp_path / "checkpoint")
    restore(continued, tmp_path / "checkpoint")
    continued.run()
    for found, expected in zip(kept(continued), kept(through), strict=True):
        np.testing.assert_array_equal(found, expected)
    both = [
        [{key: value for key, value in entry.items() if key != "seconds"} for entry in made.replicas[0].rounds]
        for made in (continued, through)
    ]
    assert both[0] == both[1]
    for found, expected in zip(continued.replicas[0].evaluations, through.replicas[0].evaluations, strict=True):
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("thinned", [{}, {"availability": 0.4}])
def test_replicas_trained_as_one_program_give_what_each_gives_alone(name, thinned):
    together = played(name, together=True, seeds=[0, 5, 9], **SOME, **thinned)
    for number, seed in enumerate([0, 5, 9]):
        alone = played(name, seeds=[seed], **SOME, **thinned)
        found, expected = together.replicas[number], alone.replicas[0]
        assert [entry["asked"] for entry in found.rounds] == [entry["asked"] for entry in expected.rounds]
        np.testing.assert_allclose(model_of(together, number), model_of(alone), rtol=1e-4, atol=1e-5)
        if found.personal is not None:
            torch.testing.assert_close(found.personal, expected.personal, rtol=1e-4, atol=1e-5)


def test_methods_trained_as_one_program_do_not_disturb_each_other():
    names = ["fedavg", "mfairfl:sharpness=2", "fedfb", "fairfed", "fedavg-f"]
    together = played(names, together=True, **SOME)
    for number, name in enumerate(names):
        np.testing.assert_allclose(model_of(together, number), model_of(played(name, **SOME)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_cohort_in_pieces_gives_the_same_models(name):
    whole, pieces = played(name, **SOME), played(name, chunk=2, **SOME)
    assert whole.replicas[0].memo.keys() == pieces.replicas[0].memo.keys()
    for found, expected in zip(kept(pieces), kept(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mfairfl", "fpfl", "fedavg-f", "fedfb", "fairfed"])
def test_clients_that_fail_have_no_say(name):
    lost = played(name, **{**SOME, "participation": 1.0, "rounds": 1, "sampling.drop": {"0": [0, 2, 5]}})
    replica = lost.replicas[0]
    assert replica.rounds[0]["lost"] == [0, 2, 5]
    assert replica.rounds[0]["answered"] == 5
    kept_ones = [1, 3, 4, 6, 7]
    data, partition = lost.dataset, replica.partition
    rows = np.concatenate([partition.train[k] for k in kept_ones])
    assert set(replica.memo.get("clients", kept_ones)) == set(kept_ones)
    if name in ("mfairfl", "fpfl"):
        gaps = replica.rounds[0]["told"]["gaps"]
        module = build("logistic", data.shape, 2)
        said = torch.softmax(module(data.inputs[rows]).detach().double(), dim=1)
        expected = oracles.deviations("dp", said, None, data.targets[rows], [one[rows] for one in masks(data)])
        np.testing.assert_allclose(gaps, [float(gap) for gap in expected], rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_dropped_and_sampled_clients_leave_everything_finite(name):
    made = played(name, dropout=0.3, **{**SOME, "participation": 0.5, "rounds": 12})
    replica = made.replicas[0]
    assert all(np.isfinite(model).all() for model in kept(made))
    if name not in ("cenfair", "indfair"):
        assert any(entry["lost"] for entry in replica.rounds)
        assert all(entry["answered"] == len(entry["asked"]) - len(entry["lost"]) for entry in replica.rounds)
    assert np.isfinite(replica.evaluations[-1]["losses"]).all()


def test_who_trains_alone_sends_nothing_and_so_nothing_is_lost():
    calm, rough = (
        played("indfair:gamma=3", dropout=dropout, **{**SOME, "participation": 1.0}) for dropout in (0.0, 0.6)
    )
    assert torch.equal(calm.replicas[0].personal, rough.replicas[0].personal)
    assert all(entry["bytes_up"] == 0 for entry in rough.replicas[0].rounds)


def test_what_is_said_of_a_round_is_what_happened():
    rounds = played("mfairfl:gamma=0.5,alpha=0.02", rounds=12).replicas[0].rounds
    above, below = np.zeros(2), np.zeros(2)
    for entry in rounds:
        assert entry["told"]["constraints"] == ["dp z=0", "dp z=1"]
        gaps = np.array(entry["told"]["gaps"])
        above, below = (np.maximum(0, held + 0.5 * (side - 0.02)) for held, side in ((above, gaps), (below, -gaps)))
        np.testing.assert_allclose(entry["told"]["multipliers"], above - below, rtol=1e-12)
    parameters, cells, classes = 8, 4, 2
    assert rounds[0]["bytes_down"] == 3 * 4 * (parameters + cells * (classes + 1))
    assert rounds[0]["bytes_up"] == 3 * (4 * parameters + 8 + 8 * cells * (2 * classes + 1))


def test_a_gap_that_cannot_be_measured_is_said_to_be_none():
    data = people(70, 2, 1, seed=2)
    sums = summed(data, *answers(data, 1), [np.flatnonzero(masks(data)[0].numpy())])
    leaning = GroupConstraints().lean(View(cells_of(data)[0], sums, (0,), np.ones(1), 0), {})
    assert leaning.facts["gaps"] == [0.0, None]
    assert leaning.facts["multipliers"] == [0.0, 0.0]
    np.testing.assert_array_equal(leaning.tables, cells_of(data)[0].plain(1))


@pytest.mark.parametrize("name", ["mfairfl", "fedfb", "fairfed"])
@pytest.mark.parametrize("measure", ["losses", "needed"])
def test_measuring_less_changes_no_model(name, measure):
    assert np.array_equal(model_of(played(name, measure=measure, **SOME)), model_of(played(name, **SOME)))


@pytest.mark.parametrize("name", METHODS)
def test_what_a_graph_would_replay_is_the_round(name):
    """Graphs need a GPU; the work they capture is the same here."""
    plain, replayed = played(name, **SOME), simulation_of(name, **SOME)
    replayed.worker.replayed = Replayed()
    replayed.worker.replayed.LIMIT = 0  # nothing is captured
    replayed.run()
    assert np.array_equal(model_of(plain), model_of(replayed))


def test_a_run_of_several_seeds_hands_out_its_models():
    runs = eh.simulate(method="mfairfl", seeds=[0, 4], **{**SMALL, **SOME})
    for run in runs:
        alone = played("mfairfl", seeds=[run.seed], **SOME)
        np.testing.assert_array_equal(vector(run.load_model()), model_of(alone))
    (run,) = eh.simulate(method="indfair", **{**SMALL, **SOME})
    assert next(iter(run.load_personal().values())).shape[0] == 8


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mfairfl:measure=eods", "did you mean 'eodds'"),
        ("mfairfl:measure=dp+app", "app"),
        ("fairfed:measure=eop", "did you mean 'eopp'"),
        ("fpfl:gamma=-1", "gamma"),
        ("fpfl:damping=-0.1", "damping"),
        ("fpfl:alpha=1.5", "alpha"),
        ("mfairfl:sharpness=0", "sharpness"),
        ("mfairfl:form=onesided", "form"),
        ("mfairfl:multipliers=servers", "did you mean 'server'"),
        ("mfairfl:relaxation=losses", "did you mean 'loss'"),
        ("fedfb:step=-1", "step"),
        ("fairfed:debias=maybe", "debias"),
        ("fpfl:relaxation=loss", "serves 'ap' alone"),
        ("fpfl:relaxation=loss,measure=ap+dp", "serves 'ap' alone"),
    ],
)
def test_a_wrong_setting_is_refused(name, said):
    with pytest.raises(EvenhandError, match=said):
        eh.simulate(method=name, **SMALL, rounds=1)


@pytest.mark.parametrize("name", METHODS)
def test_groups_must_be_named(name):
    with pytest.raises(EvenhandError, match=r"--sensitive") as caught:
        eh.simulate(method=name, data="digits", rounds=1)
    assert name in str(caught.value)


def test_fedfb_needs_two_classes():
    with pytest.raises(EvenhandError, match="3 classes"):
        simulation_of("fedfb", people(90, 3, 1, seed=0))


def test_what_cannot_be_held_is_refused_before_a_folder_is_begun(tmp_path):
    with pytest.raises(EvenhandError, match="serves 'ap' alone"):
        eh.simulate(method="fpfl:relaxation=loss", out=tmp_path / "run", **SMALL, rounds=1)
    assert not list(tmp_path.glob("run/*"))


def test_fairfed_goes_by_accuracy_where_nobody_can_be_compared():
    data = people(90, 2, 1, seed=0)
    data.targets[torch.from_numpy(data.columns["a0"] == 0)] = 0  # no positives in the first group
    told = played("fairfed", data, rounds=1)
    state = told.replicas[0].state.rule_memo
    sizes = told.replicas[0].partition.train.sizes
    start = simulation_of("fairfed", data)
    right = start.local.survey(
        start.replicas[0].model.unsqueeze(0), start.preparation.round(0, start.replicas).pieces[0], torch.ones(3, 1)
    )
    hits = right[..., 3:].reshape(3, -1, 2, 2)
    accuracies = np.einsum("kgyy->k", hits.numpy()) / sizes
    gaps = np.abs(accuracies @ sizes / sizes.sum() - accuracies)
    np.testing.assert_allclose(state["weights"], np.maximum(sizes / sizes.sum() - (gaps - gaps.mean()), 0.0), rtol=1e-6)
    assert np.isfinite(model_of(played("fairfed:measure=dp", data))).all()
