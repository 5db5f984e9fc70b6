"""Partitions: which client holds which samples, to train, validate and test on."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError, choice, near_miss, number, plain_value
from evenhand.data import allocation
from evenhand.data.allocation import CLIENTS, Allocation, Pool
from evenhand.data.attributes import Attribute
from evenhand.data.dataset import LOCAL_SPLIT, Dataset, Fractions
from evenhand.data.optional import need
from evenhand.data.splitting import (
    TEST,
    TRAIN,
    UNUSED,
    VALIDATION,
    Split,
    assign_parts,
    check_fractions,
    collect,
    offsets_of,
    part_sizes,
)
from evenhand.streams import stream
from evenhand.tables import Listing, text_table

PICTURES = (".png", ".svg", ".pdf")
SEEN = (
    "the inputs were standardised, and their categories found, with rows that clients are tested on; split='official' "
    "keeps these apart, or in Python data.fitted_on(partition.train.indices)"
)


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """The samples of every client, by number: what it trains on, validates on and is tested on."""

    spec: str
    clients: int
    train: Split
    validation: Split
    test: Split
    names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    """What the clients take for the labels of `train.indices`, in that order, where some are wrong (`data.noise`)."""
    noise: np.ndarray | None = None
    """Where some are wrong: the share of each client's training labels that was drawn anew."""

    def __repr__(self) -> str:
        return f"<Partition {self.describe()}>"

    @property
    def sizes(self) -> np.ndarray:
        """All samples of each client, of the three parts together."""
        return self.train.sizes + self.validation.sizes + self.test.sizes

    def describe(self) -> str:
        """One line: kind, clients, samples in each part, smallest and largest client."""
        parts = " / ".join(f"{len(part.indices):,}" for part in (self.train, self.validation, self.test))
        low, high = int(self.sizes.min()), int(self.sizes.max())
        held = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        said = f"{self.spec}: {self.clients:,} clients of {held} samples; train / validation / test {parts}"
        return said if self.noise is None else f"{said}; {int((self.noise > 0).sum()):,} clients with noisy labels"

    def label_counts(self, dataset: Dataset, part: str = "all") -> np.ndarray:
        """A (clients x classes) table of sample counts, of one part (`train`, `validation`, `test`) or of all.

        Where labels are noisy it counts the true ones.
        """
        return self._counts(dataset.labels, dataset.classes, part)

    def group_counts(self, groups: Attribute, part: str = "all") -> np.ndarray:
        """A (clients x groups) table of sample counts: of `data.groups()["sex"]`, or of `data.groups().joint`."""
        return self._counts(groups.codes, len(groups.values), part)

    def _counts(self, codes: np.ndarray, kinds: int, part: str) -> np.ndarray:
        choice("part", part, ("all", "train", "validation", "test"))
        known = {"train": self.train, "validation": self.validation, "test": self.test}
        counts = np.zeros(self.clients * kinds, np.int64)
        for name, split in known.items():
            if part in ("all", name):
                counts += np.bincount(split.owners * kinds + codes[split.indices], minlength=len(counts))
        return counts.reshape(self.clients, kinds)

    def table(self, dataset: Dataset, limit: int = 20) -> str:
        """Client, sizes, labels and groups as text; beyond `limit` clients only the first ones. Notes follow."""
        told = [("labels", self.label_counts(dataset), dataset.class_names)]
        told += [(group.name, self.group_counts(group), group.values) for group in dataset.groups()]
        noise = [] if self.noise is None else [f"{level:.2f}" if level > 0 else "-" for level in self.noise]
        head = ["client", "train", "validation", "test", *(["noise"] if noise else [])]
        rows = [[*head, *(name for name, _, _ in told)]]
        for client in range(min(self.clients, limit)):
            name = self.names[client] if self.names else str(client)
            sizes = [f"{len(split[client]):,}" for split in (self.train, self.validation, self.test)]
            sizes += noise[client : client + 1]
            rows.append([name, *sizes, *(_counts_text(counts[client], names) for _, counts, names in told)])
        lines = [self.describe(), text_table(rows, right=tuple(range(1, len(head))))]
        if self.clients > limit:
            lines.append(f"... and {self.clients - limit:,} more clients")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def draw(self, dataset: Dataset, path: str | Path) -> Path:
        """A picture of classes by clients, darker where a client holds more; the suffix says how: .png, .svg, .pdf."""
        if Path(path).suffix not in PICTURES:
            raise EvenhandError(f"a picture is written as {', '.join(PICTURES)}, not as {str(path)!r}")
        figure = need("matplotlib.figure", "drawing a partition").Figure(
            figsize=(min(16.0, 4 + self.clients * 0.08), min(12.0, 1.8 + dataset.classes * 0.22)), layout="constrained"
        )
        axes = figure.add_subplot()
        counts = self.label_counts(dataset).T
        picture = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
        axes.set(xlabel="client", ylabel="class", title=f"{dataset.name}, {self.spec}")
        if dataset.classes <= 30:
            axes.set_yticks(range(dataset.classes), dataset.class_names or range(dataset.classes))
        if self.names and self.clients <= 30:
            axes.set_xticks(range(self.clients), self.names, rotation=90)
        figure.colorbar(picture, label="samples")
        figure.savefig(path, dpi=150)
        return Path(path)

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change when any client's samples, or what it takes for their labels, do."""
        digest = hashlib.sha256(f"{self.clients}".encode())
        for split in (self.train, self.validation, self.test):
            digest.update(split.offsets.astype("<i8").tobytes())
            digest.update(split.indices.astype("<i8").tobytes())
        if self.labels is not None:
            digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def _counts_text(counts: np.ndarray, names: Sequence[str], most: int = 6) -> str:
    held = np.flatnonzero(counts)
    largest = np.sort(held[np.argsort(-counts[held], kind="stable")[:most]])
    words = [f"{_visible(names[c]) if names else c}: {counts[c]:,}" for c in largest]
    return ", ".join(words) + (f", {len(held) - most} more" if len(held) > most else "") if words else "-"


def _visible(name: str) -> str:
    return name if name.strip() else repr(name)


@dataclass(frozen=True)
class PartitionInfo:
    """A kind of partition: how it is written, what it does, its options and their defaults."""

    name: str
    usage: str
    summary: str
    options: Mapping[str, Any]


class PartitionTable(Listing[PartitionInfo]):
    """The kinds of partition; prints as a table."""

    def __repr__(self) -> str:
        rows = [("partition", "options", "what each client holds")]
        for entry in self._entries:
            options = ", ".join(f"{name}={value}" for name, value in entry.options.items())
            rows.append((entry.usage, options or "-", entry.summary))
        return text_table(rows)


Allocate = Callable[..., Allocation]

KINDS: dict[str, tuple[str, str, Allocate | None]] = {
    "iid": ("iid", "an equal random share", allocation.iid),
    "pat": ("pat:K", "K classes, drawn at random; sizes as equal as the classes allow", allocation.pat),
    "shards": ("shards:S", "S random shards of the samples sorted by label (FedFV)", allocation.shards),
    "dir": ("dir:ALPHA", "labels by Dirichlet(ALPHA) shares; small ALPHA concentrates", allocation.dirichlet),
    "sizes": ("sizes:lognormal", "random labels, lognormal sizes", allocation.sizes),
    "natural": ("natural:COLUMN", "one value of a column of the data (default: client)", allocation.natural),
    "shares": ("shares:TABLE", "given shares of each group of people; low and high are mFairFL's", allocation.shares),
    "bootstrap": ("bootstrap:N", "N random samples, shared between clients; for very many clients", None),
}


def partitions() -> PartitionTable:
    """Every kind of partition, with one line each."""
    entries = [PartitionInfo(n, usage, said, _options(draw)) for n, (usage, said, draw) in KINDS.items()]
    return PartitionTable(entries)


def _options(allocate: Allocate | None) -> dict[str, Any]:
    if allocate is None:
        return {}
    parameters = inspect.signature(allocate).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def partition(
    dataset: Dataset,
    spec: str,
    *,
    clients: int | None = None,
    seed: int = 0,
    split: Fractions | str | None = None,
    pool: str = "all",
    min_size: int | None = None,
    **options: Any,
) -> Partition:
    """Hand a data set out to clients: `partition(data, "dir:0.1", clients=50, cap=None)` or `"dir:0.1,cap=none"`.

    clients: how many (default 100; `natural` and `shares` know themselves).
    split: each client's (train, validation, test) shares, stratified by label; or "official", which keeps the official
        test set apart ("official:0.1": a tenth of the training part for validation). Default: what the data set asks
        for.
    pool: "all" samples, or only those of the official "train" set.
    min_size: the fewest samples a client may have: `dir` redraws, `sizes` sees to it, `natural` leaves clients out, the
        others refuse. Unless set, clients that end up empty or without test data are named in `.notes`.

    >>> from evenhand.data import load
    >>> data = load("synthetic-iid", sigma=0.0)
    >>> print(partition(data, "iid", clients=10, split=(0.8, 0.1, 0.1)).describe())
    iid: 10 clients of 312 samples; train / validation / test 2,500 / 310 / 310
    """
    kind, argument, written = _parse(spec)
    chosen = {**written, **options}
    clients = chosen.pop("clients", clients)
    min_size = chosen.pop("min_size", min_size)
    known = _options(KINDS[kind][2])
    for name in chosen:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise EvenhandError(f"{kind} has no option {name!r}{near_miss(name, known)} (its options: {listed})")
    if clients is not None:
        number("clients", clients, low=1, whole=True)
    if min_size is not None:
        number("min_size", min_size, low=0, whole=True)
    choice("pool", pool, ("all", "train"))
    number("seed", seed, low=0, whole=True)
    fractions, official = _resolve_split(dataset, split, pool)
    count = len(dataset)
    if pool == "train":
        if dataset.train_rows is None:
            raise EvenhandError(f"pool='train': {dataset.name} has no official training set; use pool='all'")
        count = dataset.train_rows
    later = np.arange(count) >= dataset.train_rows if official and dataset.train_rows else np.zeros(count, bool)
    said = ",".join([spec, *(f"{name}={value}" for name, value in options.items())])
    labels = dataset.labels[:count]
    allocate = KINDS[kind][2]
    if allocate is None:
        each = _bootstrap_size(argument, min_size)
        shared = _bootstrap(said, each, labels, dataset.classes, clients or CLIENTS, fractions, later, seed)
        return _honest(shared, dataset)

    def groups(names: Sequence[str]) -> Attribute:
        found = dataset.groups(names).joint
        return replace(found, codes=found.codes[:count])

    samples = Pool(
        dataset.name, labels, dataset.classes, lambda name: dataset.column(name)[:count], groups, dataset.sensitive
    )
    drawn = allocate(samples, argument, clients, min_size, stream(seed, "partition"), **chosen)
    sizes = np.bincount(drawn.owner[drawn.owner >= 0], minlength=drawn.clients)
    if min_size and sizes.min() < min_size:
        raise EvenhandError(
            f"{said}: client {int(sizes.argmin())} has {int(sizes.min())} samples, fewer than min_size={min_size}; "
            "use fewer clients or a smaller min_size"
        )
    train, validation, test = _divide(drawn, labels, dataset.classes, fractions, later, seed)
    notes = (*drawn.notes, *_findings(drawn, train, test, fractions[2] > 0 or official))
    return _honest(Partition(said, drawn.clients, train, validation, test, drawn.names, notes), dataset)


def _honest(drawn: Partition, dataset: Dataset) -> Partition:
    """The partition, with a note where rows that a table was prepared from are tested on."""
    prepared_from = 0 if dataset.refit is None else dataset.train_rows or len(dataset)
    seen = bool((drawn.test.indices < prepared_from).any())
    return replace(drawn, notes=(*drawn.notes, SEEN)) if seen else drawn


def _parse(spec: str) -> tuple[str, str, dict[str, Any]]:
    """`"dir:0.1,cap=none"` -> `("dir", "0.1", {"cap": None})`; what is no option belongs to the argument."""
    if not isinstance(spec, str):
        raise EvenhandError(f"a partition is given as text such as 'pat:2', not as {type(spec).__name__}")
    kind, _, rest = spec.partition(":")
    head, *more = kind.split(",")  # `iid,min_size=2` has no colon
    kind, rest = head.strip(), ",".join([*more, rest] if more else [rest])
    if kind not in KINDS:
        raise EvenhandError(
            f"unknown partition {kind!r}{near_miss(kind, KINDS)} (evenhand partitions lists all {len(KINDS)})"
        )
    known = {*_options(KINDS[kind][2]), "clients", "min_size"}
    argument, options = [], {}
    for piece in rest.split(","):
        name, equals, value = (part.strip() for part in piece.partition("="))
        if equals and name in known:
            options[name] = plain_value(value)
        elif equals and kind != "shares":
            raise EvenhandError(
                f"{kind} has no option {name!r}{near_miss(name, known)} (it has {', '.join(sorted(known))})"
            )
        else:
            argument.append(piece)
    return kind, ",".join(argument).strip(", "), options


def _resolve_split(dataset: Dataset, split: Fractions | str | None, pool: str) -> tuple[Fractions, bool]:
    """The shares inside a client (of its training part when the split is official), and whether it is official."""
    if split is None:
        split = LOCAL_SPLIT if dataset.split == "official" and pool == "train" else dataset.split
    if not isinstance(split, str):
        return check_fractions(split), False
    word, _, held = split.partition(":")
    if word != "official":
        raise EvenhandError(f"split={split!r} must be three shares (train, validation, test), or 'official'")
    if dataset.train_rows is None or dataset.train_rows == len(dataset) or pool == "train":
        raise EvenhandError(f"split={split!r}: there is no official test set in {dataset.name} with pool={pool!r}")
    try:
        share = float(held or 0)
    except ValueError:
        share = -1.0
    number(f"split={split!r}: validation share", share, low=0, high=0.9)
    return (1 - share, share, 0.0), True


def _divide(
    drawn: Allocation, labels: np.ndarray, classes: int, fractions: Fractions, later: np.ndarray, seed: int
) -> tuple[Split, Split, Split]:
    """Each client's samples into its three parts, in random order; `later` marks official test samples."""
    rng = stream(seed, "split")
    owner = np.where(later, UNUSED, drawn.owner)
    part = assign_parts(owner, labels, drawn.clients, classes, fractions, rng)
    part[later & (drawn.owner >= 0)] = TEST
    order = rng.permutation(len(part))
    train, validation, test = (
        collect(drawn.owner, part == which, drawn.clients, order) for which in (TRAIN, VALIDATION, TEST)
    )
    return train, validation, test


def _bootstrap_size(argument: str, min_size: int | None) -> int:
    if not argument.isdigit() or int(argument) < 1:
        raise EvenhandError(f"bootstrap:{argument} needs the number of samples per client, such as bootstrap:50")
    if min_size and int(argument) < min_size:
        raise EvenhandError(f"bootstrap:{argument} gives every client fewer than min_size={min_size} samples")
    return int(argument)


def _bootstrap(
    said: str,
    each: int,
    labels: np.ndarray,
    classes: int,
    clients: int,
    fractions: Fractions,
    later: np.ndarray,
    seed: int,
) -> Partition:
    """Clients draw with replacement: training samples from one part of the pool, test samples from another.

    So clients share samples, but nobody is tested on what anybody trains on.
    """
    whole = Allocation(np.zeros(len(labels), np.int64), 1)
    pools = _divide(whole, labels, classes, fractions, later, seed)
    if later.any():  # as many test samples as the official split has in proportion
        share = float(later.mean())
        fractions = (fractions[0] * (1 - share), fractions[1] * (1 - share), share)
    validation, test = (int(size[0]) for size in part_sizes(np.array([each]), fractions))
    rng = stream(seed, "partition")
    splits = []
    for pool, size in zip(pools, (each - validation - test, validation, test), strict=True):
        amount = size if len(pool.indices) else 0
        picks = pool.indices[rng.integers(0, max(1, len(pool.indices)), clients * amount)]
        splits.append(Split(picks, offsets_of(np.full(clients, amount))))
    notes = ["clients share samples (drawn with replacement); training and test samples come from separate parts"]
    if fractions[2] > 0 and not len(splits[2].indices):
        notes.append(f"no client has test data: {each} samples each are too few")
    return Partition(said, clients, splits[0], splits[1], splits[2], None, tuple(notes))


def _findings(drawn: Allocation, train: Split, test: Split, tested: bool) -> list[str]:
    """What a careful reader of the partition should know: idle samples, empty clients, clients without test data."""
    notes = []
    idle = int((drawn.owner < 0).sum())
    if idle:
        notes.append(f"{idle:,} of {len(drawn.owner):,} samples belong to no client")
    empty = train.sizes == 0
    if empty.any():
        notes.append(f"{_some(empty, drawn)} no training data")
    untested = (test.sizes == 0) & ~((train.sizes == 0) & (test.sizes == 0))
    if tested and untested.any():
        notes.append(f"{_some(untested, drawn)} no test data")
    return notes


def _some(marked: np.ndarray, drawn: Allocation, most: int = 5) -> str:
    places = np.flatnonzero(marked)
    first = ", ".join(drawn.names[place] if drawn.names else str(place) for place in places[:most])
    which = f"{first}, ..." if len(places) > most else first
    return f"{len(places):,} of {drawn.clients:,} clients ({which}) {'has' if len(places) == 1 else 'have'}"
