"""What a method carries from round to round, and how it is kept on disk (safetensors + JSON, no pickle).

The memory of absent clients lives here: each client's latest update with its age, and the inner products among the
remembered updates, so that a round costs products with its own rows alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.checks import EvenhandError
from evenhand.geometry import Floats
from evenhand.methods.base import Client, Memo

FORMAT = 1
SLACK = 2.0  # rows up to this many windows old are kept, since a smaller cohort widens the "expected" window again


@dataclass(frozen=True)
class Memory:
    """The latest update of each client seen, with its round, its numbers, and the rows' inner products per block."""

    clients: tuple[Client, ...] = ()
    rounds: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: Mapping[str, Floats] = field(default_factory=dict)
    rows: tuple[tuple[Tensor, ...], ...] = ()
    gram: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))  # NaN where not computed yet

    def absent(self, present: Sequence[Client], index: int, window: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions of the rows to use: clients not present, at most `window` rounds old."""
        here = set(present)
        away = np.array([client not in here for client in self.clients], dtype=bool)
        return np.flatnonzero(away & (index - self.rounds <= window) & (index - self.rounds >= 1))


def window_of(absent: str, seen: int, present: int) -> float:
    """How many rounds back the memory reaches: 0, TAU, or the expected time until a client returns."""
    if absent == "off":
        return 0.0
    return seen / present if absent == "expected" else float(absent.partition(":")[2])


@dataclass(frozen=True)
class State:
    """Opaque: pass `out.state` of one round as `state` of the next."""

    rule: str
    server: str
    round: int
    named: bool  # whether the clients were named; without names nobody can be remembered
    seen: tuple[Client, ...]
    layout: list[list[Any]]
    rule_memo: Memo = field(default_factory=dict)
    server_memo: Memo = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def __repr__(self) -> str:
        return (
            f"State({self.rule!r} after round {self.round}, {len(self.seen)} clients seen, "
            f"{len(self.memory.clients)} updates remembered)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically: an interrupted save leaves an older file as it was."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        content = _pack(_plain(self), tensors)
        data = save(tensors, metadata={"evenhand": json.dumps({"format": FORMAT, "state": content})})
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> State:
        """Read what `save` wrote; tensors arrive on the CPU and move to the updates' device when used."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise EvenhandError(f"no state file at {str(path)!r}")
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise EvenhandError(
                f"{str(path)!r} is not a readable state file (truncated or corrupt?): {error}"
            ) from error
        if "evenhand" not in metadata:
            raise EvenhandError(f"{str(path)!r} is a safetensors file, but not one that evenhand wrote")
        content = json.loads(metadata["evenhand"])
        if content.get("format") != FORMAT:
            raise EvenhandError(
                f"{str(path)!r} has state format {content.get('format')!r}; this version reads {FORMAT}"
            )
        plain = _unpack(content["state"], tensors)
        memory = plain.pop("memory")
        memory["clients"], memory["rows"] = tuple(memory["clients"]), tuple(map(tuple, memory["rows"]))
        plain["seen"] = tuple(plain["seen"])
        return cls(**plain, memory=Memory(**memory))


def _plain(state: State) -> dict[str, Any]:
    flat = {name: getattr(state, name) for name in state.__dataclass_fields__}
    flat["memory"] = {name: getattr(state.memory, name) for name in state.memory.__dataclass_fields__}
    return flat


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON with references in the place of tensors and arrays."""
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value.detach()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        name = f"t{len(tensors)}"
        tensors[name] = tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
        return {"$": kind, "name": name}
    if isinstance(value, Mapping):
        return {str(key): _pack(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(entry, tensors) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    raise EvenhandError(f"a state may hold arrays, tensors, numbers and text, not {type(value).__name__}")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "$" in value:
            tensor = tensors[value["name"]]
            return tensor.numpy() if value["$"] == "array" else tensor
        return {key: _unpack(entry, tensors) for key, entry in value.items()}
    return [_unpack(entry, tensors) for entry in value] if isinstance(value, list) else value
