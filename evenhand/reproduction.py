"""A paper's table run again: the paper's numbers, ours beside them, and what holds of what the paper says.

Rows that train alike run as replicas of one program. Every row and seed goes into a CSV file as soon as it is there,
and one that is there with the same settings is not run again.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from evenhand import storage
from evenhand.checks import EvenhandError, choice, near_miss, number
from evenhand.data import Dataset
from evenhand.experiment import Experiment, load_data, prepare, runs_of
from evenhand.fairness import best, paired_test, worst
from evenhand.folders import Diverged, Progress, Recorder, Status, file_name, writing
from evenhand.methods import Method
from evenhand.recipe import (
    Claim,
    Column,
    Part,
    Recipe,
    RecipeInfo,
    RecipeTable,
    Row,
    Settings,
    bare,
    find_recipe,
    listed,
    read_recipe,
    recipes,
)
from evenhand.runs import Run
from evenhand.tables import text_table
from evenhand.tuning import Judgement

__all__ = ["Recipe", "RecipeInfo", "RecipeTable", "Reproduction", "read_recipe", "recipes", "reproduce"]

APART = ("personal", "similarity", "correction")  # objectives that carry models or stages of their own
CSV, PAGE = "results.csv", "results.md"
WITHIN = 2.0  # spreads
FAR = 99  # spreads beyond which the exact number says no more
CONFIDENCE = 0.95
HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told"
PLURAL = {HOLDS: "hold", FAILS: "do not hold", UNTOLD: UNTOLD}
QUIRKS = ("both", "on", "off")
# What does not change a number, or has a column of its own.
ASIDE = ("seeds", "device", "data_dir", "program", "chunk", "keep_on", "eval_every", "measure")
FACTS = ("part", "row", "stage", "quirks", "setting", "seed", "rounds", "diverged", "seconds", "digest")

Floats = np.ndarray[Any, np.dtype[np.float64]]


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
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def setting(self) -> str:
        return ", ".join(filter(None, (self.row.method, listed(self.tried))))


@dataclass
class Result:
    """What one task gave under one seed."""

    measures: dict[str, float]
    seconds: float = 0.0
    diverged: int | None = None


@dataclass(frozen=True)
class Judged:
    """A claim of the paper and what the seeds say to it."""

    claim: Claim
    part: Part
    verdict: str
    why: str


@dataclass
class Cell:
    """One number of the paper beside ours."""

    column: Column
    paper: float | None
    spread: float | None
    values: Floats  # ours, in the paper's unit, one a seed

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if len(self.values) else math.nan

    @property
    def own_spread(self) -> float | None:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def unit(self) -> float | None:
        """The paper's spread, at least half of its last digit; ours where the paper has none."""
        half = 0.5 * 10.0**-self.column.digits
        if self.spread is not None:
            return max(self.spread, half)
        return None if self.own_spread is None else max(self.own_spread, half)

    @property
    def spreads_off(self) -> float | None:
        """How far ours is from the paper's, in spreads."""
        if self.paper is None or self.unit is None or not math.isfinite(self.mean):
            return None
        return (self.mean - self.paper) / self.unit

    @property
    def within(self) -> bool | None:
        return None if self.spreads_off is None else abs(self.spreads_off) <= WITHIN

    def written(self, value: float | None, spread: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "-"
        said = f"{value:.{self.column.digits}f}"
        return said if spread is None else f"{said} ± {spread:.{self.column.digits}f}"

    def ours(self, judged: bool) -> str:
        said, off = self.written(self.mean, self.own_spread), self.spreads_off
        if off is None or not judged:
            return said
        far = f"{off:+.1f}" if abs(off) < FAR else f"over {math.copysign(FAR, off):+g}"
        own = "" if self.spread is not None else " own"
        return f"{said} ({far}{own}) {'✓' if self.within else '✗'}"


@dataclass
class Reproduction:
    """A table run again."""

    recipe: Recipe
    seeds: tuple[int, ...]
    rounds: int | None  # asked for; None is the recipe's own
    rows: tuple[Row, ...]
    variants: tuple[bool, ...]  # with quirks, without
    changes: Settings
    folder: Path | None = None
    tasks: dict[tuple[str, str, bool], Task] = field(default_factory=dict)
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    ran: int = 0
    found: int = 0  # were there already
    seconds: float = 0.0
    device: str = ""

    # ---- numbers

    def parts(self) -> list[Part]:
        return [part for part in self.recipe.parts if not part.unavailable]

    def values(self, part: Part, row: Row, column: Column, quirks: bool) -> Floats:
        """One number a seed, in the paper's unit; not-a-number where the training diverged."""
        task = self.tasks.get((part.name, row.name, quirks))
        if task is None:
            return np.zeros(0)
        measure = self.recipe.measure(column, quirks)
        found = np.array([self.results[task.digest, seed].measures[bare(measure)] for seed in self.seeds])
        return (found if bare(measure) == measure else np.sqrt(found)) * column.scale

    def cell(self, part: Part, row: Row, column: Column, quirks: bool) -> Cell:
        place = self.recipe.columns.index(column)
        paper, spread = row.numbers[part.name][place], row.spread.get(part.name, (None,) * (place + 1))[place]
        return Cell(column, paper, spread, self.values(part, row, column, quirks))

    def cells(self, quirks: bool) -> list[tuple[Part, Row, Cell]]:
        """Every cell that was run."""
        every = itertools.product(self.parts(), self.rows, self.recipe.columns)
        return [
            (part, row, self.cell(part, row, column, quirks))
            for part, row, column in every
            if (part.name, row.name, quirks) in self.tasks
        ]

    # ---- is it the paper's?

    @property
    def shortened(self) -> bool:
        """Whether fewer rounds were played than the paper's."""
        return self.rounds is not None and any(self.rounds < r for r in self._own_rounds())

    def _own_rounds(self) -> list[int]:
        found = [self.recipe.experiment.with_settings(part.settings).rounds for part in self.parts()]
        return sorted(set(found))

    def scaled_down(self) -> list[str]:
        """In what this differs from the whole table."""
        said = []
        if self.rounds is not None and self.rounds not in self._own_rounds():
            played = "1 round" if self.rounds == 1 else f"{self.rounds:,} rounds"
            said.append(f"{played} instead of {' and '.join(f'{r:,}' for r in self._own_rounds())}")
        if self.seeds != self.recipe.experiment.seeds:
            own = self.recipe.experiment.seeds
            said.append(f"seeds {', '.join(map(str, self.seeds))} instead of {', '.join(map(str, own))}")
        if len(self.rows) < len(self.recipe.rows):
            said.append(f"{len(self.rows)} of {len(self.recipe.rows)} rows")
        if self.changes:
            said.append(f"changed: {listed(self.changes)}")
        return said

    # ---- claims

    def judged(self, quirks: bool) -> list[Judged]:
        """Every claim in every part that it is about."""
        return [
            self._judge(claim, part, quirks)
            for claim in self.recipe.claims
            for part in self.parts()
            if not claim.parts or part.name in claim.parts
        ]

    def _judge(self, claim: Claim, part: Part, quirks: bool) -> Judged:
        column = next(column for column in self.recipe.columns if column.title == claim.column)
        others = claim.than or tuple(row.name for row in self.recipe.rows if row.name not in claim.rows)
        by_name = {row.name: row for row in self.rows}
        known = {name: row for name, row in by_name.items() if (part.name, name, quirks) in self.tasks}
        missing = [name for name in (*claim.rows, *others) if name not in known]
        pairs = [(a, b) for a in claim.rows for b in others if a in known and b in known]
        if not pairs:
            return Judged(claim, part, UNTOLD, f"not run: {', '.join(missing)}")
        untold, against, least = [], [], None
        for a, b in pairs:
            one, other = (self.values(part, known[name], column, quirks) for name in (a, b))
            if not (np.isfinite(one) & np.isfinite(other)).any():
                lost = [name for name, values in ((a, one), (b, other)) if not np.isfinite(values).all()]
                untold.append(f"{' and '.join(lost)} diverged")
                continue
            # One pair against it refutes the claim, so with many pairs each must say so more clearly.
            test = paired_test(one, other, confidence=CONFIDENCE)
            strict = paired_test(one, other, confidence=1.0 - (1.0 - CONFIDENCE) / len(pairs))
            better = test.difference if column.higher else -test.difference
            told = "" if test.p is None else f", p = {test.p:.3g}"
            said = f"{a} against {b}: {test.difference:+.{column.digits}f}{told}"
            if strict.significant and better < 0:
                against.append(said)
            elif not test.significant or better <= 0:
                untold.append(said)
            elif least is None or abs(test.difference) < least[0]:
                least = (abs(test.difference), said)
        if against:
            return Judged(claim, part, FAILS, "; ".join(against[:2]) + _more(against, 2))
        if missing:
            untold.append(f"not run: {', '.join(missing)}")
        if untold:
            return Judged(claim, part, UNTOLD, "; ".join(untold[:2]) + _more(untold, 2))
        assert least is not None
        closest = "closest: " if len(pairs) > 1 else ""
        return Judged(claim, part, HOLDS, closest + least[1])

    # ---- words

    def _variant(self, quirks: bool) -> str:
        if not self.recipe.quirky:
            return "ours"
        return "ours, quirks on" if quirks else "ours, quirks off"

    def table(self, part: Part) -> list[list[str]]:
        """Heads and lines of a part: the paper's line, then ours, row by row."""
        lines = [["row", "", *(column.head for column in self.recipe.columns)]]
        for row in self.rows:
            paper = [self.cell(part, row, column, self.variants[0]) for column in self.recipe.columns]
            lines.append([row.name, "paper", *(cell.written(cell.paper, cell.spread) for cell in paper)])
            blank = [""] * (len(self.recipe.columns) - 1)
            if row.unavailable:
                lines.append(["", "ours", f"not available: {row.unavailable}", *blank])
                continue
            for quirks in self.variants:
                task = self.tasks[part.name, row.name, quirks]
                ends = [self.results[task.digest, seed].diverged for seed in self.seeds]
                cells = [
                    self.cell(part, row, column, quirks).ours(not self.shortened) for column in self.recipe.columns
                ]
                if any(end is not None for end in ends):
                    count = sum(end is not None for end in ends)
                    cells = [f"diverged under {count} of {len(ends)} seeds", *blank]
                lines.append(["", self._variant(quirks), *cells])
        return lines

    def chosen(self) -> list[str]:
        """The settings that were chosen from grids."""
        return [
            f"{', '.join(filter(None, (row, part, self._variant(quirks) if self.recipe.quirky else '')))}: "
            f"{listed(task.tried)}"
            for (part, row, quirks), task in self.tasks.items()
            if task.tried
        ]

    def summary(self) -> list[str]:
        """How many cells agree and how many claims hold."""
        said = []
        for quirks in self.variants:
            known = [cell.within for _, _, cell in self.cells(quirks) if cell.within is not None]
            verdicts = [entry.verdict for entry in self.judged(quirks)]
            words = f"{self._variant(quirks)}: "
            if known and not self.shortened:
                words += f"{sum(known)} of {len(known)} cells are within {WITHIN:g} spreads of the paper's"
            else:
                words += "no verdict on the cells"
            counted = {word: verdicts.count(word) for word in (HOLDS, FAILS, UNTOLD) if word in verdicts}
            counts = ", ".join(f"{count} {word if count == 1 else PLURAL[word]}" for word, count in counted.items())
            said.append(words + (f"; of {len(verdicts)} claims {counts}" if verdicts else ""))
        return said

    def _scale_words(self) -> str:
        scaled = self.scaled_down()
        if not scaled:
            return ""
        said = f"Scaled down: {'; '.join(scaled)}."
        if self.shortened:
            return f"{said} After fewer rounds a difference says nothing about the paper, so no cell gets a verdict."
        return f"{said} This is not the whole table."

    def _legend(self) -> str:
        arrows = "↑ larger is better, ↓ smaller is."
        if self.shortened:
            return arrows
        said = (
            f"In brackets: ours minus the paper's, in units of the paper's spread; ✓ within {WITHIN:g} of them, ✗ not"
        )
        if any(not row.spread for row in self.rows):
            said += '; "own": the paper gives no spread, so the unit is our standard deviation over the seeds'
        return f"{said}. {arrows}"

    def _took(self) -> str:
        said = f"{self.ran} runs (a row, a setting and a seed each) in {_duration(self.seconds)} on {self.device}"
        if self.found:
            spent = sum(self.results[task.digest, seed].seconds for task in self.tasks.values() for seed in self.seeds)
            said += f"; {self.found} were there already; all cells together took {_duration(spent)}"
        return said + "."

    def __str__(self) -> str:
        """What the command line prints."""
        lines = [f"{self.recipe.paper}: {self.recipe.title}", ""]
        lines += [self._scale_words(), ""] if self.scaled_down() else []
        for part in self.recipe.parts:
            lines += [part.name] if part.name else []
            if part.unavailable:
                lines += [f"not available: {part.unavailable}", ""]
            else:
                lines += [_clipped_table(self.table(part)), ""]
        lines += [self._legend(), ""]
        for quirks in self.variants:
            judged = self.judged(quirks)
            lines += [f"Claims ({self._variant(quirks)}):"] if judged else []
            for entry in judged:
                place = f" [{entry.part.name}]" if entry.part.name else ""
                lines.append(f"  {self._verdict(entry)}: {entry.claim.says}{place} ({entry.why})")
            lines += [""] if judged else []
        return "\n".join([*lines, *self.summary(), self._took()])

    def _verdict(self, entry: Judged) -> str:
        return f"{entry.verdict} in the shortened run" if self.shortened and entry.verdict != UNTOLD else entry.verdict

    def markdown(self) -> str:
        """The page."""
        recipe = self.recipe
        lines = [f"# {recipe.name}: {recipe.title}", "", f"{recipe.paper}. {recipe.citation}", ""]
        if self.scaled_down():
            lines += [f"**{self._scale_words()}**", ""]
        lines += [*(f"- {line}" for line in self.summary()), ""]
        spread = recipe.plus_minus or "The paper gives no spread."
        lines += [f"{spread} Ours: mean ± standard deviation (of a sample) over {len(self.seeds)} seeds.", ""]
        lines += [self._legend(), ""]
        for part in recipe.parts:
            lines += [f"## {part.name}", ""] if part.name else ["## The table", ""]
            if part.unavailable:
                lines += [f"Not available: {part.unavailable}", ""]
                continue
            head, *body = self.table(part)
            lines += [_line(head), "|---|---|" + "---:|" * (len(head) - 2), *map(_line, body), ""]
        if recipe.claims:
            lines += ["## What the paper says", ""]
            lines += ["| claim | " + " | ".join(map(self._variant, self.variants)) + " |"]
            lines += ["|---|" + "---|" * len(self.variants)]
            for entries in zip(*(self.judged(quirks) for quirks in self.variants), strict=True):
                first = entries[0]
                place = f" ({first.part.name})" if first.part.name else ""
                told = [f"**{self._verdict(entry)}**: {entry.why}" for entry in entries]
                lines.append(_line([f"{first.claim.says}{place}", *told]))
            tested = "Paired t-tests over the seeds, 95%; a claim about many pairs holds when every pair does, and"
            lines += ["", f"{tested} is refuted when one speaks against it after correction for their number.", ""]
        if recipe.quirks or any(row.quirks for row in recipe.rows):
            lines += ["## Quirks that the published numbers stand on", ""]
            for quirk in recipe.quirks:
                turned = listed({**quirk.settings, **quirk.measures})
                how = (
                    f" (not offered: {quirk.unavailable})" if quirk.unavailable else f" (`{turned}`)" if turned else ""
                )
                lines.append(f"- `{quirk.name}`: {quirk.says}{how}")
            lines += [f"- row {row.name}: `{listed(row.quirks)}`" for row in self.rows if row.quirks]
            lines.append("")
        if recipe.choose is not None and self.chosen():
            lines += ["## Settings chosen", "", recipe.choose.says, "", *(f"- {line}" for line in self.chosen()), ""]
        lines += ["## How", ""]
        for part, quirks in itertools.product(self.parts(), self.variants):
            mine = [task for (name, _, on), task in self.tasks.items() if (name, on) == (part.name, quirks)]
            where = ", ".join(filter(None, (part.name, self._variant(quirks))))
            lines += [f"- {where}: {said}" for said in dict.fromkeys(task.experiment.setting() for task in mine)]
        lines += [f"- {note}" for note in recipe.notes]
        from evenhand import __version__

        made = f"evenhand {__version__}, torch {torch.__version__}, {datetime.date.today().isoformat()}"
        lines += [f"- {self._took()}", f"- Every row and seed is in {CSV}. Made by {made}."]
        return "\n".join(lines) + "\n"


def _more(entries: Sequence[str], shown: int) -> str:
    return f"; {len(entries) - shown} more" if len(entries) > shown else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _clipped_table(lines: list[list[str]]) -> str:
    """As text; a sentence in the place of numbers does not widen their column."""
    shown = [
        line if not line[2].startswith(("not available", "diverged")) else [*line[:2], "", *line[3:]] for line in lines
    ]
    text = text_table(shown).splitlines()
    return "\n".join(
        f"{written.rstrip()}  {line[2]}" if line is not kept else written
        for written, line, kept in zip(text, lines, shown, strict=True)
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---------------------------------------------------------------------------------------------------- running


def reproduce(
    name: str | Path | Recipe,
    *,
    rounds: int | None = None,
    seeds: int | Sequence[int] | None = None,
    only: Sequence[str] = (),
    quirks: str = "both",
    data_dir: str | Path | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    together: int | None = None,
    jobs: int = 1,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Run a paper's table again and set its numbers beside ours.

    Args:
        name: a recipe (`recipes()` lists them), or the path of one of your own.
        rounds, seeds: less than the paper's, for a first look; the result says so. Seeds: how many of the recipe's
            (from the first on), or which.
        only: rows, by name or by the beginning of it.
        quirks: "on" follows the published code, "off" the paper's text, "both" runs the two.
        data_dir, device: as in `simulate`.
        out: a folder for the CSV and the page; a row and seed that its CSV holds already is not run again.
        together: how many runs train as one program at most; less takes less memory.
        jobs: programs that run at the same time, each in a process of its own: worth it on a GPU beside many cores.
        settings: other changes of the experiment, for every row.
        progress: called after every round.
    """
    recipe = name if isinstance(name, Recipe) else find_recipe(name)
    choice("quirks", quirks, QUIRKS)
    if rounds is not None:
        number("rounds", rounds, low=1, whole=True)
    chosen_seeds = _seeds(recipe, seeds)
    changes = dict(settings or {})
    found = Reproduction(
        recipe,
        chosen_seeds,
        rounds,
        _only(recipe, only),
        ({"both": (True, False), "on": (True,), "off": (False,)}[quirks] if recipe.quirky else (False,)),
        changes,
        None if out is None else Path(out),
    )
    more: dict[str, Any] = {**changes, **({} if rounds is None else {"rounds": rounds})}
    more |= {} if device is None else {"device": device}
    more |= {} if data_dir is None else {"data_dir": str(data_dir)}
    runner = Runner(recipe, found, together or recipe.together, jobs, progress)
    started = perf_counter()
    trials = [task for task in _tasks(found, more, "trial") if len(task.row.tries()) > 1]
    if trials:
        assert recipe.choose is not None
        runner.run(trials, recipe.choose.seeds)
    found.tasks = {
        (task.part.name, task.row.name, task.quirks): task for task in _final(found, more, trials, runner.results)
    }
    runner.run(list(found.tasks.values()), chosen_seeds)
    found.results, found.ran, found.found = runner.results, runner.ran, runner.found
    found.seconds = perf_counter() - started
    found.device = _device_name(next(iter(found.tasks.values())).experiment) if found.tasks else "-"
    if found.folder is not None:
        with writing(found.folder):
            storage.write_bytes(found.folder / PAGE, found.markdown().encode())
    return found


def default_folder(name: str) -> Path:
    """Where a recipe's results go unless told otherwise: always the same place, so that it goes on from there."""
    return Path("runs") / f"reproduce-{file_name(str(name).removesuffix('.toml'))}"


def _seeds(recipe: Recipe, seeds: int | Sequence[int] | None) -> tuple[int, ...]:
    own = recipe.experiment.seeds
    if seeds is None:
        return own
    if isinstance(seeds, int):
        number("seeds", seeds, low=1, whole=True)
        further = (seed for seed in itertools.count() if seed not in own)
        return (*own[:seeds], *itertools.islice(further, max(0, seeds - len(own))))
    return replace(recipe.experiment, seeds=tuple(seeds)).seeds


def _only(recipe: Recipe, only: Sequence[str]) -> tuple[Row, ...]:
    if not only:
        return recipe.rows
    picked: list[Row] = []
    for wanted in only:
        exact = [row for row in recipe.rows if row.name.lower() == wanted.lower()]
        matches = exact or [row for row in recipe.rows if row.name.lower().startswith(wanted.lower())]
        if not matches:
            known = [row.name for row in recipe.rows]
            raise EvenhandError(
                f"{recipe.name} has no row {wanted!r}{near_miss(wanted, known)} (its rows: {', '.join(known)})"
            )
        picked += matches
    return tuple(row for row in recipe.rows if row in picked)


def _tasks(found: Reproduction, more: Settings, stage: str) -> Iterator[Task]:
    recipe = found.recipe
    for part, row, quirks in itertools.product(found.parts(), found.rows, found.variants):
        if row.unavailable:
            continue
        for tried in row.tries():
            described = recipe.described(part, row, quirks, tried)
            if stage == "trial" and recipe.choose is not None:
                described = described.with_settings(recipe.choose.settings)
            described = described.with_settings(more)
            spaced = max(1, described.rounds // 10)  # evaluations on the way are for the progress bar alone
            described = replace(described, eval_every=spaced, measure="needed")
            yield Task(part, row, quirks, tried, described, stage)


def _final(
    found: Reproduction, more: Settings, trials: Sequence[Task], results: Mapping[tuple[str, int], Result]
) -> Iterator[Task]:
    """Each row's chosen setting."""
    best_of: dict[tuple[str, str, bool], tuple[float, Settings]] = {}
    choose = found.recipe.choose
    for task in trials:
        assert choose is not None
        key = (task.part.name, task.row.name, task.quirks)
        judged = Judgement.read(task.row.by or choose.by)
        score = float(np.mean([judged.score(results[task.digest, seed].measures) for seed in choose.seeds]))
        if key not in best_of or score > best_of[key][0]:
            best_of[key] = (score, task.tried)
    for task in _tasks(found, more, "final"):
        key = (task.part.name, task.row.name, task.quirks)
        if key not in best_of or best_of[key][1] == task.tried:
            yield task


class Runner:
    """Runs tasks that are not in the CSV yet, as few programs as possible."""

    def __init__(
        self, recipe: Recipe, found: Reproduction, together: int, jobs: int, progress: Progress | None
    ) -> None:
        number("together", together, low=1, whole=True)
        number("jobs", jobs, low=1, whole=True)
        self.recipe, self.progress, self.together, self.jobs = recipe, progress, together, jobs
        self.folder = found.folder
        self.measures = recipe.measures()
        self.results: dict[tuple[str, int], Result] = {}
        self.written: set[tuple[str, ...]] = set()
        self.ran = self.found = 0
        if self.folder is not None:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            self._read(self.folder / CSV)

    def run(self, tasks: Sequence[Task], seeds: Sequence[int]) -> None:
        known = {(task.digest, seed) for task in tasks for seed in seeds} & set(self.results)
        self.found += len(known)
        programs = list(self._programs(tasks, seeds))
        if self.jobs == 1 or len(programs) < 2:
            for program in programs:
                self._keep(program, outcomes(program, self.measures, self.progress))
        else:
            self._side_by_side(programs)
        for task in tasks:
            self._write(task, seeds)

    def _side_by_side(self, programs: Sequence[Program]) -> None:
        """Several processes; the largest programs first, so that none is left alone at the end."""
        workers = min(self.jobs, len(programs))
        threads = max(1, (os.cpu_count() or 1) // workers)
        apart = multiprocessing.get_context("spawn")  # a process that has used a GPU cannot be forked
        label, done = f"{len(programs)} programs, {workers} at a time", 0
        with ProcessPoolExecutor(workers, apart, torch.set_num_threads, (threads,)) as pool:
            ordered = sorted(programs, key=lambda program: -len(program.tasks) * len(program.seeds))
            waiting: dict[Future[Outcomes], Program] = {
                pool.submit(outcomes, program, self.measures): program for program in ordered
            }
            try:
                for finished in as_completed(waiting):
                    self._keep(waiting[finished], finished.result())
                    done += 1
                    if self.progress is not None:
                        self.progress(Status(label, done, len(programs), ()))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _keep(self, program: Program, found: Outcomes) -> None:
        for task in program.tasks:
            for seed in program.seeds:
                self.results[task.digest, seed] = found[task.digest, seed]
                self.ran += 1
            self._write(task, program.seeds)

    def _programs(self, tasks: Sequence[Task], seeds: Sequence[int]) -> Iterator[Program]:
        """Tasks that differ in the method alone and train alike, with the seeds that they still need."""
        groups: dict[str, list[Task]] = {}
        once = {task.digest: task for task in tasks}
        for task in once.values():
            missing = [seed for seed in seeds if (task.digest, seed) not in self.results]
            if missing:
                method = task.experiment.method
                shared = {name: value for name, value in task.experiment.to_dict().items() if name != "method"}
                apart = method.objective.name if method.objective.name in APART else ""
                kind = [shared, method.training, apart, missing]
                groups.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(task)
        share = math.ceil(len(once) * len(seeds) / self.jobs)  # so that every process has something to do
        for group in groups.values():
            missing = [seed for seed in seeds if (group[0].digest, seed) not in self.results]
            # A CPU plays replicas one after another anyway: small programs leave finished rows behind sooner.
            most = 1 if group[0].experiment.torch_device().type == "cpu" else min(self.together, share)
            for some in _batched(missing, most if most > 1 else len(missing)):
                for few in _batched(group, max(1, most // len(some))):
                    yield Program(replace(few[0].experiment, seeds=tuple(some)), list(few))

    # ---- the CSV

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if table.fieldnames != [*FACTS, *self.measures]:
                raise EvenhandError(
                    f"{str(path)!r} was written for another table, or by another version; choose another folder (--out)"
                )
            for line in table:
                if None in line.values():  # a sudden end in the middle of a line
                    continue
                found = {name: float(line[name]) for name in self.measures}
                ended = int(line["diverged"]) if line["diverged"] else None
                self.results[line["digest"], int(line["seed"])] = Result(found, float(line["seconds"]), ended)
                self.written.add(_identity(line))

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
                table.writerow({**line, "diverged": ended, "seconds": f"{result.seconds:.3f}", **told})


def _identity(line: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("part", "row", "stage", "quirks", "seed", "digest"))


def _batched(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


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

    def divided(self) -> list[Program]:
        """Each task alone, or else each seed alone."""
        if len(self.tasks) > 1:
            return [Program(self.experiment, [task]) for task in self.tasks]
        return [Program(replace(self.experiment, seeds=(seed,)), self.tasks) for seed in self.seeds]


Outcomes = dict[tuple[str, int], Result]


def outcomes(program: Program, measures: Sequence[str], progress: Progress | None = None) -> Outcomes:
    """What a program gives. A run that diverges does not take the others with it: they are then run apart."""
    experiment, tasks = program.experiment, program.tasks
    started = perf_counter()
    try:
        runs = played(
            experiment, [task.experiment.method for task in tasks], _data(experiment), progress, program.label
        )
    except Diverged as end:
        if len(tasks) == len(program.seeds) == 1:
            lost = Result(dict.fromkeys(measures, math.nan), 0.0, end.round)
            return {(tasks[0].digest, program.seeds[0]): lost}
        return {key: one for part in program.divided() for key, one in outcomes(part, measures, progress).items()}
    seconds = (perf_counter() - started) / (len(tasks) * len(program.seeds))
    return {
        (task.digest, seed): Result({name: measured(run, name) for name in measures}, seconds)
        for task, of_seeds in zip(tasks, runs, strict=True)
        for seed, run in zip(program.seeds, of_seeds, strict=True)
    }


_loaded: dict[str, Dataset] = {}  # the last one used


def _data(experiment: Experiment) -> Dataset:
    key = json.dumps([experiment.data, experiment.data_dir, dict(experiment.data_options)], default=str)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = load_data(experiment)
    return _loaded[key]


def played(
    experiment: Experiment, methods: Sequence[Method], dataset: Dataset, progress: Progress | None, label: str
) -> list[list[Run]]:
    """Every method under every seed as one program."""
    simulation = prepare(experiment, methods, dataset)
    recorder = Recorder(simulation, None, progress=progress, label=label)
    recorder.run()
    found = iter(runs_of(experiment, recorder))
    return [[next(found) for _ in experiment.seeds] for _ in methods]


def measured(run: Run, name: str) -> float:
    """A measure of a run at its end: one of its own, the worst or best share, one client, or conflicts a round."""
    word, _, argument = name.partition(":")
    if word in ("worst", "best") and argument:
        tail = worst if word == "worst" else best
        return float(tail(run.accuracies[np.isfinite(run.accuracies)], float(argument)))
    if word == "client" and argument:
        if argument not in run.names:
            raise EvenhandError(f"the measure {name!r}: no client has that name (there are {', '.join(run.names[:5])})")
        return float(run.accuracies[run.names.index(argument)])
    if word == "conflicts":
        return float(np.mean([entry["conflicts"] for entry in run.rounds if "conflicts" in entry]))
    if word == "layer_conflicts":
        layers = [entry["layer_conflicts"] for entry in run.rounds if "layer_conflicts" in entry]
        place = int(argument)
        if not layers or place > len(layers[0]) or place < 1:
            raise EvenhandError(f"the measure {name!r}: the model has {len(layers[0]) if layers else 0} layers")
        return float(np.mean([entry[place - 1] for entry in layers]))
    return run.measures()[name]


def _device_name(experiment: Experiment) -> str:
    device = experiment.torch_device()
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} {'thread' if threads == 1 else 'threads'}"
