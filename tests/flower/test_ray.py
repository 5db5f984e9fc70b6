"""Ray: Flower's simulation engine runs the app, and a comparison spread over a cluster gives the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.callbacks import Callback
from evenhand.checks import EvenhandError
from evenhand.comparison import compare, load_comparison, resume_comparison

SMALL = {"data": "digits", "clients": 5, "rounds": 3, "eval_every": 2, "seeds": 2, "device": "cpu"}


def played(script: str, *arguments: str) -> str:
    """A program of its own: what Ray leaves behind in a process does not reach the other tests."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


GROUPS = {**SMALL, "data": "synthetic-groups", "clients": None}


def test_a_comparison_over_a_cluster_gives_the_numbers_of_one_here(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'evenhand[ray]'")
    there, here = tmp_path / "far-away", tmp_path / "close-by"
    script = f"""
import sys
from evenhand.comparison import compare
compare("fedavg", "fedavg-f", "qffl:q=1", out=sys.argv[1] + "-groups", engine="ray", **{GROUPS!r})
compare("fedavg", "ditto", "even", out=sys.argv[1], engine="ray", **{SMALL!r})
"""
    played(script, str(there))
    compare("fedavg", "fedavg-f", "qffl:q=1", out=f"{here}-groups", **GROUPS)
    compare("fedavg", "ditto", "even", out=here, **SMALL)
    compared = 0
    for path in [*here.rglob("*"), *Path(f"{here}-groups").rglob("*")]:
        other = Path(str(path).replace(here.name, there.name))
        assert other.exists(), other
        if path.is_file() and path.name not in ("versions.json", "timing.jsonl", "report.html"):  # when, how long
            assert other.read_bytes().replace(there.name.encode(), here.name.encode()) == path.read_bytes(), path
            compared += 1
    assert compared > 60
    assert load_comparison(there).notes == load_comparison(here).notes


def test_one_that_diverges_and_one_that_was_cut_short(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'evenhand[ray]'")
    wild = {**SMALL, "lr": 1e30, "seeds": 1}
    script = f"""
import sys
from pathlib import Path
from evenhand.comparison import compare, resume_comparison
try:
    compare("fedavg", "even", out=sys.argv[1], engine="ray", **{wild!r})
except Exception as error:
    print(error)
compare("fedavg", "even", out=sys.argv[2], **{ {**SMALL, "seeds": 1}!r})
for name in ("summary.json", "even/summary.json"):
    (Path(sys.argv[2]) / name).unlink()
print(list(resume_comparison(sys.argv[2], engine="ray").runs))
"""
    said = played(script, str(tmp_path / "wild"), str(tmp_path / "cut"))
    assert "every method diverged" in said
    assert json.loads((tmp_path / "wild/fedavg/diverged.json").read_text())["round"] >= 1
    assert "['fedavg', 'even']" in said
    assert load_comparison(tmp_path / "cut").labels == ("fedavg", "even")


def test_flowers_simulation_engine_runs_the_app_to_the_simulators_model(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'evenhand[ray]'")
    pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")
    import torch
    from flowing import small

    from evenhand.experiment import replace
    from evenhand.flower import Deployment
    from evenhand.running import load_runs, simulate

    experiment = small("fedlf", clients=3, rounds=2, participation=1.0)
    (tmp_path / "deployment.toml").write_text(Deployment(experiment).to_toml())
    script = """
import sys, torch, warnings
torch.set_num_threads(1)
from flwr.simulation import run_simulation
from flwr.serverapp import ServerApp
from evenhand.flower import Deployment, server_app, site_client
from evenhand.flower.server import federate
chosen = Deployment.read(sys.argv[1])
app = ServerApp()
@app.main()
def main(grid, context):
    federate(chosen, grid, out=sys.argv[2])
resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}}
run_simulation(server_app=app, client_app=site_client(chosen), num_supernodes=3, backend_config=resources)
"""
    played(script, str(tmp_path / "deployment.toml"), str(tmp_path / "run"))
    found, there = load_runs(tmp_path / "run"), simulate(replace(experiment, chunk=1))
    for name, tensor in there[0].model.items():
        assert torch.equal(found[0].load_model()[name], tensor)
    assert found[0].names == ("0", "1", "2")


def test_a_wrong_engine_and_a_missing_ray_are_named(monkeypatch):
    with pytest.raises(EvenhandError, match="engine='rya' is not one of 'local', 'ray'"):
        compare("fedavg", "even", engine="rya", **SMALL)
    with pytest.raises(EvenhandError, match="engine='spark'"):
        resume_comparison("nowhere", engine="spark")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EvenhandError, match=r"pip install 'evenhand\[ray\]'"):
        compare("fedavg", "even", engine="ray", **SMALL)


def test_a_log_over_a_cluster_is_refused():
    with pytest.raises(EvenhandError, match="no log is kept over a Ray cluster"):
        compare("fedavg", "even", engine="ray", callbacks=[Callback()], **SMALL)
