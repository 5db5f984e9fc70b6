"""Why a module cannot be trained for many clients at once, and what to use instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm


class Finding(str):
    """What was found, in words; `blocking` tells a reason not to batch from a remark."""

    __slots__ = ("blocking",)
    blocking: bool

    def __new__(cls, text: str, *, blocking: bool = True) -> Finding:
        found = super().__new__(cls, text)
        found.blocking = blocking
        return found


def validate(module: nn.Module, example: Tensor | None = None) -> list[Finding]:
    """What stands in the way of training stacked copies of a module as one program; empty when nothing does.

    Each finding is a sentence that names the part and the way out. Those with `blocking` false are allowed, but worth
    knowing. Branches that depend on the data show only when the module runs: give a small batch of inputs as `example`
    to have two copies trained on it for one step.

    >>> from torch import nn
    >>> validate(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    []
    >>> print(*validate(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))
    1 (BatchNorm1d) shares statistics between the samples of a batch and updates them in place; use nn.GroupNorm
    """
    findings = list(_findings(module))
    if example is not None and not any(found.blocking for found in findings):
        findings += _trial(module, example)
    return findings


def _findings(module: nn.Module) -> Iterator[Finding]:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        yield Finding(
            f"{type(module).__name__} is a wrapper that cannot be batched; give the module inside, its .module"
        )
        return
    if next(module.parameters(), None) is None:
        yield Finding(f"{type(module).__name__} has no parameters to train")
    for path, part in module.named_modules():
        place = f"{path or 'the model'} ({type(part).__name__})"
        for text, blocking in _remarks(part):
            yield Finding(f"{place} {text}", blocking=blocking)


def _remarks(part: nn.Module) -> Iterator[tuple[str, bool]]:
    if isinstance(part, torch.jit.ScriptModule):
        yield "is compiled by TorchScript, which vmap cannot enter; use the Python module it was made from", True
        return
    if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():
        yield "has no sizes yet; pass one batch through it first, or use the module that is not lazy", True
        return
    if isinstance(part, _BatchNorm):
        yield "shares statistics between the samples of a batch and updates them in place; use nn.GroupNorm", True
    elif isinstance(part, _InstanceNorm) and part.track_running_stats:
        yield "updates running statistics in place; use track_running_stats=False, or nn.GroupNorm", True
    elif isinstance(part, nn.RNNBase):
        yield "runs on fused kernels that vmap cannot batch; use evenhand.models.LSTM, written in matrix products", True
    elif isinstance(part, nn.RReLU):
        yield "has no rule for vmap; use nn.LeakyReLU", True
    elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
        yield "makes sparse gradients; use sparse=False", True
    elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        yield "rescales its table in place; use max_norm=None", True
    elif part.training and _random(part):
        yield "draws random numbers in training: each client gets its own, other than when trained one by one", False
    buffers = [name for name, _ in part.named_buffers(recurse=False)]
    if buffers and not isinstance(part, _BatchNorm | _InstanceNorm):
        listed = ", ".join(buffers)
        yield (
            f"holds buffers ({listed}), which no client trains or sends; compute them in forward, or use parameters",
            True,
        )


def _random(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.p > 0.0
    return isinstance(part, nn.MultiheadAttention) and part.dropout > 0.0


def _trial(module: nn.Module, example: Tensor) -> list[Finding]:
    """Two copies, one gradient: what only shows when the module runs."""
    parameters = {name: torch.stack([entry.detach()] * 2) for name, entry in module.named_parameters()}

    def loss(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(module, weights, (inputs,)).float().square().mean()

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about slow fallbacks: speed is not what is asked here
        try:
            vmap(grad(loss), randomness="different")(parameters, torch.stack([example] * 2))
        except Exception as error:  # any failure of the user's code is the answer
            said = " ".join(str(error).split())[:200]
            return [
                Finding(
                    f"{type(module).__name__} fails when two copies train at once; branches on the data, .item() and "
                    f"writing in place are the usual causes ({type(error).__name__}: {said})"
                )
            ]
    return []
