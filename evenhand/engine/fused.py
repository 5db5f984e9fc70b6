"""The program of a GPU: pooled convolutions, linear layers and ReLU by kernels that serve all rows at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenhand.checks import EvenhandError
from evenhand.engine.programs import FeedForward, Goal, Layer, Lean, Tensors, feed_forward_layers
from evenhand.models.networks import PooledConv2d

WIDEST = 128  # samples, channels and classes that one program of the kernels holds at once
LARGEST = 1000.0  # of the samples: what is made of them by convolutions is kept in float16, which ends at 65,504
LIFT = 128.0  # the largest error that goes back into convolutions, of each row: far from what float16 cannot hold


class Convolution(NamedTuple):
    """A layer of convolution, 2x2 max-pooling and, where it is so, ReLU."""

    name: str
    padding: int
    relu: bool


class Opening(NamedTuple):
    """What comes before a network's linear layers: its images' form, and convolutions."""

    form: nn.Module | None
    convolutions: tuple[Convolution, ...]


def fused_layers(module: nn.Module) -> tuple[Opening, list[Layer]]:
    """A network's layers; no linear ones where there is anything that the kernels do not know."""
    nothing: tuple[Opening, list[Layer]] = (Opening(None, ()), [])
    if not isinstance(module, nn.Sequential):
        return nothing
    children = list(module.named_children())
    form = children.pop(0)[1] if children and isinstance(children[0][1], nn.Unflatten) else None
    convolutions = []
    while children and type(children[0][1]) is PooledConv2d:
        name, part = children.pop(0)
        assert isinstance(part, PooledConv2d)
        if max(part.in_channels, part.out_channels) > WIDEST or not all(p.requires_grad for p in part.parameters()):
            return nothing
        convolutions.append(Convolution(name, int(part.padding[0]), part.relu))
    if (form is not None or convolutions) and not (children and isinstance(children[0][1], nn.Flatten)):
        return nothing
    return Opening(form, tuple(convolutions)), feed_forward_layers(nn.Sequential(OrderedDict(children)))


class Fused(FeedForward):
    """Forward and backward written out, a kernel a layer; linear layers of wider batches are the library's products."""

    name = "fused"

    def __init__(self, module: nn.Module, device: torch.device | None = None, precision: str = "tf32") -> None:
        self.opening, self.layers = fused_layers(module)
        if not self.layers:
            raise EvenhandError("program='fused' trains networks of pooled convolutions, Linear and ReLU layers alone")
        if not served(device):
            raise EvenhandError(
                "program='fused' needs a CUDA GPU of compute capability 8.0 or more and Triton, which comes with "
                "PyTorch for CUDA; use program='auto'"
            )
        from evenhand.engine import convolution_kernels, kernels

        self.kernels: Any = kernels
        self.convolutions: Any = convolution_kernels
        self.opens = bool(self.opening.convolutions)
        self.precision = {"tf32": "tf32", "float32": "ieee"}[precision]
        self.stored = {"tf32": torch.float16, "float32": torch.float32}[precision]  # images and their errors

    def check_range(self, inputs: Tensor) -> None:
        """Refuse samples of which float16 could not hold what convolutions make."""
        if not self.opens or self.stored != torch.float16 or not inputs.numel():
            return
        largest = float(torch.linalg.vector_norm(inputs, torch.inf))  # which copies nothing
        if largest > LARGEST:
            raise EvenhandError(
                f"the samples hold numbers up to {largest:.6g}, and with precision='tf32' convolutions keep theirs in "
                f"float16, for which {LARGEST:g} is much: bring the samples to about 1 (divide by {largest:.6g}), or "
                "set precision='float32'"
            )

    def form(self, inputs: Tensor) -> Tensor:
        """Images with their channels last, in the format that convolutions read."""
        if not self.opens:
            return inputs
        images = inputs if self.opening.form is None else self.opening.form(inputs)
        found: Tensor = self.convolutions.laid_out(images.permute(0, 2, 3, 1), self.stored)
        return found

    @staticmethod
    def fits(module: nn.Module, device: torch.device | None) -> bool:
        """Whether this program can train the module here."""
        return bool(fused_layers(module)[1]) and served(device)

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
        named = [(f"{layer.name}.weight", f"{layer.name}.bias" if layer.biased else None) for layer in self.layers]
        given = [(tensors[weight], None if bias is None else tensors[bias]) for weight, bias in named]
        if lean is not None or max(weights.shape[1], given[-1][0].shape[1]) > WIDEST:
            return super()._through(tensors, inputs, targets, weights, lean, goal, full)
        active = None if full else weights
        how: dict[str, Any] = {"precision": self.precision, "active": active}
        kept, flat = self._opened(tensors, inputs, active)
        activations = [flat.flatten(2)]
        for layer, own in zip(self.layers[:-1], given, strict=False):
            activations.append(self.kernels.linear(activations[-1], *own, relu=layer.relu, **how))
        last = len(self.layers) - 1
        wanted, gated = self._below(last)
        told = {"below": wanted, "gated": gated, "precision": self.precision, "skip": active is not None}
        scores, error, below = self.kernels.head(activations[last], *given[last], targets, weights, **told)
        for depth in reversed(range(len(self.layers))):
            x, (weight, bias) = activations[depth], given[depth]
            wanted, gated = self._below(depth)
            if depth < last and wanted:
                below = self.kernels.down(error, x, weight, gated=gated, **how)
            places = goal.place(named[depth][0], weight), _place(goal, named[depth][1], bias)
            read, out = zip(*places, strict=True)
            self.kernels.gradient(error, x, *read, *out, step=goal.minus, **how)
            error = below
        if self.opens:
            self._convolutions_back(tensors, kept, error, goal, active)
        return scores

    def _opened(
        self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None, most: int | None = None
    ) -> tuple[list[Any], Tensor]:
        """What every convolution's way back needs, and what the linear layers are given, of samples in their `form`.

        active: weights of the samples; those of padding are not looked at, and the linear layers are given zeros.
        most: only so many of the convolutions.
        """
        kept: list[Any] = []
        if not self.opens:
            return kept, inputs
        images = inputs.to(self.stored).contiguous()
        for name, padding, relu in self.opening.convolutions[:most]:
            images, own = self.convolutions.convolve(
                images,
                tensors[f"{name}.weight"],
                tensors[f"{name}.bias"],
                padding=padding,
                relu=relu,
                precision=self.precision,
                stored=torch.float32 if name == self.opening.convolutions[-1].name else self.stored,
                active=active,
            )
            kept.append(own)
        return kept, images.permute(0, 1, 4, 2, 3)  # a network flattens channel by channel

    def _forward(
        self, tensors: Tensors, inputs: Tensor, seen: list[Tensor] | None = None, active: Tensor | None = None
    ) -> list[Any]:
        """What `_opened` keeps, then as in `FeedForward`."""
        kept, flat = self._opened(tensors, inputs, active)
        if seen is not None:
            seen += _answered(kept, flat)
        return [*kept, *super()._forward(tensors, flat, seen)]

    def _answers(self, count: int, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> list[Tensor]:
        kept, flat = self._opened(tensors, inputs, active, most=count)
        return [*_answered(kept, flat), *super()._answers(count - len(kept), tensors, flat)]

    def products(self, activations: Tensor, real: Tensor) -> Tensor:
        if activations.dtype != torch.float16 or activations.shape[1] > WIDEST:
            return super().products(activations.to(torch.float32), real)
        found: Tensor = self.kernels.products(activations.flatten(2))  # exact products, so that the mean drowns nothing
        return found

    def _back(
        self,
        tensors: Tensors,
        activations: list[Any],
        error: Tensor,
        goal: Goal,
        pushes: Sequence[Tensor] = (),
        active: Tensor | None = None,
    ) -> Tensor:
        count = len(self.opening.convolutions)
        error = super()._back(tensors, activations[count:], error, goal, pushes[count:])
        if count:
            self._convolutions_back(tensors, activations[:count], error, goal, active, pushes[:count])
        return error

    def _convolutions_back(
        self,
        tensors: Tensors,
        kept: list[Any],
        error: Tensor,
        goal: Goal,
        active: Tensor | None = None,
        pushes: Sequence[Tensor] = (),
    ) -> None:
        """From the error of what the convolutions answer; pushes: what the first of them have of it besides."""
        rows, samples, high, wide, channels = kept[-1].winner.shape
        if len(pushes) == len(kept):
            error = error + pushes[-1].flatten(2)
        between = pushes[: len(kept) - 1]
        # Errors may be small numbers, of which float16 has few: each row's are multiplied such that they are not.
        largest = torch.linalg.vector_norm(error, torch.inf, dim=2).amax(1)
        for push in between:
            largest = torch.maximum(largest, torch.linalg.vector_norm(push.flatten(1), torch.inf, dim=1))
        # (What stands in the place of one that stands still, and was never computed, may not even be finite.)
        scale = torch.where((largest > 0) & torch.isfinite(largest), largest / LIFT, 1.0)
        shown = torch.empty(rows, samples, high, wide, channels, dtype=self.stored, device=error.device)
        places = error.view(rows, samples, channels, high, wide).permute(0, 1, 3, 4, 2)
        torch.div(places, scale.view(-1, 1, 1, 1, 1), out=shown)
        for depth, (name, padding, _) in reversed(list(enumerate(self.opening.convolutions))):
            if depth < len(between):
                shown += between[depth] / scale.view(-1, 1, 1, 1, 1)
            named = (f"{name}.weight", f"{name}.bias")
            read, out = zip(*(goal.place(own, tensors[own]) for own in named), strict=True)
            shown = self.convolutions.convolution_back(
                shown,
                kept[depth],
                scale,
                *read,
                *out,
                step=goal.minus,
                below=depth > 0,
                padding=padding,
                precision=self.precision,
                active=active,
            )


def _answered(kept: list[Any], flat: Tensor) -> list[Tensor]:
    """What convolutions answer: each the images of the next."""
    return [*(own.images for own in kept[1:]), flat] if kept else []


def _place(goal: Goal, name: str | None, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if name is None or like is None else goal.place(name, like)


def served(device: torch.device | None) -> bool:
    """Whether the kernels run on a device."""
    if device is None or device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
