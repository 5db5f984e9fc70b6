"""Every recipe that ships runs: on small built-in data in the place of its own, for a round."""

from __future__ import annotations

import csv
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from evenhand import recipe
from evenhand.engine.training import LocalWork
from evenhand.recipe import Part, Recipe, find_recipe
from evenhand.reproduction import reproduce

SMALL = {
    "data": "digits",
    "data_options": {},
    "partition": "pat:2",
    "partition_options": {},
    "clients": 6,
    "split": None,
    "noise": None,
    "model": "logistic",
    "model_options": {},
    "participation": 0.5,
}
PEOPLE = {"data": "synthetic-groups", "partition": "shares:high", "clients": None}


def small(found: Recipe) -> Recipe:
    """The recipe with all its rows, columns and claims, but other data and the first setting of every grid."""
    own = {**SMALL, **(PEOPLE if found.name.startswith("mfairfl") else {})}
    experiment = replace(found.experiment.with_settings(own), work=LocalWork(batch_size=8))
    columns = tuple(replace(column, measure=known(column.measure)) for column in found.columns)
    rows = tuple(replace(row, grid={names: values[:1] for names, values in row.grid.items()}) for row in found.rows)
    quirks = tuple(replace(quirk, settings={}) for quirk in found.quirks)
    parts = tuple(Part(part.name, unavailable=part.unavailable) for part in found.parts)
    return replace(found, experiment=experiment, columns=columns, rows=rows, quirks=quirks, parts=parts)


def known(measure: str) -> str:
    """A measure that the small data has: no client of that name, no fifth layer, one sensitive attribute."""
    word, _, argument = measure.partition(":")
    if word in ("client", "layer_conflicts"):
        return "mean"
    return word if word in ("dp", "eodds", "ap") and argument else measure


@pytest.mark.parametrize("name", recipe.names())
def test_a_recipe_runs(name, tmp_path):
    found = small(find_recipe(name))
    correcting = any("correction" in str(row.settings) for row in found.rows)
    done = reproduce(
        found,
        rounds=7 if correcting else 1,  # FedCorr's first stage alone takes five
        seeds=1,
        quirks="on" if found.quirky else "off",
        out=tmp_path,
    )
    runnable = [part.name for part in found.parts if not part.unavailable]
    assert len(done.tasks) == len(runnable) * len(found.rows)
    lines = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines())) if runnable else []
    assert {(line["part"], line["row"]) for line in lines} == {(p, row.name) for p in runnable for row in found.rows}
    assert all(line["diverged"] == "" for line in lines)
    page = (tmp_path / "results.md").read_text()
    for row in found.rows:
        assert row.name in page
    for part in found.parts:
        assert part.unavailable in page
    drawn = tmp_path / "figure.svg"
    assert drawn.is_file() == bool(found.figure and runnable)
    if drawn.is_file():
        root = ElementTree.fromstring(drawn.read_text())
        charts = [entry for entry in root if entry.tag.endswith("svg")]
        assert len(charts) >= len(runnable)
        assert "http" not in drawn.read_text().replace("http://www.w3.org/2000/svg", "")
