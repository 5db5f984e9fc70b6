"""Group fairness and client fairness from counts: how many of a group have a label and got a prediction.

Four kinds of group fairness compare a rate of every group with the same rate of everyone (`KINDS`), and each is told in
three forms:
    `dp`, the largest deviation of a group from everyone: the papers' form (mFairFL, FedFB);
    `dp_mean`, the mean of these deviations, because the papers leave open how "for all groups" becomes one number;
    `dp_gap`, the largest rate minus the smallest: fairlearn's "difference".
Of two classes one stands for both, because their rates add up to one. A rate with nothing to divide by (a group without
positives has no true positive rate) is left out.

Client fairness stands beside it: mFairFL's violation, which the paper leaves open, is read as the largest deviation of
a client's accuracy from everyone's (`client_deviation`); highest minus lowest (`client_gap`) and the standard deviation
(`client_std`) are what other code computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evenhand.checks import EvenhandError, number


class Kind(NamedTuple):
    """A kind of group fairness, for people."""

    title: str
    definition: str
    sentence: str


KINDS: dict[str, Kind] = {
    "dp": Kind(
        "demographic parity",
        "|P(prediction = c | group) - P(prediction = c)|, over groups and classes c",
        "Is each class predicted as often in every group as for everyone?",
    ),
    "eodds": Kind(
        "equalised odds",
        "|P(prediction = c | label = y, group) - P(prediction = c | label = y)|, over groups, labels and classes",
        "The same among those with the same label: are the mistakes alike?",
    ),
    "eopp": Kind(
        "equal opportunity",
        "|P(prediction = y | label = y, group) - P(prediction = y | label = y)|, y the positive class, or each class",
        "Are those who should be found, found as often in every group?",
    ),
    "ap": Kind(
        "accuracy parity",
        "|P(prediction = label | group) - P(prediction = label)|, over groups",
        "Are the predictions right as often in every group?",
    ),
}
FORMS = {
    "": "largest deviation of a group from everyone",
    "_mean": "mean deviation of the groups from everyone",
    "_gap": "largest minus smallest rate of a group",
}
CLIENT_MEASURES = {
    "client_deviation": "largest deviation of a client's accuracy from everyone's",
    "client_gap": "highest minus lowest accuracy of a client",
    "client_std": "standard deviation of the clients' accuracies (population; every client counts the same)",
}
MEASURES: dict[str, str] = {
    **{kind + form: f"{entry.title}, {said}" for kind, entry in KINDS.items() for form, said in FORMS.items()},
    **CLIENT_MEASURES,
}


def measures_from_counts(counts: Any, positive: int | None = None) -> dict[str, float]:
    """Every measure from counts alone, in about 100 microseconds; not-a-number where nothing can be measured.

    Args:
        counts: groups x labels x predictions. With clients in front (clients x groups x labels x predictions) the
            groups are measured over all clients together, and the measures of client fairness join them.
        positive: number of the class that equal opportunity looks at; without it the second of two classes, or every
            class where there are more.

    >>> counts = [[[8, 2], [4, 6]], [[5, 5], [2, 8]]]  # two groups; rows are labels, columns predictions
    >>> found = measures_from_counts(counts)
    >>> round(found["dp"], 3), round(found["dp_gap"], 3), round(found["eopp_gap"], 3)
    (0.125, 0.25, 0.2)
    """
    table = np.asarray(counts)
    if table.ndim not in (3, 4) or table.shape[-1] != table.shape[-2]:
        raise EvenhandError(
            f"counts has shape {table.shape}; groups x labels x predictions is needed, with as many labels as "
            "predictions, and with clients in front where there are any"
        )
    if positive is not None:
        number("positive", positive, low=0, high=table.shape[-1] - 1, whole=True)
    found = batched_measures(table if table.ndim == 3 else table.sum(0), positive)
    if table.ndim == 4:
        found |= client_measures(right_ones(table).sum(-1), table.sum((-3, -2, -1)))
    return {name: float(value) for name, value in found.items()}


def batched_measures(counts: Any, positive: int | None = None) -> dict[str, Any]:
    """The groups' measures for every leading index, say for each client by itself.

    The counts' last axes are groups x labels x predictions.
    """
    table = np.asarray(counts)
    found: dict[str, Any] = {}
    whole = (-3, -2, -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        for kind in KINDS:
            hits, of = fractions(table, kind, positive)
            size = of[..., None]
            rate = hits / size
            off = np.abs(rate - hits.sum(-2, keepdims=True) / size.sum(-2, keepdims=True))
            known = size > 0
            gap = np.fmax.reduce(rate, -2) - np.fmin.reduce(rate, -2)
            found[kind] = np.fmax.reduce(off, whole)
            found[f"{kind}_mean"] = np.where(known, off, 0.0).sum(whole) / (known.sum(whole) * off.shape[-1])
            found[f"{kind}_gap"] = np.fmax.reduce(gap, (-2, -1))
    return found


def client_measures(right: Any, rows: Any) -> dict[str, Any]:
    """Client fairness from each client's number of right predictions and of rows; clients without rows do not count."""
    there = np.asarray(rows) > 0
    right, rows = np.asarray(right)[there], np.asarray(rows)[there]
    if not len(rows):
        return dict.fromkeys(CLIENT_MEASURES, np.nan)
    accuracy = right / rows
    values = np.abs(accuracy - right.sum() / rows.sum()).max(), accuracy.max() - accuracy.min(), accuracy.std()
    return dict(zip(CLIENT_MEASURES, values, strict=True))


def fractions(counts: Any, kind: str, positive: int | None = None) -> tuple[Any, Any]:
    """A kind's rates as hits (conditions x groups x outcomes) of so many (conditions x groups); leading axes stay.

    Conditions are the labels that a rate is taken within (one where it is taken over all), outcomes the predicted
    classes (one where predictions are right or wrong).
    """
    table = np.asarray(counts)
    classes = table.shape[-1]
    one = slice(positive, None if positive is None else positive + 1)
    if classes == 2 and positive is None:
        one = slice(1, 2)
    outcomes = one if classes == 2 else slice(None)
    if kind == "dp":
        predicted = table.sum(-2)
        return predicted[..., None, :, outcomes], predicted.sum(-1)[..., None, :]
    if kind == "eodds":
        by_label = table.swapaxes(-3, -2)
        return by_label[..., outcomes], by_label.sum(-1)
    if kind == "eopp":
        met = np.diagonal(table, axis1=-2, axis2=-1)[..., one]
        return met.swapaxes(-2, -1)[..., None], table.sum(-1)[..., one].swapaxes(-2, -1)
    return right_ones(table)[..., None, :, None], table.sum((-2, -1))[..., None, :]


def named(kind: str, classes: Sequence[str], positive: int | None) -> tuple[Sequence[str], Sequence[str]]:
    """The words for the conditions and the outcomes of `fractions`; empty where they are none in particular."""
    one = classes if positive is None else classes[positive : positive + 1]
    outcomes = one if len(classes) == 2 else classes
    return {"dp": ([""], outcomes), "eodds": (classes, outcomes), "eopp": (one, [""]), "ap": ([""], [""])}[kind]


def right_ones(table: Any) -> Any:
    """How many predictions are the label."""
    return np.einsum("...ii->...", table)
