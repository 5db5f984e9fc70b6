"""The papers' networks, each an `nn.Sequential` with named layers that trains under `vmap` and `grad`.

Nothing here (nor in `transformer` and `recurrent`) keeps running statistics, branches on data or writes in place, so a
whole cohort trains as one program. Dropout and stochastic depth are options and off by default: with them the batched
program draws other masks than training the clients one by one, and a run is no longer the same either way.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenhand.checks import EvenhandError, flag, number

Shape = tuple[int, ...]
Named = tuple[str, nn.Module]

RELU_GAIN = 1.7139588594436646  # restores unit variance behind a ReLU; measured by Brock et al., kept to the digit


def stack(layers: Sequence[Named]) -> nn.Sequential:
    """A plain `nn.Sequential` whose layers carry names, which the reports show."""
    return nn.Sequential(OrderedDict(layers))


# ------------------------------------------------------------------------------------------- feed-forward


def feed_forward(shape: Shape, widths: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[Named] = [("flatten", nn.Flatten())]
    sizes = [math.prod(shape), *widths]
    for index, (inputs, width) in enumerate(pairwise(sizes), start=1):
        layers += [(f"hidden{index}", nn.Linear(inputs, width)), (f"relu{index}", nn.ReLU())]
    return stack([*layers, ("head", nn.Linear(sizes[-1], outputs))])


def logistic(shape: Shape, outputs: int, *, zero_bias: bool = False) -> nn.Sequential:
    """Multinomial logistic regression; zero_bias starts the biases at 0, as FedFV's and q-FFL's code does."""
    flag("zero_bias", zero_bias)
    model = feed_forward(shape, [], outputs)
    if zero_bias:
        nn.init.zeros_(model.get_parameter("head.bias"))
    return model


def mlp(shape: Shape, outputs: int, *, width: int = 200, depth: int = 2) -> nn.Sequential:
    """Feed-forward network with two hidden layers of 200, ReLU."""
    number("width", width, low=1, whole=True)
    number("depth", depth, low=1, whole=True)
    return feed_forward(shape, [width] * depth, outputs)


def mlp4(shape: Shape, outputs: int, *, width: int = 64) -> nn.Sequential:
    """Feed-forward network with four hidden layers, ReLU; the paper names no width, 64 is ours."""
    return mlp(shape, outputs, width=width, depth=4)


# ------------------------------------------------------------------------------------------- convolutional


def as_image(model: str, shape: Shape, smallest: int) -> tuple[tuple[int, int, int], list[Named]]:
    """The image a sample holds, (channels, height, width), and the layer that folds the sample into it where needed.

    Flat samples count as square images of one or three channels; no length is both.
    """
    image: tuple[int, ...] = ()
    if len(shape) == 3:
        image = shape
    elif len(shape) == 2:
        image = (1, *shape)
    elif len(shape) == 1:
        squares = ((channels, math.isqrt(shape[0] // channels)) for channels in (1, 3))
        image = next(((c, side, side) for c, side in squares if side and c * side * side == shape[0]), ())
    if not image:
        raise EvenhandError(
            f"{model} takes images, (channels, height, width) or flat square ones, not samples of shape {shape}; "
            "use 'mlp' or 'logistic'"
        )
    if min(image[1:]) < smallest:
        swapped = image[0] > 4 and image[2] in (1, 3, 4)
        padded = smallest == 16 and min(image[1:]) >= 4
        hint = "put the channels first" if swapped else "use 'mlp'" + padded * ", or 'cnn-mnist' with padding=2"
        raise EvenhandError(
            f"{model} needs images of at least {smallest} x {smallest}; a sample of shape {shape} is "
            f"{image[1]} x {image[2]} with {image[0]} channels: {hint}"
        )
    folds = {1: image, 2: image[:2]}
    opening: list[Named] = [("image", nn.Unflatten(1, folds[len(shape)]))] if len(shape) in folds else []
    return (image[0], image[1], image[2]), opening


class PooledConv2d(nn.Conv2d):
    """Convolution, ReLU and 2x2 max-pooling, pooled first: the same numbers from a quarter of the additions.

    Adding a channel's bias and cutting at zero keep the order of numbers, so the largest of four stays the largest.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, padding: int = 0, relu: bool = True) -> None:
        super().__init__(inputs, outputs, kernel, padding=padding)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        found = F.max_pool2d(F.conv2d(x, self.weight, padding=self.padding), 2) + self.bias[:, None, None]
        return F.relu(found) if self.relu else found


def cnn(shape: Shape, outputs: int, *, dropout: bool = False) -> nn.Sequential:
    """Two 5x5 convolutions of 64 channels, then 384 and 192 units; dropout turns on the code's shares .2 and .5."""
    flag("dropout", dropout)
    (channels, height, width), layers = as_image("cnn", shape, 16)
    for index, inputs in enumerate((channels, 64), start=1):
        layers.append((f"conv{index}", PooledConv2d(inputs, 64, 5)))
        height, width = (height - 4) // 2, (width - 4) // 2
    layers.append(("flatten", nn.Flatten()))
    sizes = [64 * height * width, 384, 192]
    for index, ((inputs, units), share) in enumerate(zip(pairwise(sizes), (0.2, 0.5), strict=True), start=3):
        layers.append((f"fc{index - 2}", nn.Linear(inputs, units)))
        if dropout:
            layers.append((f"dropout{index - 2}", nn.Dropout(share)))
        layers.append((f"relu{index}", nn.ReLU()))
    return stack([*layers, ("head", nn.Linear(192, outputs))])


def cnn_mnist(
    shape: Shape, outputs: int, *, hidden: int = 512, padding: int = 0, conv_relu: bool = True
) -> nn.Sequential:
    """Two 5x5 convolutions of 32 and 64 channels, then 512 units; FedFV's code has conv_relu=False and outputs=62."""
    number("hidden", hidden, low=1, whole=True)
    number("padding", padding, low=0, high=2, whole=True)
    flag("conv_relu", conv_relu)
    (inputs, height, width), layers = as_image("cnn-mnist", shape, 16 - 6 * padding)
    for index, channels in enumerate((32, 64), start=1):
        layers.append((f"conv{index}", PooledConv2d(inputs, channels, 5, padding=padding, relu=conv_relu)))
        height, width = (height - 4 + 2 * padding) // 2, (width - 4 + 2 * padding) // 2
        inputs = channels
    return stack(
        [
            *layers,
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(64 * height * width, hidden)),
            ("relu3", nn.ReLU()),
            ("head", nn.Linear(hidden, outputs)),
        ]
    )


# ------------------------------------------------------------------------------------------- residual


def normal_(weight: Tensor, std: float) -> None:
    """Normal values drawn in float64 and rounded, because float32 draws differ in the last bit between processors."""
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, dtype=torch.float64, device="cpu") * std)


class Residual(nn.Module):
    """ResNet's basic block with group normalisation in the place of batch normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.GroupNorm(groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def resnet18_gn(shape: Shape, outputs: int, *, width: int = 64, groups: int = 32) -> nn.Sequential:
    """ResNet-18 with group normalisation and the 3x3 stem for small images."""
    number("width", width, low=1, whole=True)
    number("groups", groups, low=1, whole=True)
    if width % groups:
        raise EvenhandError(f"groups={groups} does not divide width={width}")
    (channels, _, _), layers = as_image("resnet18-gn", shape, 8)
    layers += [
        ("stem", nn.Conv2d(channels, width, 3, padding=1, bias=False)),
        ("norm", nn.GroupNorm(groups, width)),
        ("relu", nn.ReLU()),
    ]
    layers += [
        (name, Residual(inputs, channels, stride, groups))
        for name, inputs, channels, stride in _stages(width, [width, 2 * width, 4 * width, 8 * width])
    ]
    model = stack([*layers, *_pooled_head(8 * width, outputs)])
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # He's initialisation, by the fan out
            normal_(module.weight, math.sqrt(2.0 / (module.out_channels * math.prod(module.kernel_size))))
    return model


class StandardisedConv2d(nn.Conv2d):
    """Convolution whose filters are brought to mean 0 and variance 1/fan-in, times a learnt gain (Brock et al.)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        fan_in = math.prod(self.weight.shape[1:])
        self.scale = fan_in**-0.5
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))
        normal_(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        spread = self.weight.std((1, 2, 3), correction=0, keepdim=True)
        weight = self.gain * self.scale * centred / (spread + 1e-5)
        return F.conv2d(x, weight, None, self.stride, self.padding)


class NormFreeResidual(nn.Module):
    """Basic block without normalisation: activate, convolve, activate, convolve, and add alpha times that."""

    def __init__(self, inputs: int, outputs: int, stride: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.conv1 = StandardisedConv2d(inputs, outputs, 3, stride)
        self.conv2 = StandardisedConv2d(outputs, outputs, 3)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else StandardisedConv2d(inputs, outputs, 1, stride)
        self.alpha = alpha
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.relu(x) * (RELU_GAIN * self.beta))
        return self.alpha * self.conv2(F.relu(inner) * RELU_GAIN) + self.shortcut(x)


def nf_resnet18(shape: Shape, outputs: int, *, alpha: float = 0.2, beta: float = 1.0) -> nn.Sequential:
    """FedLF's small ResNet without normalisation: standardised weights, three stages of 16, 32 and 64 channels."""
    number("alpha", alpha, above=0.0)
    number("beta", beta, above=0.0)
    (channels, _, _), layers = as_image("nf-resnet18", shape, 8)
    layers += [
        ("stem", StandardisedConv2d(channels, 64, 3)),
        ("relu", nn.ReLU()),
        ("pool", nn.MaxPool2d(3, 2, padding=1)),
    ]
    layers += [
        (name, NormFreeResidual(inputs, channels, stride, alpha, beta))
        for name, inputs, channels, stride in _stages(64, [16, 32, 64])
    ]
    return stack([*layers, *_pooled_head(64, outputs)])


def _stages(inputs: int, widths: Sequence[int]) -> Iterator[tuple[str, int, int, int]]:
    """Two blocks a stage, halving the image from the second stage on: (name, inputs, outputs, stride)."""
    for stage, width in enumerate(widths, start=1):
        yield f"block{stage}a", inputs, width, 1 if stage == 1 else 2
        yield f"block{stage}b", width, width, 1
        inputs = width


def _pooled_head(channels: int, outputs: int) -> list[Named]:
    return [
        ("average", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("head", nn.Linear(channels, outputs)),
    ]
