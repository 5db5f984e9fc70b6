"""FairStrategy: any evenhand method as a Flower Strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from evenhand import storage
from evenhand.aggregation import Aggregate, Opened, Weighed, open_round
from evenhand.checks import EvenhandError, NoUsableClient, choice, number
from evenhand.constraints import Cells, Leaning, Sums, View
from evenhand.engine.groups import Told, looks_at_groups, said, told_columns
from evenhand.engine.sampling import Sampling
from evenhand.engine.wishes import wants_trained
from evenhand.flower import wire
from evenhand.flower.correction import Correcting
from evenhand.flower.door import Door
from evenhand.flower.exchange import Exchange, Sorted
from evenhand.flower.needs import can_federate, surveys_first, wanted
from evenhand.flower.replies import Heard, Reader, evaluation, served
from evenhand.flower.roster import Roster, plain_sampling
from evenhand.flower.wire import Form, Unusable
from evenhand.geometry import launch, settle
from evenhand.methods import Method, method
from evenhand.objectives import Correction
from evenhand.state import State
from evenhand.transfer import to_numpy
from evenhand.updates import Layout, Updates, read_updates

Floats = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

PATIENCE = 1.0  # seconds between looks at who is connected
MEASURES = ("needed", "losses")


@dataclass
class Turn:
    """A round that is under way: who was asked, what they were told, and what has gone wrong so far."""

    index: int
    asked: list[int]
    needed: int  # good replies without which the model stays
    exchange: Exchange
    started: float
    sums: dict[int, Sums] = field(default_factory=dict)  # of the received model, where they were asked for beforehand
    leaning: Leaning | None = None
    told: list[int] = field(default_factory=list)  # whom the leaning is about, in its order
    failed: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class FairStrategy(Strategy):
    """Runs a fair method over the clients of a Flower federation.

    Args:
        rule: a method's name with settings ("fedfv:alpha=0.2"), or a Method; `evenhand methods` lists them.
        fraction_train: share of the clients that a round asks (or `sampling`, an evenhand.engine.sampling.Sampling).
        min_train_nodes: good replies without which a round leaves the model as it is.
        min_available_nodes: nodes to wait for before the first round.
        evaluate_every: rounds between evaluations by all clients, each on its own test data; 0: never.
        seed: of the sampling and of whatever a rule draws.
        lr: the clients' learning rate (a number, or a function of the round from 0), where the method asks for it.
        measure: "needed": clients measure the received model only where the method asks for it; "losses": always.
        timeout: seconds that any message is waited for; `start(timeout=...)` replaces it.
        wait: seconds that the nodes are waited for before the first round.
        checkpoint: a file that gets the server's state after every round, and from which `start` continues.
        cells: what the groups of people are, for methods that look at them.
        settings: of the method.

    `rounds` and `evaluations` keep what Flower's Result drops: who was asked, who failed and why, coefficients and
    conflicts of every round, and every client's own accuracy and loss. `names` says which client is which.
    """

    def __init__(
        self,
        rule: str | Method | Mapping[str, Any] = "even",
        *,
        fraction_train: float | None = None,
        sampling: Sampling | None = None,
        min_train_nodes: int = 2,
        min_available_nodes: int = 2,
        evaluate_every: int = 1,
        seed: int = 0,
        lr: float | Callable[[int], float] | None = None,
        measure: str = "needed",
        timeout: float = 3600.0,
        wait: float = 600.0,
        checkpoint: str | os.PathLike[str] | None = None,
        cells: Cells | None = None,
        **settings: Any,
    ) -> None:
        self.method = method(rule, **settings)
        if fraction_train is not None and sampling is not None:
            raise EvenhandError("fraction_train and sampling both say how many clients a round asks; give one of them")
        if fraction_train is not None:
            number("fraction_train", fraction_train, above=0.0, high=1.0)
        self.sampling = plain_sampling(sampling or Sampling(participation=fraction_train or 1.0))
        for name, value in (("min_train_nodes", min_train_nodes), ("min_available_nodes", min_available_nodes)):
            number(name, value, low=1, whole=True)
        number("evaluate_every", evaluate_every, low=0, whole=True)
        number("seed", seed, low=0, whole=True)
        number("timeout", timeout, above=0.0)
        number("wait", wait, low=0.0)
        choice("measure", measure, MEASURES)
        self.min_train_nodes, self.min_available_nodes = min_train_nodes, min_available_nodes
        self.evaluate_every, self.seed, self.lr, self.measure = evaluate_every, seed, lr, measure
        self.timeout, self.wait, self.checkpoint, self.cells = timeout, wait, checkpoint, cells
        can_federate(self.method, cells, lr)
        self.roster = Roster()
        self.round = 0
        self.rounds: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.predicted: Indices | None = None
        self.model: Tensor | None = None
        self.offset: Tensor | None = None
        self.state: State | None = None
        self.memo: Mapping[str, Any] = {}
        self.experiment = uuid4().hex  # by which clients know what they kept for it
        self.seen: set[str] = set()  # whoever has trained already
        self.after_round: Callable[[FairStrategy], None] | None = None
        self._correcting: Correcting | None = None
        self._form: Form | None = None
        self._arrays: ArrayRecord | None = None
        self._rows: Tensor | None = None
        self._layout: Layout | None = None
        self._turn: Turn | None = None
        self._evaluation: Exchange | None = None
        self._silent: dict[int, str] = {}  # who let the round's training message run out: not asked to evaluate either
        self._last: int | None = None  # the last round, where `start` knows it
        self._door = Door()

    # ---- what a person sees

    @property
    def names(self) -> tuple[str, ...]:
        """The clients, in the order of `evaluations` and of the numbers in `rounds`."""
        return self.roster.names

    def summary(self) -> None:
        """Log what the strategy will do."""
        log(INFO, "\t├──> Method: %s", self.method)
        log(INFO, "\t├──> Clients a round: %s", self.sampling.cohort or f"{self.sampling.participation:.0%} of all")
        every = f"every {self.evaluate_every} rounds" if self.evaluate_every else "never"
        log(INFO, "\t├──> Evaluation by all clients: %s", every)
        log(INFO, "\t└──> Seconds that a message is waited for: %g", self.timeout)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Play all rounds that are left (after a checkpoint: those behind it); as in Flower, with the same arguments.

        Unlike Flower's it evaluates the initial model on the clients too, and evaluates every `evaluate_every` rounds.
        """
        number("num_rounds", num_rounds, low=1, whole=True)
        if timeout is not None:
            number("timeout", timeout, above=0.0)
            self.timeout = timeout
        self._last = num_rounds
        if self.checkpoint is not None and Path(self.checkpoint).is_file():
            self.restore(self.checkpoint)
        log(INFO, "Starting FairStrategy%s:", f" after round {self.round} of {num_rounds}" if self.round else "")
        self.summary()
        self.open(grid, initial_arrays)
        self._start_correction(num_rounds)
        train, evaluate = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result = Result(arrays=self.arrays)
        if self.round == 0:
            self._measure(0, grid, evaluate, evaluate_fn, result)
        while self.round < num_rounds:
            now = self.round + 1
            log(INFO, "[ROUND %d/%d]", now, num_rounds)
            messages = self.configure_train(now, self.arrays, train, grid)
            metrics = self.aggregate_train(now, self._send(grid, messages))[1]
            if metrics is not None:
                result.train_metrics_clientapp[now] = metrics
            self._measure(now, grid, evaluate, evaluate_fn, result)
            result.arrays = self.arrays
            if self.checkpoint is not None:
                self.save(self.checkpoint)
            if self.after_round is not None:
                self.after_round(self)
        return result

    def _measure(
        self,
        server_round: int,
        grid: Grid,
        config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        result: Result,
    ) -> None:
        messages = self.configure_evaluate(server_round, self.arrays, config, grid)
        metrics = self.aggregate_evaluate(server_round, self._send(grid, messages))
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics
        found = evaluate_fn(server_round, self.arrays) if evaluate_fn is not None else None
        if found is not None:
            result.evaluate_metrics_serverapp[server_round] = found

    @property
    def arrays(self) -> ArrayRecord:
        """The model as it is now."""
        assert self._form is not None
        assert self.model is not None
        if self._arrays is None:
            self._arrays = self._form.write(self.model)
        return self._arrays

    def tensors(self) -> dict[str, Tensor]:
        """The model to use now, as tensors by name (AFL's is a mean over the rounds)."""
        assert self._form is not None
        return self._form.words(self.evaluated)

    @property
    def evaluated(self) -> Tensor:
        """The model to use now, as a flat row."""
        assert self.model is not None
        return self.model if self.offset is None else self.model + self.offset

    # ---- state on disk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the server's state, atomically."""
        content = {
            "round": self.round,
            "method": self.method.to_dict(),
            "seed": self.seed,
            "experiment": self.experiment,
            "seen": sorted(self.seen),
            "model": self.model,
            "state": None if self.state is None else self.state.to_plain(),
            "offset": self.offset,
            "memo": dict(self.memo),
            "roster": self.roster.to_plain(),
            "predicted": self.predicted,
            "rounds": self.rounds,
            "evaluations": self.evaluations,
        }
        storage.write(path, "federation", content)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go back to what `save` wrote; `start` then plays the rounds behind it."""
        kept = storage.read(path, "federation")
        try:
            if (kept["method"], kept["seed"]) != (self.method.to_dict(), self.seed):
                raise EvenhandError(
                    f"{str(path)!r} is the state of {kept['method']['name']} under seed {kept['seed']}, not of "
                    f"{self.method.name} as set here; remove the file to start anew"
                )
            self.round, self.model, self.offset = int(kept["round"]), kept["model"], kept["offset"]
            self.experiment, self.seen = kept["experiment"], set(kept["seen"])
            self.state = None if kept["state"] is None else State.from_plain(kept["state"])
            self.memo, self.predicted = kept["memo"], kept["predicted"]
            self.roster = self.roster.restored(kept["roster"])
            self.rounds = list(kept["rounds"])
            self.evaluations = [{**entry, **_arrays_in(entry)} for entry in kept["evaluations"]]
        except (KeyError, TypeError) as error:
            raise EvenhandError(f"{str(path)!r} is not a readable state of a federation: {error!r}") from error
        self._arrays = None

    def open(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Take the model to start from, unless there is one already, and wait for the nodes."""
        self._form = self._form or Form(arrays)
        if self.model is None:
            self.model = self._form.read(arrays)
        elif len(self.model) != self._form.shape.total:
            raise EvenhandError(
                "the checkpoint holds another model than the one to start from; remove it to start anew"
            )
        self._await_nodes(grid, self.min_available_nodes, must=True)
        if self.round == 0:
            self.roster.sort()  # whoever came first

    def _take(self, arrays: ArrayRecord) -> None:
        """Go on from a model that a loop of somebody else's hands in."""
        self._form = self._form or Form(arrays)
        if self.model is None or (self._arrays is not None and arrays is not self._arrays):
            self.model, self._arrays = self._form.read(arrays), arrays

    def _start_correction(self, num_rounds: int) -> None:
        if isinstance(self.method.objective, Correction):
            self._correcting = Correcting.of(self.method.objective, self.roster.train_samples, num_rounds)
            self.memo = self.memo or self._correcting.start()
            self.roster.fixed = True  # its stages go over a list of clients

    # ---- who is there

    def _await_nodes(self, grid: Grid, wanted: int, *, must: bool = False) -> None:
        """Wait until so many nodes are connected and have said who they are; `must`: it is an error if they do not."""
        end, told = monotonic() + (self.wait if must else self.timeout), False
        while True:
            self._door.look(grid, self.roster, self.timeout)
            if len(self.roster.nodes) >= wanted:
                return
            if monotonic() >= end:
                break
            if not told:
                log(INFO, "waiting for nodes: %d of %d are there", len(self.roster.nodes), wanted)
                told = True
            sleep(min(PATIENCE, max(0.0, end - monotonic())))
        if must:
            there = f"{len(self.roster.nodes)} of {wanted} clients were there within {self.wait:g} s"
            raise EvenhandError(
                f"{there}{self._door.complaints()}; start more SuperNodes, or wait for fewer (min_available_nodes, or "
                "clients in a deployment's description)"
            )

    def _send(self, grid: Grid, messages: Iterable[Message]) -> list[Message]:
        given = list(messages)
        return list(grid.send_and_receive(given, timeout=self.timeout)) if given else []

    # ---- training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages: one a client; before that a question, where constraints need everybody's answer."""
        started, index = perf_counter(), server_round - 1
        self._take(arrays)
        self._grid = grid
        self._await_nodes(grid, self.min_train_nodes)
        asked, meant = self._cohort(index)
        config[wire.ROUND] = server_round
        needed = min(self.min_train_nodes, max(1, meant))  # a round that asks one client on purpose needs no more
        turn = Turn(index, asked, needed, Exchange(wire.TRAIN, [], [], self.timeout), started)
        shared = RecordDict({wire.ARRAYS: self.arrays, wire.CONFIG: config})
        columns: dict[str, Tensor] = {}
        if surveys_first(self.method):
            columns = self._survey(turn, shared)
        places = {place: row for row, place in enumerate(asked)}
        contents = {}
        for row, place in enumerate(turn.told or [place for place in asked if place not in turn.failed]):
            task = wire.write_task(self.task(index, asked, places[place]))
            content = RecordDict({**shared, wire.TASK: task})
            if columns:
                content[wire.TOLD] = wire.record_of({name: column[row : row + 1] for name, column in columns.items()})
            contents[place] = content
        turn.exchange = Exchange.to(self.roster, wire.TRAIN, contents, self.timeout)
        self._turn = turn
        return turn.exchange.messages

    def _cohort(self, index: int) -> tuple[list[int], int]:
        if self._correcting is not None:
            return self._correcting.cohort(self.roster, self.sampling, self.seed, index, self.memo)
        return self.roster.cohort(self.sampling, self.seed, index)

    def task(self, index: int, asked: Sequence[int], row: int) -> dict[str, Any]:
        """What one of the asked clients is told besides the model; a subclass may add to it."""
        client = self.names[asked[row]]
        found: dict[str, Any] = {
            **self._about(index + 1),
            wire.WANT: wanted(self.method, self.measure),
            wire.KNOWN: client in self.seen,
        }
        rate = self._rate(index)
        if rate is not None:
            found["lr"] = rate
        if looks_at_groups(self.method):
            found[wire.MEMO] = wire.write_memo(self.method.objective.part(self.memo, client))
        if self._correcting is not None:
            found |= self._correcting.task(index, asked, row, self.memo)
        return found

    def _about(self, server_round: int) -> dict[str, Any]:
        """What every task says."""
        return {wire.ROUND: server_round, wire.METHOD: self.method.to_dict(), wire.EXPERIMENT: self.experiment}

    def _rate(self, index: int) -> float | None:
        return self.lr(index) if callable(self.lr) else self.lr

    def _survey(self, turn: Turn, shared: RecordDict) -> dict[str, Tensor]:
        """Ask how the received model treats groups; what the clients are told in return, a row each."""
        assert self.cells is not None
        tasks = {place: self.task(turn.index, turn.asked, row) for row, place in enumerate(turn.asked)}
        contents = {place: RecordDict({**shared, wire.TASK: wire.write_task(task)}) for place, task in tasks.items()}
        exchange = Exchange.to(self.roster, wire.SURVEY, contents, self.timeout)
        found = exchange.over(self._grid)
        turn.sums = self._sums_in(found)
        turn.failed, turn.notes, turn.told = found.failed, found.notes, sorted(turn.sums)
        if not turn.told:
            return {}
        turn.leaning = self._lean(turn.index, turn.told, wire.joined_sums([turn.sums[place] for place in turn.told]))
        rows = np.arange(len(turn.told))
        return told_columns(self.cells, len(rows), [(rows, turn.leaning)], torch.device("cpu"))

    def _sums_in(self, found: Sorted) -> dict[int, Sums]:
        assert self.cells is not None
        sums = {}
        for place in sorted(found.good):
            try:
                sums[place] = wire.read_sums(found.good[place], self.cells)
            except Unusable as error:
                found.failed[place] = str(error)
        return sums

    def _lean(self, index: int, places: Sequence[int], sums: Sums) -> Leaning:
        """What the objective makes of the clients' sums; it remembers its multipliers."""
        assert self.cells is not None
        sizes = self.roster.train_samples[list(places)].astype(np.float64)
        clients = tuple(self.names[place] for place in places)
        view = View(self.cells, sums, clients, self.method.rule.shares(sizes), index)
        leaning = self.method.objective.lean(view, self.memo)
        self.memo = leaning.memo
        return leaning

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The method's step on the good replies; with too few of them the model stays as it is."""
        turn = self._turn
        if turn is None or turn.index != server_round - 1:
            raise EvenhandError(f"round {server_round} was not configured; call configure_train first")
        assert self.model is not None
        self._turn = None
        found = turn.exchange.sort(replies)
        self._silent = {place: reason for place, reason in found.failed.items() if place in found.silent}
        turn.failed |= found.failed
        turn.notes += found.notes
        heard = self._hear(turn, found.good)
        record: dict[str, Any] = {"round": turn.index, "asked": turn.asked, "lost": sorted(turn.failed)}
        self.rounds.append(record)
        self.round = server_round
        out = self._step(turn, heard, record) if heard is not None else None
        if out is not None:
            self.model, self._arrays = self.model - out.update, None
        usable = len(found.good) - len(record.get("excluded", {}))
        excluded = {self.names[place]: reason for place, reason in turn.failed.items()}
        record["excluded"] = {**excluded, **record.get("excluded", {})}
        record["notes"] = [*record.get("notes", []), *turn.notes]
        if out is None:
            record["note"] = f"{usable} good replies, {turn.needed} are needed: the model stays"
            log(WARNING, "round %d: %s", server_round, record["note"])
        log(INFO, "\t%d of %d clients answered", usable, len(turn.asked))
        for client, reason in record["excluded"].items():
            log(WARNING, "round %d: left out %s: %s", server_round, client, reason)
        if self._correcting is not None:
            self._correct(turn, record)
        record["seconds"] = perf_counter() - turn.started
        if out is None or heard is None:
            return None, None
        return self.arrays, _train_metrics(heard, record)

    def _hear(self, turn: Turn, good: dict[int, RecordDict]) -> Heard | None:
        """Read the replies; one that cannot be used is taken out of `good`, with the reason. None: too few are left."""
        assert self._form is not None
        assert self.model is not None
        if self._rows is None or len(self._rows) < len(good):
            self._rows = self._form.zeros(len(good))  # kept, since fresh memory is slow

        def also(place: int, content: RecordDict) -> None:
            if self._correcting is not None:
                self.memo = self._correcting.hear(turn.index, place, content, self.memo)
            if wire.metrics_in(content).get(wire.LOST):
                turn.notes.append(f"{self.names[place]} has lost what it kept from earlier rounds, and begins anew")

        asked_for = wanted(self.method, self.measure)
        reader = Reader(self._form, self.model, asked_for, self.cells, turn.sums, also)
        heard, failed = reader.read(good, self._rows)
        turn.failed |= failed
        for place in failed:
            del good[place]
        if heard is None:
            return None
        self.seen |= {self.names[place] for place in heard.positions}
        return heard if len(heard.positions) >= turn.needed else None

    def _step(self, turn: Turn, heard: Heard, record: dict[str, Any]) -> Aggregate | None:
        """Weigh the updates and take the server step; None where too few clients are left."""
        chosen = self._acting(turn.index)
        leaning = self._settled(turn, heard)
        fairness: dict[str, Any] = {}
        if heard.sums is not None and self.cells is not None:
            told = Told(self.cells, heard.sums, [leaning], {})
            fairness = told.fairness(chosen, np.arange(len(heard.positions)))
        if self._layout is None:
            assert self._form is not None
            self._layout = read_updates(heard.rows, self._form.shape.layers).layout
        clients = [self.names[place] for place in heard.positions]
        opened = open_round(
            chosen,
            Updates(self._layout, (heard.rows,), len(heard.rows)),
            losses=heard.trained if "losses" in wants_trained(chosen) else heard.losses,
            sizes=heard.sizes if leaning is None or leaning.sizes is None else leaning.sizes,
            accuracies=heard.accuracies,
            **fairness,
            clients=clients,
            round=turn.index,
            state=self.state if chosen is self.method else None,
            lr=self._rate(turn.index),
            seed=self.seed,
        )
        try:
            weighed = opened.weigh(*_products(opened))
        except NoUsableClient:
            record["excluded"] = dict.fromkeys(clients, "its update or its numbers are not finite")
            return None
        if len(weighed.good) < turn.needed:
            record["excluded"] = {str(client): reason for client, reason in weighed.excluded.items()}
            return None
        direction = weighed.direction()
        lengths = chosen.server.lengths(self.state.server_memo if self.state is not None else {}, clients)
        trial = self._ask_about(turn, heard, weighed, direction, lengths) if lengths else None
        out = weighed.close(direction, own=True, ask=trial)
        if chosen is self.method:
            self.state, self.offset = out.state, out.evaluation_offset
        record |= self._record(out, heard, len(turn.asked), len(lengths))
        if heard.sums is not None and self.cells is not None:
            record |= said(leaning)
            down, up = Told(self.cells, heard.sums, [], {}).bytes(len(turn.asked), len(heard.positions))
            record["bytes_down"], record["bytes_up"] = record["bytes_down"] + down, record["bytes_up"] + up
        return out

    def _acting(self, index: int) -> Method:
        return self.method if self._correcting is None else self._correcting.acting(self.method, index)

    def _settled(self, turn: Turn, heard: Heard) -> Leaning | None:
        """The objective's part in the round, for the clients that are heard."""
        if not self.method.objective.grouped or heard.sums is None:
            return None
        if turn.leaning is None:  # every client leant by itself, on what it sent; the server follows
            return self._lean(turn.index, heard.positions, heard.sums)
        if turn.leaning.sizes is None:
            return turn.leaning
        rows = [turn.told.index(place) for place in heard.positions]
        return Leaning(turn.leaning.tables, turn.leaning.memo, sizes=turn.leaning.sizes[rows], facts=turn.leaning.facts)

    def _ask_about(
        self, turn: Turn, heard: Heard, weighed: Weighed, direction: list[Tensor], lengths: Sequence[float]
    ) -> Callable[[float], Floats]:
        """One further message a client: its losses at every length of the step that may be asked for.

        A client that does not answer is judged neither way: its loss is taken to fall as the updates predict, if they
        do, and else to stay.
        """
        assert self._form is not None
        shared = RecordDict({wire.ARRAYS: self.arrays, wire.DIRECTION: self._form.write(direction[0])})
        places = {place: row for row, place in enumerate(turn.asked)}
        present = [heard.positions[row] for row in weighed.good.tolist()]
        contents = {}
        for place in present:
            task = {**self.task(turn.index, turn.asked, places[place]), wire.LENGTHS: list(lengths)}
            contents[place] = RecordDict({**shared, wire.TASK: wire.write_task(task)})
        exchange = Exchange.to(self.roster, wire.TRIAL, contents, self.timeout)
        found = exchange.over(self._grid)
        turn.notes += found.notes
        falls = np.maximum(_falls(weighed), 0.0)
        table = {}
        for row, place in enumerate(present):
            try:
                if place in found.failed:
                    raise Unusable(found.failed[place])
                table[place] = wire.numbers_in(found.good[place], wire.TRIAL_LOSSES, len(lengths))
            except Unusable as error:
                turn.notes.append(f"{self.names[place]} did not judge the step's length: {error}")
                table[place] = weighed.moment.losses[row] - np.asarray(lengths) * falls[row]
        answers = np.array([table[place] for place in present])

        def ask(length: float) -> Floats:
            losses = answers[:, list(lengths).index(length)]
            return np.where(np.isfinite(losses), losses, np.inf)  # a step that breaks a client's loss is a bad step

        return ask

    def _record(self, out: Aggregate, heard: Heard, asked: int, lengths: int) -> dict[str, Any]:
        assert self._form is not None
        size, answered = self._form.shape.parameters * 4, len(heard.positions)
        places = {name: place for place, name in enumerate(self.names)}
        return {
            "losses": [] if heard.losses is None else heard.losses.tolist(),
            "answered": answered,
            "coefficients": out.coefficients.tolist(),
            **out.diagnostics.record(),
            "remembered_clients": [places[str(name)] for name in out.diagnostics.clients[answered:]],
            "bytes_down": size * asked + 2 * size * answered * bool(lengths),
            "bytes_up": size * answered + 8 * answered * (1 + lengths),
        }

    def _correct(self, turn: Turn, record: dict[str, Any]) -> None:
        """FedCorr, after a round: where an iteration or the second stage ends, noisy clients correct their labels."""
        correcting = self._correcting
        assert correcting is not None
        record["stage"] = correcting.course.stage(turn.index)
        if not correcting.course.judges(turn.index):
            return
        self.memo, noisy = correcting.judge(self.memo, self.seed, turn.index)
        here = self.roster.connected
        tasks = {place: self.task(turn.index, [place], 0) | correcting.order(turn.index, self.seed) for place in noisy}
        shared = {wire.ARRAYS: self.arrays}
        contents = {
            place: RecordDict({**shared, wire.TASK: wire.write_task(task)})
            for place, task in tasks.items()
            if place in here
        }
        exchange = Exchange.to(self.roster, wire.CORRECT, contents, self.timeout)
        found = exchange.over(self._grid)
        self.memo, changed, failed = correcting.corrected(self.memo, found.good, turn.index)
        for place, reason in {**found.failed, **failed}.items():
            record["notes"].append(f"{self.names[place]} did not correct its labels: {reason}")
        levels = self.memo["levels"][noisy].tolist()
        record["correction"] = {"noisy": noisy, "levels": levels, "changed": changed}

    # ---- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message to every connected client, in the rounds in which an evaluation is due."""
        self._evaluation = None
        due = self.evaluate_every and server_round % self.evaluate_every == 0
        if not (due or (self.evaluate_every and server_round == self._last)):
            return []
        self._take(arrays)
        assert self._form is not None
        self._await_nodes(grid, 1)
        config[wire.ROUND] = server_round
        record = self.arrays if self.offset is None else self._form.write(self.evaluated)
        task = wire.write_task({**self._about(server_round), **self.evaluation_task(server_round)})
        content = RecordDict({wire.ARRAYS: record, wire.CONFIG: config, wire.TASK: task})
        places = [place for place in sorted(self.roster.connected) if place not in self._silent]
        self._evaluation = Exchange.to(self.roster, wire.EVALUATE, dict.fromkeys(places, content), self.timeout)
        return self._evaluation.messages

    def evaluation_task(self, server_round: int) -> dict[str, Any]:
        """What clients are told for an evaluation besides the model; a subclass may add to it."""
        return {}

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Keep every client's own accuracy and loss; the pooled ones are returned."""
        if self._evaluation is None:
            return None
        found, self._evaluation = self._evaluation.sort(replies), None
        entry, self.predicted, failed = evaluation(server_round, self.roster, found.good, self.cells)
        entry["missing"] = {
            self.names[place]: reason for place, reason in {**self._silent, **found.failed, **failed}.items()
        }
        for client, reason in entry["missing"].items():
            log(WARNING, "evaluation after round %d: %s: %s", server_round, client, reason)
        self.evaluations.append(entry)
        metrics = served(entry)
        if metrics is not None:
            mean, worst = 100 * np.nanmean(entry["accuracies"]), 100 * np.nanmin(entry["accuracies"])
            log(
                INFO, "after round %d: clients get %.1f%% right on average, the worst %.1f%%", server_round, mean, worst
            )
        return metrics


def _products(opened: Opened) -> tuple[Floats, list[Floats]]:
    """Inner products of the updates with each other and with the remembered ones, where anybody is away."""
    given, memory = opened.given, opened.memory
    past = memory.pieces(given) if len(memory.absent(opened.ids, opened.index, np.inf)) else []
    own, rest = settle(given, past, to_numpy(launch(given, past)))
    if not past and not np.isfinite(np.diagonal(own, axis1=1, axis2=2)).all():  # whoever sent that is away as well
        past = memory.pieces(given)
        own, rest = settle(given, past, to_numpy(launch(given, past)))
    return own, rest


def _falls(weighed: Weighed) -> Floats:
    """By how much the updates predict each present client's loss to fall along the whole step."""
    dots = np.einsum("bij,bj->i", weighed.moment.gram[:, : weighed.moment.present], weighed.coefficients)
    return np.asarray(dots / (weighed.opened.lr or 1.0))


def _train_metrics(heard: Heard, record: Mapping[str, Any]) -> MetricRecord:
    found: dict[str, Any] = {"clients": len(heard.positions), "conflicts": record["conflicts"]}
    if heard.losses is not None:
        found |= {"loss": float(heard.losses.mean()), "worst-loss": float(heard.losses.max())}
    return MetricRecord(found)


def _arrays_in(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(entry[name]) for name in ("accuracies", "losses", "predicted") if name in entry}
