"""What a person sees in a terminal: the table at the end of a run or a comparison, and the bars while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from evenhand.comparison import Cell, Comparison
    from evenhand.recording import Progress, Status
    from evenhand.runs import Runs

WIDEST = 1000  # letters in a line, more than any table needs
BLOCKS = " ▁▂▃▄▅▆▇█"
BINS = 10  # of a histogram: 0 to 10%, ..., 90 to 100%
SPREAD = "clients\n0% to 100%"
BEST = "bold green"
FIXED = "\N{NO-BREAK SPACE}"  # keeps the numbers under each other, with and without marks


def blocks(accuracies: Any) -> str:
    """A histogram of accuracies in ten letters, from 0 to 100%; any client at all is seen.

    >>> blocks([0.05, 0.95, 0.95, 0.99, 0.92])
    '▂        █'
    """
    known = np.asarray(accuracies, dtype=np.float64)
    counts, _ = np.histogram(np.clip(known[np.isfinite(known)], 0.0, 1.0), bins=BINS, range=(0.0, 1.0))
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[height] for height in heights)


def of_runs(runs: Runs) -> str:
    """The clients of all seeds together."""
    return blocks(np.concatenate([run.accuracies for run in runs]))


# ----------------------------------------------------------------------------------------------------- at the end


def print_run(runs: Runs) -> None:
    """A run's measures as a row, beside FedAvg's where one of the same setting lies beside it."""
    from rich.markup import escape

    from evenhand.report.words import baseline_of, ends, headline, tail_of

    baseline, tail = baseline_of(runs), tail_of(runs)
    table = _table(["mean\naccuracy ↑", f"worst\n{tail} ↑", f"best\n{tail} ↑", "std\n(pp) ↓", "angle\n(°) ↓", SPREAD])
    shown = {runs.experiment.method.name: runs} | ({} if baseline is None else {"fedavg": baseline})
    columns = []
    for entry in shown.values():
        few = np.array([ends(run.accuracies) for run in entry])
        columns.append(
            [100.0 * entry.measured("mean"), few[:, 0], few[:, 1], entry.measured("std_pp"),
             entry.measured("angle_degrees")]
        )  # fmt: skip
    for place, (name, entry) in enumerate(shown.items()):
        cells = []
        for number, values in enumerate(columns[place]):
            means = [f"{row[number].mean():.1f}" for row in columns]
            better = (max if number < 3 else min)(means, key=float)
            wins = len(shown) > 1 and means[place] == better
            spread = f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{_best(means[place]) if wins else means[place]}{spread}")
        table.add_row(escape(name), *cells, of_runs(entry))
    _print(table)
    for line in [headline(runs, baseline), *filter(None, [runs.group_sentence()])]:
        _console().print(line, markup=False, highlight=False)
    _console().print()


def print_comparison(found: Comparison) -> None:
    """The table with histograms where there is room for them, and what stands under it."""
    from rich.markup import escape

    console = _console()
    heads = [column.head.replace(" accuracy", "\naccuracy") for column in found.columns]
    for small in (True, False):
        table = _table([*heads, *([SPREAD] if small else [])])
        for label, *row in found.rows(_cell):
            tail = [of_runs(found.runs[label]) if label in found.runs else ""] if small else []
            table.add_row(escape(label), *row, *tail)
        if console.measure(table, options=console.options.update(width=WIDEST)).maximum <= console.width:
            break
    _print(table)
    for line in found.words():
        console.print(line, markup=False, highlight=False, style="dim" if line == found.words()[0] else None)
    console.print()


def _cell(cell: Cell) -> str:
    number = _best(cell.number()) if cell.bold else cell.number()
    return f"{number}{' ± ' + cell.plus_minus() if cell.plus_minus() else ''}{cell.marks:{FIXED}<2}"


def _best(number: str) -> str:
    return f"[{BEST}]{number}[/]"


def _table(heads: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="left" if head == SPREAD else "right", no_wrap=True)
    return table


def _console() -> Console:
    from rich.console import Console

    return Console()


def _print(table: Table) -> None:
    """A number must not be cut off, however narrow the window."""
    from rich.console import Console

    console = Console()
    needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    Console(width=max(console.width, needed)).print(table)


# ------------------------------------------------------------------------------------------------------ meanwhile


@contextmanager
def progress(quiet: bool, labels: Sequence[str] = (), rounds: int = 0) -> Iterator[Progress | None]:
    """Bars on stderr with what the clients get by now, one a run; nothing where stderr is no terminal.

    labels, rounds: the runs that will follow each other, so that all of them are shown from the start.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[served]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield Bars(bars, labels, rounds)


class Bars:
    """One bar a run, and one for all of them where there are several."""

    def __init__(self, bars: Any, labels: Sequence[str] = (), rounds: int = 0) -> None:
        self.bars = bars
        self.measured: dict[str, int] = {}
        self.waiting = {label: bars.add_task(label, total=rounds, start=False, served="waiting") for label in labels}
        self.tasks: dict[str, Any] = {}
        several = len(labels) > 1
        self.everything = bars.add_task("all", total=rounds * len(labels), served="") if several else None

    def __call__(self, status: Status) -> None:
        label = status.label
        if label in self.waiting:
            self.tasks[label] = self.waiting.pop(label)
            self.bars.start_task(self.tasks[label])
            self.bars.update(self.tasks[label], served="")
        elif label not in self.tasks:
            self.tasks[label] = self.bars.add_task(label, total=status.rounds, completed=status.round, served="")
        evaluated = int(status.evaluations[0]["round"]) if status.evaluations else None
        if evaluated is not None and self.measured.get(label) != evaluated:
            self.measured[label] = evaluated
            self.bars.update(self.tasks[label], served=status.served())
        self.bars.update(self.tasks[label], completed=status.round)
        if self.everything is not None:
            done = sum(task.completed for task in self.bars.tasks if task.id != self.everything)
            self.bars.update(self.everything, completed=done)
