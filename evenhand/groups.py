"""How evenly a model serves groups of people: each attribute, attributes crossed, the clients, groups within clients.

The measures are those of `evenhand.counts`. Rates have Wilson intervals. A group's deviation from everyone has
Newcombe's interval of the difference between the group and the others, times the others' share: everyone includes the
group, so its deviation from everyone is exactly that share of its difference from the others. The deviations' intervals
hold together for all groups of an attribute (Sidak's correction), so that among many groups none stands out by their
number alone; then the largest of their lower ends and the largest of their upper ends hold the largest deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import stdtrit

from evenhand.chance import area_interval, newcombe, over, sidak, wilson
from evenhand.checks import EvenhandError, number
from evenhand.columns import Column, Floats, Ints, coded, numbers
from evenhand.counts import (
    CLIENT_MEASURES,
    FORMS,
    KINDS,
    batched_measures,
    client_measures,
    fractions,
    measures_from_counts,
    named,
)
from evenhand.predictions import Predictions, crossing, few
from evenhand.tables import pandas_or_hint, text_table

TELL = 0.1  # a group whose deviation may be anything from none to more than this has too few rows to tell
SHOWN = 12  # groups in a printed table


# ------------------------------------------------------------------------------------------- what is found

BEYOND, WITHIN, TOO_FEW = "beyond chance", "within chance", "too few rows to tell"
BY_CLIENT = "no more than its clients explain"


@dataclass(frozen=True)
class Finding:
    """One group's rate beside everyone's: how far off it is, and whether that is more than chance."""

    attribute: str
    group: str
    kind: str
    label: str  # the rate is taken within those of this label; empty: within all
    outcome: str  # the predicted class; empty: the right one
    rows: int
    rate: float
    everyone: float
    low: float  # of the deviation; holds together with those of the other groups
    high: float
    p: float | None
    verdict: str
    against: str = "everyone"

    @property
    def deviation(self) -> float:
        """The group's rate minus everyone's."""
        return self.rate - self.everyone

    @property
    def what(self) -> str:
        """What the rate is of."""
        if self.kind == "ap":
            return "right"
        within = f"of label {self.label} " if self.label else ""
        return f"{within}predicted {self.outcome or 'so'}"

    def __str__(self) -> str:
        rows = f"{self.rows:,} row{'' if self.rows == 1 else 's'}"
        chance = "" if self.p is None else f", p = {self.p:.3g}"
        return (
            f"{self.group} ({rows}): {100 * self.rate:.1f}% {self.what}, {100 * self.deviation:+.1f} points against "
            f"{self.against} ({_points(self.low)} .. {_points(self.high)}{chance}): {self.verdict}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON)."""
        return {**self.__dict__, "deviation": self.deviation, "what": self.what}


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


@dataclass(frozen=True, eq=False)
class Deviations:
    """One kind of fairness: every group's rate beside everyone's. Arrays are conditions x groups x outcomes."""

    hits: Ints
    of: Ints  # conditions x groups
    low: Floats  # of the deviations
    high: Floats
    p: Floats | None = None
    within_clients: bool = False
    """Whether p comes from shuffles within clients, and so leaves out what the clients explain."""

    @classmethod
    def measured(cls, hits: Ints, of: Ints, confidence: float) -> Deviations:
        """Deviations and their intervals from the rates as fractions."""
        there = (of > 0).sum(-1)
        comparisons = int(np.where(there > 2, there, there == 2).sum()) * hits.shape[-1]  # of two groups, one mirrors
        others, other_hits = of.sum(-1, keepdims=True) - of, hits.sum(-2, keepdims=True) - hits
        ends = newcombe(hits, of[..., None], other_hits, others[..., None], sidak(confidence, comparisons))
        share = over(others, of.sum(-1, keepdims=True))[..., None]
        alone = ((of > 0) & (others == 0))[..., None]
        low, high = (np.where(alone, 0.0, share * end) for end in ends)
        return cls(hits, of, low, high)

    @cached_property
    def rate(self) -> Floats:
        """Each group's rate; not-a-number where it is undefined."""
        return over(self.hits, self.of[..., None])

    @cached_property
    def everyone(self) -> Floats:
        """The same rate of all groups together."""
        return over(self.hits.sum(-2, keepdims=True), self.of.sum(-1)[..., None, None])

    @cached_property
    def value(self) -> Floats:
        """The groups' deviations from everyone."""
        return self.rate - self.everyone

    def beyond(self, confidence: float) -> Any:
        """Which deviations are more than chance: by shuffling, or by their intervals where nothing was shuffled."""
        if self.p is not None:
            return np.isfinite(self.value) & (self.p <= 1.0 - confidence + 1e-12)
        return (self.low > 0) | (self.high < 0)

    def verdict(self, place: tuple[int, int, int], confidence: float) -> str:
        """One deviation judged in words."""
        low, high = self.low[place], self.high[place]
        apart = low > 0 or high < 0
        if apart if self.p is None else self.p[place] <= 1.0 - confidence + 1e-12:
            return BEYOND
        if apart and self.within_clients:
            return BY_CLIENT
        return TOO_FEW if max(-low, high) > TELL else WITHIN

    def intervals(self, confidence: float) -> dict[str, tuple[float, float]]:
        """Of the three forms of the measure."""
        known = np.isfinite(self.value)
        if not known.any():
            return dict.fromkeys(FORMS, (np.nan, np.nan))
        least = np.maximum(np.maximum(self.low, -self.high), 0.0)[known]
        most = np.maximum(-self.low, self.high)[known]
        low, high = wilson(self.hits, self.of[..., None], sidak(confidence, int(known.sum())))
        widest = float(np.fmax.reduce(np.fmax.reduce(high, 1) - np.fmin.reduce(low, 1), None))
        return {
            "": (float(least.max()), float(most.max())),
            "_mean": (float(least.mean()), float(most.mean())),
            "_gap": (self._surely_apart(confidence), widest) if len(most) > 1 else (0.0, 0.0),
        }

    def _surely_apart(self, confidence: float) -> float:
        """How far the two farthest groups are apart at least, at a level that holds for all pairs of groups."""
        known = np.isfinite(self.rate)
        highest = np.where(known, self.rate, -np.inf).argmax(1)[:, None]
        lowest = np.where(known, self.rate, np.inf).argmin(1)[:, None]
        of = np.broadcast_to(self.of[..., None], self.hits.shape)
        (met, size), (other_met, other_size) = (
            [np.take_along_axis(values, place, 1) for values in (self.hits, of)] for place in (highest, lowest)
        )
        groups = known.sum(1)
        level = sidak(confidence, int((groups * (groups - 1) // 2).sum()))
        low, _ = newcombe(met, size, other_met, other_size, level)
        return max(0.0, float(np.fmax.reduce(low, None)))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Scores of each group: their mean beside the share of positives, and how well they rank; one number a group.

    `gap` is the mean score minus the share of positives, with Student's interval; `auc` is the area under the ROC
    curve, with Newcombe's score interval. Not-a-number marks what a group is too small for.
    """

    mean_score: Floats
    positives: Floats
    gap: Floats
    gap_low: Floats
    gap_high: Floats
    auc: Floats
    auc_low: Floats
    auc_high: Floats

    @classmethod
    def measured(cls, groups: Ints, size: int, positive: Any, scores: Floats, confidence: float) -> Calibration:
        """From every row's group, whether it is positive, and its score; the rows come in rising order of the score."""
        rows = np.bincount(groups, minlength=size)
        met = np.bincount(groups, positive, size).astype(np.int64)
        mean = over(np.bincount(groups, scores, size), rows)
        gap = mean - over(met, rows)
        squares = np.bincount(groups, (scores - positive - gap[groups]) ** 2, size)
        error = np.sqrt(over(squares, rows - 1) / np.maximum(rows, 1))
        reach = error * stdtrit(np.maximum(rows - 1, 1), (1.0 + confidence) / 2.0)
        area = _areas(groups, size, positive, scores)
        low, high = area_interval(area, met, rows - met, confidence)
        return cls(mean, over(met, rows), gap, gap - reach, gap + reach, area, low, high)


def _areas(groups: Ints, size: int, positive: Any, scores: Floats) -> Floats:
    """Each group's area under the ROC curve: the share of its pairs that are ranked rightly, ties as half."""
    order = groups.astype(np.int16 if size < 2**15 else np.int64).argsort(kind="stable")
    groups, positive, scores = groups[order], positive[order], scores[order]
    starts = np.ones(len(groups), dtype=bool)
    starts[1:] = (groups[1:] != groups[:-1]) | (scores[1:] != scores[:-1])
    tie = starts.cumsum() - 1
    met, others = np.bincount(tie, positive), np.bincount(tie, ~positive)
    group = groups[starts]
    totals = np.bincount(group, others, size)
    below = others.cumsum() - others - (totals.cumsum() - totals)[group]
    return over(np.bincount(group, met * (below + others / 2.0), size), totals * np.bincount(group, met, size))


@dataclass(frozen=True, eq=False)
class AttributeFairness:
    """How the groups of one attribute are served. The clients, and the groups within clients, are told the same way."""

    attribute: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    positive: int | None
    confidence: float
    tallies: Mapping[str, tuple[Ints, Ints]] = field(repr=False)
    """Each usual rate as hits of so many, one a group: accuracy, and with a positive class selection_rate,
    true_positive_rate and false_positive_rate."""
    measures: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    deviations: Mapping[str, Deviations] = field(repr=False)
    calibration: Calibration | None = field(default=None, repr=False)
    by_client: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    """Each measure within each client by itself."""
    by_client_p: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    """By kind: could it be chance within that client? Corrected for the number of clients."""

    @property
    def rows(self) -> Ints:
        """How many rows each group has."""
        return self.tallies["accuracy"][1]

    @property
    def accuracies(self) -> Floats:
        """Each group's accuracy."""
        return over(*self.tallies["accuracy"])

    def largest(self, kind: str) -> Finding | None:
        """The deviation whose size is the measure."""
        return self._first(kind, np.isfinite(self.deviations[kind].value))

    def surest(self, kind: str) -> Finding | None:
        """The largest deviation of those beyond chance."""
        return self._first(kind, self.deviations[kind].beyond(self.confidence))

    def worst_served(self) -> Finding | None:
        """The lowest accuracy: of those below everyone's by more than chance if there are any, else of all."""
        entry = self.deviations["ap"]
        sure = entry.beyond(self.confidence) & (entry.value < 0)
        among = sure if sure.any() else np.isfinite(entry.value)
        if not among.any():
            return None
        return self.finding("ap", np.where(among, entry.value, np.inf).argmin())

    def findings(self, kind: str) -> Iterator[Finding | None]:
        """For every group its largest deviation, None where it has no such rate."""
        value = self.deviations[kind].value
        sizes = np.where(np.isfinite(value), np.abs(value), -1.0).transpose(1, 0, 2).reshape(len(self.names), -1)
        condition, outcome = np.divmod(sizes.argmax(1), value.shape[2])
        index = np.ravel_multi_index((condition, np.arange(len(self.names)), outcome), value.shape)
        for place, known in zip(index.tolist(), sizes.max(1) >= 0.0, strict=True):
            yield self.finding(kind, place) if known else None

    def _first(self, kind: str, among: Any) -> Finding | None:
        if not among.any():
            return None
        return self.finding(kind, np.where(among, np.abs(self.deviations[kind].value), -1.0).argmax())

    def finding(self, kind: str, index: Any) -> Finding:
        """One entry of a kind's arrays, by its flat index, in words."""
        entry = self.deviations[kind]
        condition, group, outcome = place = tuple(map(int, np.unravel_index(index, entry.hits.shape)))
        labels, outcomes = named(kind, self.classes, self.positive)
        return Finding(
            attribute=self.attribute,
            group=self.names[group],
            kind=kind,
            label=labels[condition],
            outcome=outcomes[outcome],
            rows=int(entry.of[condition, group]),
            rate=float(entry.rate[place]),
            everyone=float(entry.everyone[condition, 0, outcome]),
            low=float(entry.low[place]),
            high=float(entry.high[place]),
            p=None if entry.p is None else float(entry.p[place]),
            verdict=entry.verdict((condition, group, outcome), self.confidence),
        )

    # ---------------------------------------------------------------------------------------- as tables

    def frame(self) -> Any:
        """One row a group: rows, each rate with its interval, each kind's largest deviation (a pandas frame)."""
        columns: dict[str, Any] = {"attribute": self.attribute, "group": list(self.names), "rows": self.rows}
        for name, (hits, of) in self.tallies.items():
            columns[name] = over(hits, of)
            columns[f"{name}_low"], columns[f"{name}_high"] = wilson(hits, of, self.confidence)
        for kind, entry in self.deviations.items():
            found = list(self.findings(kind))
            columns[f"{kind}_deviation"] = [np.nan if one is None else one.deviation for one in found]
            if entry.p is not None:
                columns[f"{kind}_p"] = [np.nan if one is None else one.p for one in found]
        if self.calibration is not None:
            columns |= self.calibration.__dict__
        return pandas_or_hint().DataFrame(columns)

    def measure_table(self) -> list[list[str]]:
        """The measures in words: a row of heads, then one a kind, with one more where a smaller deviation is surer."""
        heads = [self.attribute, "largest", f"{self.confidence:.0%} interval", "mean", "gap", "p", "", "where"]
        rows = []
        for kind in self.deviations:
            largest, surest = self.largest(kind), self.surest(kind)
            values = [decimal(self.measures[kind + form]) for form in FORMS]
            first = [KINDS[kind].title, values[0], between(*self.intervals[kind]), *values[1:]]
            rows.append([*first, *(_where(largest) if largest is not None else ("-", "nothing to measure", ""))])
            if largest is not None and surest is not None and largest.verdict != BEYOND:
                rows.append(["", decimal(abs(surest.deviation)), "", "", "", *_where(surest)])
        return [heads, *rows]

    def group_table(self, limit: int | None = SHOWN) -> list[list[str]]:
        """The groups in words: a row of heads, then one a group with its rates in percent; of many the worst served."""
        named = "" if self.positive is None else self.classes[self.positive]
        heads = {
            "accuracy": "right %",
            "selection_rate": f"predicted {named} %",
            "true_positive_rate": "true positive %",
            "false_positive_rate": "false positive %",
        }
        order = list(range(len(self.names)))
        if limit is not None and len(order) > limit:
            order = np.lexsort((-self.rows, self.accuracies))[:limit].tolist()
        rows = [[self.names[group], f"{self.rows[group]:,}"] for group in order]
        for hits, of in self.tallies.values():
            rate, (low, high) = over(hits, of), wilson(hits, of, self.confidence)
            for row, group in zip(rows, order, strict=True):
                row.append(percent(rate[group], low[group], high[group]))
        judged = self.deviations["ap"]
        for row, group in zip(rows, order, strict=True):
            place = 0, group, 0
            row.append(f"{_points(judged.value[place])}: {judged.verdict(place, self.confidence)}")
        return [[self.attribute, "rows", *(heads[name] for name in self.tallies), "right, against everyone"], *rows]

    def score_table(self, limit: int | None = SHOWN) -> list[list[str]]:
        """The calibration in words: a row of heads, then one a group."""
        found = self.calibration
        assert found is not None
        heads = [self.attribute, "rows", "mean score %", "positives %", "difference", "AUC"]
        rows = []
        for group, name in list(enumerate(self.names))[:limit]:
            off, low, high = (100 * values[group] for values in (found.gap, found.gap_low, found.gap_high))
            area = found.auc[group], found.auc_low[group], found.auc_high[group]
            rows.append(
                [
                    name,
                    f"{self.rows[group]:,}",
                    percent(found.mean_score[group]),
                    percent(found.positives[group]),
                    f"{off:+.1f}" + (f" ({low:+.1f} .. {high:+.1f})" if np.isfinite(low) else ""),
                    "-" if np.isnan(area[0]) else f"{decimal(area[0])} ({between(*area[1:])})",
                ]
            )
        return [heads, *rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON)."""
        groups: list[dict[str, Any]] = [
            {"group": name, "rows": rows} for name, rows in zip(self.names, self.rows.tolist(), strict=True)
        ]
        for name, (hits, of) in self.tallies.items():
            low, high = wilson(hits, of, self.confidence)
            for entry, *values in zip(groups, over(hits, of).tolist(), low.tolist(), high.tolist(), strict=True):
                entry[name] = dict(zip(("value", "low", "high"), values, strict=True))
        for place, entry in enumerate(groups if self.calibration is not None else []):
            entry["calibration"] = {name: float(values[place]) for name, values in self.calibration.__dict__.items()}
        found: dict[str, Any] = {
            "measures": dict(self.measures),
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "groups": groups,
            "deviations": {kind: [one and one.to_dict() for one in self.findings(kind)] for kind in self.deviations},
        }
        if self.by_client:
            found["by_client"] = {name: values.tolist() for name, values in self.by_client.items()}
            found["by_client_p"] = {kind: values.tolist() for kind, values in self.by_client_p.items()}
        return found


def _where(found: Finding) -> tuple[str, str, str]:
    """p, the verdict, and the group with its rate beside everyone's."""
    rates = f"{100 * found.rate:.1f}% {found.what}, everyone {100 * found.everyone:.1f}%"
    return "-" if found.p is None else f"{found.p:.3g}", found.verdict, f"{found.group}: {rates}"


def decimal(value: float) -> str:
    """A measure with three decimals, `-` where there is none."""
    return "-" if np.isnan(value) else f"{value:.3f}"


def between(low: float, high: float) -> str:
    """An interval of measures."""
    return "-" if np.isnan(low) else f"{low:.3f} .. {high:.3f}"


def percent(value: float, low: float = np.nan, high: float = np.nan) -> str:
    """A rate in percent, with its interval."""
    if np.isnan(value):
        return "-"
    return f"{100 * value:.1f}" + ("" if np.isnan(low) else f" ({100 * low:.1f} .. {100 * high:.1f})")


@dataclass(frozen=True, eq=False)
class GroupFairness:
    """How evenly groups are served: each attribute, attributes crossed, the clients, and the groups within clients."""

    rows: int
    accuracy: float
    classes: tuple[str, ...]
    positive: str | None
    confidence: float
    attributes: Mapping[str, AttributeFairness]
    crossed: Mapping[str, AttributeFairness]
    """Intersections of attributes, by their names joined with " & "."""
    clients: AttributeFairness | None
    within: Mapping[str, AttributeFairness]
    """The groups of each attribute within each client, by the attribute's name."""
    notes: tuple[str, ...] = ()

    @property
    def measures(self) -> dict[str, dict[str, float]]:
        """Every measure by name, of every attribute, intersection and of the clients ("clients")."""
        found = {name: dict(entry.measures) for name, entry in {**self.attributes, **self.crossed}.items()}
        return found if self.clients is None else {**found, "clients": dict(self.clients.measures)}

    @property
    def groups(self) -> Any:
        """One row a group of an attribute or intersection (a pandas frame)."""
        frames = [entry.frame() for entry in {**self.attributes, **self.crossed}.values()]
        return pandas_or_hint().concat(frames, ignore_index=True)

    @property
    def by_client(self) -> Any:
        """One row a client and attribute: its rows and accuracy, and every measure within it (a pandas frame)."""
        pandas, clients = pandas_or_hint(), self.clients
        if clients is None:
            raise EvenhandError("no clients were given, so nothing is known of them; name them (clients=...)")
        about = {"client": clients.names, "rows": clients.rows, "accuracy": clients.accuracies}
        frames = []
        for name, entry in {**self.attributes, **self.crossed}.items():
            tested = {f"{kind}_p": values for kind, values in entry.by_client_p.items()}
            frames.append(pandas.DataFrame({"attribute": name, **about, **entry.by_client, **tested}))
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame(about)

    def parts(self) -> list[AttributeFairness]:
        """Everything that was compared: clients, attributes, intersections, groups within clients."""
        first = [] if self.clients is None else [self.clients]
        return [*first, *self.attributes.values(), *self.crossed.values(), *self.within.values()]

    def worst_served(self) -> list[Finding]:
        """Who is served worst: the client, the group of each attribute and intersection, the group within a client."""
        return [found for part in self.parts() if len(part.names) > 1 and (found := part.worst_served()) is not None]

    def sentence(self) -> str:
        """What was looked at, in one plain sentence."""
        clients = "" if self.clients is None else f" of {len(self.clients.names):,} clients"
        about = f", by {', '.join(self.attributes)}" if self.attributes else ""
        positive = "" if self.positive is None else f"; positive is {self.positive}"
        return f"{self.rows:,} rows{clients}{about}: {self.accuracy:.1%} right{positive}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON)."""
        found: dict[str, Any] = {
            "rows": self.rows,
            "accuracy": self.accuracy,
            "classes": list(self.classes),
            "positive": self.positive,
            "confidence": self.confidence,
            "worst_served": [one.to_dict() for one in self.worst_served()],
            "clients": None if self.clients is None else self.clients.to_dict(),
        }
        for part in ("attributes", "crossed", "within"):
            found[part] = {name: entry.to_dict() for name, entry in getattr(self, part).items()}
        return {**found, "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n".join([self.sentence(), "", *self.lines(), *(f"note: {note}" for note in self.notes)]).rstrip()

    def lines(self) -> Iterator[str]:
        """Who is served worst, then tables of clients and attributes; of the intersections the worst served alone."""
        served = self.worst_served()
        crossed = [one for one in served if one.attribute in self.crossed]
        least = min(crossed, key=lambda one: (one.verdict != BEYOND, one.deviation), default=None)
        shown = [[one.attribute, str(one)] for one in served if one not in crossed or one is least]
        if shown:
            yield f"Served worst\n{_indented(text_table(shown))}\n"
        if self.clients is not None:
            yield f"{text_table(self.clients.group_table(), right=[1])}\n{_more(self.clients)}"
            yield f"{text_table(self.client_table(), right=[1])}\n"
        for entry in self.attributes.values():
            yield f"{text_table(entry.measure_table(), right=[1, 3, 4, 5])}\n"
            yield f"{text_table(entry.group_table(), right=[1])}\n{_more(entry)}"
            if entry.calibration is not None:
                yield f"{text_table(entry.score_table(), right=[1, 2, 3])}\n"

    def client_table(self) -> list[list[str]]:
        """The measures of client fairness in words, below a row of heads."""
        assert self.clients is not None
        rows = [["client fairness", "value", f"{self.confidence:.0%} interval", "what it is"]]
        for name, said in CLIENT_MEASURES.items():
            ends = self.clients.intervals.get(name)
            rows.append([name, decimal(self.clients.measures[name]), "-" if ends is None else between(*ends), said])
        return rows


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _more(entry: AttributeFairness) -> str:
    left = len(entry.names) - SHOWN
    return f"... and {left:,} more, served better\n" if left > 0 else ""


# ------------------------------------------------------------------------------------------- the doors


def group_fairness(
    labels: Any,
    predictions: Any,
    attributes: Any = None,
    *,
    clients: Any = None,
    scores: Any = None,
    positive: Any = None,
    intersections: bool = True,
    confidence: float = 0.95,
) -> GroupFairness:
    """Every measure of how evenly a model serves groups of people, over all clients and within each.

    Args:
        labels, predictions: one class a row; numbers, words or truth values, of any number of classes.
        attributes: columns that say who somebody is, by name: {"sex": [...], "age_band": [...]}, or a data frame.
        clients: whose row it is; adds client fairness, and the groups within each client.
        scores: the positive class's probability, one a row; adds calibration and ranking of each group.
        positive: the class that is the good (or bad) news; without it the last of two classes in order (1 of 0 and 1,
            yes of no and yes), and none where there are more, and then equal opportunity looks at every class.
        intersections: also cross the attributes, two by two and all together.
        confidence: of the intervals.

    Rows without a label, a prediction or a score are left out, and counted in `notes`; those without a group or a
    client form a group of their own, `unknown`.

    >>> fairness = group_fairness([0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1], {"sex": list("FFFMMM")})
    >>> round(fairness.measures["sex"]["dp_gap"], 3), round(fairness.measures["sex"]["eopp_gap"], 3)
    (0.333, 0.5)
    """
    if attributes is not None and not (isinstance(attributes, Mapping) or hasattr(attributes, "columns")):
        kind = type(attributes).__name__
        raise EvenhandError(f'attributes need names: give {{"sex": values}} or a data frame, not {kind}')
    names = () if attributes is None else list(getattr(attributes, "columns", attributes))
    people = {str(name): coded(str(name), attributes[name]) for name in names}
    given = Predictions.prepared(
        coded("labels", labels),
        coded("predictions", predictions),
        people,
        clients=None if clients is None else coded("clients", clients),
        scores=None if scores is None else numbers("scores", scores),
        positive=positive,
        intersections=intersections,
    )
    return measured(given, confidence)


def measured(given: Predictions, confidence: float = 0.95) -> GroupFairness:
    """Everything that `group_fairness` finds, of rows that are ready to be counted."""
    number("confidence", confidence, above=0.0, high=1.0 - 1e-9)
    found = {name: _attribute(given, column, confidence) for name, column in given.views.items()}
    notes = [note for name, column in given.views.items() for note in _undefined(column, found[name])]
    clients, within = given.clients, {}
    if clients is not None and len(clients.words) > 1:
        several = {name: column for name, column in given.attributes.items() if len(column.words) > 1}
        for name, column in several.items():
            cells = crossing(f"{name} within {clients.name}", [column, clients], " at ")
            within[name] = _accuracies(given, cells, confidence)
    return GroupFairness(
        rows=len(given.labels),
        accuracy=float((given.labels == given.predictions).mean()),
        classes=given.classes,
        positive=None if given.positive is None else given.classes[given.positive],
        confidence=confidence,
        attributes={name: found[name] for name in given.attributes},
        crossed={name: found[name] for name in given.crossed},
        clients=None if clients is None else _clients(given, clients, confidence),
        within=within,
        notes=(*given.notes, *notes),
    )


def _attribute(given: Predictions, column: Column, confidence: float) -> AttributeFairness:
    counts = given.counts(column)
    deviations = {kind: Deviations.measured(*fractions(counts, kind, given.positive), confidence) for kind in KINDS}
    each = {kind: entry.intervals(confidence) for kind, entry in deviations.items()}
    pieces = (
        [] if given.clients is None else [batched_measures(part, given.positive) for part in given.by_client(column)]
    )
    calibration = None
    if given.scores is not None and given.positive is not None:
        rows = given.by_score
        met, scores = given.labels[rows] == given.positive, given.scores[rows]
        calibration = Calibration.measured(column.codes[rows], len(column.words), met, scores, confidence)
    return AttributeFairness(
        attribute=column.name,
        names=column.words,
        classes=given.classes,
        positive=given.positive,
        confidence=confidence,
        tallies=_tallies(given, column),
        measures=measures_from_counts(counts, given.positive),
        intervals={kind + form: ends for kind, forms in each.items() for form, ends in forms.items()},
        deviations=deviations,
        calibration=calibration,
        by_client={name: np.concatenate([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())},
    )


def _clients(given: Predictions, clients: Column, confidence: float) -> AttributeFairness:
    found = _accuracies(given, clients, confidence)
    ends = found.deviations["ap"].intervals(confidence)
    return replace(
        found,
        measures={name: float(value) for name, value in client_measures(*found.tallies["accuracy"]).items()},
        intervals={"client_deviation": ends[""], "client_gap": ends["_gap"]},
    )


def _accuracies(given: Predictions, column: Column, confidence: float) -> AttributeFairness:
    """Groups compared by accuracy alone."""
    tallies = _tallies(given, column)
    right, rows = tallies["accuracy"]
    return AttributeFairness(
        attribute=column.name,
        names=column.words,
        classes=given.classes,
        positive=given.positive,
        confidence=confidence,
        tallies=tallies,
        measures={},
        intervals={},
        deviations={"ap": Deviations.measured(right[None, :, None], rows[None], confidence)},
    )


def _tallies(given: Predictions, column: Column) -> dict[str, tuple[Ints, Ints]]:
    counted = given.outcomes(column)
    rows = counted.sum((1, 2, 3))
    found = {"accuracy": (counted[..., 1].sum((1, 2)), rows)}
    if given.positive is not None:
        selected, labelled = counted[:, :, 1].sum(-1), counted.sum((2, 3))
        found["selection_rate"] = selected.sum(-1), rows
        found["true_positive_rate"] = selected[:, 1], labelled[:, 1]
        found["false_positive_rate"] = selected[:, 0], labelled[:, 0]
    return found


def _undefined(column: Column, found: AttributeFairness) -> Iterator[str]:
    """What to say about groups that have no row of a label."""
    for label, sizes in zip(found.classes, found.deviations["eodds"].of, strict=True):
        empty = [word for word, size in zip(column.words, sizes, strict=True) if not size]
        if empty and sizes.any():
            yield f"{column.name}: no row is labelled {label!r} in {few(empty, 2)}; that rate is left out there"
