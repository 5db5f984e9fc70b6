"""FairStrategy against clients that are late, wrong, double, gone or new; and against bad settings."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")

import torch
from flowing import InProcessGrid, own_app, own_data, own_evaluate, own_grid, own_model, own_start, own_train
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from evenhand.checks import EvenhandError
from evenhand.engine.sampling import Sampling
from evenhand.flower import FairStrategy, Task, fair_client
from evenhand.methods import method


def play(grid, rule="fedavg", rounds=2, **settings):
    strategy = FairStrategy(rule, **settings)
    result = strategy.start(grid, own_start(), num_rounds=rounds)
    return strategy, result


class Spoiling(InProcessGrid):
    """Node 1001's training replies are spoilt, in the first round alone or in all of them."""

    spoil = staticmethod(lambda message, reply: reply)
    kind, rounds = "train", (1,)

    def answer(self, message):
        reply, meta = super().answer(message), message.metadata
        config = message.content.config_records
        now = config["task"]["server-round"] if "task" in config else 0
        if meta.dst_node_id == 1001 and meta.message_type == self.kind and now in self.rounds:
            return self.spoil(message, reply)
        return reply


def changed(arrays=None, metrics=None, content=None):
    def spoil(message, reply):
        found = RecordDict(dict(reply.content)) if content is None else content
        if arrays is not None:
            found["arrays"] = ArrayRecord(arrays(dict(reply.content["arrays"])))
        if metrics is not None:
            found["metrics"] = MetricRecord(metrics(dict(reply.content["metrics"])))
        return Message(found, reply_to=message)

    return spoil


def without(name):
    return lambda values: {key: value for key, value in values.items() if key != name}


def with_nan(arrays):
    spoilt = arrays["0.bias"].numpy().copy()
    spoilt[0] = np.nan
    return {**arrays, "0.bias": Array(spoilt)}


def objects(arrays):
    return {**arrays, "0.bias": Array("float32", (4,), "numpy.ndarray", b"no array at all")}


BAD = {
    "silent": (lambda message, reply: None, "no reply within 3600 s"),
    "error": (lambda message, reply: Message(Error(2, "out of memory"), reply_to=message), "error 2: out of memory"),
    "no arrays": (changed(content=RecordDict({"metrics": MetricRecord({"num-examples": 3})})), "one ArrayRecord"),
    "missing array": (changed(arrays=without("0.bias")), "it lacks '0.bias'"),
    "further array": (changed(arrays=lambda a: {**a, "more": Array(np.zeros(3))}), "it has 'more' besides"),
    "wrong shape": (changed(arrays=lambda a: {**a, "0.bias": Array(np.zeros(3))}), r"'0.bias' has shape \(3,\)"),
    "whole numbers": (changed(arrays=lambda a: {**a, "0.bias": Array(np.zeros(4, dtype=int))}), "holds int64"),
    "not an array": (changed(arrays=objects), "cannot be read"),
    "nan": (changed(arrays=with_nan), "its update holds NaN or Inf"),
    "no loss": (changed(metrics=without("loss")), "lack 'loss'"),
    "loss is nan": (changed(metrics=lambda m: {**m, "loss": float("nan")}), "its 'loss' is nan"),
    "loss is a list": (changed(metrics=lambda m: {**m, "loss": [1.0]}), "is a list"),
    "negative count": (changed(metrics=lambda m: {**m, "num-examples": -3}), "its 'num-examples' is -3"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_left_out_with_its_reason_and_the_others_count(kind):
    spoil, reason = BAD[kind]
    grid = own_grid(type("Bad", (Spoiling,), {"spoil": staticmethod(spoil)}))
    strategy, _ = play(grid, "fedlf")
    first, second = strategy.rounds
    assert first["asked"] == second["asked"] == [0, 1, 2, 3]
    assert list(first["excluded"]) == ["1"]
    assert re.search(reason, first["excluded"]["1"])
    assert second["excluded"] == {}
    expected, _ = play(own_grid(InProcessGrid, app=_only((0, 2, 3))), "fedlf", 1, min_available_nodes=3)
    assert expected.names == ("0", "2", "3")
    alone = FairStrategy("fedlf")
    alone.start(own_grid(type("Bad", (Spoiling,), {"spoil": staticmethod(spoil)})), own_start(), num_rounds=1)
    torch.testing.assert_close(alone.model, expected.model)


def _only(places):
    """An app whose other clients do not say who they are."""
    app = ClientApp()
    inner = own_app()
    for register, action in ((app.query, "describe"), (app.train, "default"), (app.evaluate, "default")):

        @register(action)
        def handle(message, context, action=action):
            if context.node_config["partition-id"] not in places:
                raise RuntimeError("nobody")
            return inner(message, context)

    return app


def test_a_second_and_a_late_reply_are_noted_and_do_not_count_twice():
    class Doubling(InProcessGrid):
        late = None

        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if replies and replies[0].metadata.message_type == "train":
                replies += [replies[0], *([self.late] if self.late is not None else [])]
                self.late = replies[1]
            return replies

    strategy, _ = play(own_grid(Doubling))
    plain, _ = play(own_grid())
    assert torch.equal(strategy.model, plain.model)
    assert any("second reply of node 1000" in note for note in strategy.rounds[0]["notes"])
    assert any("answers none of this round's messages" in note for note in strategy.rounds[1]["notes"])


def test_flowers_own_error_replies_are_put_to_the_node_that_was_asked():
    """A node that vanished: Flower answers for it, and names the SuperLink (node 1) as the sender."""

    def vanish(message, reply):
        found = Message(Error(5, "Node Unavailable"), reply_to=message)
        found.metadata.__dict__["_src_node_id"] = 1
        return found

    strategy, _ = play(own_grid(type("Gone", (Spoiling,), {"spoil": staticmethod(vanish)})), rounds=1)
    assert strategy.rounds[0]["excluded"] == {"1": "error 5: Node Unavailable"}
    assert strategy.rounds[0]["lost"] == [1]


def test_too_few_good_replies_leave_the_model_as_it_was():
    def fails(model, data, task):
        raise RuntimeError("disk full")

    strategy, result = play(own_grid(app=own_app(fails)), rounds=2)
    for record in strategy.rounds:
        assert record["note"] == "0 good replies, 2 are needed: the model stays"
        assert all("disk full" in reason for reason in record["excluded"].values())
    for name, tensor in own_start().to_torch_state_dict().items():
        assert torch.equal(strategy.tensors()[name], tensor)
        assert torch.equal(result.arrays.to_torch_state_dict()[name], tensor)

    def diverges(model, data, task):
        with torch.no_grad():
            next(model.parameters()).fill_(float("inf"))

    strategy, _ = play(own_grid(app=own_app(diverges)), rounds=1)
    assert strategy.rounds[0]["note"] == "0 good replies, 2 are needed: the model stays"
    assert len(strategy.rounds[0]["excluded"]) == 4


def test_absent_clients_are_remembered_while_they_are_away():
    """A node that is gone for a round counts there with its last update, where the method remembers (FedLF)."""
    grid = own_grid()
    strategy = FairStrategy("fedlf", min_available_nodes=4)

    def leave(now):
        grid.online = {1000, 1001, 1002, 1003} if now.round != 1 else {1000, 1002, 1003}

    strategy.after_round = leave
    strategy.start(grid, own_start(), num_rounds=3)
    assert [record["asked"] for record in strategy.rounds] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert [record["remembered"] for record in strategy.rounds] == [0, 1, 0]
    assert np.isnan(strategy.evaluations[2]["accuracies"][1])
    assert np.isfinite(strategy.evaluations[3]["accuracies"]).all()


def test_a_client_whose_update_is_not_finite_counts_with_its_last_one():
    grid = own_grid(type("Nan", (Spoiling,), {"spoil": staticmethod(changed(arrays=with_nan)), "rounds": (2,)}))
    strategy, _ = play(grid, "fedlf", rounds=2)
    away = own_grid()
    other = FairStrategy("fedlf")
    other.after_round = lambda now: away.online.discard(1001)
    other.start(away, own_start(), num_rounds=2)
    assert strategy.rounds[1]["excluded"] == {"1": "its update holds NaN or Inf"}
    assert [record["remembered"] for record in strategy.rounds] == [0, 1]
    torch.testing.assert_close(strategy.model, other.model)


def test_a_schedule_follows_from_seed_and_names_whatever_the_node_ids():
    def asked(ids, seed=3):
        grid = own_grid(clients=6)
        grid.contexts = {ids[k]: context for k, context in enumerate(grid.contexts.values())}
        for number, context in grid.contexts.items():
            context.node_id = number
        grid.online = set(grid.contexts)
        strategy, _ = play(grid, fraction_train=0.5, seed=seed, rounds=4)
        return [[strategy.names[place] for place in record["asked"]] for record in strategy.rounds]

    first = asked([10, 11, 12, 13, 14, 15])
    assert first == asked([15, 11, 99, 13, 2, 7])
    assert first != asked([10, 11, 12, 13, 14, 15], seed=4)
    assert len({tuple(names) for names in first}) > 1


def test_a_client_that_is_not_connected_is_replaced_and_changes_nobody_elses_place():
    from evenhand.flower.roster import Member, Roster

    roster = Roster()
    roster.join({100 + k: Member(f"client {k}", 10, 5) for k in range(12)})
    assert roster.names[2] == "client 2"
    assert roster.names[11] == "client 11"
    sampling = Sampling(cohort=4)
    for round in range(20):
        whole, meant = roster.cohort(sampling, 0, round)
        assert (len(whole), meant) == (4, 4)
        gone = Roster(roster.members, {n: p for n, p in roster.nodes.items() if p != whole[1]})
        replaced, _ = gone.cohort(sampling, 0, round)
        assert len(replaced) == 4
        assert len(set(whole) & set(replaced)) == 3
        assert whole[1] not in replaced
    roster.leave([100, 103])
    few, meant = roster.cohort(sampling, 0, 0)
    assert few == [0, 3]
    assert meant == 4


def test_two_nodes_of_one_name_and_strangers_are_not_asked():
    class Named(InProcessGrid):
        pass

    app = own_app(name=lambda context: "twin" if context.node_config["partition-id"] < 2 else "other")
    strategy, _ = play(own_grid(app=app), min_available_nodes=2, rounds=1)
    assert sorted(strategy.names) == ["other", "twin"]
    assert len(strategy.rounds[0]["asked"]) == 2


def test_waiting_for_nodes_ends_with_an_error_that_says_why():
    grid = own_grid(clients=1)
    with pytest.raises(EvenhandError, match=r"1 of 3 clients were there within 0.2 s; start more SuperNodes"):
        FairStrategy("fedavg", min_available_nodes=3, wait=0.2).start(grid, own_start(), num_rounds=1)

    def broken(context):
        raise FileNotFoundError("/data/north.csv")

    grid = own_grid(app=own_app(data=broken), clients=2)
    with pytest.raises(EvenhandError, match=r"0 of 2 clients were there.*FileNotFoundError: /data/north.csv"):
        FairStrategy("fedavg", wait=0.2).start(grid, own_start(), num_rounds=1)


def test_a_line_search_goes_on_without_a_client_that_does_not_answer():
    grid = own_grid(type("Mute", (Spoiling,), {"kind": "query.trial", "spoil": staticmethod(lambda m, r: None)}))
    strategy, _ = play(grid, "fedmdfg", lr=0.1)
    assert any("1 did not judge the step's length" in note for note in strategy.rounds[0]["notes"])
    assert strategy.rounds[0]["excluded"] == {}
    assert any(note.startswith("line search:") for note in strategy.rounds[0]["notes"])
    assert strategy.rounds[1]["losses"][0] < strategy.rounds[0]["losses"][0]


def test_flowers_own_loop_can_drive_the_strategy_too():
    """Somebody's own loop: configure, send, aggregate; the arrays go in and out by hand."""
    ours, _result = play(own_grid(), "fedfv", rounds=2)
    grid, other = own_grid(), FairStrategy("fedfv")
    arrays = own_start()
    other.open(grid, arrays)
    for now in (1, 2):
        replies = grid.send_and_receive(other.configure_train(now, arrays, ConfigRecord(), grid))
        arrays, metrics = other.aggregate_train(now, replies)
        assert metrics["clients"] == 4
    assert torch.equal(other.model, ours.model)
    with pytest.raises(EvenhandError, match="round 5 was not configured"):
        other.aggregate_train(5, [])


def test_the_history_keeps_what_flowers_result_drops(tmp_path):
    strategy, result = play(own_grid(), "qffl:q=1", rounds=3, lr=0.1, evaluate_every=2)
    assert [entry["round"] for entry in strategy.evaluations] == [0, 2, 3]
    assert strategy.evaluations[-1]["accuracies"].shape == (4,)
    assert set(result.evaluate_metrics_clientapp) == {0, 2, 3}
    last = result.evaluate_metrics_clientapp[3]
    assert last["worst-accuracy"] == pytest.approx(strategy.evaluations[-1]["accuracies"].min())
    assert len(strategy.rounds[0]["losses"]) == 4
    strategy.save(tmp_path / "state")
    other = FairStrategy("qffl:q=1", lr=0.1)
    other.restore(tmp_path / "state")
    assert other.rounds == strategy.rounds
    assert other.names == strategy.names
    with pytest.raises(EvenhandError, match="is the state of qffl under seed 0, not of fedavg"):
        FairStrategy("fedavg").restore(tmp_path / "state")
    strategy.state.save(tmp_path / "other")
    with pytest.raises(EvenhandError, match="not a federation file"):
        other.restore(tmp_path / "other")


def test_centralised_evaluation_and_configurations_reach_where_they_should():
    seen = []

    def train(model, data, task):
        seen.append((task.round, dict(task.config), task.lr))
        own_train(model, data, task)

    strategy = FairStrategy("fedavg", lr=lambda index: 0.1 / (1 + index))
    result = strategy.start(
        own_grid(app=own_app(train)),
        own_start(),
        num_rounds=2,
        train_config=ConfigRecord({"epochs": 3}),
        evaluate_fn=lambda now, arrays: MetricRecord({"round": now}),
    )
    assert seen[0] == (1, {"epochs": 3, "server-round": 1}, 0.1)
    assert seen[-1] == (2, {"epochs": 3, "server-round": 2}, 0.05)
    assert {now: record["round"] for now, record in result.evaluate_metrics_serverapp.items()} == {0: 0, 1: 1, 2: 2}


# ------------------------------------------------------------------------------------------------ the user's client


@pytest.mark.parametrize("rule", ["fedavg", "even", "fedprox", "ditto", "fedfa", "fedmdfg", "qffl:losses=trained"])
def test_a_users_own_client_serves_the_methods_and_learns(rule):
    strategy, _ = play(own_grid(), rule, rounds=20 if rule == "even" else 5, lr=0.1)  # these clients are much alike
    first, last = strategy.evaluations[0], strategy.evaluations[-1]
    assert all(record["excluded"] == {} for record in strategy.rounds)
    assert last["pooled_loss"] < first["pooled_loss"]
    assert last["accuracies"].mean() > 0.85


def test_fair_client_agrees_with_a_loop_of_ones_own():
    """One round of fedavg by hand: the same mean of the same trained models."""
    strategy, _ = play(own_grid(), "fedavg", rounds=1)
    grid, models = own_grid(), []
    for context in grid.contexts.values():
        model = own_model()
        own_train(model, own_data(context)[0], Task(1))
        models.append(model.state_dict())
    for name, tensor in strategy.tensors().items():
        torch.testing.assert_close(tensor, torch.stack([model[name] for model in models]).mean(0))


def test_a_training_that_ignores_what_the_method_asks_is_refused():
    def ignores(model, data, task):
        task.used.clear()

    for rule, hint in (("fedprox", "add task.penalty"), ("fedfa", "momentum=task.momentum"), ("ditto", "task.penalty")):
        strategy, _ = play(own_grid(app=own_app(ignores)), rule, rounds=1, lr=0.1)
        assert all(hint in reason for reason in strategy.rounds[0]["excluded"].values())
        assert len(strategy.rounds[0]["excluded"]) == 4


@pytest.mark.parametrize("rule", ["fedcka", "fedcorr:iterations=1,together=4"])
def test_what_a_users_own_client_cannot_do_is_said(rule):
    strategy, _ = play(own_grid(), rule, rounds=2)
    assert all("evenhand's own client" in reason for reason in strategy.rounds[0]["excluded"].values())


def test_counters_of_a_network_stay_as_they_are():
    """BatchNorm counts its batches in whole numbers, which no method can average."""

    def with_norm():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    app = own_app(model=with_norm)
    strategy = FairStrategy("fedavg")
    result = strategy.start(own_grid(app=app), ArrayRecord(with_norm().state_dict()), num_rounds=2)
    found = result.arrays.to_torch_state_dict()
    assert found["1.num_batches_tracked"] == 0
    assert not torch.equal(found["1.running_mean"], torch.zeros(4))


def test_a_plain_flower_app_is_told_what_it_lacks():
    app = ClientApp()

    @app.train()
    def train(message, context):
        return Message(message.content, reply_to=message)

    with pytest.raises(EvenhandError, match=r"0 of 2 clients were there.*No query function registered"):
        FairStrategy("fedavg", wait=0.1).start(own_grid(app=app), own_start(), num_rounds=1)


def test_a_fair_client_under_another_strategy_says_so():
    from flwr.serverapp.strategy import FedAvg

    grid, seen = own_grid(), []
    original = grid.answer
    grid.answer = lambda message: seen.append(original(message)) or seen[-1]
    FedAvg().start(grid, own_start(), num_rounds=1)
    assert "the ServerApp uses another" in seen[0].error.reason


# -------------------------------------------------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fraction_train": 0.0}, "fraction_train=0.0 must be a number, above 0"),
        ({"fraction_train": 1.5}, "fraction_train=1.5"),
        ({"fraction_train": 0.5, "sampling": Sampling()}, "give one of them"),
        ({"sampling": Sampling(dropout=0.1)}, "sampling.dropout=0.1 is for the simulator"),
        ({"min_train_nodes": 0}, "min_train_nodes=0"),
        ({"evaluate_every": -1}, "evaluate_every=-1"),
        ({"timeout": 0}, "timeout=0"),
        ({"wait": -1}, "wait=-1"),
        ({"measure": "all"}, "measure='all' is not one of"),
        ({"seed": -1}, "seed=-1"),
        ({"rule": "fedvf"}, "did you mean 'fedfv'"),
        ({"rule": "qffl"}, "qffl needs the clients' learning rate"),
        ({"rule": "fedfa"}, "fedfa needs the clients' learning rate"),
        ({"rule": "mfairfl"}, "looks at groups of people"),
        ({"alpha": 3}, "fedavg has no setting 'alpha'"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_is_sent(settings, said):
    with pytest.raises(EvenhandError, match=said):
        FairStrategy(**{"rule": "fedavg", **settings})


def test_bad_starts_are_refused():
    for arrays, said in (
        (ArrayRecord(), "initial_arrays is empty"),
        (ArrayRecord([np.arange(3)]), "holds no floating-point array"),
    ):
        with pytest.raises(EvenhandError, match=said):
            FairStrategy("fedavg").start(own_grid(), arrays, num_rounds=1)
    with pytest.raises(EvenhandError, match="num_rounds=0"):
        FairStrategy("fedavg").start(own_grid(), own_start(), num_rounds=0)
    with pytest.raises(EvenhandError, match="train=3 must be a function"):
        fair_client(3, own_evaluate, model=nn.Linear, data=lambda context: ([], []))
    strategy, _ = play(own_grid(app=own_app(evaluate=lambda model, data: 3.0)), "fedlf", rounds=1)
    assert "should return the mean loss and the accuracy" in strategy.rounds[0]["excluded"]["0"]


def test_named_parts_and_composed_methods_are_taken():
    assert FairStrategy("fedfv", alpha=0.2).method.rule.alpha == 0.2
    composed = method("adafed", gamma=1, server="fedadam")
    assert FairStrategy(composed, fraction_train=0.5).method == composed
