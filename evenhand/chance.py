"""Could it be chance? Intervals for rates, and shuffles for the differences between groups.

Intervals of a rate are Wilson's, which hold their level also for few rows and for rates of 0 and 1, where the usual two
standard errors claim certainty; those of the difference of two rates are Newcombe's, two Wilson intervals combined.

A test shuffles group membership many times and looks at the groups' rates again. Who is right or selected stays as it
is, and so do the groups' sizes; only who belongs to which group is drawn anew, within each stratum (say, a client)
alone. No row is moved: of a shuffle only the counts matter, and they follow the multivariate hypergeometric
distribution, so that a million rows cost no more than a thousand.

A group's count is compared with its mean under shuffling in units of its standard deviation there; both are known in
closed form. That puts small groups and large ones on one scale. Each distance is held against the largest distance of
any group in every shuffle (Westfall and Young's max statistic), which corrects p for the number of groups: where
nothing but chance is at work, one in twenty tables has any p of 0.05 or less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

CHUNK = 2_000_000  # numbers in a working array
ROUNDING = 1e-9  # distances that differ by less are ties


# ------------------------------------------------------------------------------------------- intervals


def wilson(hits: Any, of: Any, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Wilson's score interval of the rates hits / of; not-a-number where there is nothing to divide by.

    >>> low, high = wilson(0, 10)
    >>> float(low), round(float(high), 3)
    (0.0, 0.278)
    """
    hits, of = np.broadcast_arrays(np.asarray(hits, dtype=np.float64), np.asarray(of, dtype=np.float64))
    z = float(ndtri((1.0 + confidence) / 2.0))
    size = np.where(of > 0, of, np.nan)
    middle = (hits + z * z / 2.0) / (size + z * z)
    reach = z / (size + z * z) * np.sqrt(hits * (size - hits) / size + z * z / 4.0)
    low = np.where((hits == 0) & (of > 0), 0.0, middle - reach)
    return low, np.where((hits == of) & (of > 0), 1.0, middle + reach)


def newcombe(hits: Any, of: Any, other_hits: Any, other_of: Any, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Newcombe's interval of the difference of two independent rates.

    Method 10 of Newcombe, Interval estimation for the difference between independent proportions, Statistics in
    Medicine, 1998; the example is one of his.

    >>> low, high = newcombe(56, 70, 48, 80)
    >>> round(float(low), 4), round(float(high), 4)
    (0.0524, 0.3339)
    """
    here, there = over(hits, of), over(other_hits, other_of)
    low, high = wilson(hits, of, confidence)
    other_low, other_high = wilson(other_hits, other_of, confidence)
    difference = here - there
    return (
        difference - np.sqrt((here - low) ** 2 + (other_high - there) ** 2),
        difference + np.sqrt((high - here) ** 2 + (there - other_low) ** 2),
    )


def sidak(confidence: float, comparisons: int) -> float:
    """The level at which each of several intervals must hold for all of them to hold together at `confidence`."""
    return float(confidence ** (1.0 / max(comparisons, 1)))


def area_interval(area: Floats, positives: Ints, negatives: Ints, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Newcombe's score interval of areas under the ROC curve; it also holds at an area of 1.

    Method 5 of Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2,
    Statistics in Medicine, 2006: the areas whose own standard error (Hanley and McNeil's) reaches the one seen.
    """
    z = float(ndtri((1.0 + confidence) / 2.0))
    pairs = positives * negatives.astype(np.float64)
    extra = (positives + negatives) / 2.0 - 1.0

    def outside(trial: Floats) -> Any:
        spread = trial * (1.0 - trial) * (1.0 + extra * ((1.0 - trial) / (2.0 - trial) + trial / (1.0 + trial))) / pairs
        return (area - trial) ** 2 > z * z * spread

    ends = []
    with np.errstate(invalid="ignore", divide="ignore"):
        for end in (0.0, 1.0):
            outer, inner = np.full(area.shape, end), area.copy()
            for _ in range(50):
                middle = (outer + inner) / 2.0
                out = outside(middle)
                outer, inner = np.where(out, middle, outer), np.where(out, inner, middle)
            ends.append(np.where(pairs > 0, inner, np.nan))
    return ends[0], ends[1]


def over(hits: Any, of: Any) -> Floats:
    """Rates, not-a-number where there is nothing to divide by."""
    hits, of = np.asarray(hits, dtype=np.float64), np.asarray(of, dtype=np.float64)
    return np.divide(hits, of, out=np.full(np.broadcast_shapes(hits.shape, of.shape), np.nan), where=of > 0)


# ------------------------------------------------------------------------------------------- shuffles


@dataclass(frozen=True)
class Chance:
    """How often shuffled groups stand out as much: p, corrected for the number of comparisons."""

    shuffles: int
    p: Floats
    """Conditions x groups x outcomes, over all blocks together."""
    block_p: Floats
    """One a block: of its own groups, corrected for the number of blocks."""
    block_at: Ints
    """One a block: the (flat) place of the group that stands out most there."""


def draws(hits: Any, of: Any) -> int:
    """How many random numbers a shuffle takes."""
    hits, of = np.asarray(hits), np.asarray(of)
    return int(_alive(hits, of).sum()) * (hits.shape[-2] - 1) * hits.shape[-1]


def shuffled(hits: Any, of: Any, times: int, generator: np.random.Generator) -> Chance:
    """Test every group's rate, hits / of, by shuffling membership.

    Args:
        hits: blocks x conditions x groups x outcomes: how many of a group had the outcome.
        of: blocks x conditions x groups: how many there were. Shuffling stays within a block and a condition.
        times: number of shuffles; p is at least 1 / (times + 1).
    """
    hits, of = np.asarray(hits, dtype=np.int64), np.asarray(of, dtype=np.int64)
    blocks, conditions, groups, outcomes = hits.shape
    alive = _alive(hits, of)
    place = np.nonzero(alive)  # strata in which a shuffle can change something
    middle, variance = _moments(hits, of)
    scale = _inverse_root(variance.sum(0))
    block_scale = _inverse_root(variance)
    seen = np.abs((hits - middle).sum(0)) * scale
    each = (np.abs(hits - middle) * block_scale).reshape(blocks, -1)
    block_seen, block_at = each.max(1), each.argmax(1)
    beaten, block_beaten = np.zeros(seen.shape, dtype=np.int64), np.zeros(blocks, dtype=np.int64)
    per = max(1, CHUNK // max(1, len(place[0]) * groups * (outcomes + 1)))
    for start in range(0, times if len(place[0]) else 0, per):
        count = min(per, times - start)
        drawn = _drawn(hits[alive].sum(1), of[alive], count, generator) - middle[alive]
        pooled = np.zeros((count, conditions, groups, outcomes))
        for condition in range(conditions):
            pooled[:, condition] = drawn[:, place[1] == condition].sum(1)
        farthest = (np.abs(pooled) * scale).max((1, 2, 3))
        beaten += _at_least(farthest, seen)
        if blocks > 1:
            block_farthest = (np.abs(drawn) * block_scale[alive]).max((1, 2, 3))
            block_beaten += _at_least(block_farthest, block_seen)
    if blocks == 1:
        block_beaten = beaten.min(keepdims=True).reshape(1)
    if not len(place[0]):
        beaten, block_beaten = np.full(seen.shape, times), np.full(blocks, times)
    return Chance(times, (1.0 + beaten) / (1.0 + times), (1.0 + block_beaten) / (1.0 + times), block_at)


def _alive(hits: Ints, of: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Strata with at least two groups, and with an outcome that some have and others have not."""
    total = of.sum(-1)
    met = hits.sum(-2)
    return ((of > 0).sum(-1) > 1) & ((met > 0) & (met < total[..., None])).any(-1)


def _moments(hits: Ints, of: Ints) -> tuple[Floats, Floats]:
    """Mean and variance of the counts under shuffling: hypergeometric."""
    total = of.sum(-1)[..., None, None].astype(np.float64)
    share = np.divide(hits.sum(-2)[..., None, :], total, out=np.zeros(_row(hits)), where=total > 0)
    size = of[..., None].astype(np.float64)
    others = np.divide(total - size, total - 1.0, out=np.zeros(size.shape), where=total > 1)
    return size * share, size * share * (1.0 - share) * others


def _row(hits: Ints) -> tuple[int, ...]:
    return (*hits.shape[:-2], 1, hits.shape[-1])


def _inverse_root(variance: Floats) -> Floats:
    return np.divide(1.0, np.sqrt(variance), out=np.zeros(variance.shape), where=variance > 1e-12)


def _at_least(farthest: Floats, seen: Floats) -> Ints:
    """For each distance seen, how many of the shuffles' largest are at least as large."""
    ranked = np.sort(farthest)
    return len(ranked) - np.searchsorted(ranked, seen * (1.0 - ROUNDING) - 1e-12)


def _drawn(totals: Ints, of: Ints, times: int, generator: np.random.Generator) -> Ints:
    """Random counts, times x strata x groups x outcomes: the groups are halved again and again.

    Each halving draws how many of every outcome fall to the left half, for all shuffles, strata and halves at once.
    """
    strata, groups = of.shape
    outcomes = totals.shape[1]
    width = 1 << (groups - 1).bit_length()
    sizes = np.zeros((strata, width), dtype=np.int64)
    sizes[:, :groups] = of
    rest = sizes.sum(1) - totals.sum(1)
    left = np.broadcast_to(np.column_stack([totals, rest])[None, :, None, :], (times, strata, 1, outcomes + 1))
    while width > 1:
        width //= 2
        nodes = left.shape[2]
        need = sizes.reshape(strata, nodes, 2, width)[:, :, 0].sum(-1)[None] + np.zeros((times, 1, 1), dtype=np.int64)
        others = left.sum(-1)
        first = np.empty(left.shape, dtype=np.int64)
        for outcome in range(outcomes):
            others = others - left[..., outcome]
            first[..., outcome] = generator.hypergeometric(left[..., outcome], others, need)
            need = need - first[..., outcome]
        first[..., outcomes] = need
        left = np.stack([first, left - first], axis=3).reshape(times, strata, 2 * nodes, outcomes + 1)
    return left[:, :, :groups, :outcomes]
