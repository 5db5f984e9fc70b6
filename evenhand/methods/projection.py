"""The sweep that FedFV and mFairFL share: every client's update is turned away from conflict with each target.

Client k's update after its adjustments is a row of coefficients. Against target i it is split into a part along
g_i and a part across; the across part stays, the along part becomes what the wanted cosine asks for:
    along' = across * goal / sqrt(1 - goal^2)        (mFairFL eq. 17; goal 0 is FedFV's projection).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from evenhand.geometry import Floats
from evenhand.methods.base import Round

Indices = np.ndarray[Any, np.dtype[np.int64]]

TINY = float(np.finfo(float).tiny)
GOAL_LIMIT = 1.0 - 1e-6  # a goal of exactly 1 would ask for an infinitely long update


@dataclass(frozen=True)
class Swept:
    """Coefficients (clients x rows) after the sweep, and the cosines met before each adjustment (clients x rows)."""

    coefficients: Floats
    cosines: Floats


def share_of(count: int, share: float) -> int:
    """How many of `count` a share means, rounded up (and 0.1 * 30 is 3 although floats say 3.0000000000000004)."""
    return ceil(round(count * share, 9))


def projection_order(moment: Round, order: str, rows: int) -> Indices:
    """The first `rows` rows in the order in which they serve as targets: by ascending loss, reversed, or random."""
    if order == "random":
        return moment.random().permutation(rows)
    ascending = np.argsort(moment.losses[:rows], kind="stable")
    return ascending[::-1].copy() if order == "reverse" else ascending


def sweep(
    gram: Floats, order: Indices, free: np.ndarray[Any, np.dtype[np.bool_]], goals: Floats | None = None
) -> Swept:
    """Adjust the free rows against every target in order; goals (rows x rows) default to zero.

    In projection order a row's coefficients beyond its own are those of targets already passed, so the inner
    products with the next target need the passed ones alone.
    """
    inner = gram[order[:, None], order]
    movable = free[order]
    lengths = np.sqrt(np.maximum(np.diagonal(inner), 0.0))  # of the targets
    if goals is None:
        passed = _projected(inner, movable, lengths)
        cosines = np.full(inner.shape, np.nan)
    else:
        wanted = np.clip(goals[order[:, None], order], 0.0, GOAL_LIMIT)
        passed, cosines = _turned(inner, movable, lengths, wanted)
    placed, met = np.empty(inner.shape), np.empty(inner.shape)
    placed[order[:, None], order] = passed.T + np.eye(len(order))
    met[order[:, None], order] = cosines
    return Swept(placed, met)


def _projected(inner: Floats, movable: np.ndarray[Any, np.dtype[np.bool_]], lengths: Floats) -> Floats:
    """passed[j, k]: coefficient of target j in row k, where every conflict is projected away (all goals are zero)."""
    passed = np.zeros(inner.shape)
    for j in np.flatnonzero(lengths).tolist():
        dots = inner[j] + inner[j, :j] @ passed[:j]
        dots[j] = 0.0  # a row is no target of its own
        np.minimum(dots, 0.0, out=dots)
        np.multiply(dots, movable / -(lengths[j] ** 2), out=passed[j])
    return passed


def _turned(
    inner: Floats, movable: np.ndarray[Any, np.dtype[np.bool_]], lengths: Floats, wanted: Floats
) -> tuple[Floats, Floats]:
    """The same with goals (rows x targets), and the cosines met before each adjustment (rows x targets)."""
    passed, cosines = np.zeros(inner.shape), np.full(inner.shape, np.nan)
    squares = np.diagonal(inner).copy()  # of the rows as they are adjusted
    ratios = wanted / np.sqrt(1.0 - wanted**2)
    for j in np.flatnonzero(lengths).tolist():
        along = (inner[j] + inner[j, :j] @ passed[:j]) / lengths[j]
        parallel = along * along
        whole = np.maximum(squares, parallel)
        cosine = along / np.sqrt(np.maximum(whole, TINY))
        others = movable & (whole > 0.0)
        others[j] = False
        conflict = others & (cosine < wanted[:, j])
        target = np.sqrt(whole - parallel) * ratios[:, j]
        passed[j] = np.where(conflict, (target - along) / lengths[j], 0.0)
        squares = np.where(conflict, squares + target * target - parallel, squares)
        others = movable.copy()
        others[j] = False
        cosines[others, j] = cosine[others]
    return passed, cosines
