"""Nested values on disk without pickle: tensors and arrays as safetensors, everything else as JSON (beside them)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.checks import EvenhandError

FORMAT = 1
JSON = "json"  # the entry that holds the text, as bytes


def write(path: str | os.PathLike[str], kind: str, value: Any) -> None:
    """Write one file, atomically: an interrupted or failed write leaves an older file as it was."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_pack(value, tensors, set())).encode()
    tensors[JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    write_bytes(path, save(tensors, metadata={"evenhand": f"{kind}/{FORMAT}"}))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | os.PathLike[str], kind: str) -> Any:
    """Read what `write` wrote; tensors arrive on the CPU. A file that is anything else is named and explained."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise EvenhandError(f"no {kind} file at {str(path)!r}")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise EvenhandError(f"{str(path)!r} is not a readable {kind} file (truncated or corrupt?): {error}") from error
    found, _, version = metadata.get("evenhand", "").partition("/")
    if found != kind:
        raise EvenhandError(f"{str(path)!r} is a safetensors file, but not a {kind} file that evenhand wrote")
    if version != str(FORMAT):
        raise EvenhandError(f"{str(path)!r} has {kind} format {version}; this version reads {FORMAT}")
    try:
        return _unpack(json.loads(tensors.pop(JSON).numpy().tobytes()), tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise EvenhandError(f"{str(path)!r} is not a readable {kind} file: {error!r}") from error


def _pack(value: Any, tensors: dict[str, Tensor], taken: set[int]) -> Any:
    """JSON with references in the place of tensors and arrays."""
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value.detach()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        # safetensors refuses tensors that share memory, as rows that the caller gave up (own=True) may do
        address = tensor.untyped_storage().data_ptr()
        name = f"t{len(tensors)}"
        if whole and address not in taken:
            tensors[name] = tensor.contiguous()
            taken.add(address)
        else:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        return {"$": kind, "name": name}
    if isinstance(value, Mapping):
        return {str(key): _pack(entry, tensors, taken) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(entry, tensors, taken) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    raise EvenhandError(f"what is saved may hold arrays, tensors, numbers and text, not {type(value).__name__}")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "$" in value:
            tensor = tensors[value["name"]]
            return tensor.numpy() if value["$"] == "array" else tensor
        return {key: _unpack(entry, tensors) for key, entry in value.items()}
    return [_unpack(entry, tensors) for entry in value] if isinstance(value, list) else value


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (to_json(value, indent=1) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: null for what is not a finite number."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return None if isinstance(value, float) and not np.isfinite(value) else value
