"""What a cohort does in a round: measure the received model on its own data, train, send the difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from evenhand.checks import EvenhandError, number
from evenhand.engine.batches import FILLED, FILLED_ON_A_GPU, Batches, Extents, Samples, unpadded
from evenhand.engine.programs import FeedForward, Lean, Likeness, Program, Sequential, answering
from evenhand.engine.recurrent import Recurrent
from evenhand.geometry import STRETCH

PRECISIONS = {
    "tf32": "products and convolutions on a GPU's matrix units, which read 10 bits after the point (of our own kernels "
    "for convolutions, float16)",
    "float32": "in full float32",
}
AT_ONCE = {"cpu": 8192, "cuda": 32768}  # samples of a feed-forward network measured at once
AT_ONCE_LARGE = {"cpu": 256, "cuda": 1024}  # of others, whose activations may be large
AT_ONCE_CONVOLVED = {"cpu": 256, "cuda": 8192}  # of pooled convolutions by kernels
AT_ONCE_RECURRENT = {"cpu": 256, "cuda": 8192}
STREAMS = 16  # rows of the sequential program that a GPU works on at the same time
MEMORY = 64.0  # samples of a cell that its mean probability remembers
PADDED = 1.2  # times the real samples: batches with more places than that are cut into patches
GATHERED = 256 << 20  # bytes of a round's samples that are gathered ahead of the steps
BACK = 0.5  # share of the way back to the received model up to which a pull follows on a step that is made without it


@dataclass(frozen=True)
class LocalWork:
    """What a client does in a round: epochs of SGD on its own data."""

    epochs: int = 1
    batch_size: int | None = 50  # None is the full batch
    lr: float = 0.1
    lr_decay: float = 1.0  # lr in round t is lr * lr_decay^t
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # largest length of a client's gradient at a step

    def __post_init__(self) -> None:
        number("epochs", self.epochs, low=1, whole=True)
        if self.batch_size is not None:
            number("batch_size", self.batch_size, low=1, whole=True)
        number("lr", self.lr, above=0.0)
        number("lr_decay", self.lr_decay, above=0.0, high=1.0)
        number("momentum", self.momentum, low=0.0, high=1.0)
        number("weight_decay", self.weight_decay, low=0.0)
        if self.clip is not None:
            number("clip", self.clip, above=0.0)

    def rate(self, round: int, lr: float | None = None) -> float:
        """The learning rate of a round; lr: another one to begin with."""
        return (self.lr if lr is None else lr) * self.lr_decay**round


@dataclass(frozen=True)
class Shape:
    """Where each tensor that is trained lies in a flat row.

    A module's tensors lie side by side and are filled up with zeros to whole stretches of columns, so that the
    inner products of all layers can be formed in one go. The zeros stay zero: no gradient reaches them.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    layers: dict[str, int]  # modules and the columns they take, zeros included

    @classmethod
    def of(cls, module: nn.Module) -> Shape:
        if any(True for _ in module.buffers()):
            names = ", ".join(name for name, _ in module.named_buffers())
            raise EvenhandError(
                f"the model has buffers ({names}), which federated rounds would not average; use GroupNorm or LayerNorm"
                " in place of BatchNorm (evenhand.models.validate(module) says more)"
            )
        named = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        if not named:
            raise EvenhandError("the model has no parameter to train: all are frozen (requires_grad=False)")
        return cls.named({name: tensor.shape for name, tensor in named.items()})

    @classmethod
    def named(cls, shapes: Mapping[str, torch.Size]) -> Shape:
        """Of tensors by name; what stands before the last dot of a name is its module."""
        starts, layers, at, layer = [], dict[str, int](), 0, None
        for name, shape in shapes.items():
            owner = name.rpartition(".")[0] or name
            if owner != layer:
                at, layer = -(-at // STRETCH) * STRETCH, owner
            starts.append(at)
            at += shape.numel()
            layers[owner] = layers.get(owner, 0) + shape.numel()
        layers = {name: -(-size // STRETCH) * STRETCH for name, size in layers.items()}
        return cls(tuple(shapes), tuple(shapes.values()), tuple(starts), layers)

    @property
    def total(self) -> int:
        """Columns of a row."""
        return sum(self.layers.values())

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of every row (rows x shape), without copying."""
        return {
            name: rows[:, start : start + shape.numel()].view(len(rows), *shape)
            for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True)
        }

    def flat(self, module: nn.Module) -> Tensor:
        """The module's tensors as one row."""
        named = dict(module.named_parameters())
        row = torch.zeros(1, self.total)
        for name, view in self.views(row).items():
            view[0] = named[name].detach()
        return row[0]


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """On a GPU: the precision of products and convolutions, by algorithms that give the same bits every time."""
    matmul, cudnn, fast = torch.backends.cuda.matmul, torch.backends.cudnn, precision == "tf32"
    wanted: list[tuple[Any, str, Any]] = [(cudnn, "deterministic", True)]
    if hasattr(matmul, "fp32_precision"):
        wanted += [(owner, "fp32_precision", "tf32" if fast else "ieee") for owner in (matmul, cudnn.conv)]  # type: ignore[attr-defined]
    else:  # torch before 2.9
        wanted += [(owner, "allow_tf32", fast) for owner in (matmul, cudnn)]
    before = [getattr(owner, name) for owner, name, _ in wanted]
    try:
        for owner, name, value in wanted:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(wanted, before, strict=True):
            setattr(owner, name, value)


class Side:
    """Work beside the rest on a GPU: on a stream that begins here and is joined later. Elsewhere nothing special."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._entered: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._entered = torch.cuda.stream(self.stream)
            self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self._entered.__exit__(*error)

    def join(self) -> None:
        """What follows waits for the work."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@dataclass(frozen=True)
class Columns:
    """What differs from row to row (rows first); None where no row has it."""

    rates: Tensor  # learning rates
    momentum: Tensor | None = None
    pull: Tensor | None = None  # strength of the proximal pull towards the received model
    back: Tensor | None = None  # or, in its place, which share of the way back to that model a step goes (`pulling`)
    tables: Tensor | None = None  # rows x cells x (classes + 1): what is told about groups (evenhand.constraints)
    sharpness: Tensor | None = None  # of the probabilities that the tables speak of
    # Constraints that are followed through the steps (evenhand.constraints.Followed; cells x classes in one axis).
    slopes: Tensor | None = None
    changes: Tensor | None = None
    means: Tensor | None = None
    gaps: Tensor | None = None  # rows x (gap, up, down) x gaps
    limits: Tensor | None = None  # rows x (alpha, damping, one-sided)
    leash: Tensor | None = None  # strength of a pull towards the received model that does not grow with the distance
    # FedCKA (evenhand.engine.programs.Likeness).
    likeness: Tensor | None = None  # rows x layers: what each layer's term counts
    previous: Tensor | None = None  # every row's model of the last time, flat

    @property
    def looks_back(self) -> bool:
        """Whether steps need to know the received model."""
        return any(column is not None for column in (self.pull, self.back, self.leash, self.likeness))

    def named(self) -> dict[str, Tensor]:
        """Those that are there."""
        return {name: column for name, column in vars(self).items() if column is not None}

    def part(self, rows: slice | Tensor) -> Columns:
        return Columns(**{name: column[rows] for name, column in self.named().items()})


def pulling(
    rates: Sequence[float], pulls: Sequence[float], momenta: Sequence[float], work: LocalWork
) -> dict[str, list[float]]:
    """The column that tells rows how strongly they are pulled towards the received model.

    As a share of the way back, where every row can make its steps without the pull and then go back.
    """
    shares = [rate * pull for rate, pull in zip(rates, pulls, strict=True)]
    both = any(pull and momentum for pull, momentum in zip(pulls, momenta, strict=True))
    apart = not both and work.weight_decay == 0.0 and work.clip is None
    return {"back": shares} if apart and max(shares) <= BACK else {"pull": list(pulls)}


class Following:
    """The gaps of a round as each row sees them move, and what it is told at each step because of them."""

    def __init__(
        self,
        slopes: Tensor,
        changes: Tensor,
        means: Tensor,
        gaps: Tensor,
        limits: Tensor,
        sharpness: Tensor,
        *,
        reached: Tensor | None = None,
    ) -> None:
        """reached: the cells' means by now, which are changed in place, where steps came before."""
        self.slopes, self.changes, self.start, self.sharpness = slopes, changes, means, sharpness
        self.means = means.clone() if reached is None else reached
        self.gaps, self.up, self.down = gaps.unbind(1)
        self.alpha, self.damping, self.one_sided = (limit.unsqueeze(1) for limit in limits.unbind(1))

    @classmethod
    def of(cls, columns: Columns, reached: Tensor | None = None) -> Following | None:
        found = columns.named()
        wanted = ("slopes", "changes", "means", "gaps", "limits", "sharpness")
        return (
            cls(*(found[name] for name in wanted), reached=reached) if all(name in found for name in wanted) else None
        )

    def tables(self, base: Tensor) -> Tensor:
        """What is told now: the base, and a push along every gap's slope."""
        gaps = self.gaps + torch.bmm(self.changes, (self.means - self.start).unsqueeze(2)).squeeze(2)
        up = (self.up + self.damping * (gaps - self.alpha)).clamp_min(0.0) * (1.0 - self.one_sided * (gaps <= 0))
        down = (self.down + self.damping * (-gaps - self.alpha)).clamp_min(0.0) * (1.0 - self.one_sided * (gaps >= 0))
        push = torch.bmm((up - down).unsqueeze(1), self.slopes).view(len(base), base.shape[1], base.shape[2] - 1)
        return torch.cat([base[..., :-1] + push, base[..., -1:]], dim=2)

    def see(self, scores: Tensor, cells: Tensor, real: Tensor) -> None:
        """Take in how the model answers a step's samples: each cell's mean moves towards what is seen of it."""
        shares = torch.softmax(self.sharpness.unsqueeze(2) * scores, dim=-1)
        count = self.means.shape[1] // shares.shape[2]
        inside = functional.one_hot(cells, count).to(shares.dtype) * real.unsqueeze(2)
        seen = inside.sum(1).unsqueeze(2)  # rows x cells x 1
        here = torch.bmm(inside.transpose(1, 2), shares) / seen.clamp_min(1.0)
        means = self.means.view(len(here), count, -1)
        means += seen / (seen + MEMORY) * (here - means)


def _precisely(work: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Local in the arithmetic that it is asked for."""

    @wraps(work)
    def precise(local: Local, *given: Any, **named: Any) -> Any:
        if not local.inputs.is_cuda:
            return work(local, *given, **named)
        with arithmetic(local.precision):
            return work(local, *given, **named)

    return precise


@dataclass(frozen=True)
class Local:
    """The cohort's part of a round on one data set: everything but the plan and the models."""

    program: Program
    shape: Shape
    inputs: Tensor
    targets: Tensor
    work: LocalWork
    cells: Tensor | None = None  # of each sample, where groups are looked at
    cell_count: int = 0
    precision: str = "float32"  # of products on a GPU (PRECISIONS)
    formed: Tensor = field(init=False)  # the inputs as the program reads them

    def __post_init__(self) -> None:
        formed = self.program.form(self.inputs) if isinstance(self.program, FeedForward) else self.inputs
        object.__setattr__(self, "formed", formed)

    @_precisely
    def round(
        self,
        models: Tensor,
        batches: Batches,
        columns: Columns,
        *,
        measuring: bool = True,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Updates theta - theta_k of every row, and mean loss and accuracy of the received models (2 x rows, float64).

        models: each serves as many rows as the others, in order. Without `measuring` losses and accuracies may be
        missing (NaN). out: where the updates are put.
        """
        rows = len(batches.indices)
        updates = models.new_empty(rows, self.shape.total) if out is None else out
        grouped = updates.view(len(models), -1, self.shape.total)
        grouped.copy_(models.unsqueeze(1).expand_as(grouped))
        received = updates.clone() if columns.looks_back else None
        uneven = self._uneven(batches, batches.weights, columns)
        samples = None if uneven else self._samples(batches)
        seen_plainly = not self.program.random and batches.partners is None
        first = batches.whole and seen_plainly and batches.steps > 0  # its scores are the received model's
        side = Side(models.device)
        try:
            with side:
                measured = None
                if measuring and not first:
                    measured = self.measure(models, batches, samples)
            scores = updates.new_empty(0)
            if isinstance(self.program, Sequential) and models.is_cuda:
                scores = self._train_side_by_side(updates, received, batches, columns)
            elif samples is None:
                seen = self._train_in_patches(updates, received, batches, columns)
                measured = seen if first else measured
            else:
                scores = self._train(updates, received, batches, samples, columns)
            torch.sub(models.unsqueeze(1), grouped, out=grouped)
            if not measuring:
                measured = models.new_full((2, rows), torch.nan, dtype=torch.float64)
            if measured is None:
                measured = _means(scores, self._wanted(batches, slice(0, 1)).flatten(1), batches.shares.flatten(1))
        finally:
            side.join()  # after an error, too: a capture must leave no work behind
        return updates, measured

    @_precisely
    def train(
        self,
        rows: Tensor,
        received: Tensor | None,
        batches: Batches,
        columns: Columns,
        velocity: Tensor | None = None,
        reached: Tensor | None = None,
    ) -> None:
        """Train every row in place, wherever it starts, with a pull towards `received`.

        velocity: of momentum, where it comes from steps before and is wanted for steps to come; reached: likewise the
        cells' means, of constraints that are followed.
        """
        if self._uneven(batches, batches.weights, columns):
            self._train_in_patches(rows, received, batches, columns, velocity)
        else:
            self._train(rows, received, batches, self._samples(batches), columns, velocity, reached)

    @_precisely
    def measure(self, models: Tensor, batches: Batches, samples: Callable[[slice], Tensor] | None = None) -> Tensor:
        """Mean loss and accuracy of models on each row's own training data (2 x rows, float64)."""
        if samples is None and self._uneven(batches, batches.shares):
            return self._measure_in_patches(models, batches)
        samples = samples or self._samples(batches)
        rows, steps, batch = batches.shares.shape
        apart = self.heavy and not batches.steady
        if apart:  # a row for each client, so that padding comes last
            models = models.repeat_interleave(rows // len(models), dim=0)
        tensors = self.shape.views(models)
        total = torch.zeros(2, rows, dtype=torch.float64, device=models.device)
        at_once = max(1, samples_at_once(self.program, models.device) // (rows * batch))
        for start in range(0, steps, at_once):
            part = slice(start, min(start + at_once, steps))
            seen, shares = samples(part), batches.shares[:, part].flatten(1)
            told = (tensors, seen.reshape(len(models), -1, *seen.shape[3:]))
            scores = self.program.scores(*told, active=shares if apart else None)
            wanted = self._wanted(batches, part).flatten(1)
            total += _means(scores.view(*wanted.shape, -1), wanted, shares)
        return total

    @_precisely
    def survey(self, models: Tensor, batches: Batches, sharpness: Tensor) -> Tensor:
        """Sums over each row's own training data by cell (rows x cells x (2 classes + 1), float64).

        Of the probabilities of the classes, of the loss, and of how often each class is predicted.
        """
        assert self.cells is not None
        rows, steps, batch = batches.shares.shape
        samples, tensors = self._samples(batches), self.shape.views(models)
        total: Tensor | None = None
        at_once = max(1, samples_at_once(self.program, models.device) // (rows * batch))
        for start in range(0, steps, at_once):
            part = slice(start, min(start + at_once, steps))
            seen, index = samples(part), batches.indices[:, part].flatten(1)
            scores = self.program.scores(tensors, seen.reshape(len(models), -1, *seen.shape[3:]))
            scores, wanted = scores.view(*index.shape, -1), self._wanted(batches, part).flatten(1)
            classes = scores.shape[-1]
            losses = functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
            said = [
                torch.softmax(sharpness.unsqueeze(2) * scores, dim=-1).double(),
                losses.view(*index.shape, 1).double(),
                functional.one_hot(scores.argmax(-1), classes).double(),
            ]
            real = (batches.shares[:, part].flatten(1) > 0).unsqueeze(2)
            inside = functional.one_hot(self._cells(index, wanted), self.cell_count).double().mul_(real)
            found = torch.bmm(inside.transpose(1, 2), torch.where(real, torch.cat(said, dim=2), 0.0))
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def asked(self, samples: Samples) -> Asked:
        """An evaluation on some clients' samples, as this data set and device have it."""
        at_once = samples_at_once(self.program, self.inputs.device)
        return Asked(self.inputs, self.targets, samples, at_once, self.cells, self.cell_count, self.precision)

    def _samples(self, batches: Batches) -> Callable[[slice], Tensor]:
        """The inputs of some steps (rows x steps x batch x ...): gathered once where that is not too much."""
        each = self.formed[:1].numel() * self.formed.element_size()
        if self.heavy or batches.indices.numel() * each > GATHERED:
            return lambda steps: gathered(self.formed, batches.indices[:, steps])
        whole = gathered(self.formed, batches.indices)
        return lambda steps: whole[:, steps]

    def _wanted(self, batches: Batches, steps: slice) -> Tensor:
        """The labels of some steps' samples (rows x steps x batch), as their owners have them."""
        return self.targets[batches.indices[:, steps]] if batches.labels is None else batches.labels[:, steps]

    def _cells(self, index: Tensor, wanted: Tensor) -> Tensor:
        """The cells of samples: their groups, and the labels as their owners have them."""
        assert self.cells is not None
        return self.cells[index] - self.targets[index] + wanted

    def _train(
        self,
        rows: Tensor,
        received: Tensor | None,
        batches: Batches,
        samples: Callable[[slice], Tensor],
        columns: Columns,
        velocity: Tensor | None = None,
        reached: Tensor | None = None,
    ) -> Tensor:
        """All local steps, in place; returns the scores of the first one."""
        tensors, weights, rates = self.shape.views(rows), batches.weights, columns.rates
        folded = self._folds(columns)
        if folded:  # the gradient is linear in the sample weights, so they can carry the learning rate
            paces = rates if columns.back is None else rates / (1.0 - columns.back)
            weights = weights * paces.view(-1, 1, 1)
        looks = columns.momentum is not None or columns.looks_back
        active = None if (folded and not looks) or batches.steady else (weights > 0).any(2).to(rows.dtype)
        if columns.momentum is not None and velocity is None:
            velocity = torch.zeros_like(rows)
        off = tensors if velocity is None else self.shape.views(velocity)
        first, followed = rows.new_empty(0), Following.of(columns, reached)
        labels = self._wanted(batches, slice(0, batches.steps))
        for step in range(batches.steps):
            index, now, counts = batches.indices[:, step], slice(step, step + 1), weights[:, step]
            seen, wanted = samples(now).squeeze(1), labels[:, step]
            if batches.partners is not None and batches.blend is not None:
                index, seen, wanted, counts = _mixed(
                    batches.partners[:, step], batches.blend[:, step], index, seen, wanted, counts
                )
            counted, lean = self._leaning(columns, followed, index, wanted, counts)
            moving = None if active is None else active[:, now]
            if folded:
                if velocity is not None and columns.momentum is not None:
                    velocity.mul_(columns.momentum)
                if isinstance(self.program, FeedForward):
                    scores = self.program.step(tensors, seen, wanted, counted, lean, full=batches.full, off=off)
                else:
                    found, scores = self.program.gradients(tensors, seen, wanted, counted, lean)
                    torch._foreach_sub_(list(off.values()), found)
                self._follow_up(rows, received, columns, velocity, moving)
            else:
                likeness = self._likeness(columns, received, seen, counts)
                found, scores = self.program.gradients(tensors, seen, wanted, counted, lean, likeness)
                self._step(rows, received, found, rates if moving is None else rates * moving, columns, velocity)
            first = scores if step == 0 else first
            more = reached is not None or step + 1 < batches.steps
            if followed is not None and self.cells is not None and more:
                followed.see(scores, self._cells(index, wanted), counts > 0)
        return first

    def _folds(self, columns: Columns) -> bool:
        """Whether steps are plain SGD folded into the products, with no more than momentum or a way back besides."""
        added = (columns.pull, columns.leash, columns.likeness)
        return all(c is None for c in added) and self.work.weight_decay == 0.0 and self.work.clip is None

    @staticmethod
    def _follow_up(
        rows: Tensor, received: Tensor | None, columns: Columns, velocity: Tensor | None, moving: Tensor | None
    ) -> None:
        """What comes after a folded step: of a row the velocity, which has taken up the step, or the way back."""
        if velocity is not None:
            if moving is None:
                rows.add_(velocity)
            else:
                rows.addcmul_(velocity, moving)
        if columns.back is not None and received is not None:
            rows.lerp_(received, columns.back if moving is None else columns.back * moving)

    def _uneven(self, batches: Batches, weights: Tensor, columns: Columns | None = None) -> bool:
        """Whether so much of the batches is padding that it is better left out.

        Not where anything but models goes from step to step, or samples are mixed. On a GPU where all of it is one
        step; elsewhere those who stand still leave the program between stretches of steps (evenhand.engine.worker).
        """
        if batches.partners is not None or (columns is not None and columns.tables is not None):
            return False
        if weights.is_cuda:
            return self.in_patches(batches)
        lengths, widths = Extents.of(weights)
        return len(weights) * int(lengths.max()) * int(widths.max()) > PADDED * int(torch.count_nonzero(weights))

    def in_patches(self, batches: Batches) -> bool:
        """On a GPU: whether a round is one step on all data of clients who have much more or less than others."""
        if batches.extents is None or not batches.whole or batches.steps > 1 or batches.partners is not None:
            return False
        widths = batches.extents.widths
        return self.heavy and len(widths) * int(widths.max()) > PADDED * int(widths.sum())

    @property
    def heavy(self) -> bool:
        """Whether a sample takes a GPU so long that padding is worth looking for."""
        return isinstance(self.program, FeedForward) and self.program.opens

    def _train_in_patches(
        self,
        rows: Tensor,
        received: Tensor | None,
        batches: Batches,
        columns: Columns,
        velocity: Tensor | None = None,
    ) -> Tensor:
        """All local steps, in place, of rows with different amounts of data: no row waits for another.

        Returns mean loss and accuracy before the first step, where that shows every row all its data.
        """
        measured = torch.zeros(2, len(rows), dtype=torch.float64, device=rows.device)
        if isinstance(self.program, Sequential) and len(rows) > 1:  # which gains nothing by rows at once
            for row in range(len(rows)):
                one = slice(row, row + 1)
                past, speed = _some(received, one), _some(velocity, one)
                found = self._train_in_patches(rows[one], past, batches.part(one), columns.part(one), speed)
                measured[:, one] = found
            return measured
        extents = batches.extents or Extents.of(batches.weights[:, : batches.steps])
        for patches in unpadded(extents, FILLED_ON_A_GPU if rows.is_cuda else FILLED):
            group = torch.tensor(patches[0].rows)
            here, told, past, speed = rows[group], columns.part(group), _some(received, group), _some(velocity, group)
            if columns.momentum is not None and speed is None:
                speed = torch.zeros_like(here)
            for patch in patches:
                moving, own = slice(0, len(patch.rows)), batches.only(patch)
                samples, columns_here = self._samples(own), told.part(moving)
                scores = self._train(
                    here[moving], _some(past, moving), own, samples, columns_here, _some(speed, moving)
                )
                if batches.whole and patch.steps.start == 0:
                    wanted = self._wanted(own, slice(0, 1)).flatten(1)
                    measured[:, patch.rows] = _means(scores, wanted, own.shares.flatten(1))
            rows[group] = here
            if velocity is not None and speed is not None:
                velocity[group] = speed
        return measured

    def _measure_in_patches(self, models: Tensor, batches: Batches) -> Tensor:
        """As `measure`, of rows with different amounts of data."""
        count, on_gpu = len(batches.shares), batches.shares.is_cuda
        total = torch.zeros(2, count, dtype=torch.float64, device=models.device)
        if len(models) > 1:
            models = models.repeat_interleave(count // len(models), dim=0)
        extents = batches.extents if on_gpu and batches.extents else Extents.of(batches.shares)  # of one step the same
        for patch in itertools.chain.from_iterable(unpadded(extents, FILLED_ON_A_GPU if on_gpu else FILLED)):
            part = batches.only(patch)
            own = models if len(models) == 1 else models[patch.rows]
            total[:, patch.rows] += self.measure(own, part, self._samples(part))
        return total

    def _leaning(
        self, columns: Columns, followed: Following | None, index: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Lean | None]:
        """What each sample's cross-entropy and probabilities count, by its cell."""
        if columns.tables is None or columns.sharpness is None or self.cells is None:
            return weights, None
        tables = columns.tables if followed is None else followed.tables(columns.tables)
        cells = self._cells(index, wanted).unsqueeze(2).expand(-1, -1, tables.shape[2])
        told = tables.gather(1, cells) * weights.unsqueeze(2)
        return told[..., -1], Lean(told[..., :-1], columns.sharpness.unsqueeze(2))

    def _likeness(self, columns: Columns, received: Tensor | None, seen: Tensor, weights: Tensor) -> Likeness | None:
        """What each row's representations of a step's samples are held against."""
        if columns.likeness is None or columns.previous is None or received is None:
            return None
        real, count = (weights > 0).to(received.dtype), columns.likeness.shape[1]
        others = [self.program.relations(count, self.shape.views(r), seen, real) for r in (received, columns.previous)]
        return Likeness(columns.likeness, real, *others)

    def _train_side_by_side(self, rows: Tensor, received: Tensor | None, batches: Batches, columns: Columns) -> Tensor:
        """Every row on a stream of its own: rows do not wait for each other, and small kernels run at the same time."""
        sides = [Side(rows.device) for _ in range(min(len(rows), STREAMS))]
        scores = []
        try:
            for row in range(len(rows)):
                part = slice(row, row + 1)
                with sides[row % len(sides)]:
                    own = batches.part(part)
                    past = _some(received, part)
                    scores.append(self._train(rows[part], past, own, self._samples(own), columns.part(part)))
        finally:
            for side in sides:
                side.join()
        return torch.cat(scores)

    def _step(
        self,
        rows: Tensor,
        received: Tensor | None,
        found: list[Tensor],
        rates: Tensor,
        columns: Columns,
        velocity: Tensor | None,
    ) -> None:
        """One step of SGD with everything a client may add to it.

        A velocity holds gradients here; that of folded steps is what the rows go by.
        """
        flat = torch.zeros_like(rows)
        for view, gradient in zip(self.shape.views(flat).values(), found, strict=True):
            view.copy_(gradient)
        pull = columns.pull if columns.back is None else columns.back / columns.rates
        if pull is not None and received is not None:
            flat.addcmul_(rows - received, pull)
        if columns.leash is not None and received is not None:
            apart = rows - received
            length = torch.linalg.vector_norm(apart, dim=1, keepdim=True)
            flat.addcmul_(apart, columns.leash / length.clamp_min(1e-30))
        if self.work.weight_decay:
            flat.add_(rows, alpha=self.work.weight_decay)
        if self.work.clip is not None:
            lengths = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
            flat.mul_((self.work.clip / lengths.clamp_min(1e-30)).clamp_max(1.0))
        if velocity is not None and columns.momentum is not None:
            flat = velocity.mul_(columns.momentum).add_(flat)
        rows.addcmul_(flat, rates, value=-1.0)


def gathered(table: Tensor, index: Tensor) -> Tensor:
    """table[index] of rows of a table, by the faster of the library's ways."""
    flat = index.reshape(-1)
    found = table[flat] if table.is_cuda else table.index_select(0, flat)
    return found.view(*index.shape, *table.shape[1:])


def _mixed(
    partners: Tensor, blend: Tensor, index: Tensor, seen: Tensor, wanted: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step's samples mixed with their partners, once with either label, which counts as much as its owner's share."""
    other = torch.arange(len(seen), device=seen.device).unsqueeze(1), partners
    share = blend.view(-1, *[1] * (seen.dim() - 1))
    both = share * seen + (1.0 - share) * seen[other]
    labels, weighed = torch.cat([wanted, wanted[other]], 1), torch.cat([blend * counts, (1.0 - blend) * counts], 1)
    return torch.cat([index, index[other]], 1), torch.cat([both, both], 1), labels, weighed


def _some(rows: Tensor | None, which: slice | Tensor) -> Tensor | None:
    return None if rows is None else rows[which]


def _means(scores: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
    """Share-weighted loss and accuracy of every row (2 x rows, float64)."""
    losses = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    right = scores.argmax(-1) == targets
    # A padded sample counts nothing even where its loss is not finite.
    return torch.stack([torch.where(shares > 0, losses, 0.0), right]).double().mul_(shares).sum(2)


def samples_at_once(program: Program, device: torch.device) -> int:
    """How many samples are measured at once."""
    most = AT_ONCE_LARGE
    if isinstance(program, FeedForward):
        most = AT_ONCE_CONVOLVED if program.opens else AT_ONCE
    elif isinstance(program, Recurrent):
        most = AT_ONCE_RECURRENT
    return most.get(device.type, most["cpu"])


@dataclass(frozen=True)
class Asked:
    """What an evaluation is asked: which samples, and by which cells the predictions are counted."""

    inputs: Tensor
    targets: Tensor
    samples: Samples
    at_once: int = AT_ONCE["cpu"]
    cells: Tensor | None = None
    cell_count: int = 0
    precision: str = "float32"


@torch.no_grad()
def evaluate(module: nn.Module, shape: Shape, models: Tensor, asked: Asked) -> tuple[Tensor, Tensor | None]:
    """Sums of losses and of right answers on each client's samples (2 x clients, float64).

    Of several models the mixture is evaluated: the mean of their probabilities. With cells also how often each class is
    predicted, clients x cells x classes.
    """
    each = [{name: view[0] for name, view in shape.views(row.unsqueeze(0)).items()} for row in models]
    samples = asked.samples
    found = torch.zeros(2, len(samples.indices), dtype=torch.float64, device=models.device)
    predicted = torch.zeros(len(samples.indices), dtype=torch.int64, device=models.device)
    classes = 0
    for start in range(0, len(samples.indices), asked.at_once):
        part = slice(start, start + asked.at_once)
        index = samples.indices[part]
        with answering(module), arithmetic(asked.precision):
            scores = [functional_call(module, tensors, (gathered(asked.inputs, index),)) for tensors in each]
        answer = scores[0]
        if len(scores) > 1:
            answer = torch.stack([torch.log_softmax(one, dim=-1) for one in scores]).logsumexp(0)  # up to log(models)
        wanted, classes = asked.targets[index], answer.shape[-1]
        found[0, part] = functional.cross_entropy(answer, wanted, reduction="none").double()
        predicted[part] = answer.argmax(-1)
        found[1, part] = (predicted[part] == wanted).double()
    sums = torch.stack([torch.segment_reduce(row, "sum", lengths=samples.lengths, unsafe=True) for row in found])
    if asked.cells is None:
        return sums, None
    clients, count = len(samples.counts), len(samples.indices)
    owner = torch.repeat_interleave(torch.arange(clients, device=models.device), samples.lengths, output_size=count)
    place = (owner * asked.cell_count + asked.cells[samples.indices]) * classes + predicted
    counts = place.new_zeros(clients * asked.cell_count * classes)  # bincount would wait for the device
    counts.scatter_add_(0, place, torch.ones_like(place))
    return sums, counts.view(clients, asked.cell_count, classes)
