"""MNIST, Fashion-MNIST (all of it, or three classes) and handwritten letters, from their official files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from evenhand.checks import EvenhandError, flag
from evenhand.data.dataset import Dataset
from evenhand.data.files import Alternatives, Remote, Shelf, read_bytes, read_idx, read_npz


@dataclass(frozen=True)
class IdxSet:
    """A data set in MNIST's form: four IDX files of 28 x 28 bytes and labels 0 to 9."""

    name: str
    folders: tuple[str, ...]
    system: tuple[str, ...]
    url: str
    packed: Mapping[str, str]
    """md5 of the gzipped files as published: what a download must match."""
    contents: Mapping[str, str]
    """md5 of what they unpack to: what any file must match, however it was packed."""
    class_names: tuple[str, ...]
    rows: tuple[int, int] = (60_000, 10_000)


FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST = IdxSet(
    name="mnist",
    folders=("mnist", "MNIST/raw"),
    system=(),
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    packed={
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    contents={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    class_names=tuple("0123456789"),
)

FASHION = IdxSet(
    name="fashion-mnist",
    folders=("fashion-mnist", "FashionMNIST/raw"),
    system=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
    url="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    packed={
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    contents={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
)

IDX_FORMS: dict[str, list[Alternatives]] = {
    "idx": [(f"{file}.gz", file, file.replace("-idx", ".idx")) for file in FILES]
}

LETTERS_FORMS: dict[str, list[Alternatives]] = {
    "npz": [("letters.npz",)],
    "official": [("letter.data.gz", "letter.data")],
}
LETTERS_REMOTE = Remote("letter.data.gz", "http://ai.stanford.edu/~btaskar/ocr/letter.data.gz")
LETTERS_ROWS = 52_152


def mnist(shelf: Shelf, *, standardise: bool = False) -> Dataset:
    """Handwritten digits, pixels in [0, 1].

    `standardise`: each pixel by its mean and deviation over the official training images.
    """
    return _idx(shelf, MNIST, standardise)


def fashion_mnist(shelf: Shelf, *, standardise: bool = False) -> Dataset:
    """Pictures of clothing, pixels in [0, 1].

    `standardise`: each pixel by its mean and deviation over the official training images.
    """
    return _idx(shelf, FASHION, standardise)


def fashion_mnist_3(shelf: Shelf, *, standardise: bool = True) -> Dataset:
    """T-shirt, pullover and shirt of Fashion-MNIST: one client each (`natural`) in AFL, q-FFL and FedFV.

    Pixels are standardised as there: (x - mean) / (std + 0.001), over ALL 60,000 official training images.
    """
    whole = _idx(shelf, FASHION, standardise)
    chosen = np.array([0, 2, 6])
    kept = whole.select(np.flatnonzero(np.isin(whole.labels, chosen)))
    names = tuple(whole.class_names[c] for c in chosen)
    targets = np.searchsorted(chosen, kept.labels)
    return replace(
        kept,
        name="fashion-mnist-3",
        targets=torch.from_numpy(targets),
        classes=3,
        class_names=names,
        columns={"client": np.array(names)[targets]},
    )


def _idx(shelf: Shelf, which: IdxSet, standardise: bool) -> Dataset:
    flag("standardise", standardise)
    remotes = [Remote(f"{file}.gz", f"{which.url}{file}.gz", f"md5:{which.packed[file]}") for file in FILES]
    _, paths = shelf.require(which.folders, IDX_FORMS, system=which.system, remotes=remotes)
    images, labels = [], []
    for (image_path, label_path), rows in zip((paths[:2], paths[2:]), which.rows, strict=True):
        images.append(read_idx(image_path, 3, which.contents.get(_plain(image_path.name), "")))
        labels.append(read_idx(label_path, 1, which.contents.get(_plain(label_path.name), "")))
        if images[-1].shape != (rows, 28, 28):
            raise EvenhandError(f"{image_path} holds images of shape {images[-1].shape}, expected {(rows, 28, 28)}")
        if labels[-1].shape != (rows,):
            raise EvenhandError(f"{label_path} holds {len(labels[-1]):,} labels, expected {rows:,}")
        if labels[-1].max() > 9:
            raise EvenhandError(f"{label_path} holds label {labels[-1].max()}, expected 0 to 9")
    pixels = torch.from_numpy(np.concatenate(images)).to(torch.float32).div_(255.0).unsqueeze_(1)
    if standardise:
        deviation, mean = torch.std_mean(pixels[: which.rows[0]], dim=0, correction=0)
        pixels.sub_(mean).div_(deviation + 0.001)
    return Dataset(
        name=which.name,
        inputs=pixels,
        targets=torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        classes=10,
        class_names=which.class_names,
        train_rows=which.rows[0],
        source=str(paths[0].parent),
    )


def _plain(name: str) -> str:
    return name.removesuffix(".gz").replace(".idx", "-idx")


def letters(shelf: Shelf, *, keep: str = "a-z") -> Dataset:
    """Handwritten lower-case letters, binary pixels (Kassel's OCR set).

    `keep="a-j"`: some letters only, a stand-in for FEMNIST-skewed. Read from the official letter.data(.gz), or from
    letters.npz with the same contents as packed bits.
    """
    form, (path,) = shelf.require(["letters"], LETTERS_FORMS, remotes=[LETTERS_REMOTE])
    arrays = read_npz(path) if form == "npz" else _letter_lines(read_bytes(path), str(path))
    for name, shape in {"pixels": (LETTERS_ROWS, 16), "labels": (LETTERS_ROWS,)}.items():
        if name not in arrays or arrays[name].shape != shape or arrays[name].dtype != np.uint8:
            raise EvenhandError(f"{path} should hold {name!r}, {shape} bytes; it holds {_shapes(arrays)}")
    pixels = np.unpackbits(arrays["pixels"], axis=1).reshape(-1, 1, 16, 8)
    known = {"folds": "fold", "words": "word"}
    whole = Dataset(
        name="letters",
        inputs=torch.from_numpy(pixels.astype(np.float32)),
        targets=torch.from_numpy(arrays["labels"].astype(np.int64)),
        classes=26,
        class_names=tuple("abcdefghijklmnopqrstuvwxyz"),
        columns={known[name]: arrays[name].astype(np.int64) for name in known if name in arrays},
        source=str(path),
    )
    return keep_classes(whole, character_range(keep))


def _shapes(arrays: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {values.shape} {values.dtype}" for name, values in arrays.items())


def _letter_lines(raw: bytes, said: str) -> dict[str, np.ndarray]:
    """The official form, tab-separated: id, letter, next id, word, position, fold, then 128 pixels of 0 and 1."""
    lines = raw.decode("ascii", "replace").splitlines()
    if len(lines) != LETTERS_ROWS:
        raise EvenhandError(f"{said} has {len(lines):,} lines, expected {LETTERS_ROWS:,}")
    cells = [line.rstrip("\t").split("\t") for line in lines]
    for number, row in enumerate(cells, 1):
        if len(row) != 134 or len(row[1]) != 1 or not "a" <= row[1] <= "z":
            raise EvenhandError(
                f"{said}, line {number}: expected a letter and 128 pixels in 134 fields, got {len(row)}"
            )
    table = np.array([[*row[3:4], *row[5:]] for row in cells]).astype(np.int64)
    return {
        "pixels": np.packbits(table[:, 2:].astype(bool), axis=1),
        "labels": np.array([ord(row[1]) - ord("a") for row in cells], np.uint8),
        "words": table[:, 0],
        "folds": table[:, 1],
    }


def character_range(text: str) -> str:
    """`a-j` -> `abcdefghij`; characters and ranges may follow each other: `0-9a-f`."""
    characters, rest = "", text
    while rest:
        if len(rest) >= 3 and rest[1] == "-":
            first, last, rest = rest[0], rest[2], rest[3:]
            if first > last:
                raise EvenhandError(f"keep={text!r}: {first}-{last} runs backwards")
            characters += "".join(map(chr, range(ord(first), ord(last) + 1)))
        else:
            characters, rest = characters + rest[0], rest[1:]
    if not characters:
        raise EvenhandError("keep='' keeps no class; name some, such as keep='a-j'")
    return characters


def keep_classes(dataset: Dataset, names: str) -> Dataset:
    """The samples of the classes named by single characters, renumbered in the data set's own order."""
    unknown = sorted(set(names) - set(dataset.class_names))
    if unknown:
        raise EvenhandError(f"{dataset.name} has no class {unknown[0]!r} (its classes: {''.join(dataset.class_names)})")
    chosen = np.array([number for number, name in enumerate(dataset.class_names) if name in names])
    if len(chosen) == dataset.classes:
        return dataset
    kept = dataset.select(np.flatnonzero(np.isin(dataset.labels, chosen)))
    return replace(
        kept,
        targets=torch.from_numpy(np.searchsorted(chosen, kept.labels)),
        classes=len(chosen),
        class_names=tuple(dataset.class_names[c] for c in chosen),
    )
