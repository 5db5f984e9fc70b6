"""The compact convolutional transformer.

Paper: Hassani et al., "Escaping the Big Data Paradigm with Compact Transformers", 2021.
Attention is written in plain matrix products. The layout follows the authors' code, which FedLF uses: the second branch
of a layer starts from the tokens its normalisation returns, and the linear layers start normal with deviation 0.02.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenhand.checks import EvenhandError, number
from evenhand.models.networks import Shape, as_image, normal_, stack


class Tokens(nn.Module):
    """Feature maps (batch, channels, height, width) to tokens (batch, places, channels) plus learnt positions."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(1, places, width))
        normal_(self.positions, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) + self.positions


class StochasticDepth(nn.Dropout):
    """Drops a sample's whole branch with probability p in training."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        return input * F.dropout(torch.ones_like(input[:, :1, :1]), self.p)


class Encoder(nn.Module):
    """Self-attention, then two linear layers, each added to what it read."""

    def __init__(self, width: int, heads: int, ratio: float, dropout: float, attention: float, depth: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, int(width * ratio))
        self.fc2 = nn.Linear(int(width * ratio), width)
        self.dropout = nn.Dropout(dropout)
        self.attention_dropout = nn.Dropout(attention)
        self.drop_branch = StochasticDepth(depth)

    def attend(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        split = self.qkv(x).reshape(batch, places, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        mixed = (self.attention_dropout(weights) @ value).transpose(1, 2).reshape(batch, places, width)
        return self.dropout(self.projection(mixed))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_branch(self.attend(self.norm1(x))))
        inner = self.dropout(F.gelu(self.fc1(x)))
        return x + self.drop_branch(self.dropout(self.fc2(inner)))


class SequencePool(nn.Module):
    """The tokens' mean, weighted by a learnt score of each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1) * x).sum(1)


def cct(
    shape: Shape,
    outputs: int,
    *,
    layers: int = 7,
    heads: int = 4,
    width: int = 256,
    ratio: float = 2.0,
    kernel: int = 3,
    convolutions: int = 1,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    stochastic_depth: float = 0.0,
) -> nn.Sequential:
    """Compact convolutional transformer CCT-7/3x1; FedLF's code has attention_dropout and stochastic_depth at 0.1."""
    whole = {"layers": layers, "heads": heads, "width": width, "kernel": kernel, "convolutions": convolutions}
    for name, value in whole.items():
        number(name, value, low=1, whole=True)
    shares = {"dropout": dropout, "attention_dropout": attention_dropout, "stochastic_depth": stochastic_depth}
    for name, share in shares.items():
        number(name, share, low=0.0, high=0.999)
    number("ratio", ratio, low=1.0 / width)
    if width % heads:
        raise EvenhandError(f"heads={heads} does not divide width={width}")
    (inputs, height, breadth), named = as_image("cct", shape, 8)
    stride, padding = max(1, kernel // 2 - 1), max(1, kernel // 2)
    for index in range(1, convolutions + 1):
        channels = width if index == convolutions else 64
        convolution = nn.Conv2d(inputs, channels, kernel, stride, padding, bias=False)
        normal_(convolution.weight, math.sqrt(2.0 / (inputs * kernel * kernel)))
        named += [
            (f"conv{index}", convolution),
            (f"relu{index}", nn.ReLU()),
            (f"pool{index}", nn.MaxPool2d(3, 2, padding=1)),
        ]
        height, breadth = (((side + 2 * padding - kernel) // stride + 2) // 2 for side in (height, breadth))
        inputs = channels
    encoders = [
        (
            f"encoder{index + 1}",
            Encoder(width, heads, ratio, dropout, attention_dropout, stochastic_depth * index / max(1, layers - 1)),
        )
        for index in range(layers)
    ]
    model = stack(
        [
            *named,
            ("tokens", Tokens(height * breadth, width)),
            *([("dropout", nn.Dropout(dropout))] if dropout else []),
            *encoders,
            ("norm", nn.LayerNorm(width)),
            ("pool", SequencePool(width)),
            ("head", nn.Linear(width, outputs)),
        ]
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            normal_(module.weight, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
