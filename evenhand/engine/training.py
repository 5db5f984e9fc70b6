"""A cohort's local training as one program, and its plain sequential twin.

The models of a cohort are rows of one matrix (rows x parameters); every tensor of the network is a view of its
columns with the rows as leading axis. A program computes the gradient of every row's own batch:
  feed-forward   networks of Flatten, Linear and ReLU: forward and backward written out as batched matrix
  products, with
                 plain SGD folded into the products, so that no gradient is ever stored;
  batched        any module that `torch.func.vmap` can map over the rows;
  sequential     one row after another with ordinary autograd: the reference, and for modules that cannot be mapped.
All three give the same numbers up to rounding (tested).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from evenhand.checks import EvenhandError, number
from evenhand.engine.batches import Plan

PROGRAMS = ("auto", "feed-forward", "batched", "sequential")


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

    def rate(self, round: int) -> float:
        return self.lr * self.lr_decay**round


@dataclass(frozen=True)
class Shape:
    """Where each tensor of the network lies in a flat row."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Shape:
        if any(True for _ in module.buffers()):
            names = ", ".join(name for name, _ in module.named_buffers())
            raise EvenhandError(
                f"the model has buffers ({names}), which federated rounds would not average; use GroupNorm or LayerNorm"
                " in place of BatchNorm (evenhand.models.validate(module) says more)"
            )
        named = dict(module.named_parameters())
        shapes = tuple(parameter.shape for parameter in named.values())
        return cls(tuple(named), shapes, tuple(shape.numel() for shape in shapes))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of every row (rows x shape), without copying."""
        pieces = torch.split(rows, list(self.sizes), dim=1)
        return {
            name: torch.unflatten(piece, 1, tuple(shape)) if len(shape) else piece.squeeze(1)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def flat(self, module: nn.Module) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


class Program(Protocol):
    """Gradients of every row's own batch."""

    name: str

    def gradients(self, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor) -> list[Tensor]:
        """d/d row of sum_b weights[row, b] * loss(row, sample b), one tensor per parameter (rows x shape)."""
        ...


class Sequential:
    """One row after another, with ordinary autograd."""

    name = "sequential"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def gradients(self, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor) -> list[Tensor]:
        rows = []
        for row in range(len(inputs)):
            leaves = {name: tensor[row].detach().requires_grad_() for name, tensor in tensors.items()}
            with torch.enable_grad():
                loss = _weighted_loss(self.module, leaves, inputs[row], targets[row], weights[row])
                rows.append(torch.autograd.grad(loss, list(leaves.values())))
        return [torch.stack(column) for column in zip(*rows, strict=True)]


class Batched:
    """All rows at once, by vmap over the leading axis."""

    name = "batched"

    def __init__(self, module: nn.Module) -> None:
        def loss(tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            return _weighted_loss(module, tensors, inputs, targets, weights)

        self._gradient: Callable[..., dict[str, Tensor]] = vmap(grad(loss), randomness="different")

    def gradients(self, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor) -> list[Tensor]:
        return list(self._gradient(tensors, inputs, targets, weights).values())


def _weighted_loss(
    module: nn.Module, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    scores = functional_call(module, tensors, (inputs,))
    return (functional.cross_entropy(scores, targets, reduction="none") * weights).sum()


class FeedForward:
    """Flatten, Linear and ReLU: forward and backward as batched matrix products."""

    name = "feed-forward"

    def __init__(self, module: nn.Module) -> None:
        self.layers = feed_forward_layers(module)
        if not self.layers:
            raise EvenhandError("this program trains networks of Flatten, Linear and ReLU layers alone")

    def _forward(self, tensors: dict[str, Tensor], inputs: Tensor) -> list[Tensor]:
        """Activations: the input of every linear layer, and the scores last."""
        activations = [inputs.flatten(2)]
        for number_, (name, biased, rectified) in enumerate(self.layers):
            weight = tensors[f"{name}.weight"].transpose(1, 2)
            out = (
                torch.bmm(activations[-1], weight)
                if not biased
                else torch.baddbmm(tensors[f"{name}.bias"].unsqueeze(1), activations[-1], weight)
            )
            activations.append(out.relu_() if rectified and number_ + 1 < len(self.layers) else out)
        return activations

    def _error(self, scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Derivative of the weighted cross-entropy with respect to the scores."""
        error = torch.softmax(scores, dim=-1)
        error.scatter_add_(2, targets.unsqueeze(2), scores.new_full((), -1.0).expand(*targets.shape, 1))
        return error.mul_(weights.unsqueeze(2))

    def gradients(self, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor) -> list[Tensor]:
        activations = self._forward(tensors, inputs)
        error = self._error(activations.pop(), targets, weights)
        found: dict[str, Tensor] = {}
        for depth in reversed(range(len(self.layers))):
            name, biased, _ = self.layers[depth]
            found[f"{name}.weight"] = torch.bmm(error.transpose(1, 2), activations[depth])
            if biased:
                found[f"{name}.bias"] = error.sum(1)
            if depth:
                error = torch.bmm(error, tensors[f"{name}.weight"])
                self._gate(error, activations[depth], depth)
        return [found[name] for name in tensors]

    def step(self, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
        """One step of plain SGD (the weights carry the learning rate), folded into the products that form it."""
        activations = self._forward(tensors, inputs)
        error = self._error(activations.pop(), targets, weights)
        for depth in reversed(range(len(self.layers))):
            name, biased, _ = self.layers[depth]
            weight = tensors[f"{name}.weight"]
            below = torch.bmm(error, weight) if depth else error
            weight.baddbmm_(error.transpose(1, 2), activations[depth], alpha=-1.0)
            if biased:
                tensors[f"{name}.bias"].sub_(error.sum(1))
            if depth:
                error = below
                self._gate(error, activations[depth], depth)

    def _gate(self, error: Tensor, activation: Tensor, depth: int) -> None:
        if self.layers[depth - 1][2]:
            error.mul_(activation > 0)


def feed_forward_layers(module: nn.Module) -> list[tuple[str, bool, bool]]:
    """(name, has bias, ReLU follows) of every Linear layer; empty where the module is anything else."""
    if not isinstance(module, nn.Sequential):
        return []
    layers: list[tuple[str, bool, bool]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            layers.append((name, child.bias is not None, False))
        elif isinstance(child, nn.ReLU) and layers and not layers[-1][2]:
            layers[-1] = (*layers[-1][:2], True)
        elif not (isinstance(child, nn.Flatten) and not layers):
            return []
    return layers if layers and not layers[-1][2] else []


def choose_program(module: nn.Module, wanted: str = "auto") -> Program:
    """The program that trains this module; 'auto' takes the first that can."""
    if wanted not in PROGRAMS:
        raise EvenhandError(f"program={wanted!r} is not one of {', '.join(map(repr, PROGRAMS))}")
    if wanted == "sequential":
        return Sequential(module)
    if wanted == "feed-forward" or (wanted == "auto" and feed_forward_layers(module)):
        return FeedForward(module)
    return Batched(module)


def train(
    program: Program,
    shape: Shape,
    rows: Tensor,
    received: Tensor,
    plan: Plan,
    inputs: Tensor,
    targets: Tensor,
    work: LocalWork,
    *,
    rates: Tensor,
    momentum: Tensor | None = None,
    pull: Tensor | None = None,
) -> None:
    """Train every row in place, from `received`.

    rates (rows x 1) are the rows' learning rates; momentum and pull (rows x 1), where given, their momentum and the
    strength of the proximal pull towards the received model.
    """
    indices = torch.from_numpy(plan.indices).to(rows.device)
    weights = torch.from_numpy(plan.weights).to(rows.device)
    steady = bool((plan.weights > 0).any(axis=2).all())
    run_steps(
        program, shape, rows, received, indices, weights, inputs, targets, work,
        steady=steady, rates=rates, momentum=momentum, pull=pull,
    )  # fmt: skip


def run_steps(
    program: Program,
    shape: Shape,
    rows: Tensor,
    received: Tensor,
    indices: Tensor,
    weights: Tensor,
    inputs: Tensor,
    targets: Tensor,
    work: LocalWork,
    *,
    steady: bool,
    rates: Tensor,
    momentum: Tensor | None = None,
    pull: Tensor | None = None,
) -> None:
    """All local steps, with every operand on the device; `steady`: every row moves at every step."""
    tensors = shape.views(rows)
    plain = momentum is None and pull is None and work.weight_decay == 0.0 and work.clip is None
    if plain:  # the gradient is linear in the sample weights, so they can carry the learning rate
        weights = weights * rates.view(1, -1, 1)
    active = None if plain or steady else (weights > 0).any(2).to(rows.dtype).unsqueeze(2)
    velocity = torch.zeros_like(rows) if momentum is not None else None
    for step in range(len(indices)):
        seen, wanted = inputs[indices[step]], targets[indices[step]]
        if plain and isinstance(program, FeedForward):
            program.step(tensors, seen, wanted, weights[step])
            continue
        found = program.gradients(tensors, seen, wanted, weights[step])
        if plain:
            for tensor, gradient in zip(tensors.values(), found, strict=True):
                tensor.sub_(gradient)
            continue
        flat = torch.cat([gradient.reshape(len(rows), -1) for gradient in found], dim=1)
        if pull is not None:
            flat.addcmul_(rows - received, pull)
        if work.weight_decay:
            flat.add_(rows, alpha=work.weight_decay)
        if work.clip is not None:
            lengths = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
            flat.mul_((work.clip / lengths.clamp_min(1e-30)).clamp_max(1.0))
        if velocity is not None and momentum is not None:
            velocity.mul_(momentum).add_(flat)
            flat = velocity
        rows.addcmul_(flat, rates if active is None else rates * active[step], value=-1.0)


@torch.no_grad()
def evaluate(
    module: nn.Module,
    shape: Shape,
    model: Tensor,
    inputs: Tensor,
    targets: Tensor,
    indices: Tensor,
    owners: Tensor,
    count: int,
    chunk: int = 8192,
) -> tuple[Tensor, Tensor]:
    """Sum of losses and of right answers of one model, by owner of the sample (float64, length `count`)."""
    tensors = {name: view[0] for name, view in shape.views(model.unsqueeze(0)).items()}
    losses = torch.zeros(count, dtype=torch.float64, device=model.device)
    right = torch.zeros(count, dtype=torch.float64, device=model.device)
    module.eval()
    for start in range(0, len(indices), chunk):
        index, owner = indices[start : start + chunk], owners[start : start + chunk]
        scores = functional_call(module, tensors, (inputs[index],))
        wanted = targets[index]
        losses.index_add_(0, owner, functional.cross_entropy(scores, wanted, reduction="none").double())
        right.index_add_(0, owner, (scores.argmax(-1) == wanted).double())
    module.train()
    return losses, right
