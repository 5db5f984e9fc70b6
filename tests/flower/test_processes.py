"""A real SuperLink and real SuperNodes, as processes on the loopback address, with TLS and node keys."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'evenhand[flower]'")

import torch
from alive import gone
from flowing import GROUPS, small

from evenhand import storage
from evenhand.engine.training import Shape
from evenhand.flower.deployment import Deployment, Waiting, write_files
from evenhand.flower.keys import node_key
from evenhand.flower.rehearsal import Rehearsal, tail
from evenhand.folders import RunFolder
from evenhand.running import load_runs, simulate

pytestmark = [
    pytest.mark.xdist_group("processes"),  # one federation for all of them
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]

QUICK = {"PYTHONPATH": str(Path(__file__).parent / "quick")}
TINY = {"clients": 2, "participation": 1.0, "rounds": 1, "eval_every": 1}
OF_FILES = small(
    "mfairfl:absent=expected",  # which sends most, and with which one that is gone still counts
    **{**GROUPS, **TINY, "clients": None, "partition": "iid,clients=2", "rounds": 2, "eval_every": 2},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A deployment over two clients' own files."""
    return write_files(OF_FILES, tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def federation(tmp_path_factory, files):
    """Two SuperNodes, each with a key of its own, a number, by which a data set is handed out, and a file."""
    folder = tmp_path_factory.mktemp("federation")
    with Rehearsal(folder / "processes", extra=QUICK) as here:
        for client, path in enumerate(files[1]):
            state = str(folder / f"state-{client}")
            here.add_node({"partition-id": client, "name": path.stem, "data-path": str(path), "state-dir": state})
        yield here
    assert here._left() == []


def test_a_run_that_fails_is_known_to_have_failed(federation, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/somebody.txt").write_text("else's")
    with (tmp_path / "run.log").open("ab") as log:
        assert federation.run(Deployment(small("fedavg", **TINY)), out=tmp_path / "run", output=log) == 1
    assert "holds other files" in (tmp_path / "run.log").read_text()


def refused(federation, **how) -> tuple[int, str]:
    node = federation.start_node({"partition-id": 1}, **how)
    try:
        return node.process.wait(40), tail(node.log)
    finally:
        federation.nodes.remove(node)
        if node.process.poll() is None:
            node.process.kill()


def test_a_node_whose_key_nobody_registered_is_refused(federation, tmp_path):
    code, said = refused(federation, key=node_key(tmp_path / "stranger"))
    assert code != 0
    assert "2004" in said


def test_a_node_without_a_key_is_refused(federation):
    code, said = refused(federation, key=None)
    assert code != 0
    assert "SuperNode authentication is enabled" in said


def test_a_client_in_plain_text_is_refused(federation):
    code, said = refused(federation, options=["--insecure", "--max-retries", "1"])
    assert code != 0
    assert "SuperNode ID" not in said


def test_a_node_that_trusts_another_authority_does_not_connect(federation, tmp_path):
    from evenhand.flower.keys import certificates

    other, _, _ = certificates(tmp_path)
    key = node_key(tmp_path / "key")
    code, said = refused(
        federation, options=["--root-certificates", str(other), "--auth-supernode-private-key", str(key)]
    )
    assert code != 0
    assert "CERTIFICATE_VERIFY_FAILED" in said


def test_a_proxy_lets_nodes_through_and_keeps_the_control_api_shut(federation, tmp_path):
    """docs/flower.md: nothing but /v1/fleet/ is passed on, which is all that a node needs."""
    with proxy(federation) as port:
        key = node_key(tmp_path / "key")
        federation.register(key.with_name("key.pub"))
        trust = ["--root-certificates", str(federation.ca), "--auth-supernode-private-key", str(key)]
        node = federation.start_node({"partition-id": 0}, options=[*trust, "--superlink", f"127.0.0.1:{port}"])
        federation.await_node(node)
        node.process.terminate()
        assert node.process.wait(30) == 0
        federation.nodes.remove(node)
        through = subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), "supernode", "list", "proxied"],
            env=_cli(federation, port, tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert through.returncode != 0
        straight = federation._flwr("supernode", "list", "rehearsal", "--format", "json")
        assert '"success": true' in straight


def _cli(federation, port, home):
    """Flower's command line with a connection through the proxy."""
    text = f'[superlink]\n[superlink.proxied]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{federation.ca}"\n'
    (home / "config.toml").write_text(text)
    return {**federation.environment("cli"), "FLWR_HOME": str(home)}


@contextlib.contextmanager
def proxy(federation):
    """Ends TLS, passes on what begins with /v1/fleet/, and refuses the rest."""
    inside = ssl.create_default_context(cafile=str(federation.ca))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, answer = 403, [], b""
            if self.path.startswith("/v1/fleet/"):
                there = http.client.HTTPSConnection("localhost", federation.port, context=inside, timeout=60)
                with contextlib.closing(there) as onward:
                    onward.request("POST", self.path, body, dict(self.headers))
                    reply = onward.getresponse()
                    status, headers, answer = reply.status, reply.getheaders(), reply.read()
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outside.load_cert_chain(federation.folder / "server.pem", federation.folder / "server.key")
    server.socket = outside.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_example_is_what_evenhand_deploy_writes(tmp_path):
    """examples/flower is a Flower app of its own; Flower builds it."""
    example = Path(__file__).parents[2] / "examples" / "flower"
    assert Deployment.read(example / "fairapp" / "deployment.toml").clients == 4
    done = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.fab"))) == 1


def following(federation, deployment, out, log, **options) -> threading.Thread:
    """`flwr run` in a thread of its own."""
    thread = threading.Thread(target=federation.run, args=(deployment,), kwargs={"out": out, "output": log, **options})
    thread.start()
    return thread


def trainings(node) -> int:
    return node.log.read_text(errors="replace").count("Receiving: train message")


def has_received(node) -> bool:
    """Whether the last message has arrived whole; a node waits long for the rest of one whose sender died meanwhile."""
    text = node.log.read_text(errors="replace")
    return text.count("Receiving:") == text.count("Received successfully")


def await_all(holds) -> None:
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(numbers) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    assert gone(numbers, seconds=30)


def await_rounds(out, count) -> None:
    path = out / "seed-0/rounds.jsonl"

    def written():
        logged = path.is_file() and len(path.read_text().splitlines()) >= count
        return logged and (out / "checkpoint.safetensors").is_file()

    await_all(written)


def measured(out) -> list[list[str]]:
    """A run's evaluations, a client each; without their names, which are those of the files."""
    return [line.split(",")[2:] for line in (out / "seed-0/clients.csv").read_text().splitlines()[1:]]


def processes(federation, command, of=None):
    """Processes of a federation whose command line holds some words."""
    found = []
    for number in federation._left():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            home = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace")
            mine = of is None or f"FLWR_HOME={federation.folder}/homes/{of.log.stem}\0" in home
            if command in line and mine:
                found.append(number)
    return found


def test_a_federation_is_the_simulator_and_outlives_its_server_and_a_node(federation, files, tmp_path):
    """The simulator's bits; then the server is killed and goes on; then a node is, without which the round ends.

    In one run, the last of this federation, as every message costs seconds. The clients have files of their own, and
    the killed one's update still counts in the last round.
    """
    described, (_, doomed) = files[0], federation.nodes
    out, logged = tmp_path / "run", tmp_path / "run.log"
    patient = replace(described, waiting=Waiting(timeout=240, min_replies=1))
    with logged.open("ab") as log:
        first = following(federation, patient, out, log)
        await_all(lambda: all(trainings(node) == 1 for node in federation.nodes))
        started = time.monotonic()
        await_rounds(out, 1)
        took = time.monotonic() - started
        await_all(lambda: all(trainings(node) == 2 and has_received(node) for node in federation.nodes))
        kill(processes(federation, "flwr-serverapp"))
        assert not RunFolder(out).finished
        (record,) = (out / "seed-0/rounds.jsonl").read_text().splitlines()
        there = simulate(replace(OF_FILES, rounds=1, chunk=1), out=tmp_path / "there")
        assert json.loads(record) == json.loads((tmp_path / "there/seed-0/rounds.jsonl").read_text())
        module = described.module()
        module.load_state_dict(there[0].model)
        model = storage.read(out / "checkpoint.safetensors", "federation")["model"]
        assert torch.equal(model, Shape.of(module).flat(module))

        waits = float(round(max(15.0, 3.0 * took)))  # as long as this machine, busy as it is, may need
        second = following(federation, replace(patient, waiting=Waiting(waits, min_replies=1)), out, log, resume=True)
        await_all(lambda: trainings(doomed) == 3)
        doomed.process.kill()
        kill(processes(federation, "flwr-clientapp", of=doomed))
        second.join()
        kill(processes(federation, "flwr run"))  # the first one still follows a server that is no more
        first.join()
    assert RunFolder(out).finished, tail(logged)
    run = load_runs(out)[0]
    before, last = run.rounds
    assert before["excluded"] == {}
    (reason,) = last["excluded"].values()
    known = waits > 30.0 and "Node Unavailable" in reason  # Flower itself misses a node after 30 to 60 s
    assert last["excluded"] == {"client-1": reason if known else f"no reply within {waits:g} s"}
    assert (last["asked"], last["answered"], last["remembered"]) == ([0, 1], 1, 1)
    assert measured(out)[:2] == measured(tmp_path / "there")[:2]  # both clients, before the first round
    assert np.isfinite(run.accuracies[0])
    assert np.isnan(run.accuracies[1])
    assert [entry["round"] for entry in json.loads((out / "versions.json").read_text())["resumed"]] == [1]
    assert (out / "report.html").is_file()
