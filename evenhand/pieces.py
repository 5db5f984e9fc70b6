"""Runs in pieces: every method under every seed, or under a few of them, is a piece of work of its own.

Pieces run side by side, in processes of this machine or over a Ray cluster. The numbers are those of one process: a run
depends on nothing but its description, its data and, on a CPU, the number of threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evenhand.callbacks import Guarded
from evenhand.checks import EvenhandError
from evenhand.data import Dataset
from evenhand.experiment import Experiment, data_at_hand, prepare, runs_notes, runs_of
from evenhand.folders import DIVERGED, RunFolder, writing
from evenhand.methods import Method
from evenhand.processes import side_by_side
from evenhand.recording import Diverged, Progress, Recorder, Status
from evenhand.runs import Run, Runs
from evenhand.storage import write_json


@dataclass(frozen=True)
class Piece:
    """A method under some of the seeds."""

    label: str
    experiment: Experiment

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.experiment.seeds

    def __str__(self) -> str:
        return f"{self.label}, seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"


@dataclass
class Outcome:
    """What a piece of work gives: its runs, or the round in which it diverged."""

    runs: list[Run]
    diverged: int = 0
    why: str = ""


def refuse_log(listeners: Sequence[Guarded], spread: str = "by several processes") -> None:
    """Nobody hears of rounds that are played elsewhere."""
    if listeners:
        raise EvenhandError(f"no log is kept {spread}; --resume FOLDER --log ... gives it all of what is finished")


def pieces_of(chosen: Experiment, methods: Mapping[str, Method], jobs: int | None = None) -> list[Piece]:
    """Every method under every seed; on a GPU, where seeds together cost less, as few pieces as keep all jobs busy."""
    together = 1
    if jobs is not None and chosen.torch_device().type != "cpu":
        together = math.ceil(len(methods) * len(chosen.seeds) / jobs)
    return [
        Piece(label, replace(chosen, method=entry, seeds=chosen.seeds[start : start + together]))
        for label, entry in methods.items()
        for start in range(0, len(chosen.seeds), together)
    ]


def work_on(piece: Piece, dataset: Dataset | None = None, threads: int | None = None) -> Outcome:
    """A piece of work, wherever this is."""
    if threads is not None:
        torch.set_num_threads(threads)
    data = data_at_hand(piece.experiment) if dataset is None else dataset
    recorder = Recorder(prepare(piece.experiment, dataset=data), None, label=piece.label)
    try:
        recorder.run()
    except Diverged as end:
        return Outcome([], end.round, end.why)
    return Outcome([replace(run, partition=None) for run in runs_of(piece.experiment, recorder)])


def play(
    chosen: Experiment,
    methods: Mapping[str, Method],
    places: Mapping[str, RunFolder | None],
    dataset: Dataset,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> tuple[dict[str, Runs], dict[str, Outcome]]:
    """Run every method under every seed; and how those ended that diverged.

    places: a folder a method, or None; they are filled as a run in one process fills them, each as soon as it can be.
    jobs: how many processes of this machine; None: a Ray cluster.
    """
    pieces = pieces_of(chosen, methods, jobs)
    found = _over_ray(pieces, dataset, chosen) if jobs is None else side_by_side(work_on, pieces, jobs)
    runs: dict[str, Runs] = {}
    diverged: dict[str, Outcome] = {}
    gathered: dict[str, dict[int, Outcome]] = {label: {} for label in methods}
    for piece, outcome in found:
        label = piece.label
        gathered[label][chosen.seeds.index(piece.seeds[0])] = outcome
        outcomes = [one for _, one in sorted(gathered[label].items())]  # in the order of the seeds, not of arrival
        done = [run for one in outcomes for run in one.runs]
        if progress is not None and done:
            reached = chosen.rounds * len(done) // len(chosen.seeds)
            progress(Status(label, reached, chosen.rounds, [run.evaluations[-1] for run in done]))
        if len(outcomes) < sum(other.label == label for other in pieces):
            continue
        recorder = _begun(replace(chosen, method=methods[label]), places[label], dataset, label)
        ends = [one for one in outcomes if not one.runs]
        if ends:  # the seeds of a method end together, with the first of them that diverges
            diverged[label] = first = min(ends, key=lambda one: one.diverged)
            if recorder.folder is not None:
                with writing(recorder.folder.path):
                    write_json(recorder.folder.path / DIVERGED, {"round": first.diverged, "why": first.why})
        else:
            runs[label] = _together(replace(chosen, method=methods[label]), recorder, done)
    return (
        {label: runs[label] for label in methods if label in runs},
        {label: diverged[label] for label in methods if label in diverged},
    )


def _begun(one: Experiment, place: RunFolder | None, dataset: Dataset, label: str) -> Recorder:
    """A recorder for one method, whose folder says what is run."""
    simulation = prepare(one, dataset=dataset)
    if place is not None:
        with writing(place.path):
            place.path.mkdir(parents=True, exist_ok=True)
        place.begin(one.to_toml(), simulation)
    return Recorder(simulation, place, label=label)


def _together(one: Experiment, recorder: Recorder, runs: Iterable[Run]) -> Runs:
    """The seeds of a method as one process would have run them, in its folder too."""
    by_seed, seeds = {run.seed: run for run in runs}, []
    for record, replica in zip(recorder.records, recorder.simulation.replicas, strict=True):
        run = by_seed[replica.seed]
        record.rounds, record.evaluations, record.seconds = run.rounds, run.evaluations, list(run.seconds)
        seeds.append(replace(run, partition=replica.partition))
    found = Runs(one, seeds, None if recorder.folder is None else recorder.folder.path)
    found.notes = tuple(runs_notes(recorder.simulation, found))
    if recorder.folder is not None:
        recorder.finish(found)
    return found


# --------------------------------------------------------------------------------------------------------------- Ray


def ray_or_hint() -> Any:
    """Ray, or an error that says how to get it."""
    try:
        import ray
    except ImportError as missing:
        raise EvenhandError("--engine ray needs Ray: pip install 'evenhand[ray]' (or pip install ray)") from missing
    return ray


def _over_ray(pieces: Sequence[Piece], dataset: Dataset, chosen: Experiment) -> Iterator[tuple[Piece, Outcome]]:
    """Each piece with its outcome, wherever there is room.

    A task asks for as many cores as this process uses (OMP_NUM_THREADS=1 makes many small ones), and for a GPU where
    the experiment uses one.
    """
    ray = ray_or_hint()
    with _cluster(ray):
        cores, device = torch.get_num_threads(), chosen.torch_device()
        task = ray.remote(work_on).options(num_cpus=cores, num_gpus=int(device.type == "cuda"), max_retries=3)
        shared = ray.put(dataset)
        waiting = {task.remote(piece, shared, cores): piece for piece in pieces}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            piece = waiting.pop(done)
            yield piece, _result(ray, done, piece)


def _result(ray: Any, task: Any, piece: Piece) -> Outcome:
    try:
        outcome: Outcome = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EvenhandError):
            raise EvenhandError(f"{piece}: {cause}") from error
        raise EvenhandError(f"{piece} failed on the cluster: {cause or error}") from error
    except ray.exceptions.RayError as error:
        raise EvenhandError(f"{piece} was lost on the cluster ({error}); --resume runs it again") from error
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
