"""TensorBoard: one folder of event files a run, below the folder that was named."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from time import sleep, time
from typing import Any

import numpy as np

from evenhand.callbacks import Point, Tracked
from evenhand.folders import file_name
from evenhand.loggers.base import NOTHING, Logger, library

MARK = "evenhand-run.txt"  # says whose events a folder holds
EVENTS = "events.out.tfevents."


class TensorBoard(Logger):
    """Scalars of every round and evaluation, and the distribution of the clients' accuracies."""

    name = "TensorBoard"

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.folder = Path(folder or "tensorboard")
        self._loading = library("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
        self._records = library("tensorboard.summary.writer.record_writer", "tensorboard")
        self._events = library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._kinds = library("torch.utils.tensorboard.summary", "tensorboard")
        self._writers: dict[str, Any] = {}

    def open(self, run: Tracked) -> int:
        place = self._place(run)
        before = sorted(place.glob(f"{EVENTS}*"))
        last = max(map(self._last_round, before), default=NOTHING)
        # TensorBoard reads the files of a folder by their names, which begin with the second they were begun in.
        while before and before[-1].name >= f"{EVENTS}{int(time()):010d}.":
            sleep(0.05)
        path = place / f"{EVENTS}{int(time()):010d}.{platform.node() or 'host'}.{os.getpid()}"
        # Not its own writer: that one writes in a thread, which would lose events on a kill and fail out of our sight.
        self._writers[run.id] = self._records.RecordWriter(path.open("xb"))
        self._add(run, file_version="brain.Event:2")
        if last == NOTHING:
            text = "\n".join(f"    {line}" for line in run.experiment.to_toml().splitlines())
            self._add(run, summary=self._kinds.text("experiment", text), step=0)
        return last

    def _add(self, run: Tracked, **event: Any) -> None:
        writer = self._writers[run.id]
        writer.write(self._events.Event(wall_time=time(), **event).SerializeToString())
        writer.flush()

    def _place(self, run: Tracked) -> Path:
        """The run's own folder; where another run of that name has been, the next free one."""
        parts = [file_name(part) for part in run.name.split("/")]
        wanted = self.folder.joinpath(*parts)
        count, place = 1, wanted
        while (mark := place / MARK).is_file() and mark.read_text() != run.id:
            count += 1
            place = wanted.with_name(f"{wanted.name}-{count}")
        place.mkdir(parents=True, exist_ok=True)
        mark.write_text(run.id)
        return place

    def _last_round(self, path: Path) -> int:
        events = self._loading.EventFileLoader(str(path)).Load()
        steps = [
            event.step
            for event in events
            if any(value.tag.startswith(("clients/", "round/")) for value in event.summary.value)
        ]
        return max(steps, default=NOTHING)

    def write(self, run: Tracked, point: Point) -> None:
        """All of a point is one event: it is there as a whole, or not at all."""
        found = [self._kinds.scalar(name, value) for name, value in point.scalars().items()]
        if point.evaluation is not None:
            accuracies = np.asarray(point.evaluation["accuracies"])
            known = accuracies[np.isfinite(accuracies)]
            found.append(self._kinds.histogram("clients/accuracies", known, bins=20))
        event = type(found[0])(value=[value for summary in found for value in summary.value])
        self._add(run, summary=event, step=point.round)

    def close(self, run: Tracked, how: str) -> None:
        self._writers.pop(run.id).close()
