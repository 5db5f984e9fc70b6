"""How the program behind several rows of a table outlives a sudden end: the same command goes on where it was kept.

A run that a person asked for has a folder to be read (`recording`). A program trains many methods and seeds at once,
and what is kept of it is for nobody to read: the states in one file, and before that, each time, what is new of the
histories in a further one, so that what the states go back to is always there.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import cast

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.engine import checkpoint
from evenhand.engine.simulation import Simulation
from evenhand.recording import Recorder, next_checkpoint

EVERY = 60.0  # seconds, at least
RUNS, STATES, HISTORY = "runs.json", "states.safetensors", "history-{}.safetensors"
UNREAD = ("coefficients", "remembered_clients", "excluded", "notes")  # long, and no measure of a table reads them


class Unfinished:
    """The folder of one program; there only while that has trained for a while and its numbers are not written down."""

    def __init__(self, place: Path, runs: Sequence[tuple[str, int]]) -> None:
        self.place, self.runs = place, runs
        self.spent = 0.0  # seconds, by the commands before this one
        self._started = monotonic()
        self._due = self._started + EVERY
        self._before = 0  # the round up to which histories are on disk
        self._known: list[tuple[int, int]] = []  # how many rounds and evaluations of each replica that is

    def resume(self, recorder: Recorder) -> bool:
        """Put a fresh recorder where the program was, if anything is kept.

        False: what was kept cannot be used and is gone, and the recorder may be half-way there.
        """
        try:
            if (self.place / STATES).is_file():
                self._resume(recorder)
            else:
                self.remove()
        except (EvenhandError, KeyError, TypeError, ValueError) as error:
            said = f"what was kept of an unfinished program cannot be used ({error}); it starts anew"
            warnings.warn(said, stacklevel=2)
            self.remove()
            return False
        self._count(recorder)
        return True

    def _resume(self, recorder: Recorder) -> None:
        checkpoint.restore(cast(Simulation, recorder.simulation), self.place / STATES)
        reached, before = recorder.simulation.round, 0
        for path in sorted(self.place.glob(HISTORY.format("*")), key=_until):
            if _until(path) > reached:  # the states that belong to it were never written
                path.unlink()
                continue
            kept = storage.read(path, "history")
            if kept["after"] != before:
                raise EvenhandError(f"{str(self.place)!r} lacks what came before {path.name}")
            before, self.spent = _until(path), float(kept["spent"])
            for record, told in zip(recorder.records, kept["replicas"], strict=True):
                record.rounds += told["rounds"]
                record.seconds += told["seconds"]
                record.evaluations += told["evaluations"]
        if before != reached:
            raise EvenhandError(f"{str(self.place)!r} lacks what came after round {before:,}")

    def after_round(self, recorder: Recorder) -> None:
        """Keep the program as it is, from time to time."""
        started = monotonic()
        if started < self._due or recorder.simulation.round >= recorder.simulation.settings.rounds:
            return
        try:
            self._keep(recorder)
        except OSError as error:  # the training itself needs no disk
            said = f"an unfinished program cannot be kept in {str(self.place)!r} ({error}); it trains on without that"
            warnings.warn(said, stacklevel=2)
            self._due = float("inf")
            return
        self._due = next_checkpoint(started, EVERY)

    def _keep(self, recorder: Recorder) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        storage.write_json(self.place / RUNS, self.runs)
        fresh = [
            {
                "rounds": [
                    {name: said for name, said in one.items() if name not in UNREAD} for one in record.rounds[rounds:]
                ],
                "seconds": record.seconds[rounds:],
                "evaluations": record.evaluations[evaluations:],
            }
            for record, (rounds, evaluations) in zip(recorder.records, self._known, strict=True)
        ]
        path = self.place / HISTORY.format(recorder.simulation.round)
        spent = self.spent + monotonic() - self._started
        storage.write(path, "history", {"after": self._before, "spent": spent, "replicas": fresh})
        checkpoint.save(cast(Simulation, recorder.simulation), self.place / STATES)
        self._count(recorder)

    def _count(self, recorder: Recorder) -> None:
        self._before = recorder.simulation.round
        self._known = [(len(record.rounds), len(record.evaluations)) for record in recorder.records]

    def remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)


def sweep(folder: Path, known: Collection[tuple[str, int]]) -> None:
    """Remove the programs of which every run has its numbers, whatever command they were begun by."""
    for place in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError, ValueError):
            runs = json.loads((place / RUNS).read_text())
            if all((digest, seed) in known for digest, seed in runs):
                shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()  # only if it is empty


def _until(path: Path) -> int:
    """The round up to which a history goes."""
    return int(path.stem.partition("-")[2])
