"""How a run is written down while it trains, and survives whatever stops it.

The logs only grow, every second or so, and are on disk before a checkpoint is; a checkpoint is written whole or not at
all. So after a sudden end the logs are cut back to the checkpoint's round, and the same rounds follow again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import numpy as np

from evenhand import storage
from evenhand.callbacks import Audience, points
from evenhand.checks import EvenhandError, NoUsableClient
from evenhand.engine import checkpoint
from evenhand.fairness import curves, few
from evenhand.folders import (
    CURRENT,
    DESCRIPTION,
    DIVERGED,
    HOLDINGS,
    NEWEST,
    PREVIOUS,
    REPORT,
    SUMMARY,
    VERSIONS,
    DiskError,
    RunFolder,
    Training,
    now,
    versions,
    writing,
)
from evenhand.logs import (
    CLIENTS,
    PREDICTED,
    ROUNDS,
    TIMING,
    Record,
    add_predicted,
    cut,
    read_clients,
    records,
    round_of_record,
    round_of_row,
)
from evenhand.runs import BY_CLIENT, MODEL, PERSONAL, by_client_text
from evenhand.storage import write_json

if TYPE_CHECKING:
    from evenhand.runs import Runs

CHECKPOINT_EVERY = 20.0  # seconds
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into checkpoints
LOG_EVERY = 1.0  # seconds between writes to the logs, for those who watch
WORST_PERCENT = 10.0  # of the clients, in a progress bar


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


class Keeper(Protocol):
    """Writes and reads checkpoints of such a training."""

    def save(self, simulation: Any, path: Path) -> None: ...

    def restore(self, simulation: Any, path: Path) -> None: ...


def next_checkpoint(started: float, every: float) -> float:
    """When to write the next one, after one that was begun at `started`."""
    took = monotonic() - started
    return monotonic() + max(every, took / CHECKPOINT_SHARE if every else 0.0)


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
        self._due = next_checkpoint(started, self.every)

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
            cut(place / name, reached - 1, round_of_record)
        measured_until = reached or -1  # a run that starts anew measures again before its first round
        cut(place / CLIENTS, measured_until, round_of_row)
        cut(place / PREDICTED, measured_until, round_of_record)
        record.rounds = records(place / ROUNDS)
        record.seconds = folder.seconds(seed, reached)
        _, _, record.evaluations = read_clients(place / CLIENTS)
        add_predicted(place / PREDICTED, record.evaluations)
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
