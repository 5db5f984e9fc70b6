"""What a seed of a run writes down as it goes: records of rounds, and every client at every evaluation."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError
from evenhand.runs import Integers
from evenhand.storage import to_json

ROUNDS = "rounds.jsonl"
TIMING = "timing.jsonl"
CLIENTS = "clients.csv"
PREDICTED = "predicted.jsonl"  # where there are groups: how often each class is predicted, by cell, at each evaluation
COLUMNS = ("round", "client", "accuracy", "loss", "test_samples")


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


def add_predicted(path: Path, evaluations: Sequence[dict[str, Any]]) -> None:
    """Put the predictions by cell beside the evaluations that they belong to."""
    found = {entry["round"]: entry["predicted"] for entry in records(path)}
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


def records(path: Path) -> list[dict[str, Any]]:
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


def round_of_record(path: Path, number: int, line: bytes) -> int:
    return int(_record(path, number, line)["round"])


def round_of_row(path: Path, number: int, line: bytes) -> int:
    try:
        return 0 if number == 1 else int(line.split(b",", 1)[0])
    except ValueError:
        raise _damaged(path, number) from None


def cut(path: Path, last: int, round_of: Callable[[Path, int, bytes], int]) -> None:
    """Keep the first lines of a log, up to the first one of a round after the last."""
    length = 0
    for number, line in enumerate(_whole_lines(path), 1):
        if round_of(path, number, line) > last:
            break
        length += len(line)
    if path.is_file():
        os.truncate(path, length)


def read_clients(path: Path) -> tuple[tuple[str, ...], Integers, list[dict[str, Any]]]:
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
