"""Data sets by name, and partitions that hand them out to clients.

>>> from evenhand.data import load, partition
>>> data = load("synthetic:1,1", clients=5, sigma=0.0)
>>> print(partition(data, "natural").describe())
natural: 5 clients of 104 samples; train / validation / test 415 / 0 / 105
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.checks import EvenhandError, near_miss
from evenhand.data import builtin, cifar, leaf, own, people, pictures, vision
from evenhand.data.attributes import Attribute, Groups
from evenhand.data.dataset import Dataset
from evenhand.data.files import Alternatives, Shelf
from evenhand.data.noise import Noise
from evenhand.data.optional import PACKAGES
from evenhand.data.partitioning import Partition, PartitionInfo, PartitionTable, partition, partitions
from evenhand.data.splitting import Split
from evenhand.tables import Listing, text_table

__all__ = [
    "Attribute",
    "Dataset",
    "DatasetInfo",
    "DatasetTable",
    "Groups",
    "Noise",
    "Partition",
    "PartitionInfo",
    "PartitionTable",
    "Split",
    "datasets",
    "load",
    "partition",
    "partitions",
]

Forms = Mapping[str, Sequence[Alternatives]]
SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")


@dataclass(frozen=True)
class Entry:
    """One known data set: how it is loaded, and where its files are looked for."""

    name: str
    samples: str
    classes: str
    shape: str
    origin: str
    """Where it comes from."""
    load: Callable[..., Dataset]
    folders: Sequence[str] = ()
    forms: Forms | None = None
    system: Sequence[str] = ()
    leaf: str = ""
    """Its name in LEAF's layout."""
    fetched: bool = False
    """Whether the official files can be downloaded."""
    package: str = ""
    """A package it cannot do without."""

    def available(self, shelf: Shelf) -> str:
        """Built in, where its files are, or what is missing."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"needs {PACKAGES[self.package][0]}"
        if self.leaf and (found := leaf.layout(shelf, self.leaf)):
            return str(found.folder)
        if self.forms is not None and (files := shelf.find(self.folders, self.forms, self.system)):
            return str(files[1][0].parent)
        if not self.folders:
            return "yes"
        return "on download" if self.fetched and shelf.given is None else "no files"


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("digits", "1,797", "10", "1x8x8", "scikit-learn", builtin.digits, package="sklearn"),
        Entry("synthetic:ALPHA,BETA", "varies", "10", "60", "generated", builtin.synthetic),
        Entry("synthetic-iid", "varies", "10", "60", "generated", builtin.synthetic_iid),
        Entry("synthetic-groups", "5,000", "2", "3", "generated", builtin.synthetic_groups),
        Entry(
            "fashion-mnist",
            "70,000",
            "10",
            "1x28x28",
            "Zalando",
            vision.fashion_mnist,
            vision.FASHION.folders,
            vision.IDX_FORMS,
            vision.FASHION.system,
            fetched=True,
        ),
        Entry(
            "fashion-mnist-3",
            "21,000",
            "3",
            "1x28x28",
            "Zalando",
            vision.fashion_mnist_3,
            vision.FASHION.folders,
            vision.IDX_FORMS,
            vision.FASHION.system,
            fetched=True,
        ),
        Entry(
            "mnist",
            "70,000",
            "10",
            "1x28x28",
            "LeCun et al.",
            vision.mnist,
            vision.MNIST.folders,
            vision.IDX_FORMS,
            fetched=True,
        ),
        Entry(
            "cifar10",
            "60,000",
            "10",
            "3x32x32",
            "Krizhevsky",
            cifar.cifar10,
            cifar.CIFAR10.folders,
            cifar.forms(cifar.CIFAR10),
            fetched=True,
        ),
        Entry(
            "cifar100",
            "60,000",
            "100",
            "3x32x32",
            "Krizhevsky",
            cifar.cifar100,
            cifar.CIFAR100.folders,
            cifar.forms(cifar.CIFAR100),
            fetched=True,
        ),
        Entry(
            "cinic10",
            "270,000",
            "10",
            "3x32x32",
            "Darlow et al.",
            pictures.cinic10,
            pictures.CINIC10.folders,
            pictures.forms(pictures.CINIC10),
            fetched=True,
        ),
        Entry(
            "tiny-imagenet",
            "110,000",
            "200",
            "3x64x64",
            "Stanford's CS231n",
            pictures.tiny_imagenet,
            pictures.TINY_IMAGENET.folders,
            pictures.forms(pictures.TINY_IMAGENET),
            fetched=True,
        ),
        Entry(
            "letters",
            "52,152",
            "26",
            "1x16x8",
            "Kassel",
            vision.letters,
            ["letters"],
            vision.LETTERS_FORMS,
            fetched=True,
        ),
        Entry("femnist", "805,263", "62", "1x28x28", "LEAF", leaf.femnist, ["femnist"], leaf="femnist"),
        Entry(
            "shakespeare",
            "varies",
            "80",
            "80 tokens",
            "LEAF, or plain text",
            leaf.shakespeare,
            ["shakespeare"],
            {"text": [("input.txt",)]},
            leaf="shakespeare",
            fetched=True,
        ),
        Entry("sent140", "1,600,498", "2", "25 tokens", "LEAF", leaf.sent140, ["sent140"], leaf="sent140"),
        Entry("adult", "48,842", "2", "table", "UCI", people.adult, ["adult"], people.ADULT_FORMS, fetched=True),
        Entry(
            "compas", "7,214", "2", "table", "ProPublica", people.compas, ["compas"], people.COMPAS_FORMS, fetched=True
        ),
        Entry("bank", "45,211", "2", "table", "UCI", people.bank, ["bank"], people.BANK_FORMS, fetched=True),
        Entry("PATH.csv|.parquet|.npz", "yours", "yours", "yours", "your file", own.own_file),
        Entry("hub:NAME", "varies", "varies", "varies", "Hugging Face", own.hub, package="datasets"),
    )
}


@dataclass(frozen=True)
class DatasetInfo:
    """What there is to know of a data set before loading it."""

    name: str
    samples: str
    classes: str
    shape: str
    summary: str
    origin: str
    available: str
    """`yes`, the folder its files are in, `on download`, `no files`, or the package it needs."""
    options: Mapping[str, Any]
    details: str
    """What else there is to say: its options, its departures from a paper."""


class DatasetTable(Listing[DatasetInfo]):
    """The known data sets; prints as a table."""

    def __repr__(self) -> str:
        rows = [("data set", "samples", "classes", "shape", "from", "here", "what it is")]
        rows += [(e.name, e.samples, e.classes, e.shape, e.origin, e.available, e.summary) for e in self._entries]
        return text_table(rows, right=(1, 2))


def datasets(data_dir: str | Path | None = None, name: str | None = None) -> DatasetTable:
    """Every known data set, or one: size, classes, shape, what it is, where from, whether it is available here."""
    shelf = Shelf.at(data_dir)
    chosen = [entry for entry in ENTRIES.values() if name in (None, entry.name, entry.name.partition(":")[0])]
    return DatasetTable([_info(entry, shelf) for entry in chosen or [_entry(str(name))[0]]])


def _info(entry: Entry, shelf: Shelf) -> DatasetInfo:
    summary, _, details = inspect.cleandoc(entry.load.__doc__ or "").partition("\n")
    return DatasetInfo(
        entry.name,
        entry.samples,
        entry.classes,
        entry.shape,
        summary,
        entry.origin,
        entry.available(shelf),
        _options(entry.load),
        details.strip(),
    )


def _options(loader: Callable[..., Dataset]) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(loader).parameters.values() if p.kind is p.KEYWORD_ONLY}


def load(name: str | Path, *, data_dir: str | Path | None = None, **options: Any) -> Dataset:
    """A data set by name, or the user's own file by path; `datasets()` lists the names and their options.

    Files are looked for in `data_dir` if given; else in the folder EVENHAND_DATA names, where packages put them, and
    in the cache, and are downloaded into the cache when they are nowhere (folder: EVENHAND_CACHE, else the user's
    cache folder).
    """
    entry, before = _entry(str(name))
    known = _options(entry.load)
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise EvenhandError(f"{name} has no option {option!r}{near_miss(option, known)} (its options: {listed})")
    if entry.folders:
        before = (Shelf.at(data_dir),)
    return entry.load(*before, **options)


def _entry(name: str) -> tuple[Entry, tuple[Any, ...]]:
    """The entry a name belongs to, and what its loader takes before the options."""
    word, _, rest = name.partition(":")
    if word == "hub" and rest:
        return ENTRIES["hub:NAME"], (rest,)
    if word == "synthetic":
        return ENTRIES["synthetic:ALPHA,BETA"], _alpha_beta(name, rest)
    if name in ENTRIES:
        return ENTRIES[name], ()
    if Path(name).suffix in SUFFIXES:
        return ENTRIES["PATH.csv|.parquet|.npz"], (Path(name).expanduser(),)
    raise EvenhandError(
        f"unknown data set {name!r}{near_miss(name, ENTRIES)} (evenhand datasets lists all {len(ENTRIES)}; "
        f"a file of your own ends in {', '.join(SUFFIXES)})"
    )


def _alpha_beta(name: str, rest: str) -> tuple[float, float]:
    try:
        alpha, beta = (float(piece) for piece in rest.split(","))
    except ValueError:
        raise EvenhandError(
            f"{name!r} needs two numbers, such as synthetic:1,1 (there is also synthetic-iid)"
        ) from None
    return alpha, beta
