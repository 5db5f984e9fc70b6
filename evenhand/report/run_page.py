"""The page of one run."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand.commands import run_command
from evenhand.folders import RunFolder, versions
from evenhand.report import groups, page
from evenhand.report.colours import colour
from evenhand.report.run_figures import MANY, RUN_FIGURES
from evenhand.report.words import (
    at_the_end,
    baseline_of,
    headline,
    make_up,
    measures,
    tail_of,
    times_asked,
)

if TYPE_CHECKING:
    from evenhand.runs import Run, Runs

WORST_SHOWN = 10
LETTERS = 200_000  # of all clients' names together, to find them by
STRIPE = 120  # width of a picture of a client's classes
FIRST = ("accuracy", "clients", "distribution", "fairness")  # the rest of the figures follow in their order


def run_page(runs: Runs) -> str:
    grouped, baseline = groups.has_groups(runs), baseline_of(runs)
    figures = {name: make(runs) for name, make in RUN_FIGURES.items()}
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    sections = {
        name: page.figure(figure, name, _finder(runs) if name == "clients" else "") for name, figure in drawn.items()
    }
    people = [name for name in sections if name in groups.FIGURES]
    rest = [name for name in sections if name not in FIRST and name not in people]
    body = [
        page.head(f"{runs.experiment.method.name} on {runs.experiment.data_name}", _what(runs)),
        page.paragraph(headline(runs, baseline), "lead"),
        *([page.paragraph(runs.group_sentence(), "lead")] if grouped else []),
        page.tiles(_tiles(runs)),
        page.charts([sections[name] for name in people]) if people else "",
        page.charts([sections[name] for name in FIRST]),
        _worst_served(runs),
        page.charts([sections[name] for name in rest]),
        *(groups.by_client(runs) if grouped else []),
        *[page.paragraph(f"Note: {note}", "soft") for note in runs.notes],
        *about(runs, runs[0].facts.get("command") or run_command(runs.experiment), runs.experiment.to_toml(), grouped),
    ]
    return page.page(f"{runs.experiment}", body)


def about(runs: Runs, command: str, description: str, grouped: bool) -> list[str]:
    """What every page ends with: how to repeat it, on what it was run, what the measures mean."""
    kept = None if runs.folder is None else RunFolder(runs.folder).versions
    known: dict[str, Any] = versions(runs.experiment.torch_device()) if kept is None else kept
    facts = runs[0].facts

    def named(*names: str) -> str:
        return ", ".join(f"{name} {known[name]}" for name in names if name in known) or "not recorded"

    shown = {
        "data": f"{facts['data']}, {facts['samples']:,} samples" if facts else runs.experiment.data_name,
        "data fingerprint": str(facts.get("data_fingerprint", "not recorded")),
        "partition fingerprint": ", ".join(
            f"{fingerprint} (seed {seed})" for seed, fingerprint in facts.get("partition_fingerprints", {}).items()
        )
        or "not recorded",
        "model": f"{runs.experiment.model}, {facts['parameters']:,} parameters" if facts else runs.experiment.model,
        "versions": named("evenhand", "python", "torch", "numpy"),
        "machine": named("platform", "device", "threads"),
        "started": str(known.get("started") or "not recorded"),
    }
    rows = [list(entry) for entry in measures(grouped)]
    heads = ["measure", "computed as", "what it says"]
    table = page.table("What the measures mean", "", heads, rows, words=(1, 2))
    return [
        '<section class="wide">\n<h2>The same again</h2>\n<p class="soft">This command gives the same numbers on the '
        f"same machine; the description below says everything in full.</p>\n{page.command(command)}\n"
        f"{page.facts(shown)}\n</section>",
        table.replace('<section class="wide">', '<section class="wide words">'),
        page.details("All settings", description),
    ]


def _finder(runs: Runs) -> str:
    """Where every client of the charts can be found by name without filling the page with names."""
    names = runs[0].names
    small = len(names) <= MANY and sum(map(len, names)) <= LETTERS
    return page.finder(names) if small and len(runs) == 1 else ""


def _what(runs: Runs) -> str:
    seeds = ", ".join(str(run.seed) for run in runs)
    reached = len(runs[0].rounds)
    whole = runs.experiment.rounds
    unfinished = f"; {reached:,} of {whole:,} rounds so far" if reached < whole else ""
    seeds = f"seed{'s' if len(runs) > 1 else ''} {seeds}"
    return f"{runs.experiment.method}; {runs.experiment.setting()}; {seeds}{unfinished}"


def _tiles(runs: Runs) -> list[tuple[str, str, str]]:
    tail, ends = tail_of(runs), np.array([at_the_end([run]) for run in runs])  # type: ignore[arg-type]
    shown = [
        (100.0 * runs.measured("mean"), "%", "mean accuracy"),
        (ends[:, 0], "%", f"worst-served {tail}"),
        (ends[:, 1], "%", f"best-served {tail}"),
        (runs.measured("std_pp"), " pp", "standard deviation"),
        (runs.measured("angle_degrees"), "°", "angle to equal accuracies"),
    ]
    return [
        (f"{values.mean():.1f}{unit}", f"± {values.std(ddof=1):.1f}" if len(values) > 1 else "", said)
        for values, unit, said in shown
    ]


def _worst_served(runs: Runs) -> str:
    found = []
    for run in runs:
        known = np.flatnonzero(np.isfinite(run.accuracies))
        worst = known[np.lexsort((-run.losses[known], run.accuracies[known]))][:WORST_SHOWN]
        asked = times_asked(run)
        found += [(run.accuracies[client], -run.losses[client], run, client, asked[client]) for client in worst]
    found.sort(key=lambda row: row[:2])
    heads = ["client", *(["seed"] if len(runs) > 1 else []), "accuracy %", "loss", "train", "test", "rounds asked",
             "its classes, beside everyone's", ""]  # fmt: skip
    rows = [
        [
            escape(run.names[client]),
            *([str(run.seed)] if len(runs) > 1 else []),
            f"{100 * accuracy:.1f}",
            f"{-loss:.3f}",
            "-" if run.holdings is None else f"{run.holdings.train[client]:,}",
            f"{run.test_samples[client]:,}",
            f"{asked:,} of {len(run.rounds):,}",
            *_data_of(run, client),
        ]
        for accuracy, loss, run, client, asked in found[:WORST_SHOWN]
    ]
    said = "On their own test data, at the end; and what their data looks like."
    return page.html_table("The worst-served clients", said, heads, rows, words=(len(heads) - 2, len(heads) - 1))


def _data_of(run: Run, client: int) -> tuple[str, str]:
    """A small picture of a client's classes over everyone's, and the largest in words."""
    held = run.holdings
    if held is None:
        return "-", ""
    own, every = held.labels[client] / max(held.labels[client].sum(), 1), held.labels.sum(0) / held.labels.sum()
    top, width = max(float(own.max()), float(every.max())), STRIPE / len(own)
    bars = []
    for place, (here, there) in enumerate(zip(own, every, strict=True)):
        for share, style in ((there, "fill:var(--grid)"), (here, f"fill:{colour(0)}")):
            height, thin = 22 * float(share) / top, 0.0 if style.startswith("fill:var(--grid") else width * 0.2
            if height > 0.05:
                bars.append(
                    f'<rect style="{style}" x="{place * width + thin:.1f}" y="{22 - height:.1f}" '
                    f'width="{max(width * 0.9 - 2 * thin, 0.5):.1f}" height="{height:.1f}"/>'
                )
    words = make_up(held.labels[client], held.classes)
    picture = f'<svg viewBox="0 0 {STRIPE} 22" role="img" aria-label="{escape(words)}">{"".join(bars)}</svg>'
    return picture, escape(words)
