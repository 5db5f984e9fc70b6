"""A paper's table or figure as a description: what to run for every cell, the paper's numbers, and what it claims.

Each file of `evenhand/recipes/` is one table. It holds the experiment as every run describes it, the parts of the table
that change it (another data set or partition), the rows (a method with settings, perhaps a grid to choose from), the
columns (our measures in the paper's unit), the numbers, the quirks of the published code that the numbers stand on,
and the claims. A figure is a table that also says what is drawn. Reading a file checks all of it; an error names the
file and the key.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenhand.checks import EvenhandError, near_miss
from evenhand.data import datasets
from evenhand.data.partitioning import KINDS
from evenhand.experiment import Experiment, can_simulate
from evenhand.measuring import bare, check_measure, curve_of
from evenhand.models import MODELS
from evenhand.tables import Listing, text_table
from evenhand.toml import read_toml
from evenhand.tuning import Judgement

FOLDER = Path(__file__).parent / "recipes"
TOGETHER = 60  # methods times seeds that train as one program, unless a recipe says otherwise
FIGURES = ("curves", "distribution", "points")
LINES = ("rows", "columns")
POINTS = 50  # of a curve

Settings = Mapping[str, Any]
Numbers = Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True)
class Column:
    """One measure of the table, in the paper's unit: value times `scale`."""

    title: str
    measure: str
    scale: float = 1.0
    digits: int = 2
    higher: bool = True

    @property
    def head(self) -> str:
        return f"{self.title} {'↑' if self.higher else '↓'}"


@dataclass(frozen=True)
class Quirk:
    """Something that the published code does and the paper does not say; on it the published numbers stand."""

    name: str
    says: str
    settings: Settings = field(default_factory=dict)
    measures: Mapping[str, str] = field(default_factory=dict)  # by column: what the paper printed under its name
    parts: tuple[str, ...] = ()  # where its settings hold; empty: everywhere
    unavailable: str = ""


@dataclass(frozen=True)
class Part:
    """A stretch of the table with its own data or partition."""

    name: str
    settings: Settings = field(default_factory=dict)
    unavailable: str = ""


@dataclass(frozen=True)
class Choice:
    """How a row's setting is chosen from its grid: in trial runs, by the largest value of `by`."""

    says: str
    by: str
    seeds: tuple[int, ...] = (1000,)
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One row of the table: a method with its settings, and the paper's numbers in every part."""

    name: str
    method: str = ""
    settings: Settings = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # settings to choose from; all combinations
    by: str = ""  # what they are chosen by, where it differs from the recipe's rule
    parts: Mapping[str, Settings] = field(default_factory=dict)  # further settings in one part
    quirks: Settings = field(default_factory=dict)  # what the published code had for this row alone; tables: by part
    unavailable: str = ""
    added: str = ""  # why it is there although the paper has no such row; no claim about "all others" means it
    at: float | None = None  # where it stands in a figure over a setting
    numbers: Numbers = field(default_factory=dict)
    spread: Numbers = field(default_factory=dict)

    def tries(self) -> list[dict[str, Any]]:
        """Every combination of the grid; one empty one where there is none. "a,b" sets a and b together."""
        found = []
        for values in itertools.product(*self.grid.values()):
            chosen: dict[str, Any] = {}
            for names, value in zip(self.grid, values, strict=True):
                each = [name.strip() for name in names.split(",")]
                chosen |= dict(zip(each, value, strict=True)) if len(each) > 1 else {names: value}
            found.append(chosen)
        return found


@dataclass(frozen=True)
class Claim:
    """A statement of the paper: each of `rows` is better than each of `than`, or than the number `bound`, in a column.

    Without either it is about all other rows that the paper has.
    """

    says: str
    column: str
    rows: tuple[str, ...]
    than: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    bound: float | None = None


@dataclass(frozen=True)
class Figure:
    """What is drawn of the columns, for each part: curves over rounds, the clients' accuracies, or points."""

    kind: str
    columns: tuple[str, ...]  # which of them
    lines: str = "rows"  # of a chart of curves: the rows, in a chart a column, or the columns, in a chart a row
    x: str = ""  # of points: a column, or in words what `at` of the rows is
    points: int = POINTS  # of a curve


@dataclass(frozen=True)
class Recipe:
    """One table or figure of a paper."""

    name: str
    path: Path
    title: str
    paper: str
    citation: str
    experiment: Experiment
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    parts: tuple[Part, ...] = (Part(""),)
    quirks: tuple[Quirk, ...] = ()
    claims: tuple[Claim, ...] = ()
    figure: Figure | None = None
    choose: Choice | None = None
    plus_minus: str = ""  # what the paper's spread is
    notes: tuple[str, ...] = ()
    takes: str = ""  # how many runs the whole table is, and an estimate of how long they take on an H200
    together: int = TOGETHER

    def __str__(self) -> str:
        return f"{self.name}: {self.title}"

    @property
    def quirky(self) -> bool:
        """Whether anything differs with the quirks."""
        return any(quirk.settings or quirk.measures for quirk in self.quirks) or any(row.quirks for row in self.rows)

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets that it needs."""
        named = [part.settings.get("data", self.experiment.data) for part in self.parts if not part.unavailable]
        return tuple(dict.fromkeys(named))

    def measure(self, column: Column, quirks: bool) -> str:
        """What stands under a column's name."""
        found = column.measure
        for quirk in self.quirks if quirks else ():
            found = quirk.measures.get(column.title, found)
        return found

    def drawn(self, quirks: bool) -> dict[str, str]:
        """The measures whose curves are drawn, by column."""
        titles = self.figure.columns if self.figure is not None and self.figure.kind == "curves" else ()
        return {c.title: curve_of(self.measure(c, quirks)) for c in self.columns if c.title in titles}

    def measures(self) -> list[str]:
        """Every measure that any of its cells, or any choice, asks for."""
        found = [bare(self.measure(column, quirks)) for column in self.columns for quirks in (True, False)]
        for by in (*(row.by for row in self.rows), self.choose.by if self.choose else ""):
            found += [name for _, name in Judgement.read(by).terms] if by else []
        return list(dict.fromkeys(found))

    def described(self, part: Part, row: Row, quirks: bool, tried: Settings) -> Experiment:
        """The experiment behind a row's cells in one part."""
        chosen = self.experiment.with_settings(part.settings)
        for quirk in self.quirks if quirks else ():
            if not quirk.parts or part.name in quirk.parts:
                chosen = chosen.with_settings(quirk.settings)
        own = {name: value for name, value in row.quirks.items() if not isinstance(value, Mapping)}
        own = {**own, **row.quirks.get(part.name, {})} if quirks else {}
        settings = {**row.settings, **row.parts.get(part.name, {}), **own, **tried}
        return _with(chosen.with_settings({"method": row.method}), settings)


def _with(chosen: Experiment, settings: Settings) -> Experiment:
    """Settings applied together where a method insists on their agreement (FedFa's alpha and beta)."""
    parts = {name: value for name, value in settings.items() if name in ("method.server", "method.objective")}
    chosen, settings = chosen.with_settings(parts), {k: v for k, v in settings.items() if k not in parts}
    own = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith("method.")}
    rest = {name: value for name, value in settings.items() if not name.startswith("method.")}
    if own:
        rest = {"method": chosen.method.with_settings(own), **rest}
    return chosen.with_settings(rest)


# ---------------------------------------------------------------------------------------------------- reading


class Entry:
    """A table of a recipe's file, read key by key; what is left over at the end is refused."""

    def __init__(self, path: Path, where: str, values: Any) -> None:
        self.path, self.where = path, where
        if not isinstance(values, Mapping):
            raise self.error("", "must be a table of keys and values")
        self.values, self.asked = values, set[str]()

    def error(self, key: str, why: str) -> EvenhandError:
        place = ".".join(filter(None, (self.where, key)))
        return EvenhandError(f"{self.path}: {place}: {why}" if place else f"{self.path}: {why}")

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Errors inside are about this key."""
        try:
            yield
        except EvenhandError as error:
            raise self.error(key, str(error)) from error

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None, *, needed: bool = False) -> Any:
        self.asked.add(key)
        if key not in self.values:
            if needed:
                raise self.error(key, "is missing")
            return default
        value = self.values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            words = {str: "text", list: "a list", dict: "a table", bool: "true or false", int: "a number"}
            raise self.error(key, f"is {value!r}; it must be {' or '.join(words.get(k, k.__name__) for k in kinds)}")
        return value

    def text(self, key: str, *, needed: bool = True) -> str:
        found: str = self.get(key, str, "", needed=needed)
        if needed and not found.strip():
            raise self.error(key, "is empty")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        found = self.get(key, list, [])
        if not all(isinstance(entry, str) for entry in found):
            raise self.error(key, "must hold texts")
        return tuple(found)

    def tables(self, key: str, *, needed: bool = False) -> list[Entry]:
        found = self.get(key, list, [], needed=needed)
        if needed and not found:
            raise self.error(key, "is empty")
        return [Entry(self.path, f"{key}[{place}]", values) for place, values in enumerate(found)]

    def done(self) -> None:
        for key in self.values:
            if key not in self.asked:
                raise self.error(key, f"is not a key that is known here{near_miss(key, self.asked)}")


def read_recipe(path: str | Path, name: str = "", *, runs: bool = True) -> Recipe:
    """A recipe from its file, checked; runs: also that every one of them can be run."""
    place = Path(path)
    top = Entry(place, "", read_toml(place))
    with top.at("experiment"):
        experiment = Experiment.from_dict(top.get("experiment", dict, needed=True))
    if "method" in top.values["experiment"]:
        raise top.error("experiment.method", "belongs to the rows")
    columns = tuple(_column(entry) for entry in top.tables("columns", needed=True))
    parts = tuple(_part(entry) for entry in top.tables("parts")) or (Part(""),)
    drawn = "figure" in top.values
    rows = tuple(_row(entry, parts, len(columns), drawn) for entry in top.tables("rows", needed=True))
    _once(top, "columns", [column.title for column in columns])
    _once(top, "parts", [part.name for part in parts])
    _once(top, "rows", [row.name for row in rows])
    recipe = Recipe(
        name=name or place.stem,
        path=place,
        title=top.text("title"),
        paper=top.text("paper"),
        citation=top.text("citation"),
        experiment=experiment,
        columns=columns,
        rows=rows,
        parts=parts,
        quirks=tuple(_quirk(entry, columns, parts) for entry in top.tables("quirks")),
        claims=tuple(_claim(entry, columns, rows, parts) for entry in top.tables("claims")),
        figure=_figure(Entry(place, "figure", top.get("figure", dict)), columns, rows) if drawn else None,
        choose=_choice(Entry(place, "choose", top.get("choose", dict))) if "choose" in top.values else None,
        plus_minus=top.text("plus_minus", needed=False),
        notes=top.texts("notes"),
        takes=top.text("takes", needed=False),
        together=top.get("together", int, TOGETHER),
    )
    top.done()
    _once(top, "quirks", [quirk.name for quirk in recipe.quirks])
    if runs:
        _check_runs(top, recipe)
    return recipe


def _once(top: Entry, kind: str, names: Sequence[str]) -> None:
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise top.error(kind, f"{twice[0]!r} is there twice")


def _column(entry: Entry) -> Column:
    scale = entry.get("scale", (int, float), 1.0)
    digits, higher = entry.get("digits", int, 2), entry.get("higher", bool, needed=True)
    found = Column(entry.text("title"), entry.text("measure"), float(scale), digits, higher)
    with entry.at("measure"):
        check_measure(found.measure)
    entry.done()
    return found


def _part(entry: Entry) -> Part:
    found = Part(entry.text("name"), entry.get("settings", dict, {}), entry.text("unavailable", needed=False))
    entry.done()
    return found


def _quirk(entry: Entry, columns: Sequence[Column], parts: Sequence[Part]) -> Quirk:
    found = Quirk(
        entry.text("name"),
        entry.text("says"),
        entry.get("settings", dict, {}),
        entry.get("measures", dict, {}),
        entry.texts("parts"),
        entry.text("unavailable", needed=False),
    )
    for name in found.parts:
        if name not in [part.name for part in parts]:
            raise entry.error("parts", f"the table has no {name!r}")
    for title, measure in found.measures.items():
        if title not in [column.title for column in columns]:
            raise entry.error(f"measures.{title}", "is not the title of a column")
        with entry.at(f"measures.{title}"):
            check_measure(measure)
    if found.unavailable and (found.settings or found.measures):
        raise entry.error("unavailable", "a quirk with settings or measures is available")
    entry.done()
    return found


def _choice(entry: Entry) -> Choice:
    seeds = tuple(entry.get("seeds", list, [1000]))
    found = Choice(entry.text("says"), entry.text("by"), seeds, entry.get("settings", dict, {}))
    _check_by(entry, found.by)
    entry.done()
    return found


def _check_by(entry: Entry, by: str) -> None:
    with entry.at("by"):
        for _, name in Judgement.read(by).terms:
            check_measure(name)


def _figure(entry: Entry, columns: Sequence[Column], rows: Sequence[Row]) -> Figure:
    titles = [column.title for column in columns]
    points = entry.get("points", int, POINTS)
    asked = entry.texts("columns") or tuple(titles)
    found = Figure(entry.text("kind"), asked, entry.get("lines", str, "rows"), entry.text("x", needed=False), points)
    for key, given, known in (("kind", found.kind, FIGURES), ("lines", found.lines, LINES)):
        if given not in known:
            raise entry.error(key, f"{given!r} must be one of {', '.join(known)}")
    for title in asked:
        if title not in titles:
            raise entry.error("columns", f"the table has no {title!r}{near_miss(title, titles)}")
    if points < 2:
        raise entry.error("points", f"{points} is too few for a curve")
    if found.kind == "points" and not found.x:
        raise entry.error("x", "is missing: a column, or what the rows' `at` is")
    if found.kind == "points" and found.x not in titles and not any(row.at is not None for row in rows):
        raise entry.error("x", f"{found.x!r} is no column, and no row says where it stands (at)")
    entry.done()
    return found


def _row(entry: Entry, parts: Sequence[Part], count: int, drawn: bool) -> Row:
    named = [part.name for part in parts]
    own = drawn or "added" in entry.values
    found = Row(
        name=entry.text("name"),
        method=entry.text("method", needed="unavailable" not in entry.values),
        settings=entry.get("settings", dict, {}),
        grid=entry.get("grid", dict, {}),
        by=entry.text("by", needed=False),
        parts=entry.get("parts", dict, {}),
        quirks=entry.get("quirks", dict, {}),
        unavailable=entry.text("unavailable", needed=False),
        added=entry.text("added", needed=False),
        at=None if "at" not in entry.values else float(entry.get("at", (int, float))),
        numbers=_numbers(entry, "numbers", named, count, needed=not own),
        spread=_numbers(entry, "spread", named, count),
    )
    for name in found.parts:
        if name not in named:
            raise entry.error(f"parts.{name}", f"is not a part of the table{near_miss(name, named)}")
    for name, value in found.quirks.items():
        if isinstance(value, Mapping) and name not in named:
            raise entry.error(f"quirks.{name}", f"is not a part of the table{near_miss(name, named)}")
    for names, values in found.grid.items():
        each = len(names.split(","))
        fits = isinstance(values, list) and values
        if not fits or (each > 1 and not all(isinstance(one, list) and len(one) == each for one in values)):
            raise entry.error(f"grid.{names}", "must be a list of values; for several names together, of lists")
    if found.by:
        _check_by(entry, found.by)
    entry.done()
    return found


def _numbers(entry: Entry, key: str, parts: Sequence[str], count: int, *, needed: bool = False) -> Numbers:
    """One list where the table has no parts, else one a part; `none` where the paper has no number."""
    given = entry.get(key, (list, dict), {}, needed=needed)
    by_part = {"": given} if isinstance(given, list) else given
    if given == {} and not needed:
        return {}
    for part in parts:
        if part not in by_part:
            raise entry.error(f"{key}.{part}" if part else key, "is missing: every part needs its numbers")
    found = {}
    for part, values in by_part.items():
        place = f"{key}.{part}" if part else key
        if part not in parts:
            raise entry.error(place, f"is not a part of the table{near_miss(part, parts)}")
        if not isinstance(values, list) or len(values) != count:
            raise entry.error(place, f"must be a list of {count} numbers, one a column; it is {values!r}")
        for value in values:
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise entry.error(place, f"{value!r} is not a number")
        found[part] = tuple(None if value is None else float(value) for value in values)
    return found


def _claim(entry: Entry, columns: Sequence[Column], rows: Sequence[Row], parts: Sequence[Part]) -> Claim:
    found = Claim(
        entry.text("says"),
        entry.text("column"),
        entry.texts("rows"),
        entry.texts("than"),
        entry.texts("parts"),
        None if "bound" not in entry.values else float(entry.get("bound", (int, float))),
    )
    known = {
        "column": ([found.column], [column.title for column in columns]),
        "rows": (found.rows, [row.name for row in rows]),
        "than": (found.than, [row.name for row in rows]),
        "parts": (found.parts, [part.name for part in parts]),
    }
    for key, (named, there) in known.items():
        for name in named:
            if name not in there:
                raise entry.error(key, f"the table has no {name!r}{near_miss(name, there)}")
    if not found.rows:
        raise entry.error("rows", "is missing")
    if set(found.rows) & set(found.than):
        raise entry.error("than", "a row cannot be better than itself")
    if found.than and found.bound is not None:
        raise entry.error("bound", "a claim is about other rows or about a number, not both")
    entry.done()
    return found


def _check_runs(top: Entry, recipe: Recipe) -> None:
    """Every cell has a description that can be run: known data, partition, model, method, settings."""
    for number, part in enumerate(recipe.parts):
        if part.unavailable:
            continue
        with top.at(f"parts[{number}].settings" if part.name else "experiment"):
            _check_names(recipe.experiment.with_settings(part.settings))
        for place, row in enumerate(recipe.rows):
            if row.unavailable:
                continue
            with top.at(f"rows[{place}] ({row.name})"):
                if len(row.tries()) > 1 and recipe.choose is None:
                    raise EvenhandError("a grid needs a rule to choose by: [choose]")
                for quirks in (False, True) if recipe.quirky else (False,):
                    for tried in row.tries():
                        described = recipe.described(part, row, quirks, tried)
                        can_simulate(described.method)
                    _check_names(described)
                    if recipe.choose is not None:
                        described.with_settings(recipe.choose.settings)


def _check_names(experiment: Experiment) -> None:
    datasets(name=experiment.data)
    kind = re.split("[:,]", experiment.partition)[0]
    if kind not in (*KINDS, "auto"):
        raise EvenhandError(f"unknown partition {kind!r}{near_miss(kind, KINDS)}")
    if experiment.model not in MODELS and ":" not in experiment.model:
        raise EvenhandError(f"unknown model {experiment.model!r}{near_miss(experiment.model, MODELS)}")


# ---------------------------------------------------------------------------------------------------- what there is


@dataclass(frozen=True)
class RecipeInfo:
    """What there is to know of a recipe before running it."""

    name: str
    title: str
    paper: str
    data: tuple[str, ...]
    here: str  # whether the data is
    takes: str


class RecipeTable(Listing[RecipeInfo]):
    """The known recipes; prints as a table."""

    def rows(self) -> list[tuple[str, ...]]:
        return [(e.name, ", ".join(e.data), e.here, e.takes or "-", e.paper, e.title) for e in self._entries]

    def __repr__(self) -> str:
        return text_table([HEADS, *self.rows()])


HEADS = ("recipe", "data", "here", "estimate, H200", "paper", "what it shows")


def names() -> list[str]:
    """Every recipe that comes with the package: paper/table, by paper and number."""
    found = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.toml")]
    return sorted(found, key=lambda name: [part.zfill(9) if part.isdigit() else part for part in _pieces(name)])


def _pieces(name: str) -> list[str]:
    """A name cut where numbers begin and end."""
    return re.split("([0-9]+)", name)


def find_recipe(name: str | Path) -> Recipe:
    """A recipe by name, or from a file of your own."""
    if str(name).endswith(".toml"):
        return read_recipe(name)
    if str(name) not in names():
        raise EvenhandError(
            f"there is no recipe {str(name)!r}{near_miss(name, names())} (evenhand recipes lists all {len(names())}; a "
            "file of your own ends in .toml)"
        )
    return read_recipe(_file(str(name)), str(name))


def _file(name: str) -> Path:
    return FOLDER / f"{name}.toml"


def recipes(data_dir: str | Path | None = None) -> RecipeTable:
    """Every paper's table that comes with the package: its data, whether that is here, and how long it takes."""
    return RecipeTable([_info(read_recipe(_file(name), name, runs=False), data_dir) for name in names()])


def _info(recipe: Recipe, data_dir: str | Path | None) -> RecipeInfo:
    states = {name: datasets(data_dir, name)[0].available for name in recipe.data}
    here = {name: "yes" if _is_here(state) else state for name, state in states.items()}
    same = set(here.values())
    each = ", ".join(f"{name}: {state}" for name, state in here.items())
    said = "no loader" if not here else same.pop() if len(same) == 1 else each
    return RecipeInfo(recipe.name, recipe.title, recipe.paper, recipe.data, said, recipe.takes)


def _is_here(state: str) -> bool:
    return state == "yes" or "/" in state or "\\" in state


def listed(settings: Settings) -> str:
    """Settings in a few words."""
    return ", ".join(f"{name}={'none' if value is None else value}" for name, value in settings.items())
