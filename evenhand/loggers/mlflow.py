"""MLflow: one MLflow run a seed and method, in the MLflow experiment `evenhand` (or MLFLOW_EXPERIMENT_NAME)."""

from __future__ import annotations

import os
from time import monotonic, time
from typing import Any

from evenhand.callbacks import DIVERGED, FAILED, FINISHED, STOPPED, Point, Tracked
from evenhand.checks import EvenhandError
from evenhand.loggers.base import NOTHING, ROUNDS, Logger, flat, library, missing

ID = "evenhand.id"
STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", DIVERGED: "FAILED", FAILED: "FAILED"}
SEND_SECONDS = 1.0  # between requests: one of them takes longer than many a round
AT_ONCE = 1000  # numbers in a request, MLflow's limit
SETTINGS_AT_ONCE = 100
# A server that is gone must not hold up the training for the quarter of an hour that MLflow would try.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class Mlflow(Logger):
    """Metrics of every round and evaluation; the settings as parameters."""

    name = "MLflow"

    def __init__(self, uri: str = "") -> None:
        super().__init__()
        for variable, value in PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._entities = library("mlflow.entities", "mlflow")
        client = library("mlflow", "mlflow").MlflowClient
        try:
            self._client = client(uri or None)
        except ImportError as error:  # of what MLflow needs for a database
            raise missing(error, "mlflow") from error
        except Exception as error:  # MLflow's own kinds, and those of the database behind it
            reason = str(error).strip().partition("\n")[0]
            forms = "a database is written mlflow:sqlite:///FILE, a server mlflow:http://HOST:PORT"
            raise EvenhandError(f"the mlflow logger cannot use {uri!r}; {forms}: {reason}") from error
        self._runs: dict[str, str] = {}
        self._waiting: dict[str, list[Any]] = {}
        self._sent: dict[str, float] = {}

    def open(self, run: Tracked) -> int:
        experiment = self._experiment()
        self._waiting[run.id], self._sent[run.id] = [], monotonic()
        found = self._client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'", max_results=1)
        if found:
            self._runs[run.id] = found[0].info.run_id
            self._client.update_run(self._runs[run.id], status="RUNNING")
            return int(found[0].data.metrics.get(ROUNDS, NOTHING))
        tags = {ID: run.id, "method": run.label, "data": run.experiment.data_name, "seed": str(run.seed)}
        if run.group:
            tags["group"] = run.group
        made = self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._runs[run.id] = made.info.run_id
        named = [self._entities.Param(name, str(value)) for name, value in flat(run.experiment.to_dict())]
        for start in range(0, len(named), SETTINGS_AT_ONCE):
            self._client.log_batch(self._runs[run.id], params=named[start : start + SETTINGS_AT_ONCE])
        return NOTHING

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "evenhand"
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found is not None else self._client.create_experiment(name)

    def write(self, run: Tracked, point: Point) -> None:
        stamp, waiting = int(1000 * time()), self._waiting[run.id]
        numbers = point.scalars() | {ROUNDS: float(point.round)}
        if len(waiting) + len(numbers) > AT_ONCE:
            self._send(run)
        waiting += [self._entities.Metric(name, value, stamp, point.round) for name, value in numbers.items()]
        if monotonic() >= self._sent[run.id] + SEND_SECONDS:
            self._send(run)

    def _send(self, run: Tracked) -> None:
        waiting = self._waiting[run.id]
        if waiting:
            self._client.log_batch(self._runs[run.id], metrics=list(waiting))
            waiting.clear()
        self._sent[run.id] = monotonic()

    def close(self, run: Tracked, how: str) -> None:
        self._send(run)
        self._client.set_terminated(self._runs[run.id], STATUS[how])
