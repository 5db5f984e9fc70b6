"""The round loop: several replicas of one experiment, every client measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.aggregation import Aggregate, open_round
from evenhand.checks import EvenhandError, NoUsableClient
from evenhand.data import Dataset, Partition
from evenhand.engine.batches import Batches, Indices, Samples, gather, join, plan
from evenhand.engine.graphs import Replayed
from evenhand.engine.programs import choose_program
from evenhand.engine.sampling import Sampling
from evenhand.engine.training import Local, LocalWork, Shape, evaluate, samples_at_once
from evenhand.geometry import Layout, Updates, launch, read_updates, settle, to_numpy
from evenhand.methods import Method
from evenhand.objectives import Personal
from evenhand.state import State
from evenhand.streams import stream

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Replica:
    """One run of the experiment: a seed, a method and a partition, with its model and what its method carries."""

    seed: int
    method: Method
    partition: Partition
    model: Tensor
    state: State | None = None
    offset: Tensor | None = None  # of the model to evaluate, where a method evaluates another one
    personal: Tensor | None = None  # one model a client, where the objective trains them
    rounds: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    pooled: Samples | None = field(default=None, repr=False)

    @property
    def evaluated(self) -> Tensor:
        return self.model if self.offset is None else self.model + self.offset


@dataclass(frozen=True)
class Settings:
    """What all replicas share."""

    rounds: int
    work: LocalWork
    sampling: Sampling
    eval_every: int = 10
    measure: str = "all"  # what is measured in each round on the participants' own data (MEASURES)
    program: str = "auto"
    chunk: int | None = None  # rows trained at once; None is all
    keep_on: torch.device | None = None  # where absent clients' updates are kept, if not on the device


@dataclass(frozen=True)
class Ready:
    """A round before it begins: who is asked, who will fail, and which samples each row sees at each step."""

    round: int
    replicas: list[Replica]
    asked: list[Indices]  # per replica
    lost: list[np.ndarray[Any, np.dtype[np.bool_]]]
    edges: Indices  # where each replica's rows begin, and the last ones end
    owner: Tensor  # which replica each row belongs to
    even: bool  # all rows are trained at once and every replica has as many of them
    pieces: list[Batches]  # the rows' batches, a chunk each

    def rows(self, number: int) -> slice:
        """The rows of one replica."""
        return slice(int(self.edges[number]), int(self.edges[number + 1]))

    def parts(self) -> Iterator[tuple[slice, Batches]]:
        start = 0
        for batches in self.pieces:
            yield slice(start, start + len(batches.indices)), batches
            start += len(batches.indices)


@dataclass(frozen=True)
class Turn:
    """What one replica's server has in hand: the updates that arrived, the remembered ones, who answered."""

    given: Updates
    past: list[Updates]
    kept: Indices


NOBODY = "no client answered: the model stays"
MEASURES = {
    "all": "every participant's loss before and after the round, and so whose loss fell",
    "losses": "every participant's loss before the round",
    "needed": "nothing but what the method needs",
}


class Simulation:
    """Runs rounds; stops, saves and continues at any round without changing a number."""

    def __init__(
        self, dataset: Dataset, module: nn.Module, replicas: Sequence[Replica], settings: Settings, device: torch.device
    ) -> None:
        self.dataset, self.module, self.settings, self.device = dataset, module.to(device), settings, device
        self.inputs, self.targets = dataset.inputs.to(device), dataset.targets.to(device)
        self.shape = Shape.of(module)
        program = choose_program(module, settings.program, device)
        self.local = Local(program, self.shape, self.inputs, self.targets, settings.work)
        self.replayed = Replayed() if Replayed.possible(device, program) else None
        self._ahead: Ready | None = None  # the next round, prepared while the device works
        self._rows: Tensor | None = None
        self._layout: Layout | None = None
        self._held_owners: tuple[tuple[int, ...], Tensor] | None = None
        self._held_columns: tuple[Tensor, dict[str, list[float]], dict[str, Tensor]] | None = None
        self.replicas = list(replicas)
        # A GPU has room for all replicas at once; a CPU has its hands full with one, whose rows then stay in its cache.
        self.groups = [[replica] for replica in self.replicas] if device.type == "cpu" else [self.replicas]
        self.round = 0
        for replica in self.replicas:
            if len(replica.partition.train) == 0:
                raise EvenhandError("the partition has no clients")

    @cached_property
    def data_fingerprint(self) -> str:
        """Taken once: it reads the whole data set, and every checkpoint records it."""
        return self.dataset.fingerprint()

    def run(self, until: int | None = None, after_round: Callable[[Simulation], None] | None = None) -> None:
        """Play rounds up to `until` (default: all), evaluating on the way."""
        last = self.settings.rounds if until is None else min(until, self.settings.rounds)
        if self.round == 0 and not self.replicas[0].evaluations:
            self.evaluate()
        while self.round < last:
            self._play()
            self.round += 1
            if self.round % self.settings.eval_every == 0 or self.round == self.settings.rounds:
                self.evaluate()
            if after_round is not None:
                after_round(self)

    # ------------------------------------------------------------------------------------------------ one round

    def _play(self) -> None:
        for group in self.groups:
            self._play_together(group)

    def _play_together(self, replicas: list[Replica]) -> None:
        """One round of some replicas, whose rows are trained as one program."""
        started = perf_counter()
        ready = self._ahead
        if ready is None or ready.round != self.round:
            ready = self._prepare(self.round, replicas)
        if not len(ready.owner):  # nobody could be reached
            for replica in replicas:
                replica.rounds.append({"round": self.round, "asked": [], "lost": [], "note": NOBODY, "seconds": 0.0})
            return
        models = self._models(replicas)
        measuring = self.settings.measure != "needed" or any(_needs_losses(replica.method) for replica in replicas)
        updates, measured = self._train(models, ready, measuring)
        self._train_personal(models, ready)
        turns = [self._arrived(number, updates, ready) for number in range(len(replicas))]
        launched = [launch(turn.given, turn.past) if turn.kept.size else [] for turn in turns]
        if self.device.type != "cpu" and self.round + 1 < self.settings.rounds:
            self._ahead = self._prepare(self.round + 1, replicas)
        (losses, right), *products = to_numpy([measured, *itertools.chain(*launched)])
        for number, turn in enumerate(turns):
            own = [products.pop(0) for _ in launched[number]]
            self._serve(number, ready, turn, own, (losses, right) if measuring else None)
        if self.settings.measure == "all":
            self._see_who_fell(ready, turns, losses)
        seconds = (perf_counter() - started) / len(replicas)
        for replica in replicas:
            replica.rounds[-1]["seconds"] = seconds

    def _models(self, replicas: list[Replica]) -> Tensor:
        models = [replica.model for replica in replicas]
        return models[0].unsqueeze(0) if len(models) == 1 else torch.stack(models)

    def _prepare(self, index: int, replicas: list[Replica]) -> Ready:
        """Who takes part in a round and on which samples: known before the round begins."""
        sampling, work = self.settings.sampling, self.settings.work
        asked, lost, plans = [], [], []
        for replica in replicas:
            sizes = replica.partition.train.sizes
            here = sampling.draw(replica.seed, index, sizes)
            here = here[sizes[here] > 0]  # a client without training data has nothing to say
            asked.append(here)
            lost.append(sampling.failed(replica.seed, index, here))
            epochs = sampling.epochs(replica.seed, index, here, work.epochs)
            rng = stream(replica.seed, "batches", index)
            samples = [replica.partition.train[client] for client in here]
            plans.append(plan(samples, epochs=epochs, batch_size=work.batch_size, rng=rng))
        counts = [len(here) for here in asked]
        chunk = self.settings.chunk or max(1, sum(counts))
        steps = join(plans)
        pieces = [steps.part(slice(start, start + chunk)) for start in range(0, sum(counts), chunk)]
        return Ready(
            round=index,
            replicas=replicas,
            asked=asked,
            lost=lost,
            edges=np.cumsum([0, *counts]),
            owner=self._owners(tuple(counts)),
            even=len(set(counts)) == 1 and len(pieces) == 1,
            pieces=[Batches.of(piece, self.device) for piece in pieces],
        )

    def _owners(self, counts: tuple[int, ...]) -> Tensor:
        """Which replica each row belongs to; kept, since most rounds are alike."""
        if self._held_owners is None or self._held_owners[0] != counts:
            owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(self.device)
            self._held_owners = (counts, owner)
        return self._held_owners[1]

    def _columns(self, ready: Ready, pulls: Sequence[float]) -> dict[str, Tensor]:
        """What differs from row to row because it differs from replica to replica; kept like the owners."""
        work = self.settings.work
        momenta = [getattr(replica.method.objective, "client_momentum", work.momentum) for replica in ready.replicas]
        named = {"rates": [work.rate(ready.round)] * len(ready.replicas), "momentum": momenta, "pull": list(pulls)}
        if self._held_columns is None or self._held_columns[0] is not ready.owner or self._held_columns[1] != named:
            columns = {
                name: torch.tensor(values, device=self.device)[ready.owner].unsqueeze(1)
                for name, values in named.items()
                if name == "rates" or any(values)
            }
            self._held_columns = (ready.owner, named, columns)
        return self._held_columns[2]

    def _train(self, models: Tensor, ready: Ready, measuring: bool) -> tuple[Tensor, Tensor]:
        """Every row's update, and loss and accuracy of the model it received."""
        columns = self._columns(ready, [getattr(replica.method.objective, "mu", 0.0) for replica in ready.replicas])
        if self.replayed is None and (self._rows is None or len(self._rows) != len(ready.owner)):
            self._rows = torch.empty(len(ready.owner), self.shape.total, device=self.device)  # fresh memory is slow
        if len(ready.pieces) == 1:
            received = models if ready.even else models[ready.owner]
            return self._local_round(received, ready.pieces[0], columns, measuring, self._rows)
        updates = torch.empty(len(ready.owner), self.shape.total, device=self.device)
        measured = torch.zeros(2, len(updates), dtype=torch.float64, device=self.device)
        for part, batches in ready.parts():
            own = {name: column[part] for name, column in columns.items()}
            received = models if len(models) == 1 else models[ready.owner[part]]
            updates[part], measured[:, part] = self._local_round(received, batches, own, measuring)
        return updates, measured

    def _local_round(
        self, models: Tensor, batches: Batches, columns: dict[str, Tensor], measuring: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.replayed is None:
            return self.local.round(models, batches, **columns, measuring=measuring, out=out)
        key = ("round", batches.steps, batches.steady, batches.whole, measuring)
        updates, measured = self._replay(key, partial(self.local.round, measuring=measuring), models, batches, columns)
        return updates, measured

    def _replay(
        self,
        key: tuple[Any, ...],
        work: Callable[..., tuple[Tensor, ...]],
        models: Tensor,
        batches: Batches,
        columns: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """work(models, batches, **columns) as a graph that reads all these tensors from places of its own."""
        assert self.replayed is not None

        def captured(
            models: Tensor, indices: Tensor, weights: Tensor, shares: Tensor, **columns: Tensor
        ) -> tuple[Tensor, ...]:
            return work(models, replace(batches, indices=indices, weights=weights, shares=shares), **columns)

        return self.replayed(key, captured, {"models": models, **batches.tensors(), **columns})

    def _measure(self, models: Tensor, ready: Ready, rows: slice) -> Floats:
        """Loss at some rows' own data of one model, or of every replica's."""
        found = []
        for part, batches in ready.parts():
            here = slice(max(part.start, rows.start), min(part.stop, rows.stop))
            if here.start >= here.stop:
                continue
            whole = here == part
            piece = batches if whole else batches.part(slice(here.start - part.start, here.stop - part.start))
            received = models if len(models) == 1 or (ready.even and whole) else models[ready.owner[here]]
            found.append(self._measure_piece(received, piece)[0])
        return to_numpy([torch.cat(found)])[0]

    def _measure_piece(self, models: Tensor, batches: Batches) -> Tensor:
        if self.replayed is None:
            return self.local.measure(models, batches)
        return self._replay(("measure",), lambda *given: (self.local.measure(*given),), models, batches, {})[0]

    def _train_personal(self, models: Tensor, ready: Ready) -> None:
        """Ditto: the asked clients' own models take the same steps, pulled towards the received model."""
        if not any(isinstance(replica.method.objective, Personal) for replica in ready.replicas):
            return
        received = models[ready.owner]
        rows = received.clone()
        for number, replica in enumerate(ready.replicas):
            if isinstance(replica.method.objective, Personal):
                if replica.personal is None:
                    replica.personal = replica.model.repeat(replica.partition.clients, 1)
                chosen = torch.from_numpy(ready.asked[number]).to(self.device)
                rows[ready.rows(number)] = replica.personal[chosen]
        columns = self._columns(ready, [getattr(replica.method.objective, "lam", 0.0) for replica in ready.replicas])
        for part, batches in ready.parts():
            own = {name: column[part] for name, column in columns.items()}
            self.local.train(rows[part], received[part], batches, **own)
        for number, replica in enumerate(ready.replicas):
            if replica.personal is not None:
                chosen = torch.from_numpy(ready.asked[number]).to(self.device)
                replica.personal[chosen] = rows[ready.rows(number)]

    def _arrived(self, number: int, updates: Tensor, ready: Ready) -> Turn:
        """The rows of a replica that arrived, in the form in which `aggregate` reads them."""
        rows, lost = updates[ready.rows(number)], ready.lost[number]
        if self._layout is None:
            self._layout = read_updates(updates, self.shape.layers).layout
        given, kept = Updates(self._layout, (rows,), len(rows)), np.flatnonzero(~lost)
        if lost.any():
            given = given.select(kept.tolist())
        state = ready.replicas[number].state
        return Turn(given, [] if state is None else state.memory.pieces(given), kept)

    def _serve(
        self, number: int, ready: Ready, turn: Turn, products: list[Floats], measured: tuple[Floats, Floats] | None
    ) -> None:
        """The server's part of a round for one replica: rule, server step, record."""
        replica, asked, lost = ready.replicas[number], ready.asked[number], ready.lost[number]
        record: dict[str, Any] = {"round": self.round, "asked": asked.tolist(), "lost": asked[lost].tolist()}
        replica.rounds.append(record)
        if not len(turn.kept):
            record["note"] = NOBODY
            return
        trials, rows = 0, ready.rows(number)

        def trial_losses(trial: Tensor) -> Floats:
            nonlocal trials
            trials += 1
            return self._measure((replica.model - trial).unsqueeze(0), ready, rows)[turn.kept]

        clients = asked[turn.kept]
        losses, right = (None, None) if measured is None else (part[rows][turn.kept] for part in measured)
        opened = open_round(
            replica.method,
            turn.given,
            losses=losses,
            sizes=replica.partition.train.sizes[clients].astype(np.float64),
            accuracies=right,
            clients=clients.tolist(),
            round=self.round,
            state=replica.state,
            lr=self.settings.work.rate(self.round),
            evaluate=trial_losses,
            seed=replica.seed,
        )
        try:
            weighed = opened.weigh(*settle(turn.given, turn.past, products))
        except NoUsableClient as error:
            raise NoUsableClient(f"seed {replica.seed}: {error}") from error
        out = weighed.close(weighed.direction(), own=True, keep_on=self.settings.keep_on)
        replica.model = replica.model - out.update
        replica.state, replica.offset = out.state, out.evaluation_offset
        record |= self._record(out, losses, len(asked), len(clients), trials)

    def _see_who_fell(self, ready: Ready, turns: list[Turn], before: Floats) -> None:
        """The share of each replica's participants whose own loss is lower now."""
        after = self._measure(self._models(ready.replicas), ready, slice(0, len(ready.owner)))
        for number, turn in enumerate(turns):
            if len(turn.kept):
                rows = ready.rows(number)
                ready.replicas[number].rounds[-1]["fell"] = float((after[rows] < before[rows])[turn.kept].mean())

    def _record(self, out: Aggregate, losses: Floats | None, asked: int, answered: int, trials: int) -> dict[str, Any]:
        size = self.shape.parameters * 4
        found = out.diagnostics
        present = int((found.ages == 0).sum())
        return {
            "losses": [] if losses is None else losses.tolist(),
            "answered": answered,
            "coefficients": out.coefficients.tolist(),
            "conflicts": int(found.conflicts[:present].sum()),
            "layer_conflicts": found.layer_conflicts[:, :present].sum(axis=1).tolist(),
            "direction": found.direction_norm,
            "remembered": len(found.ages) - present,
            "excluded": {str(client): reason for client, reason in found.excluded.items()},
            "notes": list(found.notes),
            "bytes_down": size * (asked + trials * answered),
            "bytes_up": size * answered + 8 * answered * (1 + trials),
        }

    # ------------------------------------------------------------------------------------------------ evaluation

    def _losses(self, model: Tensor, samples: Samples) -> tuple[Floats, Floats]:
        """Mean loss and accuracy of one model on several clients' samples; NaN for a client without any."""
        at_once = samples_at_once(self.local.program, self.device)
        sums = evaluate(self.module, self.shape, model, self.inputs, self.targets, samples, at_once)
        both = sums.cpu().numpy() / np.where(samples.counts > 0, samples.counts, np.nan)
        return both[0], both[1]

    def _personal_losses(self, replica: Replica) -> tuple[Floats, Floats]:
        """Each client's own model on its own test data."""
        assert replica.personal is not None
        found = [
            self._losses(model, gather([replica.partition.test[client]], self.device))
            for client, model in enumerate(replica.personal)
        ]
        return np.array([losses[0] for losses, _ in found]), np.array([right[0] for _, right in found])

    def evaluate(self) -> None:
        """Every client's own test data, all clients, and by their weights the pooled test set."""
        for replica in self.replicas:
            if replica.pooled is None:
                replica.pooled = gather(
                    [replica.partition.test[k] for k in range(replica.partition.clients)], self.device
                )
            losses, accuracies = (
                self._personal_losses(replica)
                if replica.personal is not None
                else self._losses(replica.evaluated, replica.pooled)
            )
            counts = replica.pooled.counts
            replica.evaluations.append(
                {
                    "round": self.round,
                    "accuracies": accuracies,
                    "losses": losses,
                    "pooled_accuracy": float(np.nansum(accuracies * counts) / max(counts.sum(), 1)),
                    "pooled_loss": float(np.nansum(losses * counts) / max(counts.sum(), 1)),
                }
            )


def _needs_losses(method: Method) -> bool:
    """Whether the rule or the server step asks for anything measured on the participants' data."""
    return bool({"losses", "accuracies"} & set(method.rule.inputs))
