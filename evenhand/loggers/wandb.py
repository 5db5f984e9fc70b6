"""Weights & Biases: one run a seed and method, in the project that was named; with WANDB_MODE=offline on disk alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import sleep, time
from typing import Any

import numpy as np

from evenhand.callbacks import FINISHED, Point, Tracked
from evenhand.loggers.base import NOTHING, ROUNDS, Logger, library

BLOCK, FILE_HEAD, HEAD = 32768, 7, 7  # bytes, in the files of Weights & Biases
SETTLE_SECONDS = 10.0
WHOLE, LAST = 1, 4  # kinds of pieces of a record: all of it, its last one


class Wandb(Logger):
    """Metrics of every round and evaluation, the distribution of the clients' accuracies, the settings as config."""

    name = "Weights & Biases"

    def __init__(self, project: str = "") -> None:
        super().__init__()
        self.project = project or "evenhand"
        self._wandb = library("wandb", "wandb")
        self._runs: dict[str, Any] = {}

    def open(self, run: Tracked) -> int:
        opened = self._wandb.init(
            project=self.project,
            id=run.id,
            name=run.name,
            group=run.group or None,
            job_type=run.label,
            config=run.experiment.to_dict(),
            resume="allow",
            reinit="create_new",  # the seeds of a run train, and are logged, at the same time
            settings=self._wandb.Settings(console="off"),
        )
        self._runs[run.id] = opened
        if opened.offline:
            return last_round(Path(opened.settings.sync_dir), run.id)
        return int(opened.summary.get(ROUNDS, NOTHING))

    def write(self, run: Tracked, point: Point) -> None:
        numbers: dict[str, Any] = point.scalars() | {ROUNDS: point.round}
        if point.evaluation is not None:
            accuracies = np.asarray(point.evaluation["accuracies"])
            numbers["clients/accuracies"] = self._wandb.Histogram(accuracies[np.isfinite(accuracies)], num_bins=20)
        self._runs[run.id].log(numbers, step=point.round)

    def close(self, run: Tracked, how: str) -> None:
        self._runs.pop(run.id).finish(exit_code=0 if how == FINISHED else 1)


def last_round(place: Path, id: str) -> int:
    """The last round in the files that earlier, offline parts of a run left beside its present folder."""
    rounds = [NOTHING]
    for path in place.parent.glob(f"offline-run-*-{id}*/run-{id}.wandb"):
        if path.parent != place:
            _settle(path)
            rounds += [int(row[ROUNDS]) for row in history(path) if ROUNDS in row]
    return max(rounds)


def _settle(path: Path) -> None:
    """Wait until a file grows no more: a service writes it, for a moment also after its run was ended or killed.

    One that was begun a while ago, and in which nothing is, belongs to a service that was killed as well.
    """
    begun, size = path.stat().st_mtime, -1
    while time() < begun + SETTLE_SECONDS and (size <= FILE_HEAD or path.stat().st_size > size):
        size = path.stat().st_size
        sleep(0.5)


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a .wandb file: a log of records in LevelDB's format, the rows among them as JSON by name."""
    messages = library("wandb.proto.wandb_internal_pb2", "wandb")
    for data in _records(path.read_bytes()):
        record = messages.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(data: bytes) -> Iterator[bytes]:
    """Records are cut into pieces that do not cross blocks; what was not written to its end is left out."""
    place, pieces = FILE_HEAD, b""
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        start, place = place + HEAD, place + HEAD + length
        if not kind or place > len(data):
            return
        pieces += data[start:place]
        if kind in (WHOLE, LAST):
            yield pieces
            pieces = b""
