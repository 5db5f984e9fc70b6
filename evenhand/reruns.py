"""The runs behind a paper's table: those that train alike as one program, several programs side by side if asked.

Every run goes into a CSV file as soon as it is there, and one that is there with the same settings is not run again. Of
a figure the curves (or every client's accuracy) go into a second file, from which it is drawn. A program that was
stopped goes on from where it was last kept.
"""

from __future__ import annotations

import csv
import gc
import hashlib
import io
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from evenhand.checks import EvenhandError, number
from evenhand.data import Dataset
from evenhand.experiment import Experiment, data_at_hand, prepare, runs_of
from evenhand.folders import writing
from evenhand.measuring import curve, measured
from evenhand.methods.base import ServerStep
from evenhand.processes import side_by_side
from evenhand.recipe import Part, Recipe, Row, Settings, listed
from evenhand.recording import Progress, Recorder, Status
from evenhand.runs import Run
from evenhand.storage import write_bytes
from evenhand.unfinished import Unfinished, sweep

# Objectives that the others do not share a program with: those that carry models or stages of their own, and those that
# add something to every step, which would then be as long for all.
APART = {
    "personal": "personal",
    "similarity": "similarity",
    "correction": "correction",
    "proximal": "added",
    "client-momentum": "added",
}
CSV, SERIES, UNFINISHED = "results.csv", "series.csv", "unfinished"
# What does not change a number, or has a column of its own.
ASIDE = ("seeds", "device", "data_dir", "program", "precision", "chunk", "keep_on", "eval_every", "measure")
# Settings that came later: at these values they change nothing, and what was run before them still counts.
LATER = {"fedlf_code": False, "accuracies": "received", "recall": 1.0, "caution": 0.0, "turns": 1.0}
WHOSE = ("part", "row", "quirks", "seed", "digest", "at")
FACTS = ("part", "row", "stage", "quirks", "setting", "seed", "rounds", "diverged", "seconds", "digest", "machine")

Floats = np.ndarray[Any, np.dtype[np.float64]]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """One row in one part with one setting: what it takes to fill its cells."""

    part: Part
    row: Row
    quirks: bool
    tried: Settings
    experiment: Experiment
    stage: str = "final"  # or "trial": to choose a setting

    @property
    def digest(self) -> str:
        """Changes when anything does that a number depends on."""
        values = {name: value for name, value in self.experiment.to_dict().items() if name not in ASIDE}
        for part in ("rule", "server", "objective"):
            said = values["method"][part]
            values["method"][part] = {k: v for k, v in said.items() if k not in LATER or v != LATER[k]}
        return _digest(values)

    @property
    def cell(self) -> tuple[str, str, bool]:
        return self.part.name, self.row.name, self.quirks

    @property
    def setting(self) -> str:
        return ", ".join(filter(None, (self.row.method, listed(self.tried))))


@dataclass
class Result:
    """What one task gave under one seed."""

    measures: dict[str, float]
    seconds: float = 0.0
    diverged: int | None = None
    series: dict[str, Floats] = field(default_factory=dict)  # of a figure: `at`, and what is there
    machine: str = ""  # where it was run, if that is known


@dataclass(frozen=True)
class Program:
    """Tasks that train as one program, under the experiment's seeds."""

    experiment: Experiment
    tasks: list[Task]

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.experiment.seeds

    @property
    def label(self) -> str:
        first = self.tasks[0]
        said = f"{first.row.name}{f' and {len(self.tasks) - 1} more' if len(self.tasks) > 1 else ''}"
        said = f"{first.part.name}: {said}" if first.part.name else said
        return f"trial, {said}" if first.stage == "trial" else said

    @property
    def digest(self) -> str:
        """Changes when anything does that its states depend on, where it is trained included."""
        from evenhand import __version__

        tasks = [(task.digest, task.experiment.work.lr) for task in self.tasks]
        whole = [self.experiment.to_dict(), tasks, machine_of(self.experiment), __version__, torch.__version__]
        return _digest(whole)

    def halves(self) -> list[Program]:
        """Half of the tasks each, or else half of the seeds."""
        if len(self.tasks) > 1:
            half = len(self.tasks) // 2
            return [Program(self.experiment, some) for some in (self.tasks[:half], self.tasks[half:])]
        half = len(self.seeds) // 2
        return [
            Program(replace(self.experiment, seeds=some), self.tasks) for some in (self.seeds[:half], self.seeds[half:])
        ]


@dataclass(frozen=True)
class Wanted:
    """What is kept of every run: measures at its end, and what a figure draws."""

    measures: tuple[str, ...]
    figure: str = ""  # the kind of figure
    drawn: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # all that can be run, for a hint
    folder: Path | None = None  # where programs are kept that have not come to their end

    def unfinished(self, program: Program) -> Unfinished | None:
        if self.folder is None:
            return None
        runs = [(task.digest, seed) for task in program.tasks for seed in program.seeds]
        return Unfinished(self.folder / program.digest, runs)

    def of(self, task: Task, run: Run, diverged: int | None, seconds: float) -> Result:
        where = machine_of(task.experiment)
        if diverged is not None:
            return Result(dict.fromkeys(self.measures, math.nan), seconds, diverged, machine=where)
        found = {name: measured(run, name) for name in self.measures}
        return Result(found, seconds, series=self._series(task, run), machine=where)

    def _series(self, task: Task, run: Run) -> dict[str, Floats]:
        if not self.drawn or task.stage == "trial" or self.figure == "points":
            return {}
        if self.figure == "distribution":
            known = run.accuracies[np.isfinite(run.accuracies)]
            return {"at": np.arange(len(known), dtype=np.float64), "accuracy": known}
        return {"at": run.curves["round"].astype(np.float64), **{name: curve(run, name) for name in self.drawn}}


def machine_of(experiment: Experiment) -> str:
    """Where a run takes place, in words."""
    device = experiment.torch_device()
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} {'thread' if threads == 1 else 'threads'}"


Outcomes = dict[tuple[str, int], Result]


def outcomes(program: Program, wanted: Wanted, progress: Progress | None = None) -> Outcomes:
    """What a program gives; what is too much for a GPU's memory is run in halves."""
    experiment, tasks = program.experiment, program.tasks
    smaller: list[Program] = []
    started, kept = perf_counter(), wanted.unfinished(program)
    try:
        runs = played(program, _data(experiment, wanted.parts), progress, kept)
    except torch.cuda.OutOfMemoryError as error:
        if len(tasks) == len(program.seeds) == 1:
            raise EvenhandError(
                f"{program.label}: even one run is too much for the GPU's memory; run fewer programs at a time (--jobs)"
            ) from error
        smaller = program.halves()
    if smaller:
        gc.collect()  # what the failed program held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {key: one for part in smaller for key, one in outcomes(part, wanted, progress).items()}
    spent = perf_counter() - started + (kept.spent if kept else 0.0)
    seconds = spent / (len(tasks) * len(program.seeds))
    return {
        (task.digest, seed): wanted.of(task, run, diverged, seconds)
        for task, of_seeds in zip(tasks, runs, strict=True)
        for seed, (run, diverged) in zip(program.seeds, of_seeds, strict=True)
    }


def _data(experiment: Experiment, parts: Sequence[str]) -> Dataset:
    try:
        return data_at_hand(experiment)
    except EvenhandError as error:
        hint = f" (parts are run one by one with --part: {', '.join(parts)})" if len(parts) > 1 else ""
        raise EvenhandError(f"{error}{hint}") from error


def played(
    program: Program, dataset: Dataset, progress: Progress | None, kept: Unfinished | None = None
) -> list[list[tuple[Run, int | None]]]:
    """Every task's runs, a seed each, and in which round one diverged, which does not take the others with it."""
    told = [task.experiment for task in program.tasks]
    methods, rates = [one.method for one in told], [one.work.lr for one in told]

    def fresh() -> Recorder:
        simulation = prepare(program.experiment, methods, dataset, rates=rates, forgiving=True)
        return Recorder(simulation, None, progress=after_round, label=program.label)

    def after_round(status: Status) -> None:
        if kept is not None:
            kept.after_round(recorder)
        if progress is not None:
            progress(status)

    recorder = fresh()
    while kept is not None and not kept.resume(recorder):
        recorder = fresh()
    recorder.run()
    ends = [replica.diverged for replica in recorder.simulation.replicas]
    found = iter(zip(runs_of(program.experiment, recorder), ends, strict=True))
    return [[next(found) for _ in program.seeds] for _ in methods]


class Runner:
    """Runs tasks that are not in the CSV yet, as few programs as possible."""

    def __init__(
        self, recipe: Recipe, folder: Path | None, together: int, jobs: int, progress: Progress | None
    ) -> None:
        number("together", together, low=1, whole=True)
        number("jobs", jobs, low=1, whole=True)
        self.progress, self.together, self.jobs, self.folder = progress, together, jobs, folder
        self.measures = recipe.measures()
        self.drawn = drawn_measures(recipe)
        kind = recipe.figure.kind if recipe.figure else ""
        there = tuple(part.name for part in recipe.parts if not part.unavailable)
        self.wanted = Wanted(tuple(self.measures), kind, self.drawn, there, folder and folder / UNFINISHED)
        self.results: dict[tuple[str, int], Result] = {}
        self.written: set[tuple[str, ...]] = set()
        self.ran = self.found = 0
        if self.folder is not None:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            self._read(self.folder / CSV)

    def holds(self, task: Task, seeds: Sequence[int]) -> bool:
        """Whether the CSV has all of it."""
        digest = task.digest
        return all((digest, seed) in self.results for seed in seeds)

    def run(self, tasks: Sequence[Task], seeds: Sequence[int]) -> None:
        known = {(task.digest, seed) for task in tasks for seed in seeds} & set(self.results)
        self.found += len(known)
        programs = list(self._programs(tasks, seeds))
        if self.jobs == 1 or len(programs) < 2:
            for program in programs:
                self._keep(program, outcomes(program, self.wanted, self.progress))
        else:
            self._side_by_side(programs)
        for task in tasks:
            self._write(task, seeds)
        self._sweep()

    def _side_by_side(self, programs: Sequence[Program]) -> None:
        """Several processes; the largest programs first, so that none is left alone at the end."""
        ordered = sorted(programs, key=lambda program: -len(program.tasks) * len(program.seeds))
        label = f"{len(programs)} programs, {min(self.jobs, len(programs))} at a time"
        found = side_by_side(partial(outcomes, wanted=self.wanted), ordered, self.jobs)
        for done, (program, own) in enumerate(found, start=1):
            self._keep(program, own)
            if self.progress is not None:
                self.progress(Status(label, done, len(programs), ()))

    def _keep(self, program: Program, found: Outcomes) -> None:
        for task in program.tasks:
            for seed in program.seeds:
                self.results[task.digest, seed] = found[task.digest, seed]
                self.ran += 1
            self._write(task, program.seeds)
        self._sweep()

    def _sweep(self) -> None:
        if self.wanted.folder is not None:
            sweep(self.wanted.folder, self.results)

    def _programs(self, tasks: Sequence[Task], seeds: Sequence[int]) -> Iterator[Program]:
        """Tasks that differ in method and learning rate alone and train alike, with the seeds that they still need."""
        groups: dict[str, list[Task]] = {}
        once = {task.digest: task for task in tasks}
        for task in once.values():
            missing = [seed for seed in seeds if (task.digest, seed) not in self.results]
            if missing:
                method = task.experiment.method
                shared = {name: value for name, value in task.experiment.to_dict().items() if name != "method"}
                shared["work"] = {**shared["work"], "lr": None}
                apart = APART.get(method.objective.name, "")
                asking = type(method.server).lengths is not ServerStep.lengths  # nobody should wait for a line search
                kind = [shared, method.training, apart, asking, missing]
                groups.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(task)
        share = math.ceil(len(once) * len(seeds) / self.jobs)  # so that every process has something to do
        for group in groups.values():
            missing = [seed for seed in seeds if (group[0].digest, seed) not in self.results]
            # A CPU plays replicas one after another anyway: small programs leave finished rows behind sooner, and of
            # single runs no process is left with many when the others have none.
            alone = group[0].experiment.torch_device().type == "cpu"
            most = min(self.together, share) if not alone else 1 if self.jobs > 1 else share
            for some in _batched(missing, most):
                for few in _batched(group, 1 if alone else max(1, most // len(some))):
                    yield Program(replace(few[0].experiment, seeds=tuple(some)), list(few))

    # ---- the CSV files

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        kept, lines = self._read_series(path.with_name(SERIES)), list[dict[str, str]]()
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            there = list(table.fieldnames or ())
            if there not in ([*FACTS, *self.measures], [*FACTS[:-1], *self.measures]):
                raise EvenhandError(
                    f"{str(path)!r} was written for another table, or by another version; choose another folder (--out)"
                )
            for line in table:
                if None in line.values():  # a sudden end in the middle of a line
                    continue
                found = {name: float(line[name]) for name in self.measures}
                ended = int(line["diverged"]) if line["diverged"] else None
                who = (line["digest"], int(line["seed"]))
                if self.drawn and line["stage"] == "final" and ended is None and who not in kept:
                    continue  # a number without its curve must be run again
                where = line.get("machine", "")
                self.results[who] = Result(found, float(line["seconds"]), ended, kept.get(who, {}), where)
                self.written.add(_identity(line))
                lines.append({"machine": where, **line})
        if "machine" not in there:  # written before that was kept
            text = io.StringIO()
            again = csv.DictWriter(text, [*FACTS, *self.measures], lineterminator="\n")
            again.writeheader()
            again.writerows(lines)
            with writing(path.parent):
                write_bytes(path, text.getvalue().encode())

    def _read_series(self, path: Path) -> dict[tuple[str, int], dict[str, Floats]]:
        if not self.drawn or not path.is_file():
            return {}
        found: dict[tuple[str, int], dict[float, list[float]]] = {}
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if None not in line.values():
                    values = [float(line[name]) for name in ("at", *self.drawn)]
                    found.setdefault((line["digest"], int(line["seed"])), {})[values[0]] = values
        columns = {who: np.array(list(points.values())).T for who, points in found.items()}
        return {who: dict(zip(("at", *self.drawn), table, strict=True)) for who, table in columns.items()}

    def _write_series(self, line: Mapping[str, str], series: Mapping[str, Floats]) -> None:
        assert self.folder is not None
        with (self.folder / SERIES).open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                table.writerow((*WHOSE, *self.drawn))
            who = [line[name] for name in WHOSE[:-1]]
            for values in zip(series["at"], *(series[name] for name in self.drawn), strict=True):
                table.writerow((*who, f"{values[0]:g}", *(repr(float(value)) for value in values[1:])))

    def _write(self, task: Task, seeds: Sequence[int]) -> None:
        """Append what is there and not in the file yet."""
        if self.folder is None:
            return
        path = self.folder / CSV
        with writing(self.folder), path.open("a", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [*FACTS, *self.measures], lineterminator="\n")
            if file.tell() == 0:
                table.writeheader()
            for seed in seeds:
                result = self.results.get((task.digest, seed))
                line = {
                    "part": task.part.name,
                    "row": task.row.name,
                    "stage": task.stage,
                    "quirks": "on" if task.quirks else "off",
                    "setting": task.setting,
                    "seed": str(seed),
                    "rounds": str(task.experiment.rounds),
                    "digest": task.digest,
                }
                if result is None or _identity(line) in self.written:
                    continue
                self.written.add(_identity(line))
                ended = "" if result.diverged is None else str(result.diverged)
                told = {name: repr(float(value)) for name, value in result.measures.items()}
                if result.series:
                    self._write_series(line, result.series)
                how = {"diverged": ended, "seconds": f"{result.seconds:.3f}", "machine": result.machine}
                table.writerow({**line, **how, **told})


def drawn_measures(recipe: Recipe) -> tuple[str, ...]:
    """The columns of the file from which a figure is drawn, besides where each line belongs."""
    if recipe.figure is not None and recipe.figure.kind == "distribution":
        return ("accuracy",)
    return tuple(dict.fromkeys(name for quirks in (True, False) for name in recipe.drawn(quirks).values()))


def _identity(line: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("part", "row", "stage", "quirks", "seed", "digest"))


def _batched(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]
