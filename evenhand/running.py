"""A run from its start to its end, in memory or into a folder; going on after a stop; reading one back."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from evenhand.callbacks import (
    DIVERGED,
    FAILED,
    FINISHED,
    STOPPED,
    Audience,
    Callbacks,
    Guarded,
    Tracked,
    guarded,
    points,
)
from evenhand.checks import number
from evenhand.constraints import Cells
from evenhand.data import Dataset
from evenhand.experiment import Experiment, chosen_experiment, load_data, load_toml, prepare, runs_notes, runs_of
from evenhand.folders import DESCRIPTION, RunFolder
from evenhand.logs import Record
from evenhand.pieces import play as play_in_pieces
from evenhand.pieces import refuse_log
from evenhand.recording import CHECKPOINT_EVERY, Diverged, Interrupted, Progress, Recorder
from evenhand.runs import Run, Runs


def simulate(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    force: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    progress: Progress | None = None,
    callbacks: Callbacks = (),
    jobs: int = 1,
    **settings: Any,
) -> Runs:
    """Run an experiment for all its seeds at once.

    Args:
        experiment: what to run; default: digits, two classes a client, 30 clients, the method `even`.
        out: a folder for everything about the run, from which an interrupted run can be continued; None keeps it in
            memory alone.
        force: replace a run that is in the folder already.
        checkpoint_every: seconds between checkpoints.
        progress: called after every round.
        callbacks: hear of every seed's start, rounds and end: loggers ("tensorboard:DIR", "mlflow:URI",
            "wandb:PROJECT") or `Callback` objects of your own. One that fails is left out with a warning.
        jobs: how many seeds run at the same time, each in a process of its own; the folder is written when all of them
            are there. A script must call this under `if __name__ == "__main__":`.
        settings: changes to the experiment, by name: method="fedfv:alpha=0.2", data="digits", rounds=200, lr=0.05, ...

    >>> runs = simulate(method="fedavg", rounds=5, seeds=2)
    >>> [run.seed for run in runs], len(runs[0].accuracies)
    ([0, 1], 30)
    """
    number("jobs", jobs, low=1, whole=True)
    chosen = chosen_experiment(experiment, settings)
    folder = None if out is None else RunFolder(out)
    if jobs > 1 and len(chosen.seeds) > 1:
        return _side_by_side(chosen, folder, force, progress, guarded(callbacks), jobs)
    return run(chosen, folder, force=force, every=checkpoint_every, progress=progress, callbacks=callbacks)


def run(
    chosen: Experiment,
    folder: RunFolder | None,
    *,
    force: bool = False,
    every: float = CHECKPOINT_EVERY,
    progress: Progress | None = None,
    callbacks: Callbacks = (),
    label: str = "",
    group: str = "",
    dataset: Dataset | None = None,
) -> Runs:
    """Run an experiment from its start. group: the comparison that it is a part of."""
    number("checkpoint_every", every, low=0.0)
    listeners = guarded(callbacks)
    if folder is None:
        recorder = Recorder(prepare(chosen, dataset=dataset), None, progress=progress, label=label)
        return play(chosen, recorder, listeners, group)
    folder.command += resuming(listeners, folder.command)
    with folder.claimed(force=force):
        simulation = prepare(chosen, dataset=dataset)
        folder.begin(chosen.to_toml(), simulation)
        recorder = Recorder(simulation, folder, every=every, progress=progress, label=label)
        return play(chosen, recorder, listeners, group)


def _side_by_side(
    chosen: Experiment,
    folder: RunFolder | None,
    force: bool,
    progress: Progress | None,
    listeners: Sequence[Guarded],
    jobs: int,
) -> Runs:
    """The seeds in processes of their own."""
    refuse_log(listeners)
    label = chosen.method.name
    with contextlib.nullcontext() if folder is None else folder.claimed(force=force):
        try:
            runs, ends = play_in_pieces(
                chosen, {label: chosen.method}, {label: folder}, load_data(chosen), progress, jobs
            )
        except KeyboardInterrupt as stop:
            if folder is None:
                raise
            said = "stopped; seeds side by side are kept when all of them are finished, so the same command starts anew"
            raise Interrupted(said, folder.path, signal.SIGINT) from stop
    if label in ends:
        end = ends[label]
        place = None if folder is None else folder.path
        raise Diverged(label, end.diverged, chosen.work.lr, why=end.why, folder=place)
    return runs[label]


def resume(
    out: str | Path | RunFolder,
    *,
    checkpoint_every: float = CHECKPOINT_EVERY,
    progress: Progress | None = None,
    callbacks: Callbacks = (),
    label: str = "",
    group: str = "",
    dataset: Dataset | None = None,
) -> Runs:
    """Continue a run that was cut short, to the numbers it would have had; a finished one is read back.

    Loggers go on in the log they wrote before, and are given whatever it lacks.
    """
    number("checkpoint_every", checkpoint_every, low=0.0)
    listeners = guarded(callbacks)
    folder = out if isinstance(out, RunFolder) else RunFolder(out)
    folder.must_be_started()
    if folder.finished:
        runs = load_runs(folder.path)
        _tell_again(runs, folder, listeners, label or runs.experiment.method.name, group)
        return runs
    folder.command += resuming(listeners, folder.command)
    with folder.locked():
        chosen = load_toml(folder.path / DESCRIPTION)
        simulation = prepare(chosen, dataset=dataset)
        recorder = Recorder(simulation, folder, every=checkpoint_every, progress=progress, label=label)
        recorder.restore()
        return play(chosen, recorder, listeners, group)


def _load_run(folder: RunFolder, chosen: Experiment, seed: int) -> Run:
    names, samples, rounds, evaluations = folder.read(seed)
    return Run(
        replace(chosen, seeds=(seed,)),
        seed,
        names,
        samples,
        rounds,
        evaluations,
        folder=folder.seed(seed),
        cells=folder.cells,
        holdings=folder.holdings(seed),
        facts=folder.facts,
        seconds=folder.seconds(seed, len(rounds)),
    )


def load_runs(out: str | Path) -> Runs:
    """The runs in a folder, as far as they have got: while one is written to, what all its seeds have."""
    folder = RunFolder(out)
    folder.must_be_started()
    chosen = load_toml(folder.path / DESCRIPTION)
    runs = [_load_run(folder, chosen, seed) for seed in chosen.seeds]
    if not folder.finished:
        for name in ("rounds", "evaluations"):
            shared = min(len(getattr(one, name)) for one in runs)
            for one in runs:
                del getattr(one, name)[shared:]
    notes = []
    if folder.diverged is not None:
        notes.append(f"the training diverged in round {folder.diverged:,}; a smaller lr helps")
    return Runs(chosen, runs, folder.path, notes)


def play(chosen: Experiment, recorder: Recorder, listeners: Sequence[Guarded] = (), group: str = "") -> Runs:
    """Play all rounds that are left, and put the results together; in the folder too, where there is one."""
    if not listeners:
        return _to_the_end(chosen, recorder)
    recorder.audience = _audience(chosen, recorder, listeners, group)
    recorder.audience.start()
    how = FAILED
    try:
        runs = _to_the_end(chosen, recorder)
        how = FINISHED
        return runs
    except Diverged:
        how = DIVERGED
        raise
    except KeyboardInterrupt:
        how = STOPPED
        raise
    finally:
        recorder.audience.end(how)


def _to_the_end(chosen: Experiment, recorder: Recorder) -> Runs:
    recorder.run()
    folder = recorder.folder
    runs = Runs(chosen, runs_of(chosen, recorder), None if folder is None else folder.path)
    runs.notes = (*recorder.notes, *runs_notes(recorder.simulation, runs))
    if folder is not None:
        recorder.finish(runs)
    return runs


def resuming(listeners: Sequence[Guarded], command: str) -> str:
    """What must be added to a command that resumes a run, so that it goes on in the same logs."""
    words = [f" --log {shlex.quote(entry.callback.log)}" for entry in listeners if entry.callback.log]
    return "".join(word for word in words if word not in command)


def _audience(chosen: Experiment, recorder: Recorder, listeners: Sequence[Guarded], group: str) -> Audience:
    """Everybody who listens to a run that is about to start or to go on."""
    folder, cells = recorder.folder, recorder.simulation.cells
    id = uuid4().hex if folder is None else folder.id
    runs = [
        _tracked(replace(chosen, seeds=(replica.seed,)), record, folder, cells, id, recorder.label, group)
        for replica, record in zip(recorder.simulation.replicas, recorder.records, strict=True)
    ]
    return Audience(listeners, runs)


def _tell_again(runs: Runs, folder: RunFolder, listeners: Sequence[Guarded], label: str, group: str) -> None:
    """Tell of a finished run: a log that lacks some of it, or all of it, is given that."""
    if not listeners:
        return
    told = []
    for one in runs:
        seconds = folder.seconds(one.seed, len(one.rounds))
        record = Record(one.names, one.test_samples, one.rounds, seconds, one.evaluations)
        told.append(_tracked(one.experiment, record, folder, one.cells, folder.id, label, group))
    audience = Audience(listeners, told)
    audience.start()
    audience.end(FINISHED)


def _tracked(
    experiment: Experiment,
    record: Record,
    folder: RunFolder | None,
    cells: Cells | None,
    id: str,
    label: str,
    group: str,
) -> Tracked:
    seed = experiment.seeds[0]
    within = "" if folder is None else folder.path.resolve().name
    found = Tracked(
        id=f"{id}-{seed}",
        name="/".join(filter(None, [group, label if group or not within else within, f"seed-{seed}"])),
        group=group or within,
        label=label,
        experiment=experiment,
        names=record.names,
        test_samples=record.test_samples,
        cells=cells,
        folder=None if folder is None else folder.seed(seed),
    )
    return replace(found, past=tuple(points(found, record.rounds, record.seconds, record.evaluations)))
