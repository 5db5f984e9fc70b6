"""Errors that name the thing, the value and the way out."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Collection


class EvenhandError(ValueError):
    """Something the caller gave cannot be used; the message says what and what to do instead."""


class NoUsableClient(EvenhandError):
    """Every client of a round sent something that is not finite."""


def near_miss(word: object, known: Collection[str]) -> str:
    """The phrase `; did you mean 'x'?` when a known name is close, else nothing.

    >>> near_miss("fedvf", ["fedlf", "fedfv"])
    "; did you mean 'fedfv'?"
    """
    close = difflib.get_close_matches(str(word), list(known), n=3, cutoff=0.5)
    swapped = [name for name in close if sorted(name) == sorted(str(word))]  # the same letters in another order
    return f"; did you mean {(swapped or close)[0]!r}?" if close else ""


def choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Insist on one of a few words."""
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise EvenhandError(f"{name}={value!r} is not one of {words}{near_miss(value, allowed)}")


def flag(name: str, value: object) -> None:
    """Insist on True or False."""
    if not isinstance(value, bool):
        raise EvenhandError(f"{name}={value!r} must be True or False")


def number(
    name: str,
    value: object,
    *,
    low: float = float("-inf"),
    high: float = float("inf"),
    above: float | None = None,
    whole: bool = False,
) -> None:
    """Insist on a finite number within [low, high] (and strictly above `above`)."""
    kind = "whole number" if whole else "number"
    fits = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    if fits and low <= value <= high and (above is None or value > above) and abs(value) != float("inf"):  # type: ignore[operator, arg-type]
        return
    floor = f"above {above:g}" if above is not None else f"at least {low:g}" if low != float("-inf") else ""
    ceiling = f"at most {high:g}" if high != float("inf") else ""
    limits = " and ".join(filter(None, (floor, ceiling))) or "finite"
    raise EvenhandError(f"{name}={value!r} must be a {kind}, {limits}")


def plain_value(text: str) -> bool | int | float | str | None:
    """The value of a setting written behind a name (`fedfv:alpha=0.1`): true, false, none, a number, or the word.

    >>> plain_value("0.1"), plain_value("none"), plain_value("loss")
    (0.1, None, 'loss')
    """
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
