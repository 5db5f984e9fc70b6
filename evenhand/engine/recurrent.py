"""The program of character models: an LSTM's steps, forwards and back, written out for all rows at once.

Autograd under vmap takes some sixty launches a character. Here a character is a product and a few operations each way,
or on a GPU one kernel each way (evenhand.engine.recurrent_kernels). What the first layer is driven by depends on the
character alone, so it is computed once for each of the alphabet's and looked up; gradients of the weights are one
product over all characters at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.checks import EvenhandError
from evenhand.engine.fused import served
from evenhand.engine.programs import Batched, FeedForward, Goal, Layer, Lean, Likeness, Tensors
from evenhand.models.recurrent import LSTM, LastStep


class Course(NamedTuple):
    """One layer's way through the characters, each of rows x characters x samples x units."""

    hidden: Tensor
    cells: Tensor
    gates: Tensor | None  # into, forget, candidate, out; none where nothing goes back


class Recurrent(FeedForward):
    """Embedding, LSTM, its last step, Linear."""

    name = "recurrent"
    opens = True

    def __init__(self, module: nn.Module, device: torch.device | None = None, precision: str = "tf32") -> None:
        names = recurrent_parts(module)
        if not names:
            raise EvenhandError(
                "program='recurrent' trains networks of Embedding, evenhand.models.LSTM, its last step and Linear alone"
            )
        self.embedding, self.lstm, head = names
        part = module.get_submodule(self.lstm)
        assert isinstance(part, LSTM)
        self.depth = part.layers
        self.layers = [Layer(head, module.get_submodule(head).bias is not None, False)]
        self.kernels: Any = None
        if precision == "tf32" and served(device):  # in full float32 the library's products are faster
            from evenhand.engine import recurrent_kernels

            self.kernels = recurrent_kernels
        self._mapped = Batched(module)  # for what is not written out

    def scores(self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None) -> Tensor:
        courses = self._opened(tensors, inputs, active, keep=False)
        return super()._forward(tensors, courses[-1].hidden[:, -1])[-1]

    def relations(self, count: int, tensors: Tensors, inputs: Tensor, real: Tensor) -> Tensor:
        return self._mapped.relations(count, tensors, inputs, real)

    def gradients(
        self,
        tensors: Tensors,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        lean: Lean | None = None,
        likeness: Likeness | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        if likeness is not None:
            return self._mapped.gradients(tensors, inputs, targets, weights, lean, likeness)
        return super().gradients(tensors, inputs, targets, weights, lean)

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
        active = None if full or lean is not None else weights  # a row without any is not even looked at
        courses = self._opened(tensors, inputs, active, keep=True)
        last, scores = super()._forward(tensors, courses[-1].hidden[:, -1])
        error = super()._back(tensors, [last], self._error(scores, targets, weights, lean), goal)
        self._courses_back(tensors, inputs, courses, error, goal, active)
        return scores

    def _name(self, kind: str, depth: int) -> str:
        return f"{self.lstm}.{kind}_l{depth}"

    def _opened(self, tensors: Tensors, inputs: Tensor, active: Tensor | None = None, *, keep: bool) -> list[Course]:
        """Every layer's course through the inputs (rows x samples x characters)."""
        courses: list[Course] = []
        places = inputs.transpose(1, 2).contiguous()
        for depth in range(self.depth):
            below = courses[-1].hidden.flatten(1, 2) if courses else tensors[f"{self.embedding}.weight"]
            bias = tensors[self._name("bias_ih", depth)] + tensors[self._name("bias_hh", depth)]
            weight = tensors[self._name("weight_ih", depth)]
            driven = torch.baddbmm(bias.unsqueeze(1), below, weight.transpose(1, 2))
            steps = self.kernels.forwards if self.kernels is not None else forwards
            given = (driven, None if courses else places, places.shape, tensors[self._name("weight_hh", depth)])
            courses.append(Course(*steps(*given, active=active, keep=keep)))
        return courses

    def _courses_back(
        self,
        tensors: Tensors,
        inputs: Tensor,
        courses: list[Course],
        error: Tensor,
        goal: Goal,
        active: Tensor | None,
    ) -> None:
        """From the error of the last step's state down to the embedding."""
        samples = inputs.shape[1]
        for depth in reversed(range(self.depth)):
            course = courses[depth]
            steps = self.kernels.backwards if self.kernels is not None else backwards
            errors = steps(course, error, tensors[self._name("weight_hh", depth)], active=active).flatten(1, 2)
            turned = errors.transpose(1, 2)
            before = course.hidden[:, :-1].flatten(1, 2)
            goal.take_product(self._name("weight_hh", depth), turned[:, :, samples:], before)
            weight = tensors[self._name("weight_ih", depth)]
            if depth:
                below = courses[depth - 1].hidden.flatten(1, 2)
                error = torch.bmm(errors, weight).view_as(courses[depth - 1].hidden)
                summed = errors.sum(1)
            else:
                below = tensors[f"{self.embedding}.weight"]
                tokens = inputs.transpose(1, 2).flatten(1)
                each = functional.one_hot(tokens, below.shape[1]).to(errors.dtype)
                by_token = torch.bmm(each.transpose(1, 2), errors)  # nothing is added up by atomics
                turned, summed = by_token.transpose(1, 2), by_token.sum(1)
                embedded = torch.bmm(by_token, weight)
            goal.take_product(self._name("weight_ih", depth), turned, below)
            goal.take(self._name("bias_ih", depth), summed)
            goal.take(self._name("bias_hh", depth), summed)
        goal.take(f"{self.embedding}.weight", embedded)


def forwards(
    driven: Tensor,
    places: Tensor | None,
    shape: torch.Size,
    weight: Tensor,
    *,
    active: Tensor | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, cells and gates of one layer at every character.

    driven: rows x places x 4 units, what drives the gates besides the state; places: which one each sample's character
    has, of `shape` rows x characters x samples (None: one after another).
    """
    rows, characters, samples = shape
    transposed, units = weight.transpose(1, 2), weight.shape[2]
    if places is None:
        driven = driven.view(rows, characters, samples, -1)
    which = torch.arange(rows, device=driven.device).unsqueeze(1)
    hidden, cell = driven.new_empty(0), driven.new_empty(0)
    states, cells, gates = [], [], []
    for step in range(characters):
        own = driven[:, step] if places is None else driven[which, places[:, step]]
        if step:
            own = torch.baddbmm(own, hidden, transposed)
        elif places is None:
            own = own.clone()
        own[..., : 2 * units].sigmoid_()
        own[..., 2 * units : 3 * units].tanh_()
        own[..., 3 * units :].sigmoid_()
        into, forget, candidate, out = own.chunk(4, -1)
        cell = torch.addcmul(forget * cell, into, candidate) if step else into * candidate
        hidden = out * cell.tanh()
        states.append(hidden)
        cells.append(cell)
        if keep:
            gates.append(own)
    return torch.stack(states, 1), torch.stack(cells, 1), torch.stack(gates, 1) if keep else None


def backwards(course: Course, error: Tensor, weight: Tensor, *, active: Tensor | None = None) -> Tensor:
    """The error of one layer's gates before they are squashed, at every character.

    error: of the hidden states, of the last one (rows x samples x units) or of all.
    """
    hidden, cells, gates = course
    assert gates is not None
    characters = hidden.shape[1]
    errors = torch.empty_like(gates)
    pulled, own = error.new_empty(0), error.new_empty(0)
    for step in reversed(range(characters)):
        last = step + 1 == characters
        if last:
            down = error if error.dim() == 3 else error[:, step]
        else:
            down = torch.bmm(own, weight) if error.dim() == 3 else torch.baddbmm(error[:, step], own, weight)
        into, forget, candidate, out = gates[:, step].chunk(4, -1)
        bent = cells[:, step].tanh()
        through = down * out * (1.0 - bent.square())
        pulled = through if last else through.add_(pulled)
        before = cells[:, step - 1] if step else torch.zeros_like(pulled)
        parts = [
            pulled * candidate * into * (1.0 - into),
            pulled * before * forget * (1.0 - forget),
            pulled * into * (1.0 - candidate.square()),
            down * bent * out * (1.0 - out),
        ]
        own = torch.cat(parts, -1)
        errors[:, step] = own
        pulled = pulled * forget
    return errors


def recurrent_parts(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of embedding, LSTM and linear layer; None where the module is anything but these."""
    if not isinstance(module, nn.Sequential) or not all(p.requires_grad for p in module.parameters()):
        return None
    children = dict(module.named_children())
    if [type(child) for child in children.values()] != [nn.Embedding, LSTM, LastStep, nn.Linear]:
        return None
    embedding, lstm, _, head = children
    table = children[embedding]
    assert isinstance(table, nn.Embedding)
    if table.padding_idx is not None or table.max_norm is not None or table.sparse or table.scale_grad_by_freq:
        return None
    return embedding, lstm, head
