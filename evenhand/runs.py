"""What a run gives: every client's history, the measures over it, the model; for one seed and for several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from evenhand.checks import EvenhandError
from evenhand.data import Partition
from evenhand.fairness import MEASURES, ClientFairness, Summary, client_fairness, curves

if TYPE_CHECKING:
    from evenhand.experiment import Experiment

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

MODEL = "model.safetensors"
PERSONAL = "personal.safetensors"
OF_LOSSES = ("mean", "std", "worst", "best")


def pandas_or_hint() -> Any:
    """pandas, or how to get it."""
    try:
        import pandas
    except ImportError as missing:
        raise EvenhandError("tables need pandas: pip install 'evenhand[report]' (or pip install pandas)") from missing
    return pandas


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
        }

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

    def _tensors(self, name: str, otherwise: str) -> dict[str, Tensor]:
        if self.folder is None or not (self.folder / name).is_file():
            raise EvenhandError(f"seed {self.seed} has {otherwise}")
        from safetensors.torch import load_file

        return load_file(self.folder / name)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a page about this seed that needs nothing else to be read."""
        return Runs(self.experiment, [self]).report(path)


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
        return f"{self.experiment}{several}\n{self.fairness.sentence()}"

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
