"""A paper's table or figure run again: its numbers, ours beside them, and what holds of what the paper says.

The runs themselves are `evenhand/reruns.py`'s.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from evenhand import storage
from evenhand.checks import EvenhandError, choice, near_miss, number
from evenhand.fairness import paired_test
from evenhand.figures import drawing
from evenhand.folders import file_name, writing
from evenhand.measuring import bare, needs_all
from evenhand.recipe import (
    Claim,
    Column,
    Part,
    Recipe,
    RecipeInfo,
    RecipeTable,
    Row,
    Settings,
    find_recipe,
    listed,
    read_recipe,
    recipes,
)
from evenhand.recording import Progress
from evenhand.reruns import CSV, SERIES, Result, Runner, Task, machine_of
from evenhand.tables import text_table
from evenhand.tuning import Judgement

__all__ = ["Recipe", "RecipeInfo", "RecipeTable", "Reproduction", "read_recipe", "recipes", "reproduce"]

PAGE, DRAWING = "results.md", "figure.svg"
WITHIN = 2.0  # spreads
FAR = 99  # spreads beyond which the exact number says no more
CONFIDENCE = 0.95
HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told"
NOT_YET = "not run yet"
PLURAL = {HOLDS: "hold", FAILS: "do not hold", UNTOLD: UNTOLD}
QUIRKS = ("both", "on", "off")

Floats = np.ndarray[Any, np.dtype[np.float64]]


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
    only_parts: tuple[str, ...] = ()  # empty: all
    tasks: dict[tuple[str, str, bool], Task] = field(default_factory=dict)
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    trials: set[tuple[str, int]] = field(default_factory=set)  # those of the results that chose settings
    ran: int = 0
    found: int = 0  # were there already
    seconds: float = 0.0
    device: str = ""
    missing: int = 0  # cells that were asked for and are not there, where nothing is run

    # ---- numbers

    def parts(self) -> list[Part]:
        asked = self.only_parts or [part.name for part in self.recipe.parts]
        return [part for part in self.recipe.parts if not part.unavailable and part.name in asked]

    @property
    def runs(self) -> set[tuple[str, int]]:
        """Digest and seed of what the cells are made of."""
        return {(task.digest, seed) for task in self.tasks.values() for seed in self.seeds}

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
        none = (None,) * len(self.recipe.columns)
        paper, spread = (numbers.get(part.name, none)[place] for numbers in (row.numbers, row.spread))
        return Cell(column, paper, spread, self.values(part, row, column, quirks))

    def curve(self, part: Part, row: Row, column: Column, quirks: bool) -> tuple[Floats, Floats] | None:
        """After how many rounds, and the column's curve in the paper's unit, one row a seed; None where none ended."""
        task, name = self.tasks[part.name, row.name, quirks], self.recipe.drawn(quirks)[column.title]
        kept = [self.results[task.digest, seed].series for seed in self.seeds]
        kept = [series for series in kept if series]
        if not kept:
            return None
        values = column.scale * np.stack([series[name] for series in kept])
        return kept[0]["at"], values if bare(column.measure) == column.measure else np.sqrt(values)

    def clients(self, part: Part, row: Row, quirks: bool) -> list[Floats]:
        """Every client's accuracy, for each seed that ended."""
        task = self.tasks[part.name, row.name, quirks]
        kept = [self.results[task.digest, seed].series for seed in self.seeds]
        return [series["accuracy"] for series in kept if series]

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
        if self.only_parts and len(self.only_parts) < len(self.recipe.parts):
            said.append(f"{len(self.only_parts)} of {len(self.recipe.parts)} parts")
        if self.missing:
            said.append(f"{self.missing} of {self.missing + len(self.tasks)} rows, counted in every part, not run yet")
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
        others = claim.than
        if not others and claim.bound is None:
            others = tuple(row.name for row in self.recipe.rows if row.name not in claim.rows and not row.added)
        by_name = {row.name: row for row in self.rows}
        known = {name: row for name, row in by_name.items() if (part.name, name, quirks) in self.tasks}
        missing = [name for name in (*claim.rows, *others) if name not in known]
        pairs = [(a, b) for a in claim.rows for b in others if a in known and b in known]
        if claim.bound is not None:
            pairs = [(a, f"{claim.bound:g}") for a in claim.rows if a in known]
        if not pairs:
            return Judged(claim, part, UNTOLD, f"not run: {', '.join(missing)}")
        untold, against, least = [], [], None
        for a, b in pairs:
            one = self.values(part, known[a], column, quirks)
            given = claim.bound is not None
            other = np.full(len(one), claim.bound) if given else self.values(part, known[b], column, quirks)
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

    def variant(self, quirks: bool) -> str:
        if not self.recipe.quirky:
            return "ours"
        return "ours, quirks on" if quirks else "ours, quirks off"

    def table(self, part: Part) -> list[list[str]]:
        """Heads and lines of a part: the paper's line, then ours, row by row."""
        lines = [["row", "", *(column.head for column in self.recipe.columns)]]
        for row in self.rows:
            paper = [self.cell(part, row, column, self.variants[0]) for column in self.recipe.columns]
            name, printed = row.name, any(cell.paper is not None for cell in paper)
            if printed:
                lines.append([name, "paper", *(cell.written(cell.paper, cell.spread) for cell in paper)])
                name = ""
            blank = [""] * (len(self.recipe.columns) - 1)
            if row.unavailable:
                lines.append([name, "ours", f"not available: {row.unavailable}", *blank])
                continue
            for quirks in self.variants if part in self.parts() else ():
                task = self.tasks.get((part.name, row.name, quirks))
                if task is None:
                    lines.append([name, self.variant(quirks), NOT_YET, *blank])
                    name = ""
                    continue
                ends = [self.results[task.digest, seed].diverged for seed in self.seeds]
                cells = [
                    self.cell(part, row, column, quirks).ours(not self.shortened) for column in self.recipe.columns
                ]
                if any(end is not None for end in ends):
                    count = sum(end is not None for end in ends)
                    cells = [f"diverged under {count} of {len(ends)} seeds", *blank]
                lines.append([name, self.variant(quirks), *cells])
                name = ""
        return lines

    def chosen(self) -> list[str]:
        """The settings that were chosen from grids."""
        return [
            f"{', '.join(filter(None, (row, part, self.variant(quirks) if self.recipe.quirky else '')))}: "
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
            words = f"{self.variant(quirks)}: "
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
        if self.shortened or not any(row.numbers for row in self.rows):
            return arrows
        said = (
            f"In brackets: ours minus the paper's, in units of the paper's spread; ✓ within {WITHIN:g} of them, ✗ not"
        )
        if any(row.numbers and not row.spread for row in self.rows):
            said += '; "own": the paper gives no spread, so the unit is our standard deviation over the seeds'
        return f"{said}. {arrows}"

    def _took(self) -> str:
        """What was run now and what was there, and how long all of it took wherever it was run."""
        cells, trials = self.runs, self.trials - self.runs
        each = "runs (a row, a setting and a seed each)"
        said = f"{self.ran} {each} in {_duration(self.seconds)} on {self.device}"
        if self.found:
            said = f"{said}; {self.found}" if self.ran else f"All {self.found} {each}"
            said += f" were there already. The cells' {len(cells)} runs took {self._spent(cells)}"
            said += f", the {len(trials)} trials that chose their settings {self._spent(trials)}" if trials else ""
        ran = Counter(self.results[who].machine or "a machine that was not written down" for who in cells | trials)
        if len(ran) > 1 or (ran and not self.ran):
            said += "; run on " + " and ".join(f"{machine} ({count})" for machine, count in ran.most_common())
        return said + "."

    def _spent(self, runs: Collection[tuple[str, int]]) -> str:
        """Each run's share of the program that it trained in, added up."""
        return _duration(sum(self.results[who].seconds for who in runs))

    def __str__(self) -> str:
        """What the command line prints."""
        lines = [f"{self.recipe.paper}: {self.recipe.title}", ""]
        lines += [self._scale_words(), ""] if self.scaled_down() else []
        for part in self.recipe.parts:
            if self.only_parts and part.name not in self.only_parts:
                continue
            lines += [part.name] if part.name else []
            if part.unavailable:
                lines += [f"not available: {part.unavailable}"]
            if part in self.parts() or part.unavailable:
                lines += [_clipped_table(self.table(part)), ""]
        lines += [self._legend(), ""]
        for quirks in self.variants:
            judged = self.judged(quirks)
            lines += [f"Claims ({self.variant(quirks)}):"] if judged else []
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
        many = len(self.seeds) > 1
        ours = f"mean ± standard deviation (of a sample) over {len(self.seeds)} seeds" if many else "one seed"
        lines += [f"{spread} Ours: {ours}.", ""]
        lines += [self._legend(), ""]
        if recipe.figure is not None and self.tasks:
            lines += [f"![{recipe.title}]({DRAWING})", ""]
        for part in recipe.parts:
            if self.only_parts and part.name not in self.only_parts:
                continue
            lines += [f"## {part.name}", ""] if part.name else ["## The table", ""]
            if part.unavailable:
                lines += [f"Not available: {part.unavailable}", ""]
            head, *body = self.table(part)
            lines += [_line(head), "|---|---|" + "---:|" * (len(head) - 2), *map(_line, body), ""]
        if self.judged(self.variants[0]):
            lines += ["## What the paper says", ""]
            lines += ["| claim | " + " | ".join(map(self.variant, self.variants)) + " |"]
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
            where = ", ".join(filter(None, (part.name, self.variant(quirks))))
            lines += [f"- {where}: {said}" for said in dict.fromkeys(task.experiment.setting() for task in mine)]
        lines += [f"- {row.name} is not in the paper: {row.added}." for row in self.rows if row.added]
        lines += [f"- {note}" for note in recipe.notes]
        from evenhand import __version__

        made = f"evenhand {__version__}, torch {torch.__version__}, {datetime.date.today().isoformat()}"
        kept = f"Every row and seed is in {CSV}" + (f", what is drawn in {SERIES}" if recipe.figure else "")
        lines += [f"- {self._took()}", f"- {kept}. Made by {made}."]
        return "\n".join(lines) + "\n"


def _more(entries: Sequence[str], shown: int) -> str:
    return f"; {len(entries) - shown} more" if len(entries) > shown else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _clipped_table(lines: list[list[str]]) -> str:
    """As text; a sentence in the place of numbers does not widen their column."""
    sentences = ("not available", "diverged", NOT_YET)
    shown = [[*line[:2], "", *line[3:]] if line[2].startswith(sentences) else line for line in lines]
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
    parts: Sequence[str] = (),
    quirks: str = "both",
    data_dir: str | Path | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    together: int | None = None,
    jobs: int = 1,
    stored: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Run a paper's table or figure again and set its numbers beside ours.

    Args:
        name: a recipe (`recipes()` lists them), or the path of one of your own.
        rounds, seeds: less than the paper's, for a first look; the result says so. Seeds: how many of the recipe's
            (from the first on), or which.
        only: rows, by name or by the beginning of it.
        parts: of the table, by name or by the beginning of it, such as those whose data is here.
        quirks: "on" follows the published code, "off" the paper's text, "both" runs the two.
        data_dir, device: as in `simulate`.
        out: a folder for the CSV, the page and the figure; a row and seed that its CSV holds already is not run again.
        together: how many runs train as one program at most; less takes less memory.
        jobs: programs that run at the same time, each in a process of its own: worth it on a GPU beside many cores.
        stored: run nothing; the page of what the folder's CSV holds.
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
        tuple(_picked(recipe, "row", recipe.rows, only)),
        ({"both": (True, False), "on": (True,), "off": (False,)}[quirks] if recipe.quirky else (False,)),
        changes,
        None if out is None else Path(out),
        tuple(part.name for part in _picked(recipe, "part", recipe.parts, parts)) if parts else (),
    )
    more: dict[str, Any] = {**changes, **({} if rounds is None else {"rounds": rounds})}
    more |= {} if device is None else {"device": device}
    more |= {} if data_dir is None else {"data_dir": str(data_dir)}
    runner = Runner(recipe, found.folder, together or recipe.together, jobs, progress)
    started = perf_counter()
    trials = [task for task in _tasks(found, more, "trial") if len(task.row.tries()) > 1]
    if trials and not stored:
        assert recipe.choose is not None
        runner.run(trials, recipe.choose.seeds)
    undecided = {
        task.cell for task in trials if recipe.choose is not None and not runner.holds(task, recipe.choose.seeds)
    }
    tried = [task for task in trials if task.cell not in undecided]
    final = {task.cell: task for task in _final(found, more, tried, runner.results) if task.cell not in undecided}
    found.tasks = {cell: task for cell, task in final.items() if not stored or runner.holds(task, chosen_seeds)}
    found.missing = len(undecided) + len(final) - len(found.tasks)
    if recipe.choose is not None:
        found.trials = {(task.digest, seed) for task in trials for seed in recipe.choose.seeds} & set(runner.results)
    if stored:
        runner.found = len(found.trials | found.runs)
    else:
        runner.run(list(found.tasks.values()), chosen_seeds)
    found.results, found.ran, found.found = runner.results, runner.ran, runner.found
    found.seconds = perf_counter() - started
    found.device = machine_of(next(iter(found.tasks.values())).experiment) if found.tasks else "-"
    if found.folder is not None:
        with writing(found.folder):
            storage.write_bytes(found.folder / PAGE, found.markdown().encode())
            if recipe.figure is not None and found.tasks:
                storage.write_bytes(found.folder / DRAWING, drawing(found).encode())
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


def _picked(recipe: Recipe, kind: str, there: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """Rows or parts by name, or else by its first words, or else by its beginning; all where none is asked for."""
    picked: list[Any] = [] if only else list(there)
    for wanted in only:
        begun = [entry for entry in there if entry.name.lower().startswith(wanted.lower())]
        whole = [entry for entry in begun if not entry.name[len(wanted) : len(wanted) + 1].isalnum()]
        matches = [entry for entry in whole if len(entry.name) == len(wanted)] or whole or begun
        if not matches:
            known = [entry.name for entry in there]
            raise EvenhandError(
                f"{recipe.name} has no {kind} {wanted!r}{near_miss(wanted, known)} (its {kind}s: {', '.join(known)})"
            )
        picked += matches
    return [entry for entry in there if entry in picked]


def _tasks(found: Reproduction, more: Settings, stage: str) -> Iterator[Task]:
    recipe = found.recipe
    points = recipe.figure.points if recipe.figure is not None and stage == "final" else 10
    measure = "all" if any(map(needs_all, recipe.measures())) and stage == "final" else "needed"
    for part, row, quirks in itertools.product(found.parts(), found.rows, found.variants):
        if row.unavailable:
            continue
        for tried in row.tries():
            described = recipe.described(part, row, quirks, tried)
            if stage == "trial" and recipe.choose is not None:
                described = described.with_settings(recipe.choose.settings)
            described = described.with_settings(more)
            spaced = max(1, described.rounds // points)  # of a table for the progress bar alone
            described = replace(described, eval_every=spaced, measure=measure)
            yield Task(part, row, quirks, tried, described, stage)


def _final(
    found: Reproduction, more: Settings, trials: Sequence[Task], results: Mapping[tuple[str, int], Result]
) -> Iterator[Task]:
    """Each row's chosen setting."""
    best_of: dict[tuple[str, str, bool], tuple[float, Settings]] = {}
    choose = found.recipe.choose
    for task in trials:
        assert choose is not None
        key = task.cell
        judged = Judgement.read(task.row.by or choose.by)
        score = float(np.mean([judged.score(results[task.digest, seed].measures) for seed in choose.seeds]))
        if key not in best_of or score > best_of[key][0]:
            best_of[key] = (score, task.tried)
    for task in _tasks(found, more, "final"):
        if task.cell not in best_of or best_of[task.cell][1] == task.tried:
            yield task
