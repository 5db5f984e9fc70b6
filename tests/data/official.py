"""Small files in the official layouts, made by the tests, and small data sets to hand out."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import torch

from evenhand.data import Dataset


def small(samples: int = 300, classes: int = 5, seed: int = 0, **more) -> Dataset:
    """Random labels, every class present; the input of a sample is its own number."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, max(0, samples - classes))])[:samples]
    inputs = torch.arange(samples, dtype=torch.float32)[:, None]
    return Dataset("small", inputs, torch.from_numpy(rng.permutation(labels)), classes, **more)


def balanced(classes: int, each: int, **more) -> Dataset:
    """The same number of samples of every class, in random order."""
    labels = np.random.default_rng(7).permutation(np.repeat(np.arange(classes), each))
    return Dataset("balanced", torch.zeros(len(labels), 1), torch.from_numpy(labels), classes, **more)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 30, test: int = 10, packed: bool = True) -> dict[str, np.ndarray]:
    """The four files of MNIST, smaller; returns what is in them."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, rows in (("train", train), ("t10k", test)):
        arrays[f"{name}-images-idx3-ubyte"] = rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = (np.arange(rows) % 10).astype(np.uint8)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def cifar_parts(parts: int, rows: int, classes: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (rows, 3072) and labels, the same number of each class in every part."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 256, (rows, 3072), dtype=np.uint8), rng.permutation(np.arange(rows) % classes))
        for _ in range(parts)
    ]


def cifar_binary(images: np.ndarray, *labels: np.ndarray) -> bytes:
    return np.concatenate([*(values[:, None].astype(np.uint8) for values in labels), images], axis=1).tobytes()


def cifar_pickle(images: np.ndarray, **labels: np.ndarray) -> bytes:
    """As Python 2 wrote it: byte strings for keys."""
    fields = {name.encode(): values.tolist() for name, values in labels.items()}
    return pickle.dumps({b"batch_label": b"a batch", b"data": images, **fields}, protocol=2)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_leaf(path: Path, users: dict[str, tuple[list, list]], **more) -> None:
    """One JSON file as LEAF's scripts write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }
    path.write_text(json.dumps({**content, **more}))


def write_csv(path: Path, header: list[str], rows: list[list], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        if header:
            writer.writerow(header)
        writer.writerows(rows)
    return path
