"""The command line: parses, calls, prints. Everything it does can be done from Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from evenhand.checks import EvenhandError

if TYPE_CHECKING:
    from evenhand.comparison import Comparison
    from evenhand.folders import Progress, Status
    from evenhand.runs import Runs

WRONG = 2  # exit code of an error that the caller can put right

app = typer.Typer(
    name="evenhand",
    help="Federated learning that serves every client about equally well.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Command = TypeVar("Command", bound=Callable[..., None])


def command(name: str) -> Callable[[Command], Command]:
    """A command whose errors are one line on stderr and an exit code."""

    def wrap(function: Command) -> Command:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except EvenhandError as error:
                _say(f"error: {error}")
                raise typer.Exit(WRONG) from error
            except KeyboardInterrupt as stop:
                _say(str(stop) or "stopped at once")
                raise typer.Exit(128 + getattr(stop, "signal_number", 2)) from stop

        app.command(name)(guarded)
        return function

    return wrap


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; leaves by SystemExit."""
    app(args=None if arguments is None else list(arguments), prog_name="evenhand")


def _version(wanted: bool) -> None:
    if wanted:
        from evenhand import __version__

        print(f"evenhand {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    pass


# ----------------------------------------------------------------------------------------------- run and compare

Config = Annotated[Path | None, typer.Option(help="A TOML file that describes what to run, as every run writes one.")]
Data = Annotated[
    str | None, typer.Option(help="Data set by name (evenhand datasets), or your own .csv, .parquet, .npz.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder that holds the data set's files.")]
Target = Annotated[str | None, typer.Option(help="Your own data: the column to predict.")]
ClientColumn = Annotated[str | None, typer.Option(help="Your own data: the column that says whose sample it is.")]
Partition = Annotated[str | None, typer.Option(help="Who holds what (evenhand partitions): iid, pat:2, dir:0.1, ...")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Split = Annotated[
    str | None, typer.Option(help="Each client's shares to train, validate, test: 0.8,0,0.2, or official.")
]
Model = Annotated[str | None, typer.Option(help="Network by name (evenhand models), or package.module:Class.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Participation = Annotated[float | None, typer.Option(help="Share of the clients that a round asks.")]
Cohort = Annotated[int | None, typer.Option(help="Number of clients that a round asks, instead of a share.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of local training a round.")]
BatchSize = Annotated[int | None, typer.Option(help="Samples a step; 0 is the full batch.")]
Lr = Annotated[float | None, typer.Option("--lr", help="The clients' learning rate.")]
Seeds = Annotated[str | None, typer.Option(help="How many seeds (5: 0 to 4), or which: 3,7 (a single one: 7,).")]
EvalEvery = Annotated[int | None, typer.Option(help="Rounds between evaluations of all clients.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, such as method.alpha=0.2. Repeatable."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; default: a new one in runs/.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what the folder holds already.")]
Resume = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Go on with what was cut short.")]
Every = Annotated[float, typer.Option(help="Seconds between checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@command("run")
def run(
    method: Annotated[str | None, typer.Argument(help="Method with settings, such as fedfv:alpha=0.2.")] = None,
    config: Config = None,
    data: Data = None,
    data_dir: DataDir = None,
    target: Target = None,
    client_column: ClientColumn = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    participation: Participation = None,
    cohort: Cohort = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seeds: Seeds = None,
    eval_every: EvalEvery = None,
    device: Device = None,
    settings: Settings = None,
    out: Out = None,
    force: Force = False,
    resume: Resume = None,
    checkpoint_every: Every = 20.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one model over all clients and measure how each is served.

    Without arguments: the method `even` on the built-in digits, 30 clients with two classes each; a few seconds.

    \b
    Examples:
      evenhand run
      evenhand run fedfv:alpha=0.2 --rounds 500 --seeds 5
      evenhand run adafed --data fashion-mnist --partition dir:0.1 --clients 100 --participation 0.1
      evenhand run qffl --data my.csv --client-column site --target y --set method.q=2
      evenhand run --config runs/digits-even-1/experiment.toml     repeats a run
      evenhand run --resume runs/digits-even-1                     goes on after a crash or Ctrl-C
    """
    from evenhand import experiment as experiments

    given = _given(locals())
    if resume is not None:
        _alone(given, config, method, out, force)
        with _progress(quiet) as show:
            runs = experiments.resume(resume, checkpoint_every=checkpoint_every, progress=show)
        _result(runs, as_json, quiet)
        return
    base = experiments.load_toml(config) if config is not None else experiments.Experiment()
    chosen = base.with_settings(({"method": method} if method is not None else {}) | given)
    with _folder(out, f"{_short(chosen.data)}-{chosen.method.name}") as folder, _progress(quiet) as show:
        started = perf_counter()
        runs = experiments.simulate(chosen, out=folder, force=force, checkpoint_every=checkpoint_every, progress=show)
    _result(runs, as_json, quiet, perf_counter() - started)


@command("compare")
def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods with settings; differences are tested against the first.")
    ] = None,
    config: Config = None,
    data: Data = None,
    data_dir: DataDir = None,
    target: Target = None,
    client_column: ClientColumn = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    participation: Participation = None,
    cohort: Cohort = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seeds: Seeds = None,
    eval_every: EvalEvery = None,
    device: Device = None,
    settings: Settings = None,
    export: Annotated[
        list[Path] | None, typer.Option(help="Also write the table to this .md, .tex or .csv file. Repeatable.")
    ] = None,
    out: Out = None,
    force: Force = False,
    resume: Resume = None,
    checkpoint_every: Every = 20.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same clients, start, cohorts and batches, and print the papers' kind of table.

    Five seeds unless told otherwise. The folder gets the table as Markdown, LaTeX and CSV, and a run folder a method.

    \b
    Examples:
      evenhand compare fedavg fedfv even
      evenhand compare fedavg qffl:q=1 fedfv:alpha=0.1,tau=10 fedlf --data fashion-mnist --partition pat:2 --clients 100
      evenhand compare fedavg even --rounds 100 --export table.tex --export table.csv
      evenhand compare --config runs/digits-compare-1/comparison.toml     repeats a comparison
      evenhand compare --resume runs/digits-compare-1                     goes on after a crash or Ctrl-C
    """
    from evenhand import comparison as comparisons
    from evenhand.experiment import Experiment

    given = _given(locals())
    for path in export or []:
        comparisons.table_form(path)
    if resume is not None:
        _alone(given, config, methods, out, force)
        with _progress(quiet) as show:
            found = comparisons.resume_comparison(resume, checkpoint_every=checkpoint_every, progress=show)
        _table(found, export or [], as_json, quiet)
        return
    base, wanted = Experiment(seeds=tuple(range(comparisons.SEEDS))), comparisons.labelled(methods) if methods else {}
    if config is not None:
        base, listed = comparisons.read_description(config)
        wanted = wanted or listed
    chosen = base.with_settings(given)
    if not wanted:
        raise EvenhandError("name the methods to compare, such as: evenhand compare fedavg fedfv even")
    with _folder(out, f"{_short(chosen.data)}-compare") as folder, _progress(quiet) as show:
        started = perf_counter()
        found = comparisons.compare(
            wanted,
            experiment=chosen,
            out=folder,
            force=force,
            checkpoint_every=checkpoint_every,
            progress=show,
        )
    _table(found, export or [], as_json, quiet, perf_counter() - started)


NAMED = (
    *("data", "partition", "clients", "model", "rounds", "participation", "cohort", "epochs", "batch_size", "lr"),
    *("eval_every", "device"),
)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an experiment among a command's options: those that were given."""
    found = {name: options[name] for name in NAMED if options[name] is not None}
    if options["data_dir"] is not None:
        found["data_dir"] = str(options["data_dir"])
    for name in ("target", "client_column"):
        if options[name] is not None:
            found[f"data_options.{name}"] = options[name]
    if options["split"] is not None:
        found["split"] = _split(options["split"])
    if options["seeds"] is not None:
        found["seeds"] = _seeds(options["seeds"])
    return found | _sets(options["settings"] or [])


def _split(text: str) -> Any:
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        return text


def _seeds(text: str) -> Any:
    try:
        return int(text) if "," not in text else [int(seed) for seed in text.split(",") if seed.strip()]
    except ValueError:
        raise EvenhandError(f"--seeds {text!r} is neither a number of seeds nor a list such as 3,7") from None


def _sets(written: Sequence[str]) -> dict[str, Any]:
    from evenhand.toml import read_value

    found = {}
    for entry in written:
        name, equals, value = entry.partition("=")
        if not equals or not name.strip():
            raise EvenhandError(f"--set {entry!r} is not of the form NAME=VALUE, such as method.alpha=0.2")
        found[name.strip()] = read_value(value)
    return found


def _alone(given: Mapping[str, Any], *others: Any) -> None:
    if given or any(others):
        raise EvenhandError("--resume goes on with what was begun, as it was described: give no other settings with it")


def _short(data: str) -> str:
    return Path(data).stem if Path(data).suffix else data


@contextmanager
def _folder(out: Path | None, name: str) -> Iterator[Path]:
    """The folder asked for, or a new one, which goes again if nothing comes of it."""
    from evenhand.folders import new_folder

    folder = out if out is not None else new_folder(name)
    try:
        yield folder
    finally:
        if out is None:
            for empty in (folder, folder.parent):
                with suppress(OSError):
                    empty.rmdir()


# ------------------------------------------------------------------------------------------------------- what there is


@command("methods")
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its settings.")] = None, as_json: Json = False
) -> None:
    """List the methods, or one method's settings.

    \b
    Examples:
      evenhand methods
      evenhand methods fedfv
    """
    from dataclasses import asdict

    from evenhand.methods import method
    from evenhand.methods import methods as known

    entries = [entry for entry in known() if name is None or entry.name == method(name).name]
    if as_json:
        _print_json([asdict(entry) for entry in entries])
    elif name is None:
        rows = [(e.name, ", ".join(e.needs) or "-", e.paper, e.summary) for e in entries]
        _print_table(("method", "needs", "paper", "what it does"), rows)
    else:
        for entry in entries:
            print(f"{entry.name}: {entry.summary}\n{entry.paper}")
            for setting, value in entry.settings.items():
                print(f"  {setting} = {value}")


@command("datasets")
def datasets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets, and whether they are here."""
    from dataclasses import asdict

    from evenhand.data import datasets as known

    entries = known(data_dir)
    if as_json:
        _print_json([asdict(entry) for entry in entries])
    else:
        rows = [(e.name, e.samples, e.classes, e.shape, e.origin, e.available, e.summary) for e in entries]
        _print_table(("data set", "samples", "classes", "shape", "from", "here", "what it is"), rows)


@command("partitions")
def partitions(
    spec: Annotated[str | None, typer.Argument(help="A partition to draw and show, such as pat:2.")] = None,
    data: Data = None,
    data_dir: DataDir = None,
    target: Target = None,
    client_column: ClientColumn = None,
    clients: Clients = None,
    split: Split = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    limit: Annotated[int, typer.Option(help="How many clients to show.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Draw classes by clients into this .png or .svg file.")] = None,
    as_json: Json = False,
) -> None:
    """List the kinds of partition, or draw one and show who holds what.

    \b
    Examples:
      evenhand partitions
      evenhand partitions pat:2 --data digits --clients 20
      evenhand partitions dir:0.1 --data fashion-mnist --clients 50 --picture clients.png
    """
    from dataclasses import asdict

    from evenhand.data import partitions as known

    if spec is None:
        entries = known()
        if as_json:
            _print_json([asdict(entry) for entry in entries])
        else:
            rows = [(e.usage, ", ".join(f"{n}={v}" for n, v in e.options.items()) or "-", e.summary) for e in entries]
            _print_table(("partition", "options", "what each client holds"), rows)
        return
    from evenhand.experiment import Experiment, draw_partition, load_data

    options = {"data": data, "data_dir": data_dir and str(data_dir), "clients": clients, "partition": spec}
    options |= {"data_options.target": target, "data_options.client_column": client_column}
    options["split"] = None if split is None else _split(split)
    chosen = Experiment().with_settings({name: value for name, value in options.items() if value is not None})
    dataset = load_data(chosen)
    drawn = draw_partition(dataset, chosen, seed)
    if as_json:
        names = drawn.names or tuple(map(str, range(drawn.clients)))
        sizes = {"train": drawn.train.sizes, "validation": drawn.validation.sizes, "test": drawn.test.sizes}
        table = {"clients": names, **{part: size.tolist() for part, size in sizes.items()}}
        _print_json({**table, "labels": drawn.label_counts(dataset).tolist(), "notes": drawn.notes})
    else:
        print(drawn.table(dataset, limit=limit))
    if picture is not None:
        _say(f"drawn into {drawn.draw(dataset, picture)}")


@command("models")
def models(as_json: Json = False) -> None:
    """List the networks, with their size for a typical input."""
    from dataclasses import asdict

    from evenhand.models import models as known

    entries = known()
    if as_json:
        _print_json([asdict(entry) for entry in entries])
        return
    rows = [
        (e.name, f"{e.parameters:,}", f"{'x'.join(map(str, e.shape))} -> {e.classes}", e.paper, e.summary)
        for e in entries
    ]
    _print_table(("model", "parameters", "for", "paper", "what it is"), rows)


@command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: report.html in the folder.")
    ] = None,
) -> None:
    """Write the page of a run or a comparison again, also of one that is not finished.

    \b
    Example:
      evenhand report runs/digits-even-1 --out even.html
    """
    from evenhand.comparison import load_comparison
    from evenhand.experiment import load_runs
    from evenhand.folders import ComparisonFolder, writing

    found = load_comparison(folder) if ComparisonFolder(folder).started else load_runs(folder)
    with writing(out or folder):
        print(found.report(out))


# ------------------------------------------------------------------------------------------------------------ printing


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print_json(value: Any) -> None:
    from evenhand.folders import to_json

    print(to_json(value, indent=2))


def _result(runs: Runs, as_json: bool, quiet: bool, seconds: float | None = None) -> None:
    if as_json:
        _print_json({"folder": str(runs.folder), **runs.summary(), "notes": runs.notes})
        return
    if quiet:
        return
    for note in runs.notes:
        _say(f"note: {note}")
    print(runs)
    if len(runs) > 1:
        summary = runs.summary()
        for name, scale, unit in (("mean", 100, "%"), ("worst", 100, "%"), ("best", 100, "%"), ("std_pp", 1, " pp")):
            middle, spread = scale * summary["mean"][name], scale * summary["std"][name]
            print(f"  {name.removesuffix('_pp'):<6} {middle:5.1f} ± {spread:.1f}{unit} over the seeds")
    took = "" if seconds is None else f" ({seconds:.1f} s)"
    print(f"{runs.folder}{took}; open {Path(str(runs.folder)) / 'report.html'} in a browser")


def _table(found: Comparison, export: Sequence[Path], as_json: bool, quiet: bool, seconds: float | None = None) -> None:
    for path in export:
        found.export(path)
    if as_json:
        _print_json({"folder": str(found.folder), **found.summary(), "notes": found.notes})
        return
    if quiet:
        return
    for note in found.notes:
        _say(f"note: {note}")
    print(found.experiment.setting(), end="\n\n")
    if sys.stdout.isatty():
        _print_bold(found)
    else:
        print(found.markdown())
    took = "" if seconds is None else f" ({seconds:.1f} s)"
    print(f"{found.folder}{took}; open {Path(str(found.folder)) / 'report.html'} in a browser")


def _print_bold(found: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for column in found.columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for label, row in found.cells.items():
        cells = []
        for cell in row:
            number = f"[bold]{cell.number()}[/bold]" if cell.bold else cell.number()
            cells.append(f"{number}{' ± ' + cell.plus_minus() if cell.plus_minus() else ''}{cell.marks:<2}")
        table.add_row(escape(label), *cells)
    console = Console()
    console.print(table)
    for line in found.words():
        console.print(line, markup=False, highlight=False)
    console.print()


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        from evenhand.tables import text_table

        print(text_table([heads, *rows]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar on stderr with what the clients get by now; nothing where stderr is no terminal."""
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
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield Bars(bars)


class Bars:
    """One bar a run."""

    def __init__(self, bars: Any) -> None:
        self.bars = bars
        self.tasks: dict[str, Any] = {}
        self.measured: dict[str, int] = {}

    def __call__(self, status: Status) -> None:
        label = status.label
        if label not in self.tasks:
            self.tasks[label] = self.bars.add_task(label, total=status.rounds, completed=status.round, served="")
        evaluated = int(status.evaluations[0]["round"])
        if self.measured.get(label) != evaluated:
            self.measured[label] = evaluated
            self.bars.update(self.tasks[label], served=status.served())
        self.bars.update(self.tasks[label], completed=status.round)
