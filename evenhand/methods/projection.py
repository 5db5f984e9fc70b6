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
    count = len(order)
    inner = gram[np.ix_(order, order)]
    movable = free[order]
    others = movable.copy()  # the movable rows but for the target itself
    wanted = None if goals is None else np.clip(goals[np.ix_(order, order)], 0.0, GOAL_LIMIT)
    squares = np.diagonal(inner).copy()  # of the rows as they are adjusted
    lengths = np.sqrt(np.maximum(squares, 0.0))  # of the targets
    passed = np.zeros((count, count))  # passed[j, k]: coefficient of target j in row k
    cosines = np.full((count, count), np.nan)
    for j in range(count):
        if lengths[j] == 0.0:
            continue
        along = (inner[j] + inner[j, :j] @ passed[:j]) / lengths[j]
        others[j] = False
        if wanted is None:
            conflict = others & (along < 0.0)
            target = np.zeros(count)
        else:
            size = np.sqrt(np.maximum(squares, along**2))
            cosine = np.divide(along, size, out=np.zeros(count), where=size > 0.0)
            cosines[others, j] = cosine[others]
            goal = wanted[:, j]
            conflict = others & (cosine < goal) & (size > 0.0)
            target = np.sqrt(np.maximum(squares - along**2, 0.0)) * goal / np.sqrt(1.0 - goal**2)
        others[j] = movable[j]
        passed[j, conflict] = (target - along)[conflict] / lengths[j]
        squares[conflict] += (target**2 - along**2)[conflict]
    placed, met = np.empty((count, count)), np.empty((count, count))
    placed[np.ix_(order, order)] = passed.T + np.eye(count)
    met[np.ix_(order, order)] = cosines
    return Swept(placed, met)
