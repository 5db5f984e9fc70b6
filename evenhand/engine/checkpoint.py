"""A simulation on disk at any round: one file, written atomically, from which it continues to the same numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.engine.rounds import Replica
from evenhand.engine.simulation import Simulation
from evenhand.state import State


def save(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Write the round, and each replica's model, state and record so far."""
    replicas = [
        {
            "seed": replica.seed,
            "method": replica.method.to_dict(),
            "partition": replica.partition.fingerprint(),
            "model": replica.model.cpu(),
            "state": None if replica.state is None else replica.state.to_plain(),
            "offset": None if replica.offset is None else replica.offset.cpu(),
            "personal": None if replica.personal is None else replica.personal.cpu(),
            "previous": _kept(replica.previous),
            "memo": dict(replica.memo),
            "predicted": replica.predicted,
            "diverged": replica.diverged,
            "rounds": replica.rounds,
            "evaluations": replica.evaluations,
        }
        for replica in simulation.replicas
    ]
    content = {"round": simulation.round, "data": simulation.data_fingerprint, "replicas": replicas}
    storage.write(path, "checkpoint", content)


def restore(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Put a freshly prepared simulation of the same experiment where the checkpoint was."""
    content = storage.read(path, "checkpoint")
    try:
        if content["data"] != simulation.data_fingerprint:
            raise EvenhandError(f"{str(path)!r} was made on other data than {simulation.dataset.name!r} is now")
        if len(content["replicas"]) != len(simulation.replicas):
            raise EvenhandError(
                f"{str(path)!r} holds {len(content['replicas'])} replicas, "
                f"the experiment has {len(simulation.replicas)}"
            )
        for replica, kept in zip(simulation.replicas, content["replicas"], strict=True):
            _restore(simulation, replica, kept, path)
        simulation.round = int(content["round"])
    except (KeyError, TypeError) as error:
        raise EvenhandError(f"{str(path)!r} is not a readable checkpoint: {error!r}") from error


def _restore(simulation: Simulation, replica: Replica, kept: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    found = (kept["seed"], kept["method"], kept["partition"])
    if found != (replica.seed, replica.method.to_dict(), replica.partition.fingerprint()):
        raise EvenhandError(f"{str(path)!r} belongs to another seed, method or partition than seed {replica.seed} here")
    replica.model = kept["model"].to(simulation.device)
    where = (
        simulation.settings.keep_on or simulation.device
    )  # where the rows were, for the same numbers to the last bit
    replica.state = None if kept["state"] is None else State.from_plain(kept["state"]).placed(where)
    replica.offset = None if kept["offset"] is None else kept["offset"].to(simulation.device)
    replica.personal = None if kept["personal"] is None else kept["personal"].to(simulation.device)
    kept_models = kept.get("previous") or {"clients": [], "rows": []}
    rows = [row.to(simulation.device) for row in kept_models["rows"]]
    replica.previous = dict(zip(map(int, kept_models["clients"]), rows, strict=True))
    replica.memo, replica.predicted, replica.diverged = kept["memo"], kept["predicted"], kept.get("diverged")
    replica.rounds = list(kept["rounds"])
    replica.evaluations = [{**entry, **_arrays(entry)} for entry in kept["evaluations"]]


def _kept(models: Mapping[int, Tensor]) -> dict[str, Any] | None:
    return {"clients": list(models), "rows": torch.stack(list(models.values())).cpu()} if models else None


def _arrays(entry: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(entry[name]) for name in ("accuracies", "losses", "predicted") if name in entry}
