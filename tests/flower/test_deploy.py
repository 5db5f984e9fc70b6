"""`evenhand deploy`: what it writes, what it runs, and what it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")

from flowing import small
from typer.testing import CliRunner

from evenhand.checks import EvenhandError
from evenhand.cli import app
from evenhand.flower import Deployment, launch
from evenhand.flower.rehearsal import local_nodes, node_config


def deploy(*arguments):
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def test_handing_out_writes_one_file_a_client_and_says_what_to_do_next(tmp_path):
    done = deploy("--hand-out", tmp_path / "trial")
    assert done.exit_code == 0, done.output
    assert "--rehearse" in done.output
    deployment = Deployment.read(tmp_path / "trial/deployment.toml")
    assert len(list((tmp_path / "trial/clients").glob("*.npz"))) == deployment.clients == 4
    nodes = local_nodes(deployment, tmp_path / "trial/clients")
    assert [node["name"] for node in nodes] == [f"client-{k}" for k in range(4)]
    again = deploy("--hand-out", tmp_path / "trial")
    assert again.exit_code == 2
    assert "is not empty" in again.output
    (tmp_path / "trial/clients/client-3.npz").unlink()
    with pytest.raises(EvenhandError, match=r"is for 4 clients, and .* holds 3 \.npz files"):
        local_nodes(deployment, tmp_path / "trial/clients")


def test_handing_out_takes_an_experiments_file(tmp_path):
    (tmp_path / "experiment.toml").write_text(small("fedlf", measure="all").to_toml())
    done = deploy(tmp_path / "experiment.toml", "--hand-out", tmp_path / "trial")
    assert done.exit_code == 0, done.output
    assert Deployment.read(tmp_path / "trial/deployment.toml").experiment.method.name == "fedlf"


def test_the_app_that_is_submitted_is_that_of_the_example(tmp_path, monkeypatch):
    example, calls = Path(__file__).parents[2] / "examples" / "flower", []

    def followed(command, environment, output):
        place = Path(command[2])
        calls.append((command, {path.relative_to(place): path.read_text() for path in place.rglob("*.*")}))
        return 7, None

    monkeypatch.setattr(launch, "_follow", followed)
    done = deploy(example / "fairapp/deployment.toml", "--superlink", "secure", "--out", "/srv/runs/heart", "--resume")
    assert done.exit_code == 2
    assert "the run did not come to its end" in done.output
    (command, files), *rest = calls
    assert not rest
    assert command[1] == "run"
    assert command[3:] == ["secure", "--stream", "-c", 'out="/srv/runs/heart" resume=true force=false']
    for name in ("fairapp/server.py", "fairapp/client.py", "fairapp/__init__.py"):
        assert files[Path(name)] == (example / name).read_text()
    ours, theirs = (
        tomllib.loads(text) for text in (files[Path("pyproject.toml")], (example / "pyproject.toml").read_text())
    )
    assert ours["tool"]["flwr"] == theirs["tool"]["flwr"]
    described = tmp_path / "deployment.toml"
    described.write_text(files[Path("fairapp/deployment.toml")])
    assert Deployment.read(described).to_toml() == Deployment.read(example / "fairapp/deployment.toml").to_toml()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the deployment's file"),
        (["nowhere.toml"], "there is no file 'nowhere.toml'"),
        (["FILE", "--resume"], "--resume needs the folder"),
        (["FILE", "--out", "here"], "needs its whole path"),
        (["FILE", "--rehearse", "--superlink", "x"], "starts a SuperLink of its own"),
        (["--hand-out", "x", "--force"], "give no other option"),
        (["FILE", "--out", '/srv/"x"'], "quotation mark"),
    ],
    ids=str,
)
def test_wrong_uses_are_named(tmp_path, arguments, said):
    file = tmp_path / "deployment.toml"
    file.write_text(Deployment(small()).to_toml())
    done = deploy(*(str(file) if word == "FILE" else word for word in arguments))
    assert done.exit_code == 2
    assert said in done.output


def test_a_nodes_configuration_is_written_as_flower_reads_it():
    said = node_config({"name": "north", "partition-id": 3, "fast": True})
    assert said == 'name="north" partition-id=3 fast=true'
    with pytest.raises(EvenhandError, match="cannot take"):
        node_config({"name": 'nor"th'})


def test_a_missing_command_is_named(monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda *given, **named: None)
    with pytest.raises(EvenhandError, match=r"pip install 'evenhand\[flower\]'"):
        launch.flower_command("flwr")
