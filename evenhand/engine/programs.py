"""A cohort's gradients as one program, and its plain sequential twin.

The models of a cohort are rows of one matrix (rows x parameters); every tensor of the network is a view of its
columns with the rows as leading axis. A program computes the scores and the gradient of every row's own batch:
  feed-forward   networks of Flatten, Linear and ReLU: forward and backward written out as batched matrix products,
                 with plain SGD folded into the products, so that no gradient is ever stored;
  batched        any module that `torch.func.vmap` can map over the rows;
  sequential     one row after another with ordinary autograd: the reference, and for modules that cannot be mapped.
All three give the same numbers up to rounding (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from evenhand.checks import EvenhandError

PROGRAMS = ("auto", "feed-forward", "batched", "sequential")

SMALL = 400_000  # parameters up to which a CPU is faster with all rows of a convolutional network at once

Tensors = dict[str, Tensor]


class Lean(NamedTuple):
    """What a sample's probabilities count in its loss, besides its cross-entropy (evenhand.constraints)."""

    push: Tensor  # rows x samples x classes
    sharpness: Tensor  # rows x 1 x 1: probabilities are softmax(sharpness * scores)

    def loss(self, scores: Tensor) -> Tensor:
        return (self.push * torch.softmax(self.sharpness * scores, dim=-1)).sum()

    def error(self, scores: Tensor) -> Tensor:
        """The loss's derivative by the scores."""
        shares = torch.softmax(self.sharpness * scores, dim=-1)
        return self.sharpness * shares * (self.push - (self.push * shares).sum(-1, keepdim=True))


class Program(Protocol):
    """Scores and gradients of every row's own samples."""

    name: str
    random: bool  # whether training draws random numbers (dropout), so that its scores are not the model's own

    def scores(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """rows x samples x classes, as the model answers when it is not in training."""
        ...

    def gradients(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """d/d row of sum_b weights[row, b] * loss(row, sample b), plus lean; a tensor per parameter; and the scores."""
        ...


def _weighted_loss(
    module: nn.Module, tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None
) -> tuple[Tensor, Tensor]:
    scores = functional_call(module, tensors, (inputs,))
    loss = (functional.cross_entropy(scores, targets, reduction="none") * weights).sum()
    return loss if lean is None else loss + lean.loss(scores), scores


def is_random(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in module.modules())


@contextmanager
def answering(module: nn.Module) -> Iterator[None]:
    """The module as it is when not in training."""
    module.eval()
    try:
        yield
    finally:
        module.train()


class Sequential:
    """One row after another, with ordinary autograd."""

    name = "sequential"

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random = module, is_random(module)

    def scores(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        rows = range(len(inputs))
        with answering(self.module), torch.no_grad():
            return torch.stack([functional_call(self.module, _row(tensors, row), (inputs[row],)) for row in rows])

    def gradients(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None = None
    ) -> tuple[list[Tensor], Tensor]:
        found, scores = [], []
        for row in range(len(inputs)):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in _row(tensors, row).items()}
            own = None if lean is None else Lean(lean.push[row], lean.sharpness[row])
            with torch.enable_grad():
                loss, said = _weighted_loss(self.module, leaves, inputs[row], targets[row], weights[row], own)
                found.append(torch.autograd.grad(loss, list(leaves.values())))
            scores.append(said.detach())
        if len(found) == 1:
            return [gradient.unsqueeze(0) for gradient in found[0]], scores[0].unsqueeze(0)
        return [torch.stack(column) for column in zip(*found, strict=True)], torch.stack(scores)


def _row(tensors: Tensors, row: int) -> Tensors:
    return {name: tensor[row] for name, tensor in tensors.items()}


class Batched:
    """All rows at once, by vmap over the leading axis."""

    name = "batched"

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random = module, is_random(module)

        def loss(
            tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, *lean: Tensor
        ) -> tuple[Tensor, Tensor]:
            return _weighted_loss(module, tensors, inputs, targets, weights, Lean(*lean) if lean else None)

        def scores(tensors: Tensors, inputs: Tensor) -> Tensor:
            found: Tensor = functional_call(module, tensors, (inputs,))
            return found

        self._gradient: Callable[..., tuple[Tensors, Tensor]] = vmap(grad(loss, has_aux=True), randomness="different")
        self._scores: Callable[..., Tensor] = vmap(scores)

    def scores(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        with answering(self.module), torch.no_grad():
            if len(inputs) > 1:
                return self._scores(tensors, inputs)
            found: Tensor = functional_call(self.module, _row(tensors, 0), (inputs[0],))  # needs no mapping
            return found.unsqueeze(0)

    def gradients(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None = None
    ) -> tuple[list[Tensor], Tensor]:
        found, scores = self._gradient(tensors, inputs, targets, weights, *(lean or ()))
        return list(found.values()), scores


class FeedForward:
    """Flatten, Linear and ReLU: forward and backward as batched matrix products."""

    name = "feed-forward"
    random = False

    def __init__(self, module: nn.Module) -> None:
        self.layers = feed_forward_layers(module)
        if not self.layers:
            raise EvenhandError("this program trains networks of Flatten, Linear and ReLU layers alone")

    def scores(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        return self._forward(tensors, inputs)[-1]

    def _forward(self, tensors: Tensors, inputs: Tensor) -> list[Tensor]:
        """Activations: the input of every linear layer, and the scores last."""
        activations = [inputs.flatten(2)]
        for number, (name, biased, rectified) in enumerate(self.layers):
            weight = tensors[f"{name}.weight"].transpose(1, 2)
            out = (
                torch.bmm(activations[-1], weight)
                if not biased
                else torch.baddbmm(tensors[f"{name}.bias"].unsqueeze(1), activations[-1], weight)
            )
            activations.append(out.relu_() if rectified and number + 1 < len(self.layers) else out)
        return activations

    def _error(self, scores: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None) -> Tensor:
        """Derivative of the weighted cross-entropy, and of what leans on it, with respect to the scores."""
        error = torch.softmax(scores, dim=-1)
        error.scatter_add_(2, targets.unsqueeze(2), scores.new_full((), -1.0).expand(*targets.shape, 1))
        error.mul_(weights.unsqueeze(2))
        return error if lean is None else error.add_(lean.error(scores))

    def gradients(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None = None
    ) -> tuple[list[Tensor], Tensor]:
        activations = self._forward(tensors, inputs)
        scores = activations.pop()
        error = self._error(scores, targets, weights, lean)
        found: Tensors = {}
        for depth in reversed(range(len(self.layers))):
            name, biased, _ = self.layers[depth]
            found[f"{name}.weight"] = torch.bmm(error.transpose(1, 2), activations[depth])
            if biased:
                found[f"{name}.bias"] = error.sum(1)
            if depth:
                error = torch.bmm(error, tensors[f"{name}.weight"])
                self._gate(error, activations[depth], depth)
        return [found[name] for name in tensors], scores

    def step(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None = None
    ) -> Tensor:
        """One step of plain SGD (the weights carry the learning rate), folded into the products that form it."""
        activations = self._forward(tensors, inputs)
        scores = activations.pop()
        error = self._error(scores, targets, weights, lean)
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
        return scores

    def _gate(self, error: Tensor, activation: Tensor, depth: int) -> None:
        if self.layers[depth - 1][2]:
            error.mul_(activation > 0)


def feed_forward_layers(module: nn.Module) -> list[tuple[str, bool, bool]]:
    """(name, has bias, ReLU follows) of every Linear layer; empty where the module is anything else."""
    if not isinstance(module, nn.Sequential) or not all(p.requires_grad for p in module.parameters()):
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


def choose_program(module: nn.Module, wanted: str = "auto", device: torch.device | None = None) -> Program:
    """The program that trains this module; 'auto' takes the one that is faster for its kind.

    The choice follows the kind of network and not a stopwatch, so that the same command gives the same numbers.
    Convolutions with a filter for every row are slow, on a CPU once they are large (docs/benchmarks.md).
    """
    if wanted not in PROGRAMS:
        raise EvenhandError(f"program={wanted!r} is not one of {', '.join(map(repr, PROGRAMS))}")
    if wanted == "feed-forward" or (wanted == "auto" and feed_forward_layers(module)):
        return FeedForward(module)
    convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    large = sum(parameter.numel() for parameter in module.parameters()) > SMALL
    on_cpu = device is None or device.type == "cpu"
    if wanted == "sequential" or (wanted == "auto" and convolves and (large or not on_cpu)):
        return Sequential(module)
    return Batched(module)
