"""What a run is measured by in a paper's table or figure: numbers, and curves over its rounds.

A measure is a name, perhaps with an argument after a colon.

    mean, std_pp, worst:20, client:NAME, loss_mean, dp, dp:sex, ...   from every client's test data
    dp:1, eodds:2, ...   group fairness of the first, second, ... sensitive attribute
    loss_of:highest, loss_of:lowest   the test loss of the client whose loss was highest (lowest) before the training;
        loss_of:gap   what is between the two
    direction, conflicts, layer_conflicts:N   from each round's record: length of the update, clients it goes against
    fell   share of a round's participants whose loss on their own training data fell in it
    fell_like:GAMMA   how a round's falls go with the losses: their correlation with loss^GAMMA over the participants

Of a run's end the first kind speaks; what a round tells is averaged over all of them. Four words turn a measure's
curve into another number: `over:M` its mean, `late:M` its mean over the last tenth, `left:M` that over the mean of the
first tenth, `swing:M` its standard deviation over the second half. `rounds_to:X`: after how many rounds the mean
accuracy first is X, and one more than were played where it never is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError, near_miss
from evenhand.counts import CLIENT_MEASURES, KINDS
from evenhand.fairness import MEASURES, best, worst
from evenhand.runs import OF_LOSSES, Run

Floats = np.ndarray[Any, np.dtype[np.float64]]

POOLED = ("pooled_accuracy", "pooled_loss")
LOSSES = tuple(f"loss_{name}" for name in OF_LOSSES)
EXTREMES = ("highest", "lowest", "gap")
OF_ROUNDS = ("fell", "direction", "conflicts", "layer_conflicts", "fell_like")
ARGUMENT = {
    "worst": "a percentage",
    "best": "a percentage",
    "client": "a client's name",
    "layer_conflicts": "a layer",
    "fell_like": "an exponent",
    "rounds_to": "an accuracy between 0 and 1",
    "loss_of": "'highest', 'lowest' or 'gap'",
}


def _tenth(curve: Floats) -> int:
    return max(1, len(curve) // 10)


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


SUMMARIES: Mapping[str, Callable[[Floats], float]] = {
    "over": _mean,
    "late": lambda curve: _mean(curve[-_tenth(curve) :]),
    "left": lambda curve: _mean(curve[-_tenth(curve) :]) / _mean(curve[: _tenth(curve)]),
    "swing": lambda curve: float(np.std(curve[len(curve) // 2 :])),
}
KNOWN = (
    *MEASURES,
    *POOLED,
    *LOSSES,
    *KINDS,
    *CLIENT_MEASURES,
    *OF_ROUNDS[:3],
    *(f"{word}:{'MEASURE' if word in SUMMARIES else 'N'}" for word in (*ARGUMENT, *SUMMARIES)),
)


def bare(measure: str) -> str:
    """The measure inside sqrt(...)."""
    found = re.fullmatch(r"sqrt\((.+)\)", measure)
    return found[1] if found else measure


def check_measure(name: str) -> None:
    """Insist on a measure that a run gives."""
    word, colon, argument = bare(name).partition(":")
    if colon and word in SUMMARIES:
        check_measure(argument)
        if argument.partition(":")[0] in (*SUMMARIES, "rounds_to"):
            raise EvenhandError(f"the measure {name!r}: {argument!r} is a number, not a curve")
    elif colon and word in ARGUMENT:
        texts = {"client": bool(argument), "loss_of": argument in EXTREMES}
        if not texts.get(word, argument.replace(".", "", 1).isdigit()):
            raise EvenhandError(f"the measure {name!r} needs {ARGUMENT[word]} after the colon")
    elif (colon and not (word in KINDS and argument)) or (not colon and word not in KNOWN):
        raise EvenhandError(f"unknown measure {name!r}{near_miss(name, KNOWN)}")


def curve_of(measure: str) -> str:
    """The measure whose curve a number comes from: that of `late:fell` is `fell`'s, of `rounds_to:0.4` the mean's."""
    word, _, argument = bare(measure).partition(":")
    return "mean" if word == "rounds_to" else argument if word in SUMMARIES else bare(measure)


def needs_all(measure: str) -> bool:
    """Whether the participants' losses must be measured before and after every round."""
    return curve_of(measure).startswith("fell")


def measured(run: Run, name: str) -> float:
    """A measure of a finished run."""
    word, _, argument = name.partition(":")
    if word in SUMMARIES:
        inner = argument.partition(":")[0]
        return SUMMARIES[word](of_rounds(run, argument) if inner in OF_ROUNDS else curve(run, argument))
    if word == "rounds_to":
        reached = np.flatnonzero(run.curves["mean"] >= float(argument))
        rounds = run.curves["round"]
        return float(rounds[reached[0]] if len(reached) else rounds[-1] + 1)
    return _mean(of_rounds(run, name)) if word in OF_ROUNDS else float(curve(run, name)[-1])


def curve(run: Run, name: str) -> Floats:
    """A measure at each of a run's evaluations; what rounds tell, as the mean over those since the one before."""
    word, _, argument = name.partition(":")
    if word in OF_ROUNDS:
        values, ends = of_rounds(run, name), run.curves["round"].astype(int)
        return np.array([math.nan, *(_mean(values[a:b]) for a, b in itertools.pairwise(ends))])
    if word in KINDS and argument.isdigit():
        name = f"{word}:{_attribute(run, int(argument))}"
    elif argument and word not in KINDS:
        return np.array([_of_clients(run, word, argument, entry) for entry in run.evaluations])
    if name not in run.curves:
        raise EvenhandError(f"the measure {name!r}: this run has none (it has {', '.join(run.curves)})")
    return np.asarray(run.curves[name], dtype=np.float64)


def _attribute(run: Run, number: int) -> str:
    """A sensitive attribute by its place, from 1."""
    known = [] if run.cells is None else list(run.cells.attributes)
    if not 1 <= number <= len(known) or len(known) < 2:
        raise EvenhandError(f"no sensitive attribute {number} among several: there are {', '.join(known) or 'none'}")
    return known[number - 1]


def _of_clients(run: Run, word: str, argument: str, entry: Mapping[str, Any]) -> float:
    """What one evaluation says of the worst or best share of the clients, or of one client."""
    accuracies = np.asarray(entry["accuracies"])
    if word in ("worst", "best"):
        return float((worst if word == "worst" else best)(accuracies[np.isfinite(accuracies)], float(argument)))
    if word == "loss_of":
        start = np.asarray(run.evaluations[0]["losses"])
        high, low = (float(entry["losses"][int(find(start))]) for find in (np.nanargmax, np.nanargmin))
        return {"highest": high, "lowest": low, "gap": high - low}[argument]
    if argument not in run.names:
        raise EvenhandError(
            f"the measure 'client:{argument}': no client has that name (there are {', '.join(run.names[:5])})"
        )
    return float(accuracies[run.names.index(argument)])


def of_rounds(run: Run, name: str) -> Floats:
    """What each round tells; not-a-number where it tells nothing."""
    word, _, argument = name.partition(":")
    if word == "layer_conflicts":
        layers = max((len(entry.get(word, ())) for entry in run.rounds), default=0)
        if not 1 <= int(argument) <= layers:
            raise EvenhandError(f"the measure {name!r}: the model has {layers} layers")
        return np.array([entry[word][int(argument) - 1] if word in entry else math.nan for entry in run.rounds])
    if word == "fell_like":
        return np.array([_goes_with(entry, float(argument)) for entry in run.rounds])
    return np.array([float(entry.get(word, math.nan)) for entry in run.rounds])


def _goes_with(entry: Mapping[str, Any], gamma: float) -> float:
    """Correlation of a round's falls with a power of the losses before it."""
    before, after = np.asarray(entry.get("losses", ())), np.asarray(entry.get("losses_after", ()))
    if len(before) < 3 or len(before) != len(after):
        return math.nan
    falls, powers = before - after, before**gamma
    if np.ptp(falls) == 0.0 or np.ptp(powers) == 0.0:
        return math.nan
    return float(np.corrcoef(falls, powers)[0, 1])
