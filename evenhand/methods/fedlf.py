"""FedLF: layer by layer, the min-norm direction of all clients and of an objective that levels the losses.

Paper: Pan et al., FedLF: Layer-Wise Fair Federated Learning, AAAI 2024, Algorithm 1 and Appendix A.1. Per layer l,
    d_l = min-norm point of the hull of { g_i,l } (present and remembered clients) and g_P,l  (problems 3 and 8),
    g_P = sum_i q_i g_i, the gradient of P = -cos(1, F), with q of eq. 7;
a layer whose d_l vanishes is joined with the next one (the last with the previous); d gets the length of the
mean update.

Departures: `normalise`, on by default, rescales each client's part of a layer to the layer's mean length, as
the released code does and the paper does not say (without it training is unstable); g_P is then built from the
rescaled parts and rescaled too. Layers are modules (weight and bias together), as in the paper; the released
code splits them and never joins. A part of length zero takes no part in its layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenhand.checks import flag
from evenhand.geometry import Floats
from evenhand.methods.base import (
    Memo,
    Round,
    Rule,
    Weights,
    check_absent,
    combined_length,
    hull_of,
    towards_equality,
    unit,
)
from evenhand.solvers import MinNorm, min_norm


@dataclass(frozen=True)
class FedLF(Rule):
    """A direction against no client in any layer, which also pulls all losses level."""

    normalise: bool = True  # rescale each client's part of a layer to the layer's mean length
    fair: bool = True  # the objective -cos(1, F)
    join: bool = True  # join layers whose direction vanishes
    absent: str = "expected"  # memory of absent clients: off, last:TAU or expected

    name: ClassVar[str] = "fedlf"
    paper: ClassVar[str] = "Pan et al., AAAI 2024"
    when: ClassVar[str] = (
        "Where fairness comes before speed, and no layer's step may be against a client: with even the fairest in the "
        "README's demo."
    )
    when_not: ClassVar[str] = (
        "With hundreds of clients a round: a quadratic programme a layer makes it the slowest rule (see the "
        "benchmarks). It stands still where updates agree but losses are unequal."
    )
    needs: ClassVar[tuple[str, ...]] = ("losses",)

    def __post_init__(self) -> None:
        for name in ("normalise", "fair", "join"):
            flag(name, getattr(self, name))
        check_absent(self.absent)

    def weigh(self, round: Round, memo: Memo) -> Weights:
        levelling = fair_objective(round.losses[: round.present]) if self.fair else None
        groups = [[block] for block in range(len(round.gram))]
        answers: list[tuple[Floats, MinNorm | None]] = []
        while len(answers) < len(groups):
            here = len(answers)
            group = groups[here]
            gram = round.gram[group[0]] if len(group) == 1 else round.gram[group].sum(axis=0)
            answer = self._direction(gram, round.present, levelling, round.resolution)
            if answer[1] is not None or not self.join or len(groups) == 1:
                answers.append(answer)
            elif here + 1 < len(groups):
                groups[here] += groups.pop(here + 1)
            else:
                groups[here - 1] += groups.pop(here)
                answers.pop()
        coefficients = np.zeros((len(round.gram), round.rows))
        for joined, (row, _) in zip(groups, answers, strict=True):
            coefficients[joined] = row
        notes = [f"layers joined: {', '.join(_names(round, group))}" for group in groups if len(group) > 1]
        notes += sorted({f"min-norm point: {solved.note()}" for _, solved in answers if solved is not None})
        length = np.sqrt(sum(row @ gram @ row for row, gram in zip(coefficients, round.gram, strict=True)))
        if length == 0.0:
            return Weights(coefficients, notes=(*notes, "no common descent direction (Pareto stationary): zero update"))
        return Weights(coefficients * (round.length(round.mean) / length), notes=tuple(notes))

    def _direction(
        self, gram: Floats, present: int, levelling: Floats | None, resolution: float
    ) -> tuple[Floats, MinNorm | None]:
        """Coefficients of one layer's direction; zeros and None where it vanishes."""
        norms = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        typical = float(norms[:present].mean())
        scale = typical * unit(norms) if self.normalise else np.where(norms > 0.0, 1.0, 0.0)
        moving = np.flatnonzero(norms > 0.0)
        nothing = np.zeros(len(gram))
        if typical == 0.0:
            return nothing, None
        fair = None
        if levelling is not None:  # one more point of the hull, a combination of the present clients' parts
            fair = nothing.copy()
            fair[:present] = levelling * scale[:present]
            length = combined_length(gram, fair, resolution)
            fair = None if length == 0.0 else fair * (typical / length if self.normalise else 1.0)
        solved = min_norm(hull_of(gram, moving, scale, fair))
        if solved.square <= max(1e-12, 10.0 * resolution) * typical**2:
            return nothing, None
        coefficients = nothing.copy()
        coefficients[moving] = solved.weights[: len(moving)] * scale[moving]
        return coefficients if fair is None else coefficients + solved.weights[-1] * fair, solved


def _names(round: Round, group: list[int]) -> list[str]:
    return [round.layers[block] if round.layers else str(block) for block in sorted(group)]


def fair_objective(losses: Floats) -> Floats | None:
    """q of eq. 7: the gradient of -cos(1, F) is sum_i q_i g_i; None where all losses are equal."""
    pull = towards_equality(losses)
    return None if pull is None else pull / float(np.linalg.norm(losses))
