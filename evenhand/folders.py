"""A run on disk: what its folder holds.

    experiment.toml           the description; `evenhand run --config` of it gives the same numbers
    versions.json             program versions, machine, dates
    facts.json                what the data and the model are: fingerprint, classes, layers
    partition.txt             who holds what
    noise.csv                 where training labels are noisy: whose, to which level, how many are wrong
    summary.json              every measure at the end; its presence says that the run is finished
    report.html               a page for people
    diverged.json             only where the training diverged: in which round
    seed-N/rounds.jsonl       one record a round
    seed-N/clients.csv        every client's accuracy and loss at every evaluation
    seed-N/holdings.csv       every client's samples by part and by class
    seed-N/timing.jsonl       seconds a round; apart, so that two equal runs have equal files
    seed-N/model.safetensors  the trained model (and, where clients train their own, personal.safetensors)
    checkpoint*.safetensors   while it runs, the last two states it can continue from

How it comes about: evenhand/recording.py.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol
from uuid import uuid4

import numpy as np
import torch

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.constraints import Cells
from evenhand.holdings import Holdings
from evenhand.logs import CLIENTS, PREDICTED, ROUNDS, TIMING, add_predicted, read_clients, records
from evenhand.runs import BY_CLIENT, MODEL, PERSONAL, Integers
from evenhand.storage import write_json

DESCRIPTION = "experiment.toml"
COMPARISON = "comparison.toml"
VERSIONS = "versions.json"
FACTS = "facts.json"
PARTITION = "partition.txt"
NOISE = "noise.csv"  # where training labels are wrong: whose, and how many
SUMMARY = "summary.json"
REPORT = "report.html"
DIVERGED = "diverged.json"
TABLES = ("table.md", "table.tex", "table.csv")
HOLDINGS = "holdings.csv"
CELLS = "groups.json"  # what the cells are
NEWEST, CURRENT, PREVIOUS = (f"checkpoint{word}.safetensors" for word in (".new", "", ".previous"))

SHOWN_CLIENTS = 200  # in partition.txt


class DiskError(EvenhandError):
    """A file could not be written."""


class Training(Protocol):
    """What is recorded: a simulation, or a federation that goes on elsewhere."""

    round: int
    replicas: list[Any]
    settings: Any
    device: torch.device
    dataset: Any
    module: Any
    shape: Any
    cells: Cells | None

    def run(self, until: int | None = None, after_round: Callable[[Any], None] | None = None) -> None: ...

    def facts(self) -> dict[str, Any]:
        """What a reader wants to know of the data and the model."""

    def holdings(self, replica: Any) -> Holdings | None:
        """Who holds what; None where nobody but the clients knows."""


def new_folder(name: str, parent: str | Path = "runs") -> Path:
    """An empty folder of its own for a run: runs/NAME-1, runs/NAME-2, ..."""
    stem = file_name(name)
    with writing(Path(parent)):
        Path(parent).mkdir(parents=True, exist_ok=True)
        taken = [re.fullmatch(rf"{re.escape(stem)}-([0-9]+)", entry.name) for entry in Path(parent).iterdir()]
        count = max((int(found[1]) for found in taken if found), default=0)
        while True:
            count += 1
            try:
                (path := Path(parent) / f"{stem}-{count}").mkdir()
            except FileExistsError:  # another program was faster
                continue
            return path


def file_name(text: str) -> str:
    """Text as a name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9=,.+_-]+", "-", text).strip("-.") or "run"


@contextlib.contextmanager
def writing(place: Path, advice: str = "") -> Iterator[None]:
    """Turns a failed write into an error that says where, why and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if not advice and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "choose a folder that you may write to"
        raise DiskError(f"cannot write to {str(place)!r}: {reason}{'; ' if advice else ''}{advice}") from error


class Folder:
    """A folder that one program at a time fills, and that says by its files how far it has got."""

    description: ClassVar[str]
    """The file whose presence says that something was begun here."""
    kind: ClassVar[str]

    def __init__(self, path: str | Path, command: str = "") -> None:
        self.path = Path(path)
        self.command = command or f"evenhand {self.verb} --resume {self.path}"
        """What a person types to go on."""

    verb: ClassVar[str]

    @property
    def started(self) -> bool:
        return (self.path / self.description).is_file()

    @property
    def finished(self) -> bool:
        return self.started and (self.path / SUMMARY).is_file()

    @property
    def state(self) -> str:
        """What the folder holds, in words."""
        return f"finished {self.kind}" if self.finished else f"{self.kind} that can go on ({self.command})"

    def must_be_started(self) -> None:
        if self.started:
            return
        if not self.path.is_dir():
            raise EvenhandError(f"there is no folder {str(self.path)!r}")
        for other in (RunFolder, ComparisonFolder):
            if (self.path / other.description).is_file():
                raise EvenhandError(f"{str(self.path)!r} holds a {other.kind}: use evenhand {other.verb} with it")
        raise EvenhandError(f"{str(self.path)!r} is not the folder of a {self.kind}: it holds no {self.description}")

    @contextlib.contextmanager
    def claimed(self, *, force: bool = False) -> Iterator[None]:
        """Make the folder if need be; what it holds already is refused, or left for `begin` to replace."""
        path = str(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise EvenhandError(f"{path!r} is a file, not a folder")
        if self.started and not force:
            raise EvenhandError(f"{path!r} holds a {self.state}; choose another folder, or replace it with --force")
        if not self.started and self.path.is_dir() and any(map(self._foreign, self.path.iterdir())):
            raise EvenhandError(f"{path!r} holds other files; choose a new or an empty folder")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.locked():
                yield
        finally:
            if not self.started:
                with contextlib.suppress(OSError):
                    self.path.rmdir()  # only if it is empty

    def _foreign(self, entry: Path) -> bool:
        """Whether a file is anything but a description that was cut short while it was written."""
        return not (entry.name.startswith(self.description) and entry.suffix == ".part")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile (where the system has such locks); a dead process holds none."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EvenhandError(f"{str(self.path)!r} is being written to by another process") from None
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(handle)

    def describe(self, text: str) -> None:
        """Write down what is to be run."""
        first = f"# evenhand {self.verb} --config {self.description} repeats this {self.kind}\n\n"
        storage.write_bytes(self.path / self.description, (first + text).encode())


class RunFolder(Folder):
    """The folder of one run."""

    description, kind, verb = DESCRIPTION, "run", "run"

    @property
    def diverged(self) -> int | None:
        """The round in which the training diverged, if it did."""
        path = self.path / DIVERGED
        return int(json.loads(path.read_text())["round"]) if path.is_file() else None

    @property
    def state(self) -> str:
        return super().state if self.diverged is None else f"run that diverged in round {self.diverged:,}"

    def seed(self, seed: int) -> Path:
        return self.path / f"seed-{seed}"

    def begin(self, description: str, simulation: Training) -> None:
        """Clear what an earlier run left, and write down what is to be run; from there on the run counts as begun."""
        with writing(self.path):
            self.clear()
            self.describe(description)
            self.note(simulation)

    def note(self, simulation: Training) -> None:
        """Write down who holds what, and with which versions, where that is not there yet."""
        if not (self.path / PARTITION).is_file():
            storage.write_bytes(self.path / PARTITION, partition_text(simulation).encode())
        if not (self.path / FACTS).is_file():
            write_json(self.path / FACTS, simulation.facts())
        noise = noise_text(simulation)
        if noise and not (self.path / NOISE).is_file():
            storage.write_bytes(self.path / NOISE, noise.encode())
        if simulation.cells is not None and not (self.path / CELLS).is_file():
            write_json(self.path / CELLS, simulation.cells.to_dict())
        if not (self.path / VERSIONS).is_file():
            began = {"id": uuid4().hex, "started": now(), "resumed": []}
            write_json(self.path / VERSIONS, {**versions(simulation.device), **began})

    @property
    def id(self) -> str:
        """What tells the run apart from another one that was in this folder before."""
        try:
            kept = json.loads((self.path / VERSIONS).read_text())
            return str(kept.get("id") or file_name(kept["started"]))  # a folder of an earlier version has no id
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvenhandError(f"{str(self.path / VERSIONS)!r} does not say which run this is: {error!r}") from error

    def clear(self) -> None:
        """Remove the files of a run, and nothing else; the description last, so that it can be done again."""
        for name in (SUMMARY, VERSIONS, FACTS, PARTITION, NOISE, CELLS, REPORT, DIVERGED, NEWEST, CURRENT, PREVIOUS):
            (self.path / name).unlink(missing_ok=True)
        for place in self.path.glob("seed-*"):
            for name in (ROUNDS, TIMING, CLIENTS, HOLDINGS, PREDICTED, BY_CLIENT, MODEL, PERSONAL):
                (place / name).unlink(missing_ok=True)
            sweep(place)
            with contextlib.suppress(OSError):
                place.rmdir()
        sweep(self.path)
        (self.path / DESCRIPTION).unlink(missing_ok=True)

    def sweep(self) -> None:
        for place in (self.path, *self.path.glob("seed-*")):
            sweep(place)

    def read(self, seed: int) -> tuple[tuple[str, ...], Integers, list[dict[str, Any]], list[dict[str, Any]]]:
        """Names, test samples, rounds and evaluations of a seed, as far as they are on disk."""
        place = self.seed(seed)
        rounds = records(place / ROUNDS)
        names, counts, evaluations = read_clients(place / CLIENTS)
        add_predicted(place / PREDICTED, evaluations)
        return names, counts, rounds, evaluations

    def seconds(self, seed: int, rounds: int) -> list[float | None]:
        """How long each of so many rounds of a seed took, as far as that is known."""
        known = [entry.get("seconds") for entry in records(self.seed(seed) / TIMING)]
        return (known + [None] * rounds)[:rounds]

    def holdings(self, seed: int) -> Holdings | None:
        """Who holds what under a seed; None in a folder that an older version wrote."""
        path = self.seed(seed) / HOLDINGS
        return Holdings.read(path, self.facts["classes"]) if path.is_file() else None

    @property
    def facts(self) -> dict[str, Any]:
        """What the data and the model are; empty in a folder that an older version wrote."""
        return self._json(FACTS)

    @property
    def versions(self) -> dict[str, Any]:
        """The programs and the machine that the run was begun with."""
        return self._json(VERSIONS)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def cells(self) -> Cells | None:
        """What the cells are, where there are groups."""
        path = self.path / CELLS
        return Cells.from_dict(json.loads(path.read_text())) if path.is_file() else None


class ComparisonFolder(Folder):
    """The folder of a comparison: the tables, and one run folder a method."""

    description, kind, verb = COMPARISON, "comparison", "compare"

    def clear(self) -> None:
        """Remove the files of a comparison, and nothing else; the description last, so that it can be done again."""
        for name in (SUMMARY, REPORT, *TABLES):
            (self.path / name).unlink(missing_ok=True)
        for place in [entry.parent for entry in self.path.glob(f"*/{DESCRIPTION}")]:
            RunFolder(place).clear()
            with contextlib.suppress(OSError):
                place.rmdir()
        sweep(self.path)
        (self.path / COMPARISON).unlink(missing_ok=True)


def sweep(place: Path) -> None:
    """Remove what writes that were cut short left behind."""
    for left in place.glob("*.part"):
        left.unlink(missing_ok=True)


def partition_text(simulation: Training) -> str:
    """Who holds what, once for every seed."""
    parts: dict[int, str] = {}
    for replica in simulation.replicas:
        if replica.seed not in parts:
            parts[replica.seed] = replica.partition.table(simulation.dataset, limit=SHOWN_CLIENTS)
    head = simulation.dataset.describe()
    return "\n\n".join([head, *(f"seed {seed}\n{table}" for seed, table in parts.items())]) + "\n"


def noise_text(simulation: Training) -> str:
    """Whose training labels are noisy, to which level and how many of them are wrong; empty where there is no noise."""
    text, seen = io.StringIO(), set[int]()
    table = csv.writer(text, lineterminator="\n")
    for replica in simulation.replicas:
        drawn = replica.partition
        if drawn.noise is None or drawn.labels is None or replica.seed in seen:
            continue
        if not seen:
            table.writerow(("seed", "client", "level", "train_samples", "wrong"))
        seen.add(replica.seed)
        false = drawn.labels != simulation.dataset.labels[drawn.train.indices]
        wrong = np.bincount(drawn.train.owners[false], minlength=drawn.clients)
        for client in np.flatnonzero(drawn.noise > 0):
            name = drawn.names[client] if drawn.names else str(client)
            level = f"{drawn.noise[client]:.6f}"
            table.writerow((replica.seed, name, level, drawn.train.sizes[client], wrong[client]))
    return text.getvalue()


def versions(device: torch.device) -> dict[str, Any]:
    """What the numbers may depend on besides the description."""
    from evenhand import __version__

    named = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "evenhand": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": f"{device.type} ({named})",
        "threads": torch.get_num_threads(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
