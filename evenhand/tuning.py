"""Choosing a method's settings on validation data: a grid, random draws, or Optuna's search.

Every client keeps a share of its training samples back; settings are judged on those, by a stated rule, and the test
data is not looked at. All settings that share the clients' work run as replicas of one program.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenhand import storage
from evenhand.checks import EvenhandError, choice, near_miss, number
from evenhand.counts import MEASURES as GROUP_MEASURES
from evenhand.data import Dataset, Partition, Split
from evenhand.experiment import Experiment, chosen_experiment, load_data, prepare
from evenhand.fairness import MEASURES
from evenhand.folders import writing
from evenhand.methods import Method, method, parse
from evenhand.recording import Progress, Status
from evenhand.runs import OF_LOSSES, Run
from evenhand.storage import to_json
from evenhand.streams import stream
from evenhand.tables import pandas_or_hint, text_table

HELD_OUT = 0.2
SEARCHES = ("grid", "random", "optuna")
AT_ONCE = 8  # trials that Optuna is asked for at a time
SHOWN = 12  # trials in a printed table
OF_WORK = ("lr", "epochs", "batch_size", "momentum", "weight_decay")  # settings of the clients' work, not of a method
RATES = (0.01, 0.03, 0.1, 0.3)

Space = Mapping[str, Sequence[Any]]

# What the papers that compare these methods tried (FedFV's and AdaFed's grids, mFairFL's Table S1); for even, our own.
SPACES: dict[str, Space] = {
    "even": {"gamma": (0.0, 0.5, 1.0, 2.0), "ridge": (0.001, 0.01, 0.1)},
    "fedprox": {"mu": (0.001, 0.01, 0.1, 1.0)},
    "ditto": {"lam": (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0)},
    "qffl": {"q": (0.001, 0.01, 0.1, 0.2, 1.0, 2.0, 5.0, 10.0)},
    "afl": {"step": (0.01, 0.05, 0.1, 0.5, 1.0)},
    "term": {"t": (0.1, 0.5, 1.0, 2.0, 5.0)},
    "drfl": {"q": (0.01, 0.02, 1.0, 2.0, 5.0, 10.0)},
    "fedgini": {"epsilon": (0.0, 0.1, 0.5, 1.0)},
    "fedmgda+": {"epsilon": (0.01, 0.05, 0.1, 0.5, 1.0)},
    "fedfv": {"alpha": (0.0, 0.1, 0.2, 1 / 3, 0.5, 2 / 3), "tau": (0, 1, 3, 10)},
    "fedmdfg": {"theta": (5.625, 11.25, 22.5), "s": (1, 5)},
    "adafed": {"gamma": (0.0, 0.01, 0.1, 1.0, 5.0, 10.0)},
    "fedfa": {"gamma": (0.0, 0.5, 0.9), "client_momentum": (0.0, 0.5, 0.9)},
    "mfairfl": {"beta": (0.2, 0.4, 0.6, 0.8, 1.0), "delta": (0.001, 0.01, 0.1), "gamma": (0.3, 1.0, 3.0)},
    "fpfl": {"gamma": (0.1, 0.3, 1.0, 3.0), "damping": (1.0, 3.0)},
    "fedfb": {"step": (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)},
    "fairfed": {"beta": (0.01, 0.05, 0.1, 1.0, 2.0, 5.0)},
    "fedavg-f": {"gamma": (0.1, 0.3, 1.0, 3.0)},
    "indfair": {"gamma": (0.1, 0.3, 1.0, 3.0)},
    "cenfair": {"gamma": (0.1, 0.3, 1.0, 3.0)},
    "fedadam": {"eta": (0.001, 0.01, 0.1, 1.0), "tau": (1e-4, 1e-3, 1e-2)},
    "fedamsgrad": {"eta": (0.001, 0.01, 0.1, 1.0), "tau": (1e-4, 1e-3, 1e-2)},
    "fedyogi": {"eta": (0.001, 0.01, 0.1, 1.0), "tau": (1e-4, 1e-3, 1e-2)},
    "fedadagrad": {"eta": (0.001, 0.01, 0.1, 1.0), "tau": (1e-4, 1e-3, 1e-2)},
}


# ------------------------------------------------------------------------------------------------ what is better


@dataclass(frozen=True)
class Judgement:
    """A weighted sum of measures; more is better."""

    text: str
    terms: tuple[tuple[float, str], ...]

    TERM = re.compile(r"\s*([+-]?)\s*(?:(\d+\.?\d*|\.\d+)\s*\*\s*)?([A-Za-z_]\w*(?::[\w./]+)?)")

    @classmethod
    def read(cls, text: str) -> Judgement:
        """`"mean"`, `"0.5*mean + 0.5*worst"`, `"pooled_accuracy - dp"`."""
        terms: list[tuple[float, str]] = []
        place = 0
        while place < len(text.rstrip()):
            found = cls.TERM.match(text, place)
            if found is None or (terms and not found[1]):
                raise EvenhandError(
                    f"by={text!r} is not a sum of measures such as 'mean', '0.5*mean + 0.5*worst' or 'mean - dp'"
                )
            terms.append((float(found[2] or 1.0) * (-1.0 if found[1] == "-" else 1.0), found[3]))
            place = found.end()
        if not terms:
            raise EvenhandError("by='' names no measure; 'mean' is the clients' mean accuracy")
        return cls(text, tuple(terms))

    def check(self, dataset: Dataset) -> None:
        """Insist on measures that runs on this data have, before anything is trained."""
        known = ["pooled_accuracy", "pooled_loss", *MEASURES, *(f"loss_{name}" for name in OF_LOSSES)]
        if dataset.sensitive:
            known += [*GROUP_MEASURES]
        for _, name in self.terms:
            kind, _, attribute = name.partition(":")
            if kind not in known or (attribute and attribute not in dataset.sensitive):
                raise EvenhandError(
                    f"by={self.text!r}: there is no measure {name!r}{near_miss(name, known)} "
                    f"(there are: {', '.join(known)})"
                )

    def score(self, measures: Mapping[str, float]) -> float:
        found = sum(weight * measures[name] for weight, name in self.terms)
        return found if math.isfinite(found) else -math.inf


# ------------------------------------------------------------------------------------------------ what was tried


@dataclass(frozen=True)
class Trial:
    """One choice of settings, and what it reached on every seed's validation data."""

    settings: Mapping[str, Any]
    seeds: Mapping[int, Mapping[str, float]]
    scores: tuple[float, ...]

    @property
    def score(self) -> float:
        return float(np.mean(self.scores))

    def said(self) -> str:
        return ", ".join(f"{name}={_short(value)}" for name, value in self.settings.items()) or "as it is"


@dataclass(frozen=True)
class Tuned:
    """Every trial, best first, and the method and work with the best settings put in."""

    experiment: Experiment
    by: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        return self.trials[0]

    @property
    def method(self) -> Method:
        return self.experiment.method

    def command(self) -> str:
        """What to type to train with the best settings, the method's own among them."""
        text = self.method.written
        own = {name: value for name, value in self.best.settings.items() if name not in OF_WORK}
        chosen = ",".join(f"{name}={_short(value)}" for name, value in own.items() if name not in parse(text)[1])
        text += f"{',' if ':' in text else ':'}{chosen}" if chosen else ""
        work = "".join(
            f" --{name.replace('_', '-')} {_short(value)}"
            for name, value in self.best.settings.items()
            if name in OF_WORK[:3]
        )
        more = "".join(
            f" --set {name}={_short(value)}" for name, value in self.best.settings.items() if name in OF_WORK[3:]
        )
        return f"evenhand run {text}{work}{more}"

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.settings))
        shown = [name for _, name in Judgement.read(self.by).terms]
        rows = [(*names, self.by, *(name for name in shown if name != self.by), "seeds")]
        for trial in self.trials[:SHOWN]:
            several = len(trial.scores) > 1 and math.isfinite(trial.score)
            spread = f" ± {np.std(trial.scores, ddof=1):.4f}" if several else ""
            told = [
                f"{np.mean([entry[name] for entry in trial.seeds.values()]):.4f}" for name in shown if name != self.by
            ]
            settings = [_short(trial.settings[name]) if name in trial.settings else "-" for name in names]
            rows.append((*settings, f"{trial.score:.4f}{spread}", *told, str(len(trial.scores))))
        more = len(self.trials) - SHOWN
        return text_table(rows) + (f"\n... and {more} more" if more > 0 else "")

    @property
    def table(self) -> Any:
        """One row a trial and seed (a pandas frame)."""
        rows = [
            {**trial.settings, "seed": seed, "score": score, **measured}
            for trial in self.trials
            for (seed, measured), score in zip(trial.seeds.items(), trial.scores, strict=True)
        ]
        return pandas_or_hint().DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON)."""
        return {
            "by": self.by,
            "best": dict(self.best.settings),
            "command": self.command(),
            "trials": [{"settings": dict(t.settings), "score": t.score, "scores": list(t.scores)} for t in self.trials],
        }


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------ searching


def tune(
    wanted: str | Method | Mapping[str, Any],
    *,
    experiment: Experiment | None = None,
    by: str = "mean",
    space: Mapping[str, Sequence[Any]] | None = None,
    search: str = "grid",
    trials: int | None = None,
    hold_out: float = HELD_OUT,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Tuned:
    """Choose a method's settings on validation data.

    Args:
        wanted: the method; settings that are written with it stay as they are.
        experiment, settings: what to run, as in `simulate`.
        by: the rule, a weighted sum of measures: "mean" (accuracy of the clients), "worst" (of the worst-served 10%),
            "0.5*mean + 0.5*worst", "pooled_accuracy - dp", ...
        space: settings and the values to try; default: what the papers tried for this method (`SPACES`), and a few
            learning rates. "lr", "epochs", "batch_size", "momentum" and "weight_decay" are the clients' work.
        search: "grid" (all combinations), "random" (so many of them), "optuna" (guided, between the values as well).
        trials: how many, for "random" and "optuna".
        hold_out: share of each client's training samples that settings are judged on; where the split has validation
            data (`split=[0.7, 0.1, 0.2]`), that is used instead.
        out: a CSV file that gets every trial as it ends, and from which an interrupted search goes on.

    >>> found = tune("qffl", space={"q": [0.1, 1.0]}, rounds=4, seeds=2)
    >>> len(found.trials), list(found.best.settings)
    (2, ['q'])
    """
    choice("search", search, SEARCHES)
    number("hold_out", hold_out, above=0.0, high=0.9)
    judged, base = Judgement.read(by), method(wanted)
    chosen = chosen_experiment(experiment, {**settings, "method": base})
    chosen = replace(chosen, eval_every=chosen.rounds, measure="needed")
    values = _space(base, space)
    dataset = load_data(chosen)
    judged.check(dataset)
    desk = _Desk(chosen, dataset, judged, hold_out, None if out is None else Path(out), progress)
    found = _searched(desk, values, search, trials)
    best = max(range(len(found)), key=lambda place: found[place].score)
    if not math.isfinite(found[best].score):
        raise EvenhandError("no trial reached a finite score; a smaller learning rate may help (space={'lr': [0.01]})")
    order = sorted(range(len(found)), key=lambda place: -found[place].score)
    told = _with(chosen, found[best].settings)
    return Tuned(replace(told, eval_every=(experiment or Experiment()).eval_every), by, tuple(found[i] for i in order))


def _space(base: Method, given: Mapping[str, Sequence[Any]] | None) -> dict[str, tuple[Any, ...]]:
    if given is None:
        return {**{name: tuple(values) for name, values in SPACES.get(base.name, {}).items()}, "lr": RATES}
    if not given:
        raise EvenhandError("the space names no setting to try; leave it out for the papers' own")
    found = {}
    for name, values in given.items():
        listed = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,)
        if not listed:
            raise EvenhandError(f"the space has no value for {name!r}")
        if name not in OF_WORK:
            for value in listed:
                base.with_settings({name: value})  # says what is wrong before anything runs
        found[name] = listed
    return found


def _searched(desk: _Desk, space: Mapping[str, tuple[Any, ...]], search: str, trials: int | None) -> list[Trial]:
    every = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if search == "grid":
        if trials is not None:
            raise EvenhandError("a grid tries all combinations; trials=... goes with search='random' or 'optuna'")
        return desk.run(every)
    if trials is None:
        raise EvenhandError(f"search={search!r} needs to know how many trials (trials=20)")
    number("trials", trials, low=1, whole=True)
    if search == "random":
        order = stream(desk.experiment.seeds[0], "tuning").permutation(len(every))[:trials]
        return desk.run([every[place] for place in order])
    return _optuna(desk, space, trials)


def _optuna(desk: _Desk, space: Mapping[str, tuple[Any, ...]], trials: int) -> list[Trial]:
    try:
        import optuna
    except ImportError as error:
        raise EvenhandError("search='optuna' needs Optuna: pip install 'evenhand[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=desk.experiment.seeds[0]))
    found: list[Trial] = []
    while len(found) < trials:
        asked = [study.ask() for _ in range(min(AT_ONCE, trials - len(found)))]
        drawn = desk.run([{name: _suggested(one, name, values) for name, values in space.items()} for one in asked])
        for one, trial in zip(asked, drawn, strict=True):
            finite = math.isfinite(trial.score)
            study.tell(one, trial.score if finite else None, None if finite else optuna.trial.TrialState.FAIL)
        found += drawn
    return found


def _suggested(trial: Any, name: str, values: tuple[Any, ...]) -> Any:
    """Between the smallest and the largest number, logarithmically where they span a decade; else one of the values."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numbers or len(values) == 1:
        return trial.suggest_categorical(name, list(values))
    low, high = min(values), max(values)
    wide = low > 0 and high / low >= 10
    if all(isinstance(value, int) for value in values):
        return trial.suggest_int(name, low, high, log=wide)
    return trial.suggest_float(name, float(low), float(high), log=wide)


# ------------------------------------------------------------------------------------------------ running trials


class _Desk:
    """Runs trials on validation data, and keeps what they gave."""

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        judged: Judgement,
        hold_out: float,
        out: Path | None,
        progress: Progress | None,
    ) -> None:
        self.experiment, self.dataset, self.judged, self.hold_out = experiment, dataset, judged, hold_out
        self.out, self.progress = out, progress
        self.rows = [] if out is None or not out.is_file() else _read(out)
        self.what = hashlib.sha256(to_json({**experiment.to_dict(), "held": hold_out}).encode()).hexdigest()[:12]

    def run(self, wanted: Sequence[Mapping[str, Any]]) -> list[Trial]:
        """Every choice on every seed; those with the same work run together."""
        found: dict[int, Trial] = {}
        fresh: dict[tuple[Any, ...], list[int]] = {}
        for place, settings in enumerate(wanted):
            known = self._known(settings)
            if set(known) == set(self.experiment.seeds):
                found[place] = self._trial(settings, known)
            else:
                work = tuple((name, settings[name]) for name in OF_WORK if name in settings)
                fresh.setdefault(work, []).append(place)
        for places in fresh.values():
            for place, measured in self._played([wanted[place] for place in places], places):
                found[place] = self._trial(wanted[place], measured)
                self._keep(found[place])
            self._write()
        return [found[place] for place in range(len(wanted))]

    def _trial(self, settings: Mapping[str, Any], measured: Mapping[int, Mapping[str, float]]) -> Trial:
        seeds = {seed: dict(measured[seed]) for seed in self.experiment.seeds}
        return Trial(dict(settings), seeds, tuple(self.judged.score(entry) for entry in seeds.values()))

    def _played(
        self, wanted: Sequence[Mapping[str, Any]], places: Sequence[int]
    ) -> list[tuple[int, dict[int, dict[str, float]]]]:
        """What settings reach, trained as one program; one that diverges does not take the others with it."""
        told = [_with(self.experiment, settings) for settings in wanted]
        methods = [one.method for one in told]
        simulation = prepare(
            told[0], methods, self.dataset, lambda drawn, seed: held_back(drawn, self.hold_out, seed), forgiving=True
        )
        simulation.run(after_round=self._after_round if self.progress is not None else None)
        found: list[tuple[int, dict[int, dict[str, float]]]] = []
        replicas = iter(simulation.replicas)
        for place in places:
            seeds = {}
            for seed in self.experiment.seeds:
                replica = next(replicas)
                tested = replica.partition.test.sizes
                run = Run(told[0], seed, (), tested, [], replica.evaluations, cells=simulation.cells)
                lost = replica.diverged is not None
                seeds[seed] = {n: math.nan if lost else value for n, value in run.measures().items() if n != "round"}
            found.append((place, seeds))
        return found

    def _after_round(self, simulation: Any) -> None:
        assert self.progress is not None
        latest = [replica.evaluations[-1] for replica in simulation.replicas]
        label = f"{len(simulation.replicas)} runs"
        self.progress(Status(label, simulation.round, simulation.settings.rounds, latest))

    def _known(self, settings: Mapping[str, Any]) -> dict[int, dict[str, float]]:
        """What the file says of these settings already."""
        said = to_json(dict(settings))
        mine = [row for row in self.rows if (row["what"], row["settings"]) == (self.what, said)]
        skip = ("what", "settings", "seed", "score")
        return {int(row["seed"]): {k: float(v) for k, v in row.items() if k not in skip and v != ""} for row in mine}

    def _keep(self, trial: Trial) -> None:
        for (seed, measured), score in zip(trial.seeds.items(), trial.scores, strict=True):
            row = {"what": self.what, "settings": to_json(dict(trial.settings)), "seed": seed, "score": repr(score)}
            self.rows.append({**row, **{name: repr(value) for name, value in measured.items()}})

    def _write(self) -> None:
        if self.out is None:
            return
        text = io.StringIO()
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        table = csv.DictWriter(text, names, lineterminator="\n", restval="")
        table.writeheader()
        table.writerows(self.rows)
        with writing(self.out.parent):
            storage.write_bytes(self.out, text.getvalue().encode())


def _with(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    own = {name: value for name, value in settings.items() if name not in OF_WORK}
    work = {name: value for name, value in settings.items() if name in OF_WORK}
    return replace(experiment.with_settings(work), method=experiment.method.with_settings(own))


def held_back(drawn: Partition, share: float, seed: int) -> Partition:
    """The partition with validation data in the place of the test data, and without it in the training data."""
    if len(drawn.validation.indices):
        return replace(drawn, test=drawn.validation)
    sizes = drawn.train.sizes
    back = np.minimum(np.maximum(np.round(share * sizes).astype(np.int64), sizes > 1), np.maximum(sizes - 1, 0))
    rng, kept, judged = stream(seed, "tuning"), [], []
    for client, count in enumerate(back.tolist()):
        mixed = drawn.train.offsets[client] + rng.permutation(sizes[client])  # places in `train.indices`
        judged.append(np.sort(mixed[:count]))
        kept.append(np.sort(mixed[count:]))
    labels = None if drawn.labels is None else drawn.labels[np.concatenate(kept)]
    return replace(drawn, train=_split(drawn.train, kept), test=_split(drawn.train, judged), labels=labels)


def _split(whole: Split, places: Sequence[np.ndarray[Any, Any]]) -> Split:
    return Split(whole.indices[np.concatenate(places)], np.cumsum([0, *map(len, places)]))


def _read(path: Path) -> list[dict[str, Any]]:
    """The trials that a file holds."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if any(row.get(name) in (None, "") for row in rows for name in ("what", "settings", "seed", "score")):
        raise EvenhandError(f"{str(path)!r} is not a file of trials, or was cut short; give another one, or remove it")
    return rows
