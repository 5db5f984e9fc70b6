"""The papers' networks by name, and any `nn.Module` of your own by its import path.

>>> model = build("mlp", shape=(784,), classes=10)
>>> [type(layer).__name__ for layer in model]
['Flatten', 'Linear', 'ReLU', 'Linear', 'ReLU', 'Linear']
>>> model(__import__("torch").zeros(5, 1, 28, 28)).shape
torch.Size([5, 10])
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenhand.checks import EvenhandError, flag, near_miss, number
from evenhand.models import networks
from evenhand.models.recurrent import LSTM, char_lstm
from evenhand.models.transformer import cct
from evenhand.models.validation import Finding, validate
from evenhand.tables import Listing, text_table

__all__ = ["LSTM", "MODELS", "Finding", "Model", "ModelInfo", "ModelTable", "build", "models", "must_fit", "validate"]


@dataclass(frozen=True)
class Model:
    """A network known by name: how it is made, from which paper, and the input it typically meets."""

    name: str
    make: Callable[..., nn.Sequential]
    shape: tuple[int, ...]
    classes: int
    parameters: int  # for that shape and so many classes
    paper: str

    @property
    def options(self) -> dict[str, Any]:
        """The options it takes besides `outputs` and `double_softmax`, and their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {entry.name: entry.default for entry in parameters if entry.kind is entry.KEYWORD_ONLY}


MODELS: dict[str, Model] = {
    entry.name: entry
    for entry in (
        Model("logistic", networks.logistic, (784,), 3, 2_355, "q-FFL (ICLR 2020), FedFV's code on Fashion-MNIST"),
        Model("mlp", networks.mlp, (784,), 10, 199_210, "FedFV (IJCAI 2021), FedLF (AAAI 2024), AdaFed (TMLR 2024)"),
        Model("mlp4", networks.mlp4, (99,), 2, 19_010, "mFairFL (AAAI 2024)"),
        Model("cnn", networks.cnn, (3, 32, 32), 10, 797_962, "FedLF (AAAI 2024)"),
        Model("cnn-mnist", networks.cnn_mnist, (1, 28, 28), 10, 582_026, "FedFV (IJCAI 2021), AdaFed on FEMNIST"),
        Model("resnet18-gn", networks.resnet18_gn, (3, 32, 32), 10, 11_173_962, "AdaFed (TMLR 2024)"),
        Model("nf-resnet18", networks.nf_resnet18, (3, 32, 32), 100, 189_844, "FedLF (AAAI 2024)"),
        Model("cct", cct, (3, 32, 32), 100, 3_783_269, "Hassani et al., 2021; FedLF (AAAI 2024)"),
        Model("char-lstm", char_lstm, (80,), 80, 819_920, "FedFa (Inf. Sci. 2022), AdaFed on Shakespeare"),
    )
}


def build(
    name: str,
    shape: Sequence[int],
    classes: int,
    *,
    seed: int = 0,
    outputs: int | None = None,
    double_softmax: bool = False,
    **options: Any,
) -> nn.Module:
    """A network by name (`models()` lists them) or by import path, `"package.module:Class"`.

    Args:
        name: which network. A class of your own is given `shape` and `classes` where its signature has them.
        shape: one sample's shape, without the batch: (784,), (1, 28, 28), (80,) for tokens.
        classes: number of classes.
        seed: the starting weights follow from it alone, whatever was drawn before; nobody else's draws are disturbed.
        outputs: width of the last layer where it is not `classes` (FedFV's MNIST network has 62).
        double_softmax: end in a softmax although the loss takes one again, as the code behind FedFV's tables does.
        options: the network's own.
    """
    number("seed", seed, low=0, high=2**63 - 1, whole=True)
    number("classes", classes, low=2, whole=True)
    if outputs is not None:
        number("outputs", outputs, low=classes, whole=True)
    flag("double_softmax", double_softmax)
    sample = _shape(shape)
    make = _known(name, options) if name in MODELS else _imported(name)
    with _seeded(seed):
        model = make(sample, outputs or classes, **options)
    if double_softmax:
        softmax = nn.Softmax(dim=-1)
        model = model.append(softmax) if isinstance(model, nn.Sequential) else nn.Sequential(model, softmax)
    return model


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or not shape:  # torch.Size is a tuple
        raise EvenhandError(f"shape={shape!r} must be one sample's shape, such as (784,) or (3, 32, 32)")
    for size in shape:
        number("a size in shape", size, low=1, whole=True)
    return tuple(shape)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws inside follow from the seed, on the CPU; the caller's generators come out as they went in."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def _known(name: str, options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    entry = MODELS[name]
    known = [*entry.options, "outputs", "double_softmax"]
    for option in options:
        if option not in known:
            raise EvenhandError(
                f"model {name} has no option {option!r}{near_miss(option, known)} (its options: {', '.join(known)})"
            )
    return entry.make


def _imported(name: str) -> Callable[..., nn.Module]:
    """The maker behind `"package.module:Class"`, called with `shape` and `classes` where its signature has them."""
    home, colon, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not colon or not home or not path:
        raise EvenhandError(
            f"unknown model {name!r}{near_miss(name, MODELS)} (evenhand models lists all {len(MODELS)}; "
            "your own: 'package.module:Class')"
        )
    if home in MODELS:
        raise EvenhandError(
            f"model {name!r}: options are given apart from the name, build({home!r}, ..., option=value)"
        )
    try:
        found: Any = importlib.import_module(home)
    except ImportError as error:
        raise EvenhandError(f"model {name!r}: cannot import {home!r} ({error}); is it on the Python path?") from error
    except Exception as error:  # whatever the user's module does when it is loaded
        raise EvenhandError(f"model {name!r}: {home!r} fails when it is imported ({_failure(error)})") from error
    for step in path.split("."):
        if not hasattr(found, step):
            raise EvenhandError(f"model {name!r}: {home} has no {step!r}{near_miss(step, dir(found))}")
        found = getattr(found, step)
    if not callable(found):
        raise EvenhandError(f"model {name!r} is a {type(found).__name__}, not a class or function that makes a module")

    def make(shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
        try:
            signature = inspect.signature(found)
        except ValueError:  # some built-in callables have none
            signature = inspect.Signature()
        offered = {"shape": shape, "classes": classes}
        given = {key: value for key, value in offered.items() if key in signature.parameters}
        try:
            signature.bind(**{**given, **options})
        except TypeError as error:
            raise EvenhandError(f"model {name!r}: {error}; its signature is {path}{signature}") from error
        try:
            model = found(**{**given, **options})
        except Exception as error:  # whatever the user's class does when it is made
            raise EvenhandError(f"model {name!r} fails when it is made ({_failure(error)})") from error
        if not isinstance(model, nn.Module):
            raise EvenhandError(f"model {name!r} made a {type(model).__name__}, not a torch.nn.Module")
        return model

    return make


def must_fit(name: str, module: nn.Module, inputs: Tensor, classes: int) -> None:
    """Insist that a network takes such inputs and answers with a row of scores a sample, one a class."""
    shape = tuple(inputs.shape)
    try:
        with _seeded(0), torch.no_grad():
            scores = module(inputs)
    except Exception as error:  # whatever the user's code does with the inputs
        raise EvenhandError(f"model {name!r} fails on a batch of shape {shape} ({_failure(error)})") from error
    found = tuple(getattr(scores, "shape", ()))
    if len(found) != 2 or found[0] != shape[0] or found[1] < classes:
        kind = f"shape {found}" if found else f"type {type(scores).__name__}"
        raise EvenhandError(
            f"model {name!r} answers a batch of shape {shape} with {kind}; it should be scores of shape "
            f"({shape[0]}, {classes}): one row a sample, one column a class"
        )


def _failure(error: Exception) -> str:
    """What went wrong in the user's code, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)][-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())}; {Path(place.filename).name}, line {place.lineno}"


@dataclass(frozen=True)
class ModelInfo:
    """What there is to know of a network before using it; the parameters are counted for the typical shape."""

    name: str
    summary: str
    paper: str
    shape: tuple[int, ...]
    classes: int
    parameters: int
    options: Mapping[str, Any]


class ModelTable(Listing[ModelInfo]):
    """The known networks; prints as a table."""

    def __repr__(self) -> str:
        rows = [("model", "parameters", "for", "paper", "what it is")]
        for entry in self._entries:
            typical = f"{'x'.join(map(str, entry.shape))} -> {entry.classes}"
            rows.append((entry.name, f"{entry.parameters:,}", typical, entry.paper, entry.summary))
        return text_table(rows)


def models() -> ModelTable:
    """Every known network: name, what it is, its paper, its size for a typical input, its options and defaults."""
    return ModelTable([_info(entry) for entry in MODELS.values()])


def _info(entry: Model) -> ModelInfo:
    summary = (entry.make.__doc__ or "").strip().split("\n")[0]
    return ModelInfo(entry.name, summary, entry.paper, entry.shape, entry.classes, entry.parameters, entry.options)
