"""What a run gives: every client's history, the measures over it, the model; for one seed and for several."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from evenhand.chance import wilson
from evenhand.checks import EvenhandError
from evenhand.constraints import Cells
from evenhand.counts import CLIENT_MEASURES, client_measures
from evenhand.data import Partition
from evenhand.fairness import MEASURES, ClientFairness, Summary, client_fairness, curves
from evenhand.holdings import Holdings
from evenhand.tables import pandas_or_hint

if TYPE_CHECKING:
    from evenhand.experiment import Experiment

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

MODEL = "model.safetensors"
BY_CLIENT = "predicted_by_client.csv"  # where there are groups: who got which prediction, at the end
PERSONAL = "personal.safetensors"
OF_LOSSES = ("mean", "std", "worst", "best")


def said_once(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Notes with the name of the one they are about; what holds for all is said once, without a name.

    >>> said_once({"seed 0": ["shared", "small"], "seed 1": ["shared"]})
    ['shared', 'seed 0: small']
    """
    shared = [note for note in next(iter(notes.values()), ()) if all(note in told for told in notes.values())]
    return shared + [f"{name}: {note}" for name, told in notes.items() for note in told if note not in shared]


@dataclass
class Run:
    """One seed of an experiment: its rounds, its clients, its model."""

    experiment: Experiment
    seed: int
    names: tuple[str, ...]
    test_samples: Integers
    rounds: list[dict[str, Any]] = field(repr=False)
    """One record a round: who was asked, losses, coefficients, conflicts, bytes, ..."""
    evaluations: list[dict[str, Any]] = field(repr=False)
    """One entry an evaluation: after how many rounds, and every client's accuracy and loss on its own test data."""
    model: dict[str, Tensor] | None = field(default=None, repr=False)
    """Tensors by name; of a run read back from a folder, None until `load_model` is called."""
    personal: dict[str, Tensor] | None = field(default=None, repr=False)
    """Where clients train models of their own (Ditto): the same tensors with the clients as leading axis."""
    partition: Partition | None = field(default=None, repr=False)
    folder: Path | None = None
    cells: Cells | None = field(default=None, repr=False)
    """Where the data has sensitive attributes: the groups they make, and the cells by group and label."""
    predicted: Integers | None = field(default=None, repr=False)
    """How often each class is predicted at the end, clients x cells x classes; not kept by a run read back."""
    holdings: Holdings | None = field(default=None, repr=False)
    """Each client's samples by part and by class."""
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the data and the model are: fingerprint, classes, layers."""
    seconds: Sequence[float | None] = field(default=(), repr=False)
    """How long each round took; None where that is not known."""

    def __str__(self) -> str:
        return f"{self.experiment}, seed {self.seed}: {self.fairness.sentence()}"

    @property
    def accuracies(self) -> Floats:
        """Each client's accuracy on its own test data, at the end; not-a-number for a client without any."""
        return np.asarray(self._last["accuracies"])

    @property
    def losses(self) -> Floats:
        """Each client's loss on its own test data, at the end."""
        return np.asarray(self._last["losses"])

    @property
    def measured_clients(self) -> int:
        """How many clients are measured: those with test data."""
        return int((self.test_samples > 0).sum())

    @property
    def fairness(self) -> ClientFairness:
        """How well and how evenly the clients are served at the end."""
        return client_fairness(self.accuracies, losses=self.losses)

    @property
    def _last(self) -> dict[str, Any]:
        if not self.evaluations:
            raise EvenhandError(
                f"seed {self.seed} has not been measured yet: the run stopped before its first checkpoint"
            )
        return self.evaluations[-1]

    @cached_property
    def curves(self) -> dict[str, Floats]:
        """Every measure over the evaluations, by name; `round` says after how many rounds."""
        if not self.evaluations:
            return {"round": np.zeros(0)}
        accuracies = np.array([entry["accuracies"] for entry in self.evaluations])
        losses = np.array([entry["losses"] for entry in self.evaluations])
        found = curves(accuracies, losses=losses)
        return {
            "round": np.array([entry["round"] for entry in self.evaluations]),
            "pooled_accuracy": np.array([entry["pooled_accuracy"] for entry in self.evaluations]),
            "pooled_loss": np.array([entry["pooled_loss"] for entry in self.evaluations]),
            **{name: found[name] for name in MEASURES},
            **{f"loss_{name}": found[f"losses.{name}"] for name in OF_LOSSES},
            **self._group_curves(accuracies),
        }

    def _group_curves(self, accuracies: Floats) -> dict[str, Floats]:
        """Group fairness over the evaluations, and mFairFL's client fairness beside it."""
        if self.cells is None or any("predicted" not in entry for entry in self.evaluations):
            return {}
        by_cell = self.cells.measures(np.array([entry["predicted"] for entry in self.evaluations]))
        clients = [client_measures(np.nan_to_num(row) * self.test_samples, self.test_samples) for row in accuracies]
        return by_cell | {name: np.array([float(entry[name]) for entry in clients]) for name in CLIENT_MEASURES}

    def groups(self) -> Any:
        """One row a group: how many samples, how often right, how often each class is predicted (a pandas frame)."""
        return pandas_or_hint().DataFrame(self.group_rows())

    def group_rows(self) -> list[dict[str, Any]]:
        """Each group of the test data at the end, with Wilson intervals of its rates."""
        if self.cells is None or "predicted" not in self._last:
            raise EvenhandError("the data names no sensitive attribute, so there are no groups; name one (--sensitive)")
        tables = self.cells.tables(np.asarray(self._last["predicted"]))
        return [row for name, table in zip(self.cells.names, tables, strict=True) for row in [_group_row(name, table)]]

    def measures(self) -> dict[str, float]:
        """Every measure at the end, by name."""
        _ = self._last
        return {name: float(curve[-1]) for name, curve in self.curves.items()}

    @property
    def history(self) -> Any:
        """One row an evaluation: the pooled accuracy and every measure (a pandas frame)."""
        return pandas_or_hint().DataFrame({"seed": self.seed, **self.curves})

    @property
    def clients(self) -> Any:
        """One row a client and evaluation (a pandas frame)."""
        pandas, _ = pandas_or_hint(), self._last
        frames = [
            pandas.DataFrame(
                {
                    "seed": self.seed,
                    "round": entry["round"],
                    "client": self.names,
                    "accuracy": entry["accuracies"],
                    "loss": entry["losses"],
                    "test_samples": self.test_samples,
                }
            )
            for entry in self.evaluations
        ]
        return pandas.concat(frames, ignore_index=True)

    def load_model(self) -> dict[str, Tensor]:
        """The trained model's tensors by name, for `module.load_state_dict`."""
        if self.model is None:
            self.model = self._tensors(MODEL, "no model yet: the run is not finished")
        return self.model

    def load_personal(self) -> dict[str, Tensor]:
        """The clients' own models: the model's tensors with the clients as leading axis."""
        if self.personal is None:
            self.personal = self._tensors(PERSONAL, "no models of their own for the clients")
        return self.personal

    def load_predicted(self) -> Integers | None:
        """How often each class is predicted for each client's test samples of each cell (clients x cells x classes)."""
        path = None if self.folder is None else self.folder / BY_CLIENT
        if self.predicted is None and self.cells is not None and path is not None and path.is_file():
            self.predicted = read_by_client(path, self.names, self.cells)
        return self.predicted

    def _tensors(self, name: str, otherwise: str) -> dict[str, Tensor]:
        if self.folder is None or not (self.folder / name).is_file():
            raise EvenhandError(f"seed {self.seed} has {otherwise}")
        from safetensors.torch import load_file

        return load_file(self.folder / name)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a page about this seed that needs nothing else to be read."""
        return Runs(self.experiment, [self], None if self.folder is None else self.folder.parent).report(path)


def by_client_text(names: Sequence[str], cells: Cells, predicted: Integers) -> str:
    """Who got which prediction: one row a client, joint group, label and class that occurs."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("client", "group", "label", "predicted", "samples"))
    labels = cells.labels or tuple(map(str, range(cells.classes)))
    for client, cell, answer in np.argwhere(predicted).tolist():
        group, label = divmod(cell, cells.classes)
        count = int(predicted[client, cell, answer])
        table.writerow((names[client], cells.crossed[group], labels[label], labels[answer], count))
    return text.getvalue()


def read_by_client(path: Path, names: Sequence[str], cells: Cells) -> Integers:
    """Read back what `by_client_text` wrote."""
    labels = cells.labels or tuple(map(str, range(cells.classes)))
    found = np.zeros((len(names), cells.count, cells.classes), dtype=np.int64)
    clients, groups, classes = (
        {word: place for place, word in enumerate(words)} for words in (names, cells.crossed, labels)
    )
    for client, group, label, answer, count in list(csv.reader(path.read_text().splitlines()))[1:]:
        found[clients[client], groups[group] * cells.classes + classes[label], classes[answer]] = int(count)
    return found


def _group_row(name: str, table: Any) -> dict[str, Any]:
    """A group's rates from its counts, labels x predictions."""
    count, right = int(table.sum()), int(np.trace(table))
    low, high = wilson(right, count, 0.95)
    attribute, _, group = name.partition("=")
    found = {"attribute": attribute, "group": group, "samples": count, "accuracy": right / count if count else np.nan}
    found |= {"low": float(low), "high": float(high)}
    of_label, predicted = table.sum(1), table.sum(0)
    for place in range(len(table)) if len(table) > 2 else (1,):
        found[f"predicted_{place}"] = predicted[place] / count if count else np.nan
        found[f"found_{place}"] = table[place, place] / of_label[place] if of_label[place] else np.nan
    return found


class Runs(Sequence[Run]):
    """The runs of one experiment, one a seed, with what they say together."""

    def __init__(
        self, experiment: Experiment, runs: Iterable[Run], folder: Path | None = None, notes: Iterable[str] = ()
    ) -> None:
        self.experiment = experiment
        self.folder = folder
        self.notes = tuple(notes)
        self._runs = tuple(runs)

    def __getitem__(self, index: Any) -> Any:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        seeds = ", ".join(str(run.seed) for run in self._runs)
        place = "" if self.folder is None else f", in {str(self.folder)!r}"
        return f"<Runs of {self.experiment}; seeds {seeds}{place}>"

    def __str__(self) -> str:
        several = f", {len(self)} seeds" if len(self) > 1 else ""
        groups = f"\n{self.group_sentence()}" if self.group_sentence() else ""
        return f"{self.experiment}{several}\n{self.fairness.sentence()}{groups}"

    @property
    def fairness(self) -> ClientFairness:
        """How well and how evenly the clients are served at the end: every measure's mean over the seeds."""
        return _averaged([run.fairness for run in self._runs])

    @property
    def history(self) -> Any:
        """One row a seed and evaluation (a pandas frame)."""
        return pandas_or_hint().concat([run.history for run in self._runs], ignore_index=True)

    @property
    def clients(self) -> Any:
        """One row a seed, evaluation and client (a pandas frame)."""
        return pandas_or_hint().concat([run.clients for run in self._runs], ignore_index=True)

    def measured(self, name: str) -> Floats:
        """One measure at the end, one number a seed."""
        return np.array([run.measures()[name] for run in self._runs])

    def summary(self) -> dict[str, Any]:
        """Every measure at the end: of each seed, their mean and their standard deviation (of a sample; 0 for one)."""
        seeds = {str(run.seed): run.measures() for run in self._runs}
        names = next(iter(seeds.values()))
        columns = {name: np.array([entry[name] for entry in seeds.values()]) for name in names}
        spread = {name: float(column.std(ddof=1)) if len(column) > 1 else 0.0 for name, column in columns.items()}
        return {
            "experiment": str(self.experiment),
            "clients": len(self._runs[0].names),
            "rounds": int(self._runs[0].evaluations[-1]["round"]),
            "mean": {name: float(column.mean()) for name, column in columns.items()},
            "std": spread,
            "seeds": seeds,
        }

    def group_sentence(self) -> str:
        """How differently groups of people are treated at the end."""
        cells = self._runs[0].cells
        if cells is None:
            return ""
        value = 100 * self.measured("dp").mean()
        rows = [run.group_rows() for run in self._runs]
        right = {
            name: float(np.mean([seed[place]["accuracy"] for seed in rows])) for place, name in enumerate(cells.names)
        }
        worst = min(right, key=lambda name: right[name])
        return (
            f"Of the groups, {worst} is served worst: {100 * right[worst]:.1f}% right. A class is predicted for a "
            f"group up to {value:.1f} points more or less often than for everyone (demographic parity)."
        )

    def figure(self, name: str, path: str | Path) -> Path:
        """Write one figure of the report (`evenhand figure` lists them); the suffix says how: .svg, .pdf or .png."""
        from evenhand.report import draw_run

        return draw_run(self, name, path)

    def report(self, path: str | Path | None = None) -> Path:
        """Write a page about the run that needs nothing else to be read; default: into the run's folder."""
        from evenhand.report import write_run

        return write_run(self, path or (self.folder or Path()) / "report.html")


def _averaged(found: Sequence[Any]) -> Any:
    """The mean of equal records, number by number."""
    first = found[0]
    if len(found) == 1:
        return first
    values: dict[str, Any] = {}
    for entry in fields(first):
        column = [getattr(record, entry.name) for record in found]
        if is_dataclass(column[0]):
            values[entry.name] = _averaged(column)
        elif isinstance(column[0], Mapping) or column[0] is None:
            values[entry.name] = column[0]
        else:
            mean = float(np.mean(column))
            values[entry.name] = round(mean) if isinstance(column[0], int) else mean
    kind: type[Summary] = type(first)
    return kind(**values)
