"""The live view: what it shows at any moment, what it serves and to whom, and how it outlives restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from browser import CHROMIUM, browser

import evenhand as eh
from evenhand import cli, recording
from evenhand.checks import EvenhandError
from evenhand.watch import Server, View, view, waiting_for

SMALL = {"clients": 12, "rounds": 12, "eval_every": 2, "batch_size": 16, "seeds": 2}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Every round is written, and every change is looked at, without waiting."""
    monkeypatch.setattr(recording, "LOG_EVERY", 0.0)
    monkeypatch.setattr(view, "AT_LEAST", 0.0)
    monkeypatch.setattr(view, "SHARE", 1e9)


class Killed(BaseException):
    """Stands for a sudden end."""


class Training:
    """A training in a thread that plays as many rounds as it is told to, and can be killed."""

    def __init__(self, start, folder: Path, **settings) -> None:
        self.allowed, self.killed = threading.Semaphore(0), False
        self.played = 0

        def work():
            with suppress(Killed):
                start(folder, progress=self._after, checkpoint_every=0.0, **settings)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def _after(self, status):
        self.played += 1
        assert self.allowed.acquire(timeout=120)
        if self.killed:
            raise Killed

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            self.allowed.release()

    def until(self, rounds: int) -> None:
        while self.played < rounds:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def kill(self) -> None:
        self.killed = True
        self.allowed.release()
        self.thread.join(60)

    def end(self) -> None:
        self.play(10_000)
        self.thread.join(60)
        assert not self.thread.is_alive()


def start(folder, **settings):
    eh.simulate(**SMALL, method="fedlf", out=folder, **settings)


def go_on(folder, **settings):
    eh.resume(folder, **settings)


# ----------------------------------------------------------------------------------------------------------- the view


def test_a_run_is_seen_from_before_its_start_to_its_end(tmp_path):
    folder = tmp_path / "run"
    seen = View(folder)
    assert (seen.look().phase, seen.look().page) == ("waiting", b"")
    training = Training(start, folder)
    training.until(1)
    first = seen.look()
    assert (first.phase, first.said) == ("running", "round 1 of 12")
    assert b"fedlf on digits" in first.page
    assert seen.look() is first  # nothing new, nothing made
    training.play(4)
    training.until(5)
    second = seen.look()
    assert second.said == "round 5 of 12"
    assert second.version != first.version
    training.end()
    last = seen.look()
    assert (last.phase, last.said) == ("ended", "finished")
    assert last.page == (folder / "report.html").read_bytes()
    assert last.to_dict()["idle"] < 60


def test_a_comparison_is_seen_while_its_methods_run(tmp_path):
    def begin(folder, **settings):
        eh.compare("fedavg", "fedlf", "even", **{**SMALL, "rounds": 4}, out=folder, **settings)

    folder = tmp_path / "both"
    training = Training(begin, folder)
    training.until(1)
    seen = View(folder)
    assert seen.look().said == "fedavg round 1 of 4, 2 to come"
    assert b"fedavg (1 of 4 rounds)" in seen.look().page
    training.play(5)
    training.until(6)  # four of the first method, two of the second
    now = seen.look()
    assert (now.phase, now.said) == ("running", "fedavg finished, fedlf round 2 of 4, 1 to come")
    assert b"fedlf (2 of 4 rounds)" in now.page
    assert b"fedavg (" not in now.page
    assert list(eh.load_comparison(folder).runs) == ["fedavg"]  # only those who watch are shown half a method
    training.end()
    assert seen.look().page == (folder / "report.html").read_bytes()


def test_groups_of_people_are_seen_too(tmp_path):
    def begin(folder, **settings):
        chosen = {"data": "synthetic-groups", "model": "logistic", "participation": 1.0, "rounds": 4, "eval_every": 1}
        eh.simulate(method="fedavg", **chosen, out=folder, **settings)

    training = Training(begin, tmp_path / "run")
    training.play(2)
    training.until(3)
    assert b"demographic parity" in View(tmp_path / "run").look().page.lower()
    training.end()


def test_a_run_can_be_seen_however_far_its_files_were_written(tmp_path):
    """A reader may meet any beginning of a log, and seeds that are not equally far."""
    folder = tmp_path / "run"
    training = Training(start, folder)
    training.play(8)
    training.until(9)
    training.kill()
    logs = {name: (folder / "seed-1" / name).read_bytes() for name in ("rounds.jsonl", "clients.csv", "timing.jsonl")}
    phases = set()
    for share in range(0, 101, 4):
        for name, data in logs.items():
            (folder / "seed-1" / name).write_bytes(data[: len(data) * share // 100])
        seen = View(folder).look()
        assert seen.phase in ("waiting", "running"), seen.said
        assert bool(seen.page) == (seen.phase == "running")
        phases.add(seen.phase)
    assert phases == {"waiting", "running"}


@pytest.mark.parametrize(
    ("name", "line", "number"),
    [("rounds.jsonl", b"{nonsense}\n", 10), ("rounds.jsonl", b"[1, 2]\n", 10), ("clients.csv", b"8,a,b\n", 62)],
)
def test_a_damaged_line_is_named_and_the_last_page_stays(name, line, number, tmp_path):
    folder = tmp_path / "run"
    training = Training(start, folder)
    training.play(8)
    training.until(9)
    training.kill()
    seen = View(folder)
    before, path = seen.look(), folder / "seed-0" / name
    whole = path.read_bytes()
    path.write_bytes(whole + line)
    now = seen.look()
    assert (now.phase, now.page, now.version) == ("trouble", before.page, before.version)
    assert f"line {number} of '{path}' is not a record" in now.said
    with pytest.raises(EvenhandError, match=f"line {number} of .*{name}' is not a record"):
        eh.resume(folder)
    path.write_bytes(whole)
    assert seen.look().phase == "running"


def test_a_folder_that_goes_and_comes_back_is_seen_again(tmp_path):
    folder = tmp_path / "run"
    eh.simulate(**SMALL, method="fedavg", out=folder)
    seen = View(folder)
    page = seen.look().page
    folder.rename(tmp_path / "away")
    assert (seen.look().phase, seen.look().page) == ("waiting", page)
    (tmp_path / "away").rename(folder)
    assert seen.look().phase == "ended"


def test_a_run_that_diverged_says_so(tmp_path):
    with pytest.raises(recording.Diverged):
        eh.simulate(method="fedavg", clients=12, rounds=30, lr=1e30, out=tmp_path / "run")
    seen = View(tmp_path / "run").look()
    assert seen.phase == "ended"
    assert seen.said.startswith("diverged in round ")


def test_what_can_never_be_a_run_is_refused_and_a_slip_is_pointed_out(tmp_path):
    eh.simulate(method="fedavg", clients=12, rounds=1, out=tmp_path / "digits-even-1")
    assert waiting_for(tmp_path / "digits-even-1") == ""
    assert "did you mean 'digits-even-1'?" in waiting_for(tmp_path / "digits-evne-1")
    (tmp_path / "empty").mkdir()
    assert "nothing has begun" in waiting_for(tmp_path / "empty")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("1")
    with pytest.raises(EvenhandError, match="holds other files"):
        waiting_for(tmp_path / "thesis")
    with pytest.raises(EvenhandError, match="is a file"):
        waiting_for(tmp_path / "thesis" / "chapter.tex")


# --------------------------------------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    eh.simulate(method="fedavg", clients=12, rounds=2, out=folder)
    return folder


def get(server: Server, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urlopen(Request(server.url.rstrip("/") + path, headers=headers), timeout=30) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def test_the_page_the_state_and_the_report_are_served(finished):
    with Server(finished) as server:
        code, shell, headers = get(server, "/")
        assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"<iframe" not in shell.split(b"<script>")[0]
        code, report, headers = get(server, "/report.html?v=1")
        assert (code, report) == (200, (finished / "report.html").read_bytes())
        assert "http" not in headers["Content-Security-Policy"]  # the report may fetch nothing
        assert get(server, "/report.html", **{"If-None-Match": headers["ETag"]})[:2] == (304, b"")
        code, state, _ = get(server, "/state.json")
        assert json.loads(state) | {"idle": 0} == {
            "phase": "ended",
            "said": "finished",
            "version": headers["ETag"].strip('"'),
            "idle": 0,
        }


@pytest.mark.parametrize(
    "path",
    ["/experiment.toml", "/seed-0/", "/report.html/", "/../run/experiment.toml", "/%2e%2e/experiment.toml", "/."],
)
def test_nothing_else_is_served(path, finished):
    with Server(finished) as server, socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    assert answer.split(b"\r\n")[0] == b"HTTP/1.0 404 Not Found"
    assert b"experiment" not in answer


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:80", 200),
        ("localhost:9", 200),  # through a tunnel the port may be another
        ("localhost", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("", 403),
    ],
)
def test_a_name_that_is_not_this_machine_is_refused(host, code, finished):
    with Server(finished) as server:
        for path in ("/", "/state.json", "/report.html"):
            assert get(server, path, Host=host)[0] == code


def test_only_this_machine_is_listened_to_and_nothing_is_taken(finished):
    with Server(finished) as server:
        assert server._server.server_address[0] == "127.0.0.1"
        request = Request(server.url, data=b"x", method="POST")
        with pytest.raises(HTTPError) as refused:
            urlopen(request, timeout=30)
        assert refused.value.code == 501
        refused.value.close()


def test_the_same_folder_gets_the_same_port_again_unless_it_is_taken(finished):
    with Server(finished) as first:
        port = first.port
        with Server(finished) as second:
            assert second.port != port
            assert get(second, "/state.json")[0] == 200
    with Server(finished) as again:
        assert again.port == port


def test_a_port_that_cannot_be_had_is_an_error(finished):
    with Server(finished) as server, pytest.raises(EvenhandError, match=f"port {server.port} is taken; name another"):
        Server(finished, server.port)
    for wrong in (0, 70000):
        with pytest.raises(EvenhandError, match="port="):
            Server(finished, wrong)


# ----------------------------------------------------------------------------------------------------- the command line


@contextmanager
def command(*arguments: str, cwd: Path):
    """A command in a process of its own, and the address that it prints."""
    words = [sys.executable, "-m", "evenhand", *arguments]
    process = subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("watch   http://127.0.0.1:"):
                break
        else:
            raise AssertionError("".join(said))
        yield process, line.split()[1], said
    finally:
        process.kill()
        process.communicate()


def state(url: str) -> dict:
    with urlopen(f"{url}state.json", timeout=30) as answer:
        return json.load(answer)


def test_a_run_is_watched_and_its_page_stays_until_ctrl_c(tmp_path):
    options = ["--clients", "12", "--rounds", "3", "--out", "here", "--watch"]
    with command("run", *options, cwd=tmp_path) as (process, url, _):
        for line in process.stderr:
            if "stays until Ctrl-C" in line:
                break
        assert state(url)["phase"] == "ended"
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=60)
        assert (process.returncode, complained) == (0, "")
        assert "12 clients: on average" in said


def test_a_watched_run_that_is_stopped_leaves_and_comes_back_at_the_same_address(tmp_path):
    with command("run", "--clients", "12", "--rounds", "100000", "--out", "here", "--watch", cwd=tmp_path) as first:
        process, url, _ = first
        while state(url)["phase"] != "running":
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, complained = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "evenhand run --resume here goes on" in complained
    with command("run", "--resume", "here", "--watch", cwd=tmp_path) as (_, again, _):
        assert again == url
        assert state(again)["phase"] == "running"


def test_a_comparison_is_watched(tmp_path):
    options = ["--clients", "12", "--rounds", "2", "--seeds", "1", "--out", "here", "--watch"]
    with command("compare", "fedavg", "even", *options, cwd=tmp_path) as (process, url, _):
        for line in process.stderr:
            if "stays until Ctrl-C" in line:
                break
        assert state(url)["said"] == "finished"


def test_watching_before_there_is_a_folder(tmp_path):
    with command("watch", "later", cwd=tmp_path) as (process, url, said):
        assert "note: nothing has begun in 'later' yet; waiting for it" in said[0]
        assert state(url)["phase"] == "waiting"
        eh.simulate(method="fedavg", clients=12, rounds=1, out=tmp_path / "later")
        while state(url)["phase"] != "ended":
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_the_command_explains_itself(capsys):
    with pytest.raises(SystemExit):
        cli.main(["watch", "--help"])
    said = capsys.readouterr().out
    assert "evenhand watch runs/digits-even-1" in said
    assert "--port" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--rounds", "1", "--port", "8080"], "it goes with --watch"),
        (["watch", "file"], "is a file"),
        (["run", "--watch", "--port", "99999"], "port=99999 must be a whole number"),
        (["run", "--resume", "nowhere", "--watch"], "there is no folder 'nowhere'"),
    ],
)
def test_a_wrong_wish_is_an_error(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    complained = capsys.readouterr().err
    assert left.value.code == 2
    assert said in complained
    assert len(complained.splitlines()) == 1
    assert os.listdir() == ["file"]


# ---------------------------------------------------------------------------------------------------------- a browser

PICTURES = os.environ.get("EVENHAND_PICTURES")  # a folder for screenshots, to look at
REPORT = "document.querySelector('iframe:not(.next)')"


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")


@needs_browser
def test_the_page_lives_through_restarts_of_either_side(tmp_path):
    folder = tmp_path / "run"
    with browser(tmp_path) as page:

        def picture(name):
            if PICTURES:
                page.picture(Path(PICTURES) / f"{name}.png")

        def words(text):
            page.until(f"document.getElementById('said').textContent.includes({text!r})")

        page.size(1000, 700)
        with Server(folder) as server:
            page.open(server.url)
            page.until("document.getElementById('empty').textContent.includes('Waiting for a run to begin')")
            picture("1-waiting")
            training = Training(start, folder)
            training.play(4)
            training.until(5)
            page.until(f"{REPORT} && {REPORT}.contentDocument.body.innerText.includes('fedlf on digits')")
            words("Training: round 5 of 12")
            assert page.run("document.title").startswith("fedlf on digits")
            picture("2-running")

            # where the reader is stays when the page is renewed
            page.run(f"{REPORT}.contentWindow.scrollTo(0, 400)")
            page.run(f"{REPORT}.contentDocument.querySelector('details').open = true")
            version = page.run("wanted")
            training.play(2)
            page.until(f"wanted !== {version!r}")
            assert page.run(f"{REPORT}.contentWindow.scrollY") == 400
            assert page.run(f"{REPORT}.contentDocument.querySelector('details').open") is True
            assert page.run("document.querySelectorAll('iframe').length") == 1
            picture("3-renewed")

            # a page that is being read is left alone
            page.run("document.getElementById('pause').click()")
            version = page.run("wanted")
            training.play(1)
            words("round 8 of 12")
            assert page.run("wanted") == version
            page.run("document.getElementById('pause').click()")
            page.until(f"wanted !== {version!r}")

            # the training is killed, and goes on
            training.kill()
            training = Training(go_on, folder)
            words("round 9 of 12")
            port = server.port
        page.until("document.body.dataset.phase === 'lost'")
        assert page.run(f"{REPORT}.contentDocument.body.innerText.includes('fedlf on digits')")
        picture("4-lost")
        training.end()
        with Server(folder) as server:  # the server is back, on its usual port
            assert server.port == port
            page.until("document.body.dataset.phase === 'ended'")
            words("Finished")
            expected = json.loads(urlopen(f"{server.url}state.json", timeout=30).read())["version"]
            page.until(f"wanted === {expected!r}")
            picture("5-finished")
            page.size(390, 800, dark=True)
            picture("6-narrow-dark")
            assert page.run("document.documentElement.scrollWidth") <= 390
        assert all(address.startswith((f"http://127.0.0.1:{port}/", "data:")) for address in page.asked_for())
        assert [entry for entry in page.complaints() if "ERR_CONNECTION_REFUSED" not in entry] == []


INTERACTIVE = """<!doctype html><html><head><title>number {0}</title></head><body>
<select id="by"><option>mean</option><option>worst</option></select> <input type="checkbox" class="c"> <output></output>
<div style="height:100px;overflow:auto" id="list"><div style="height:1000px"></div></div><div id="late"></div>
<script>
const by = document.getElementById("by");
by.addEventListener("change", () => {{ document.querySelector("output").textContent = by.value + {0} }});
setTimeout(() => {{ document.getElementById("late").style.height = "3000px" }}, 200);
</script></body></html>"""


@needs_browser
def test_what_a_reader_chose_on_an_interactive_page_stays(tmp_path, monkeypatch):
    pages = iter(range(10))
    monkeypatch.setattr(view, "_page", lambda found: INTERACTIVE.format(next(pages)).encode())
    training = Training(start, tmp_path / "run")
    training.until(1)
    with browser(tmp_path) as page, Server(tmp_path / "run") as server:
        page.size(1000, 700)
        page.open(server.url)
        page.until(f"{REPORT} && {REPORT}.contentDocument.body.scrollHeight > 3000")
        inside = f"{REPORT}.contentDocument"
        page.run(f"{inside}.getElementById('by').value = 'worst'")
        page.run(f"{inside}.querySelector('.c').click()")
        page.run(f"{inside}.getElementById('list').scrollTop = 150")
        page.run(f"{REPORT}.contentWindow.scrollTo(0, 1500)")
        page.run(f"{inside}.getElementById('by').focus({{preventScroll: true}})")
        page.run(f"{inside}.getSelection().selectAllChildren({inside}.body)")
        training.play(1)
        page.until("document.getElementById('said').textContent.includes('round 2 of 12')")
        assert page.run("document.title + loading") == "number 0null"  # whoever marks text is not interrupted
        page.run(f"{inside}.getSelection().removeAllRanges()")
        page.until("document.title === 'number 1'")
        assert page.run(f"{inside}.querySelector('output').textContent") == "worst1"
        assert page.run(f"{inside}.querySelector('.c').checked") is True
        assert page.run(f"{inside}.getElementById('list').scrollTop") == 150
        assert page.run(f"{REPORT}.contentWindow.scrollY") == 1500  # although the page grew only after it was loaded
        assert page.run(f"{inside}.activeElement.id") == "by"
        assert page.complaints() == []
    training.end()
