"""A cohort's gradients as one program, and its plain sequential twin.

The models of a cohort are rows of one matrix (rows x parameters); every tensor of the network is a view of its
columns with the rows as leading axis. A program computes the scores and the gradient of every row's own batch:
  feed-forward   networks of Flatten, Linear and ReLU: forward and backward written out as batched matrix products,
                 with plain SGD folded into the products, so that no gradient is ever stored (`recurrent`, in
                 evenhand.engine.recurrent, does the same for an LSTM, `fused` with kernels of our own);
  batched        any module that `torch.func.vmap` can map over the rows;
  sequential     one row after another with ordinary autograd: the reference, and for modules that cannot be mapped.
All give the same numbers up to rounding (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from evenhand.checks import EvenhandError

FLAT = 1e-12  # added to a squared length of at least 1/samples, so that samples which are all alike have no likeness
ALIKE = 1e-6  # of products' trace: samples that differ by less are alike, up to rounding

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


class Likeness(NamedTuple):
    """FedCKA's term: a row's first layers should be more like the received model's than like its own previous ones'.

    Sum over layers of strength * -log(e^near / (e^near + e^far)), near and far the linear CKA with either model.
    """

    strength: Tensor  # rows x layers
    real: Tensor  # rows x samples: 1 for a sample, 0 for padding
    received: Tensor  # rows x layers x samples x samples: `relations` of the received model
    previous: Tensor  # the same of the row's previous model

    def loss(self, activations: list[Tensor]) -> Tensor:
        """Of one row."""
        own = torch.stack([relations(layer, self.real) for layer in activations])
        near, far = ((own * other).sum((1, 2)) for other in (self.received, self.previous))
        return (self.strength * functional.softplus(far - near)).sum()

    def pushes(self, activations: Sequence[Tensor], products: Sequence[Tensor]) -> list[Tensor]:
        """The loss's derivative by what the first layers answer, of all rows; products: as in `related`."""
        found = []
        for layer, (seen, known) in enumerate(zip(activations, products, strict=True)):
            own, factor = related(known, self.real)
            received, previous = self.received[:, layer], self.previous[:, layer]
            lead = (own * (previous - received)).sum((1, 2))
            slope = (self.strength[:, layer] * torch.sigmoid(lead)).view(-1, 1, 1) * (previous - received)
            slope = 2.0 * factor * (slope - own * (own * slope).sum((1, 2), keepdim=True))
            push = torch.bmm(centred(slope, self.real), seen.flatten(2).to(slope.dtype))
            found.append(push.view(seen.shape))
        return found


def relations(activations: Tensor, real: Tensor) -> Tensor:
    """Inner products of the samples' centred activations, of length 1 as a matrix (samples x samples).

    The inner product of two of them is the linear CKA (Kornblith et al., ICML 2019). Zero where all samples are alike.
    """
    flat, real = activations.flatten(1), real.unsqueeze(1)
    centred = (flat - (real * flat).sum(0) / real.sum().clamp_min(1.0)) * real
    centred = centred / torch.linalg.vector_norm(centred.detach()).clamp_min(1e-30)  # CKA knows no scale
    products = centred @ centred.T
    return products / (products.square().sum() + FLAT).sqrt()


def related(products: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """As `relations`, of all rows, from the inner products of the samples' activations (rows x samples x samples).

    With what a change of the products counts in it. Products may be of activations less anything that all samples have
    in common.
    """
    found = centred(products, real)
    trace, whole = (torch.einsum("rii,ri->r", own, real).view(-1, 1, 1) for own in (found, products))
    factor = torch.where(trace > ALIKE * whole, 1.0 / trace, 0.0)
    found = found * factor
    length = (found.square().sum((1, 2), keepdim=True) + FLAT).sqrt()
    return found / length, factor / length


def centred(products: Tensor, real: Tensor) -> Tensor:
    """Inner products of the samples less their mean (rows x samples x samples), of which some are padding."""
    count = real.sum(1, keepdim=True).clamp_min(1.0)
    side = torch.bmm(products, real.unsqueeze(2)).squeeze(2) / count
    mean = (side * real).sum(1, keepdim=True) / count
    found = products - side.unsqueeze(2) - side.unsqueeze(1) + mean.unsqueeze(2)
    return found * (real.unsqueeze(2) * real.unsqueeze(1))


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a network that hold weights: matrices or more, so that biases and normalisations do not count."""
    return [part for part in module.modules() if any(own.dim() > 1 for own in part.parameters(recurse=False))]


class _Enough(Exception):
    """Everything that was to be seen has been seen."""


@contextmanager
def watching(module: nn.Module, count: int, *, stop: bool = False) -> Iterator[list[Tensor]]:
    """What the first layers answer, in the order in which they do; stop: the others need not."""
    seen: list[Tensor] = []

    def keep(part: nn.Module, given: object, out: Tensor | tuple[Tensor, ...]) -> None:
        if len(seen) < count:
            seen.append(out if isinstance(out, Tensor) else out[0])
        if stop and len(seen) == count:
            raise _Enough

    handles = [part.register_forward_hook(keep) for part in layers_of(module)]
    try:
        with suppress(_Enough):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first_relations(module: nn.Module, count: int, tensors: Tensors, inputs: Tensor, real: Tensor) -> Tensor:
    with watching(module, count, stop=True) as seen:
        functional_call(module, tensors, (inputs,))
    return torch.stack([relations(layer, real) for layer in seen])


class Program(Protocol):
    """Scores and gradients of every row's own samples."""

    name: str
    random: bool  # whether training draws random numbers (dropout), so that its scores are not the model's own

    def scores(self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> Tensor:
        """rows x samples x classes, as the model answers when it is not in training.

        active: above zero for samples that count (rows x samples); of padding behind them the scores may be anything.
        """
        ...

    def gradients(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None = None,
        likeness: Likeness | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """d/d row of sum_b weights[row, b] * loss(row, sample b), plus lean and likeness; and the scores.

        A tensor per parameter.
        """
        ...

    def relations(self, count: int, tensors: Tensors, inputs: Tensor, real: Tensor) -> Tensor:
        """How the first layers relate the samples to each other (rows x layers x samples x samples)."""
        ...


def _weighted_loss(
    module: nn.Module,
    tensors: Tensors,
    inputs: Tensor,
    targets: Tensor,
    weights: Tensor,
    lean: Lean | None,
    likeness: Likeness | None,
) -> tuple[Tensor, Tensor]:
    if likeness is None:
        scores = functional_call(module, tensors, (inputs,))
    else:
        with watching(module, len(likeness.strength)) as seen:
            scores = functional_call(module, tensors, (inputs,))
    loss = (functional.cross_entropy(scores, targets, reduction="none") * weights).sum()
    if likeness is not None:
        loss = loss + likeness.loss(seen)
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

    def scores(self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> Tensor:
        rows = range(len(inputs))
        with answering(self.module), torch.no_grad():
            return torch.stack([functional_call(self.module, _row(tensors, row), (inputs[row],)) for row in rows])

    def relations(self, count: int, tensors: Tensors, inputs: Tensor, real: Tensor) -> Tensor:
        rows = range(len(inputs))
        with answering(self.module), torch.no_grad():
            found = [_first_relations(self.module, count, _row(tensors, row), inputs[row], real[row]) for row in rows]
        return torch.stack(found)

    def gradients(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None = None,
        likeness: Likeness | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        found, scores = [], []
        for row in range(len(inputs)):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in _row(tensors, row).items()}
            own = None if lean is None else Lean(*(entry[row] for entry in lean))
            like = None if likeness is None else Likeness(*(entry[row] for entry in likeness))
            with torch.enable_grad():
                loss, said = _weighted_loss(self.module, leaves, inputs[row], targets[row], weights[row], own, like)
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
            tensors: Tensors,
            inputs: Tensor,
            targets: Tensor,
            weights: Tensor,
            lean: tuple[Tensor, ...],
            likeness: tuple[Tensor, ...],
        ) -> tuple[Tensor, Tensor]:
            told, like = Lean(*lean) if lean else None, Likeness(*likeness) if likeness else None
            return _weighted_loss(module, tensors, inputs, targets, weights, told, like)

        def scores(tensors: Tensors, inputs: Tensor) -> Tensor:
            found: Tensor = functional_call(module, tensors, (inputs,))
            return found

        self._gradient: Callable[..., tuple[Tensors, Tensor]] = vmap(grad(loss, has_aux=True), randomness="different")
        self._scores: Callable[..., Tensor] = vmap(scores)

    def scores(self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> Tensor:
        with answering(self.module), torch.no_grad():
            if len(inputs) > 1:
                return self._scores(tensors, inputs)
            found: Tensor = functional_call(self.module, _row(tensors, 0), (inputs[0],))  # needs no mapping
            return found.unsqueeze(0)

    def relations(self, count: int, tensors: Tensors, inputs: Tensor, real: Tensor) -> Tensor:
        with answering(self.module), torch.no_grad():
            found: Tensor = vmap(partial(_first_relations, self.module, count))(tensors, inputs, real)
        return found

    def gradients(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None = None,
        likeness: Likeness | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        found, scores = self._gradient(tensors, inputs, targets, weights, tuple(lean or ()), tuple(likeness or ()))
        return list(found.values()), scores


class Goal(NamedTuple):
    """Where gradients go, by name: they are put there, or with `minus` taken off what is there."""

    tensors: Tensors
    minus: bool = False

    def take(self, name: str, gradient: Tensor) -> None:
        if self.minus:
            self.tensors[name].sub_(gradient)
        else:
            self.tensors[name] = gradient

    def take_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """A gradient that is a product: taken off, it is never stored."""
        if self.minus:
            self.tensors[name].baddbmm_(left, right, alpha=-1.0)
        else:
            self.tensors[name] = torch.bmm(left, right)

    def place(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """What is read, and where it is written, by a kernel that takes a gradient off or puts it there."""
        if self.minus:
            return self.tensors[name], self.tensors[name]
        self.tensors[name] = torch.empty_like(like)
        return like, self.tensors[name]


class Layer(NamedTuple):
    """A linear layer of a network, and whether ReLU follows."""

    name: str
    biased: bool
    relu: bool


class FeedForward:
    """Flatten, Linear and ReLU: forward and backward as batched matrix products."""

    name = "feed-forward"
    random = False
    opens = False  # whether other layers come before the linear ones

    def __init__(self, module: nn.Module) -> None:
        self.layers = feed_forward_layers(module)
        if not self.layers:
            raise EvenhandError("this program trains networks of Flatten, Linear and ReLU layers alone")

    def scores(self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> Tensor:
        return self._forward(tensors, inputs, active=active)[-1]

    def relations(self, count: int, tensors: Tensors, inputs: Tensor, real: Tensor) -> Tensor:
        answers = self._answers(count, tensors, inputs, real)
        return torch.stack([related(self.products(layer, real), real)[0] for layer in answers], dim=1)

    def products(self, activations: Tensor, real: Tensor) -> Tensor:
        """Inner products of the samples' activations, less their mean lest it drown them (rows x samples x samples).

        What stands in the place of padding has no say in the others' (nor has its own any meaning).
        """
        flat, count = activations.flatten(2), real.sum(1).clamp_min(1.0)
        flat = flat - torch.bmm(real.unsqueeze(1), flat) / count.view(-1, 1, 1)
        return torch.bmm(flat, flat.transpose(1, 2))

    def form(self, inputs: Tensor) -> Tensor:
        """Samples (samples first) as this program reads them: laid out once, in the place of at every step."""
        return inputs

    def gradients(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None = None,
        likeness: Likeness | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        goal = Goal({})
        if likeness is None:
            scores = self._through(tensors, inputs, targets, weights, lean, goal, full=False)
        else:
            seen: list[Tensor] = []
            *activations, scores = self._forward(tensors, inputs, seen, likeness.real)
            first = seen[: likeness.strength.shape[1]]
            pushes = likeness.pushes(first, [self.products(layer, likeness.real) for layer in first])
            error = self._error(scores, targets, weights, lean)
            self._back(tensors, activations, error, goal, pushes, likeness.real)
        return [goal.tensors[name] for name in tensors], scores

    def step(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None = None,
        *,
        full: bool = False,
        off: Tensors | None = None,
    ) -> Tensor:
        """One step of plain SGD (the weights carry the learning rate), folded into the products that form it.

        full: no sample is known to be padding, without weight, so that none need be looked for. off: what the gradients
        are taken off, where that is not the tensors themselves.
        """
        return self._through(tensors, inputs, targets, weights, lean, Goal(off or tensors, minus=True), full)

    def _through(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None,
        goal: Goal,
        full: bool,
    ) -> Tensor:
        """Forwards and back; returns the scores."""
        active = None if full or lean is not None else weights
        activations = self._forward(tensors, inputs, active=active)
        scores = activations.pop()
        self._back(tensors, activations, self._error(scores, targets, weights, lean), goal, active=active)
        return scores

    def _forward(
        self, tensors: Tensors, inputs: Tensor, seen: list[Tensor] | None = None, active: Tensor | None = None
    ) -> list[Tensor]:
        """Activations: the input of every linear layer, and the scores last.

        seen: takes what every layer answers. active: as in `scores`, for layers before the linear ones.
        """
        activations = [inputs.flatten(2)]
        for layer in self.layers:
            activations.append(self._layer(tensors, layer, activations[-1], seen))
        return activations

    def _answers(self, count: int, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> list[Tensor]:
        """What the first layers answer; active: as in `_forward`."""
        answers, x = list[Tensor](), inputs.flatten(2)
        for layer in self.layers[:count]:
            x = self._layer(tensors, layer, x, answers)
        return answers

    def _layer(self, tensors: Tensors, layer: Layer, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        weight = tensors[f"{layer.name}.weight"].transpose(1, 2)
        if layer.biased:
            out = torch.baddbmm(tensors[f"{layer.name}.bias"].unsqueeze(1), x, weight)
        else:
            out = torch.bmm(x, weight)
        if seen is not None:
            seen.append(out)
            return out.relu() if layer.relu else out
        return out.relu_() if layer.relu else out

    def _error(self, scores: Tensor, targets: Tensor, weights: Tensor, lean: Lean | None) -> Tensor:
        """Derivative of the weighted cross-entropy, and of what leans on it, with respect to the scores."""
        error = torch.softmax(scores, dim=-1)
        error.scatter_add_(2, targets.unsqueeze(2), scores.new_full((), -1.0).expand(*targets.shape, 1))
        error.mul_(weights.unsqueeze(2))
        return error if lean is None else error.add_(lean.error(scores))

    def _back(
        self,
        tensors: Tensors,
        activations: list[Tensor],
        error: Tensor,
        goal: Goal,
        pushes: Sequence[Tensor] = (),
        active: Tensor | None = None,
    ) -> Tensor:
        """From the scores' error down; returns the error below the linear layers, where others come before them.

        pushes: what the first layers' answers have of errors besides. active: as in `_forward`.
        """
        for depth in reversed(range(len(self.layers))):
            below, gated = self._below(depth)
            if depth < len(pushes):
                error = error + pushes[depth]
            error = self._layer_back(tensors, self.layers[depth], activations[depth], error, below, gated, goal)
        return error

    def _below(self, depth: int) -> tuple[bool, bool]:
        """Whether the error below a linear layer is wanted, and whether a ReLU stands there."""
        return depth > 0 or self.opens, depth > 0 and self.layers[depth - 1].relu

    def _layer_back(
        self,
        tensors: Tensors,
        layer: Layer,
        x: Tensor,
        error: Tensor,
        below: bool,
        gated: bool,
        goal: Goal,
    ) -> Tensor:
        """One layer's part of it; returns the error below, where it is wanted."""
        weight, bias = f"{layer.name}.weight", f"{layer.name}.bias"
        down = torch.bmm(error, tensors[weight]) if below else error
        goal.take_product(weight, error.transpose(1, 2), x)
        if layer.biased:
            goal.take(bias, error.sum(1))
        return down.mul_(x > 0) if below and gated else down


def feed_forward_layers(module: nn.Module) -> list[Layer]:
    """Every Linear layer; none where the module is anything but these, ReLU and an opening Flatten."""
    if not isinstance(module, nn.Sequential) or not all(p.requires_grad for p in module.parameters()):
        return []
    layers: list[Layer] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            layers.append(Layer(name, child.bias is not None, False))
        elif isinstance(child, nn.ReLU) and layers and not layers[-1].relu:
            layers[-1] = layers[-1]._replace(relu=True)
        elif not (isinstance(child, nn.Flatten) and not layers):
            return []
    return layers if layers and not layers[-1].relu else []
