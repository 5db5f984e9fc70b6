"""A deployment as a Flower app: the folder that `flwr run` takes, and running it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from evenhand import __version__
from evenhand.checks import EvenhandError
from evenhand.experiment import Experiment, chosen_experiment
from evenhand.flower.deployment import Deployment, write_files
from evenhand.folders import writing
from evenhand.toml import read_toml, to_toml

PACKAGE = "fairapp"
STARTED = re.compile(rb"started run (\d+)")  # as `flwr run` says it
COMPLETED = "finished:completed"  # as `flwr list` says it
FAILED = 1
SERVER = '''"""The server's side of the app."""

from pathlib import Path

from evenhand.flower import server_app

app = server_app(Path(__file__).with_name("deployment.toml"))
'''
CLIENT = '''"""A client's side of the app."""

from pathlib import Path

from evenhand.flower import site_client

app = site_client(Path(__file__).with_name("deployment.toml"))
'''


def write_app(deployment: Deployment, folder: Path) -> Path:
    """The Flower app of a deployment: what `examples/flower` holds, with this description."""
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": PACKAGE,
            "version": __version__,
            "description": "A fair model over the clients of a federation.",
            "license": "Apache-2.0",
            "dependencies": [f"evenhand[flower]>={__version__}"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "evenhand",
                    "components": {"serverapp": f"{PACKAGE}.server:app", "clientapp": f"{PACKAGE}.client:app"},
                    "config": {"out": "", "resume": False, "force": False},
                },
            },
        },
    }
    with writing(folder):
        package = folder / PACKAGE
        package.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(to_toml(project))
        (package / "__init__.py").write_text('"""A fair model over the clients of a federation."""\n')
        (package / "server.py").write_text(SERVER)
        (package / "client.py").write_text(CLIENT)
        (package / "deployment.toml").write_text(deployment.to_toml())
    return folder


def run_config(out: Path | None, resume: bool, force: bool) -> str:
    """What `flwr run -c` is told."""
    where = "" if out is None else str(out).replace("\\", "/")
    if '"' in where:
        raise EvenhandError(f"the folder's name {where!r} holds a quotation mark, which Flower cannot take")
    return f'out="{where}" resume={str(resume).lower()} force={str(force).lower()}'


def flower_command(name: str) -> str:
    """A command that comes with Flower, from the environment that this program runs in."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        raise EvenhandError(f"the command {name} is not there; it comes with Flower: pip install 'evenhand[flower]'")
    return found


TRIAL = {
    "data": "digits",
    "partition": "pat:3",
    "clients": 4,
    "rounds": 5,
    "eval_every": 5,
    "participation": 1.0,
    "batch_size": 20,
    "measure": "losses",
    "device": "cpu",
}


def hand_out(file: Path | None, folder: Path) -> str:
    """Write a data set out into one file a client, with the description that goes with them; says what to do next.

    file: an experiment's TOML; without one, digits for four clients.
    """
    chosen = Experiment().with_settings(TRIAL)
    if file is not None:
        values = {"measure": "needed", **read_toml(file)}
        chosen = chosen_experiment(Experiment.from_dict(values), {})
        if chosen.measure == "all":
            chosen = replace(chosen, measure="losses")
    if folder.exists() and any(folder.iterdir()):
        raise EvenhandError(f"{str(folder)!r} is not empty; choose a new folder")
    made, paths = write_files(chosen, folder)
    where = folder / "deployment.toml"
    said = [f"{len(paths)} files in {folder / 'clients'}", f"{where}: {made.experiment}"]
    return "\n".join([*said, f"try     evenhand deploy {where} --rehearse"])


def deploy(
    file: Path,
    superlink: str | None,
    *,
    out: Path | None,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> int:
    """Run the deployment that a file describes on a SuperLink; 0 if it was completed."""
    chosen = Deployment.read(file)
    if out is not None and not out.is_absolute():
        raise EvenhandError(f"--out {out}: the folder is on the server's disk, so it needs its whole path")
    with open(os.devnull, "wb") as nowhere:
        output = nowhere if quiet else None
        return submit(chosen, superlink, out=out, resume=resume, force=force, output=output)


def submit(
    deployment: Deployment,
    superlink: str | None,
    *,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> int:
    """Run a deployment on a SuperLink that Flower's configuration knows by name, and follow it; 0 if it was completed.

    out: the run's folder on the server's disk; output: where Flower's words go, where not to the terminal.
    """
    there = [superlink] if superlink else []
    with tempfile.TemporaryDirectory(prefix="evenhand-") as place:
        app = write_app(deployment, Path(place) / PACKAGE)
        command = [flower_command("flwr"), "run", str(app), *there, "--stream", "-c", run_config(out, resume, force)]
        code, run = _follow(command, environment, output or sys.stdout.buffer)
    if code or run is None:
        return code or FAILED
    # Flower's exit code says that the run could be followed, not how it ended.
    command = [flower_command("flwr"), "list", *there, "--run-id", run, "--format", "json"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return 0 if COMPLETED in listed.stdout else FAILED


def _follow(command: Sequence[str], environment: Mapping[str, str] | None, output: IO[bytes]) -> tuple[int, str | None]:
    """Run a command, pass its words on, and find in them which run it started."""
    run = None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            output.flush()
            found = STARTED.search(line)
            run = found[1].decode() if found and run is None else run
    return process.returncode, run
