"""Descriptions of deployments, the clients' own files, and the run folder that the server writes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")

import torch
from flowing import GROUPS, InProcessGrid, grid_of, small

from evenhand.checks import EvenhandError
from evenhand.flower import Deployment, site_client
from evenhand.flower.deployment import Waiting, write_files
from evenhand.flower.server import federate
from evenhand.running import load_runs, simulate

ARRAYS = {"rounds": 2, "clients": 3, "schema": {"shape": [4], "classes": 3}, "sampling": {"participation": 1.0}}
TABLE = """
rounds = 3
clients = 2
model = "logistic"
[sampling]
participation = 1.0
[method]
name = "fedfv"
alpha = 0.2
[schema]
target = "ill"
classes = ["no", "yes"]
[schema.numbers]
age = [40, 15]
[schema.words]
ward = ["north", "south"]
[schema.sensitive]
sex = ["female", "male"]
[deployment]
timeout = 30
min_replies = 1
"""


def own_file_grid(deployment, paths, names=None):
    nodes = [
        {"name": path.stem if names is None else names[place], "data-path": str(path)}
        for place, path in enumerate(paths)
    ]
    return InProcessGrid(site_client(deployment), nodes)


# ------------------------------------------------------------------------------------------------ the clients' files


@pytest.mark.parametrize("changes", [{}, {"noise": "0.5,0.4"}, GROUPS], ids=["digits", "noisy", "groups"])
def test_a_deployment_over_the_clients_own_files_gives_the_simulators_run(tmp_path, changes):
    experiment = small("mfairfl" if changes is GROUPS else "fedlf", **changes)
    deployment, paths = write_files(experiment, tmp_path)
    assert Deployment.read(tmp_path / "deployment.toml").to_toml() == deployment.to_toml()
    assert len(paths) == deployment.clients
    found = federate(deployment, own_file_grid(deployment, paths))
    there = simulate(replace(experiment, chunk=1))
    for name, tensor in there[0].model.items():
        assert torch.equal(found[0].model[name], tensor)
    np.testing.assert_array_equal(found[0].accuracies, there[0].accuracies)
    assert found.measured("mean") == there.measured("mean")
    if changes is GROUPS:
        assert found.group_sentence() == there.group_sentence()


def table_file(path, rows=40, seed=0, **spoilt):
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("age", "ward", "sex", "ill"))
        for _ in range(rows):
            age, ward = int(rng.integers(20, 80)), str(rng.choice(["north", "south", "west"]))
            row = {"age": age, "ward": ward, "sex": rng.choice(["female", "male"]), "ill": "yes" if age > 50 else "no"}
            table.writerow((row | spoilt).values())
    return path


def test_clients_with_tables_of_their_own_train_one_model(tmp_path):
    (tmp_path / "deployment.toml").write_text(TABLE)
    deployment = Deployment.read(tmp_path / "deployment.toml")
    assert deployment.schema.width == (3,)
    assert deployment.experiment.method.rule.alpha == 0.2
    paths = [table_file(tmp_path / f"{name}.csv", seed=place) for place, name in enumerate(("harbour", "castle"))]
    runs = federate(deployment, own_file_grid(deployment, paths))
    assert runs[0].names == ("castle", "harbour")
    assert runs[0].test_samples.tolist() == [8, 8]
    assert runs[0].losses.max() < runs[0].evaluations[0]["losses"].min()
    assert [row["group"] for row in runs[0].group_rows()] == ["female", "male"]


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"age": "old"}, "column 'age' of schema.numbers holds words"),
        ({"age": ""}, "column 'age' of schema.numbers holds words|lacks 40 values"),
        ({"ill": "perhaps"}, "the class 'perhaps' is not in schema.classes"),
        ({"sex": "x"}, "sex 'x' is not in schema.sensitive.sex"),
    ],
)
def test_a_table_that_does_not_fit_is_named_with_what_is_wrong(tmp_path, spoilt, said):
    (tmp_path / "deployment.toml").write_text(TABLE)
    deployment = Deployment.read(tmp_path / "deployment.toml")
    path = table_file(tmp_path / "castle.csv", **spoilt)
    with pytest.raises(EvenhandError, match=said):
        deployment.holding(None, str(path))


def test_arrays_that_do_not_fit_are_named_with_what_is_wrong(tmp_path):
    deployment = Deployment.from_dict(ARRAYS)
    good = {"x": np.zeros((5, 4), dtype=np.float32), "y": np.arange(5) % 3}

    def reading(**changes):
        path = tmp_path / "client.npz"
        np.savez(path, **{name: value for name, value in {**good, **changes}.items() if value is not None})
        return deployment.holding(None, str(path))

    dataset, drawn, number = reading()
    assert (len(dataset), number, drawn.clients) == (5, 0, 1)
    for changes, said in (
        ({"x": None}, "has no array 'x'"),
        ({"x": np.zeros((5, 3))}, r"samples have shape \(3,\), the schema says \(4,\)"),
        ({"x": np.full((5, 4), np.nan)}, "some inputs are NaN"),
        ({"y": np.arange(5)}, "classes go from 0 to 2, and 4 is there"),
        ({"part": np.full(5, 7)}, r"should say 0 \(train\), 1 \(validation\) or 2 \(test\)"),
    ):
        with pytest.raises(EvenhandError, match=said):
            reading(**changes)
    with pytest.raises(EvenhandError, match="there is no file"):
        deployment.holding(None, str(tmp_path / "none.npz"))
    with pytest.raises(EvenhandError, match="this node has no data-path"):
        deployment.holding(None, None)
    by_name = Deployment(small())
    with pytest.raises(EvenhandError, match="this node has no partition-id"):
        by_name.holding(None, None)
    with pytest.raises(EvenhandError, match="partition-id=6 is not one of the 6 clients"):
        by_name.holding(6, None)


# ------------------------------------------------------------------------------------------------- the description


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": None}, "clients = N is needed"),
        ({"seeds": 2}, "a deployment runs one seed, not 2"),
        ({"measure": "all"}, "costs a message"),
        ({"sampling": {"dropout": 0.5}}, "sampling.dropout=0.5 is for the simulator"),
        ({"partition": "iid"}, r"partition and \[schema\] exclude each other"),
        ({"noise": "0.5,0.5"}, "noise is for the simulator"),
        ({"deployment": {"timeot": 3}}, "did you mean 'timeout'"),
        ({"deployment": {"timeout": -3}}, "deployment.timeout=-3"),
        ({"deployment": {"min_replies": 0}}, "deployment.min_replies=0"),
        ({"method": "cenfair"}, "trains without a federation"),
        ({"method": "mfairfl"}, r"name them in \[schema.sensitive\]"),
        ({"schema": {"shape": [4]}}, "schema needs classes"),
        ({"schema": {"shape": [4], "classes": 1}}, "schema.classes=1"),
        ({"schema": {"shape": [4], "classes": ["a", "a"]}}, "at least two different classes"),
        ({"schema": {"classes": 3}}, "describes either arrays"),
        ({"schema": {"shape": [0], "classes": 3}}, "a size in schema.shape=0"),
        ({"schema": {"shape": [4], "clases": 3}}, "did you mean 'classes'"),
        ({"schema": {"classes": 2, "numbers": {"age": 3}}}, "must be two numbers"),
        ({"schema": {"classes": 2, "numbers": {"age": [3, 0]}}}, "above 0"),
        ({"schema": {"classes": 2, "words": {"ward": []}}}, "must list different words"),
    ],
    ids=str,
)
def test_a_wrong_description_is_refused_with_the_way_out(changes, said):
    values = {name: value for name, value in {**ARRAYS, **changes}.items() if value is not None}
    with pytest.raises(EvenhandError, match=said):
        Deployment.from_dict(values)


def test_a_wrong_file_is_named(tmp_path):
    (tmp_path / "deployment.toml").write_text("rounds = 0\n")
    with pytest.raises(EvenhandError, match=r"deployment.toml: rounds=0"):
        Deployment.read(tmp_path / "deployment.toml")


# ----------------------------------------------------------------------------------------------------- the run folder


def test_the_run_folder_is_that_of_a_simulation(tmp_path):
    experiment = small("fedlf")
    runs = federate(Deployment(experiment), grid_of(Deployment(experiment)), out=tmp_path / "there")
    here = simulate(replace(experiment, chunk=1), out=tmp_path / "here")
    extra, unknown = {"deployment.toml"}, {"seed-0/holdings.csv"}  # which classes a client holds stays with it

    def files(place):
        return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}

    assert files(tmp_path / "there") == files(tmp_path / "here") - unknown | extra
    assert "evenhand deploy deployment.toml" in (tmp_path / "there" / "report.html").read_text()
    for name in ("seed-0/clients.csv", "seed-0/model.safetensors"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    for ours, theirs in zip(
        (tmp_path / "there/seed-0/rounds.jsonl").read_text().splitlines(),
        (tmp_path / "here/seed-0/rounds.jsonl").read_text().splitlines(),
        strict=True,
    ):
        assert json.loads(ours) == json.loads(theirs)
    back = load_runs(tmp_path / "there")
    assert back.summary() == here.summary() | {"experiment": back.summary()["experiment"]}
    assert back[0].names == runs[0].names
    page = (tmp_path / "there/report.html").read_text()
    assert "fedlf" in page
    assert "worst" in page
    partition = (tmp_path / "there/partition.txt").read_text()
    assert "which the server does not see" in partition
    assert "labels" not in partition


def test_a_server_that_is_killed_goes_on_from_its_last_round(tmp_path):
    class Killed(BaseException):
        pass

    class Deadly(InProcessGrid):
        trained = 0

        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            if messages and messages[0].metadata.message_type == "train":
                self.trained += 1
                if self.trained == 3:
                    raise Killed
            return replies

    experiment = small("even", rounds=5)
    deployment = Deployment(experiment)
    whole = federate(deployment, grid_of(deployment), out=tmp_path / "whole")
    with pytest.raises(Killed):
        federate(deployment, grid_of(deployment, Deadly), out=tmp_path / "cut")
    with pytest.raises(EvenhandError, match="holds a run that can go on"):
        federate(deployment, grid_of(deployment), out=tmp_path / "cut")
    other = Deployment(small("even", rounds=6))
    with pytest.raises(EvenhandError, match="holds a run of another description"):
        federate(other, grid_of(other), out=tmp_path / "cut", resume=True)
    again, patient = grid_of(deployment), replace(deployment, waiting=Waiting(timeout=900))
    resumed = federate(patient, again, out=tmp_path / "cut", resume=True)
    assert (again.sent.count("query.describe"), again.sent.count("train")) == (6, 3 * 3)
    assert Deployment.read(tmp_path / "cut/deployment.toml").waiting.timeout == 900
    assert "continued after round 2 of 5" in resumed.notes
    for name in ("seed-0/clients.csv", "seed-0/model.safetensors", "seed-0/rounds.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert resumed.summary() == whole.summary()
    with pytest.raises(EvenhandError, match="there is nothing to resume"):
        federate(deployment, again, out=tmp_path / "cut", resume=True)


def test_a_resumed_run_does_not_wait_for_a_client_that_is_gone_for_good(tmp_path):
    experiment = small("even", rounds=4, participation=1.0)
    deployment = Deployment(experiment)

    class Stop(BaseException):
        pass

    class Once(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if messages and "task" in messages[0].content.config_records:
                task = messages[0].content.config_records["task"]
                if task["server-round"] == 3:
                    raise Stop
            return super().send_and_receive(messages, timeout=timeout)

    with pytest.raises(Stop):
        federate(deployment, grid_of(deployment, Once), out=tmp_path / "run")
    left = grid_of(deployment)
    left.online -= {1003}
    runs = federate(deployment, left, out=tmp_path / "run", resume=True)
    assert [len(record["asked"]) for record in runs[0].rounds] == [6, 6, 5, 5]
    assert runs[0].rounds[2]["remembered"] == 1
    assert np.isnan(runs[0].accuracies[3])
    assert (tmp_path / "run/report.html").is_file()


def test_somebody_who_is_not_of_the_run_is_not_asked(tmp_path):
    deployment = Deployment(small("fedavg", participation=1.0, rounds=2))

    class Growing(InProcessGrid):
        def get_node_ids(self):
            return sorted(self.online - ({1005} if "train" not in self.sent else set()))

    app = site_client(deployment)
    nodes = [{"partition-id": client, "name": f"n{client}"} for client in range(5)]
    grid = Growing(app, [*nodes, {"partition-id": 5, "name": "late"}])
    smaller = replace(deployment.experiment, clients=5)
    runs = federate(Deployment(smaller), grid)
    assert runs[0].names == ("n0", "n1", "n2", "n3", "n4")
    assert [record["asked"] for record in runs[0].rounds] == [[0, 1, 2, 3, 4]] * 2
