"""A cohort's work, on a GPU replayed as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.engine.batches import Batches, Samples
from evenhand.engine.graphs import Replayed
from evenhand.engine.training import Columns, Local, evaluate
from evenhand.transfer import sent

Then = Callable[..., tuple[Tensor, ...]]

LONGEST = 64  # local steps that are captured as one graph; longer rounds are played in stretches of so many
UNIT = 8  # of clients with different numbers of steps rounds have a multiple of so many, and so fewer shapes
PARTS = 8  # after so many steps those who are done leave the program, an eighth of all rows at a time


class Worker:
    """Does what `Local` does; where there are graphs, by replaying it."""

    def __init__(self, local: Local) -> None:
        self.local = local
        self.replayed = Replayed() if Replayed.possible(local.inputs.device, local.program) else None
        self.heavy = local.heavy

    def round(
        self,
        models: Tensor,
        batches: Batches,
        columns: Columns,
        measuring: bool,
        out: Tensor | None = None,
        then: Then | None = None,
        beside: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """As `Local.round`, and what `then`, the same for rounds of the same shape, makes of that.

        It is given the updates, what was measured, the models, and by name what stands `beside` them.
        """
        more = beside or {}
        stretched = batches.steps > LONGEST or self._shrinks(batches)
        if self.replayed is None or stretched or self.local.in_patches(batches):
            if self.replayed is None or not stretched:
                updates, measured = self.local.round(models, batches, columns, measuring=measuring, out=out)
            else:
                updates, measured = self._in_stretches(models, batches, columns, measuring)
            return (updates, measured, *(() if then is None else then(updates, measured, models, **more)))
        key = ("round", batches.steps, batches.steady, batches.full, batches.whole, measuring, then is None)

        def work(models: Tensor, batches: Batches, **given: Tensor) -> tuple[Tensor, ...]:
            own = {name: given.pop(name) for name in more}
            found = self.local.round(models, batches, Columns(**given), measuring=measuring)
            return found if then is None else (*found, *then(*found, models, **own))

        return self._replay(key, work, models, batches, {**columns.named(), **more})

    def _in_stretches(
        self, models: Tensor, batches: Batches, columns: Columns, measuring: bool
    ) -> tuple[Tensor, Tensor]:
        """As `Local.round`, with a graph of some steps that is replayed for one stretch of them after another."""
        rows = models.repeat_interleave(len(batches.indices) // len(models), dim=0)
        measured = models.new_full((2, len(rows)), torch.nan, dtype=torch.float64)
        if measuring:
            measured = self.measure(models, batches)
        trained = self._trained(rows, rows.clone() if columns.looks_back else None, batches, columns)
        grouped = trained.view(len(models), -1, self.local.shape.total)
        torch.sub(models.unsqueeze(1), grouped, out=grouped)
        return trained, measured

    def _shrinks(self, batches: Batches) -> bool:
        """Whether those who are done with their steps leave the program."""
        return self.heavy and not batches.steady and batches.extents is not None and batches.steps > UNIT

    def train(self, rows: Tensor, received: Tensor | None, batches: Batches, columns: Columns) -> None:
        """As `Local.train`."""
        if self.replayed is None or self.local.in_patches(batches):
            self.local.train(rows, received, batches, columns)
        else:
            rows.copy_(self._trained(rows, received if columns.looks_back else None, batches, columns))

    def _trained(self, rows: Tensor, received: Tensor | None, batches: Batches, columns: Columns) -> Tensor:
        """The rows after all their steps, good until the next replay."""
        carried = {
            "rows": rows,
            "received": received,
            "velocity": None if columns.momentum is None else torch.zeros_like(rows),
            "reached": None if columns.means is None else columns.means.clone(),
        }
        state = {name: tensor for name, tensor in carried.items() if tensor is not None}
        if self._shrinks(batches):
            return self._trained_in_company(state, batches, columns)
        pieces = [batches]
        if batches.steps > LONGEST:
            pieces = [batches.stretch(start, LONGEST) for start in range(0, batches.steps, LONGEST)]  # all alike
        for piece in pieces:
            state = self._stretch(state, piece, columns)
        return state["rows"]

    def _trained_in_company(self, state: dict[str, Tensor], batches: Batches, columns: Columns) -> Tensor:
        """As `_trained`, of rows with different numbers of steps: each leaves when it is done, or a little later."""
        assert batches.extents is not None
        lengths = batches.extents.lengths
        order = np.argsort(-lengths, kind="stable")
        place = sent(order, torch.int64, batches.indices.device)
        state, batches, columns = {k: own[place] for k, own in state.items()}, batches.part(place), columns.part(place)
        part = -(-len(order) // PARTS)
        for start in range(0, batches.steps, UNIT):
            moving = int(np.count_nonzero(lengths > start))
            if not moving:
                break
            some = slice(0, min(len(order), -(-moving // part) * part))
            held = {name: own[some] for name, own in state.items()}
            found = self._stretch(held, batches.part(some).stretch(start, UNIT), columns.part(some))
            for name, own in found.items():
                held[name].copy_(own)
        rows = torch.empty_like(state["rows"])
        rows[place] = state["rows"]
        return rows

    def _stretch(self, state: dict[str, Tensor], piece: Batches, columns: Columns) -> dict[str, Tensor]:
        """What rows are, and carry, after some steps; as a graph, good until its next replay."""
        assert self.replayed is not None
        kept = tuple(state)

        def work(**given: Tensor) -> tuple[Tensor, ...]:
            held = {name: given.pop(name) for name in kept}
            own: dict[str, Any] = {name: given.pop(name) for name in piece.tensors()}
            so_far = held.get("velocity"), held.get("reached")
            self.local.train(held["rows"], held.get("received"), replace(piece, **own), Columns(**given), *so_far)
            return tuple(held.values())

        key = ("stretch", piece.steps, piece.steady, piece.full)
        found = self.replayed(key, work, {**state, **piece.tensors(), **columns.named()})
        return dict(zip(kept, found, strict=True))

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

        def captured(models: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
            own: dict[str, Any] = {name: given.pop(name) for name in batches.tensors()}
            return work(models, replace(batches, **own), **given)

        return self.replayed(key, captured, {"models": models, **batches.tensors(), **columns})

    def survey(self, models: Tensor, batches: Batches, sharp: Tensor) -> Tensor:
        """As `Local.survey`."""
        if self.replayed is None:
            return self.local.survey(models, batches, sharp)

        def work(models: Tensor, batches: Batches, sharp: Tensor) -> tuple[Tensor, ...]:
            return (self.local.survey(models, batches, sharp),)

        return self._replay(("survey",), work, models, batches, {"sharp": sharp})[0].clone()

    def measure(self, models: Tensor, batches: Batches) -> Tensor:
        """As `Local.measure`."""
        if self.replayed is None or self.local.in_patches(batches):
            return self.local.measure(models, batches)
        return self._replay(("measure",), lambda *given: (self.local.measure(*given),), models, batches, {})[0].clone()

    def evaluate(
        self, module: nn.Module, models: Sequence[Tensor], every: Sequence[Samples]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """As `evaluate`, of several models, each on its own samples; good until the next evaluation."""

        def work(models: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
            found: list[Tensor] = []
            for number, samples in enumerate(every):
                own = replace(samples, indices=given[f"indices {number}"], lengths=given[f"lengths {number}"])
                said = evaluate(module, self.local.shape, models[number : number + 1], self.local.asked(own))
                found += [tensor for tensor in said if tensor is not None]
            return tuple(found)

        inputs = {"models": torch.stack(list(models))}
        for number, samples in enumerate(every):
            inputs |= {f"indices {number}": samples.indices, f"lengths {number}": samples.lengths}
        found = work(**inputs) if self.replayed is None else self.replayed(("evaluate",), work, inputs)
        if self.local.cells is None:
            return [(sums, None) for sums in found]
        return list(zip(found[::2], found[1::2], strict=True))
