"""What a page says in words: the headline, who a client is, what the measures mean, how to repeat the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evenhand import fairness
from evenhand.counts import KINDS
from evenhand.fairness import MEASURES, few
from evenhand.folders import DESCRIPTION, RunFolder
from evenhand.holdings import Holdings
from evenhand.report.svg import shortened

if TYPE_CHECKING:
    from evenhand.comparison import Comparison
    from evenhand.runs import Run, Runs

Floats = np.ndarray[Any, np.dtype[np.float64]]

TAIL = 10.0  # percent: of the clients, the worst and the best that a page speaks of
SHOWN_CLASSES = 3
NAME = 80  # letters of a client's name
EXPLAINED = {
    "mean accuracy": "mean",
    "std (pp)": "std",
    "angle": "angle_radians",
    "gap": "gap",
    "Gini": "gini",
    "Jain": "jain",
}
BASELINE = "fedavg"


def tail_of(runs: Runs) -> str:
    """The worst few, in words: 10%, or the one client that this comes to."""
    return few(runs[0].measured_clients, TAIL)


def ends(accuracies: Any) -> tuple[Floats, Floats]:
    """The accuracy in percent of the worst-served and of the best-served few; rounds x clients gives curves."""
    worst, best = fairness.worst(accuracies, TAIL), fairness.best(accuracies, TAIL)
    return 100.0 * np.asarray(worst), 100.0 * np.asarray(best)


def at_the_end(runs: Runs) -> tuple[float, float]:
    """The same over the seeds, at the end."""
    both = [ends(run.accuracies) for run in runs]
    return float(np.mean([low for low, _ in both])), float(np.mean([high for _, high in both]))


def headline(runs: Runs, baseline: Runs | None) -> str:
    """The run in two sentences."""
    (worst, best), tail = at_the_end(runs), tail_of(runs)
    clients = f"{runs[0].measured_clients:,}"
    mean = 100.0 * float(runs.measured("mean").mean())
    who = f"The worst {tail} of clients reach {worst:.0f}%"
    if tail == "client":
        who = f"The worst client reaches {worst:.0f}%"
    other = ""
    if baseline is not None:
        there = at_the_end(baseline)[0]
        other = f"; FedAvg's worst {'reaches' if tail == 'client' else 'reach'} {there:.0f}%"
    spread = float(runs.measured("std_pp").mean())
    return (
        f"{who}, the best {best:.0f}%{other}. On average {clients} clients get {mean:.1f}% right, typically "
        f"{spread:.1f} points off that."
    )


def baseline_of(runs: Runs) -> Runs | None:
    """A finished FedAvg run of the same setting that lies beside this one, as in the folder of a comparison."""
    from evenhand.experiment import load_toml
    from evenhand.running import load_runs

    if runs.folder is None or runs.experiment.method.name == BASELINE:
        return None
    for place in sorted(runs.folder.absolute().parent.glob(f"*{BASELINE}*/{DESCRIPTION}")):
        if not RunFolder(place.parent).finished:
            continue
        other = load_toml(place)
        if other.method.name == BASELINE and replace(other, method=runs.experiment.method) == runs.experiment:
            return load_runs(place.parent)
    return None


def verdict(comparison: Comparison) -> str:
    """The comparison in two sentences: who serves the worst best, and who is beaten by nobody."""
    served = {label: at_the_end(runs)[0] for label, runs in comparison.runs.items()}
    tail = tail_of(next(iter(comparison.runs.values())))
    best = max(served, key=lambda label: served[label])
    rest = [label for label in served if label != best]
    against = comparison.first if comparison.first in rest else (rest[0] if rest else "")
    word, reach = (f"worst {tail} of clients", "reach") if tail != "client" else ("worst client", "reaches")
    said = f"With {best} the {word} {reach} {served[best]:.0f}%"
    said += f", with {against} {served[against]:.0f}%." if against else "."
    means = {label: float(runs.measured("mean").mean()) for label, runs in comparison.runs.items()}
    highest = max(means, key=lambda label: means[label])
    said += f" The mean accuracy is highest with {highest}: {100 * means[highest]:.1f}%."
    return f"{said} {_parity(comparison)}" if comparison.grouped else said


def _parity(comparison: Comparison) -> str:
    """Who treats groups of people most alike."""
    gaps = {label: 100.0 * float(runs.measured("dp").mean()) for label, runs in comparison.runs.items()}
    best = min(gaps, key=lambda label: gaps[label])
    rest = [label for label in gaps if label != best]
    against = comparison.first if comparison.first in rest else (rest[0] if rest else "")
    other = f", with {against} {gaps[against]:.1f}" if against else ""
    return (
        f"Groups are treated most alike with {best}: a class is predicted for one up to {gaps[best]:.1f} points "
        f"more or less often than for everyone{other}."
    )


def make_up(counts: Any, classes: Sequence[str]) -> str:
    """Which classes a client's data is made of, the largest first.

    >>> make_up(np.array([3, 0, 9]), ["cat", "dog", "eel"])
    '75% eel, 25% cat'
    """
    total = int(counts.sum())
    if not total:
        return "no samples"
    order = np.argsort(-counts, kind="stable")
    held = [place for place in order if counts[place]]
    words = [f"{100 * counts[place] / total:.0f}% {classes[place]}" for place in held[:SHOWN_CLASSES]]
    more = len(held) - SHOWN_CLASSES
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def client_words(run: Run, client: int, asked: int, several: bool) -> str:
    """What the page tells about a client that is pointed at."""
    held: Holdings | None = run.holdings
    lines = [f"client {shortened(run.names[client], NAME)}" + (f", seed {run.seed}" if several else "")]
    lines.append(f"{100 * run.accuracies[client]:.1f}% right, loss {run.losses[client]:.3f}")
    if held is not None:
        lines.append(f"{held.train[client]:,} training and {held.test[client]:,} test samples")
        lines.append(make_up(held.labels[client], held.classes))
    lines.append(f"asked in {asked:,} of {len(run.rounds):,} rounds")
    return "\n".join(lines)


def measures(grouped: bool) -> list[tuple[str, str, str]]:
    """Every measure of the page: its name, how it is computed, what it says and which way is fairer."""
    known = [(said, MEASURES[name]) for said, name in EXPLAINED.items()]
    found = [(said, entry.definition, f"{entry.sentence} ({entry.direction})") for said, entry in known]
    found[1:1] = [
        (
            "worst, best 5% or 10%",
            "mean accuracy of the lowest, of the highest so many percent of the clients, rounded down; at least one",
            "How those fare whom the model serves worst and best. (higher is better)",
        )
    ]
    found.append(
        (
            "conflict",
            "the inner product of a client's update with the step is negative",
            "The step makes this client's own loss rise, to first order. (fewer is fairer)",
        )
    )
    return found + ([(kind.title, kind.definition, kind.sentence) for kind in KINDS.values()] if grouped else [])


def times_asked(run: Run) -> np.ndarray[Any, np.dtype[np.int64]]:
    asked = [client for entry in run.rounds for client in entry["asked"]]
    return np.bincount(np.array(asked, dtype=np.int64), minlength=len(run.names))
