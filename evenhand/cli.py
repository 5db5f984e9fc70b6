"""The command line: parses, calls, prints. Everything it does can be done from Python."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperCommand

from evenhand.checks import EvenhandError, plain_value
from evenhand.terminal import print_comparison, print_run, progress

if TYPE_CHECKING:
    from click import Context

    from evenhand.comparison import Comparison
    from evenhand.folders import Folder
    from evenhand.runs import Runs

ROOM = 36  # letters for the last column of a listing; with less, every entry gets lines of its own
BROKEN = 1  # exit code of an audit that breaks a bound
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

_plain_warning = warnings.formatwarning
Command = TypeVar("Command", bound=Callable[..., None])


class PlainCommand(TyperCommand):
    """Typer escapes "[default: 1]" for rich also where rich prints nothing."""

    def get_help(self, ctx: Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


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

        app.command(name, cls=PlainCommand)(guarded)
        return function

    return wrap


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; leaves by SystemExit."""
    if str(Path.cwd()) not in sys.path:  # for --model mymodel:Net; at the end, where it shadows nothing
        sys.path.append(str(Path.cwd()))
    warnings.formatwarning = _warning
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


# ------------------------------------------------------------------------------------- the options of an experiment

Data = Annotated[
    str | None, typer.Option(metavar="NAME", help="Data set (evenhand datasets), or your own .csv, .parquet, .npz.")
]
DataDir = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder that holds the data set's files.")]
Target = Annotated[str | None, typer.Option(metavar="COLUMN", help="Your own data: the column to predict.")]
ClientColumn = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Your own data: the column that says whose sample it is.")
]
Sensitive = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMNS",
        help="Columns that say who somebody is: sex,race; age:25,41,65 makes bands, race:A|B groups A, B, other.",
    ),
]
Partition = Annotated[
    str | None, typer.Option(metavar="KIND", help="Who holds what (evenhand partitions): iid, pat:2, dir:0.1, ...")
]
Clients = Annotated[int | None, typer.Option(metavar="N", help="Number of clients [30, or what the data says].")]
Split = Annotated[
    str | None,
    typer.Option(metavar="SHARES", help="Each client's shares to train, validate, test: 0.8,0,0.2, or official."),
]
Noise = Annotated[
    str | None,
    typer.Option(
        metavar="RHO,TAU", help="Wrong labels: a share RHO of the clients, each a share of TAU to 1 of its own."
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, such as data_options.seed=1. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]


def settings(
    data: Data = None,
    data_dir: DataDir = None,
    target: Target = None,
    client_column: ClientColumn = None,
    sensitive: Sensitive = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    noise: Noise = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network (evenhand models), or package.module:Class [mlp].")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Number of rounds [200].")] = None,
    participation: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the clients that a round asks [0.2].")
    ] = None,
    cohort: Annotated[
        int | None, typer.Option(metavar="N", help="Number of clients that a round asks, instead of a share.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Epochs of local training a round [1].")] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Samples a step; 0 is the full batch [50].")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", metavar="X", help="The clients' learning rate [0.1].")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N|N,N", help="How many (5: 0 to 4), or which: 3,7 (a single one: 7,) [1; compare: 5]."),
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(metavar="N", help="Rounds between evaluations of all clients [10].")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N [auto].")] = None,
    sets: Sets = None,
) -> dict[str, Any]:
    """What to change of an experiment, by the options that were given."""
    found = {
        "data": data,
        "data_dir": data_dir and str(data_dir),
        "data_options.target": target,
        "data_options.client_column": client_column,
        "data_options.sensitive": sensitive,
        "partition": partition,
        "clients": clients,
        "split": split and _split(split),
        "noise": noise,
        "model": model,
        "rounds": rounds,
        "participation": participation,
        "cohort": cohort,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "seeds": seeds and _seeds(seeds),
        "eval_every": eval_every,
        "device": device,
    }
    return {name: value for name, value in found.items() if value is not None} | _sets(sets or [])


def takes_settings(function: Command) -> Command:
    """Put the options of `settings` in the place of a command's parameter `given`, which receives what they say."""
    shared, own = (inspect.signature(entry, eval_str=True).parameters for entry in (settings, function))

    @functools.wraps(function)
    def called(**values: Any) -> None:
        given = settings(**{name: values.pop(name) for name in shared})
        function(**values, given=given)

    options: list[inspect.Parameter] = []
    for name, option in own.items():
        options += shared.values() if name == "given" else [option]
    named = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    called.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in named}
    return cast(Command, called)


# ----------------------------------------------------------------------------------------------- run and compare

Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A TOML file that describes what to run, as every run writes one.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder for the results; default: a new one in runs/.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace what the folder holds already.")]
Resume = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Go on with what was cut short.")]
Every = Annotated[float, typer.Option(metavar="SECONDS", help="Time between checkpoints.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Log = Annotated[
    list[str] | None,
    typer.Option(metavar="WHERE", help="Also log to tensorboard:DIR, mlflow:URI or wandb:PROJECT. Repeatable."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Show the page in a browser on this machine while it trains.")]
Port = Annotated[int | None, typer.Option(metavar="N", help="Port of that page [a free one].")]


@command("run")
@takes_settings
def run(
    method: Annotated[str | None, typer.Argument(help="Method with settings, such as fedfv:alpha=0.2 [even].")] = None,
    *,
    config: Config = None,
    given: dict[str, Any],
    out: Out = None,
    force: Force = False,
    resume: Resume = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", help="Seeds at the same time, a process each; --resume takes one.")
    ] = 1,
    checkpoint_every: Every = 20.0,
    log: Log = None,
    watch: Watch = False,
    port: Port = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one model over all clients; measure how each is served.

    Without arguments: the method `even` on the built-in digits, 30 clients with two classes each; a few seconds.
    [Brackets] at an option show what holds without it.

    \b
    Examples:
      evenhand run
      evenhand run fedfv:alpha=0.2 --rounds 500 --seeds 5 --jobs 5
      evenhand run adafed --data fashion-mnist --partition dir:0.1 --clients 100 --participation 0.1
      evenhand run qffl --data my.csv --client-column site --target y --set method.q=2
      evenhand run --config runs/digits-even-1/experiment.toml     repeats a run
      evenhand run --resume runs/digits-even-1                     goes on after a crash or Ctrl-C
      evenhand run --rounds 2000 --watch --log tensorboard:logs    watched in a browser, and logged
    """
    from evenhand import running
    from evenhand.callbacks import guarded
    from evenhand.experiment import Experiment, load_toml
    from evenhand.folders import RunFolder

    loggers = guarded(log or [])
    if resume is not None:
        _alone(given, config, method, out, force)
        RunFolder(resume).must_be_started()
        _say_if_finished(RunFolder(resume), as_json or quiet)
        with _watched(resume, watch, port, quiet):
            with progress(quiet) as show:
                runs = running.resume(resume, checkpoint_every=checkpoint_every, progress=show, callbacks=loggers)
            _result(runs, as_json, quiet)
        return
    base = load_toml(config) if config is not None else Experiment()
    chosen = base.with_settings(({"method": method} if method is not None else {}) | given)
    with _folder(out, f"{_short(chosen.data)}-{chosen.method.name}") as folder, _watched(folder, watch, port, quiet):
        with progress(quiet) as show:
            started = perf_counter()
            runs = running.simulate(
                chosen,
                out=folder,
                force=force,
                checkpoint_every=checkpoint_every,
                progress=show,
                callbacks=loggers,
                jobs=jobs,
            )
        _result(runs, as_json, quiet, perf_counter() - started)


@command("compare")
@takes_settings
def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="Methods with settings; differences are tested against the first."),
    ] = None,
    *,
    config: Config = None,
    given: dict[str, Any],
    export: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Also write the table to this .md, .tex or .csv file. Repeatable."),
    ] = None,
    out: Out = None,
    force: Force = False,
    resume: Resume = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="local, or ray: methods and seeds spread over a Ray cluster.")
    ] = "local",
    jobs: Annotated[int, typer.Option(metavar="N", help="Methods and seeds at the same time, a process each.")] = 1,
    checkpoint_every: Every = 20.0,
    log: Log = None,
    watch: Watch = False,
    port: Port = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same clients; print a table.

    They share clients, starting model, cohorts and batches, under each of five seeds unless told otherwise. The folder
    gets the table as Markdown, LaTeX and CSV, a page with all curves, and a run folder a method.
    [Brackets] at an option show what holds without it.

    \b
    Examples:
      evenhand compare fedavg fedfv even
      evenhand compare fedavg qffl:q=1 fedfv:alpha=0.1,tau=10 fedlf --data fashion-mnist --partition pat:2 --clients 100
      evenhand compare fedavg even --rounds 100 --export table.tex --export table.csv
      evenhand compare fedavg fedlf even --seeds 20 --jobs 8              as many at a time, in processes of their own
      evenhand compare fedavg fedlf even --seeds 20 --engine ray          RAY_ADDRESS names a cluster
      evenhand compare --config runs/digits-compare-1/comparison.toml     repeats a comparison
      evenhand compare --resume runs/digits-compare-1                     goes on after a crash or Ctrl-C
    """
    from evenhand import comparison as comparisons
    from evenhand.callbacks import guarded
    from evenhand.experiment import Experiment
    from evenhand.folders import ComparisonFolder

    loggers = guarded(log or [])
    for path in export or []:
        comparisons.table_form(path)
        if not path.parent.is_dir():
            raise EvenhandError(f"--export {path}: there is no folder {str(path.parent)!r}")
    if resume is not None:
        _alone(given, config, methods, out, force)
        ComparisonFolder(resume).must_be_started()
        _say_if_finished(ComparisonFolder(resume), as_json or quiet)
        with _watched(resume, watch, port, quiet):
            with progress(quiet, *comparisons.still_to_run(resume)) as show:
                found = comparisons.resume_comparison(
                    resume,
                    checkpoint_every=checkpoint_every,
                    progress=show,
                    callbacks=loggers,
                    engine=engine,
                    jobs=jobs,
                )
            _table(found, export or [], as_json, quiet)
        return
    base, wanted = Experiment(seeds=tuple(range(comparisons.SEEDS))), comparisons.labelled(methods) if methods else {}
    if config is not None:
        base, listed = comparisons.read_description(config)
        wanted = wanted or listed
    comparisons.refuse_method_settings(given)
    chosen = base.with_settings(given)
    if not wanted:
        raise EvenhandError("name the methods to compare, such as: evenhand compare fedavg fedfv even")
    with _folder(out, f"{_short(chosen.data)}-compare") as folder, _watched(folder, watch, port, quiet):
        with progress(quiet, list(wanted), chosen.rounds) as show:
            started = perf_counter()
            found = comparisons.compare(
                wanted,
                experiment=chosen,
                out=folder,
                force=force,
                checkpoint_every=checkpoint_every,
                progress=show,
                callbacks=loggers,
                engine=engine,
                jobs=jobs,
            )
        _table(found, export or [], as_json, quiet, perf_counter() - started)


@command("tune")
@takes_settings
def tune(
    method: Annotated[str, typer.Argument(help="Method; settings written with it stay as they are.")],
    *,
    config: Config = None,
    given: dict[str, Any],
    by: Annotated[
        str, typer.Option(metavar="RULE", help="What is best: mean, worst, 0.5*mean+0.5*worst, pooled_accuracy-dp.")
    ] = "mean",
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES", help="Values to try: alpha=0,0.1,0.5 [the papers' own, and lr]. Repeatable."
        ),
    ] = None,
    search: Annotated[str, typer.Option(metavar="KIND", help="grid, random or optuna.")] = "grid",
    trials: Annotated[int | None, typer.Option(metavar="N", help="How many, for random and optuna.")] = None,
    hold_out: Annotated[
        float, typer.Option(metavar="SHARE", help="Of each client's training samples, to judge by.")
    ] = 0.2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV that gets every trial; an interrupted search goes on from it."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose a method's settings on validation data.

    Every client keeps a share of its training samples back to judge by; the test data is not looked at. All settings
    that share the clients' work run as one program.

    \b
    Examples:
      evenhand tune fedfv --rounds 100 --seeds 3
      evenhand tune qffl --space q=0.1,1,5 --space lr=0.05,0.1 --by 0.5*mean+0.5*worst
      evenhand tune mfairfl --data adult --sensitive sex --partition shares:high --by pooled_accuracy-dp --search optuna
        --trials 40 --out trials.csv
    """
    from evenhand import experiment as experiments
    from evenhand.tuning import tune as search_for

    base = experiments.load_toml(config) if config is not None else experiments.Experiment()
    values = {name: _listed(text) for name, text in (_pair(entry, "--space") for entry in space or [])}
    with progress(quiet or as_json) as show:
        found = search_for(
            method,
            experiment=base.with_settings(given),
            by=by,
            space=values or None,
            search=search,
            trials=trials,
            hold_out=hold_out,
            out=out,
            progress=show,
        )
    if as_json:
        _print_json(found.to_dict())
    elif not quiet:
        print(f"{found.method.name} on {found.experiment.setting()}; judged by {by} on validation data\n")
        print(f"{found}\n\nbest    {found.best.said()}")
        print(f"train   {found.command()}  (with your other options)")


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise EvenhandError(f"{option} {text!r} is not of the form NAME=VALUES, such as alpha=0,0.1,0.5")
    return name.strip(), value


def _listed(text: str) -> list[Any]:
    return [plain_value(value.strip()) for value in text.split(",") if value.strip()]


# ------------------------------------------------------------------------------------------------ on a real federation


@command("deploy")
def deploy(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The deployment's TOML; with --hand-out an experiment's.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="NAME", help="A SuperLink of Flower's config.toml [its default].")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="On this machine, with TLS and keys: one SuperNode a file in clients/.")
    ] = False,
    hand_out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a data set out: one file a client, and the TOML to go with them."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the results, on the server's disk.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train over the SuperNodes of a Flower federation.

    Needs Flower: pip install 'evenhand[flower]'. docs/flower.md walks through the whole set-up.

    \b
    Examples:
      evenhand deploy --hand-out trial                             digits for four clients, and trial/deployment.toml
      evenhand deploy trial/deployment.toml --rehearse             SuperLink and SuperNodes on this machine
      evenhand deploy heart.toml --superlink secure --out /srv/runs/heart
      evenhand deploy heart.toml --superlink secure --out /srv/runs/heart --resume
    """
    from evenhand.flower import launch

    if hand_out is not None:
        if superlink is not None or out is not None or resume or force or rehearse:
            raise EvenhandError("--hand-out writes files and runs nothing: give no other option with it")
        print(launch.hand_out(file, hand_out))
        return
    if file is None:
        raise EvenhandError("name the deployment's file, or make one: evenhand deploy --hand-out trial")
    if resume and out is None:
        raise EvenhandError("--resume needs the folder of the run: --out FOLDER")
    if not rehearse:
        if launch.deploy(file, superlink, out=out, resume=resume, force=force, quiet=quiet):
            raise EvenhandError("the run did not come to its end; `flwr list` and `flwr log` say more")
        return
    if superlink is not None:
        raise EvenhandError("--rehearse starts a SuperLink of its own; leave --superlink out")
    from evenhand.flower.rehearsal import rehearse as rehearsed

    started = perf_counter()
    with _folder(out, f"{file.stem}-rehearsal") as folder:
        runs = rehearsed(file, folder, resume=resume, force=force, say=None if quiet else _say)
    _result(runs, False, quiet, perf_counter() - started)


# ------------------------------------------------------------------------------------------------ the papers' tables


@command("recipes")
def recipes(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the papers' tables and figures that can be run again.

    \b
    Examples:
      evenhand recipes
      evenhand reproduce fedfv/table3
    """
    from dataclasses import asdict

    from evenhand.recipe import HEADS
    from evenhand.recipe import recipes as known

    found = known(data_dir)
    if as_json:
        _print_json([asdict(entry) for entry in found])
    else:
        _print_table(HEADS, found.rows())


@command("reproduce")
def reproduce(
    name: Annotated[str, typer.Argument(help="A table or figure (evenhand recipes), or a .toml file of your own.")],
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Fewer rounds than the paper's.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="N|N,N", help="How many of the table's, or which: 3,7.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only rows whose name begins like this. Repeatable.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only parts whose name begins like this. Repeatable.")
    ] = None,
    on: Annotated[bool, typer.Option("--quirks", help="Only as the published code does it.")] = False,
    off: Annotated[bool, typer.Option("--no-quirks", help="Only as the paper says it.")] = False,
    both: Annotated[bool, typer.Option("--both", help="Both, side by side; so it is unless told otherwise.")] = False,
    data_dir: DataDir = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N [auto].")] = None,
    together: Annotated[
        int | None, typer.Option(metavar="N", help="Runs that train as one program; fewer need less memory.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Programs at the same time, a process each.")] = 1,
    stored: Annotated[bool, typer.Option("--stored", help="Run nothing: the page of what the CSV holds.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For the CSV and the page [runs/reproduce-NAME].")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run a paper's table or figure again; print its numbers beside ours.

    The folder gets results.csv (every row and seed), results.md (the page) and, of a figure, figure.svg. What the CSV
    holds already is not run again, so the same command goes on after a stop.

    \b
    Examples:
      evenhand reproduce fedfv/table3
      evenhand reproduce fedlf/table1 --only FedAvg --only FedLF --rounds 300 --seeds 2
      evenhand reproduce fedfv/table2 --quirks --device cuda
    """
    from evenhand import reproduction

    if on + off + both > 1:
        raise EvenhandError("--quirks, --no-quirks and --both exclude each other")
    folder = out or reproduction.default_folder(name)
    try:
        with progress(quiet) as show:
            found = reproduction.reproduce(
                name,
                rounds=rounds,
                seeds=_seeds(seeds) if seeds else None,
                only=only or (),
                parts=part or (),
                quirks="on" if on else "off" if off else "both",
                data_dir=data_dir,
                device=device,
                together=together,
                jobs=jobs,
                stored=stored,
                out=folder,
                progress=show,
            )
    except KeyboardInterrupt as stop:
        kept = f"stopped; the same command goes on from the rows that were finished, which are in {folder}"
        kept += ", and from where the others were a minute or so ago"
        raise KeyboardInterrupt(kept) from stop
    if not quiet:
        print(found)
        print(f"folder  {folder}")
        print(f"page    {folder / reproduction.PAGE}")
        if (folder / reproduction.DRAWING).is_file():
            print(f"figure  {folder / reproduction.DRAWING}")


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


def _say_if_finished(folder: Folder, silent: bool) -> None:
    if folder.finished and not silent:
        _say(f"note: the {folder.kind} was finished already; this is what it found")


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


@contextmanager
def _watched(folder: Path, watch: bool, port: int | None, quiet: bool) -> Iterator[None]:
    """The page of a folder on this machine while it fills, and then until Ctrl-C."""
    if not watch:
        if port is not None:
            raise EvenhandError("--port is the page's: it goes with --watch")
        yield
        return
    from evenhand.watch import Server

    with Server(folder, port) as server:
        if not quiet:
            _say(f"watch   {server.url}")
        yield
        with suppress(KeyboardInterrupt):
            if not quiet:
                sys.stdout.flush()
                _say(f"watch   {server.url} stays until Ctrl-C")
            server.wait()


@command("watch")
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison; it need not exist yet.")],
    port: Port = None,
) -> None:
    """Show a run or a comparison in a browser while it trains.

    The page is the report's, of what has been written so far. It renews itself, and goes on when the training, or this
    command, is stopped and started again. Only this machine can reach it.

    \b
    Examples:
      evenhand watch runs/digits-even-1
      evenhand watch runs/digits-compare-1 --port 8080
    """
    from evenhand.watch import Server, waiting_for

    note = waiting_for(folder)
    with Server(folder, port) as server, suppress(KeyboardInterrupt):
        if note:
            _say(f"note: {note}")
        _say(f"watch   {server.url}  (until Ctrl-C)")
        server.wait()


@command("audit")
def audit(
    file: Annotated[Path, typer.Argument(help="Predictions: a .csv, .tsv or .parquet file, one row a prediction.")],
    label: Annotated[str, typer.Option(metavar="COLUMN", help="The true class.")],
    prediction: Annotated[str | None, typer.Option(metavar="COLUMN", help="The predicted class.")] = None,
    score: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The positive class's probability, beside or for predictions.")
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="COLUMN", help="Whose row it is, such as the hospital.")] = None,
    sensitive: Sensitive = None,
    positive: Annotated[
        str | None, typer.Option(metavar="CLASS", help="The positive class [the last of two in order].")
    ] = None,
    threshold: Annotated[
        float, typer.Option(metavar="X", help="Scores from here on predict the positive class.")
    ] = 0.5,
    limits: Annotated[
        str | None,
        typer.Option("--max", metavar="BOUNDS", help="Bounds, such as dp=0.1,client_gap=0.15: exit code 1 if broken."),
    ] = None,
    beyond_chance: Annotated[
        bool, typer.Option("--beyond-chance", help="Exit code 1 only for bounds that are broken beyond chance.")
    ] = False,
    intersections: Annotated[bool, typer.Option(help="Also cross the sensitive columns.")] = True,
    shuffles: Annotated[int, typer.Option(metavar="N", help="Shuffles that show what chance does; 0: none.")] = 999,
    confidence: Annotated[float, typer.Option(metavar="X", help="Of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the shuffles.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write [FILE-audit.html in this folder].")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fairness report of any model, from a file of its predictions.

    Says which client, which group and which group within which client is served worst, how far off, and whether it
    could be chance; writes it as a page. Exit code 1 says that a bound is broken, 2 that something cannot be used.

    \b
    Measures for --max, each also with _mean and _gap (highest minus lowest, as in fairlearn):
      dp     demographic parity: largest deviation of a group's predictions from everyone's
      eodds  equalised odds: the same among those with the same label
      eopp   equal opportunity: the same among the positives, of right predictions
      ap     accuracy parity: largest deviation of a group's accuracy from everyone's
      client_deviation, client_gap, client_std: of the clients' accuracies
    sex.dp=0.1 holds for one attribute, sex&race.dp=0.1 for an intersection.

    \b
    Examples:
      evenhand audit predictions.csv --label y --prediction yhat --client hospital --sensitive sex,age_band
      evenhand audit predictions.csv --label y --score p --sensitive sex,age:25,41,65 --out report.html
      evenhand audit predictions.parquet --label y --prediction yhat --sensitive sex --max dp=0.1,eopp=0.1 --quiet
    """
    from evenhand import auditing
    from evenhand.folders import writing

    found = auditing.audit(
        file,
        label=label,
        prediction=prediction,
        score=score,
        client=client,
        sensitive=sensitive or (),
        positive=positive,
        threshold=threshold,
        bounds=auditing.read_bounds(limits or ""),
        intersections=intersections,
        shuffles=shuffles,
        confidence=confidence,
        seed=seed,
    )
    page = out if out is not None or as_json or quiet else Path(f"{file.stem}-audit.html")
    if page is not None:
        with writing(page):
            found.report(page)
    if as_json:
        _print_json(found.to_dict())
    elif not quiet:
        print(found)
        print(f"report  {page}  (open it in a browser)")
    else:
        for bound in found.broken:
            _say(str(bound))
    if found.failed(beyond_chance):
        raise typer.Exit(BROKEN)


# ------------------------------------------------------------------------------------------------------- what there is


@command("methods")
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its settings.")] = None, as_json: Json = False
) -> None:
    """List the methods, or say more about one: its settings, its equations.

    \b
    Examples:
      evenhand methods
      evenhand methods fedfv
    """
    from dataclasses import asdict

    from evenhand.methods import OBJECTIVES, SERVERS, method
    from evenhand.methods import methods as known

    entries = [entry for entry in known() if name is None or entry.name == method(name).name]
    if as_json:
        _print_json([asdict(entry) for entry in entries])
    elif name is None:
        rows = [(e.name, ", ".join(e.needs) or "-", e.paper, e.summary) for e in entries]
        _print_table(("method", "needs", "paper", "what it does"), rows)
        print("\nAny of them can have another server step or objective: fedavg:server=recent,rounds=10")
        for part, parts in (("server", SERVERS), ("objective", OBJECTIVES)):
            print(textwrap.fill(f"{part + '=':<11} {', '.join(parts)}", 110, subsequent_indent=" " * 12))
    else:
        for entry in entries:
            print(f"{entry.name}: {entry.summary}\n")
            print(f"paper     {entry.paper}\nneeds     {', '.join(entry.needs) or 'nothing but the updates'}")
            for place, (setting, value) in enumerate(entry.settings.items()):
                print(f"{'' if place else 'settings':<9} {setting} = {'none' if value is None else value}")
            for head, said in (("use it", entry.when), ("not", entry.when_not)):
                if said:
                    print(textwrap.fill(f"{head:<9} {said}", 110, subsequent_indent=" " * 10))
            rule = type(method(entry.name).rule)
            print(f"\n{(inspect.getmodule(rule).__doc__ or '').strip()}")


@command("datasets")
def datasets(
    name: Annotated[str | None, typer.Argument(help="One data set, with its options.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the data sets, and whether they are here; or say more about one.

    \b
    Examples:
      evenhand datasets
      evenhand datasets adult
    """
    from dataclasses import asdict

    from evenhand.data import datasets as known
    from evenhand.toml import to_toml

    entries = known(data_dir, name)
    if as_json:
        _print_json([asdict(entry) for entry in entries])
    elif name is None:
        rows = [(e.name, e.samples, e.classes, e.shape, e.origin, e.available, e.summary) for e in entries]
        _print_table(("data set", "samples", "classes", "shape", "from", "here", "what it is"), rows)
    else:
        for entry in entries:
            print(f"{entry.name}: {entry.summary}\n\nfrom      {entry.origin}\nhere      {entry.available}")
            print(f"samples   {entry.samples}\nclasses   {entry.classes}\nshape     {entry.shape}")
            for place, line in enumerate(to_toml(entry.options).splitlines()):
                print(f"{'' if place else 'options':<9} {line}")
            if entry.options:
                print("          (--set data_options.NAME=VALUE; in Python load(..., NAME=VALUE))")
            if entry.details:
                print(f"\n{entry.details}")


@command("partitions")
def partitions(
    spec: Annotated[str | None, typer.Argument(help="A partition to draw and show, such as pat:2.")] = None,
    data: Data = None,
    data_dir: DataDir = None,
    target: Target = None,
    client_column: ClientColumn = None,
    sensitive: Sensitive = None,
    clients: Clients = None,
    split: Split = None,
    noise: Noise = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    sets: Sets = None,
    limit: Annotated[int, typer.Option(help="How many clients to show.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Draw classes by clients into this .png or .svg file.")] = None,
    as_json: Json = False,
) -> None:
    """List the partitions, or draw one and show who holds what.

    \b
    Examples:
      evenhand partitions
      evenhand partitions pat:2 --data digits --clients 20
      evenhand partitions dir:0.1 --data fashion-mnist --clients 50 --picture clients.png
      evenhand partitions shares:high --data adult --sensitive sex,age_band
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
    from evenhand.folders import writing

    given = settings(data, data_dir, target, client_column, sensitive, spec, clients, split, noise, sets=sets)
    chosen = Experiment().with_settings(given)
    dataset = load_data(chosen)
    drawn = draw_partition(dataset, chosen, seed)
    if picture is not None:
        with writing(picture):
            _say(f"drawn into {drawn.draw(dataset, picture)}")
    if as_json:
        names = drawn.names or tuple(map(str, range(drawn.clients)))
        sizes = {"train": drawn.train.sizes, "validation": drawn.validation.sizes, "test": drawn.test.sizes}
        table = {"clients": names, **{part: size.tolist() for part, size in sizes.items()}}
        groups = {
            group.name: {"groups": group.values, "counts": drawn.group_counts(group).tolist()}
            for group in dataset.groups()
        }
        counts = {"labels": drawn.label_counts(dataset).tolist(), "sensitive": groups}
        noise_levels = {} if drawn.noise is None else {"noise": drawn.noise.tolist()}
        _print_json({**table, **counts, **noise_levels, "notes": drawn.notes})
    else:
        print(drawn.table(dataset, limit=limit))


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
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the page [report.html in the folder; of several: here]."),
    ] = None,
) -> None:
    """Write the page of a run or a comparison, or of several runs beside each other.

    Also of one that is not finished: it then shows how far it has got. Runs are set beside each other where nothing but
    their methods differs.

    \b
    Examples:
      evenhand report runs/digits-even-1 --out even.html
      evenhand report runs/digits-fedavg-1 runs/digits-even-1 --out both.html
    """
    from evenhand.folders import writing

    found = _load(folders)
    place = out if out is not None or len(folders) == 1 else Path("report.html")
    with writing(place or folders[0]):
        print(found.report(place))


@command("figure")
def figure(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    name: Annotated[str | None, typer.Argument(help="Which figure; without it, list those that there are.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file: .svg, .pdf or .png [NAME.svg in this folder].")
    ] = None,
) -> None:
    """Write one figure of a report to a file, for a paper or a slide.

    PDF and PNG need vl-convert-python: pip install 'evenhand[figures]'.

    \b
    Examples:
      evenhand figure runs/digits-compare-1
      evenhand figure runs/digits-compare-1 distribution --out f.pdf
      evenhand figure runs/digits-even-1 clients --out clients.svg
    """
    from evenhand.folders import writing
    from evenhand.report import figures_of
    from evenhand.report.figure import check_kind

    if out is not None:
        check_kind(out)
    found = _load([folder])
    if name is None:
        _print_table(("figure", "what it shows"), [(word, drawn.title) for word, drawn in figures_of(found).items()])
        return
    place = out if out is not None else Path(f"{name}.svg")
    with writing(place):
        print(found.figure(name, place))


def _load(folders: Sequence[Path]) -> Runs | Comparison:
    """What the folders hold; several are a comparison of all their runs."""
    from evenhand.comparison import load_comparison, side_by_side
    from evenhand.folders import ComparisonFolder
    from evenhand.running import load_runs

    if len(folders) > 1:
        return side_by_side(folders)
    return load_comparison(folders[0]) if ComparisonFolder(folders[0]).started else load_runs(folders[0])


# ------------------------------------------------------------------------------------------------------------ printing


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _warning(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Our own warnings are for people, and a line; others keep the place in the code that they are about."""
    if category.__module__.startswith("evenhand."):
        return f"warning: {message}\n"
    return _plain_warning(message, category, *where, **line)


def _print_json(value: Any) -> None:
    from evenhand.storage import to_json

    print(to_json(value, indent=2))


def _result(runs: Runs, as_json: bool, quiet: bool, seconds: float | None = None) -> None:
    if as_json:
        _print_json({"folder": str(runs.folder), **runs.summary(), "notes": runs.notes})
        return
    if quiet:
        return
    for note in runs.notes:
        _say(f"note: {note}")
    if sys.stdout.isatty():
        print(runs.experiment, end="\n\n")
        print_run(runs)
        _where(runs.folder, seconds)
        return
    print(runs)
    if len(runs) > 1:
        summary = runs.summary()
        for name, scale, unit in (("mean", 100, "%"), ("worst", 100, "%"), ("best", 100, "%"), ("std_pp", 1, " pp")):
            middle, spread = scale * summary["mean"][name], scale * summary["std"][name]
            print(f"  {name.removesuffix('_pp'):<6} {middle:5.1f} ± {spread:.1f}{unit} over the seeds")
    _where(runs.folder, seconds)


def _table(found: Comparison, export: Sequence[Path], as_json: bool, quiet: bool, seconds: float | None = None) -> None:
    from evenhand.report.comparison_page import front_words

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
        print_comparison(found)
    else:
        print(found.markdown())
    print(front_words(found), end="\n\n")
    _where(found.folder, seconds)


def _where(folder: Path | None, seconds: float | None) -> None:
    """The last lines: where everything is, and how to look at it."""
    print(f"folder  {folder}" + ("" if seconds is None else f"  ({seconds:.1f} s)"))
    print(f"report  {Path(str(folder)) / 'report.html'}  (open it in a browser)")


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        from evenhand.tables import text_table

        print(text_table([heads, *rows]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, console = Table(*heads, box=box.SIMPLE_HEAD), Console()
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    fixed = sum(max(map(len, cells)) + 3 for cells in list(zip(heads, *rows, strict=True))[:-1])
    if console.width - fixed >= ROOM:
        console.print(table)
        return
    for name, *facts, said in rows:
        known = "; ".join(f"{head}: {fact}" for head, fact in zip(heads[1:-1], facts, strict=True) if fact != "-")
        print(name)
        for text in filter(None, (said, known)):
            print(textwrap.fill(text, console.width - 1, initial_indent="    ", subsequent_indent="    "))
