"""What a rule may see, what it answers, and the three parts of a method.

A rule is a frozen dataclass of hyper-parameters with one pure function, `weigh`, from a Round (inner
products, losses, counts, ages: small float64 arrays) to Weights (coefficients of the rows). A server step
is a frozen dataclass with one function, `apply`, from the combined direction to the update. A local
objective (evenhand/objectives.py) says what a client minimises. A method is one choice of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from evenhand.checks import EvenhandError, number
from evenhand.geometry import Floats
from evenhand.objectives import Client as Client
from evenhand.objectives import Memo as Memo
from evenhand.solvers import submatrix


@dataclass(frozen=True)
class Round:
    """One round in Gram space. Rows are the present clients first, then remembered updates of absent ones.

    Everything of length `rows` covers both; a remembered row's loss, size and so on are its last known ones.
    """

    gram: Floats  # blocks x rows x rows
    present: int
    clients: tuple[Client, ...]
    ages: np.ndarray[Any, np.dtype[np.int64]]  # rounds since each row was sent; 0 for the present
    index: int = 0  # this round's number, from 0
    resolution: float = 1e-14  # relative error of the inner products
    seed: int = 0
    lr: float | None = None  # the clients' learning rate
    values: Mapping[str, Floats] = field(default_factory=dict)  # losses, sizes, ...: one number a row
    globals: Mapping[str, float] = field(default_factory=dict)  # accuracy_global, fairness_global
    layers: tuple[str, ...] = ()  # names of the blocks
    last: Floats | None = None  # 2 x blocks x present: products with the client's own last update, and its square

    @property
    def rows(self) -> int:
        return len(self.ages)

    @cached_property
    def total(self) -> Floats:
        """Inner products over the whole model."""
        return self.gram[0] if len(self.gram) == 1 else self.gram.sum(axis=0)

    @cached_property
    def norms(self) -> Floats:
        """Length of every row."""
        return np.sqrt(np.maximum(np.diagonal(self.total), 0.0))

    @cached_property
    def losses(self) -> Floats:
        return self.values["losses"]

    @cached_property
    def mean(self) -> Floats:
        """Coefficients of the plain mean of the present clients' updates."""
        return np.where(self.ages == 0, 1.0 / self.present, 0.0)

    def length(self, coefficients: Floats) -> float:
        """Length of a combination; exactly zero where it is lost in the rounding of the inner products."""
        return combined_length(self.total, coefficients, self.resolution)

    def echoes(self, layerwise: bool = True) -> Floats:
        """Cosine of each present client's update with its own last one (blocks x present); NaN where none is known."""
        squares = np.diagonal(self.gram, axis1=1, axis2=2)[:, : self.present]
        if self.last is None:
            return np.full(squares.shape if layerwise else (1, self.present), np.nan)
        told = np.stack([*self.last, squares])
        products, before, now = told if layerwise else told.sum(axis=1, keepdims=True)
        lengths = np.sqrt(np.maximum(before, 0.0) * np.maximum(now, 0.0))
        return np.divide(products, lengths, out=np.full_like(products, np.nan), where=lengths > 0.0)

    def random(self) -> np.random.Generator:
        """Random numbers that depend on the seed and the round alone."""
        return np.random.default_rng([self.seed, self.index])


def combined_length(gram: Floats, coefficients: Floats, resolution: float) -> float:
    """sqrt(c' K c), or zero where cancellation leaves nothing that the inner products can resolve."""
    square = float(coefficients @ gram @ coefficients)
    terms = float(np.abs(coefficients) @ np.sqrt(np.maximum(np.diagonal(gram), 0.0)))
    return float(np.sqrt(square)) if square > 4.0 * resolution * terms**2 else 0.0


@dataclass(frozen=True)
class Weights:
    """A rule's answer: coefficients (rows, or blocks x rows), what to carry on, and remarks."""

    coefficients: Floats
    memo: Memo = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the server step and the diagnostics


@dataclass(frozen=True)
class Rule:
    """How the clients' updates combine. Subclasses add hyper-parameters and `weigh`."""

    name: ClassVar[str]
    paper: ClassVar[str]
    when: ClassVar[str] = ""  # when to use it, in a sentence or two
    when_not: ClassVar[str] = ""  # and when not
    needs: ClassVar[tuple[str, ...]] = ()  # inputs of `aggregate` without which the rule cannot work
    by_client: ClassVar[bool] = False  # carries something from round to round per client
    foreseen: ClassVar[bool] = False  # clients count by their `shares`, whatever they say
    lr_setting: ClassVar[str] = ""  # the setting, if any, whose None asks for the clients' learning rate (lr=...)

    @property
    def memory(self) -> str:
        """Which absent clients' updates the rule is shown: 'off', 'last:TAU' or 'expected'."""
        return str(getattr(self, "absent", "off"))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs this setting of the rule needs."""
        return self.needs

    def shares(self, sizes: Floats) -> Floats:
        """What each of a round's clients is meant to count in the mean that the rule starts from."""
        return np.full(len(sizes), 1.0 / len(sizes))

    def weigh(self, round: Round, memo: Memo) -> Weights:
        raise NotImplementedError(f"{type(self).__name__} is a rule without a weigh function")


Ask = Callable[[float], Floats]  # present clients' losses at theta - scale * direction


@dataclass(frozen=True)
class ServerStep:
    """How the combined update is applied. `apply` maps flat tensors to flat tensors (theta moves by minus these)."""

    name: ClassVar[str]
    when: ClassVar[str] = ""  # as in Rule
    when_not: ClassVar[str] = ""
    lr_setting: ClassVar[str] = ""

    def apply(
        self, direction: list[Tensor], memo: Memo, round: Round, weights: Weights, ask: Ask | None
    ) -> tuple[list[Tensor], Memo, tuple[str, ...]]:
        raise NotImplementedError(f"{type(self).__name__} is a server step without an apply function")

    def lengths(self, memo: Memo, clients: Sequence[Client]) -> tuple[float, ...]:
        """Every length that `apply` may ask these clients about, so that they can be asked about all at once."""
        return ()

    def offset(self, memo: Memo) -> list[Tensor] | None:
        """What to add to the new model for evaluation, where a method evaluates another model than it trains."""
        return None


# ------------------------------------------------------------------------------- shared by several rules


def rescaled(round: Round, coefficients: Floats, target: float) -> tuple[Floats, tuple[str, ...]]:
    """The combination with the given length; the zero combination, with a note, where it has no direction."""
    length = round.length(coefficients)
    if length == 0.0 or target == 0.0:
        reason = "the updates cancel out" if length == 0.0 else "the mean update is zero"
        return np.zeros_like(coefficients), (f"{reason}: the update is zero",)
    return coefficients * (target / length), ()


def like_the_mean(round: Round, coefficients: Floats) -> tuple[Floats, tuple[str, ...]]:
    """The combination with the length of the present clients' mean update (FedFV line 10 and many others)."""
    return rescaled(round, coefficients, round.length(round.mean))


def unit(norms: Floats) -> Floats:
    """1 / norm, and 0 for a zero row, which thereby drops out."""
    return np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0.0)


def spread(round: Round, weights: Floats) -> Floats:
    """Weights of the present clients as coefficients of all rows."""
    coefficients = np.zeros(round.rows)
    coefficients[: round.present] = weights
    return coefficients


def nonnegative_losses(round: Round, rule: str) -> Floats:
    """Losses, refused where a power of them would make no sense."""
    losses = round.losses
    if (losses < 0.0).any():
        where = int(np.argmin(losses))
        raise EvenhandError(
            f"{rule} raises losses to a power and needs them non-negative; client {round.clients[where]!r} "
            f"reported {losses[where]:g} (shift the loss, or use a rule without powers)"
        )
    return losses


def hull_of(gram: Floats, moving: np.ndarray[Any, Any], scale: Floats, point: Floats | None) -> Floats:
    """Inner products of the scaled rows that move and, last, of one more point that is a combination of all rows."""
    hull = submatrix(gram, moving) * np.outer(scale[moving], scale[moving])
    if point is None:
        return hull
    products = gram @ point
    larger = np.empty((len(hull) + 1,) * 2)
    larger[:-1, :-1], larger[-1, -1] = hull, point @ products
    larger[-1, :-1] = larger[:-1, -1] = products[moving] * scale[moving]
    return larger


def towards_equality(losses: Floats) -> Floats | None:
    """(p . F^) F^ - p with F^ = F/|F| and p = 1/|1|: |F| times the weights of the gradient of -cos(1, F).

    FedLF's eq. 7 and FedMDFG's fair guidance up to their lengths; None where all losses are equal.
    """
    size = float(np.linalg.norm(losses))
    if size == 0.0 or np.ptp(losses) <= 1e-12 * np.abs(losses).max():
        return None
    ones = np.full(len(losses), 1.0 / np.sqrt(len(losses)))
    direction = losses / size
    pull: Floats = (direction @ ones) * direction - ones
    return pull


def check_absent(absent: str) -> None:
    """Insist on 'off', 'last:TAU' or 'expected'."""
    if absent in ("off", "expected"):
        return
    kind, _, length = str(absent).partition(":")
    if kind != "last" or not length.isdecimal():
        raise EvenhandError(f"absent={absent!r} must be 'off', 'expected' or 'last:TAU', e.g. 'last:10'")
    number("TAU in absent", int(length), low=1, whole=True)


def learning_rate(value: float | None, round: Round, name: str, rule: str) -> float:
    """A setting that defaults to the clients' learning rate."""
    if value is not None:
        return value
    if round.lr is None:
        raise EvenhandError(f"{rule} needs the clients' learning rate: pass lr=... to aggregate, or set {name}=...")
    return round.lr


def recall(memo: Memo, key: str, clients: tuple[Client, ...], default: float = np.nan) -> Floats:
    """Numbers carried per client, for these clients; `default` for one never seen."""
    known = dict(zip(memo.get("clients", ()), memo.get(key, ()), strict=True))
    return np.array([known.get(client, default) for client in clients], dtype=np.float64)


def carry(memo: Memo, clients: tuple[Client, ...], **values: Floats) -> dict[str, Any]:
    """The memo with these clients' numbers replaced or added."""
    ids = list(memo.get("clients", ()))
    ids += [client for client in clients if client not in set(ids)]
    place = {client: position for position, client in enumerate(ids)}
    carried: dict[str, Any] = {"clients": ids}
    for key, numbers in values.items():
        column = np.full(len(ids), np.nan)
        column[: len(memo.get("clients", ()))] = memo.get(key, ())
        column[[place[client] for client in clients]] = numbers
        carried[key] = column
    return carried
