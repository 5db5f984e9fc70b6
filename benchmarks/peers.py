"""One workload on other federated learning frameworks, beside ours and a plain PyTorch loop, in one run.

The workload is that of `simulation.py`: 60,000 samples of 784 features, 100 clients with two classes each (80/20 local
split), MLP 784-200-200-10, 10 clients a round, one epoch of batches of 50 (and one full-batch step), lr 0.1.
Milliseconds a round without evaluation, and the peak memory of the processes. Every measurement has a fresh process;
three passes are made over all rows, and the quietest of each is shown.

    python benchmarks/peers.py [--rounds 20] [--peer NAME ...] [--python NAME=/path/to/python ...]

The peers' pinned dependencies clash, so each may live in a virtual environment of its own, which needs the peer and
torch but not evenhand; `--python` says where. A peer that is not installed is named with the way to install it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from machine import provenance
from torch import nn

HERE = Path(__file__).resolve().parent
CLIENTS, COHORT, RATE = 100, 10, 0.1
WARM_UP = 3
PASSES = 3
TIME_LIMIT = 1800.0
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Workload:
    """All samples: the clients' training samples, client after client, then those held out.

    A client's data are a view, so that no peer pays for copies that it does not make itself.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    offsets: list[int]

    def samples(self, client: int) -> range:
        return range(self.offsets[client], self.offsets[client + 1])

    def __getitem__(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(self.offsets[client], self.offsets[client + 1])
        return self.inputs[own], self.targets[own]


@functools.cache
def load(path: str) -> Workload:
    with np.load(path) as file:
        inputs, targets = torch.from_numpy(file["inputs"]), torch.from_numpy(file["targets"])
        return Workload(inputs, targets, file["offsets"].tolist())


def save(path: Path) -> None:
    """The workload of `simulation.py` as a file that needs numpy alone."""
    from simulation import workload

    dataset, parted = workload()
    train = np.concatenate([parted.train[client] for client in range(CLIENTS)])
    order = np.concatenate([train, np.setdiff1d(np.arange(len(dataset.targets)), train)])
    offsets = np.concatenate([[0], np.cumsum(parted.train.sizes)])
    np.savez(path, inputs=dataset.inputs.numpy()[order], targets=dataset.targets.numpy()[order], offsets=offsets)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Median time of a round."""
    memory: float
    """Peak in bytes."""


class Laps:
    """Notes when each round ends, and the peak memory at the end of the last one."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.total = rounds, WARM_UP + rounds
        self.times: list[float] = []
        self.memory = 0.0

    def lap(self) -> None:
        self.times.append(perf_counter())
        if len(self.times) == self.total:
            self.memory = peak_memory()

    def measured(self) -> Measured:
        if len(self.times) != self.total:
            raise RuntimeError(f"{len(self.times)} rounds ended, expected {self.total}")
        return Measured(float(np.median(np.diff(self.times)[-self.rounds :])), self.memory)


def peak_memory() -> float:
    """High-water mark of this process, and what its descendants had at the most beside shared libraries and memory."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = [os.getpid()]
    for process in family:
        family += [child for child, parent in parents.items() if parent == process]
    total = _status(family[0])["VmHWM"]
    for process in family[1:]:
        with contextlib.suppress(OSError, KeyError):
            status = _status(process)
            total += status["VmHWM"] - status["RssFile"] - status["RssShmem"]
    return total


def forget_peak() -> None:
    """Starts the high-water mark anew, so that making the data does not count."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(process: int) -> dict[str, float]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): 1024.0 * float(value) for name, value, _ in fields}


# Ours and the plain loop


def evenhand(path: str, batch: int | None, rounds: int, method: str, measure: str = "losses") -> Measured:
    from simulation import ours, simulation, workload

    dataset, parted = workload()
    forget_peak()
    made = simulation(dataset, parted, method, batch, 1, "cpu", measure=measure)
    return Measured(ours(made, rounds, "cpu"), peak_memory())


def plain(path: str, batch: int | None, rounds: int) -> Measured:
    from simulation import plain_loop, workload

    dataset, parted = workload()
    forget_peak()
    return Measured(plain_loop(dataset, parted, batch, rounds, "cpu"), peak_memory())


def bare(path: str, batch: int | None, rounds: int) -> Measured:
    from simulation import bare_products, workload

    _, parted = workload()
    forget_peak()
    return Measured(bare_products(parted, batch, rounds, "cpu"), peak_memory())


# The peers, each as its own documentation has it


def pfl(path: str, batch: int | None, rounds: int) -> Measured:
    """Apple's pfl: users' data as tensors in memory; they keep their order, so batches are the same in every round."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(inputs), targets)

        @torch.no_grad()
        def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Weighted]:
            return {"loss": Weighted(self.loss(inputs, targets).item() * len(targets), len(targets))}

    class Lap(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            laps.lap()
            return False, Metrics()

    def users() -> Any:
        while True:
            yield from rng.choice(CLIENTS, COHORT, replace=False)

    work, laps, rng = load(path), Laps(rounds), np.random.default_rng(0)
    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = {client: PyTorchTensorDataset(work[client], user_id=str(client)) for client in range(CLIENTS)}
    federation = FederatedDataset(data.__getitem__, functools.partial(next, users()))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=laps.total, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_batch_size=batch, local_num_epochs=1, local_learning_rate=RATE),
        callbacks=[Lap()],
        send_metrics_to_platform=False,
    )
    return laps.measured()


def fluke(path: str, batch: int | None, rounds: int) -> Measured:
    """fluke: its in-memory loaders, models in memory; clients keep a model each, as by default."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
    from fluke.utils import FederationObserver

    class Lap(FederationObserver):
        def end_round(self, round: int) -> None:
            laps.lap()

    work, laps = load(path), Laps(rounds)
    size = batch or 0  # 0: all of a client's samples
    FlukeENV().set_seed(0)
    FlukeENV().set_inmemory(True)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [FastDataLoader(*work[client], num_labels=10, batch_size=size, shuffle=True) for client in range(CLIENTS)]
    data = DataSplitter(DummyDataContainer(loaders, [None] * CLIENTS, None, num_classes=10))
    client = DDict(
        batch_size=size,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=RATE),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1),
    )
    federation = FedAVG(CLIENTS, data, DDict(client=client, server=DDict(weighted=True), model=mlp()))
    federation.set_callbacks([Lap()])
    federation.run(laps.total, COHORT / CLIENTS)
    return laps.measured()


def fedlab(path: str, batch: int | None, rounds: int) -> Measured:
    """FedLab: the standalone pipeline, a data loader over a client's tensors; its average has equal weights."""
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
    from fedlab.contrib.dataset.basic_dataset import FedDataset
    from fedlab.core.standalone import StandalonePipeline
    from torch.utils.data import DataLoader, TensorDataset

    class Data(FedDataset):
        def get_dataset(self, id: int, type: str = "train") -> TensorDataset:
            return TensorDataset(*work[id])

        def get_dataloader(self, id: int, batch_size: int | None, type: str = "train") -> DataLoader:
            own = self.get_dataset(id)
            return DataLoader(own, batch_size=batch_size or len(own), shuffle=True)

    class Pipeline(StandalonePipeline):
        def evaluate(self) -> None:
            laps.lap()

    work, laps = load(path), Laps(rounds)
    trainer = FedAvgSerialClientTrainer(mlp(), CLIENTS, cuda=False)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=1, batch_size=batch, lr=RATE)
    Pipeline(FedAvgServerHandler(mlp(), laps.total, COHORT / CLIENTS), trainer).main()
    return laps.measured()


FLGO_BENCHMARK = """
from peers import load, mlp
from torch.utils.data import TensorDataset

data = load({path!r})
train_data = TensorDataset(data.inputs, data.targets)
get_model = mlp
"""


def flgo(path: str, batch: int | None, rounds: int, method: str) -> Measured:
    """FLGo: a benchmark made from a file, a task from our partition; as many threads as torch takes by itself."""
    import flgo
    from flgo.benchmark.partition import BasicPartitioner
    from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
    from flgo.experiment.logger import BasicLogger

    class Given(BasicPartitioner):
        num_clients = CLIENTS

        def __call__(self, data: Any) -> list[list[int]]:
            return [list(work.samples(client)) for client in range(CLIENTS)]

    class Lap(BasicLogger):
        def log_once(self, *_: Any, **__: Any) -> None:
            if self.current_round > 0:  # the first call comes before the first round
                laps.lap()

    work, laps = load(path), Laps(rounds)
    # Newer releases of torch refuse a subset without this method.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda own, indices: [own[index] for index in indices]
    sys.path.append(os.getcwd())
    Path("flgo_config.py").write_text(FLGO_BENCHMARK.format(path=path))
    benchmark = importlib.import_module(flgo.gen_benchmark_from_file("flgo_benchmark", "flgo_config.py"))
    benchmark.visualize = lambda *_: None  # no picture of the partition
    flgo.gen_task_by_(benchmark, Given(), "flgo_task")
    option = {
        "num_rounds": laps.total,
        "proportion": COHORT / CLIENTS,
        "sample": "uniform",
        "num_epochs": 1,
        "batch_size": batch or -1,
        "learning_rate": RATE,
        "train_holdout": 0.0,
        "torch_num_threads": 0,
        "no_log_console": True,
        "no_tqdm": True,
    }
    flgo.init("flgo_task", importlib.import_module(f"flgo.algorithm.{method}"), option, Logger=Lap).run()
    return laps.measured()


def flower(path: str, batch: int | None, rounds: int) -> Measured:
    """Flower's simulation: one core a client, as many clients at a time as there are cores, data loaded once a worker.

    The memory is that of all its processes.
    """
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.app.message import Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    laps = Laps(rounds)
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        model = mlp()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, targets = load(path)[context.node_config["partition-id"]]
        optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
        for piece in torch.randperm(len(targets)).split(batch or len(targets)):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[piece]), targets[piece]).backward()
            optimiser.step()
        reply = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(targets)}),
        }
        return Message(content=RecordDict(reply), reply_to=message)

    def lap(round: int, _: Any) -> None:
        if round:  # 0: before the first
            laps.lap()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_train=COHORT / CLIENTS,
            fraction_evaluate=0.0,
            min_available_nodes=CLIENTS,
            train_metrics_aggr_fn=lambda replies, _: MetricRecord({"clients": len(replies)}),
        )
        result = strategy.start(grid, ArrayRecord(mlp().state_dict()), num_rounds=laps.total, evaluate_fn=lap)
        answered = [metrics["clients"] for metrics in result.train_metrics_clientapp.values()]
        if answered != [COHORT] * laps.total:
            raise RuntimeError(f"clients that answered, by round: {answered}")

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)
    return laps.measured()


@dataclass(frozen=True)
class Peer:
    modules: tuple[str, ...]
    """What can be imported when it is installed."""
    package: str
    """What pip installs."""
    rows: dict[str, Callable[[str, int | None, int], Measured]]


PEERS = {
    "bare": Peer(("evenhand",), "evenhand", {"bare matrix products": bare}),
    "evenhand": Peer(
        ("evenhand",),
        "evenhand",
        {
            "evenhand, fedavg": functools.partial(evenhand, method="fedavg", measure="needed"),
            "evenhand, fedavg, every loss measured": functools.partial(evenhand, method="fedavg"),
            "evenhand, fedfv, every loss measured": functools.partial(evenhand, method="fedfv"),
            "evenhand, qffl, every loss measured": functools.partial(evenhand, method="qffl:q=1"),
        },
    ),
    "plain": Peer(("evenhand",), "evenhand", {"plain PyTorch loop": plain}),
    "pfl": Peer(("pfl",), "pfl[pytorch]", {"pfl": pfl}),
    "fluke": Peer(("fluke",), "fluke-fl", {"fluke": fluke}),
    "fedlab": Peer(("fedlab",), "fedlab", {"FedLab": fedlab}),
    "flgo": Peer(
        ("flgo",),
        "flgo",
        {f"FLGo, {name}": functools.partial(flgo, method=name) for name in ["fedavg", "fedfv", "qfedavg"]},
    ),
    "flower": Peer(("flwr", "ray"), "flwr[simulation]", {"Flower": flower}),
}


def child(name: str, label: str, data: str, result: str, batch: int, rounds: int) -> None:
    """Measures one row in this process and writes what came out, or the error, to a file."""
    peer = PEERS[name]
    random.seed(0)
    torch.manual_seed(0)
    try:
        if all(importlib.util.find_spec(module) for module in peer.modules):
            answer: dict[str, Any] = asdict(peer.rows[label](data, batch or None, rounds))
            answer["torch"] = torch.__version__
            with contextlib.suppress(PackageNotFoundError):
                answer["version"] = version(peer.package.partition("[")[0])
        else:
            answer = {"error": f"not installed: `pip install {peer.package}`"}
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"failed: {traceback.format_exception_only(error)[-1].strip().splitlines()[0]}"}
    Path(result).write_text(json.dumps(answer))


def measure(interpreter: str, name: str, label: str, data: Path, batch: int | None, rounds: int) -> dict[str, Any]:
    """One row in a fresh process of the given interpreter, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        arguments = (name, label, str(data), str(result), batch or 0, rounds)
        code = f"import sys; sys.path.append({str(HERE)!r}); import peers; peers.child(*{arguments!r})"
        try:
            done = subprocess.run(
                [interpreter, "-c", code],
                cwd=folder,
                env={**os.environ, **QUIET, "FLWR_HOME": folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIME_LIMIT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": f"failed: {error}"}
        if result.exists():
            return json.loads(result.read_text())
        lines = done.stdout.strip().splitlines() or ["no output"]
        return {"error": f"failed (exit status {done.returncode}): {lines[-1]}"}


def row(name: str, label: str, passes: list[list[dict[str, Any]]]) -> str:
    """A line of the table: of several passes the quietest."""
    answers = [
        min(cells, key=lambda answer: answer.get("seconds", float("inf"))) for cells in zip(*passes, strict=True)
    ]
    cells = [answer.get("error") or f"{1e3 * answer['seconds']:.1f}" for answer in answers]
    if cells[0] == cells[1] == answers[0].get("error"):
        cells[1] = ""
    memory = max(answer.get("memory", 0.0) for answer in answers)
    known = next((answer for answer in answers if "torch" in answer), {})
    framework, comma, method = label.partition(",")
    if "version" in known and name not in ("bare", "evenhand", "plain"):
        framework += f" {known['version']}"
    if known.get("torch", torch.__version__) != torch.__version__:
        framework += f" (torch {known['torch']})"
    cells = [framework + comma + method, *cells, f"{memory / 2**20:.0f}" if memory else ""]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS), help="which to run (all)")
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH", help="a peer's own interpreter")
    arguments = parser.parse_args()
    interpreters = dict(pair.partition("=")[::2] for pair in arguments.python)
    if unknown := set(interpreters) - set(PEERS):
        parser.error(f"--python: no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    print(provenance(arguments=["--rounds", str(arguments.rounds), "--python ..."]))
    print("\n| what | batches of 50, ms | full batch, ms | peak memory, MiB |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "workload.npz")
        save(data)
        rows = [(name, label) for name in arguments.peer for label in PEERS[name].rows]
        found: dict[str, list[list[dict[str, Any]]]] = {label: [] for _, label in rows}
        for _ in range(PASSES):
            for name, label in rows:
                interpreter = interpreters.get(name, sys.executable)
                each = [measure(interpreter, name, label, data, batch, arguments.rounds) for batch in (50, None)]
                found[label].append(each)
        for name, label in rows:
            print(row(name, label, found[label]), flush=True)


if __name__ == "__main__":
    main()
