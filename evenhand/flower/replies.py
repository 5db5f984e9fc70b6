"""What clients' replies say, checked: who they are, their updates and numbers, how they are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict
from torch import Tensor

from evenhand.constraints import Cells, Sums
from evenhand.engine.groups import Told
from evenhand.flower import wire
from evenhand.flower.roster import Member, Roster
from evenhand.flower.wire import Form, Unusable

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Heard:
    """The good replies of a round: whose they are, their updates as rows, and what they say of themselves."""

    positions: list[int]
    rows: Tensor
    sizes: Floats
    losses: Floats | None
    accuracies: Floats | None
    trained: Floats | None
    sums: Sums | None


@dataclass
class Reader:
    """Reads the replies of one round; those that cannot be used are named with the reason."""

    form: Form
    model: Tensor  # that was sent
    wanted: Sequence[str]
    cells: Cells | None
    sums: Mapping[int, Sums]  # that are known already
    also: Callable[[int, RecordDict], None]  # whatever else is read of a reply

    def read(self, good: Mapping[int, RecordDict], rows: Tensor) -> tuple[Heard | None, dict[int, str]]:
        """The usable replies in ascending order of position; None where there is none."""
        positions, numbers, sums, failed = list[int](), list[dict[str, float]](), list[Sums](), dict[int, str]()
        for place in sorted(good):
            try:
                self._update(good[place], rows[len(positions) : len(positions) + 1])
                found = self._numbers(good[place])
                if wire.BY_CELL in self.wanted and self.cells is not None:
                    sums.append(self.sums.get(place) or wire.read_sums(good[place], self.cells))
                self.also(place, good[place])
            except Unusable as error:
                failed[place] = str(error)
                continue
            positions.append(place)
            numbers.append(found)
        return (self._heard(positions, rows, numbers, sums) if positions else None), failed

    def _update(self, content: RecordDict, row: Tensor) -> None:
        """A client sends its trained model, as Flower's apps do, or the update itself."""
        if wire.UPDATE in content.array_records:
            self.form.place(content.array_records[wire.UPDATE], row)
        else:
            self.form.place(wire.model_in(content), row, self.model)

    def _numbers(self, content: RecordDict) -> dict[str, float]:
        found = {"sizes": wire.number_in(content, wire.SAMPLES, low=0.0)}
        if wire.BEFORE in self.wanted:
            found["losses"] = wire.number_in(content, wire.LOSS)
            found["accuracies"] = wire.number_in(content, wire.ACCURACY, low=0.0)
        if wire.AFTER in self.wanted:
            found["trained"] = wire.number_in(content, wire.TRAINED_LOSS)
        return found

    def _heard(
        self, positions: list[int], rows: Tensor, numbers: Sequence[Mapping[str, float]], sums: Sequence[Sums]
    ) -> Heard:
        columns = {name: np.array([entry[name] for entry in numbers]) for name in numbers[0]}
        together = wire.joined_sums(sums) if sums else None
        if together is not None and self.cells is not None:
            columns["losses"], columns["accuracies"] = Told(self.cells, together, [], {}).measured
        losses, accuracies, trained = (columns.get(name) for name in ("losses", "accuracies", "trained"))
        return Heard(positions, rows[: len(positions)], columns["sizes"], losses, accuracies, trained, together)


def member(content: RecordDict) -> Member:
    """A client's description of itself."""
    record = content.config_records.get(wire.CLIENT)
    if record is None or not str(record.get("name", "")).strip():
        raise Unusable("its description has no name")
    name, place = " ".join(str(record["name"]).split()), record.get("place")
    train, test = (int(wire.number_in(content, key, low=0.0)) for key in (wire.SAMPLES, wire.TEST_SAMPLES))
    return Member(name, train, test, place if isinstance(place, int) and not isinstance(place, bool) else None)


def evaluation(
    server_round: int, roster: Roster, good: Mapping[int, RecordDict], cells: Cells | None
) -> tuple[dict[str, Any], Integers | None, dict[int, str]]:
    """An entry of the history: every client's own accuracy and loss, not-a-number for whoever did not answer.

    Also the predictions by client and cell, where there are groups; and whose reply cannot be used.
    """
    count = len(roster.members)
    accuracies, losses = np.full((2, count), np.nan)
    predicted = None if cells is None else np.zeros((count, cells.count, cells.classes), dtype=np.int64)
    failed = {}
    for place, content in good.items():
        try:
            if wire.number_in(content, wire.SAMPLES, low=0.0) == 0:
                continue
            if predicted is not None:
                predicted[place] = wire.numbers_in(content, wire.PREDICTED, predicted[0].size).reshape(
                    predicted[0].shape
                )
            accuracies[place] = wire.number_in(content, wire.ACCURACY, low=0.0)
            loss = wire.metrics_in(content).get(wire.LOSS)
            losses[place] = float(loss) if isinstance(loss, (int, float)) else np.nan  # a loss may be infinite
        except Unusable as error:
            failed[place] = str(error)
    weights = np.where(np.isfinite(accuracies), roster.test_samples, 0)
    total = max(int(weights.sum()), 1)
    entry = {
        "round": server_round,
        "accuracies": accuracies,
        "losses": losses,
        "pooled_accuracy": float(np.nansum(accuracies * weights) / total),
        "pooled_loss": float(np.nansum(losses * weights) / total),
    }
    return entry | ({} if predicted is None else {"predicted": predicted.sum(axis=0)}), predicted, failed


def served(entry: Mapping[str, Any]) -> MetricRecord | None:
    """How well and how evenly the clients are served, in a few numbers; None where none is known."""
    known = entry["accuracies"][np.isfinite(entry["accuracies"])]
    if not len(known):
        return None
    return MetricRecord(
        {
            "pooled-accuracy": entry["pooled_accuracy"],
            "pooled-loss": entry["pooled_loss"],
            "mean-accuracy": float(known.mean()),
            "worst-accuracy": float(known.min()),
            "std": float(known.std()),
        }
    )
