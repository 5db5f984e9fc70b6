"""The character model of the Shakespeare experiments, with an LSTM that trains for many clients at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenhand.checks import EvenhandError, number
from evenhand.models.networks import Shape, normal_, stack


class LSTM(nn.Module):
    """`nn.LSTM(batch_first=True)` in plain matrix products, which vmap can batch; the parameters have the same names.

    (batch, steps, inputs) -> (batch, steps, hidden): the top layer's state at every step, from a zero start.
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = layers
        for layer in range(layers):
            inputs = inputs if layer == 0 else hidden
            for name, *size in (("weight_ih", inputs), ("weight_hh", hidden), ("bias_ih",), ("bias_hh",)):
                values = torch.empty(4 * hidden, *size).uniform_(-(hidden**-0.5), hidden**-0.5)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            x = self._layer(
                x, *(getattr(self, f"{n}_l{layer}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            )
        return x

    def _layer(self, x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        driven = F.linear(x, weight_ih, bias_ih + bias_hh)  # all steps at once; only the recurrence is sequential
        hidden = cell = torch.zeros_like(driven[:, 0, : self.hidden])
        steps = []
        for step in driven.unbind(1):
            into, forget, candidate, out = (step + F.linear(hidden, weight_hh)).chunk(4, -1)
            cell = forget.sigmoid() * cell + into.sigmoid() * candidate.tanh()
            hidden = out.sigmoid() * cell.tanh()
            steps.append(hidden)
        return torch.stack(steps, 1)


class LastStep(nn.Module):
    """The last of a sequence's steps."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def char_lstm(
    shape: Shape,
    outputs: int,
    *,
    layers: int = 2,
    hidden: int = 256,
    embedding: int = 8,
    vocabulary: int | None = None,
) -> nn.Sequential:
    """Next character from a row of tokens: embedding of 8, LSTM layers of 256; AdaFed's second set-up has layers=1."""
    if len(shape) != 1:
        raise EvenhandError(
            f"char-lstm takes rows of whole-number tokens, shape (length,), not samples of shape {shape}"
        )
    vocabulary = outputs if vocabulary is None else vocabulary
    for name, value in {"layers": layers, "hidden": hidden, "embedding": embedding, "vocabulary": vocabulary}.items():
        number(name, value, low=1, whole=True)
    table = nn.Embedding(vocabulary, embedding)
    normal_(table.weight, 1.0)
    return stack(
        [
            ("embedding", table),
            ("lstm", LSTM(embedding, hidden, layers)),
            ("last", LastStep()),
            ("head", nn.Linear(hidden, outputs)),
        ]
    )
