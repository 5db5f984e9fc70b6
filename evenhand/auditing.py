"""A fairness report of any model from its predictions: who is served worst, how far off, and whether it is chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenhand import storage
from evenhand.chance import Chance, draws, over, shuffled
from evenhand.checks import EvenhandError, near_miss, number
from evenhand.columns import Column, Floats, Ints, coded, read
from evenhand.counts import CLIENT_MEASURES, FORMS, KINDS, MEASURES, fractions
from evenhand.data.attributes import attribute_names, sensitive_columns
from evenhand.groups import (
    BEYOND,
    BY_CLIENT,
    TOO_FEW,
    WITHIN,
    AttributeFairness,
    Deviations,
    Finding,
    GroupFairness,
    between,
    decimal,
    measured,
)
from evenhand.predictions import Predictions
from evenhand.streams import stream
from evenhand.tables import text_table

SHUFFLES = 999
FEWEST = 99  # shuffles, however large the tables
BUDGET = 30_000_000  # random numbers for all shuffles: some seconds
MOST_CELLS = 20_000_000  # counts of one comparison; larger ones are not shuffled
SPELLINGS = {
    "demographic_parity": "dp",
    "equalised_odds": "eodds",
    "equalized_odds": "eodds",
    "equal_opportunity": "eopp",
    "accuracy_parity": "ap",
}


@dataclass(frozen=True)
class Bound:
    """A limit on a measure, and how the measure stands to it."""

    measure: str
    attribute: str  # "clients" for client fairness
    limit: float
    value: float
    low: float  # of the measure's interval; not-a-number where it has none
    high: float
    p: float | None
    confidence: float
    remark: str = ""

    @property
    def broken(self) -> bool:
        """Whether the measure is above the limit."""
        return self.value > self.limit

    @property
    def verdict(self) -> str:
        """Whether a break is more than chance: whether the whole interval is above the limit."""
        if not self.broken:
            return "kept"
        if math.isnan(self.low):
            return BEYOND if self.p is not None and self.p <= 1.0 - self.confidence + 1e-12 else WITHIN
        return BEYOND if self.low > self.limit else WITHIN

    def __str__(self) -> str:
        said = f"{self.measure} of {self.attribute}: {decimal(self.value)}, bound {self.limit:g}: "
        if not self.broken:
            return f"{said}kept"
        why = f"the {self.confidence:.0%} interval, {between(self.low, self.high)}, "
        why += "lies above it" if self.verdict == BEYOND else "reaches below it"
        if math.isnan(self.low):
            why = "nothing was shuffled to tell" if self.p is None else f"p = {self.p:.3g} for any difference"
        return f"{said}broken, {self.verdict} ({why}{'; ' if self.remark else ''}{self.remark})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON)."""
        return {**self.__dict__, "broken": self.broken, "verdict": self.verdict}


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. `print` shows it, `report` writes it as a page, `bounds` says which limits are broken."""

    source: str
    roles: Mapping[str, str]
    """Which column is the label, the prediction, ..., in words."""
    fairness: GroupFairness
    inside: tuple[Finding, ...]
    """Of every attribute and kind the group farthest from everyone at its client, where any is beyond chance."""
    bounds: tuple[Bound, ...]
    shuffles: int
    notes: tuple[str, ...]

    @property
    def broken(self) -> tuple[Bound, ...]:
        """The bounds that are broken, by chance or not."""
        return tuple(bound for bound in self.bounds if bound.broken)

    def failed(self, beyond_chance: bool = False) -> bool:
        """Whether any bound is broken, or any beyond chance."""
        return any(bound.verdict == BEYOND or not beyond_chance for bound in self.broken)

    def report(self, path: str | Path) -> Path:
        """Write the page: one HTML file that needs nothing else."""
        from evenhand.report.audit import audit_page

        storage.write_bytes(path, audit_page(self).encode())
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON)."""
        found = {"source": self.source, "roles": dict(self.roles), **self.fairness.to_dict(), "shuffles": self.shuffles}
        found["inside"] = [one.to_dict() for one in self.inside]
        return {**found, "bounds": [bound.to_dict() for bound in self.bounds], "notes": list(self.notes)}

    def heading(self) -> str:
        """The columns and their roles, in one line."""
        return "; ".join(f"{role} {column}" for role, column in self.roles.items())

    def how(self) -> str:
        """How to read the intervals and p."""
        level = f"{self.fairness.confidence:.0%}"
        said = (
            f"Intervals are {level}; those of deviations hold for all groups of an attribute together. "
            f"'{TOO_FEW}': the deviation may be none, and may be more than 10 points."
        )
        if not self.shuffles:
            return f"{said} Nothing was shuffled, so 'beyond chance' means that the interval leaves out zero."
        clients = self.fairness.clients
        within = ""
        if clients is not None and self.fairness.attributes:
            within = f" (groups: within each {clients.attribute})"
        return (
            f"{said} p: how often, with membership shuffled{within}, any stands out as much in {self.shuffles:,} "
            f"shuffles, corrected for the number of groups; 'beyond chance' is p of at most "
            f"{1 - self.fairness.confidence:.3g}."
        )

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.fairness.sentence()}", self.heading(), "", *self.fairness.lines()]
        if self.inside and self.fairness.clients is not None:
            inside = text_table([[one.attribute, KINDS[one.kind].title, str(one)] for one in self.inside])
            parts += [f"Standing out most within one {self.fairness.clients.attribute}", *_indented(inside), ""]
        if self.bounds:
            parts += ["Bounds", *_indented("\n".join(map(str, self.bounds))), ""]
        parts += [self.how(), *(f"note: {note}" for note in self.notes)]
        return "\n".join(parts)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


# ------------------------------------------------------------------------------------------- the door


def audit(
    data: Any,
    *,
    label: str,
    prediction: str | None = None,
    score: str | None = None,
    client: str | None = None,
    sensitive: str | Sequence[str] = (),
    positive: Any = None,
    threshold: float = 0.5,
    bounds: Mapping[str, float] | None = None,
    intersections: bool = True,
    shuffles: int = SHUFFLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """A fairness report of a model's predictions.

    Args:
        data: a CSV, TSV or Parquet file, a data frame, or a mapping of columns ({"y": [...], "yhat": [...]}).
        label, prediction, score, client: names of columns. The score is the positive class's probability; without a
            prediction column, the positive class is predicted from `threshold` on.
        sensitive: names of the columns that say who somebody is, "sex,race"; "age:25,41,65" makes bands of a number,
            "race:White|Black" these two groups and `other`.
        positive: the class that is the good (or bad) news; see `group_fairness`.
        bounds: limits by measure, {"dp": 0.1, "client_gap": 0.15}; "sex.dp" holds for that attribute alone, and
            "sex & race.dp" for an intersection (a plain name holds for every attribute, not for intersections).
        intersections: also cross the attributes, two by two and all together.
        shuffles: how often groups and clients are shuffled to see what chance does; 0 for not at all. Groups are
            shuffled within clients, so that a difference between clients is not taken for one between groups.
        confidence: of the intervals, and of what is called beyond chance.
        seed: of the shuffles.

    >>> table = {"y": [0, 1] * 50, "yhat": [0, 1] * 25 + [0, 0] * 25, "sex": ["F"] * 50 + ["M"] * 50}
    >>> found = audit(table, label="y", prediction="yhat", sensitive="sex", bounds={"eopp": 0.2})
    >>> print(found.bounds[0])
    eopp of sex: 0.500, bound 0.2: broken, beyond chance (the 95% interval, 0.406 .. 0.500, lies above it)
    """
    number("shuffles", shuffles, low=0, high=1_000_000, whole=True)
    number("confidence", confidence, above=0.0, high=1.0 - 1e-9)
    number("threshold", threshold, low=0.0, high=1.0)
    number("seed", seed, low=0, whole=True)
    wanted = attribute_names(sensitive)
    limits = _spelled(bounds or {})
    if prediction is None and score is None:
        raise EvenhandError("name the column of predictions (--prediction), or of scores (--score)")
    if not wanted and client is None:
        raise EvenhandError(
            "nothing to compare: name sensitive columns (--sensitive), the client column (--client), or both"
        )
    words, scores, people = _columns(data, label, prediction, score, client, wanted)
    labels = words[label]
    named = positive
    if prediction is not None:
        predictions = words[prediction]
    else:
        assert scores is not None
        predictions, named = _thresholded(labels, scores, threshold, positive)
    given = Predictions.prepared(
        labels,
        predictions,
        people,
        clients=None if client is None else words[client],
        scores=scores,
        positive=named,
        intersections=intersections,
    )
    fairness = measured(given, confidence)
    notes = list(fairness.notes)
    if scores is not None and fairness.positive is None:
        notes.append(
            "there are more than two classes: name the one that the scores are of (--positive) to see them judged"
        )
    inside: list[Finding] = []
    times = 0
    if shuffles:
        fairness, inside, times, more = _Tests.of(given, fairness).run(shuffles, seed)
        notes += more
    roles = {"label": label}
    roles["prediction" if prediction is not None else "prediction from"] = prediction or f"{score} >= {threshold:g}"
    roles |= {role: column for role, column in (("score", score), ("client", client)) if column}
    if fairness.positive is not None:
        how = "" if positive is not None else " (the last of the two classes in order; --positive names the other)"
        roles["positive"] = f"{fairness.positive}{how}"
    source = str(data) if isinstance(data, (str, Path)) else f"{len(labels):,} rows given"
    checked = [bound for (name, measure), limit in limits for bound in _checked(fairness, name, measure, limit)]
    return Audit(source, roles, fairness, tuple(inside), tuple(checked), times, tuple(notes))


def _columns(
    data: Any, label: str, prediction: str | None, score: str | None, client: str | None, wanted: Sequence[str]
) -> tuple[dict[str, Column], Floats | None, dict[str, Column]]:
    """The columns of words, the scores, and the attributes by name."""
    there = getattr(data, "columns", data) if not isinstance(data, (str, Path)) else ()
    banded = [word.partition(":")[0] for word in wanted if ":" in word and word not in there]
    plain = [word for word in wanted if ":" not in word or word in there]
    asked = {label: "--label", prediction: "--prediction", score: "--score", client: "--client"}
    said = {name: f"{option} {name}" for name, option in asked.items() if name is not None}
    said |= {name: f"--sensitive {name}" for name in (*plain, *banded)}
    names = [name for name in (label, prediction, client, *plain) if name is not None]
    figures = [name for name in (score, *banded) if name is not None]
    words, found = read(data, list(dict.fromkeys(names)), list(dict.fromkeys(figures)), said)
    people = {name: words[name] for name in plain}
    where = str(data) if isinstance(data, (str, Path)) else "the data"
    cut = sensitive_columns(where, found, [word for word in wanted if word not in plain])
    people |= {name: coded(name, values) for name, values in cut.items()}
    return words, None if score is None else found[score], people


def _thresholded(labels: Column, scores: Floats, threshold: float, positive: Any) -> tuple[Column, str]:
    """Predictions from scores, and the positive class."""
    if len(labels.words) != 2:
        raise EvenhandError(
            f"scores alone make predictions of two classes, but {labels.name!r} holds {len(labels.words)}; name the "
            "column of predictions (--prediction)"
        )
    word = labels.words[1] if positive is None else (coded("positive", [positive]).words or ("",))[0]
    if word not in labels.words:
        listed = " and ".join(map(repr, labels.words))
        raise EvenhandError(f"positive={positive!r} is no label{near_miss(word, labels.words)} (they are {listed})")
    place = labels.words.index(word)
    codes = np.where(scores >= threshold, place, 1 - place)  # rows without a score are left out later
    return Column("prediction", labels.words, codes), word


# ------------------------------------------------------------------------------------------- chance


@dataclass(frozen=True, eq=False)
class _Tests:
    """Every comparison as a table of rates, by part of the fairness, attribute and kind."""

    given: Predictions
    fairness: GroupFairness
    tables: Mapping[tuple[str, str, str], tuple[Ints, Ints]]

    @classmethod
    def of(cls, given: Predictions, fairness: GroupFairness) -> _Tests:
        tables: dict[tuple[str, str, str], tuple[Ints, Ints]] = {}
        clients = 1 if given.clients is None else len(given.clients.words)
        for part, entries in (("attributes", fairness.attributes), ("crossed", fairness.crossed)):
            several = {name: entry for name, entry in entries.items() if len(entry.names) > 1}
            for name, entry in several.items():
                for kind in KINDS:
                    if entry.deviations[kind].hits.size * clients <= MOST_CELLS:
                        tables[part, name, kind] = _blocks(given, given.views[name], kind)
        alone = {("within", name, "ap"): entry for name, entry in fairness.within.items()}
        if fairness.clients is not None:
            alone["clients", "", "ap"] = fairness.clients
        for key, entry in alone.items():
            tables[key] = entry.deviations["ap"].hits[None], entry.deviations["ap"].of[None]
        return cls(given, fairness, tables)

    def run(self, wanted: int, seed: int) -> tuple[GroupFairness, list[Finding], int, list[str]]:
        """The fairness with p everywhere, what stands out within clients, the number of shuffles, and notes."""
        effort = {key: draws(*table) for key, table in self.tables.items()}
        tables = {key: table for key, table in self.tables.items() if effort[key] * FEWEST <= BUDGET}
        work = sum(effort[key] for key in tables)
        times = min(wanted, max(FEWEST, BUDGET // max(1, work)))
        notes = []
        if times < wanted:
            notes.append(f"{times} shuffles instead of {wanted:,}, because there are many groups and clients")
        found = {
            key: shuffled(*table, times, stream(seed, "shuffles", place))
            for place, (key, table) in enumerate(tables.items())
        }
        parts: dict[str, dict[str, AttributeFairness]] = {}
        inside: list[Finding] = []
        for part in ("attributes", "crossed", "within"):
            parts[part] = {}
            for name, entry in getattr(self.fairness, part).items():
                chances = _only(found, part, name, entry)
                parts[part][name] = self._with_p(entry, chances, part != "within")
                if len(chances) < len(entry.deviations) and len(entry.names) > 1:
                    notes.append(
                        f"{name}: too many classes, groups or clients to shuffle all; intervals judge the rest"
                    )
                if part == "attributes" and self._several_clients:
                    farthest = [self._inside(entry, kind, chance) for kind, chance in chances.items()]
                    inside += [one for one in farthest if one is not None]
        clients = self.fairness.clients
        done = replace(
            self.fairness,
            attributes=parts["attributes"],
            crossed=parts["crossed"],
            within=parts["within"],
            clients=None if clients is None else self._with_p(clients, _only(found, "clients", "", clients), False),
        )
        return done, inside, times, notes

    @property
    def _several_clients(self) -> bool:
        return self.given.clients is not None and len(self.given.clients.words) > 1

    def _with_p(self, entry: AttributeFairness, chances: Mapping[str, Chance], groups: bool) -> AttributeFairness:
        stratified = groups and self._several_clients
        deviations = {
            kind: replace(one, p=chances[kind].p, within_clients=stratified) if kind in chances else one
            for kind, one in entry.deviations.items()
        }
        by_client = {kind: chance.block_p for kind, chance in chances.items()} if stratified else {}
        return replace(entry, deviations=deviations, by_client_p=by_client)

    def _inside(self, entry: AttributeFairness, kind: str, chance: Chance) -> Finding | None:
        """The group farthest from everyone at its client, of the clients where groups differ beyond chance."""
        assert self.given.clients is not None
        sure = np.flatnonzero(chance.block_p <= 1.0 - entry.confidence + 1e-12)
        if not len(sure):
            return None
        hits, of = self.tables["attributes", entry.attribute, kind]
        condition, group, outcome = np.unravel_index(chance.block_at[sure], hits.shape[1:])
        rate = over(hits[sure, condition, group, outcome], of[sure, condition, group])
        there = over(hits[sure, condition, :, outcome].sum(-1), of[sure, condition].sum(-1))
        place = int(np.abs(rate - there).argmax())
        client = int(sure[place])
        apart = Deviations.measured(hits[client], of[client], entry.confidence)
        alone = replace(entry, deviations={kind: replace(apart, p=np.full(apart.hits.shape, chance.block_p[client]))})
        name = self.given.clients.words[client]
        return replace(alone.finding(kind, chance.block_at[client]), against=f"everyone at {name}")


def _only(
    found: Mapping[tuple[str, str, str], Chance], part: str, name: str, entry: AttributeFairness
) -> dict[str, Chance]:
    """The chances of one part and attribute, by kind."""
    return {kind: found[part, name, kind] for kind in entry.deviations if (part, name, kind) in found}


def _blocks(given: Predictions, column: Column, kind: str) -> tuple[Ints, Ints]:
    """A kind's rates within every client."""
    pieces = [fractions(part, kind, given.positive) for part in given.by_client(column)]
    return np.concatenate([hits for hits, _ in pieces]), np.concatenate([of for _, of in pieces])


# ------------------------------------------------------------------------------------------- bounds


def read_bounds(text: str) -> dict[str, float]:
    """Bounds as they are written behind --max.

    >>> read_bounds("dp=0.1, client_gap=0.15")
    {'dp': 0.1, 'client_gap': 0.15}
    """
    found: dict[str, float] = {}
    for entry in filter(str.strip, text.split(",")):
        name, equals, value = entry.rpartition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise EvenhandError(f"--max {entry.strip()!r} is not of the form MEASURE=NUMBER, such as dp=0.1")
    return found


def _spelled(limits: Mapping[str, float]) -> list[tuple[tuple[str, str], float]]:
    """Bounds as (attribute or nothing, measure), with the measure's own name."""
    found = []
    for name, limit in limits.items():
        number(f"the bound of {name}", limit, low=0.0, high=1.0)
        attribute, _, measure = name.rpartition(".")
        for long, short in SPELLINGS.items():
            if measure.startswith(long):
                measure = short + measure.removeprefix(long).replace("_difference", "_gap")
        if measure not in MEASURES:
            raise EvenhandError(
                f"unknown measure {measure!r}{near_miss(measure, MEASURES)} (bounds are for {', '.join(MEASURES)})"
            )
        found.append(((attribute.strip(), measure), limit))
    return found


def _checked(fairness: GroupFairness, name: str, measure: str, limit: float) -> list[Bound]:
    if measure in CLIENT_MEASURES:
        if fairness.clients is None:
            raise EvenhandError(f"a bound on {measure} needs the client column (--client)")
        return [_bound(fairness.clients, "clients", "ap", measure, limit)]
    kind = next(kind for kind in KINDS if measure in {kind + form for form in FORMS})
    known = {**fairness.attributes, **fairness.crossed}
    if name not in known:
        name = " & ".join(part.strip() for part in name.split("&"))
    if name and name not in known:
        listed = ", ".join(known) or "none"
        raise EvenhandError(
            f"a bound on {name}.{measure}: no attribute {name!r}{near_miss(name, known)} (there are: {listed})"
        )
    if not known:
        raise EvenhandError(f"a bound on {measure} needs sensitive columns (--sensitive)")
    chosen = [name] if name else list(fairness.attributes)
    return [_bound(known[one], one, kind, measure, limit) for one in chosen]


def _bound(entry: AttributeFairness, name: str, kind: str, measure: str, limit: float) -> Bound:
    value = entry.measures[measure]
    if math.isnan(value):
        raise EvenhandError(f"a bound on {measure} of {name}: nothing can be measured, because no such rate is defined")
    low, high = entry.intervals.get(measure, (math.nan, math.nan))
    p = entry.deviations[kind].p
    return Bound(
        measure=measure,
        attribute=name,
        limit=float(limit),
        value=value,
        low=low,
        high=high,
        p=None if p is None else float(p.min()),
        confidence=entry.confidence,
        remark=_remark(entry, kind) if measure in (kind, "client_deviation") else "",
    )


def _remark(entry: AttributeFairness, kind: str) -> str:
    """What the group at which a measure is taken adds to a broken bound."""
    found, sure = entry.largest(kind), entry.surest(kind)
    if found is not None and found.verdict == TOO_FEW:
        more = "" if sure is None else f"; the largest beyond chance is {abs(sure.deviation):.3f}, of {sure.group}"
        return f"it is of {found.group}, which has {TOO_FEW}{more}"
    if found is not None and found.verdict == BY_CLIENT:
        return f"it is {BY_CLIENT}, p = {found.p:.3g} within clients"
    return ""
