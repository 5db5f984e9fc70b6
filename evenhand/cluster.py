"""A comparison spread over a Ray cluster: every method under every seed is a task of its own.

The numbers are those of a comparison on one machine: a run depends on nothing but its description, its data and the
number of threads, which goes with the tasks. A task asks for as many cores as this process uses (OMP_NUM_THREADS=1
makes many small ones), and for a GPU where the experiment uses one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenhand.checks import EvenhandError
from evenhand.data import Dataset
from evenhand.experiment import Experiment, prepare, runs_notes
from evenhand.experiment import play as finish
from evenhand.folders import DIVERGED, Diverged, Progress, Recorder, RunFolder, Status, write_json, writing
from evenhand.methods import Method
from evenhand.runs import Run, Runs


def ray_or_hint() -> Any:
    """Ray, or an error that says how to get it."""
    try:
        import ray
    except ImportError as missing:
        raise EvenhandError("--engine ray needs Ray: pip install 'evenhand[ray]' (or pip install ray)") from missing
    return ray


@dataclass
class Outcome:
    """What a task sends back: a run, or the round in which it diverged."""

    run: Run | None
    seconds: Sequence[float | None] = ()
    diverged: int = 0
    why: str = ""


def _one(experiment: Experiment, dataset: Dataset, threads: int, label: str) -> Outcome:
    """One method under one seed, on whatever machine this is."""
    torch.set_num_threads(threads)
    recorder = Recorder(prepare(experiment, dataset=dataset), None, label=label)
    try:
        found = finish(experiment, recorder)
    except Diverged as end:
        return Outcome(None, diverged=end.round, why=str(end))
    one: Run = found[0]
    return Outcome(replace(one, partition=None), recorder.records[0].seconds)


def play(
    chosen: Experiment,
    methods: Mapping[str, Method],
    places: Mapping[str, RunFolder | None],
    dataset: Dataset,
    progress: Progress | None = None,
) -> tuple[dict[str, Runs], dict[str, int]]:
    """Run every method under every seed, wherever there is room; and which methods diverged in which round.

    places: a folder a method, or None; they are filled as a run on this machine fills them.
    """
    ray = ray_or_hint()
    with _cluster(ray):
        cores, device = torch.get_num_threads(), chosen.torch_device()
        task = ray.remote(_one).options(num_cpus=cores, num_gpus=int(device.type == "cuda"), max_retries=3)
        shared = ray.put(dataset)
        waiting = {
            task.remote(replace(chosen, method=entry, seeds=(seed,)), shared, cores, label): (label, seed)
            for label, entry in methods.items()
            for seed in chosen.seeds
        }
        found: dict[tuple[str, int], Outcome] = {}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            label, seed = waiting.pop(done)
            found[label, seed] = _result(ray, done, label, seed)
            last = found[label, seed].run
            if progress is not None and last is not None:
                name = f"{label}, seed {seed}"
                progress(Status(name, chosen.rounds, chosen.rounds, [last.evaluations[-1]]))
    runs: dict[str, Runs] = {}
    diverged: dict[str, int] = {}
    for label, entry in methods.items():
        outcomes = [found[label, seed] for seed in chosen.seeds]
        ends = [outcome for outcome in outcomes if outcome.run is None]
        recorder = _begun(replace(chosen, method=entry), places[label], dataset, label)
        if ends:  # the seeds of a method end together, with the first of them that diverges
            first = min(ends, key=lambda outcome: outcome.diverged)
            diverged[label] = first.diverged
            if recorder.folder is not None:
                with writing(recorder.folder.path):
                    write_json(recorder.folder.path / DIVERGED, {"round": first.diverged, "why": first.why})
        else:
            runs[label] = _together(replace(chosen, method=entry), recorder, outcomes)
    return runs, diverged


def _begun(one: Experiment, place: RunFolder | None, dataset: Dataset, label: str) -> Recorder:
    """A recorder for one method, whose folder says what is run."""
    simulation = prepare(one, dataset=dataset)
    if place is not None:
        with writing(place.path):
            place.path.mkdir(parents=True, exist_ok=True)
        place.begin(one.to_toml(), simulation)
    return Recorder(simulation, place, label=label)


def _together(one: Experiment, recorder: Recorder, outcomes: Sequence[Outcome]) -> Runs:
    """The seeds of a method as one machine would have run them, in its folder too."""
    seeds = []
    for outcome, record, replica in zip(outcomes, recorder.records, recorder.simulation.replicas, strict=True):
        assert outcome.run is not None
        record.rounds, record.evaluations = outcome.run.rounds, outcome.run.evaluations
        record.seconds = list(outcome.seconds)
        seeds.append(replace(outcome.run, partition=replica.partition))
    found = Runs(one, seeds, None if recorder.folder is None else recorder.folder.path)
    found.notes = tuple(runs_notes(recorder.simulation, found))
    if recorder.folder is not None:
        recorder.finish(found)
    return found


def _result(ray: Any, task: Any, label: str, seed: int) -> Outcome:
    try:
        outcome: Outcome = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EvenhandError):
            raise EvenhandError(f"{label}, seed {seed}: {cause}") from error
        raise EvenhandError(f"{label}, seed {seed} failed on the cluster: {cause or error}") from error
    except ray.exceptions.RayError as error:
        raise EvenhandError(
            f"{label}, seed {seed} was lost on the cluster ({error}); --resume runs it again"
        ) from error
    return outcome


@contextlib.contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """The cluster that this process is in or that RAY_ADDRESS names; else one on this machine, while it is needed."""
    if ray.is_initialized():
        yield
        return
    paths = os.pathsep.join(path for path in sys.path if path)  # networks of one's own are found there as here
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    if os.environ.get("RAY_ADDRESS"):
        del options["include_dashboard"]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}}, **options)
    try:
        yield
    finally:
        ray.shutdown()
