"""Several methods on the same partitions, initial models, cohorts and batches, over several seeds, in one table.

Each method is an ordinary run (all its seeds at once) in a folder of its own, which `evenhand run` repeats to the same
numbers. Everything random follows from the seed alone, so the seeds are paired across methods.
"""

from __future__ import annotations

import csv
import io
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from evenhand import storage
from evenhand.callbacks import Callbacks, Guarded, guarded
from evenhand.checks import EvenhandError, choice, number
from evenhand.data import Dataset
from evenhand.engine.groups import check_groups
from evenhand.experiment import Experiment, can_simulate, chosen_experiment, load_data
from evenhand.fairness import PairedTest, few, paired_test
from evenhand.folders import COMPARISON, REPORT, SUMMARY, TABLES, ComparisonFolder, RunFolder, file_name, sweep, writing
from evenhand.methods import Method, method
from evenhand.pieces import play as play_in_pieces
from evenhand.pieces import refuse_log
from evenhand.recording import CHECKPOINT_EVERY, Diverged, Interrupted, Progress
from evenhand.running import load_runs, resume, resuming, run
from evenhand.runs import Runs, said_once
from evenhand.storage import write_json
from evenhand.tables import pandas_or_hint
from evenhand.toml import read_toml, to_toml

LOCAL, RAY = ENGINES = ("local", "ray")
SEEDS = 5
CONFIDENCE = 0.95
FIRST_MARK, BEST_MARK = "*", "†"
VERDICT = (
    "mean",
    "std_pp",
    "worst",
    "pooled_accuracy",
    "dp",
    "client_deviation",
)  # the measures that the sentence under the table speaks of

WITHOUT_GROUPS = (
    ", each measured on its own test data: the mean of their accuracies in percent, the standard deviation between "
    "clients in percentage points, the accuracy of the worst-served and of the best-served {0}, and the angle to equal "
    "accuracies (0° is perfectly even)."
)
WITH_GROUPS = (
    ": accuracy over all test data and of the worst-served {0}, in percent; the largest deviation of a group of people "
    "from everyone in how often a class is predicted (DP), the same among those of one label (EO), and in how often "
    "the prediction is right (AP); and the largest deviation of a client's accuracy from everyone's (CF)."
)


@dataclass(frozen=True)
class Column:
    """One measure of the table: how it is headed and written, and which way is better."""

    measure: str
    title: str
    scale: float
    digits: int
    higher: bool

    @property
    def head(self) -> str:
        return f"{self.title} {'↑' if self.higher else '↓'}"


def columns(clients: int, grouped: bool = False) -> list[Column]:
    """The papers' columns; of few clients, 5% is one. Where there are groups of people, mFairFL's."""
    tail = few(clients)
    if grouped:
        return [
            Column("pooled_accuracy", "accuracy", 100.0, 1, True),
            Column("worst", f"worst {tail}", 100.0, 1, True),
            Column("dp", "DP", 1.0, 3, False),
            Column("eodds", "EO", 1.0, 3, False),
            Column("ap", "AP", 1.0, 3, False),
            Column("client_deviation", "CF", 1.0, 3, False),
        ]
    return [
        Column("mean", "mean accuracy", 100.0, 1, True),
        Column("std_pp", "std (pp)", 1.0, 1, False),
        Column("worst", f"worst {tail}", 100.0, 1, True),
        Column("best", f"best {tail}", 100.0, 1, True),
        Column("angle_degrees", "angle (°)", 1.0, 1, False),
    ]


@dataclass(frozen=True)
class Cell:
    """One measure of one method over the seeds, beside the first method's and the best one's."""

    values: np.ndarray[Any, np.dtype[np.float64]]
    column: Column
    bold: bool
    first: PairedTest | None  # None: it is the first
    best: PairedTest | None  # None: it is the best

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def spread(self) -> float | None:
        return float(self.values.std(ddof=1)) if len(self.values) > 1 else None

    @property
    def marks(self) -> str:
        against = ((self.first, FIRST_MARK), (self.best, BEST_MARK))
        return "".join(mark for test, mark in against if test is not None and test.significant)

    def number(self) -> str:
        return f"{self.mean * self.column.scale:.{self.column.digits}f}"

    def plus_minus(self) -> str:
        return "" if self.spread is None else f"{self.spread * self.column.scale:.{self.column.digits}f}"


class Comparison:
    """The runs of several methods, and the table they give."""

    def __init__(
        self,
        experiment: Experiment,
        runs: Mapping[str, Runs],
        folder: Path | None = None,
        *,
        diverged: Mapping[str, int] | None = None,
        methods: Mapping[str, Method] | None = None,
    ) -> None:
        self.experiment = experiment
        self.runs = dict(runs)
        """By method, as it was written."""
        self.diverged = dict(diverged or {})
        """Methods whose training diverged, under any of the seeds, and in which round; they have no runs here."""
        self.methods = dict(methods or {})
        """The methods themselves, by label."""
        self.labels = tuple(self.methods) or (*self.runs, *self.diverged)
        """All methods, also those that diverged, in the order of the table."""
        self.folder = folder
        self.confidence = CONFIDENCE
        if not self.runs:
            raise EvenhandError(
                f"every method diverged ({self._ends()}); a smaller learning rate helps (--lr, now "
                f"{experiment.work.lr:g})"
            )

    def __repr__(self) -> str:
        place = "" if self.folder is None else f", in {str(self.folder)!r}"
        return f"<Comparison of {', '.join(self.labels)}{place}>"

    def _ends(self) -> str:
        return ", ".join(f"{label} in round {round:,}" for label, round in self.diverged.items())

    def __str__(self) -> str:
        return self.markdown()

    @property
    def first(self) -> str:
        return self.labels[0]

    def description(self) -> str:
        """The file that repeats the comparison."""
        return _description(self.experiment, self.methods)

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.experiment.seeds

    @property
    def clients(self) -> int:
        """How many are measured: those with test data."""
        measured: int = next(iter(self.runs.values()))[0].measured_clients
        return measured

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(said_once({label: runs.notes for label, runs in self.runs.items()}))

    @cached_property
    def columns(self) -> list[Column]:
        return columns(self.clients, self.grouped)

    @property
    def grouped(self) -> bool:
        """Whether the data says who belongs to which group of people."""
        return all(runs[0].cells is not None for runs in self.runs.values())

    @cached_property
    def cells(self) -> dict[str, list[Cell]]:
        """One row of cells a method that did not diverge."""
        rows: dict[str, list[Cell]] = {label: [] for label in self.runs}
        for column in self.columns:
            values = {label: runs.measured(column.measure) for label, runs in self.runs.items()}
            means = {label: float(of_seeds.mean()) for label, of_seeds in values.items()}
            best = (max if column.higher else min)(means, key=lambda label: means[label])
            shown = {label: f"{mean * column.scale:.{column.digits}f}" for label, mean in means.items()}
            first = values.get(self.first)
            for label, of_seeds in values.items():
                rows[label].append(
                    Cell(
                        of_seeds,
                        column,
                        bold=shown[label] == shown[best],
                        first=self._test(of_seeds, first) if label != self.first and first is not None else None,
                        best=self._test(of_seeds, values[best]) if label != best else None,
                    )
                )
        return rows

    def _test(self, a: Any, b: Any) -> PairedTest:
        return paired_test(a, b, confidence=self.confidence)

    # ---- tables

    def rows(self, write: Callable[[Cell], str]) -> list[list[str]]:
        """One row of text a method: its name, and its cells as `write` writes them, or in which round it diverged."""
        found = []
        for label in self.labels:
            if label in self.runs:
                found.append([label, *map(write, self.cells[label])])
            else:
                blank = ["-"] * (len(self.columns) - 1)
                found.append([label, f"diverged in round {self.diverged[label]:,}", *blank])
        return found

    def words(self) -> list[str]:
        """What stands under the table: what its columns mean, what its marks mean, and what they say."""
        lines = [f"{self.clients} clients{WITH_GROUPS if self.grouped else WITHOUT_GROUPS}".format(few(self.clients))]
        if len(self.seeds) == 1:
            lines.append("Bold is best. With one seed no difference can be tested; ask for more (--seeds 5).")
            return [*lines, *self._said_of_diverged()]
        told = f"{FIRST_MARK} differs from {self.first}, {BEST_MARK}"
        if self.first in self.diverged:
            told = f"{BEST_MARK} differs"
        lines.append(
            f"Mean ± standard deviation over {len(self.seeds)} seeds; bold is best. {told} from the best of "
            f"the column, by more than chance explains (paired t-test over the seeds, {self.confidence:.0%}; "
            "each by itself, not corrected for their number). Without a mark the seeds do not tell the two apart."
        )
        if self.first not in self.diverged:
            lines.append(self.verdict())
        return [*lines, *self._said_of_diverged()]

    def verdict(self) -> str:
        """Which methods the seeds tell apart from the first one, and in what."""
        said = []
        for place, column in enumerate(self.columns):
            if column.measure not in VERDICT:
                continue
            apart: dict[str, list[str]] = {"better": [], "worse": []}
            for label, row in self.cells.items():
                test = row[place].first
                if test is not None and test.significant:
                    apart["better" if (test.difference > 0) == column.higher else "worse"].append(label)
            words = [f"is {way} with {', '.join(labels)}" for way, labels in apart.items() if labels]
            said.append(f"{column.title.removesuffix(' (pp)')} {' and '.join(words) or 'differs with none'}")
        return f"Beyond chance, against {self.first}: {'; '.join(said)}."

    def _said_of_diverged(self) -> list[str]:
        if not self.diverged:
            return []
        return [
            f"Diverged: {self._ends()}; no client's update was a finite number any more. A smaller learning rate helps "
            f"(--lr, now {self.experiment.work.lr:g}). The seeds of a method run together, so that one ends them all."
        ]

    def markdown(self) -> str:
        """The table for a README or an issue."""
        lines = ["| method | " + " | ".join(column.head for column in self.columns) + " |"]
        lines.append("|---|" + "---:|" * len(self.columns))
        for label, *row in self.rows(_markdown_cell):
            lines.append(" | ".join([f"| {_markdown(label)}", *row]) + " |")
        return "\n".join([*lines, "", *map(_markdown, self.words())]) + "\n"

    def latex(self) -> str:
        """The table for a paper; needs the package booktabs."""
        heads = [
            _latex(column.title) + (r" $\uparrow$" if column.higher else r" $\downarrow$") for column in self.columns
        ]
        lines = [r"\begin{tabular}{l" + "r" * len(heads) + "}", r"\toprule", " & ".join(["method", *heads]) + r" \\"]
        lines.append(r"\midrule")
        for label, *row in self.rows(_latex_cell):
            lines.append(" & ".join([_latex(label), *row]) + r" \\")
        comments = [f"% {line}" for line in self.words()]
        return "\n".join([*comments, *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def csv(self) -> str:
        """The table's numbers in full: fractions, not percent; p-values of the paired tests beside them."""
        text = io.StringIO()
        rows = self._rows()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        return text.getvalue()

    @property
    def table(self) -> Any:
        """The same numbers as a pandas frame, one row a method."""
        return pandas_or_hint().DataFrame(self._rows()).set_index("method")

    @property
    def tests(self) -> Any:
        """Every paired test as a row of a pandas frame: method, measure, against, difference, interval, p."""
        rows = []
        for label, row in self.cells.items():
            for cell in row:
                for against, test in (("first", cell.first), ("best", cell.best)):
                    if test is not None:
                        low, high = test.interval or (None, None)
                        entry = {"method": label, "measure": cell.column.measure, "against": against}
                        found = {"difference": test.difference, "low": low, "high": high, "p": test.p}
                        rows.append({**entry, **found, "significant": test.significant, "note": test.note})
        return pandas_or_hint().DataFrame(rows)

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for label in self.labels:
            entry: dict[str, Any] = {"method": label}
            cells: Sequence[Cell | None] = self.cells.get(label) or [None] * len(self.columns)
            for column, cell in zip(self.columns, cells, strict=True):
                name, first, best = column.measure, cell and cell.first, cell and cell.best
                entry |= {name: cell and cell.mean, f"{name}_sd": cell and cell.spread}
                entry |= {f"{name}_p_first": first and first.p, f"{name}_p_best": best and best.p}
            rows.append({**entry, "diverged": self.diverged.get(label)})
        return rows

    def summary(self) -> dict[str, Any]:
        """Everything in plain values (JSON)."""
        return {
            "setting": self.experiment.setting(),
            "clients": self.clients,
            "confidence": self.confidence,
            "table": self._rows(),
            "diverged": self.diverged,
            "methods": {label: runs.summary() for label, runs in self.runs.items()},
        }

    def export(self, path: str | Path) -> Path:
        """Write the table; the suffix says how: .md, .tex or .csv."""
        text: str = getattr(self, table_form(path))()
        with writing(Path(path)):
            storage.write_bytes(path, text.encode())
        return Path(path)

    def figure(self, name: str, path: str | Path) -> Path:
        """Write one figure of the report (`evenhand figure` lists them); the suffix says how: .svg, .pdf or .png."""
        from evenhand.report import draw_comparison

        return draw_comparison(self, name, path)

    def report(self, path: str | Path | None = None) -> Path:
        """Write a page about the comparison that needs nothing else to be read; default: into its folder."""
        from evenhand.report import write_comparison

        return write_comparison(self, path or (self.folder or Path()) / REPORT)


def table_form(path: str | Path) -> str:
    """The form that a file's suffix asks for."""
    forms = {".md": "markdown", ".tex": "latex", ".csv": "csv"}
    if Path(path).suffix not in forms:
        raise EvenhandError(f"a table is written as {', '.join(forms)}, not as {str(path)!r}")
    return forms[Path(path).suffix]


def _markdown_cell(cell: Cell) -> str:
    number = f"**{cell.number()}**" if cell.bold else cell.number()
    spread = f" ± {cell.plus_minus()}" if cell.plus_minus() else ""
    return f"{number}{spread}{_markdown(cell.marks)}"


def _markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*")


def _latex_cell(cell: Cell) -> str:
    number = rf"\textbf{{{cell.number()}}}" if cell.bold else cell.number()
    spread = rf" $\pm$ {cell.plus_minus()}" if cell.plus_minus() else ""
    marks = cell.marks.replace(BEST_MARK, r"\dagger ").strip()
    return f"{number}{spread}" + (f"$^{{{marks}}}$" if marks else "")


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "°": r"$^\circ$"}
    special |= {"<": r"\textless{}", ">": r"\textgreater{}"}
    return "".join(special.get(sign) or (f"\\{sign}" if sign in "%&#$_{}" else sign) for sign in text)


# --------------------------------------------------------------------------------------------------------- running


def compare(
    *methods: str | Method | Mapping[str, Any] | Sequence[str | Method],
    experiment: Experiment | None = None,
    out: str | Path | None = None,
    force: bool = False,
    checkpoint_every: float = CHECKPOINT_EVERY,
    progress: Progress | None = None,
    callbacks: Callbacks = (),
    engine: str = LOCAL,
    jobs: int = 1,
    **settings: Any,
) -> Comparison:
    """Run several methods on the same partitions, initial models, cohorts and batches; five seeds by default.

    Args:
        methods: names with settings ("fedfv:alpha=0.1,tau=10") or methods; differences are tested against the first.
        experiment, settings: what to run, as in `simulate`, without a method.
        out, force, checkpoint_every, progress, callbacks: as in `simulate`; the folder holds one run folder a method.
        engine: "local", or "ray": methods and seeds are spread over a Ray cluster, with the same numbers.
        jobs: how many of them run at the same time on this machine, each in a process of its own: worth it with small
            models and many cores, most of all beside a GPU. A method is written down when it is finished; one that is
            cut short starts anew. A script must call this under `if __name__ == "__main__":`.

    >>> comparison = compare("fedavg", "qffl:q=1", rounds=3, seeds=2)
    >>> list(comparison.runs)
    ['fedavg', 'qffl:q=1']
    """
    chosen_methods = labelled(methods)
    for entry in chosen_methods.values():
        can_simulate(entry)  # before the first of them has run for an hour
    refuse_method_settings(settings)
    _check_engine(engine, jobs)
    if experiment is None:
        settings = {"seeds": SEEDS, **settings}
    chosen, listeners = chosen_experiment(experiment, settings), guarded(callbacks)
    if out is None:
        dataset = _data(chosen, chosen_methods)
        return _play(chosen, chosen_methods, None, checkpoint_every, progress, listeners, dataset, engine, jobs)
    folder = ComparisonFolder(out)
    folder.command += resuming(listeners, folder.command)
    with folder.claimed(force=force):
        dataset = _data(chosen, chosen_methods)  # a wrong name is found before anything is written
        with writing(folder.path):
            folder.clear()
            folder.describe(_description(chosen, chosen_methods))
        return _play(chosen, chosen_methods, folder, checkpoint_every, progress, listeners, dataset, engine, jobs)


def resume_comparison(
    out: str | Path,
    *,
    checkpoint_every: float = CHECKPOINT_EVERY,
    progress: Progress | None = None,
    callbacks: Callbacks = (),
    engine: str = LOCAL,
    jobs: int = 1,
) -> Comparison:
    """Continue a comparison that was cut short; finished methods are read back, and logs given what they lack."""
    _check_engine(engine, jobs)
    listeners, folder = guarded(callbacks), ComparisonFolder(out)
    folder.must_be_started()
    if folder.finished and not listeners:
        return load_comparison(out)
    folder.command += resuming(listeners, folder.command)
    with folder.locked():
        chosen, methods = read_description(folder.path / COMPARISON)
        if folder.finished:
            found = load_comparison(out)
            for label, place in folder_names(methods).items():
                if label in found.runs:
                    resume(folder.path / place, callbacks=listeners, label=label, group=folder.path.resolve().name)
            return found
        dataset = _data(chosen, methods)
        return _play(chosen, methods, folder, checkpoint_every, progress, listeners, dataset, engine, jobs)


def _check_engine(engine: str, jobs: int) -> None:
    choice("engine", engine, ENGINES)
    number("jobs", jobs, low=1, whole=True)
    if engine == RAY and jobs > 1:
        raise EvenhandError(
            "jobs are processes of this machine; a Ray cluster runs as much at a time as it has room for"
        )


def _data(chosen: Experiment, methods: Mapping[str, Method]) -> Dataset:
    """The data, once it is clear that every method can do with it."""
    dataset = load_data(chosen)
    for entry in methods.values():
        check_groups(entry, dataset)
    return dataset


def load_comparison(out: str | Path, *, unfinished: bool = False) -> Comparison:
    """The comparison in a folder, as far as it has got.

    Methods that are not finished are left out; with `unfinished`, only those that have not been measured yet, and the
    others say beside their name how far they are.
    """
    folder = ComparisonFolder(out)
    folder.must_be_started()
    chosen, methods = read_description(folder.path / COMPARISON)
    runs: dict[str, Runs] = {}
    diverged: dict[str, int] = {}
    begun: dict[str, Method] = {}
    for label, name in folder_names(methods).items():
        place, shown = RunFolder(folder.path / name), label
        if place.diverged is not None:
            diverged[shown] = place.diverged
        elif place.finished:
            runs[shown] = load_runs(place.path)
        elif unfinished and place.started and (found := load_runs(place.path))[0].evaluations:
            shown = f"{label} ({len(found[0].rounds):,} of {found.experiment.rounds:,} rounds)"
            runs[shown] = found
        else:
            continue
        begun[shown] = methods[label]
    if not begun:
        raise EvenhandError(f"no method of {str(folder.path)!r} is finished yet; {folder.command} goes on")
    return Comparison(chosen, runs, folder.path, diverged=diverged, methods=begun)


def still_to_run(out: str | Path) -> tuple[list[str], int]:
    """The methods of a comparison's folder that have not come to their end, and the rounds each of them takes."""
    folder = ComparisonFolder(out)
    folder.must_be_started()
    chosen, methods = read_description(folder.path / COMPARISON)
    places = {label: RunFolder(folder.path / name) for label, name in folder_names(methods).items()}
    return [label for label, place in places.items() if not place.finished and place.diverged is None], chosen.rounds


def side_by_side(places: Sequence[str | Path]) -> Comparison:
    """Runs of several folders as one comparison; nothing but their methods may differ."""
    runs: dict[str, Runs] = {}
    for place in places:
        if ComparisonFolder(place).started:
            found = {label: (entry, entry.folder) for label, entry in load_comparison(place).runs.items()}
        else:
            entry = load_runs(place)
            found = {entry.experiment.method.written: (entry, Path(place))}
        for label, (entry, where) in found.items():
            if not all(run.evaluations for run in entry):
                raise EvenhandError(f"{str(place)!r} has not been measured yet, so there is nothing to compare")
            runs[label if label not in runs else f"{label} ({where})"] = entry
    first, *others = runs.items()
    for label, entry in others:
        differs = _differences(first[1].experiment, entry.experiment)
        if differs:
            raise EvenhandError(
                f"{label} cannot be set beside {first[0]}: they differ in {', '.join(differs)}, not in the method alone"
            )
    return Comparison(
        first[1].experiment, runs, methods={label: entry.experiment.method for label, entry in runs.items()}
    )


def _differences(one: Experiment, other: Experiment) -> list[str]:
    """The settings that two experiments do not share, but for the method and where and how it is computed."""
    here, there = (entry.to_dict() for entry in (one, other))
    ignored = {"method", "data_dir", "device", "program", "precision", "chunk", "keep_on"}
    return [name for name in here if name not in ignored and here[name] != there[name]]


def refuse_method_settings(settings: Mapping[str, Any]) -> None:
    """Insist that settings of methods come with the methods: for all of them together they make no sense."""
    for name in settings:
        if name.partition(".")[0] == "method":
            raise EvenhandError(
                f"{name}: a comparison takes each method's settings with its name, as in fedfv:alpha=0.2"
            )


def labelled(methods: Sequence[Any]) -> dict[str, Method]:
    """Methods by the words that name them."""
    if len(methods) == 1 and isinstance(methods[0], (list, tuple)):
        methods = methods[0]
    if len(methods) == 1 and isinstance(methods[0], Mapping) and "name" not in methods[0]:
        return {str(label): method(entry) for label, entry in methods[0].items()}
    if len(methods) < 2:
        raise EvenhandError(f"a comparison needs at least two methods, not {len(methods)}")
    found: dict[str, Method] = {}
    for given in methods:
        chosen = method(given)
        label = "".join(given.split()) if isinstance(given, str) else chosen.written
        if label in found:
            raise EvenhandError(f"the method {label!r} is given twice")
        found[label] = chosen
    return found


def _description(chosen: Experiment, methods: Mapping[str, Method]) -> str:
    values = chosen.to_dict()
    del values["method"]
    return to_toml({**values, "methods": {label: entry.to_dict() for label, entry in methods.items()}})


def read_description(path: str | Path) -> tuple[Experiment, dict[str, Method]]:
    """What a comparison's file describes; a plain experiment's file describes no methods."""
    values = read_toml(path)
    listed = values.pop("methods", {})
    if isinstance(listed, list):
        return Experiment.from_dict(values), labelled(listed)
    if not isinstance(listed, Mapping):
        raise EvenhandError(f"methods in {str(path)!r} must be a list of names or a table by name")
    return Experiment.from_dict(values), {label: method(entry) for label, entry in listed.items()}


def folder_names(methods: Mapping[str, Method]) -> dict[str, str]:
    """A folder name for every method."""
    names: dict[str, str] = {}
    for label in methods:
        name = file_name(label)
        while name in names.values():
            name += "-again"
        names[label] = name
    return names


def _before_fedavg(runs: Mapping[str, Runs]) -> list[str]:
    """The methods that came to their end before FedAvg did, whose pages name its numbers too."""
    names = [entry.experiment.method.name for entry in runs.values()]
    return list(runs)[: names.index("fedavg")] if "fedavg" in names else []


def _play(
    chosen: Experiment,
    methods: Mapping[str, Method],
    folder: ComparisonFolder | None,
    every: float,
    progress: Progress | None,
    listeners: Sequence[Guarded],
    dataset: Dataset,
    engine: str,
    jobs: int,
) -> Comparison:
    group = "" if folder is None else folder.path.resolve().name
    places = {
        label: None if folder is None else RunFolder(folder.path / name, folder.command)
        for label, name in folder_names(methods).items()
    }
    told = {"progress": progress, "callbacks": listeners, "group": group, "dataset": dataset}
    if engine == RAY or jobs > 1:
        refuse_log(listeners, *(["over a Ray cluster"] if engine == RAY else []))
        runs, diverged = _in_pieces(chosen, methods, places, every, told, None if engine == RAY else jobs)
    else:
        runs, diverged = _in_turn(chosen, methods, places, every, told)
    where = None if folder is None else folder.path
    found = Comparison(chosen, runs, where, diverged=diverged, methods=methods)
    if folder is not None:
        with writing(folder.path, f"put that right and go on with: {folder.command}"):
            for label in _before_fedavg(runs):
                runs[label].report()  # with the baseline that was not there yet
            for name in TABLES:
                found.export(folder.path / name)
            found.report(folder.path / REPORT)
            write_json(folder.path / SUMMARY, found.summary())
            sweep(folder.path)
    return found


def _in_turn(
    chosen: Experiment,
    methods: Mapping[str, Method],
    places: Mapping[str, RunFolder | None],
    every: float,
    told: Mapping[str, Any],
) -> tuple[dict[str, Runs], dict[str, int]]:
    """One method after another on this machine, and which of them diverged in which round."""
    runs: dict[str, Runs] = {}
    diverged: dict[str, int] = {}
    for label, entry in methods.items():
        one, place = replace(chosen, method=entry), places[label]
        try:
            if place is not None and place.diverged is not None:
                diverged[label] = place.diverged
            elif place is not None and place.started:
                runs[label] = resume(place, checkpoint_every=every, label=label, **told)
            else:
                runs[label] = run(one, place, every=every, label=label, **told)
        except Diverged as end:  # the other methods have a right to their turn
            diverged[label] = end.round
    return runs, diverged


def _in_pieces(
    chosen: Experiment,
    methods: Mapping[str, Method],
    places: Mapping[str, RunFolder | None],
    every: float,
    told: Mapping[str, Any],
    jobs: int | None,
) -> tuple[dict[str, Runs], dict[str, int]]:
    """Methods and seeds side by side; what has been begun here already is brought to its end first."""
    begun = {label: entry for label, entry in methods.items() if (place := places[label]) is not None and place.started}
    runs, diverged = _in_turn(chosen, begun, places, every, told)
    left = {label: entry for label, entry in methods.items() if label not in begun}
    if left:
        try:
            more, further = play_in_pieces(chosen, left, places, told["dataset"], told["progress"], jobs)
        except KeyboardInterrupt as stop:
            place = next(iter(places.values()))
            if place is None:
                raise
            said = f"stopped; what is finished is kept, and {place.command} runs the rest"
            raise Interrupted(said, place.path.parent, signal.SIGINT) from stop
        runs, diverged = runs | more, diverged | {label: end.diverged for label, end in further.items()}
    return {label: runs[label] for label in methods if label in runs}, diverged
