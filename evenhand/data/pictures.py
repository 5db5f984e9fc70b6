"""CINIC-10 and Tiny ImageNet: one picture a file, in folders, from the official archive or unpacked.

The pictures are decoded one by one into the tensor that is trained on, so that nothing else of that size is ever held:
3.3 GB for CINIC-10, 5.4 GB for Tiny ImageNet.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.checks import EvenhandError, flag
from evenhand.data.cifar import CIFAR10
from evenhand.data.dataset import Dataset
from evenhand.data.files import Alternatives, Remote, Shelf, Tree, expect_checksum
from evenhand.data.optional import need

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class PictureSet:
    """A set of picture files: where it is, how large its pictures are and how many each part has of each class."""

    name: str
    title: str
    folders: tuple[str, ...]
    archive: Remote
    markers: tuple[str, ...]
    """Files and folders (these end in "/") by which the unpacked set is known; the first one lies at its top."""
    side: int
    classes: int
    parts: tuple[str, ...]
    """Folders of pictures with known classes; the last one is the test set."""
    each: tuple[int, ...]
    """Pictures of a class in each part."""
    mean: RGB
    deviation: RGB


CINIC10 = PictureSet(
    name="cinic10",
    title="CINIC-10",
    folders=("cinic10", "CINIC-10", "cinic-10", "CINIC10"),
    archive=Remote(
        "CINIC-10.tar.gz",
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "md5:6ee4d0c996905fe93221de577967a372",
    ),
    markers=("train/", "train/airplane/", "valid/airplane/", "test/airplane/"),
    side=32,
    classes=10,
    parts=("train", "valid", "test"),
    each=(9_000, 9_000, 9_000),
    mean=(0.47889522, 0.47227842, 0.43047404),  # its authors'
    deviation=(0.24205776, 0.23828046, 0.25874835),
)

TINY_IMAGENET = PictureSet(
    name="tiny-imagenet",
    title="Tiny ImageNet",
    folders=("tiny-imagenet", "tiny-imagenet-200"),
    archive=Remote(
        "tiny-imagenet-200.zip",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "md5:90528d7ca1a48142e341f4ef8d21d0de",
    ),
    markers=("wnids.txt", "words.txt", "val/val_annotations.txt"),
    side=64,
    classes=200,
    parts=("train", "val"),
    each=(500, 50),
    mean=(0.4802, 0.4481, 0.3975),  # of the training pixels
    deviation=(0.2770, 0.2691, 0.2821),
)

Picture = tuple[int, int, str]  # the number of its part, its class number, its path


def cinic10(shelf: Shelf, *, normalise: bool = True) -> Dataset:
    """CIFAR-10's ten kinds of things in 270,000 small photographs, from CIFAR-10 and ImageNet.

    The folders `train` and `valid` are the training rows (90,000 each, in this order), `test` the test rows; grey
    pictures become coloured ones. Takes 3.3 GB of memory.
    `normalise`: by its authors' channel means and deviations; else pixels in [0, 1].
    """
    flag("normalise", normalise)
    tree, form = _open(shelf, CINIC10)
    pictures = []
    for path, part, kind in _matches(tree, tree.names(), r"(train|valid|test)/([^/]+)/[^/]+\.png"):
        if kind not in CIFAR10.class_names:
            listed = ", ".join(CIFAR10.class_names)
            raise EvenhandError(f"{tree.path}: {path} is of no class of CINIC-10 ({listed}); take it out")
        pictures.append((CINIC10.parts.index(part), CIFAR10.class_names.index(kind), path))
    return _load(CINIC10, tree, form, pictures, CIFAR10.class_names, CIFAR10.class_names, normalise)


def tiny_imagenet(shelf: Shelf, *, normalise: bool = True) -> Dataset:
    """Photographs of 200 kinds of things, 64 x 64 pixels, from ImageNet.

    The folder `train` is the training rows, `val` the test rows (the classes of `test` are not published); classes are
    numbered as in wnids.txt, and grey pictures become coloured ones. Takes 5.4 GB of memory.
    `normalise`: by the training pixels' channel means and deviations; else pixels in [0, 1].
    """
    flag("normalise", normalise)
    tree, form = _open(shelf, TINY_IMAGENET)
    names = tree.names()
    kinds, words = _kinds(tree, names)
    pictures = []
    for path, kind in _matches(tree, names, r"train/([^/]+)/images/[^/]+\.JPEG"):
        if kind not in kinds:
            raise EvenhandError(f"{tree.path}: {path} is of no class in wnids.txt; take it out")
        pictures.append((0, kinds[kind], path))
    known = _annotations(tree, names, kinds)
    for path, file in _matches(tree, names, r"val/images/([^/]+\.JPEG)"):
        if file not in known:
            raise EvenhandError(f"{tree.path}: val_annotations.txt does not say what {path} shows")
        pictures.append((1, known.pop(file), path))
    if known:
        raise EvenhandError(f"{tree.path}: no val/images/{next(iter(known))}, which val_annotations.txt names")
    return _load(TINY_IMAGENET, tree, form, pictures, tuple(kinds), words, normalise)


def forms(which: PictureSet) -> dict[str, list[Alternatives]]:
    """The forms in which the set is found, best first: unpacked, or the archive."""
    top = which.archive.file.partition(".")[0]
    return {
        "unpacked": [(marker, f"{top}/{marker}") for marker in which.markers],
        "archive": [(which.archive.file,)],
    }


def _open(shelf: Shelf, which: PictureSet) -> tuple[Tree, str]:
    form, paths = shelf.require(which.folders, forms(which), remotes=[which.archive])
    if form == "unpacked":
        return Tree(paths[0].parent), form
    if which.archive.checksum:
        expect_checksum(paths[0], which.archive.checksum)
    return Tree(paths[0]), form


def _matches(tree: Tree, names: Iterable[str], pattern: str) -> list[tuple[str, ...]]:
    """The paths of this pattern, each with what its groups found; an archive may have a folder around everything."""
    around = "" if tree.path.is_dir() else "(?:[^/]+/)?"
    found = map(re.compile(around + pattern).fullmatch, names)
    return [(match[0], *match.groups()) for match in found if match]


def _kinds(tree: Tree, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Tiny ImageNet's classes: the number of each of WordNet's, and what people call them."""
    listed = _text(tree, names, "wnids.txt").split()
    kinds = {kind: number for number, kind in enumerate(listed)}
    if len(listed) != TINY_IMAGENET.classes or len(kinds) != len(listed):
        raise EvenhandError(
            f"{tree.path}: wnids.txt names {len(kinds)} classes in {len(listed)} words, "
            f"expected {TINY_IMAGENET.classes}, each once"
        )
    called = dict(line.split("\t", 1) for line in _text(tree, names, "words.txt").splitlines() if "\t" in line)
    for kind in listed:
        if kind not in called:
            raise EvenhandError(f"{tree.path}: words.txt does not say what {kind} is, a class in wnids.txt")
    return kinds, tuple(called[kind].partition(",")[0].strip() for kind in listed)


def _annotations(tree: Tree, names: Sequence[str], kinds: dict[str, int]) -> dict[str, int]:
    """The class number of each of Tiny ImageNet's validation pictures, by its file's name."""
    found: dict[str, int] = {}
    for number, line in enumerate(_text(tree, names, "val/val_annotations.txt").splitlines(), 1):
        said = f"{tree.path}: val_annotations.txt, line {number}"
        cells = line.split("\t")
        if len(cells) < 2:
            raise EvenhandError(f"{said}: expected a file and its class with a tab between them, got {line[:60]!r}")
        if cells[1] not in kinds:
            raise EvenhandError(f"{said}: {cells[0]} is of the class {cells[1]!r}, which is not in wnids.txt")
        if cells[0] in found:
            raise EvenhandError(f"{said}: {cells[0]} has a class already")
        found[cells[0]] = kinds[cells[1]]
    return found


def _text(tree: Tree, names: Sequence[str], wanted: str) -> str:
    found = _matches(tree, names, re.escape(wanted))
    if not found:
        raise EvenhandError(f"{tree.path} does not hold {wanted}")
    ((path, raw),) = tree.read(found[0])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise EvenhandError(f"{tree.path}: {path} is not a text file ({failure.reason})") from failure


def _load(
    which: PictureSet,
    tree: Tree,
    form: str,
    pictures: list[Picture],
    kinds: Sequence[str],
    class_names: tuple[str, ...],
    normalise: bool,
) -> Dataset:
    _check_counts(which, tree.path, pictures, kinds)
    pictures.sort()  # whatever order the files come in
    image = need("PIL.Image", which.title)
    inputs = torch.empty((len(pictures), 3, which.side, which.side), dtype=torch.float32)
    rows, pixels = {path: row for row, (_, _, path) in enumerate(pictures)}, inputs.numpy()
    for path, raw in tree.read(rows):
        pixels[rows[path]] = _decoded(image, raw, f"{tree.path}: {path}", which.side).transpose(2, 0, 1)
    inputs.div_(255.0)
    if normalise:
        inputs.sub_(torch.tensor(which.mean).view(3, 1, 1)).div_(torch.tensor(which.deviation).view(3, 1, 1))
    return Dataset(
        name=which.name,
        inputs=inputs,
        targets=torch.tensor([label for _, label, _ in pictures]),
        classes=which.classes,
        class_names=class_names,
        train_rows=sum(part < len(which.parts) - 1 for part, _, _ in pictures),
        source=f"{tree.path} ({form})",
    )


def _check_counts(which: PictureSet, path: Path, pictures: Sequence[Picture], kinds: Sequence[str]) -> None:
    """Each part has as many pictures of every class, which a set that is not whole has not."""
    counts = np.zeros((len(which.parts), which.classes), np.int64)
    for part, label, _ in pictures:
        counts[part, label] += 1
    for part, expected in enumerate(which.each):
        for label, found in enumerate(counts[part]):
            if found != expected:
                raise EvenhandError(
                    f"{path}: {which.parts[part]} holds {found:,} pictures of {kinds[label]}, expected {expected:,}; "
                    f"unpack {which.archive.file} anew"
                )


def _decoded(image: Any, raw: bytes, said: str, side: int) -> np.ndarray:
    """A picture's pixels, (side, side, 3) bytes."""
    try:
        with image.open(io.BytesIO(raw)) as picture:
            size = picture.size
            pixels = np.asarray(picture.convert("RGB")) if size == (side, side) else None
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as failure:
        raise EvenhandError(f"{said} is truncated or not a picture ({failure})") from failure
    if pixels is None:
        raise EvenhandError(f"{said} is a picture of {size[0]} x {size[1]} pixels, expected {side} x {side}")
    return pixels
