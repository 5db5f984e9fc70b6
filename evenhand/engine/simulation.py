"""The round loop: several replicas of one experiment, every client measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.aggregation import Aggregate, Opened, Weighed
from evenhand.checks import EvenhandError, NoUsableClient
from evenhand.constraints import Leaning, Sums, View
from evenhand.data import Dataset
from evenhand.engine.batches import Samples, gather
from evenhand.engine.choice import choose_program
from evenhand.engine.correction import Course, log_probabilities
from evenhand.engine.foresight import Foresight, Shares, as_foreseen
from evenhand.engine.groups import Told, cells_of, check_groups, looks_at_groups, said, sharpness, told_columns
from evenhand.engine.preparation import Preparation
from evenhand.engine.programs import layers_of
from evenhand.engine.rounds import Begun, Floats, Foreseen, Ready, Replica, Settings, Turn, Verdict
from evenhand.engine.training import Columns, Local, Shape, evaluate, pulling, samples_at_once
from evenhand.engine.wishes import (
    SEEN,
    likeness_of,
    needs_losses,
    pace_of,
    pull_of,
    trains_personal,
    wants_trained,
)
from evenhand.engine.worker import Then, Worker
from evenhand.geometry import combine_within, launch, products_within, settle, summed
from evenhand.holdings import Holdings, class_names
from evenhand.methods import Method
from evenhand.objectives import Correction
from evenhand.transfer import Awaited, sent, to_numpy
from evenhand.updates import Layout, Updates, read_updates

NOBODY = "no client answered: the model stays"
DIVERGED = "no client's update is finite: the model stays"


class Simulation:
    """Runs rounds; stops, saves and continues at any round without changing a number."""

    def __init__(
        self, dataset: Dataset, module: nn.Module, replicas: Sequence[Replica], settings: Settings, device: torch.device
    ) -> None:
        self.dataset, self.module, self.settings, self.device = dataset, module.to(device), settings, device
        self.inputs, self.targets = dataset.inputs.to(device), dataset.targets.to(device)
        self.shape = Shape.of(module)
        program = choose_program(module, settings.program, device, settings.precision, self.inputs)
        self.cells, codes = cells_of(dataset)
        where = None if codes is None else codes.to(device)
        self.local = Local(
            program,
            self.shape,
            self.inputs,
            self.targets,
            settings.work,
            where,
            0 if self.cells is None else self.cells.count,
            settings.precision,
        )
        self.worker = Worker(self.local)
        self.foresight = Foresight(len(self.shape.layers), device)
        self._ahead: Ready | None = None  # the next round, prepared while the device works
        self._begun: Begun | None = None  # and begun before this one is written down
        self._rows: Tensor | None = None
        self._layout: Layout | None = None
        self._held_columns: tuple[Tensor, dict[str, list[float]], Columns] | None = None
        self.replicas = list(replicas)
        # A GPU has room for all replicas at once, and works while this program prepares rounds and writes them down; a
        # CPU has its hands full with one, whose rows then stay in its cache.
        self.together = device.type != "cpu"
        self.round = 0
        for replica in self.replicas:
            if len(replica.partition.train) == 0:
                raise EvenhandError("the partition has no clients")
            check_groups(replica.method, dataset, self.cells)
            self._check_layers(replica.method)
            self._set_course(replica)
        self.preparation = Preparation(dataset, self.replicas, settings, self.worker)
        if len({replica.method.training for replica in self.replicas}) > 1:
            raise EvenhandError("replicas that train together must all be federated, alone or pooled")

    def _check_layers(self, method: Method) -> None:
        found, strengths = len(layers_of(self.module)), likeness_of(method)
        if len(strengths) > found:
            raise EvenhandError(
                f"{method.name} compares the first {len(strengths)} layers, and the model has {found}; take "
                f"layers={found}"
            )

    def _set_course(self, replica: Replica) -> None:
        if not isinstance(replica.method.objective, Correction):
            return
        if replica.method.training != "federated":
            raise EvenhandError(f"{replica.method.name} has no rounds of clients in which labels could be corrected")
        if replica.method.objective.mixup > 0.0 and not self.dataset.inputs.is_floating_point():
            raise EvenhandError(f"the tokens of {self.dataset.name} cannot be mixed; take mixup=0")
        given, held = replica.partition.labels, replica.trained
        replica.course = Course(replica.method.objective, held, self.settings.rounds)
        replica.memo = replica.course.start(self.dataset.labels[held.indices] if given is None else given)

    @cached_property
    def data_fingerprint(self) -> str:
        """Taken once: it reads the whole data set, and every checkpoint records it."""
        return self.dataset.fingerprint()

    def facts(self) -> dict[str, Any]:
        """What a reader wants to know of the data and the model."""
        return {
            "data": self.dataset.name,
            "samples": len(self.dataset),
            "data_fingerprint": self.data_fingerprint,
            "partition_fingerprints": {str(one.seed): one.partition.fingerprint() for one in self.replicas},
            "classes": class_names(self.dataset),
            "parameters": self.shape.parameters,
            "layers": list(self.shape.layers),
        }

    def holdings(self, replica: Replica) -> Holdings:
        """Who holds what."""
        return Holdings.of(replica.partition, self.dataset)

    def run(self, until: int | None = None, after_round: Callable[[Simulation], None] | None = None) -> None:
        """Play rounds up to `until` (default: all), evaluating on the way."""
        last = self.settings.rounds if until is None else min(until, self.settings.rounds)
        if self.round == 0 and not self.replicas[0].evaluations:
            self.evaluate()
        while self.round < last and not all(replica.diverged for replica in self.replicas):
            self._play(last)
            self.round += 1
            if self.round % self.settings.eval_every == 0 or self.round == self.settings.rounds:
                self.evaluate()
            if after_round is not None:
                after_round(self)

    # ------------------------------------------------------------------------------------------------ one round

    def _play(self, last: int) -> None:
        if self.together:  # one that stands still goes on in the others' program, whose shape is theirs
            self._play_together(self.replicas, last)
            return
        for replica in self.replicas:
            if not replica.diverged:
                self._play_together([replica], last)

    def _play_together(self, replicas: list[Replica], last: int) -> None:
        """One round of some replicas, whose rows are trained as one program."""
        started = perf_counter()
        begun, self._begun = self._begun, None
        if begun is None or not begun.fits(self.round):
            ready = self._ahead
            if ready is None or ready.round != self.round:
                ready = self.preparation.round(self.round, replicas)
            if not len(ready.owner):  # nobody could be reached
                nobody = {"round": self.round, "asked": [], "lost": [], "note": NOBODY, "seconds": 0.0}
                for replica in replicas:
                    replica.rounds.append(nobody.copy())
                self._correct(replicas)
                return
            if replicas[0].method.training == "alone":
                self._play_alone(ready)
                return
            begun = self._begin(ready)
        self._finish(begun, last)
        seconds = (perf_counter() - started) / len(replicas)
        for replica in replicas:
            replica.rounds[-1]["seconds"] = seconds

    def _begin(self, ready: Ready, received: list[Tensor] | None = None) -> Begun:
        """Set the clients of a round to work, and ask for what the server wants to know; changes no replica's model.

        received: the models that the clients get, where they are not the replicas' yet.
        """
        replicas = ready.replicas
        received = [replica.model for replica in replicas] if received is None else received
        models = self._models(received)
        measuring = self.settings.measure != "needed" or any(needs_losses(replica.method) for replica in replicas)
        told = self._tell(models[ready.owner] if len(models) > 1 and not ready.even else models, ready)
        shares = self.foresight.shares(ready) if self.together and told is None else None
        updates, measured, *known = self._train(models, ready, measuring and told is None, told, shares)
        turns = self._arrived(updates, ready) if shares is None else []  # not needed if all goes well
        heard = [turn for turn in turns if turn.kept.size]
        past = [found for turn in heard for found in launch(turn.given, turn.past, own=False)]
        if known:  # what was measured and the turns' own products, in one piece
            rows = len(updates) // len(replicas)
            own = (len(self._layout_of(updates).blocks), rows, rows)
            shapes = [tuple(measured.shape), *[own] * len(replicas), *(tuple(found.shape) for found in past)]
            found = Awaited([known[0], *past], shapes)
        else:
            found = Awaited([measured, *(launch(turn.given)[0] for turn in heard), *past])
        foreseen = None if shares is None else shares.foreseen(known[1])
        return Begun(ready, received, models, updates, told, measuring, turns, found, foreseen)

    def _finish(self, begun: Begun, last: int) -> None:
        """The server's part of a round; the next one is begun before this one is written down, where that can be.

        Where the outcome can be foreseen, the next one is begun before the server hears of this one.
        """
        ready, told = begun.ready, begun.told
        self._remember(begun.models, begun.updates, ready)
        self._train_personal(begun.models, ready)
        ahead = self._known_ahead(ready.replicas)
        self._ahead = self.preparation.round(self.round + 1, ready.replicas) if ahead else None
        if begun.foreseen is not None and ahead:
            after = self._go_on(begun, begun.foreseen.models, last)
            self.preparation.stock(self.round + 2, ready.replicas)
            answers = begun.found.numpy()
            records = as_foreseen(begun, begun.foreseen, answers)
            if records is not None:
                self._settle(begun, begun.foreseen, answers[0], records)
                if after is not None:
                    self._see_who_fell(begun, after.numpy()[0], answers[0][0])
                return
            self._begun = None  # the next round has taken this one's place on the device
            begun = self._begin(ready)
        if not begun.turns:
            begun = replace(begun, turns=self._arrived(begun.updates, ready))
        (losses, right), *products = begun.found.numpy()
        measured = told.measured if told is not None else (losses, right) if begun.measuring else None
        verdicts = self._judge(begun, products, measured)
        outcomes = self._serve(begun, verdicts)
        after = self._go_on(begun, [replica.model for replica in ready.replicas], last)
        for number, (verdict, out) in enumerate(zip(verdicts, outcomes, strict=True)):
            self._write_down(number, begun, verdict, out)
        if after is not None and measured is not None:
            self._see_who_fell(begun, after.numpy()[0], measured[0])
        self._correct(ready.replicas)

    def _settle(self, begun: Begun, foreseen: Foreseen, measured: Floats, records: list[dict[str, Any]]) -> None:
        """A round went as foreseen: every replica's new model and record."""
        ready, count = begun.ready, len(begun.ready.asked[0])
        asked, coefficients = [own.tolist() for own in ready.asked], foreseen.coefficients.tolist()
        losses = measured[0].reshape(-1, count).tolist() if begun.measuring else [[] for _ in asked]
        for number, replica in enumerate(ready.replicas):
            assert replica.state is not None
            replica.model, replica.state = foreseen.models[number], replace(replica.state, round=self.round)
            record = {"round": self.round, "asked": asked[number], "lost": []}
            replica.rounds.append(record | self._told(losses[number], coefficients[number], records[number], count))

    def _go_on(self, begun: Begun, models: list[Tensor], last: int) -> Awaited | None:
        """With the models after a round: begin the next one where that can be; the clients' losses, if wanted."""
        after = None
        if self.settings.measure == "all":
            after = Awaited([self._measure(self._models(models), begun.ready, slice(0, len(begun.ready.owner)))])
        if self._ahead is not None and self._may_begin(self._ahead, last):
            self._begun = self._begin(self._ahead, models)
        return after

    def _judge(
        self, begun: Begun, products: list[Floats], measured: tuple[Floats, Floats] | None
    ) -> list[Verdict | None]:
        """What the rule of every replica answers; None where nobody was heard."""
        trained = self._after_training(begun.models, begun.updates, begun.ready)
        heard = sum(turn.kept.size > 0 for turn in begun.turns)
        own, past = iter(products[:heard]), iter(products[heard:])
        return [
            self._weigh(number, begun, [next(own), *itertools.islice(past, len(turn.past))], measured, trained)
            if turn.kept.size
            else None
            for number, turn in enumerate(begun.turns)
        ]

    def _known_ahead(self, replicas: list[Replica]) -> bool:
        """Whether the next round's clients and batches can be prepared while the device works on this one."""
        settled = all(replica.course is None or replica.course.stage(self.round) == 3 for replica in replicas)
        return self.together and self.round + 1 < self.settings.rounds and settled

    def _may_begin(self, ready: Ready, last: int) -> bool:
        """Whether a round's clients can be set to work without a look at what they say and without a change to them."""
        methods = [replica.method for replica in ready.replicas]
        told = self.cells is not None and any(map(looks_at_groups, methods))
        return ready.round < last and len(ready.owner) > 0 and not told

    def _rate(self, replica: Replica, round: int) -> float:
        """The learning rate of a replica's clients."""
        return self.settings.work.rate(round, replica.lr)

    def _models(self, models: list[Tensor]) -> Tensor:
        """As rows."""
        return models[0].unsqueeze(0) if len(models) == 1 else torch.stack(models)

    def _columns(self, ready: Ready, pulls: Sequence[float], told: Told | None = None) -> Columns:
        """What differs from row to row because it differs from replica to replica; kept like the owners."""
        work = self.settings.work
        momenta = [getattr(replica.method.objective, "client_momentum", work.momentum) for replica in ready.replicas]
        given = [(replica.method, self._rate(replica, ready.round)) for replica in ready.replicas]
        rates = [pace_of(method, rate) * rate for method, rate in given]
        sharp = [sharpness(replica.method) if told is not None else 0.0 for replica in ready.replicas]
        named = {
            "rates": rates,
            "momentum": momenta,
            "sharpness": sharp,
            **pulling(rates, pulls, momenta, work),
        }
        if self._held_columns is None or self._held_columns[0] is not ready.owner or self._held_columns[1] != named:
            columns = Columns(
                **{
                    name: sent(np.array(values), torch.float32, self.device)[ready.owner].unsqueeze(1)
                    for name, values in named.items()
                    if name == "rates" or any(values)
                }
            )
            self._held_columns = (ready.owner, named, columns)
        found = self._held_columns[2]
        return found if told is None else replace(found, **told.columns)

    def _tell(self, models: Tensor, ready: Ready) -> Told | None:
        """Where a method looks at groups: what the received models do to them, and what the rows are told."""
        if self.cells is None or not any(looks_at_groups(replica.method) for replica in ready.replicas):
            return None
        sharp = torch.tensor([sharpness(replica.method) for replica in ready.replicas], device=self.device)
        column, found = sharp[ready.owner].unsqueeze(1), []
        for part, batches in ready.parts():
            own = models if len(ready.pieces) == 1 or len(models) == 1 else models[part]
            found.append(self.worker.survey(own, batches, column[part]))
        said = to_numpy([torch.cat(found)])[0]
        classes = self.cells.classes
        sums = Sums(said[..., :classes], said[..., classes], said[..., classes + 1 :])
        leanings = [self._lean(number, ready, sums) for number in range(len(ready.replicas))]
        told = [(ready.answering(number), leaning) for number, leaning in enumerate(leanings) if leaning is not None]
        return Told(self.cells, sums, leanings, told_columns(self.cells, len(ready.owner), told, self.device))

    def _lean(self, number: int, ready: Ready, sums: Sums) -> Leaning | None:
        """What a replica's objective makes of its clients' sums."""
        replica, kept = ready.replicas[number], np.flatnonzero(~ready.lost[number])
        assert self.cells is not None
        if not replica.method.objective.grouped or not len(kept):
            return None
        own = sums.rows(ready.answering(number))
        clients = ready.asked[number][kept]
        shares = replica.method.rule.shares(replica.trained.sizes[clients].astype(np.float64))
        view = View(self.cells, own, tuple(clients.tolist()), shares, ready.round)
        leaning = replica.method.objective.lean(view, replica.memo)
        replica.memo = leaning.memo
        return leaning

    def _train(
        self, models: Tensor, ready: Ready, measuring: bool, told: Told | None, shares: Shares | None
    ) -> tuple[Tensor, ...]:
        """Every row's update, and loss and accuracy of the model it received; where all arrive, `_answers`."""
        pulls = [pull_of(replica.method, self._rate(replica, ready.round)) for replica in ready.replicas]
        columns = self._columns(ready, pulls, told)
        columns = self._looking_back(models, ready, self._leashed(ready, columns))
        if self.worker.replayed is None and (self._rows is None or len(self._rows) != len(ready.owner)):
            self._rows = torch.empty(len(ready.owner), self.shape.total, device=self.device)  # fresh memory is slow
        if len(ready.pieces) == 1:
            received = models if ready.even else models[ready.owner]
            then = self._answers(len(ready.replicas)) if ready.alike else None
            beside = {} if shares is None else {"counting": shares.there}
            return self.worker.round(received, ready.pieces[0], columns, measuring, self._rows, then, beside)
        updates = torch.empty(len(ready.owner), self.shape.total, device=self.device)
        measured = torch.zeros(2, len(updates), dtype=torch.float64, device=self.device)
        for part, batches in ready.parts():
            received = models if len(models) == 1 else models[ready.owner[part]]
            found = self.worker.round(received, batches, columns.part(part), measuring)
            updates[part], measured[:, part] = found[0], found[1]
        return updates, measured

    def _measure(self, models: Tensor, ready: Ready, rows: slice) -> Tensor:
        """Loss at some rows' own data of one model, or of every replica's."""
        found = []
        for part, batches in ready.parts():
            here = slice(max(part.start, rows.start), min(part.stop, rows.stop))
            if here.start >= here.stop:
                continue
            whole = here == part
            piece = batches if whole else batches.part(slice(here.start - part.start, here.stop - part.start))
            received = models if len(models) == 1 or (ready.even and whole) else models[ready.owner[here]]
            found.append(self.worker.measure(received, piece)[0])
        return torch.cat(found)

    def _leashed(self, ready: Ready, columns: Columns) -> Columns:
        """FedCorr: with each row's pull towards the received model, which follows from how noisy it seems."""
        pulls = np.zeros((len(ready.owner), 1), dtype=np.float32)
        for number, replica in enumerate(ready.replicas):
            if replica.course is not None:
                asked = ready.asked[number]
                pulls[ready.rows(number), 0] = replica.course.pulls(ready.round, asked, replica.memo)
        return replace(columns, leash=torch.from_numpy(pulls).to(self.device)) if pulls.any() else columns

    def _looking_back(self, models: Tensor, ready: Ready, columns: Columns) -> Columns:
        """FedCKA: with each row's previous model, and how strongly its first layers are held against it."""
        strengths = [likeness_of(replica.method) for replica in ready.replicas]
        depth = max(len(entry) for entry in strengths)
        if not depth:
            return columns
        padded = [[*entry, *[0.0] * (depth - len(entry))] for entry in strengths]
        previous = models[ready.owner]
        for number, replica in enumerate(ready.replicas):
            for row, client in enumerate(ready.asked[number].tolist(), start=int(ready.edges[number])):
                if client in replica.previous:
                    previous[row] = replica.previous[client]
        strength = torch.tensor(padded, device=self.device)[ready.owner]
        return replace(columns, likeness=strength, previous=previous)

    def _remember(self, models: Tensor, updates: Tensor, ready: Ready) -> None:
        """What is kept of the models of those who answered: themselves (FedCKA), what they say of labels (FedCorr)."""
        for number, replica in enumerate(ready.replicas):
            judging = replica.course if replica.course and replica.course.stage(ready.round) == 1 else None
            if judging is None and not likeness_of(replica.method):
                continue
            own = models[number] - updates[ready.rows(number)]
            for row in np.flatnonzero(~ready.lost[number]).tolist():
                client = int(ready.asked[number][row])
                if judging is None:
                    replica.previous[client] = own[row].clone()
                else:
                    replica.memo = judging.hear(replica.memo, client, self._said(replica, own[row], client))

    def _said(self, replica: Replica, model: Tensor, client: int) -> Floats:
        """What a model says of a client's training data."""
        samples = torch.from_numpy(replica.trained[client]).to(self.device)
        tensors = {name: view[0] for name, view in self.shape.views(model.unsqueeze(0)).items()}
        at_once = samples_at_once(self.local.program, self.device)
        return log_probabilities(self.module, tensors, self.inputs[samples], at_once)

    def _correct(self, replicas: list[Replica]) -> None:
        """FedCorr, after a round: where an iteration or the second stage ends, judge the clients and correct labels."""
        for replica in replicas:
            course = replica.course
            if course is None:
                continue
            record, stage = replica.rounds[-1], course.stage(self.round)
            record["stage"] = stage
            if not course.judges(self.round):
                continue
            if stage == 1:
                replica.memo = course.judge(replica.memo, replica.seed)
            noisy, changed = np.flatnonzero(replica.memo["noisy"]).tolist(), 0
            for client in noisy:
                said = self._said(replica, replica.model, client)
                replica.memo, count = course.correct(replica.memo, client, said, all_samples=stage == 2)
                changed += count
            levels = replica.memo["levels"][noisy].tolist()
            wrong = int((replica.memo["labels"] != self.dataset.labels[replica.trained.indices]).sum())
            record["correction"] = {"noisy": noisy, "levels": levels, "changed": changed, "wrong": wrong}
            record["bytes_down"] = record.get("bytes_down", 0) + 4 * self.shape.parameters * len(noisy)

    def _train_personal(self, models: Tensor, ready: Ready) -> None:
        """Ditto: the asked clients' own models take the same steps, pulled towards the received model."""
        if not any(trains_personal(replica.method) for replica in ready.replicas):
            return
        received = models[ready.owner]
        rows = received.clone()
        for number, replica in enumerate(ready.replicas):
            if trains_personal(replica.method):
                if replica.personal is None:
                    replica.personal = replica.model.repeat(replica.partition.clients, 1)
                chosen = torch.from_numpy(ready.asked[number]).to(self.device)
                rows[ready.rows(number)] = replica.personal[chosen]
        columns = self._columns(ready, [getattr(replica.method.objective, "lam", 0.0) for replica in ready.replicas])
        for part, batches in ready.parts():
            self.worker.train(rows[part], received[part], batches, columns.part(part))
        for number, replica in enumerate(ready.replicas):
            if replica.personal is not None:
                chosen = torch.from_numpy(ready.asked[number]).to(self.device)
                replica.personal[chosen] = rows[ready.rows(number)]

    def _play_alone(self, ready: Ready) -> None:
        """Each asked client goes on with a model of its own; nothing is sent."""
        started = perf_counter()
        for replica in ready.replicas:
            if replica.personal is None:
                replica.personal = replica.model.repeat(replica.partition.clients, 1)
        chosen = [torch.from_numpy(asked).to(self.device) for asked in ready.asked]
        rows = torch.cat(
            [r.personal[own] for r, own in zip(ready.replicas, chosen, strict=True) if r.personal is not None]
        )
        told = self._tell(rows, ready)
        columns = self._columns(ready, [0.0] * len(ready.replicas), told)
        for part, batches in ready.parts():
            self.worker.train(rows[part], None, batches, columns.part(part))
        seconds = (perf_counter() - started) / len(ready.replicas)
        for number, replica in enumerate(ready.replicas):
            assert replica.personal is not None
            mine, asked = ready.rows(number), ready.asked[number].tolist()
            replica.personal[chosen[number]] = rows[mine]
            record: dict[str, Any] = {"round": self.round, "asked": asked, "lost": [], "seconds": seconds}
            if told is not None:
                record |= {"losses": told.measured[0][mine].tolist(), **said(told.leanings[number])}
            replica.rounds.append(record | {"answered": len(asked), "bytes_down": 0, "bytes_up": 0})

    def _arrived(self, updates: Tensor, ready: Ready) -> list[Turn]:
        """The rows of each replica that arrived, in the form in which `aggregate` reads them."""
        turns, layout = [], self._layout_of(updates)
        for number, (replica, lost) in enumerate(zip(ready.replicas, ready.lost, strict=True)):
            rows, kept = updates[ready.rows(number)], np.flatnonzero(~lost)
            given = Updates(layout, (rows,), len(rows))
            if lost.any():
                given = given.select(kept.tolist())
            turns.append(Turn(given, [] if replica.state is None else replica.state.memory.pieces(given), kept))
        return turns

    def _answers(self, replicas: int) -> Then:
        """What follows on a round's training: all that the server wants to know, in one piece.

        That is what was measured and the inner products of each replica's updates (layers x rows x rows), and where
        shares decide the outcome, each replica's model after the round.
        """

        def found(
            updates: Tensor, measured: Tensor, models: Tensor, counting: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            layout = self._layout_of(updates)
            if replicas > 1:
                among = products_within(updates, layout, replicas)
            else:
                among = launch(Updates(layout, (updates,), len(updates)))[0]
            known = torch.cat([measured.reshape(-1), among.reshape(-1)])
            if counting is None:
                return (known,)
            return known, models - summed(counting, updates, layout)

        return found

    def _layout_of(self, updates: Tensor) -> Layout:
        if self._layout is None:
            self._layout = read_updates(updates, self.shape.layers).layout
        return self._layout

    def _weigh(
        self,
        number: int,
        begun: Begun,
        products: list[Floats],
        measured: tuple[Floats, Floats] | None,
        trained: tuple[Floats, Floats] | None,
    ) -> Verdict | None:
        """What the rule of one replica answers to those who arrived; None where it has diverged."""
        ready, turn, told = begun.ready, begun.turns[number], begun.told
        replica, rows = ready.replicas[number], ready.rows(number)
        trials: list[Floats] = []

        def trial_losses(trial: Tensor) -> Floats:
            found = self._measure((replica.model - trial).unsqueeze(0), ready, rows)
            trials.append(to_numpy([found])[0][turn.kept])
            return trials[-1]

        clients = ready.asked[number][turn.kept]
        losses, right = (None, None) if measured is None else (part[rows][turn.kept] for part in measured)
        seen: dict[str, Floats | None] = {"losses": losses, "accuracies": right}
        if trained is not None:
            wanted = wants_trained(replica.method)
            seen |= {name: part[rows][turn.kept] for name, part in zip(SEEN, trained, strict=True) if name in wanted}
        leaning = None if told is None else told.leanings[number]
        sizes = None if leaning is None else leaning.sizes
        method = replica.acting(self.round)
        fairness = {} if told is None else told.fairness(method, ready.answering(number))
        columns = {
            "losses": seen["losses"],
            "sizes": replica.trained.sizes[clients].astype(np.float64) if sizes is None else sizes,
            "accuracies": seen["accuracies"],
            "fairness": fairness.get("fairness"),
        }
        opened = Opened(  # as `open_round` would: what is made here needs no checks
            chosen=method,
            given=turn.given,
            ids=tuple(clients.tolist()),
            named=True,
            index=self.round,
            values={name: column for name, column in columns.items() if column is not None},
            overall={name: value for name, value in fairness.items() if name == "fairness_global"},
            state=replica.state,
            lr=self._rate(replica, self.round),
            evaluate=trial_losses,
            on_bad="exclude",
            seed=replica.seed,
        )
        try:
            return Verdict(opened.weigh(*settle(turn.given, turn.past, products)), losses, trials)
        except NoUsableClient as error:
            if not self.settings.forgiving:
                raise NoUsableClient(f"seed {replica.seed}: {error}") from error
            replica.diverged = replica.diverged or self.round + 1
            return None

    def _serve(self, begun: Begun, verdicts: Sequence[Verdict | None]) -> list[Aggregate | None]:
        """Every replica's server step: its new model and what its method carries."""
        weighed = [None if verdict is None else verdict.weighed for verdict in verdicts]
        outcomes = [
            None if one is None else one.close(one.direction(own), own=True, keep_on=self.settings.keep_on)
            for one, own in zip(weighed, self._combined(begun, weighed), strict=True)
        ]
        served = [(one, out) for one, out in zip(begun.ready.replicas, outcomes, strict=True) if out is not None]
        if not served:
            return outcomes
        models = torch._foreach_sub([one.model for one, _ in served], [out.update for _, out in served])
        for (replica, out), model in zip(served, models, strict=True):
            replica.model = model
            if replica.acting(self.round) is replica.method:
                replica.state, replica.offset = out.state, out.evaluation_offset
        return outcomes

    def _combined(self, begun: Begun, weighed: Sequence[Weighed | None]) -> Sequence[list[Tensor] | None]:
        """The present clients' part of every direction, all replicas at once where that can be."""
        own = [one.coefficients[:, : len(one.here)] for one in weighed if one is not None and not one.excluded]
        if len(weighed) == 1 or not begun.ready.alike or len(own) < len(weighed):
            return [None] * len(weighed)
        found = combine_within(np.stack(own), begun.updates, self._layout_of(begun.updates))
        return [[direction] for direction in found.unbind()]

    def _write_down(self, number: int, begun: Begun, verdict: Verdict | None, out: Aggregate | None) -> None:
        """The record of one replica's round."""
        ready, told, lost = begun.ready, begun.told, begun.ready.lost[number]
        asked, answered = ready.asked[number], len(begun.turns[number].kept)
        record: dict[str, Any] = {"round": self.round, "asked": asked.tolist(), "lost": asked[lost].tolist()}
        ready.replicas[number].rounds.append(record)
        if verdict is None or out is None:
            record["note"] = DIVERGED if answered else NOBODY
            return
        losses, trials = [] if verdict.losses is None else verdict.losses.tolist(), len(verdict.trials)
        record |= self._told(losses, out.coefficients.tolist(), out.diagnostics.record(), answered, len(asked), trials)
        if told is not None:
            record |= said(told.leanings[number])
            down, up = told.bytes(len(asked), answered)
            record["bytes_down"], record["bytes_up"] = record["bytes_down"] + down, record["bytes_up"] + up

    def _told(
        self,
        losses: list[float],
        coefficients: list[list[float]],
        diagnosed: dict[str, Any],
        answered: int,
        asked: int | None = None,
        trials: int = 0,
    ) -> dict[str, Any]:
        """What a record says of those who answered; asked: how many were, if not as many."""
        size = self.shape.parameters * 4
        return {
            "losses": losses,
            "answered": answered,
            "coefficients": coefficients,
            **diagnosed,
            "bytes_down": size * ((answered if asked is None else asked) + trials * answered),
            "bytes_up": size * answered + 8 * answered * (1 + trials),
        }

    def _after_training(self, models: Tensor, updates: Tensor, ready: Ready) -> tuple[Floats, Floats] | None:
        """Every row's loss and accuracy after its local training, for the rules that ask for them."""
        if not any(wants_trained(replica.method) for replica in ready.replicas):
            return None
        rows = models[ready.owner] - updates
        found = [self.worker.measure(rows[part], batches) for part, batches in ready.parts()]
        losses, right = to_numpy([torch.cat(found, dim=1)])[0]
        return losses, right

    def _see_who_fell(self, begun: Begun, after: Floats, before: Floats) -> None:
        """Each participant's own loss after the round, and the share of them whose loss is lower now."""
        for number, replica in enumerate(begun.ready.replicas):
            rows = begun.ready.answering(number)
            if len(rows):
                now, then, record = after[rows], before[rows], replica.rounds[-1]
                record |= {"losses_after": now.tolist(), "fell": float((now < then).mean())}

    # ------------------------------------------------------------------------------------------------ evaluation

    def _personally(self, replica: Replica, pooled: Samples) -> tuple[Tensor, Tensor | None]:
        """Of all clients' test data the sums of losses and of right answers, and predictions by cell, where computed.

        By each client's own model, or by the mixture of those who train alone.
        """
        if replica.personal is None or replica.method.training == "alone":
            models = replica.evaluated.unsqueeze(0) if replica.personal is None else replica.personal
            return evaluate(self.module, self.shape, models, self.local.asked(pooled))
        found = []
        for client, model in enumerate(replica.personal):
            own = gather([replica.partition.test[client]], self.device)
            found.append(evaluate(self.module, self.shape, model.unsqueeze(0), self.local.asked(own)))
        counts = [own for _, own in found if own is not None]
        return torch.cat([sums for sums, _ in found], dim=1), torch.cat(counts) if counts else None

    def _pooled(self, replica: Replica) -> Samples:
        """All clients' test data."""
        if replica.pooled is None:
            everybody = range(replica.partition.clients)
            replica.pooled = gather([replica.partition.test[client] for client in everybody], self.device)
        return replica.pooled

    def evaluate(self) -> None:
        """Every client's own test data, all clients, and by their weights the pooled test set."""
        every = [self._pooled(replica) for replica in self.replicas]
        if all(replica.personal is None for replica in self.replicas):
            found = self.worker.evaluate(self.module, [replica.evaluated for replica in self.replicas], every)
        else:
            found = list(map(self._personally, self.replicas, every))
        cells = [predicted.double() for _, predicted in found if predicted is not None]
        answers = Awaited([*(sums for sums, _ in found), *cells]).numpy()  # of all replicas, before one is read
        for number, (replica, pooled) in enumerate(zip(self.replicas, every, strict=True)):
            counts, sums = pooled.counts, answers[number]
            losses, accuracies = sums / np.where(counts > 0, counts, np.nan)  # NaN for a client without test data
            record: dict[str, Any] = {
                "round": self.round,
                "accuracies": accuracies,
                "losses": losses,
                "pooled_accuracy": float(np.nansum(accuracies * counts) / max(counts.sum(), 1)),
                "pooled_loss": float(np.nansum(losses * counts) / max(counts.sum(), 1)),
            }
            if cells:
                replica.predicted = answers[len(every) + number].astype(np.int64)
                record["predicted"] = replica.predicted.sum(axis=0)
            replica.evaluations.append(record)
