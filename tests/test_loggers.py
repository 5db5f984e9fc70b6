"""Callbacks and loggers: what they hear, what the logs hold after whatever happens, and that none can end a run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import evenhand as eh
from evenhand.callbacks import Callback, CallbackWarning
from evenhand.checks import EvenhandError
from evenhand.loggers import LOGGERS, logger
from evenhand.recording import Diverged, Interrupted

SMALL = {"clients": 12, "rounds": 12, "eval_every": 4, "batch_size": 16, "seeds": 2, "method": "fedlf"}
# other people's warnings are not what is tested here
others_may_warn = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Listener(Callback):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, object]] = []
        self.runs: dict[str, object] = {}

    def on_start(self, run):
        self.runs[run.name] = run
        self.told.append((run.name, "start", len(run.past)))

    def on_round(self, run, point):
        self.told.append((run.name, "round", point))

    def on_end(self, run, how):
        self.told.append((run.name, "end", how))

    def of(self, name: str, step: str) -> list:
        return [value for whose, what, value in self.told if (whose, what) == (name, step)]


def stop_at(round: int):
    def progress(status):
        if status.round == round:
            os.kill(os.getpid(), signal.SIGINT)

    return progress


def files(folder: Path) -> dict[str, bytes]:
    dated = ("versions.json", "timing.jsonl", "report.html")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if Path(name).name not in dated}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> eh.experiment.Runs:
    return eh.simulate(**SMALL, out=tmp_path_factory.mktemp("whole") / "run")


# --------------------------------------------------------------------------------------------------------- callbacks


def test_a_callback_hears_every_seed_from_its_start_to_its_end(whole, tmp_path):
    ear = Listener()
    eh.simulate(**SMALL, out=tmp_path / "mine", callbacks=[ear])
    assert list(ear.runs) == ["mine/seed-0", "mine/seed-1"]
    for run in whole:
        name = f"mine/seed-{run.seed}"
        points = ear.of(name, "round")
        assert (ear.of(name, "start"), ear.of(name, "end")) == ([0], ["finished"])
        assert [point.round for point in points] == list(range(13))
        assert [point.round for point in points if point.evaluation is not None] == [0, 4, 8, 12]
        assert points[0].record is None
        assert [point.record["asked"] for point in points[1:]] == [record["asked"] for record in run.rounds]
        assert points[-1].measures == run.measures()
        assert points[12].scalars()["clients/worst"] == run.measures()["worst"]
        assert points[5].scalars()["round/loss"] == pytest.approx(np.mean(run.rounds[4]["losses"]))
        assert points[5].scalars()["round/seconds"] > 0


def test_runs_are_named_by_their_folder_their_method_and_their_seed(tmp_path):
    ear, settings = Listener(), {"clients": 12, "rounds": 1, "seeds": [3]}
    eh.compare("fedavg", "qffl:q=1", **settings, out=tmp_path / "both", callbacks=[ear])
    assert list(ear.runs) == ["both/fedavg/seed-3", "both/qffl:q=1/seed-3"]
    assert {run.group for run in ear.runs.values()} == {"both"}
    memory = Listener()
    eh.compare("fedavg", "qffl:q=1", **settings, callbacks=[memory])
    eh.simulate(method="even", **settings, callbacks=[memory])
    assert list(memory.runs) == ["fedavg/seed-3", "qffl:q=1/seed-3", "even/seed-3"]
    assert len({run.id for run in [*ear.runs.values(), *memory.runs.values()]}) == 5


def test_groups_of_people_are_measured_too():
    ear = Listener()
    eh.simulate(
        data="synthetic-groups", model="logistic", method="fedavg", rounds=2, participation=1.0, callbacks=[ear]
    )
    assert ear.told[-2][2].scalars()["clients/dp"] > 0


def test_a_resumed_run_is_the_same_run_and_says_what_it_has_played(tmp_path):
    first, second, third = Listener(), Listener(), Listener()
    with pytest.raises(Interrupted):
        eh.simulate(**SMALL, out=tmp_path / "run", progress=stop_at(5), callbacks=[first])
    assert first.of("run/seed-0", "end") == ["stopped"]
    eh.resume(tmp_path / "run", callbacks=[second])
    run = second.runs["run/seed-0"]
    assert run.id == first.runs["run/seed-0"].id
    assert [point.round for point in run.past] == list(range(7))
    assert [point.round for point in second.of("run/seed-0", "round")] == list(range(7, 13))
    eh.resume(tmp_path / "run", callbacks=[third])  # it is finished: there is only its past to tell
    assert [point.round for point in third.runs["run/seed-1"].past] == list(range(13))
    assert third.of("run/seed-1", "end") == ["finished"]


def test_a_folder_of_an_earlier_version_can_be_resumed_with_callbacks(tmp_path):
    with pytest.raises(Interrupted):
        eh.simulate(**SMALL, out=tmp_path / "run", progress=stop_at(5))
    kept = json.loads((tmp_path / "run/versions.json").read_text())
    del kept["id"]
    (tmp_path / "run/versions.json").write_text(json.dumps(kept))
    ear, again = Listener(), Listener()
    eh.resume(tmp_path / "run", callbacks=[ear])
    eh.resume(tmp_path / "run", callbacks=[again])
    assert ear.runs["run/seed-0"].id == again.runs["run/seed-0"].id
    assert set(ear.runs["run/seed-0"].id).isdisjoint("/\\#?%:")  # which Weights & Biases does not take


def test_a_run_that_diverges_ends_so():
    ear = Listener()
    with pytest.raises(Diverged):
        eh.simulate(method="fedavg", clients=12, rounds=30, lr=1e30, callbacks=[ear])
    assert ear.told[-1][1:] == ("end", "diverged")


@pytest.mark.parametrize("step", ["on_start", "on_round", "on_end"])
def test_a_callback_that_fails_warns_once_and_changes_nothing(step, whole, tmp_path):
    class Broken(Listener):
        pass

    def fail(self, run, *values):
        if step != "on_round" or values[0].round == 3:
            raise OSError(28, "No space left on device")

    setattr(Broken, step, fail)
    broken, healthy = Broken(), Listener()
    with pytest.warns(CallbackWarning, match=r"Broken failed \(run/seed-0: .*No space left.*training goes on") as said:
        eh.simulate(**SMALL, out=tmp_path / "run", callbacks=[broken, healthy])
    assert len(said) == 1
    assert files(tmp_path / "run") == files(whole.folder)
    assert len(healthy.of("run/seed-1", "round")) == 13
    assert (tmp_path / "run" / "report.html").is_file()
    if step == "on_round":
        assert not broken.of("run/seed-1", "end")  # from its failure on it is left alone


def test_a_callback_that_failed_stays_out_of_the_rest_of_a_comparison():
    class Broken(Callback):
        calls = 0

        def on_start(self, run):
            Broken.calls += 1
            raise RuntimeError

    with pytest.warns(CallbackWarning, match="RuntimeError") as said:
        eh.compare("fedavg", "even", clients=12, rounds=1, seeds=1, callbacks=[Broken()])
    assert (len(said), Broken.calls) == (1, 1)


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (["tensorbord:logs"], r"unknown logger 'tensorbord'; did you mean 'tensorboard'\?.*mlflow:URI, wandb:PROJECT"),
        (["tensorboard:"], "names no place; write tensorboard:DIR"),
        ("tensorboard:logs", "must be a list"),
        ([print], "no callback"),
    ],
)
def test_a_wrong_callback_is_refused_before_anything_runs(callbacks, said, tmp_path):
    with pytest.raises(EvenhandError, match=said):
        eh.simulate(out=tmp_path / "run", callbacks=callbacks)
    with pytest.raises(EvenhandError, match=said):
        eh.compare("fedavg", "even", out=tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_named_with_the_words_that_install_it(name, monkeypatch):
    for module in [entry for entry in sys.modules if entry.partition(".")[0] in (name, "torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EvenhandError, match=rf"pip install 'evenhand\[{name}\]'"):
        logger(name)


# ----------------------------------------------------------------------------------------------------------- the logs

KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import evenhand as eh

def die(status):
    if status.round == 9:
        os.kill(os.getpid(), signal.SIGKILL)

eh.simulate(**eval(sys.argv[1]), out=sys.argv[2], checkpoint_every=0.0, progress=die, callbacks=[sys.argv[3]])
"""


class Log:
    """A logger's local backend, read back with the library's own means."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str) -> list[dict[str, float]]:
        """Every row of the log of one run, as often as it is there: numbers by name, `step` among them."""
        raise NotImplementedError


class TensorBoardLog(Log):
    spec = property(lambda self: f"tensorboard:{self.folder / 'events'}")

    def rows(self, name):
        loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
        convert = pytest.importorskip("tensorboard.util.tensor_util").make_ndarray
        found = []
        for path in sorted((self.folder / "events" / name).glob("events.*")):
            for event in loading.EventFileLoader(str(path)).Load():
                values = {value.tag: convert(value.tensor) for value in event.summary.value}
                if values and "experiment/text_summary" not in values:
                    scalars = {tag: float(value) for tag, value in values.items() if value.ndim == 0}
                    found.append({"step": event.step, **scalars})
        return found


class MlflowLog(Log):
    spec = property(lambda self: f"mlflow:sqlite:///{self.folder / 'mlflow.db'}")

    def found(self, name):
        client = pytest.importorskip("mlflow").MlflowClient(self.spec.partition(":")[2])
        experiment = client.get_experiment_by_name("evenhand").experiment_id
        (run,) = [run for run in client.search_runs([experiment]) if run.info.run_name == name]
        return client, run

    def rows(self, name):
        client, run = self.found(name)
        by_step: dict[int, list[dict[str, float]]] = {}
        for key in run.data.metrics:
            counts: Counter[int] = Counter()
            for entry in client.get_metric_history(run.info.run_id, key):
                copies = by_step.setdefault(entry.step, [])
                if len(copies) <= counts[entry.step]:
                    copies.append({"step": entry.step})
                copies[counts[entry.step]][key] = entry.value
                counts[entry.step] += 1
        return [row for step in sorted(by_step) for row in by_step[step]]


class WandbLog(Log):
    spec = "wandb:tests"

    def rows(self, name):
        from evenhand.loggers.wandb import history

        pytest.importorskip("wandb").teardown()  # ends its service, which writes on for a moment after a run has ended
        seed = name.rpartition("-")[2]
        paths = sorted((self.folder / "wandb").glob(f"offline-run-*/run-*-{seed}.wandb"))
        return [{**row, "step": row["_step"]} for path in paths for row in history(path)]


@pytest.fixture(params=[TensorBoardLog, MlflowLog, WandbLog], ids=["tensorboard", "mlflow", "wandb"])
def log(request, tmp_path, monkeypatch):
    library = request.param.__name__.removesuffix("Log").lower()
    module = pytest.importorskip(library, reason=f"needs evenhand[{library}]")
    if library == "wandb":
        module.teardown()  # it reads the environment once
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return request.param(tmp_path)


def check(log: Log, runs: eh.experiment.Runs, group: str = "run") -> None:
    """The log holds every round of every seed once, with the run's numbers."""
    for run in runs:
        found = log.rows(f"{group}/seed-{run.seed}")
        assert [row["step"] for row in found] == list(range(13))
        rows = {row["step"]: row for row in found}
        for place, played in enumerate((0, 4, 8, 12)):
            for measure in ("mean", "worst", "std_pp", "pooled_accuracy"):
                assert rows[played][f"clients/{measure}"] == pytest.approx(run.curves[measure][place], rel=1e-6)
        assert "clients/mean" not in rows[3]
        for record in run.rounds:
            row = rows[record["round"] + 1]
            assert row["round/answered"] == record["answered"]
            assert row["round/loss"] == pytest.approx(np.mean(record["losses"]), rel=1e-6)


@others_may_warn
def test_a_log_holds_every_round_of_every_seed(log, whole, tmp_path):
    eh.simulate(**SMALL, out=tmp_path / "run", callbacks=[log.spec])
    check(log, whole)
    assert files(tmp_path / "run") == files(whole.folder)


@others_may_warn
def test_a_killed_run_goes_on_in_the_same_log(log, whole, tmp_path):
    command = [sys.executable, "-c", KILLED, repr(SMALL), str(tmp_path / "run"), log.spec]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    eh.resume(tmp_path / "run", callbacks=[log.spec])
    check(log, whole)


@others_may_warn
def test_a_stopped_run_goes_on_in_the_same_log_and_a_finished_one_adds_nothing(log, whole, tmp_path):
    with pytest.raises(Interrupted, match=rf"--resume {tmp_path}/run --log '?{log.spec}") as stopped:
        eh.simulate(**SMALL, out=tmp_path / "run", progress=stop_at(5), callbacks=[log.spec])
    assert str(stopped.value).count("--log") == 1
    eh.resume(tmp_path / "run", callbacks=[log.spec])
    eh.resume(tmp_path / "run", callbacks=[log.spec])
    check(log, whole)


@others_may_warn
def test_a_finished_run_can_be_logged_afterwards(log, whole):
    eh.resume(whole.folder, callbacks=[log.spec])
    check(log, whole)


def test_tensorboard_shows_the_settings_and_the_distribution_of_the_clients(whole, tmp_path):
    accumulating = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    eh.simulate(**SMALL, out=tmp_path / "run", callbacks=[f"tensorboard:{tmp_path / 'events'}"])
    read = accumulating.EventAccumulator(str(tmp_path / "events/run/seed-1"), {"histograms": 0, "tensors": 0}).Reload()
    text = read.Tensors("experiment/text_summary")[0].tensor_proto.string_val[0].decode()
    assert 'name = "fedlf"' in text
    drawn = read.Histograms("clients/accuracies")
    assert [entry.step for entry in drawn] == [0, 4, 8, 12]
    assert drawn[-1].histogram_value.num == 12
    assert drawn[-1].histogram_value.sum == pytest.approx(whole[1].accuracies.sum())


def test_another_run_of_the_same_name_gets_a_log_of_its_own(tmp_path):
    pytest.importorskip("tensorboard", reason="needs evenhand[tensorboard]")
    log = TensorBoardLog(tmp_path)
    settings = {"method": "fedavg", "clients": 12, "rounds": 2, "out": tmp_path / "run"}
    eh.simulate(**settings, callbacks=[log.spec])
    eh.simulate(**settings, force=True, callbacks=[log.spec])
    eh.resume(tmp_path / "run", callbacks=[log.spec])
    for name in ("run/seed-0", "run/seed-0-2"):
        assert [row["step"] for row in log.rows(name)] == [0, 1, 2]


@others_may_warn
def test_mlflow_keeps_settings_tags_and_how_it_ended(tmp_path):
    pytest.importorskip("mlflow", reason="needs evenhand[mlflow]")
    log = MlflowLog(tmp_path)
    with pytest.raises(Interrupted):
        eh.simulate(**SMALL, out=tmp_path / "run", progress=stop_at(5), callbacks=[log.spec])
    assert log.found("run/seed-1")[1].info.status == "KILLED"
    eh.resume(tmp_path / "run", callbacks=[log.spec])
    _, run = log.found("run/seed-1")
    assert run.info.status == "FINISHED"
    assert (run.data.params["work.batch_size"], run.data.params["seeds"]) == ("16", "[1]")
    assert (run.data.tags["method"], run.data.tags["seed"], run.data.tags["group"]) == ("fedlf", "1", "run")


@others_may_warn
@pytest.mark.parametrize("uri", ["plain-folder", "sqlite:////proc/nowhere/mlflow.db"])
def test_a_place_that_mlflow_cannot_use_is_refused(uri):
    pytest.importorskip("mlflow", reason="needs evenhand[mlflow]")
    with pytest.raises(EvenhandError, match=r"mlflow logger cannot use .*mlflow:sqlite:///FILE"):
        logger(f"mlflow:{uri}")


@others_may_warn
def test_a_server_that_is_gone_does_not_end_the_run(whole, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs evenhand[mlflow]")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = f"mlflow:http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.warns(CallbackWarning, match="MLflow failed .*the run folder is complete") as said:
            eh.simulate(**SMALL, out=tmp_path / "run", callbacks=[gone])
    assert len(said) == 1
    assert files(tmp_path / "run") == files(whole.folder)


@pytest.mark.parametrize("document", ["loggers.md", "watch.md"])
def test_the_python_in_the_documents_works(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).resolve().parents[1] / "docs" / document).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], document, "exec"), {})
    assert capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- the command line


FEW = ["--clients", "12", "--rounds", "2", "--seeds", "1", "--quiet"]


def test_the_command_line_logs_runs_and_comparisons(evenhand, tmp_path):
    pytest.importorskip("tensorboard", reason="needs evenhand[tensorboard]")
    assert evenhand("run", *FEW, "--log", "tensorboard:events", "--out", "one")[0] == 0
    assert evenhand("compare", "fedavg", "qffl:q=1", *FEW, "--log", "tensorboard:events", "--out", "two")[0] == 0
    names = {str(path.parent.relative_to("events")) for path in Path("events").rglob("events.*")}
    assert names == {"one/seed-0", "two/fedavg/seed-0", "two/qffl-q=1/seed-0"}
    before = {path: path.stat().st_size for path in Path("events").rglob("events.*")}
    assert evenhand("compare", "--resume", "two", "--quiet", "--log", "tensorboard:later/events")[0] == 0
    for name in ("two/fedavg/seed-0", "two/qffl-q=1/seed-0"):
        assert TensorBoardLog(tmp_path / "later").rows(name) == TensorBoardLog(tmp_path).rows(name)
    assert before == {path: path.stat().st_size for path in Path("events").rglob("events.*")}


def test_a_wrong_logger_is_an_error_and_a_failing_one_a_warning(evenhand):
    code, _, complained = evenhand("run", *FEW, "--log", "tensorflow:x")
    assert (code, "unknown logger 'tensorflow'" in complained) == (2, True)
    assert not Path("runs").exists()
    pytest.importorskip("tensorboard", reason="needs evenhand[tensorboard]")
    Path("file").write_text("in the way")
    done = subprocess.run(
        [sys.executable, "-m", "evenhand", "run", *FEW, "--log", "tensorboard:file", "--out", "here"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: TensorBoard failed (here/seed-0: ")
    assert Path("here/summary.json").is_file()
