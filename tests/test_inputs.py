"""The public door: what `aggregate` and `method` accept, what they refuse and how; no input breaks a method."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import evenhand as eh
from evenhand.methods import METHODS, OBJECTIVES, SERVERS

NAMES = [entry.name for entry in eh.methods()]
every_method = pytest.mark.parametrize("name", NAMES)
IDS = ["ann", "bob", "cat", "dan", "eve"]


def updates_of(rows=5, columns=30, seed=0, dtype=np.float64):
    """Updates that agree in part and conflict in part."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) + 0.4 * rng.standard_normal(columns)).astype(dtype)


def everything(rows=5, seed=0):
    """Every input that any method could ask for."""
    rng = np.random.default_rng(seed + 1)
    return {
        "losses": rng.uniform(0.2, 3.0, rows),
        "sizes": rng.integers(10, 500, rows).astype(float),
        "accuracies": rng.uniform(0.1, 0.9, rows),
        "fairness": rng.uniform(-0.2, 0.2, rows),
        "fairness_global": 0.05,
        "lr": 0.1,
    }


def only(positions, inputs):
    """The inputs of some of the clients."""
    return {key: value[positions] if isinstance(value, np.ndarray) else value for key, value in inputs.items()}


def refused(said, *args, **kwargs):
    with pytest.raises(eh.EvenhandError, match=said) as caught:
        eh.aggregate(*args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------- names and settings


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("fedavgg", {}, "unknown method 'fedavgg'; did you mean 'fedavg'"),
        ("fedvf", {}, "unknown method 'fedvf'; did you mean 'fedfv'"),  # two letters swapped, not one replaced: fedlf
        ("AdaFed", {}, "unknown method 'AdaFed'; did you mean 'adafed'"),
        ("nothing like it", {}, r"unknown method 'nothing like it' \(evenhand methods lists all"),
        ("fedfv", {"alhpa": 0.1}, "fedfv has no setting 'alhpa'; did you mean 'alpha'"),
        ("fedfv:alhpa=0.1", {}, "fedfv has no setting 'alhpa'; did you mean 'alpha'"),
        ("term", {"gamma": 1.0}, r"term has no setting 'gamma' \(its settings: t, eta\)"),
        ("fedfv:alpha", {}, "'alpha' in 'fedfv:alpha' is not of the form setting=value"),
        ("fedfv:=3", {}, "'=3' in 'fedfv:=3' is not of the form setting=value"),
        ("even", {"server": "fedadm"}, "unknown server step 'fedadm'; did you mean 'fedadam'"),
        ("even", {"server": "fedadam:etta=1"}, "server step fedadam has no setting 'etta'; did you mean 'eta'"),
        ("even", {"server": {"name": "momentum", "bta": 1}}, "server step momentum has no setting 'bta'"),
        ("even", {"server": {}}, "unknown server step None"),
        ("even:server=fedadm", {}, "unknown server step 'fedadm'; did you mean 'fedadam'"),
        ("even:server=none", {}, "given by name, not as NoneType"),
        ("fedlf:objective=proximal,nu=1", {}, "fedlf has no setting 'nu'; did you mean 'mu'"),
        ("even", {"objective": "proximl"}, "unknown objective 'proximl'; did you mean 'proximal'"),
        ("even", {"objective": "proximal:nu=1"}, "objective proximal has no setting 'nu'; did you mean 'mu'"),
        (3, {}, "a method is given by name, not as int"),
        (None, {}, "a method is given by name, not as NoneType"),
        ("even", {"server": 3}, "given by name, not as int"),
        ({"name": "even"}, {}, "a method's dictionary needs 'rule'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, settings, said):
    with pytest.raises(eh.EvenhandError, match=said):
        eh.method(name, **settings)
    refused(said, name, updates_of(), losses=np.ones(5), **settings)


def test_errors_are_value_errors():
    with pytest.raises(ValueError):
        eh.method("no such method")


BAD_BY_TYPE = {
    float: [float("nan"), float("inf"), "many", True, [1.0]],
    int: [1.5, float("nan"), "many", True],
    str: ["no such word", 3, None],
    bool: ["yes", 1, None],
    type(None): ["many", float("nan"), -1],
}


def settings_and_bad_values():
    return [
        pytest.param(entry.name, setting, bad, id=f"{entry.name}-{setting}={bad}")
        for entry in eh.methods()
        for setting, default in entry.settings.items()
        for bad in BAD_BY_TYPE[type(default)]
    ]


@pytest.mark.parametrize(("name", "setting", "bad"), settings_and_bad_values())
def test_no_setting_takes_nonsense(name, setting, bad):
    with pytest.raises(eh.EvenhandError, match=setting):
        eh.method(name, **{setting: bad})


@pytest.mark.parametrize(
    ("name", "setting", "bad"),
    [
        ("even", "gamma", -0.1),
        ("even", "ridge", -0.1),
        ("even", "recall", -0.1),
        ("even", "recall", 1.1),
        ("even", "recall", "learned"),
        ("even", "caution", -0.1),
        ("even", "absent", "last:0"),
        ("even", "absent", "last:"),
        ("even", "absent", "last:-3"),
        ("even", "absent", "last:²"),
        ("adafed", "gamma", -1),
        ("adafed", "ridge", -1e-9),
        ("adafed", "length", "meen"),
        ("qffl", "q", -0.1),
        ("qffl", "lipschitz", 0.0),
        ("afl", "step", -0.1),
        ("drfl", "q", -1),
        ("fedgini", "epsilon", 1.1),
        ("fedgini", "epsilon", -0.1),
        ("fedmgda+", "epsilon", 1.1),
        ("fedmgda+", "reference", "sizes"),
        ("fedfv", "alpha", 1.1),
        ("fedfv", "alpha", -0.1),
        ("fedfv", "tau", -1),
        ("fedfv", "order", "losses"),
        ("fedmdfg", "theta", -1),
        ("fedmdfg", "theta", 181),
        ("fedmdfg", "s", -1),
        ("fedmdfg", "s", 31),
        ("fedmdfg", "armijo", 1.5),
        ("fedfa", "alpha", 0.2),  # beta stays at 0.5
        ("fedfa", "beta", 1.2),
        ("fedfa", "gamma", 1.2),
        ("fedfa", "every", 0),
        ("fedfa", "eta", -0.1),
        ("fedfa", "client_momentum", 1.1),
        ("mfairfl", "beta", 1.1),
        ("mfairfl", "delta", -0.1),
        ("fairfed", "beta", -1),
        ("fedavg", "weights", "sizes"),
        ("fedavg", "eta", -1),
        ("fedprox", "mu", -1),
        ("fedadam", "beta1", 1.1),
        ("fedadam", "beta2", -0.1),
        ("fedadam", "tau", 0.0),
    ],
)
def test_no_setting_leaves_its_range(name, setting, bad):
    with pytest.raises(eh.EvenhandError, match=setting):
        eh.method(name, **{setting: bad})
    with pytest.raises(eh.EvenhandError, match=setting):
        eh.aggregate(name, updates_of(), **everything(), **{setting: bad})


@pytest.mark.parametrize("server", ["momentum:beta=1.1", "momentum:eta=-1", "average:eta=-1", "plain:eta=-1"])
def test_no_server_step_leaves_its_range(server):
    setting = server.partition(":")[2].partition("=")[0]
    with pytest.raises(eh.EvenhandError, match=setting):
        eh.method("fedavg", server=server)


# ------------------------------------------------------------------------------------------------ missing inputs


@pytest.mark.parametrize(("name", "missing"), [(entry.name, need) for entry in eh.methods() for need in entry.needs])
def test_a_missing_input_is_named(name, missing):
    inputs = {key: value for key, value in everything().items() if key != missing}
    said = refused(f"{missing}=", name, updates_of(), **inputs)
    assert said.startswith(f"{name} needs ")


@every_method
def test_what_a_method_says_it_needs_is_enough(name):
    needs = next(entry.needs for entry in eh.methods() if entry.name == name)
    given = {key: value for key, value in everything().items() if key in needs}
    out = eh.aggregate(name, updates_of(), **given)
    assert np.isfinite(out.update).all()


@pytest.mark.parametrize(("name", "setting"), [("qffl", "lipschitz"), ("fedfa", "eta")])
def test_a_missing_learning_rate_is_named(name, setting):
    inputs = {key: value for key, value in everything().items() if key != "lr"}
    refused(f"{name} needs the clients' learning rate: pass lr=.* or set {setting}=", name, updates_of(), **inputs)
    out = eh.aggregate(name, updates_of(), **inputs, **{setting: 1.0})
    assert np.isfinite(out.update).all()


def test_what_was_given_instead_is_said():
    refused(
        "fedavg needs sizes= .or weights='uniform'.; it was given losses", "fedavg", updates_of(), losses=np.ones(5)
    )
    refused("needs sizes= .or reference='uniform'.$", "fedmgda+", updates_of())
    said = refused("fairfed needs", "fairfed", updates_of())
    assert "sizes= and fairness= and fairness_global=" in said


def test_fairfed_asks_for_accuracies_where_fairness_is_unknown():
    inputs = everything()
    inputs["fairness"][2] = np.nan
    del inputs["accuracies"]
    refused("client 'cat' has no fairness value .* pass accuracies=", "fairfed", updates_of(), clients=IDS, **inputs)


# ------------------------------------------------------------------------------------------------- wrong inputs

COLUMNS = ["losses", "sizes", "accuracies", "participations", "fairness"]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [np.ones(4), np.ones((5, 1)), 1.0, [], torch.ones(6)], ids=str)
def test_a_column_of_the_wrong_length_is_refused(column, value):
    inputs = everything() | {column: value}
    refused(rf"{column} has shape .* one number for each of the 5 updates", "fedavg", updates_of(), **inputs)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [["a"] * 5, [None] * 5, "abcde", [[1], [2], [3], [4], [5, 6]]], ids=str)
def test_a_column_that_holds_no_numbers_is_refused(column, value):
    refused(column, "fedavg", updates_of(), **everything() | {column: value})


@pytest.mark.parametrize("name", ["fairness_global", "accuracy_global"])
@pytest.mark.parametrize("value", ["x", np.nan, np.inf, [1.0, 2.0]], ids=str)
def test_a_global_number_must_be_one(name, value):
    refused(f"{name}=.*must be a number", "fairfed", updates_of(), **everything() | {name: value})


def test_columns_come_as_lists_tuples_arrays_tensors_or_mappings():
    losses = everything()["losses"]
    wanted = eh.aggregate("term", updates_of(), losses=losses, clients=IDS).update
    by_name = dict(zip(reversed(IDS), reversed(losses), strict=True)) | {"someone else": 99.0}
    for given in (list(losses), tuple(losses), torch.tensor(losses), [torch.tensor(x) for x in losses], by_name):
        np.testing.assert_array_equal(eh.aggregate("term", updates_of(), losses=given, clients=IDS).update, wanted)
    by_position = dict(enumerate(losses))
    np.testing.assert_array_equal(eh.aggregate("term", updates_of(), losses=by_position).update, wanted)


def test_a_client_missing_from_a_mapping_is_named():
    losses = {"ann": 1.0, "bobb": 1.0, "cat": 1.0, "dan": 1.0, "eve": 1.0}
    refused(
        "losses has nothing for client 'bob'; did you mean 'bobb'", "term", updates_of(), losses=losses, clients=IDS
    )
    refused("losses has nothing for client 0", "term", updates_of(), losses=losses)


@pytest.mark.parametrize("column", ["sizes", "accuracies", "participations"])
def test_negative_counts_are_refused(column):
    value = np.array([1.0, 2.0, -3.0, 4.0, 5.0])
    refused(f"{column} of client 'cat' is -3", "fedavg", updates_of(), clients=IDS, **everything() | {column: value})


@pytest.mark.parametrize("column", ["sizes", "participations"])
def test_counts_of_nothing_at_all_are_refused(column):
    refused(f"{column} are all zero", "fedavg", updates_of(), **everything() | {column: np.zeros(5)})


@pytest.mark.parametrize("column", ["sizes", "participations"])
def test_counts_of_nothing_among_the_usable_clients_are_refused(column):
    given = updates_of()
    given[2] = np.nan
    value = np.array([0.0, 0.0, 7.0, 0.0, 0.0])
    refused(f"{column} are all zero", "fedavg", given, **everything() | {column: value})


@pytest.mark.parametrize("name", ["even", "qffl", "drfl"])
def test_negative_losses_are_refused_where_powers_are_taken(name):
    losses = np.array([1.0, 2.0, -3.0, 4.0, 5.0])
    refused("client 'cat' reported -3", name, updates_of(), clients=IDS, **everything() | {"losses": losses})


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        (IDS[:4], "clients has 4 ids for 5 updates"),
        ([*IDS, "fay"], "clients has 6 ids for 5 updates"),
        (["ann", "bob", "ann", "dan", "eve"], "client 'ann' stands twice"),
        ([1, 2, 3, 3, 4], "client 3 stands twice"),
        ([1, 2, 3, 4, 5.0], "client id 5.0 is a float"),
        ([1, 2, 3, 4, None], "client id None is a NoneType"),
        ([1, 2, 3, 4, True], "client id True is a bool"),
        ([1, 2, 3, 4, np.True_], "client id True is a bool"),
        ([1, 2, 3, 4, (5,)], r"client id \(5,\) is a tuple"),
        ([1, 2, 3, 4, [5]], r"client id \[5\] is a list"),
        ([1, 2, 3, 4, b"5"], "client id b'5' is a bytes"),
        (5, "clients=5 must be a list"),
        ("abcde", "clients='abcde' must be a list"),
    ],
)
def test_bad_client_ids_are_refused(clients, said):
    refused(said, "even", updates_of(), losses=np.ones(5), clients=clients)


def test_numpy_ids_are_the_same_as_plain_ones():
    out = eh.aggregate("even", updates_of(), losses=np.ones(5), clients=np.arange(5))
    assert out.state.seen == {0, 1, 2, 3, 4}
    assert all(type(client) is int for client in out.diagnostics.clients)
    again = eh.aggregate("even", updates_of()[:2], losses=[1.0, 2.0], clients=[3, 4], state=out.state)
    assert again.diagnostics.clients == (3, 4, 0, 1, 2)
    named = eh.aggregate("even", updates_of(), losses=np.ones(5), clients=np.array(IDS))
    assert named.state.seen == set(IDS)
    assert all(type(client) is str for client in named.state.seen)


@pytest.mark.parametrize("keep_on", ["nowhere", "cpu:x", 3.5])
def test_an_unknown_device_to_keep_updates_on_is_refused(keep_on):
    refused("keep_on=", "even", updates_of(), losses=np.ones(5), clients=IDS, keep_on=keep_on)


def test_the_position_and_the_tensor_of_a_misfit_are_named():
    fine = {"body.weight": torch.ones(3, 2), "head.bias": torch.ones(2)}
    other = {"body.weight": torch.ones(3, 2), "head.bias": torch.ones(4)}
    said = r"updates\[2\]\['head.bias'\] has shape \(4,\), updates\[0\]\['head.bias'\] has \(2,\)"
    refused(said, "fedavg", [fine, fine, other], sizes=np.ones(3))
    lists = [[torch.ones(3), torch.ones(2)]] * 3 + [[torch.ones(3), torch.ones(5)]]
    refused(r"updates\[3\]\['1'\] has shape \(5,\)", "fedavg", lists, sizes=np.ones(4))


@pytest.mark.parametrize("index", [-1, 1.5, "3", True])
def test_a_round_is_a_whole_number(index):
    refused("round=", "even", updates_of(), losses=np.ones(5), round=index)


def test_rounds_do_not_go_backwards():
    out = eh.aggregate("even", updates_of(), losses=np.ones(5), clients=IDS, round=4)
    assert out.state.round == 4
    for index in (0, 3, 4):
        said = f"round={index} is not after the state's round 4"
        refused(said, "even", updates_of(), losses=np.ones(5), clients=IDS, round=index, state=out.state)
    assert eh.aggregate("even", updates_of(), losses=np.ones(5), clients=IDS, state=out.state).state.round == 5
    later = eh.aggregate("even", updates_of(), losses=np.ones(5), clients=IDS, state=out.state, round=9)
    assert later.state.round == 9


def test_a_state_of_another_kind_is_refused():
    given, losses = updates_of(), np.ones(5)
    state = eh.aggregate("even", given, losses=losses, clients=IDS).state
    said = "state comes from rule 'even' with server 'recent', not from "
    refused(said + "'adafed' with 'plain'", "adafed", given, losses=losses, clients=IDS, state=state)
    refused(said + "'even' with 'fedadam'", "even", given, losses=losses, clients=IDS, state=state, server="fedadam")
    other = "state comes from updates with other tensors, shapes or layers"
    refused(other, "even", given[:, :7], losses=losses, clients=IDS, state=state)
    refused(other, "even", given, losses=losses, clients=IDS, state=state, layers=[10, 20])
    refused(other, "even", [{"w": row} for row in given], losses=losses, clients=IDS, state=state)
    refused("state is a dict", "even", given, losses=losses, clients=IDS, state={"round": 3})


@pytest.mark.parametrize("name", ["even", "fedlf", "fedfv", "afl", "mfairfl", "fedmdfg", "fedfa", "fairfed"])
def test_what_is_carried_per_client_needs_their_names(name):
    given, inputs = updates_of(), everything()
    nameless = eh.aggregate(name, given, **inputs)
    named = eh.aggregate(name, given, clients=IDS, **inputs)
    said = f"{name} carries something of each client .* clients="
    refused(said, name, given, state=nameless.state, **inputs)
    refused(said, name, given, clients=IDS, state=nameless.state, **inputs)
    refused(said, name, given, state=named.state, **inputs)


@pytest.mark.parametrize("name", ["fedavg", "qffl", "term", "drfl", "fedgini", "fedadam", "adafed", "fedmgda+"])
def test_what_carries_nothing_per_client_needs_no_names(name):
    given, inputs = updates_of(), everything()
    state = eh.aggregate(name, given, **inputs).state
    assert eh.aggregate(name, given, state=state, **inputs).state.round == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"on_bad": "exlude"}, "on_bad='exlude' is not one of .* did you mean 'exclude'"),
        ({"lr": 0.0}, "lr=0.0 must be a number, above 0"),
        ({"lr": -1.0}, "lr=-1.0 must be"),
        ({"lr": float("nan")}, "lr=nan must be"),
        ({"lr": "fast"}, "lr='fast' must be"),
    ],
)
def test_other_arguments_are_checked(changed, said):
    refused(said, "even", updates_of(), **everything() | changed)


def test_evaluate_must_return_one_loss_a_client():
    said = r"evaluate returned shape \(2,\); one loss for each of 5 clients"
    refused(said, "fedmdfg", updates_of(), evaluate=lambda trial: np.ones(2), **everything())


# --------------------------------------------------------------------------------------------------- bad clients


def bad_update(value):
    def spoil(given, inputs):
        given[2, 7] = value

    return spoil


def bad_entry(column, value):
    def spoil(given, inputs):
        inputs[column] = inputs[column].copy()
        inputs[column][2] = value

    return spoil


SPOILS = {
    "NaN in the update": (bad_update(np.nan), "its update holds NaN or Inf"),
    "Inf in the update": (bad_update(np.inf), "its update holds NaN or Inf"),
    "-Inf in the update": (bad_update(-np.inf), "its update holds NaN or Inf"),
    "NaN loss": (bad_entry("losses", np.nan), "its entry in losses is nan"),
    "Inf loss": (bad_entry("losses", np.inf), "its entry in losses is inf"),
    "NaN size": (bad_entry("sizes", np.nan), "its entry in sizes is nan"),
    "NaN accuracy": (bad_entry("accuracies", np.nan), "its entry in accuracies is nan"),
    "Inf fairness": (bad_entry("fairness", np.inf), "its entry in fairness is inf"),
}
spoilt = pytest.mark.parametrize(("spoil", "reason"), list(SPOILS.values()), ids=list(SPOILS))


@every_method
@spoilt
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_bad_client_changes_nothing(name, spoil, reason, dtype):
    """In a first and in a later round, the outcome is that of a round without the client."""
    first = eh.aggregate(name, updates_of(dtype=dtype), clients=IDS, **everything())
    for state in (None, first.state):
        given, inputs, rest = updates_of(seed=5, dtype=dtype), everything(seed=5), [0, 1, 3, 4]
        spoil(given, inputs)
        out = eh.aggregate(name, given, clients=IDS, state=state, **inputs)
        ids = [IDS[position] for position in rest]
        without = eh.aggregate(name, given[rest], clients=ids, state=state, **only(rest, inputs))
        tolerance = 1e-5 if dtype == np.float32 else 1e-10
        np.testing.assert_allclose(out.update, without.update, rtol=tolerance, atol=tolerance)
        assert out.diagnostics.excluded == {"cat": reason}
        assert reason in str(out.diagnostics)
        assert (out.coefficients[:, 2] == 0.0).all()
        np.testing.assert_allclose(np.delete(out.coefficients, 2, axis=1), without.coefficients, atol=tolerance)
        assert without.diagnostics.excluded == {}
        assert out.state.seen == without.state.seen


@every_method
@spoilt
def test_a_bad_client_is_an_error_where_that_is_asked_for(name, spoil, reason):
    given, inputs = updates_of(), everything()
    spoil(given, inputs)
    refused(f"client 'cat': {reason}.*on_bad='exclude'", name, given, clients=IDS, on_bad="raise", **inputs)


@every_method
@pytest.mark.parametrize("on_bad", ["exclude", "raise"])
def test_a_round_of_bad_clients_is_an_error(name, on_bad):
    given = updates_of()
    given[:, 3] = np.nan
    refused("no usable client in this round: client 'ann'", name, given, clients=IDS, on_bad=on_bad, **everything())


def test_several_bad_clients_are_each_given_their_reason():
    given, inputs = updates_of(), everything()
    given[0, 0] = np.nan
    inputs["losses"][3] = np.inf
    out = eh.aggregate("even", given, clients=IDS, **inputs)
    assert out.diagnostics.excluded == {"ann": "its update holds NaN or Inf", "dan": "its entry in losses is inf"}
    assert out.diagnostics.clients == ("bob", "cat", "eve")


def test_fairness_that_cannot_be_measured_is_no_fault():
    inputs = everything()
    inputs["fairness"][2] = np.nan
    out = eh.aggregate("fairfed", updates_of(), clients=IDS, **inputs)
    assert out.diagnostics.excluded == {}
    assert np.isfinite(out.update).all()


# ------------------------------------------------------------------------------------------------ awkward rounds


def single(given, inputs):
    return given[:1], only(slice(0, 1), inputs)


def one_zero_update(given, inputs):
    given[1] = 0.0
    return given, inputs


def all_zero_updates(given, inputs):
    return given * 0, inputs


def equal_losses(given, inputs):
    return given, inputs | {"losses": np.full(len(given), 0.7)}


def zero_losses(given, inputs):
    return given, inputs | {"losses": np.zeros(len(given))}


def one_zero_loss(given, inputs):
    inputs["losses"][0] = 0.0
    return given, inputs


def all_right_or_all_wrong(given, inputs):
    return given, inputs | {"accuracies": np.array([0.0, 1.0, 1.0, 1.0, 1.0])}


def no_one_right(given, inputs):
    return given, inputs | {"accuracies": np.zeros(len(given))}


def one_empty_client(given, inputs):
    inputs["sizes"][3] = 0.0
    return given, inputs


def duplicated_clients(given, inputs):
    return given[[0, 0, 1, 1, 1]], inputs


def dependent_updates(given, inputs):
    return (given[:2].T @ np.array([[1, 0, 1, 2, -1], [0, 1, 1, -1, 1]], dtype=given.dtype)).T, inputs


def opposite_updates(given, inputs):
    return np.concatenate([given[:2], -given[:2], given[:1] * 0]), inputs


def tiny(given, inputs):
    return given * given.dtype.type(1e-12), inputs


def huge(given, inputs):
    return given * given.dtype.type(1e12), inputs


def mixed_scales(given, inputs):
    return given * np.logspace(-12, 12, len(given)).astype(given.dtype)[:, None], inputs


def large_losses(given, inputs):
    return given, inputs | {"losses": inputs["losses"] * 1e12}


def small_losses(given, inputs):
    return given, inputs | {"losses": inputs["losses"] * 1e-12}


def fewer_columns_than_clients(given, inputs):
    return given[:, :2], inputs


def one_column(given, inputs):
    return given[:, :1], inputs


AWKWARD = [
    single,
    one_zero_update,
    all_zero_updates,
    equal_losses,
    zero_losses,
    one_zero_loss,
    all_right_or_all_wrong,
    no_one_right,
    one_empty_client,
    duplicated_clients,
    dependent_updates,
    opposite_updates,
    tiny,
    huge,
    mixed_scales,
    large_losses,
    small_losses,
    fewer_columns_than_clients,
    one_column,
]


@every_method
@pytest.mark.parametrize("awkward", AWKWARD)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_round_yields_nan_or_a_warning(name, awkward, dtype):
    """Over three rounds, the last of them with memory of who is absent. Warnings are errors in these tests."""
    state = None
    for index in range(3):
        given, inputs = awkward(updates_of(seed=index, dtype=dtype), everything(seed=index))
        ids = IDS[: len(given)]
        if index == 2 and len(given) > 2:
            given, inputs, ids = given[:2], only(slice(0, 2), inputs), ids[:2]
        out = eh.aggregate(name, given, clients=ids, state=state, **inputs)
        state = out.state
        assert out.update.dtype == dtype
        assert np.isfinite(out.update).all()
        assert np.isfinite(out.coefficients).all()
        assert out.diagnostics.excluded == {}
        said = out.diagnostics
        for numbers in (said.norms, said.cosines, said.predicted_change, said.direction_norm, said.conflicts):
            assert np.isfinite(numbers).all()
        assert str(said)
        longest = np.linalg.norm(given.astype(float), axis=1).max()
        if not longest:
            assert (out.update == 0.0).all() or index > 0  # momentum may still roll


ADAPTIVE = ["fedadam", "fedamsgrad", "fedyogi", "fedadagrad"]
WITH_A_UNIT = ["qffl", "fedmgda+", *ADAPTIVE]  # their step depends on the unit of the updates by design


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_A_UNIT])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_unit_of_the_updates_does_not_matter(name, scale, dtype):
    given, inputs = updates_of(), everything()
    plain = eh.aggregate(name, given.astype(dtype), clients=IDS, **inputs)
    scaled = eh.aggregate(name, (scale * given).astype(dtype), clients=IDS, **inputs)
    tolerance = 1e-4 if dtype == np.float32 else 1e-9
    length = np.linalg.norm(plain.update)
    assert np.linalg.norm(scaled.update / scale - plain.update) <= tolerance * length


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADAPTIVE])
def test_a_client_on_its_own_decides_the_direction(name):
    given, inputs = single(updates_of(), everything())
    out = eh.aggregate(name, given, clients=["ann"], **inputs)
    cosine = out.update @ given[0] / (np.linalg.norm(out.update) * np.linalg.norm(given[0]))
    assert cosine == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*WITH_A_UNIT, "fedfa")])
def test_clients_that_agree_get_what_they_ask_for(name):
    given = np.repeat(updates_of()[:1], 5, axis=0)
    out = eh.aggregate(name, given, clients=IDS, **everything() | {"losses": np.full(5, 0.7)})
    np.testing.assert_allclose(out.update, given[0], rtol=1e-6)


# ----------------------------------------------------------------------------------------------------- methods


@every_method
def test_a_method_is_a_value(name):
    one, other = eh.method(name), eh.method(name)
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1
    assert name in repr(one)
    assert str(one).startswith(f"{name}(")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"
    for part in (one.rule, one.server, one.objective):
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, None)


@every_method
def test_a_method_survives_json(name):
    plain = eh.method(name)
    changed = eh.method(name, server="momentum:beta=0.25,eta=0.5", objective="proximal:mu=0.01")
    for entry in (plain, changed):
        assert eh.Method.from_dict(entry.to_dict()) == entry
        written = json.loads(json.dumps(entry.to_dict()))
        assert eh.Method.from_dict(written) == entry
        assert eh.method(written) == entry
        assert eh.method(entry) == entry


@every_method
def test_a_changed_setting_survives_json_and_shows(name):
    numbers = {
        setting: value
        for setting, value in next(entry.settings for entry in eh.methods() if entry.name == name).items()
        if isinstance(value, float) and setting not in ("alpha", "beta")
    }
    setting = next(iter(numbers))
    changed = eh.method(name, **{setting: 0.625})
    assert changed != eh.method(name)
    assert f"{setting}=0.625" in str(changed)
    assert eh.method(json.loads(json.dumps(changed.to_dict()))) == changed
    assert eh.method(f"{name}:{setting}=0.625") == changed


def test_a_name_may_carry_settings():
    wanted = eh.method("fedfv", alpha=0.2, tau=3)
    assert eh.method("fedfv:alpha=0.2,tau=3") == wanted
    assert eh.method(" fedfv : alpha = 0.2 , tau = 3 ") == wanted
    assert eh.method("fedfv:tau=3", alpha=0.2) == wanted
    assert eh.method("fedfv:") == eh.method("fedfv")
    assert eh.method("fedfv:absent=last:4,order=reverse") == eh.method("fedfv", absent="last:4", order="reverse")
    assert eh.method("fedlf:normalise=false,fair=True") == eh.method("fedlf", normalise=False)
    assert eh.method("qffl:lipschitz=none") == eh.method("qffl")
    assert eh.method("fedadam:eta=1e-2").server.eta == 0.01
    by_string = eh.aggregate("fedfv:alpha=0.2,tau=3", updates_of(), losses=np.arange(5.0))
    by_keyword = eh.aggregate("fedfv", updates_of(), losses=np.arange(5.0), alpha=0.2, tau=3)
    np.testing.assert_array_equal(by_string.update, by_keyword.update)


def test_a_name_may_carry_another_server_step_and_objective():
    assert eh.method("fedavg:server=recent,rounds=7") == eh.method("fedavg", server="recent:rounds=7")
    assert eh.method("fedavg:rounds=7,server=recent") == eh.method("fedavg", server="recent:rounds=7")
    wanted = eh.method("fedlf", server="fedadam:eta=0.01", objective="proximal:mu=0.1", fair=False)
    assert eh.method("fedlf:fair=false,server=fedadam:eta=0.01,objective=proximal,mu=0.1") == wanted
    assert eh.method("fedavg:server=recent", server="plain") == eh.method("fedavg")
    assert eh.method("fedavg:server=fedadam", eta=0.5).server == eh.method("fedadam:eta=0.5").server
    by_string = eh.aggregate("fedfv:server=fedadam", updates_of(), losses=np.arange(5.0))
    by_keyword = eh.aggregate("fedfv", updates_of(), losses=np.arange(5.0), server="fedadam")
    np.testing.assert_array_equal(by_string.update, by_keyword.update)


@pytest.mark.parametrize("server", SERVERS)
@every_method
def test_what_is_written_is_read_as_the_same_method(name, server):
    assert eh.method(name).written == name
    for settings in ({}, {"server": server}, {"server": server, "objective": "proximal:mu=0.25"}):
        for eta in ({}, {"eta": 0.625}):
            chosen = eh.method(name, **settings, **(eta if hasattr(eh.method(name, **settings).server, "eta") else {}))
            assert eh.method(chosen.written) == chosen


def test_the_default_method_is_even():
    assert eh.method() == eh.method("even")


def test_a_setting_is_looked_up_in_rule_server_and_objective():
    changed = eh.method("fedfa", alpha=0.25, beta=0.75, gamma=0.1, client_momentum=0.3)
    assert (changed.rule.alpha, changed.rule.beta) == (0.25, 0.75)
    assert changed.server.gamma == 0.1
    assert changed.objective.client_momentum == 0.3
    assert eh.method(changed, gamma=0.2).server.gamma == 0.2
    with_momentum = eh.method("mfairfl", beta=0.5, server="momentum:beta=0.25")
    assert (with_momentum.rule.beta, with_momentum.server.beta) == (0.5, 0.25)


def test_rule_and_server_step_compose():
    composed = eh.method("adafed", gamma=1, server="fedadam")
    assert composed.rule == eh.method("adafed").rule
    assert composed.server == SERVERS["fedadam"]
    given, losses = updates_of(), everything()["losses"]
    direction = eh.aggregate("adafed", given, losses=losses).update
    found = eh.aggregate(composed, given, losses=losses).update
    step = composed.server
    second = (1.0 - step.beta2) * direction**2
    np.testing.assert_allclose(found, step.eta * (1.0 - step.beta1) * direction / (np.sqrt(second) + step.tau))
    assert "server fedadam(eta=0.1" in str(composed)


@pytest.mark.parametrize("server", SERVERS)
@every_method
def test_every_rule_works_with_every_server_step(name, server):
    chosen = eh.method(name, server=server)
    assert eh.method(chosen.to_dict()) == chosen
    state = None
    for index in range(2):
        out = eh.aggregate(chosen, updates_of(seed=index), clients=IDS, state=state, **everything(seed=index))
        state = out.state
        assert np.isfinite(out.update).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_changes_no_aggregation(objective):
    given, inputs = updates_of(), everything()
    wanted = eh.aggregate("fedavg", given, **inputs).update
    np.testing.assert_array_equal(eh.aggregate("fedavg", given, objective=objective, **inputs).update, wanted)


# ------------------------------------------------------------------------------------------- a method of one's own


@dataclass(frozen=True)
class Median(eh.Rule):
    """The client with the median loss alone, with a count of the rounds."""

    power: float = 1.0

    name: ClassVar[str] = "median"
    paper: ClassVar[str] = "nobody"
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def weigh(self, round, memo):
        coefficients = np.zeros(round.rows)
        middle = np.argsort(round.losses[: round.present])[round.present // 2]
        coefficients[middle] = self.power
        rounds = int(memo.get("rounds", 0)) + 1
        return eh.Weights(coefficients, {"rounds": rounds}, notes=(f"{rounds} rounds",))


@pytest.fixture
def median():
    entry = eh.register(eh.Method("median", Median()))
    yield entry
    del METHODS["median"]


def test_a_method_of_ones_own_is_used_by_name(median, tmp_path):
    assert median.name in [entry.name for entry in eh.methods()]
    info = next(entry for entry in eh.methods() if entry.name == "median")
    assert info.summary == "The client with the median loss alone, with a count of the rounds."
    assert (info.paper, info.needs, info.settings["power"]) == ("nobody", ("losses",), 1.0)
    given, losses = updates_of(), [3.0, 1.0, 2.0, 9.0, 0.5]
    out = eh.aggregate("median:power=2", given, losses=losses)
    np.testing.assert_array_equal(out.update, 2.0 * given[2])
    out.state.save(tmp_path / "state")
    again = eh.aggregate("median", given, losses=losses, state=eh.State.load(tmp_path / "state"))
    assert again.diagnostics.notes == ("2 rounds",)
    refused("median needs losses=", "median", given)
    assert eh.method(json.loads(json.dumps(eh.method("median", power=3.0).to_dict()))).rule.power == 3.0
    assert "median" in repr(eh.methods())


def test_a_name_is_taken_once(median):
    assert eh.register(eh.Method("median", Median())) == median
    with pytest.raises(eh.EvenhandError, match="a method named 'median' is there already"):
        eh.register(eh.Method("median", Median(power=2.0)))
    with pytest.raises(eh.EvenhandError, match="a method named 'fedavg' is there already"):
        eh.register(eh.Method("fedavg", Median()))


def test_a_rule_without_a_formula_says_so():
    @dataclass(frozen=True)
    class Empty(eh.Rule):
        name: ClassVar[str] = "empty"
        paper: ClassVar[str] = ""

    with pytest.raises(NotImplementedError, match="Empty is a rule without a weigh function"):
        eh.aggregate(eh.Method("empty", Empty()), updates_of())


# ----------------------------------------------------------------------------------------------------- the table


def test_the_table_lists_every_method():
    table = eh.methods()
    lines = repr(table).splitlines()
    assert len(table) == len(METHODS) == len(lines) - 1
    assert [line.split()[0] for line in lines] == ["method", *METHODS]
    for entry, line in zip(table, lines[1:], strict=True):
        assert entry.summary
        assert entry.paper
        assert entry.summary in line
        assert entry.paper in line
        assert all(need in line for need in entry.needs)
    assert table[0] == next(iter(table))
    assert {entry.name for entry in table[1:3]} == set(list(METHODS)[1:3])
