"""How evenly a model serves its clients: the field's measures, each with one definition.

The measures take one number per client along the last axis, so a (rounds x clients) array gives a curve. Not-a-number
marks a client without test data and is left out. `weights` (say, the clients' sample counts) turns every client into
that many equal ones; without it every client counts the same, as in the papers.

The papers use one name for different things. What they print as:
    "Var." in FedFV's tables is `std_pp`, and FedFa's and q-FFL's variance is `variance_pp2`;
    the sigma in AdaFed's CIFAR-10 (set-up 1) and Fashion-MNIST tables is the square root of `std_pp`;
    FedLF's and FedMDFG's fairness indicator is `angle_radians`, AdaFed's and q-FFL's angle is `angle_degrees`;
    mFairFL's violation of client fairness, which the paper leaves open, is read as the size-weighted `max_deviation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import kl_div, stdtr, stdtrit

from evenhand.checks import EvenhandError, number

Floats = np.ndarray[Any, np.dtype[np.float64]]
Measured = Any  # a float for one vector, an array for several

CHUNK = 4_000_000  # numbers in the bootstrap's working array
ROUNDING = 1e-6  # how far float32 sums may carry an accuracy past 1


# ------------------------------------------------------------------------------------------- the measures


def mean(values: Any, weights: Any = None) -> Measured:
    """The average client's value.

    >>> float(mean([0.5, 1.0, np.nan])), float(mean([0.5, 1.0], weights=[3, 1]))
    (0.75, 0.625)
    """
    cells, weight = _cells(values, weights)
    lowest = np.asarray(_lowest(values))  # measured from there, equal values have exactly their value as mean
    return lowest + _over((weight * (cells - lowest[..., None])).sum(-1), weight.sum(-1))


def variance(values: Any, weights: Any = None) -> Measured:
    """Mean squared distance to the mean (population variance: divided by N, not N - 1)."""
    cells, weight = _cells(values, weights)
    centred = cells - np.asarray(mean(values, weights))[..., None]
    return _over((weight * centred**2).sum(-1), weight.sum(-1))


def std(values: Any, weights: Any = None) -> Measured:
    """Square root of the population variance."""
    return np.sqrt(variance(values, weights))


def worst(values: Any, percent: float = 5.0, weights: Any = None) -> Measured:
    """Mean of the lowest max(1, int(N p / 100)) values; with weights, of the lowest p% of the weight.

    >>> float(worst([0.1, 0.3, 0.8, 0.9], percent=50))
    0.2
    """
    return _tail(values, weights, percent, sign=1.0)


def best(values: Any, percent: float = 5.0, weights: Any = None) -> Measured:
    """Mean of the highest max(1, int(N p / 100)) values; with weights, of the highest p% of the weight."""
    return _tail(values, weights, percent, sign=-1.0)


def few(clients: int, percent: float = 5.0) -> str:
    """What `worst` and `best` average over, in words: so many percent, or the one client that this comes to.

    >>> few(100), few(30)
    ('5%', 'client')
    """
    return "client" if int(clients * percent / 100.0 + 1e-9) <= 1 else f"{percent:g}%"


def _get(share: str) -> str:
    return f"{share} {'gets' if share == 'client' else 'get'}"


def gap(values: Any) -> Measured:
    """Highest minus lowest value."""
    return _highest(values) - _lowest(values)


def max_deviation(values: Any, weights: Any = None) -> Measured:
    """Largest distance of a client from the mean."""
    middle = mean(values, weights)
    return np.maximum(_highest(values) - middle, middle - _lowest(values))


def angle(values: Any, weights: Any = None) -> Measured:
    """Angle in radians between the clients' values and equal ones: arccos(a.1 / |a||1|) = arctan(std / mean).

    The second form has no cosine that rounding could push past 1. All zero counts as equal: 0.

    >>> float(angle([0.4, 0.4, 0.4])), round(float(np.degrees(angle([0.0, 1.0]))), 12)
    (0.0, 45.0)
    """
    return np.arctan2(std(values, weights), mean(values, weights))


def kl_uniform(values: Any, weights: Any = None) -> Measured:
    """Kullback-Leibler divergence of a / sum(a) from the uniform distribution, natural logarithm.

    This is also Theil's index, the mean of (a / mean) log(a / mean), which is the form that takes weights. All zero
    counts as equal: 0.
    """
    _, weight = _cells(values, weights)
    return _over((weight * kl_div(_relative(values, weights), 1.0)).sum(-1), weight.sum(-1))


def gini(values: Any, weights: Any = None) -> Measured:
    """Gini coefficient: mean distance of two clients drawn at random, over twice the mean; all zero counts as equal.

    >>> float(gini([0.0, 0.0, 0.0, 1.0])), float(gini([0.7, 0.7]))
    (0.75, 0.0)
    """
    _, weight = _cells(values, weights)
    relative = _relative(values, weights)
    order = relative.argsort(-1)
    relative = np.take_along_axis(relative, order, -1)
    weight = np.take_along_axis(weight, order, -1)
    rank = weight.cumsum(-1) - weight / 2.0
    area = 2.0 * (weight * (relative - 1.0) * rank).sum(-1)
    return np.maximum(_over(area, weight.sum(-1) ** 2), 0.0)


def jain(values: Any, weights: Any = None) -> Measured:
    """Jain's index (sum a)^2 / (N sum a^2) = 1 / (1 + (std / mean)^2): 1 is equal, 1/N is all at one client."""
    return np.cos(angle(values, weights)) ** 2


def entropy(values: Any, weights: Any = None) -> Measured:
    """Entropy of a / sum(a), over its largest value log N; with weights, 1 - kl_uniform over that one's largest value.

    >>> float(entropy([0.5, 0.5])), float(entropy([0.0, 1.0]))
    (1.0, 0.0)
    """
    _, weight = _cells(values, weights)
    divergence = np.asarray(kl_uniform(values, weights))
    smallest = np.where(weight > 0.0, weight, weight.max(-1, keepdims=True)).min(-1)
    ceiling = -np.log(np.asarray(_over(smallest, weight.sum(-1))))  # 0 for a single client
    share = np.divide(divergence, ceiling, out=np.zeros_like(divergence), where=ceiling > 0.0)
    return np.where(np.isnan(divergence), np.nan, np.clip(1.0 - share, 0.0, 1.0))[()]


def _lowest(values: Any) -> Measured:
    cells = np.asarray(values, dtype=np.float64)
    return _known(np.where(np.isfinite(cells), cells, np.inf).min(-1))


def _highest(values: Any) -> Measured:
    return -_lowest(-np.asarray(values, dtype=np.float64))


def _cells(values: Any, weights: Any) -> tuple[Floats, Floats]:
    """Values and weights with the missing ones at zero."""
    values = np.asarray(values, dtype=np.float64)
    known = np.isfinite(values)
    weight = np.where(known, 1.0 if weights is None else np.asarray(weights, dtype=np.float64), 0.0)
    return np.where(known, values, 0.0), weight


def _over(sums: Any, totals: Any) -> Measured:
    """Sums over totals, not-a-number where there is nothing to sum."""
    totals = np.asarray(totals)
    return np.divide(sums, totals, out=np.full(totals.shape, np.nan), where=totals > 0.0)[()]


def _relative(values: Any, weights: Any) -> Floats:
    """Values over their mean; all 1 where the mean is zero."""
    cells, _ = _cells(values, weights)
    middle = np.broadcast_to(np.asarray(mean(values, weights))[..., None], cells.shape)
    return np.divide(cells, middle, out=np.ones_like(cells), where=middle > 0.0)


def _known(result: Any) -> Measured:
    return np.where(np.isfinite(result), result, np.nan)[()]


def _tail(values: Any, weights: Any, percent: float, sign: float) -> Measured:
    cells, weight = _cells(values, weights)
    order = np.where(weight > 0.0, sign * cells, np.inf).argsort(-1)
    cells = np.take_along_axis(cells, order, -1)
    weight = np.take_along_axis(weight, order, -1)
    budget = weight.sum(-1, keepdims=True) * percent / 100.0
    if weights is None:
        budget = np.maximum(1.0, np.floor(budget + 1e-9))
    taken = np.clip(budget - (weight.cumsum(-1) - weight), 0.0, weight)
    return _over((taken * cells).sum(-1), taken.sum(-1))


# ------------------------------------------------------------------------------------------- in words


class Measure(NamedTuple):
    """A measure for people: what is computed, what it says, and which way is fairer.

    The direction is for accuracies. Level measures ("better") say how well, not how evenly; for losses they turn round.
    """

    definition: str
    sentence: str
    direction: Literal["higher is fairer", "lower is fairer", "higher is better"]


MEASURES: dict[str, Measure] = {
    "mean": Measure(
        "mean of the clients' accuracies",
        "How well the average client is served; every client counts the same.",
        "higher is better",
    ),
    "std": Measure(
        "population standard deviation of the accuracies (fraction)",
        "How far a client's accuracy typically is from the average.",
        "lower is fairer",
    ),
    "std_pp": Measure(
        "100 std",
        "The same in percentage points.",
        "lower is fairer",
    ),
    "variance": Measure(
        "std squared (fraction squared)",
        "The square of the typical distance from the average.",
        "lower is fairer",
    ),
    "variance_pp2": Measure(
        "std_pp squared",
        "The same in squared percentage points.",
        "lower is fairer",
    ),
    "min": Measure(
        "lowest accuracy",
        "How the worst-served client fares.",
        "higher is fairer",
    ),
    "max": Measure(
        "highest accuracy",
        "How the best-served client fares.",
        "higher is better",
    ),
    "gap": Measure(
        "highest minus lowest accuracy",
        "What separates the best-served client from the worst-served.",
        "lower is fairer",
    ),
    "max_deviation": Measure(
        "largest |accuracy - mean|",
        "How far the client farthest from the average is from it.",
        "lower is fairer",
    ),
    "worst": Measure(
        "mean of the lowest max(1, int(N p / 100)) accuracies",
        "How the worst-served few fare on average.",
        "higher is fairer",
    ),
    "best": Measure(
        "mean of the highest max(1, int(N p / 100)) accuracies",
        "How the best-served few fare on average.",
        "higher is better",
    ),
    "angle_radians": Measure(
        "arccos(a.1 / |a||1|) = arctan(std / mean), radians",
        "How far the accuracies point away from being all equal; 0 is equal.",
        "lower is fairer",
    ),
    "angle_degrees": Measure(
        "the same angle in degrees",
        "The same in degrees.",
        "lower is fairer",
    ),
    "kl_uniform": Measure(
        "KL(a / sum a || uniform), natural logarithm",
        "How surprising the clients' shares of the accuracy are if all were meant to be equal; 0 is equal.",
        "lower is fairer",
    ),
    "gini": Measure(
        "mean |a_i - a_j| / (2 mean)",
        "How far two random clients are apart, against the average; 0 is equal, near 1 one client has it all.",
        "lower is fairer",
    ),
    "jain": Measure(
        "(sum a)^2 / (N sum a^2) = 1 / (1 + (std / mean)^2)",
        "As if this share of the clients were served, all alike, and the rest not at all; 1 is equal.",
        "higher is fairer",
    ),
    "entropy": Measure(
        "entropy of a / sum a, over log N",
        "How evenly the accuracy is spread over the clients; 1 is equal, 0 one client has it all.",
        "higher is fairer",
    ),
}

EXTREMES = (
    "min",
    "max",
    "gap",
    "max_deviation",
)  # resampling never sees beyond the worst client, so it cannot judge these


@dataclass(frozen=True)
class Summary:
    """Every measure of one set of values, in the values' own unit. Of losses, `worst` means the largest ones."""

    clients: int
    mean: float
    std: float
    variance: float
    min: float
    max: float
    gap: float
    max_deviation: float
    worst: float
    best: float
    angle_radians: float
    angle_degrees: float
    kl_uniform: float
    gini: float
    jain: float
    entropy: float


@dataclass(frozen=True)
class ClientFairness(Summary):
    """How well and how evenly the clients are served. Accuracies are fractions, and so is everything but the `_pp`s.

    `weighted`, `losses` and `weighted_losses` hold the same measures by sample instead of by client, and of the losses.
    `intervals` holds bootstrap intervals by name ("gini", "weighted.gini", "losses.gini", ...).
    """

    missing: int = 0  # clients without an accuracy, left out
    worst_percent: float = 5.0
    best_percent: float = 5.0
    weighted: Summary | None = None
    losses: Summary | None = None
    weighted_losses: Summary | None = None
    confidence: float = 0.95
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def std_pp(self) -> float:
        """Standard deviation in percentage points."""
        return 100.0 * self.std

    @property
    def variance_pp2(self) -> float:
        """Variance in squared percentage points."""
        return 1e4 * self.variance

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON); parts that were not asked for are left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        intervals = {name: list(interval) for name, interval in self.intervals.items()}
        return {**known, "std_pp": self.std_pp, "variance_pp2": self.variance_pp2, "intervals": intervals}

    def sentence(self) -> str:
        """The result in one plain sentence."""
        left_out = f" ({self.missing} more without test data, left out)" if self.missing else ""
        if self.clients == 1:
            return f"1 client{left_out}: {self.mean:.1%} right; fairness between clients needs at least two."
        worst, best = (few(self.clients, percent) for percent in (self.worst_percent, self.best_percent))
        return (
            f"{self.clients} clients{left_out}: on average {self.mean:.1%} right, typically {self.std_pp:.1f} "
            f"percentage points off that; the worst-served {_get(worst)} {self.worst:.1%}, "
            f"the best-served {_get(best)} {self.best:.1%}."
        )

    def __str__(self) -> str:
        columns: dict[str, Summary | None] = {
            "value": self,
            "by size": self.weighted,
            "losses": self.losses,
            "losses by size": self.weighted_losses,
        }
        shown = {title: part for title, part in columns.items() if part is not None}
        between = f"{self.confidence:.0%} interval"
        titles = ["measure", "value", *([between] if self.intervals else []), *list(shown)[1:], "in words"]
        rows = [titles]
        for name, measure in MEASURES.items():
            cells = {title: _spoken(getattr(part, name, None)) for title, part in shown.items()}
            row = [name, cells.pop("value")]
            if self.intervals:
                low, high = self.intervals.get(name, (None, None))
                row.append(f"{_spoken(low)} .. {_spoken(high)}" if low is not None else "-")
            rows.append([*row, *cells.values(), f"{measure.sentence} ({measure.direction})"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.losses is not None:
            lines += ["", "Of losses, lower is better, and `worst` is the mean of the largest ones."]
        return "\n".join([self.sentence(), "", *lines])


def _spoken(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# ------------------------------------------------------------------------------------------- the doors


def client_fairness(
    accuracies: Any,
    *,
    losses: Any = None,
    sizes: Any = None,
    worst: float = 5.0,
    best: float = 5.0,
    bootstrap: int = 0,
    confidence: float = 0.95,
    seed: int = 0,
) -> ClientFairness:
    """Every measure of how evenly the clients are served.

    Args:
        accuracies: one a client, fractions in [0, 1]. Not-a-number marks a client without test data: left out, counted.
        losses: one a client; adds the same measures of the losses. A loss that is not finite is left out of those.
        sizes: samples of each client; adds the measures with every sample, instead of every client, counting the same.
        worst, best: the share of clients, in percent, that the worst-served and the best-served few are.
        bootstrap: how often to resample the clients (1000 is a good number) for percentile intervals; 0 for none. The
            extremes (min, max, gap, max_deviation; worst and best where they are one client) get none: a resample never
            holds a client worse than the worst.
        confidence: of the intervals.
        seed: of the resampling.

    >>> fairness = client_fairness([0.9, 0.8, 0.7, 0.2], worst=25, best=25)
    >>> print(fairness.sentence())
    4 clients: on average 65.0% right, typically 26.9 percentage points off that; the worst-served client gets \
20.0%, the best-served client gets 90.0%.
    """
    number("bootstrap", bootstrap, low=0, whole=True)
    number("confidence", confidence, above=0.0, high=1.0 - 1e-9)
    number("seed", seed, low=0, whole=True)
    given = _clients(accuracies, losses, sizes, worst, best)
    if given.accuracies.ndim != 1:
        shape = given.accuracies.shape
        raise EvenhandError(f"accuracies has shape {shape}; one number per client is needed (curves takes rounds)")
    known = np.isfinite(given.accuracies)
    clients = given.picked(known)
    if not known.any():
        raise EvenhandError(f"no client has an accuracy ({known.size} given); nothing can be measured")
    if clients.sizes is not None and not clients.sizes.any():
        raise EvenhandError("all clients with an accuracy have size 0; leave sizes out, or give the sample counts")
    measured = {name: value.item() for name, value in clients.measured().items()}

    def part(prefix: str) -> dict[str, Any]:
        return {entry.name: measured[prefix + entry.name] for entry in fields(Summary)}

    return ClientFairness(
        **part(""),
        missing=int((~known).sum()),
        worst_percent=float(worst),
        best_percent=float(best),
        weighted=Summary(**part("weighted.")) if "weighted.mean" in measured else None,
        losses=Summary(**part("losses.")) if "losses.mean" in measured else None,
        weighted_losses=Summary(**part("weighted_losses.")) if "weighted_losses.mean" in measured else None,
        confidence=float(confidence),
        intervals=_intervals(clients, bootstrap, confidence, seed) if bootstrap and known.sum() > 1 else {},
    )


def curves(
    accuracies: Any, *, losses: Any = None, sizes: Any = None, worst: float = 5.0, best: float = 5.0
) -> dict[str, Floats]:
    """The measures over time: a (rounds x clients) array gives one number a round, by the names `client_fairness` uses.

    A round without any accuracy gives not-a-number. With sizes and losses the dictionary also holds "weighted.mean",
    "losses.mean" and so on.

    >>> curves([[0.5, 0.5], [0.0, 1.0]])["jain"].round(12).tolist()
    [1.0, 0.5]
    """
    rounds = _clients(accuracies, losses, sizes, worst, best)
    if rounds.accuracies.ndim != 2:
        raise EvenhandError(f"accuracies has shape {rounds.accuracies.shape}; curves needs rounds x clients")
    return {name: np.asarray(curve, dtype=np.float64) for name, curve in rounds.measured().items()}


@dataclass(frozen=True)
class _Clients:
    """What is known of the clients, along the last axis."""

    accuracies: Floats
    losses: Floats | None
    sizes: Floats | None
    worst: float
    best: float

    def picked(self, index: Any) -> _Clients:
        losses = None if self.losses is None else self.losses[index]
        sizes = None if self.sizes is None else self.sizes[index]
        return replace(self, accuracies=self.accuracies[index], losses=losses, sizes=sizes)

    def measured(self) -> dict[str, Measured]:
        """Every measure of everything given; those of the losses and those by size have a prefix."""
        measured = _summary(self.accuracies, None, self.worst, self.best)
        measured |= {"std_pp": 100.0 * measured["std"], "variance_pp2": 1e4 * measured["variance"]}
        parts: dict[str, dict[str, Measured]] = {}
        if self.sizes is not None:
            parts["weighted"] = _summary(self.accuracies, self.sizes, self.worst, self.best)
        if self.losses is not None:
            parts["losses"] = _summary(self.losses, None, self.worst, self.best, served="lowest")
        if self.losses is not None and self.sizes is not None:
            parts["weighted_losses"] = _summary(self.losses, self.sizes, self.worst, self.best, served="lowest")
        return measured | {f"{part}.{name}": value for part, entry in parts.items() for name, value in entry.items()}


def _summary(
    values: Floats, weights: Floats | None, worst_percent: float, best_percent: float, served: str = "highest"
) -> dict[str, Measured]:
    low, high = (worst, best) if served == "highest" else (best, worst)
    turned = angle(values, weights)
    return {
        "clients": np.isfinite(values).sum(-1),
        "mean": mean(values, weights),
        "std": std(values, weights),
        "variance": variance(values, weights),
        "min": _lowest(values),
        "max": _highest(values),
        "gap": gap(values),
        "max_deviation": max_deviation(values, weights),
        "worst": low(values, worst_percent, weights),
        "best": high(values, best_percent, weights),
        "angle_radians": turned,
        "angle_degrees": np.degrees(turned),
        "kl_uniform": kl_uniform(values, weights),
        "gini": gini(values, weights),
        "jain": jain(values, weights),
        "entropy": entropy(values, weights),
    }


def _intervals(clients: _Clients, times: int, confidence: float, seed: int) -> dict[str, tuple[float, float]]:
    """Percentile intervals over resampled clients, a client's accuracy, loss and size together."""
    count = clients.accuracies.size
    generator = np.random.default_rng(seed)
    rows = max(1, CHUNK // count)
    found: dict[str, list[Floats]] = {}
    for start in range(0, times, rows):
        drawn = generator.integers(count, size=(min(rows, times - start), count))
        for name, values in clients.picked(drawn).measured().items():
            found.setdefault(name, []).append(values)
    blind = {"clients", *EXTREMES}
    blind |= {name for name, percent in (("worst", clients.worst), ("best", clients.best)) if count * percent < 200.0}
    tails = [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0]
    intervals = {}
    for name, pieces in found.items():
        values = np.concatenate(pieces)
        values = values[np.isfinite(values)]  # a resample may hold no client with a loss, or with a size
        if values.size and name.rpartition(".")[2] not in blind:
            low, high = np.quantile(values, tails)
            intervals[name] = (float(low), float(high))
    return intervals


def _clients(accuracies: Any, losses: Any, sizes: Any, worst: float, best: float) -> _Clients:
    """The doors' check; a client without an accuracy loses its loss too, so that all measures see the same clients."""
    number("worst", worst, above=0.0, high=100.0)
    number("best", best, above=0.0, high=100.0)
    served = _numbers("accuracies", accuracies)
    if served is None or not served.size:
        raise EvenhandError("accuracies is empty; at least one client is needed")
    if (wrong := served[(served < 0.0) | (served > 1.0 + ROUNDING)]).size:
        raise EvenhandError(
            f"accuracies are fractions in [0, 1], but {wrong[0]:g} was given; divide percentages by 100"
        )
    loss = _numbers("losses", losses)
    if loss is not None:
        if loss.shape != served.shape:
            raise EvenhandError(f"losses has shape {loss.shape}, but accuracies {served.shape}")
        if (wrong := loss[loss < -ROUNDING]).size:
            raise EvenhandError(
                f"losses has {wrong[0]:g}; shares of a negative loss have no meaning, so leave losses out"
            )
        loss = np.where(np.isnan(served), np.nan, np.maximum(loss, 0.0))
    size = _numbers("sizes", sizes)
    if size is not None:
        if size.shape not in (served.shape, served.shape[-1:]):
            raise EvenhandError(f"sizes has shape {size.shape}, but accuracies {served.shape}")
        if (wrong := size[~(np.isfinite(size) & (size >= 0.0))]).size:
            raise EvenhandError(f"sizes are sample counts, but {wrong[0]:g} was given")
    return _Clients(np.minimum(served, 1.0), loss, size, float(worst), float(best))


def _numbers(name: str, values: Any) -> Floats | None:
    if values is None:
        return None
    if hasattr(values, "detach"):  # a tensor, on whatever device
        values = values.detach().cpu().double().numpy()
    try:
        numbers: Floats = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise EvenhandError(f"{name} must hold a number per client, not {type(values).__name__} ({error})") from error
    if not numbers.ndim:
        raise EvenhandError(f"{name}={values!r} must hold a number per client, not one alone")
    return numbers


# ------------------------------------------------------------------------------------------- two methods


@dataclass(frozen=True)
class PairedTest:
    """Whether two methods differ over paired seeds; `interval`, `p` and `significant` are None where untestable."""

    pairs: int
    difference: float  # mean of a - b
    interval: tuple[float, float] | None
    p: float | None
    significant: bool | None
    confidence: float
    note: str = ""

    def __str__(self) -> str:
        if self.p is None or self.interval is None:
            return f"difference {self.difference:+.4g}, not testable: {self.note}"
        verdict = "significant" if self.significant else "not significant"
        low, high = self.interval
        return (
            f"difference {self.difference:+.4g} ({low:+.4g} .. {high:+.4g}), p = {self.p:.3g}: {verdict} at "
            f"{self.confidence:.0%} over {self.pairs} pairs"
        )


def paired_test(a: Sequence[float] | Floats, b: Sequence[float] | Floats, *, confidence: float = 0.95) -> PairedTest:
    """Two-sided paired t-test of a - b, one pair a seed; pairs with a missing value are left out.

    One pair cannot be tested. Neither can differences that are all alike but not zero: with no spread between the seeds
    the test would claim certainty. Equal results in every pair are no evidence of a difference: p = 1.

    >>> print(paired_test([0.80, 0.82, 0.81], [0.75, 0.78, 0.77]))
    difference +0.04333 (+0.02899 .. +0.05768), p = 0.00587: significant at 95% over 3 pairs
    >>> print(paired_test([0.8], [0.7]))
    difference +0.1, not testable: one pair only; run more seeds
    """
    number("confidence", confidence, above=0.0, high=1.0 - 1e-9)
    first, second = _numbers("a", a), _numbers("b", b)
    if first is None or second is None or first.ndim != 1 or first.shape != second.shape:
        shapes = " and ".join(str(None if side is None else side.shape) for side in (first, second))
        raise EvenhandError(f"a and b must hold one number per seed each, in the same order; their shapes are {shapes}")
    known = np.isfinite(first) & np.isfinite(second)
    differences = (first - second)[known]
    pairs = differences.size
    if not pairs:
        raise EvenhandError(f"no seed has a result for both methods ({first.size} given); nothing can be compared")
    difference = float(differences.mean())
    if pairs == 1:
        return PairedTest(1, difference, None, None, None, confidence, "one pair only; run more seeds")
    scale = float(np.abs([first[known], second[known]]).max())
    if np.abs(differences).max() <= 1e-12 * scale:
        return PairedTest(pairs, 0.0, (0.0, 0.0), 1.0, False, confidence, "equal in every pair")
    spread = float(differences.std(ddof=1))
    if spread <= 1e-12 * scale:
        note = "the same difference in every pair, so there is no spread to test it against; run more seeds"
        return PairedTest(pairs, difference, None, None, None, confidence, note)
    error = spread / pairs**0.5
    p = float(2.0 * stdtr(pairs - 1, -abs(difference) / error))
    reach = error * float(stdtrit(pairs - 1, (1.0 + confidence) / 2.0))
    return PairedTest(pairs, difference, (difference - reach, difference + reach), p, p < 1.0 - confidence, confidence)
