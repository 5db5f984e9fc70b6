"""An audit as one HTML page: who is served worst, every group's rates with intervals, the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evenhand.chance import over, wilson
from evenhand.counts import CLIENT_MEASURES, KINDS
from evenhand.groups import AttributeFairness, between, decimal
from evenhand.report import page
from evenhand.report.charts import interval_chart
from evenhand.report.figure import Figure

if TYPE_CHECKING:
    from evenhand.auditing import Audit

ROWS = 30  # groups in a chart or a table; of more the worst served


def audit_page(found: Audit) -> str:
    fairness = found.fairness
    title = f"Audit of {Path(found.source).name}"
    body = [
        page.head(title, found.heading()),
        page.paragraph(fairness.sentence(), "lead"),
        page.tiles(_tiles(found)),
        *_bounds(found),
        *_served_worst(found),
        page.charts(_charts(found)),
        *_clients(found),
    ]
    for entry in (*fairness.attributes.values(), *fairness.crossed.values()):
        body += _attribute(entry)
    body += _within(found)
    body.append(page.paragraph(found.how(), "soft"))
    body += [page.paragraph(f"Note: {note}", "soft") for note in found.notes]
    body.append(page.details("What the measures are", _definitions()))
    return page.page(title, body)


def _tiles(found: Audit) -> list[tuple[str, str, str]]:
    fairness = found.fairness
    tiles = [(f"{100 * fairness.accuracy:.1f}%", "", "right, over all rows")]
    if fairness.clients is not None and len(fairness.clients.names) > 1:
        tiles.append((decimal(fairness.clients.measures["client_gap"]), "", "best minus worst client"))
    for kind, entry in KINDS.items():
        measured = {name: part.measures[kind] for name, part in fairness.attributes.items() if len(part.names) > 1}
        measured = {name: value for name, value in measured.items() if np.isfinite(value)}
        if measured:
            name = max(measured, key=lambda one: measured[one])
            tiles.append((decimal(measured[name]), "", f"{entry.title}, by {name}"))
    return tiles


def _bounds(found: Audit) -> list[str]:
    if not found.bounds:
        return []
    rows = [
        [
            f"{bound.measure} of {bound.attribute}",
            decimal(bound.value),
            f"{bound.limit:g}",
            between(bound.low, bound.high),
            f"broken, {bound.verdict}" if bound.broken else "kept",
            bound.remark if bound.broken else "",
        ]
        for bound in found.bounds
    ]
    broken = len(found.broken)
    said = f"{broken} of {len(found.bounds)} broken; beyond chance: the whole interval lies above the bound."
    heads = ["measure", "value", "bound", f"{found.fairness.confidence:.0%} interval", "", ""]
    return [_words("Bounds", said if broken else "All are kept.", heads, rows)]


def _served_worst(found: Audit) -> list[str]:
    rows = []
    for one in found.fairness.worst_served():
        interval = f"{100 * one.low:+.1f} .. {100 * one.high:+.1f}"
        p = "-" if one.p is None else f"{one.p:.3g}"
        about = [one.attribute, one.group, f"{one.rows:,}", f"{100 * one.rate:.1f}", f"{100 * one.deviation:+.1f}"]
        rows.append([*about, interval, p, one.verdict])
    heads = ["among", "who", "rows", "right %", "against everyone", "interval", "p", ""]
    said = "The lowest accuracy, beyond chance where any is; points against everyone."
    return [page.table("Served worst", said, heads, rows)] if rows else []


def _charts(found: Audit) -> list[str]:
    fairness = found.fairness
    parts = [] if fairness.clients is None else [fairness.clients]
    sections = []
    for entry in [*parts, *fairness.attributes.values()]:
        if len(entry.names) < 2:
            continue
        sections.append(_chart(entry, "accuracy", f"Right, by {entry.attribute}", "right %"))
        if entry.positive is not None:
            positive = entry.classes[entry.positive]
            said = f"predicted {positive} %"
            sections.append(_chart(entry, "selection_rate", f"Predicted {positive}, by {entry.attribute}", said))
    return sections


def _chart(entry: AttributeFairness, rate: str, title: str, axis: str) -> str:
    hits, of = entry.tallies[rate]
    values, (low, high) = 100 * over(hits, of), (100 * end for end in wilson(hits, of, entry.confidence))
    order = np.arange(len(entry.names))
    said = f"Each with its {entry.confidence:.0%} interval; the dashed line is everyone."
    if len(order) > ROWS:
        order = np.sort(np.argsort(entry.accuracies, kind="stable")[:ROWS])
        said = f"The {ROWS} with the lowest accuracy of {len(entry.names):,}. {said}"
    names = [entry.names[place] for place in order]
    everyone = 100 * float(hits.sum() / of.sum())
    drawing = interval_chart(names, values[order], low[order], high[order], everyone=everyone, x_title=axis)
    return page.figure(Figure(title, said, drawing))


def _clients(found: Audit) -> list[str]:
    fairness = found.fairness
    if fairness.clients is None:
        return []
    heads, *rows = fairness.clients.group_table(ROWS)
    _, *measures = fairness.client_table()
    said = f"Rates in percent with their intervals.{_of_more(fairness.clients)}"
    word = fairness.clients.attribute
    tables = [
        page.table(f"Every {word}", said, heads, rows),
        _words(
            "Client fairness", "Of the clients' accuracies.", ["measure", "value", "interval", "what it is"], measures
        ),
    ]
    if found.inside:
        rows = [[one.attribute, KINDS[one.kind].title, str(one)] for one in found.inside]
        said = f"Groups farthest from everyone at the same {word}, beyond chance."
        heads = ["attribute", "measure", "who"]
        tables.append(_words(f"Standing out within one {word}", said, heads, rows))
    for name, entry in fairness.attributes.items():
        if len(entry.names) > 1 and entry.by_client:
            order = np.argsort(-np.nan_to_num(entry.by_client["dp"]), kind="stable")[:ROWS]
            rows = [_inside(fairness.clients, entry, int(place)) for place in order]
            heads = [word, "rows", *(KINDS[kind].title for kind in KINDS)]
            said = f"Largest deviation of a group from everyone there; in brackets p of any deviation at that {word}."
            tables.append(page.table(f"{name}, within each {word}", said, heads, rows))
    return tables


def _inside(clients: AttributeFairness, entry: AttributeFairness, place: int) -> list[str]:
    cells = [clients.names[place], f"{clients.rows[place]:,}"]
    for kind in KINDS:
        p = f" ({entry.by_client_p[kind][place]:.3g})" if kind in entry.by_client_p else ""
        value = entry.by_client[kind][place]
        cells.append(decimal(value) + (p if np.isfinite(value) else ""))
    return cells


def _attribute(entry: AttributeFairness) -> list[str]:
    heads, *rows = entry.measure_table()
    tables = [_words(f"By {entry.attribute}", "How far the groups are from everyone.", ["measure", *heads[1:]], rows)]
    heads, *rows = entry.group_table(ROWS)
    said = f"Rates in percent with their intervals.{_of_more(entry)}"
    tables.append(page.table(f"Every group of {entry.attribute}", said, heads, rows))
    if entry.calibration is not None:
        heads, *rows = entry.score_table(ROWS)
        said = "Mean score beside the share of positives (their difference in points), and how well scores rank."
        tables.append(page.table(f"Scores, by {entry.attribute}", said, heads, rows))
    return tables


def _within(found: Audit) -> list[str]:
    tables = []
    for entry in found.fairness.within.values():
        heads, *rows = entry.group_table(min(ROWS, len(entry.names) - 1))
        said = f"Those with the lowest accuracy of {len(entry.names):,}."
        tables.append(page.table(f"By {entry.attribute}", said, heads, rows))
    return tables


def _of_more(entry: AttributeFairness) -> str:
    return f" The {ROWS} with the lowest accuracy of {len(entry.names):,}." if len(entry.names) > ROWS else ""


def _words(title: str, said: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column is a sentence."""
    return page.table(title, said, heads, rows).replace('<section class="wide">', '<section class="wide words">')


def _definitions() -> str:
    kinds = [f"{name:<6} {entry.title}: {entry.definition}\n       {entry.sentence}" for name, entry in KINDS.items()]
    forms = ["largest, mean and gap: the largest and the mean deviation, and the largest minus the smallest rate"]
    return "\n".join([*kinds, *forms, *(f"{name}: {said}" for name, said in CLIENT_MEASURES.items())])
