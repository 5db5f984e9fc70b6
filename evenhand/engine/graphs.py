"""Local training on CUDA, captured once per shape and replayed: one launch a round in place of hundreds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.engine.batches import Plan
from evenhand.engine.training import LocalWork, Program, Shape, run_steps


@dataclass(frozen=True)
class Captured:
    """A graph and the buffers it reads and writes."""

    graph: Any
    rows: Tensor
    received: Tensor
    indices: Tensor
    weights: Tensor
    columns: dict[str, Tensor]


class GraphedTraining:
    """Replays captured training steps; a new shape of cohort is captured at its first appearance."""

    LIMIT = 16  # shapes kept; cohorts of ever new shapes run without a graph after that

    def __init__(self, program: Program, shape: Shape, inputs: Tensor, targets: Tensor, work: LocalWork) -> None:
        self.program, self.shape, self.inputs, self.targets, self.work = program, shape, inputs, targets, work
        self.captured: dict[tuple[Any, ...], Captured] = {}

    @staticmethod
    def possible(module: nn.Module, device: torch.device, program: Program) -> bool:
        """Graphs freeze the random numbers of dropout, and the sequential twin is there to be plain."""
        random = any(isinstance(part, nn.modules.dropout._DropoutNd) for part in module.modules())
        return device.type == "cuda" and program.name != "sequential" and not random

    def train(self, rows: Tensor, received: Tensor, plan: Plan, columns: dict[str, Tensor]) -> bool:
        """Train the rows in place; False where this shape is not captured and none more may be."""
        key = (*plan.indices.shape, len(rows), tuple(sorted(columns)), bool((plan.weights > 0).any(axis=2).all()))
        if key not in self.captured:
            if len(self.captured) >= self.LIMIT:
                return False
            self.captured[key] = self._capture(rows, plan, columns)
        kept = self.captured[key]
        kept.received.copy_(received)
        kept.rows.copy_(received)
        kept.indices.copy_(torch.from_numpy(plan.indices), non_blocking=True)
        kept.weights.copy_(torch.from_numpy(plan.weights), non_blocking=True)
        for name, column in columns.items():
            kept.columns[name].copy_(column)
        kept.graph.replay()
        rows.copy_(kept.rows)
        return True

    def _capture(self, rows: Tensor, plan: Plan, columns: dict[str, Tensor]) -> Captured:
        buffers = Captured(
            graph=torch.cuda.CUDAGraph(),
            rows=rows.clone(),
            received=rows.clone(),
            indices=torch.from_numpy(plan.indices).to(rows.device),
            weights=torch.from_numpy(plan.weights).to(rows.device),
            columns={name: column.clone() for name, column in columns.items()},
        )
        steady = bool((plan.weights > 0).any(axis=2).all())

        def steps() -> None:
            run_steps(
                self.program,
                self.shape,
                buffers.rows,
                buffers.received,
                buffers.indices,
                buffers.weights,
                self.inputs,
                self.targets,
                self.work,
                steady=steady,
                **buffers.columns,
            )

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            steps()  # libraries set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(buffers.graph):
            steps()
        return buffers
