"""One round of any method on anybody's updates: `aggregate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.checks import EvenhandError, NoUsableClient, choice, near_miss, number
from evenhand.geometry import Floats, combine, products
from evenhand.methods import Method, method
from evenhand.methods.base import Ask, Client, Memo, Round, Weights
from evenhand.solvers import calm_blas, submatrix
from evenhand.state import Memory, State, kept_window, window_of
from evenhand.updates import Layers, Layout, Updates, read_updates, restore

Flags = np.ndarray[Any, np.dtype[np.bool_]]

CANCELLATION = 1e3  # terms this much longer than their sum are added up in float64


@dataclass(frozen=True)
class Combination:
    """Rows and their coefficients (blocks x rows), and what the rows' inner products say of them.

    Or several at once, of the same shape: everything has a dimension more in front.
    """

    gram: Floats  # blocks x rows x rows
    coefficients: Floats

    @cached_property
    def squares(self) -> Floats:
        """Squared length of each row, per block."""
        return np.maximum(np.diagonal(self.gram, axis1=-2, axis2=-1), 0.0)

    @cached_property
    def terms(self) -> Floats:
        """Length of each row's part in the direction, per block."""
        return np.asarray(np.sqrt(self.squares) * np.abs(self.coefficients))

    @cached_property
    def lengths(self) -> Floats:
        """Of all terms together, per block."""
        return np.asarray(self.terms.sum(axis=-1))

    @cached_property
    def length(self) -> Any:
        return self.lengths.sum(axis=-1)

    @cached_property
    def dots(self) -> Floats:
        """Inner product of each row with the direction, per block."""
        return np.asarray((self.gram @ self.coefficients[..., None])[..., 0])

    @cached_property
    def square(self) -> Any:
        """Squared length of the direction."""
        return np.maximum(0.0, (self.dots * self.coefficients).sum(axis=(-2, -1)))

    @property
    def cancels(self) -> Any:
        """Whether the terms are so much longer than their sum that float32 would lose digits."""
        return self.length**2 > CANCELLATION**2 * self.square

    def conflicts(self, resolution: float) -> Flags:
        """Whose update the direction goes against, over the whole model."""
        return _against(self.dots.sum(axis=-2), self.squares.sum(axis=-2), self.length[..., None], resolution)

    def layer_conflicts(self, resolution: float) -> Flags:
        """The same per layer (layers x rows)."""
        return _against(self.dots, self.squares, self.lengths[..., None], resolution)


def _against(dots: Floats, squares: Floats, terms: Floats, resolution: float) -> Flags:
    """Whose inner product with a direction is below zero by more than rounding; terms: how long its terms are."""
    return np.asarray(dots < -10.0 * resolution * np.sqrt(squares) * terms)


def plain_records(found: Combination, resolution: float) -> list[dict[str, Any]]:
    """As `Diagnostics.record`, of several rounds at once in which nobody is remembered and nobody left out."""
    against = found.conflicts(resolution).sum(axis=-1).tolist()
    by_layer = found.layer_conflicts(resolution).sum(axis=-1).tolist()
    return [_record(*own) for own in zip(against, by_layer, np.sqrt(found.square).tolist(), strict=True)]


def _record(
    conflicts: int,
    layer_conflicts: list[int],
    direction: float,
    remembered: Sequence[Client] = (),
    excluded: Mapping[Client, str] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    return {
        "conflicts": conflicts,
        "layer_conflicts": layer_conflicts,
        "direction": direction,
        "remembered": len(remembered),
        "remembered_clients": list(remembered),
        "excluded": {str(client): reason for client, reason in (excluded or {}).items()},
        "notes": list(notes),
    }


@dataclass(frozen=True)
class Diagnostics:
    """What the inner products and the coefficients say about the round. Rows: present clients, then remembered ones."""

    clients: tuple[Client, ...]
    ages: np.ndarray[Any, np.dtype[np.int64]]
    layers: tuple[str, ...]
    combination: Combination = field(repr=False)
    resolution: float
    lr: float | None
    excluded: Mapping[Client, str]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def gram(self) -> Floats:
        """Inner products of the rows (blocks x rows x rows)."""
        return self.combination.gram

    @property
    def coefficients(self) -> Floats:
        """What each row counts (blocks x rows)."""
        return self.combination.coefficients

    @cached_property
    def norms(self) -> Floats:
        """Length of each row."""
        return np.sqrt(np.maximum(np.diagonal(self.gram.sum(axis=0)), 0.0))

    @cached_property
    def cosines(self) -> Floats:
        """Cosine of every pair of rows; 0 for a zero row."""
        lengths = np.outer(self.norms, self.norms)
        total = self.gram.sum(axis=0)
        return np.clip(np.divide(total, lengths, out=np.zeros_like(total), where=lengths > 0.0), -1.0, 1.0)

    @property
    def direction_norm(self) -> float:
        """Length of the combined direction (before the server step)."""
        return math.sqrt(self.combination.square)

    @cached_property
    def predicted_change(self) -> Floats:
        """First-order change of each row's loss along the direction: negative is better.

        An update is about lr times a gradient, so the inner product is divided by lr where lr is known; otherwise the
        numbers compare clients with each other and have no unit.
        """
        return -self.combination.dots.sum(axis=0) / (self.lr or 1.0)

    @cached_property
    def conflicts(self) -> Flags:
        """Whose update the direction goes against, over the whole model."""
        return self.combination.conflicts(self.resolution)

    @cached_property
    def layer_conflicts(self) -> Flags:
        """The same per layer (layers x rows)."""
        return self.combination.layer_conflicts(self.resolution)

    def record(self) -> dict[str, Any]:
        """What a round's record keeps of it, in plain values."""
        present = int((self.ages == 0).sum())
        return _record(
            int(self.conflicts[:present].sum()),
            self.layer_conflicts[:, :present].sum(axis=1).tolist(),
            self.direction_norm,
            self.clients[present:],
            self.excluded,
            self.notes,
        )

    def __str__(self) -> str:
        present = int((self.ages == 0).sum())
        lines = [
            f"{present} present clients, {len(self.ages) - present} remembered; "
            f"direction {self.direction_norm:.4g} long",
            f"against {int(self.conflicts[:present].sum())} of {present} present clients over the whole model",
        ]
        if len(self.layers) > 1:
            counts = self.layer_conflicts[:, :present].sum(axis=1)
            lines.append("by layer: " + ", ".join(f"{n} {c}" for n, c in zip(self.layers, counts, strict=True)))
        lines += [f"excluded {client!r}: {reason}" for client, reason in self.excluded.items()]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Aggregate:
    """The outcome of a round: the new model is theta - update."""

    update: Any = field(repr=False)  # same structure, dtype and device as one client's update
    coefficients: Floats = field(repr=False)  # blocks x rows: the given clients in their order, then remembered rows
    state: State
    diagnostics: Diagnostics
    evaluation_offset: Any = field(default=None, repr=False)  # AFL: evaluate theta - update + evaluation_offset


def aggregate(
    rule: str | Method | Mapping[str, Any],
    updates: Any,
    *,
    losses: Any = None,
    sizes: Any = None,
    accuracies: Any = None,
    participations: Any = None,
    fairness: Any = None,
    fairness_global: float | None = None,
    accuracy_global: float | None = None,
    clients: Sequence[Client] | None = None,
    round: int | None = None,
    state: State | None = None,
    lr: float | None = None,
    layers: Layers = None,
    evaluate: Callable[[Any], Any] | None = None,
    on_bad: str = "exclude",
    own: bool = False,
    keep_on: str | torch.device | None = None,
    seed: int = 0,
    **settings: Any,
) -> Aggregate:
    """Combine one round's client updates by a method.

    rule: a method's name (`evenhand.methods()` lists them), with its settings as further keywords; or a Method.
    updates: g_k = theta - theta_k of each client: a matrix or stack (clients first), a mapping name -> stack, or a
        sequence with one array, list of arrays or state dict a client; torch or numpy, any device.
    losses: each client's mean loss at the received model (AdaFed's paper: after training; either works).
    sizes, accuracies, participations: samples, accuracy and number of rounds taken part in, of each client.
    fairness, fairness_global, accuracy_global: a group-fairness measure per client and overall (FairFed).
    clients: ids, needed as soon as anything is carried per client from round to round.
    round: this round's number from 0 (default: one more than the state's); state: the previous outcome's `.state`.
    lr: the clients' learning rate (q-FFL, FedFa, and the unit of predicted loss changes).
    layers: how tensors form layers: "module" (default), "tensor", "model", a mapping, a function, or column sizes.
    evaluate: given a trial update, returns the clients' losses at theta - trial (FedMDFG's line search).
    on_bad: "exclude" clients with NaN or Inf and say so in the diagnostics, or "raise".
    own: the caller gives `state` up: its memory of absent clients is written in place and serves no other call.
    keep_on: the device on which remembered updates are kept, where not the updates' own (e.g. "cpu").

    >>> import numpy as np
    >>> out = aggregate("fedfv", np.array([[1.0, 0.0], [-1.0, 1.0]]), losses=[0.5, 2.0], alpha=0.0)
    >>> out.update
    array([0.15811388, 0.47434165])
    """
    store = _read_device(keep_on)
    opened = open_round(
        method(rule, **settings),
        updates,
        losses=losses,
        sizes=sizes,
        accuracies=accuracies,
        participations=participations,
        fairness=fairness,
        fairness_global=fairness_global,
        accuracy_global=accuracy_global,
        clients=clients,
        round=round,
        state=state,
        lr=lr,
        layers=layers,
        evaluate=evaluate,
        on_bad=on_bad,
        seed=seed,
    )
    weighed = opened.weigh(*products(opened.given, opened.memory.pieces(opened.given)))
    return weighed.close(weighed.direction(), own=own, keep_on=store)


# ------------------------------------------------------------------------------------------- a round in steps


def open_round(
    chosen: Method,
    updates: Any,
    *,
    clients: Sequence[Client] | None,
    round: int | None,
    state: State | None,
    lr: float | None,
    seed: int,
    evaluate: Callable[[Any], Any] | None = None,
    layers: Layers = None,
    on_bad: str = "exclude",
    fairness_global: float | None = None,
    accuracy_global: float | None = None,
    **columns: Any,
) -> Opened:
    """Read and check everything that `aggregate` is given (columns: what it is given of each client)."""
    choice("on_bad", on_bad, ("exclude", "raise"))
    if lr is not None:
        number("lr", lr, above=0.0)
    given = read_updates(updates, layers)
    ids = _read_clients(clients, len(given))
    _check_state(state, chosen, given.layout, clients is not None)
    index = _read_round(round, state)
    values = {name: _read_column(name, column, ids) for name, column in columns.items() if column is not None}
    scalars = {"fairness_global": fairness_global, "accuracy_global": accuracy_global}
    overall = {name: _read_scalar(name, value) for name, value in scalars.items() if value is not None}
    _check_inputs(chosen, {*values, *overall})
    return Opened(
        chosen=chosen,
        given=given,
        ids=ids,
        named=clients is not None,
        index=index,
        values=values,
        overall=overall,
        state=state,
        lr=lr,
        evaluate=evaluate,
        on_bad=on_bad,
        seed=seed,
    )


@dataclass(frozen=True)
class Opened:
    """A round whose inputs are in order, before anything is known of the updates' geometry."""

    chosen: Method
    given: Updates
    ids: tuple[Client, ...]
    named: bool  # whether the caller named them
    index: int
    values: Mapping[str, Floats]
    overall: Mapping[str, float]
    state: State | None
    lr: float | None
    evaluate: Callable[[Any], Any] | None
    on_bad: str
    seed: int

    @cached_property
    def memory(self) -> Memory:
        memory = self.state.memory if self.state is not None else Memory()
        memory.check()
        return memory

    def weigh(self, products: Floats, with_past: Sequence[Floats]) -> Weighed:
        """Leave bad clients out, look at the absent ones, and ask the rule for coefficients.

        products: of the given rows with each other; with_past: of the given rows with each of the memory's pieces.
        """
        excluded = _bad_clients(products, self.values, self.ids)
        _refuse(excluded, self.on_bad, len(self.given))
        here, values, present = self.given, self.values, self.ids
        good = np.arange(len(self.ids))
        if excluded:
            good = np.array([position for position, client in enumerate(self.ids) if client not in excluded])
            here, present = here.select(good.tolist()), tuple(self.ids[position] for position in good)
            products, with_past = products[:, good][:, :, good], [piece[:, good] for piece in with_past]
            values = {name: column[good] for name, column in values.items()}
        _check_totals(values)

        memory, kind = self.memory, self.chosen.rule.memory
        seen = self.state.seen if self.state is not None else frozenset()
        seen = seen | set(present) if kind == "expected" else frozenset()
        window = window_of(kind, len(seen), len(present))
        kept = memory.absent(present, self.index, kept_window(kind, window))
        used = kept[self.index - memory.rounds[kept] <= window]
        between = memory.between(with_past, len(present), len(products))
        moment = Round(
            gram=_joined(products, between[:, :, used], memory.gram, used),
            present=len(present),
            clients=(*present, *(memory.clients[i] for i in used.tolist())),
            ages=np.concatenate([np.zeros(len(present), dtype=np.int64), self.index - memory.rounds[used]]),
            index=self.index,
            resolution=here.resolution,
            seed=self.seed,
            lr=self.lr,
            values=values
            if not len(used)
            else {name: np.concatenate([column, _remembered(memory, name, used)]) for name, column in values.items()},
            globals=self.overall,
            layers=here.layout.blocks,
            last=memory.last(present, between, self.index, window),
        )
        with calm_blas(moment.rows):
            weights = self.chosen.rule.weigh(moment, self.state.rule_memo if self.state is not None else {})
        coefficients = np.empty((len(products), moment.rows))
        coefficients[:] = weights.coefficients
        scales = memory.spread(coefficients[:, len(present) :], used) if len(used) else []
        past = [(rows, own) for rows, own in zip(memory.pieces(here), scales, strict=bool(len(used))) if own.any()]
        combination = Combination(moment.gram, coefficients)
        return Weighed(self, here, good, excluded, moment, weights, combination, past, seen, kept, between[:, :, kept])


@dataclass(frozen=True)
class Weighed:
    """A round whose coefficients are known."""

    opened: Opened
    here: Updates
    good: np.ndarray[Any, np.dtype[np.int64]]
    excluded: Mapping[Client, str]
    moment: Round
    weights: Weights
    combination: Combination  # of all rows, present and remembered
    past: list[tuple[Updates, Floats]]  # remembered rows with their coefficients
    seen: frozenset[Client]
    kept: np.ndarray[Any, np.dtype[np.int64]]
    between: Floats  # products of the present rows with the kept ones

    @property
    def coefficients(self) -> Floats:
        """Blocks x rows."""
        return self.combination.coefficients

    def direction(self, own: list[Tensor] | None = None) -> list[Tensor]:
        """The rows' combination by the coefficients; own: of the present rows, where it is there already."""
        precise = self.combination.cancels
        here = self.coefficients[:, : len(self.here)]
        return combine(here, self.here, self.past, precise=precise, own=None if precise else own)

    def close(
        self,
        direction: list[Tensor],
        *,
        own: bool = False,
        keep_on: torch.device | None = None,
        ask: Ask | None = None,
    ) -> Aggregate:
        """The server step along the combined direction, and what the round leaves behind.

        ask: the present clients' losses at a length of the step, where they are not `evaluate`'s.
        """
        opened, state = self.opened, self.opened.state
        chosen, layout = opened.chosen, opened.given.layout
        server_memo = _on_device(state.server_memo, direction) if state is not None else {}
        ask = ask or _asker(opened.evaluate, opened.given, direction, self.good)
        flat, server_memo, remarks = chosen.server.apply(direction, server_memo, self.moment, self.weights, ask)
        offset = chosen.server.offset(server_memo)
        remember = opened.named and chosen.rule.memory != "off"
        return Aggregate(
            update=restore(layout, flat),
            coefficients=_in_callers_order(self.coefficients, self.good, len(opened.given)),
            state=State(
                rule=chosen.rule.name,
                server=chosen.server.name,
                round=opened.index,
                named=opened.named,
                seen=self.seen,
                layout=layout.signature,
                rule_memo=self.weights.memo,
                server_memo=server_memo,
                memory=self._memory(own, keep_on) if remember else Memory(),
            ),
            diagnostics=Diagnostics(
                clients=self.moment.clients,
                ages=self.moment.ages,
                layers=layout.blocks,
                combination=self.combination,
                resolution=self.here.resolution,
                lr=opened.lr,
                excluded=self.excluded,
                notes=(*self.weights.notes, *remarks, *_layout_notes(layout)),
                facts=self.weights.facts,
            ),
            evaluation_offset=None if offset is None else restore(layout, [tensor.clone() for tensor in offset]),
        )

    def _memory(self, own: bool, keep_on: torch.device | None) -> Memory:
        """The memory after this round: present clients' rows replace their old ones, rows past use are forgotten."""
        memory, moment, kept = self.opened.memory, self.moment, self.kept
        count = moment.present
        names = sorted({*memory.values, *moment.values})
        holders, places, held = memory.store(kept, self.here, own=own, device=keep_on)
        products = moment.gram[:, :count, :count]
        return Memory(
            clients=(*(memory.clients[i] for i in kept.tolist()), *moment.clients[:count]),
            rounds=np.concatenate([memory.rounds[kept], np.full(count, moment.index)]),
            holders=holders,
            places=places,
            values={name: np.concatenate([_remembered(memory, name, kept), _present(moment, name)]) for name in names},
            gram=_joined(products, self.between, memory.gram, kept, first=False),
            held=held,
            turns=tuple(entry.turn[0] for entry in held),
        )


# --------------------------------------------------------------------------------------- checks at the door


def _read_clients(clients: Sequence[Client] | None, rows: int) -> tuple[Client, ...]:
    if clients is None:
        return tuple(range(rows))
    if isinstance(clients, str) or not hasattr(clients, "__iter__"):
        raise EvenhandError(f"clients={clients!r} must be a list with one id for each update")
    ids = tuple(client.item() if isinstance(client, np.generic) else client for client in clients)
    if len(ids) != rows:
        raise EvenhandError(f"clients has {len(ids)} ids for {rows} updates")
    for client in ids:
        if not isinstance(client, (int, str)) or isinstance(client, bool):
            raise EvenhandError(f"client id {client!r} is a {type(client).__name__}; use whole numbers or text")
    if len(set(ids)) != len(ids):
        twice = next(client for client in ids if ids.count(client) > 1)
        raise EvenhandError(f"client {twice!r} stands twice in clients; each update needs an id of its own")
    return ids


def _read_device(keep_on: str | torch.device | None) -> torch.device | None:
    if keep_on is None:
        return None
    try:
        return torch.device(keep_on)
    except (RuntimeError, TypeError) as error:
        raise EvenhandError(f"keep_on={keep_on!r} is no device of torch; use e.g. 'cpu' or 'cuda'") from error


def _read_round(index: int | None, state: State | None) -> int:
    last = -1 if state is None else state.round
    if index is None:
        return last + 1
    number("round", index, low=0, whole=True)
    if index <= last:
        raise EvenhandError(f"round={index} is not after the state's round {last}; rounds count up from 0")
    return int(index)


def _check_state(state: State | None, chosen: Method, layout: Layout, named: bool) -> None:
    if state is None:
        return
    if not isinstance(state, State):
        raise EvenhandError(f"state is a {type(state).__name__}; pass the previous outcome's .state, or None to start")
    if (state.rule, state.server) != (chosen.rule.name, chosen.server.name):
        raise EvenhandError(
            f"state comes from rule {state.rule!r} with server {state.server!r}, not from {chosen.rule.name!r} with "
            f"{chosen.server.name!r}; pass state=None to start afresh"
        )
    if state.layout != layout.signature:
        raise EvenhandError(
            "state comes from updates with other tensors, shapes or layers; pass state=None to start afresh"
        )
    carries = chosen.rule.by_client or chosen.rule.memory != "off"
    if carries and not (named and state.named):
        raise EvenhandError(
            f"{chosen.name} carries something of each client from round to round, so from the first round on it needs "
            "clients=[one id an update]" + (" (or absent='off')" if not chosen.rule.by_client else "")
        )


def _read_column(name: str, column: Any, ids: tuple[Client, ...]) -> Floats:
    if isinstance(column, Mapping):
        missing = [client for client in ids if client not in column]
        if missing:
            known = [str(client) for client in column]
            raise EvenhandError(f"{name} has nothing for client {missing[0]!r}{near_miss(missing[0], known)}")
        column = [column[client] for client in ids]
    if isinstance(column, Tensor):
        column = column.detach().double().cpu().numpy()
    try:
        if isinstance(column, (list, tuple)):
            column = [float(entry) for entry in column]
        numbers = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise EvenhandError(f"{name} must hold one number for each update: {error}") from error
    if numbers.shape != (len(ids),):
        raise EvenhandError(
            f"{name} has shape {numbers.shape}; one number for each of the {len(ids)} updates is needed"
        )
    low = {"losses": -np.inf, "fairness": -np.inf}.get(name, 0.0)
    if (numbers < low).any():
        where = int(np.argmax(numbers < low))
        raise EvenhandError(f"{name} of client {ids[where]!r} is {numbers[where]:g}; it cannot be negative")
    return numbers


def _read_scalar(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise EvenhandError(f"{name}={value!r} must be a number") from error
    number(name, found)
    return found


def _check_totals(values: Mapping[str, Floats]) -> None:
    """Refuse counts that add up to nothing, once the bad clients are out."""
    for name, meaning in (("sizes", "no usable client has any samples"), ("participations", "yet these take part now")):
        if name in values and values[name].sum() == 0.0:
            raise EvenhandError(f"{name} are all zero: {meaning}")


def _check_inputs(chosen: Method, given: set[str]) -> None:
    missing = [name for name in chosen.rule.inputs if name not in given]
    if missing:
        hint = " (or weights='uniform')" if missing == ["sizes"] and hasattr(chosen.rule, "weights") else ""
        hint = " (or reference='uniform')" if missing == ["sizes"] and hasattr(chosen.rule, "reference") else hint
        had = f"; it was given {', '.join(sorted(given))}" if given else ""
        raise EvenhandError(f"{chosen.name} needs {' and '.join(f'{name}=' for name in missing)}{hint}{had}")


def _bad_clients(products: Floats, values: Mapping[str, Floats], ids: tuple[Client, ...]) -> dict[Client, str]:
    if all(np.isfinite(numbers).all() for numbers in (products, *values.values())):
        return {}
    squares = np.diagonal(products, axis1=1, axis2=2).sum(axis=0)
    bad = {ids[i]: "its update holds NaN or Inf" for i in np.flatnonzero(~np.isfinite(squares))}
    for name, column in values.items():
        # NaN in fairness means that it cannot be measured at this client.
        for i in np.flatnonzero(np.isinf(column) if name == "fairness" else ~np.isfinite(column)):
            bad.setdefault(ids[i], f"its entry in {name} is {column[i]}")
    return bad


def _refuse(excluded: Mapping[Client, str], on_bad: str, rows: int) -> None:
    if not excluded or (on_bad == "exclude" and len(excluded) < rows):
        return
    said = "; ".join(f"client {client!r}: {reason}" for client, reason in list(excluded.items())[:3])
    if len(excluded) == rows:
        raise NoUsableClient(f"no usable client in this round: {said}")
    raise EvenhandError(f"{said} (on_bad='exclude' leaves such clients out)")


def _layout_notes(layout: Layout) -> tuple[str, ...]:
    still = [name for name, (_, dtype) in layout.integers.items() if not dtype.is_floating_point]
    return (f"entries that are not floating-point get a zero update: {', '.join(still)}",) if still else ()


# ---------------------------------------------------------------------------------------- inside a round


def _remembered(memory: Memory, name: str, used: np.ndarray[Any, Any]) -> Floats:
    column = memory.values.get(name)
    return np.full(len(used), np.nan) if column is None else column[used]


def _joined(
    products: Floats, between: Floats, among: Floats, which: np.ndarray[Any, Any], *, first: bool = True
) -> Floats:
    """The Gram matrix of a round's rows and some of the remembered ones, the round's own first or last.

    among: products of all remembered rows with each other, of which `which` are wanted.
    """
    if not len(which):
        return products
    blocks, new, old = between.shape
    joined = np.empty((blocks, new + old, new + old))
    here, there = (slice(0, new), slice(new, None)) if first else (slice(old, None), slice(0, old))
    joined[:, here, here] = products
    joined[:, here, there] = between
    joined[:, there, here] = between.transpose(0, 2, 1)
    joined[:, there, there] = submatrix(among, which)
    return joined


def _asker(
    evaluate: Callable[[Any], Any] | None, given: Updates, direction: list[Tensor], good: np.ndarray[Any, Any]
) -> Callable[[float], Floats] | None:
    if evaluate is None:
        return None

    def ask(scale: float) -> Floats:
        trial = evaluate(restore(given.layout, [scale * tensor for tensor in direction]))
        losses = np.asarray(torch.as_tensor(trial).detach().double().cpu().numpy())
        if losses.shape != (len(given),):
            raise EvenhandError(
                f"evaluate returned shape {losses.shape}; one loss for each of {len(given)} clients is needed"
            )
        losses = losses[good]
        return np.where(np.isfinite(losses), losses, np.inf)  # a step that breaks a client's loss is a bad step

    return ask


def _on_device(memo: Memo, like: list[Tensor]) -> Memo:
    """The server's tensors where the direction is (a loaded state comes on the CPU)."""
    return {
        key: [tensor.to(other.device) for tensor, other in zip(value, like, strict=True)]
        if isinstance(value, list) and value and isinstance(value[0], Tensor)
        else value
        for key, value in memo.items()
    }


def _present(moment: Round, name: str) -> Floats:
    column = moment.values.get(name)
    return np.full(moment.present, np.nan) if column is None else column[: moment.present]


def _in_callers_order(coefficients: Floats, good: np.ndarray[Any, Any], rows: int) -> Floats:
    """Excluded clients get zero coefficients, so that columns match the given updates."""
    present = len(good)
    if present == rows:
        return coefficients.copy()
    full = np.zeros((len(coefficients), rows + coefficients.shape[1] - present))
    full[:, good] = coefficients[:, :present]
    full[:, rows:] = coefficients[:, present:]
    return full
