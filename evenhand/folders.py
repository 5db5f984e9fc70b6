"""A run on disk: what its folder holds, and how it survives whatever stops it.

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

The logs only grow, every second or so, and are on disk before a checkpoint is; a checkpoint is written whole or not at
all. So after a sudden end the logs are cut back to the checkpoint's round, and the same rounds follow again.
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
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from uuid import uuid4

import numpy as np
import torch

from evenhand import storage
from evenhand.callbacks import Audience, points
from evenhand.checks import EvenhandError, NoUsableClient
from evenhand.constraints import Cells
from evenhand.engine import checkpoint
from evenhand.fairness import curves, few
from evenhand.holdings import Holdings
from evenhand.runs import BY_CLIENT, MODEL, PERSONAL, Integers, by_client_text

if TYPE_CHECKING:
    from evenhand.runs import Runs

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
ROUNDS = "rounds.jsonl"
TIMING = "timing.jsonl"
CLIENTS = "clients.csv"
HOLDINGS = "holdings.csv"
PREDICTED = "predicted.jsonl"  # where there are groups: how often each class is predicted, by cell, at each evaluation
CELLS = "groups.json"  # what the cells are
NEWEST, CURRENT, PREVIOUS = (f"checkpoint{word}.safetensors" for word in (".new", "", ".previous"))
COLUMNS = ("round", "client", "accuracy", "loss", "test_samples")

CHECKPOINT_EVERY = 20.0  # seconds
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into checkpoints
LOG_EVERY = 1.0  # seconds between writes to the logs, for those who watch
SHOWN_CLIENTS = 200  # in partition.txt
WORST_PERCENT = 10.0  # of the clients, in a progress bar


class DiskError(EvenhandError):
    """A file could not be written."""


class Diverged(EvenhandError):
    """In some round no client's update was a finite number any more. The seeds of a run stop together."""

    def __init__(self, label: str, round: int, lr: float, *, why: str, folder: Path | None = None) -> None:
        kept = "" if folder is None else f"; what was measured before is in {str(folder)!r}"
        super().__init__(
            f"{label} diverged in round {round:,}: {why}; a smaller learning rate helps (--lr, now {lr:g}){kept}"
        )
        self.round, self.why = round, why


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and its state is saved."""

    def __init__(self, message: str, folder: Path, signal_number: int) -> None:
        super().__init__(message)
        self.folder, self.signal_number = folder, signal_number


@dataclass(frozen=True)
class Status:
    """Where a run stands, for a progress bar."""

    label: str
    round: int
    rounds: int
    evaluations: Sequence[Mapping[str, Any]]  # the latest, one a seed

    def served(self) -> str:
        """How the clients are served by now, in a few words: the mean over the seeds."""
        accuracies = np.array([entry["accuracies"] for entry in self.evaluations])
        found = curves(accuracies, worst=WORST_PERCENT)
        mean, worst, std = (float(np.mean(found[name])) for name in ("mean", "worst", "std_pp"))
        tail = few(int(np.isfinite(accuracies[0]).sum()), WORST_PERCENT)
        return f"mean {mean:.1%}, worst {tail} {worst:.1%}, std {std:.1f} pp"


Progress = Callable[[Status], None]


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


class Keeper(Protocol):
    """Writes and reads checkpoints of such a training."""

    def save(self, simulation: Any, path: Path) -> None: ...

    def restore(self, simulation: Any, path: Path) -> None: ...


# --------------------------------------------------------------------------------------------------------- folders


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
        rounds = _records(place / ROUNDS)
        names, counts, evaluations = _read_clients(place / CLIENTS)
        _add_predicted(place / PREDICTED, evaluations)
        return names, counts, rounds, evaluations

    def seconds(self, seed: int, rounds: int) -> list[float | None]:
        """How long each of so many rounds of a seed took, as far as that is known."""
        known = [entry.get("seconds") for entry in _records(self.seed(seed) / TIMING)]
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


def write_json(path: Path, value: Any) -> None:
    storage.write_bytes(path, (to_json(value, indent=1) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: null for what is not a finite number."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return None if isinstance(value, float) and not np.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------------ logs


@dataclass
class Record:
    """What one seed has written so far, and what is still to be written."""

    names: tuple[str, ...]
    test_samples: Integers
    rounds: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    rounds_written: int = 0
    evaluations_written: int = 0

    def write(self, place: Path, *, sync: bool = True) -> None:
        """Append what is new; `sync` waits until that, and all before it, is on the disk."""
        place.mkdir(exist_ok=True)
        fresh = self.rounds[self.rounds_written :]
        timed = zip(fresh, self.seconds[self.rounds_written :], strict=True)
        _append(place / ROUNDS, "".join(f"{to_json(entry)}\n" for entry in fresh), sync)
        times = ({"round": entry["round"], "seconds": seconds} for entry, seconds in timed)
        _append(place / TIMING, "".join(f"{to_json(entry)}\n" for entry in times), sync)
        measured = self.evaluations[self.evaluations_written :]
        counted = [{"round": e["round"], "predicted": e["predicted"]} for e in measured if "predicted" in e]
        if counted or (place / PREDICTED).is_file():
            _append(place / PREDICTED, "".join(f"{to_json(entry)}\n" for entry in counted), sync)
        _append(place / CLIENTS, self._rows(measured), sync)
        self.rounds_written, self.evaluations_written = len(self.rounds), len(self.evaluations)

    def _rows(self, entries: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        if not self.evaluations_written:
            table.writerow(COLUMNS)
        counts = self.test_samples.tolist()
        for entry in entries:
            accuracies, losses = map(_cells, (entry["accuracies"], entry["losses"]))
            table.writerows(zip([entry["round"]] * len(counts), self.names, accuracies, losses, counts, strict=True))
        return text.getvalue()


def _add_predicted(path: Path, evaluations: Sequence[dict[str, Any]]) -> None:
    """Put the predictions by cell beside the evaluations that they belong to."""
    found = {entry["round"]: entry["predicted"] for entry in _records(path)}
    for entry in evaluations:
        if entry["round"] in found:
            entry["predicted"] = np.array(found[entry["round"]], dtype=np.int64)


def _cells(values: Any) -> list[str]:
    return ["" if value != value else repr(value) for value in np.asarray(values, dtype=np.float64).tolist()]


def _append(path: Path, text: str, sync: bool) -> None:
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[bytes]:
    """The lines that were written to their end."""
    if not path.is_file():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _records(path: Path) -> list[dict[str, Any]]:
    return [_record(path, number, line) for number, line in enumerate(_whole_lines(path), 1)]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "round" not in found:
        raise _damaged(path, number)
    return found


def _damaged(path: Path, number: int) -> EvenhandError:
    return EvenhandError(f"line {number} of {str(path)!r} is not a record; the file was damaged or changed by hand")


def _round_of_record(path: Path, number: int, line: bytes) -> int:
    return int(_record(path, number, line)["round"])


def _round_of_row(path: Path, number: int, line: bytes) -> int:
    try:
        return 0 if number == 1 else int(line.split(b",", 1)[0])
    except ValueError:
        raise _damaged(path, number) from None


def _cut(path: Path, last: int, round_of: Callable[[Path, int, bytes], int]) -> None:
    """Keep the first lines of a log, up to the first one of a round after the last."""
    length = 0
    for number, line in enumerate(_whole_lines(path), 1):
        if round_of(path, number, line) > last:
            break
        length += len(line)
    if path.is_file():
        os.truncate(path, length)


def _read_clients(path: Path) -> tuple[tuple[str, ...], Integers, list[dict[str, Any]]]:
    lines = [line.decode() for line in _whole_lines(path)]
    rows = list(csv.reader(lines[1:]))
    if not rows:
        return (), np.zeros(0, dtype=np.int64), []
    try:
        return _tables(rows)
    except (ValueError, IndexError):
        wrong = next((number for number, row in enumerate(rows, 2) if not _is_row(row)), len(rows) + 1)
        raise _damaged(path, wrong) from None


def _tables(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], Integers, list[dict[str, Any]]]:
    """What rows of clients, evaluation by evaluation, say: names, test samples, evaluations."""
    clients = sum(row[0] == rows[0][0] for row in rows)
    names = tuple(row[1] for row in rows[:clients])
    counts = np.array([int(row[4]) for row in rows[:clients]], dtype=np.int64)
    evaluations = []
    if not all(map(_is_row, rows[len(rows) // clients * clients :])):  # an evaluation that is being written
        raise ValueError
    for start in range(0, len(rows) - clients + 1, clients):
        block = rows[start : start + clients]
        accuracies, losses = (np.array([float(row[place] or "nan") for row in block]) for place in (2, 3))
        total = max(counts.sum(), 1)
        evaluations.append(
            {
                "round": int(block[0][0]),
                "accuracies": accuracies,
                "losses": losses,
                "pooled_accuracy": float(np.nansum(accuracies * counts) / total),
                "pooled_loss": float(np.nansum(losses * counts) / total),
            }
        )
    return names, counts, evaluations


def _is_row(row: Sequence[str]) -> bool:
    try:
        _ = int(row[0]), int(row[4]), float(row[2] or "nan"), float(row[3] or "nan")
    except (ValueError, IndexError):
        return False
    return len(row) == len(COLUMNS)


# --------------------------------------------------------------------------------------------------------- recording


class Recorder:
    """Runs a simulation, and keeps what it says: in memory, and where there is a folder on disk."""

    def __init__(
        self,
        simulation: Training,
        folder: RunFolder | None,
        *,
        every: float = CHECKPOINT_EVERY,
        progress: Progress | None = None,
        label: str = "",
        keeper: Keeper = checkpoint,
    ) -> None:
        self.simulation, self.folder, self.every, self.keeper = simulation, folder, every, keeper
        self.progress, self.label = progress, label or simulation.replicas[0].method.name
        self.notes: list[str] = []
        self.records = []
        for replica in simulation.replicas:
            names = replica.partition.names or map(str, range(replica.partition.clients))
            tidy = tuple(" ".join(name.split()) for name in names)  # a line of a log is a line
            self.records.append(Record(tidy, replica.partition.test.sizes))
        self.audience: Audience | None = None
        self._stop: int | None = None
        self._due = monotonic() + every
        self._log_due = monotonic()

    @property
    def _advice(self) -> str:
        assert self.folder is not None
        return f"put that right and go on with: {self.folder.command}"

    def run(self) -> None:
        """Play all rounds that are left."""
        try:
            with self._signals():
                self.simulation.run(after_round=self._after_round)
        except DiskError:
            raise
        except NoUsableClient as error:
            raise self._diverged(str(error)) from error
        except EvenhandError as error:
            raise EvenhandError(f"{self.label}, round {self.simulation.round + 1}: {error}") from error
        self._collect()

    def _diverged(self, why: str) -> Diverged:
        """Keep the rounds that were played to their end, and say what happened."""
        reached = self.simulation.round
        for replica in self.simulation.replicas:
            replica.rounds = [entry for entry in replica.rounds if entry["round"] < reached]
        self._collect()
        place = None if self.folder is None else self.folder.path
        if place is not None:
            with writing(place):
                self._flush()
                write_json(place / DIVERGED, {"round": reached + 1, "why": why})
        first = why.partition("; ")[0]  # one client's reason is enough
        return Diverged(self.label, reached + 1, self.simulation.settings.work.lr, why=first, folder=place)

    def _after_round(self, simulation: Training) -> None:
        self._collect()
        if self._stop is not None:
            self._leave()
        if self.folder is not None and monotonic() >= self._due and simulation.round < simulation.settings.rounds:
            self._checkpoint()
        elif self.folder is not None and monotonic() >= self._log_due:
            with writing(self.folder.path, self._advice):
                self._flush(sync=False)
        if self.progress is not None:
            latest = [record.evaluations[-1] for record in self.records]
            self.progress(Status(self.label, simulation.round, simulation.settings.rounds, latest))

    def _collect(self) -> None:
        """Take the replicas' records over, so that a checkpoint holds states and not histories."""
        for place, (replica, record) in enumerate(zip(self.simulation.replicas, self.records, strict=True)):
            rounds, evaluations, replica.rounds, replica.evaluations = replica.rounds, replica.evaluations, [], []
            seconds = [entry.pop("seconds", None) for entry in rounds]
            record.rounds += rounds
            record.seconds += seconds
            record.evaluations += evaluations
            if self.audience is not None:
                self.audience.hear(place, points(self.audience.runs[place], rounds, seconds, evaluations))

    # ---- checkpoints

    def _checkpoint(self) -> None:
        assert self.folder is not None
        started, place = monotonic(), self.folder.path
        with writing(place, self._advice):
            self._flush()
            self.keeper.save(self.simulation, place / NEWEST)
            if (place / CURRENT).exists():
                os.replace(place / CURRENT, place / PREVIOUS)
            os.replace(place / NEWEST, place / CURRENT)
        took = monotonic() - started
        self._due = monotonic() + max(self.every, took / CHECKPOINT_SHARE if self.every else 0.0)

    def _flush(self, *, sync: bool = True) -> None:
        assert self.folder is not None
        for replica, record in zip(self.simulation.replicas, self.records, strict=True):
            place = self.folder.seed(replica.seed)
            record.write(place, sync=sync)
            held = None if (place / HOLDINGS).is_file() else self.simulation.holdings(replica)
            if held is not None:
                storage.write_bytes(place / HOLDINGS, held.text(record.names).encode())
        self._log_due = monotonic() + LOG_EVERY

    def restore(self) -> None:
        """Go back to the newest checkpoint that can be read, and cut the logs to it."""
        assert self.folder is not None
        folder = self.folder
        with writing(folder.path):
            folder.sweep()
            (folder.path / DIVERGED).unlink(missing_ok=True)
            folder.note(self.simulation)
            self._restore_newest()
            for replica, record in zip(self.simulation.replicas, self.records, strict=True):
                self._restore_logs(folder, replica.seed, record)
            self._note_versions()

    def _restore_newest(self) -> None:
        assert self.folder is not None
        kept = [path for name in (NEWEST, CURRENT, PREVIOUS) if (path := self.folder.path / name).is_file()]
        if not kept:
            self.notes.append("there was no checkpoint yet: the run starts anew")
            return
        errors = []
        for path in kept:
            try:
                self.keeper.restore(self.simulation, path)
            except EvenhandError as error:
                errors.append(str(error))
                continue
            self.notes += errors
            said = "went back to the checkpoint before it, at" if errors else "continued after"
            self.notes.append(f"{said} round {self.simulation.round:,} of {self.simulation.settings.rounds:,}")
            return
        place = self.folder.path
        raise EvenhandError(
            f"{'; '.join(errors)}; no checkpoint is left to continue from (evenhand run --config "
            f"{place / DESCRIPTION} --out {place} --force starts anew)"
        )

    def _restore_logs(self, folder: RunFolder, seed: int, record: Record) -> None:
        place, reached = folder.seed(seed), self.simulation.round
        for name in (ROUNDS, TIMING):
            _cut(place / name, reached - 1, _round_of_record)
        measured_until = reached or -1  # a run that starts anew measures again before its first round
        _cut(place / CLIENTS, measured_until, _round_of_row)
        _cut(place / PREDICTED, measured_until, _round_of_record)
        record.rounds = _records(place / ROUNDS)
        record.seconds = folder.seconds(seed, reached)
        _, _, record.evaluations = _read_clients(place / CLIENTS)
        _add_predicted(place / PREDICTED, record.evaluations)
        measured = 1 + reached // self.simulation.settings.eval_every if reached else 0
        if len(record.rounds) != reached or len(record.evaluations) < measured:
            raise EvenhandError(
                f"{str(place)!r} lacks part of the log up to the checkpoint's round {reached:,}; the run cannot go on"
            )
        record.rounds_written, record.evaluations_written = len(record.rounds), len(record.evaluations)

    def _note_versions(self) -> None:
        assert self.folder is not None
        path, here = self.folder.path / VERSIONS, versions(self.simulation.device)
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError):
            kept = {**here, "id": uuid4().hex, "started": None, "resumed": []}
        for name in ("evenhand", "torch", "numpy", "device", "threads"):
            if kept.get(name) != here[name]:
                self.notes.append(
                    f"{name} was {kept.get(name)} at the start and is {here[name]} now: the last digits may differ"
                )
        kept["resumed"] = [*kept.get("resumed", []), {"date": now(), "round": self.simulation.round, **here}]
        write_json(path, kept)

    # ---- the end, planned or not

    def finish(self, runs: Runs) -> None:
        """Write what is known at the end, and remove the checkpoints."""
        assert self.folder is not None
        from safetensors.torch import save

        place = self.folder.path
        with writing(place, self._advice):
            self._flush()
            for run in runs:
                run.folder = self.folder.seed(run.seed)
                if run.cells is not None and run.predicted is not None:
                    rows = by_client_text(run.names, run.cells, run.predicted)
                    storage.write_bytes(run.folder / BY_CLIENT, rows.encode())
                for name, tensors in ((MODEL, run.model), (PERSONAL, run.personal)):
                    if tensors is not None:
                        storage.write_bytes(run.folder / name, save(tensors, {"format": "pt"}))
            runs.report(place / REPORT)
            write_json(place / SUMMARY, runs.summary())
            for name in (NEWEST, CURRENT, PREVIOUS):
                (place / name).unlink(missing_ok=True)
            self.folder.sweep()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and a polite kill wait for the end of the round; a second one does not."""
        if self.folder is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop is not None:
                raise KeyboardInterrupt
            self._stop = number
            sys.stderr.write("\nstopping after this round and saving (once more: at once, from the last checkpoint)\n")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self) -> None:
        assert self.folder is not None
        assert self._stop is not None
        if self.simulation.round == self.simulation.settings.rounds:
            return  # that was the last round anyway
        self._checkpoint()
        raise Interrupted(
            f"stopped after round {self.simulation.round:,} of {self.simulation.settings.rounds:,}; nothing is lost: "
            f"{self.folder.command} goes on",
            self.folder.path,
            self._stop,
        )
