"""Several rounds with changing clients: what a method carries on agrees with its paper."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

import evenhand as eh
from evenhand.methods import even

CLIENTS = [f"site-{i}" for i in range(12)]
LAYERS = [20, 9, 11]
SLICES = [(0, 20), (20, 29), (29, 40)]


def rounds(seed: int, count: int = 9, smallest: int = 2, largest: int = 6):
    """Cohorts of varying size out of twelve clients whose updates drift and conflict."""
    rng = np.random.default_rng(seed)
    camps = rng.standard_normal((len(CLIENTS), sum(LAYERS)))
    for index in range(count):
        chosen = rng.choice(len(CLIENTS), int(rng.integers(smallest, largest + 1)), replace=False)
        updates = camps[chosen] + 0.7 * rng.standard_normal((len(chosen), sum(LAYERS)))
        yield index, [CLIENTS[i] for i in chosen], updates, rng.uniform(0.1, 2.0, len(chosen)), rng


def agree(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-8) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-12))


def play(seed: int, name: str, oracle, tolerance: float = 1e-8, inputs=None, **settings) -> list[eh.Aggregate]:
    """Run a method and its oracle side by side; returns the outcomes."""
    state, theirs, outcomes = None, None, []
    for index, clients, updates, losses, rng in rounds(seed):
        more = inputs(rng, len(clients)) if inputs else {}
        out = eh.aggregate(name, updates, losses=losses, clients=clients, round=index, state=state, **more, **settings)
        expected, theirs = oracle(updates, losses, clients, index, theirs, more)
        agree(out.update, expected, tolerance)
        state = out.state
        outcomes.append(out)
    return outcomes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("alpha", "tau"), [(0.0, 1), (0.1, 3), (0.5, 2), (0.1, 0)])
def test_fedfv_protects_absent_clients(seed, alpha, tau):
    outcomes = play(
        seed, "fedfv", lambda u, f, c, t, s, _: oracles.fedfv(u, f, c, t, s, alpha, tau), alpha=alpha, tau=tau
    )
    ages = np.concatenate([out.diagnostics.ages for out in outcomes])
    assert ages.max() == tau  # rounds t - tau .. t - 1, no older ones


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("normalise", [True, False])
def test_fedlf_takes_absent_clients_along(seed, normalise):
    def oracle(updates, losses, clients, index, state, _):
        return oracles.fedlf(updates, losses, clients, index, state, SLICES, normalise=normalise)

    outcomes = play(seed, "fedlf", oracle, 1e-6, layers=LAYERS, normalise=normalise)
    assert max(len(out.diagnostics.ages) for out in outcomes) > 6  # remembered rows did take part
    for out in outcomes:
        if not any("joined" in note for note in out.diagnostics.notes):
            assert not out.diagnostics.layer_conflicts.any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("absent", ["last:1", "last:3", "off"])
def test_fedmdfg_carries_expected_losses_and_last_rounds_clients(seed, absent):
    play(seed, "fedmdfg", lambda u, f, c, t, s, _: oracles.fedmdfg(u, f, c, t, s, 11.25, absent), 1e-6, absent=absent)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("absent", ["last:2", "expected"])
@pytest.mark.parametrize("name", ["even", "even:recall=0.3", "even:recall=0", "adafed", "fedmgda+"])
def test_any_row_based_rule_can_remember_absent_clients(seed, absent, name):
    def oracle(updates, losses, clients, index, memory, _):
        memory = {} if memory is None else memory
        records = oracles.recall(oracles.remember(memory, updates, losses, clients, index), clients, index, absent)
        past = np.array([record["update"] for record in records]).reshape(-1, updates.shape[1])
        rows, known = np.vstack([updates, past]), np.append(losses, [record["loss"] for record in records])
        after = oracles.remember(memory, updates, losses, clients, index)
        if name.startswith("even"):
            share = float(name.partition("recall=")[2] or 1)
            return oracles.even(rows, known, 0.5, 0.001, present=len(updates), level=True, recall=share), after
        if name == "adafed":
            return oracles.adafed(rows, known, 1.0, "mean", present=len(updates)), after
        return oracles.fedmgda_plus(updates, 1.0, np.full(len(updates), 1 / len(updates)), past), after

    settings = {"epsilon": 1.0, "reference": "uniform"} if name == "fedmgda+" else {}
    outcomes = play(seed, name, oracle, 1e-5, absent=absent, **settings)
    assert max(out.diagnostics.ages.max() for out in outcomes) >= 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("absent", ["last:2", "expected"])
@pytest.mark.parametrize("layered", [True, False])
def test_absent_clients_ask_for_what_returning_ones_show_that_a_memory_is_worth(seed, absent, layered, monkeypatch):
    monkeypatch.setattr(even, "HEARD", 7)  # so that older answers count less
    layers = LAYERS if layered else [sum(LAYERS)]
    learnt = []

    def oracle(updates, losses, clients, index, state, _):
        memory, known = ({}, None) if state is None else state
        after = oracles.remember(memory, updates, losses, clients, index)
        records = oracles.recall(after | memory, clients, index, absent)
        reach = len(after) / len(clients) if absent == "expected" else 2
        near = {client: record["update"] for client, record in memory.items() if index - record["round"] <= reach}
        shares, known = oracles.even_recall([near.get(client) for client in clients], updates, layers, known, 7)
        learnt.append(shares)
        rows = np.vstack([updates, *(record["update"][None] for record in records)])
        losses = np.append(losses, [record["loss"] for record in records])
        settings = {"present": len(updates), "level": True, "layers": layers, "recall": shares}
        return oracles.even(rows, losses, 0.5, 0.001, **settings), (after, known)

    given = {"absent": absent, "layerwise": layered, "recall": "learnt"}
    outcomes = play(seed, "even", oracle, 1e-5, layers=LAYERS, **given)
    assert max(out.diagnostics.ages.max() for out in outcomes) >= 2
    assert 0.0 < np.min(learnt[-1]) <= np.max(learnt[-1]) < 1.0


def test_a_memory_that_foretells_everything_counts_in_full_and_one_that_foretells_nothing_does_no_more_than_protect():
    rng, states = np.random.default_rng(1), {"learnt": None, 1.0: None, 0.0: None}
    camps = rng.normal(size=(4, 30))
    for turn in (0, 1):  # first a client always says the same, then always the opposite of what it said before
        for index in range(turn * 40, turn * 40 + 40):
            who = [index % 4, (index + 1) % 4]
            rows = camps[who]
            camps[who] *= (1.0, -1.0)[turn]
            given = {"losses": [1.0, 2.0], "clients": [str(client) for client in who], "round": index}
            found = {
                recall: eh.aggregate("even", rows, state=state, recall=recall, **given)
                for recall, state in states.items()
            }
            states = {recall: out.state for recall, out in found.items()}
        same, other = (1.0, 0.0) if turn == 0 else (0.0, 1.0)
        np.testing.assert_allclose(found["learnt"].update, found[same].update, rtol=1e-6)
        assert np.abs(found["learnt"].update - found[other].update).max() > 1e-3


def test_absent_clients_who_only_want_no_harm_are_heard_where_it_would_be_done_alone():
    rng, here = np.random.default_rng(0), {"losses": [1.0, 2.0], "clients": ["a", "b"], "round": 1, "ridge": 0.0}
    updates = rng.uniform(0.5, 1.0, (2, 20))
    before = {
        "agrees": rng.uniform(0.5, 1.0, 20),
        "disagrees": updates.mean(0) * np.where(np.arange(20) < 12, -1.0, 1.0),
    }
    alone = eh.aggregate("even", updates, absent="off", **here).update
    for name, row in before.items():
        known = eh.aggregate("even", row[None], losses=[2.0], clients=["c"], round=0).state
        found = {recall: eh.aggregate("even", updates, state=known, recall=recall, **here) for recall in (0.0, 1.0)}
        for out in found.values():
            assert out.update @ row > 0.0
        if name == "agrees":
            agree(found[0.0].update, alone, 1e-9)
        else:
            assert alone @ row < 0.0
            assert np.linalg.norm(found[0.0].update - alone) < np.linalg.norm(found[1.0].update - alone)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("beta", "delta"), [(1.0, 0.01), (0.5, 0.1), (1.0, 0.9)])
def test_mfairfl_learns_similarity_goals(seed, beta, delta):
    def oracle(updates, losses, clients, index, state, _):
        return oracles.mfairfl_conflicts(updates, losses, clients, state, beta, delta)

    outcomes = play(seed, "mfairfl", oracle, 1e-6, beta=beta, delta=delta)
    assert (outcomes[-1].state.rule_memo["goals"] != 0).any()


@pytest.mark.parametrize("seed", range(4))
def test_afl_climbs_on_the_simplex_and_averages_the_models(seed):
    state = theirs = None
    for index, clients, updates, losses, _ in rounds(seed):
        out = eh.aggregate("afl", updates, losses=losses, clients=clients, round=index, state=state, step=0.1)
        expected, theirs, offset = oracles.afl(updates, losses, clients, theirs, 0.1)
        agree(out.update, expected)
        np.testing.assert_allclose(out.evaluation_offset, offset, atol=1e-10)
        shares = out.state.rule_memo["shares"]
        assert shares.sum() == pytest.approx(1.0)
        assert (shares >= 0).all()
        state = out.state


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 3])
def test_fedfa_weights_and_brakes(seed, every):
    def inputs(rng, count):
        accuracies = rng.uniform(0, 1, count)
        accuracies[rng.random(count) < 0.2] = 0.0
        return {"accuracies": accuracies}

    def oracle(updates, _losses, clients, index, state, more):
        from unittest.mock import patch

        # The paper leaves the constant inside the logarithm open; ours is 1e-6.
        original = oracles.fedfa_weights
        with patch.object(oracles, "fedfa_weights", lambda a, p, x, y: original(a, p, x, y, constant=1e-6)):
            return oracles.fedfa(updates, more["accuracies"], clients, index, state, 0.3, 0.7, 0.5, 0.1, every)

    play(seed, "fedfa", oracle, inputs=inputs, alpha=0.3, beta=0.7, gamma=0.5, eta=0.1, every=every)


def test_fedfa_momentum_can_push_forward():
    updates = np.ones((2, 3))
    brake = eh.aggregate("fedfa", updates, accuracies=[0.5, 0.5], eta=0.1, gamma=0.5)
    push = eh.aggregate("fedfa", updates, accuracies=[0.5, 0.5], eta=0.1, gamma=0.5, momentum="forward")
    np.testing.assert_allclose(brake.update, 0.95)
    np.testing.assert_allclose(push.update, 1.05)


def test_fedfa_uses_reported_participations():
    updates = np.eye(2)
    out = eh.aggregate("fedfa", updates, accuracies=[0.5, 0.5], participations=[9, 1], lr=0.1, alpha=0.0, beta=1.0)
    expected = oracles.fedfa_weights(np.array([0.5, 0.5]), np.array([9.0, 1.0]), 0.0, 1.0)
    np.testing.assert_allclose(out.coefficients[0], expected)


@pytest.mark.parametrize("seed", range(4))
def test_fairfed_weights_drift(seed):
    def inputs(rng, count):
        fairness = rng.uniform(-0.5, 0.5, count)
        fairness[rng.random(count) < 0.3] = np.nan
        return {
            "sizes": rng.integers(5, 200, count).astype(float),
            "fairness": fairness,
            "fairness_global": 0.1,
            "accuracies": rng.uniform(0.3, 1, count),
            "accuracy_global": 0.7,
        }

    def oracle(updates, _losses, clients, _index, state, more):
        return oracles.fairfed(updates=updates, clients=clients, state=state, beta=0.4, **more)

    play(seed, "fairfed", oracle, inputs=inputs, beta=0.4)


@pytest.mark.parametrize(
    ("server", "oracle"),
    [
        ("momentum:beta=0.8,eta=0.5", lambda u, s: oracles.server_momentum(u, s, 0.8, 0.5)),
        ("fedadam:eta=0.1,tau=0.001", lambda u, s: oracles.fedadam(u, s, 0.1, 0.9, 0.99, 1e-3)),
        (
            "fedadam:eta=0.1,tau=0.001,bias_correction=true",
            lambda u, s: oracles.fedadam(u, s, 0.1, 0.9, 0.99, 1e-3, bias_correction=True),
        ),
        ("fedamsgrad:eta=0.1", lambda u, s: oracles.fedamsgrad(u, s, 0.1, 0.9, 0.99, 1e-3)),
        ("fedyogi:eta=0.02", lambda u, s: oracles.fedyogi(u, s, 0.02, 0.9, 0.99, 1e-3)),
        ("fedadagrad:eta=0.1", lambda u, s: oracles.fedadagrad(u, s, 0.1, 1e-3)),
        ("plain:eta=0.3", lambda u, s: (0.3 * u, None)),
    ],
)
def test_server_steps_follow_their_papers(server, oracle):
    """Composed with AdaFed's direction, which is what the server step is handed."""
    state = theirs = None
    for index, clients, updates, losses, _ in rounds(5):
        out = eh.aggregate("adafed", updates, losses=losses, clients=clients, round=index, state=state, server=server)
        expected, theirs = oracle(eh.aggregate("adafed", updates, losses=losses).update, theirs)
        agree(out.update, expected)
        state = out.state


def test_an_adaptive_step_leaves_untouched_coordinates_alone():
    for name in ("fedadam", "fedamsgrad", "fedyogi", "fedadagrad"):
        out = eh.aggregate(name, np.array([[1.0, 0.0], [2.0, 0.0]]), weights="uniform")
        assert out.update[1] == 0.0
        assert out.update[0] > 0.0


def test_the_memory_gives_the_same_rows_in_float32_as_in_float64():
    state32 = state64 = None
    for index, clients, updates, losses, _ in rounds(3):
        narrow = torch.from_numpy(updates).float()
        out32 = eh.aggregate("even", narrow, losses=losses, clients=clients, round=index, state=state32)
        out64 = eh.aggregate("even", narrow.double(), losses=losses, clients=clients, round=index, state=state64)
        np.testing.assert_allclose(out32.diagnostics.gram, out64.diagnostics.gram, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out32.update.double(), out64.update, rtol=1e-3, atol=1e-4)
        state32, state64 = out32.state, out64.state


def test_layers_can_be_cut_out_of_a_list_of_vectors_as_out_of_a_matrix():
    (_, clients, updates, losses, _), *_ = rounds(1)
    matrix = eh.aggregate("fedlf", updates, losses=losses, clients=clients, layers=LAYERS)
    listed = eh.aggregate("fedlf", list(updates), losses=losses, clients=clients, layers=LAYERS)
    np.testing.assert_allclose(listed.update, matrix.update, rtol=1e-9)
    assert listed.diagnostics.layers == matrix.diagnostics.layers
