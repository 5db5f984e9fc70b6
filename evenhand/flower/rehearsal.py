"""A whole federation on this machine: a SuperLink and SuperNodes as processes of their own, with TLS and node keys.

    with Rehearsal(folder) as here:
        for path in files:
            here.add_node({"name": path.stem, "data-path": str(path)})
        here.run(deployment, out=folder / "run")

Everything is bound to the loopback address, and everything started here is stopped at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from evenhand.checks import EvenhandError
from evenhand.flower.deployment import Deployment
from evenhand.flower.keys import LOOPBACK, certificates, node_key
from evenhand.flower.launch import flower_command, submit
from evenhand.folders import RunFolder
from evenhand.running import load_runs
from evenhand.runs import Runs

CONNECTION = "rehearsal"
READY = 60.0  # seconds for a process to come up
GONE = 10.0  # seconds for a process to go down


@dataclass
class Node:
    """A SuperNode: its process, and where it writes."""

    number: int
    config: Mapping[str, Any]
    key: Path | None
    process: subprocess.Popen[bytes]
    log: Path


class Rehearsal:
    """The processes, their keys and their logs, in one folder."""

    def __init__(self, folder: Path, *, extra: Mapping[str, str] | None = None) -> None:
        self.folder = folder.absolute()
        self.extra = dict(extra or {})
        self.port = free_port()
        self.nodes: list[Node] = []
        self.link: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Rehearsal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca, certificate, key = certificates(self.folder)
        config = (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{LOOPBACK}:{self.port}"\n'
            f'root-certificates = "{self.ca}"\n'
        )
        self._home("cli").joinpath("config.toml").write_text(config)
        self._link_command = [
            flower_command("flower-superlink"),
            *("--host", LOOPBACK, "--port", str(self.port)),
            *("--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(self.folder / "state.db")),
        ]
        try:
            self.start_link()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- processes

    def start_link(self) -> None:
        """The SuperLink, until it answers."""
        self.link = self._start("superlink", self._link_command)
        context = ssl.create_default_context(cafile=str(self.ca))
        url = f"https://{LOOPBACK}:{self.port}/health"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        end = time.monotonic() + READY
        while time.monotonic() < end:
            if self.link.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, OSError), opener.open(url, timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise EvenhandError(f"the SuperLink did not come up:\n{self.tail('superlink')}")

    def register(self, public: Path) -> None:
        """Let a node with this public key take part."""
        done = self._flwr("supernode", "register", str(public), CONNECTION, "--format", "json")
        if '"success": true' not in done:
            raise EvenhandError(f"the key {public.name} could not be registered:\n{done}")

    def add_node(self, config: Mapping[str, Any]) -> Node:
        """A SuperNode with a key of its own, registered and connected."""
        number = len(self.nodes)
        key = node_key(self.folder / f"node{number}")
        self.register(key.with_name(f"{key.name}.pub"))
        node = self.start_node(config, key)
        self.await_node(node)
        return node

    def start_node(
        self, config: Mapping[str, Any], key: Path | None = None, *, options: Sequence[str] | None = None
    ) -> Node:
        """A SuperNode's process; options: how it connects, where not by TLS and its key."""
        number = len(self.nodes)
        name = f"node{number}-{int(time.monotonic() * 1000)}"
        secure = ["--root-certificates", str(self.ca)]
        secure += ["--auth-supernode-private-key", str(key)] if key is not None else []
        command = [
            flower_command("flower-supernode"),
            *("--superlink", f"{LOOPBACK}:{self.port}"),
            *(secure if options is None else options),
            *("--host", LOOPBACK, "--port", str(free_port())),
            *("--node-config", node_config(config)),
        ]
        node = Node(number, config, key, self._start(name, command), self._log(name))
        self.nodes.append(node)
        return node

    def await_node(self, node: Node) -> None:
        end = time.monotonic() + READY
        while time.monotonic() < end and node.process.poll() is None:
            if "SuperNode ID:" in node.log.read_text(errors="replace"):
                return
            time.sleep(0.1)
        raise EvenhandError(f"SuperNode {node.number} did not connect:\n{tail(node.log)}")

    def run(
        self,
        deployment: Deployment,
        *,
        out: Path,
        resume: bool = False,
        force: bool = False,
        output: IO[bytes] | None = None,
    ) -> int:
        """Run a deployment over the nodes and follow it; 0 if it was completed."""
        return submit(
            deployment,
            CONNECTION,
            out=out.absolute(),
            resume=resume,
            force=force,
            environment=self.environment("cli"),
            output=output,
        )

    def stop(self) -> None:
        """Nodes first, then the SuperLink, then whatever they left behind."""
        processes = [node.process for node in self.nodes] + ([self.link] if self.link is not None else [])
        for process in processes:
            end(process)
        for number in self._await_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._await_gone()

    # ---- small things

    def environment(self, name: str) -> dict[str, str]:
        """What a process sees: a home of its own, nobody's Flower settings and proxies, and our commands first."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("FLWR_") and not key.lower().endswith("_proxy")
        }
        ours = {
            "FLWR_HOME": str(self._home(name)),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", ""))),
        }
        return kept | ours | self.extra

    def tail(self, name: str) -> str:
        return tail(self._log(name))

    def _home(self, name: str) -> Path:
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Output goes to a file: a pipe would be held open by the children of a process that is gone."""
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment(name),
                cwd=self.folder,
                start_new_session=True,
            )

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [flower_command("flwr"), *arguments],
            env=self.environment("cli"),
            capture_output=True,
            text=True,
            timeout=READY,
            check=False,
        )
        return done.stdout + done.stderr

    def _await_gone(self) -> list[int]:
        """What is left of the processes after a while."""
        limit = time.monotonic() + GONE
        left = self._left()
        while left and time.monotonic() < limit:
            time.sleep(0.2)
            left = self._left()
        return left

    def _left(self) -> list[int]:
        """Processes that know one of our homes; only where the system shows them (/proc)."""
        mark, found = f"FLWR_HOME={self.folder}{os.sep}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found


def rehearse(
    file: Path, out: Path, *, resume: bool = False, force: bool = False, say: Callable[[str], None] | None = None
) -> Runs:
    """Run the deployment that a file describes on this machine; its clients' files are in clients/ beside it.

    say: is told what happens; the server's own log is then shown too.
    """
    deployment = Deployment.read(file)
    configs = local_nodes(deployment, file.parent / "clients")
    with tempfile.TemporaryDirectory(prefix="evenhand-rehearsal-") as place, Rehearsal(Path(place)) as here:
        tell = say or (lambda text: None)
        tell(f"a SuperLink at {LOOPBACK}:{here.port}, with TLS; it admits known keys alone")
        for config in configs:
            here.add_node(config)
            tell(f"a SuperNode with a key of its own: {node_config(config)}")
        with open(os.devnull, "wb") as nowhere:
            output = nowhere if say is None else None
            here.run(deployment, out=out, resume=resume, force=force, output=output)
        if not RunFolder(out).finished:
            raise EvenhandError(f"the run did not come to its end; the server's log says:\n{here.tail('superlink')}")
    return load_runs(out)


def local_nodes(deployment: Deployment, folder: Path) -> list[dict[str, Any]]:
    """A configuration for every client: by file, or by number where a data set is handed out by name."""
    if deployment.schema is None:
        return [{"partition-id": client} for client in range(deployment.clients)]
    suffixes = (".npz",) if deployment.schema.shape else (".csv", ".tsv")
    files = sorted(path for path in folder.glob("*") if path.suffix in suffixes)
    if len(files) != deployment.clients:
        raise EvenhandError(
            f"the description is for {deployment.clients} clients, and {str(folder)!r} holds {len(files)} "
            f"{' or '.join(suffixes)} files"
        )
    return [{"name": path.stem, "data-path": str(path.absolute())} for path in files]


def node_config(config: Mapping[str, Any]) -> str:
    """A node's configuration as its command line takes it."""
    words = []
    for name, value in config.items():
        if isinstance(value, bool):
            words.append(f"{name}={str(value).lower()}")
        elif isinstance(value, (int, float)):
            words.append(f"{name}={value}")
        else:
            if re.search(r"[\"'\\]", str(value)):
                raise EvenhandError(f"{name}={value!r} holds a sign that Flower's --node-config cannot take")
            words.append(f'{name}="{value}"')
    return " ".join(words)


def free_port() -> int:
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        return int(held.getsockname()[1])


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to stop, and see to it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GONE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(GONE)


def tail(path: Path, lines: int = 25) -> str:
    """The end of a log, without the colours."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[-lines:])
