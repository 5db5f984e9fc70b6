"""FEMNIST, Shakespeare and Sent140 in LEAF's JSON layout, and Shakespeare from plain text.

LEAF's `preprocess.sh` writes `all_data/*.json`, and `train/*.json` with `test/*.json`; each file holds `users`,
`num_samples` and `user_data: {user: {x: [...], y: [...]}}`. With train and test files their split is the official
one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.checks import EvenhandError, number
from evenhand.data.dataset import LOCAL_SPLIT, Dataset
from evenhand.data.files import Remote, Shelf, read_text
from evenhand.data.text import (
    ALPHABET,
    WINDOW,
    Windows,
    encode_characters,
    encode_words,
    flatten,
    ordered_cut,
    speeches,
    vocabulary_of,
    windows,
    words_of,
)
from evenhand.data.vision import character_range, keep_classes

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # FEMNIST's 62 classes, in order
TWEET_WORDS = 25
PLAYS = Remote(
    "input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


@dataclass(frozen=True)
class Layout:
    """The JSON files of one data set: two parts when LEAF has split them, else one."""

    parts: tuple[tuple[Path, ...], ...]

    @property
    def folder(self) -> Path:
        return self.parts[0][0].parent.parent


def layout(shelf: Shelf, name: str) -> Layout | None:
    """LEAF's files for a data set, if they are there."""
    for base in shelf.folders([name, f"leaf/{name}"]):
        for folder in (base, base / "data"):
            train, test, everything = (
                tuple(sorted((folder / part).glob("*.json"))) for part in ("train", "test", "all_data")
            )
            if train and test:
                return Layout((train, test))
            if everything:
                return Layout((everything,))
    return None


def _require(shelf: Shelf, name: str) -> Layout:
    found = layout(shelf, name)
    if found is None:
        places = ", ".join(map(str, shelf.folders([name])))
        raise EvenhandError(
            f"{name}: no all_data/*.json, nor train/*.json with test/*.json, in {places}; make them with LEAF's "
            f"data/{name}/preprocess.sh (https://github.com/TalwalkarLab/leaf)"
        )
    return found


@dataclass(frozen=True)
class User:
    """One client of a LEAF file."""

    name: str
    group: str
    x: list[Any]
    y: list[Any]
    said: str
    """File and user, for messages."""


def users(paths: Sequence[Path]) -> Iterator[User]:
    """The clients of some LEAF files, one file in memory at a time."""
    for path in paths:
        try:
            content = json.loads(read_text(path))
        except json.JSONDecodeError as failure:
            raise EvenhandError(f"{path} is truncated or not JSON ({failure})") from failure
        if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
            raise EvenhandError(f"{path} is not a LEAF file: expected the keys users, num_samples and user_data")
        groups = content.get("hierarchies") or [""] * len(content["users"])
        for name, group in zip(content["users"], groups, strict=False):
            data = content["user_data"].get(name)
            if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
                raise EvenhandError(f"{path}: user {name!r} has no x and y in user_data")
            # num_samples is not compared: LEAF's own split of Shakespeare writes it too large.
            if len(data["x"]) != len(data["y"]):
                raise EvenhandError(f"{path}: user {name!r} has {len(data['x'])} inputs but {len(data['y'])} labels")
            yield User(str(name), str(group), data["x"], data["y"], f"{path}: user {name!r}")


def _assemble(
    name: str,
    parts: Sequence[Sequence[tuple[str, str, np.ndarray, np.ndarray]]],
    classes: int,
    class_names: tuple[str, ...],
    source: str,
    group_column: str = "",
    vocabulary: tuple[str, ...] = (),
) -> Dataset:
    """Clients' arrays (name, group, inputs, targets) of the training part, and of the test part where there is one."""
    entries = [entry for part in parts for entry in part if len(entry[3])]
    if not entries:
        raise EvenhandError(f"{name}: {source} holds no samples")
    counts = [len(targets) for *_, targets in entries]
    columns = {"client": np.repeat([client for client, *_ in entries], counts)}
    if group_column and any(group for _, group, *_ in entries):
        columns[group_column] = np.repeat([group for _, group, *_ in entries], counts)
    return Dataset(
        name=name,
        inputs=torch.from_numpy(np.concatenate([inputs for _, _, inputs, _ in entries])),
        targets=torch.from_numpy(np.concatenate([targets for *_, targets in entries])),
        classes=classes,
        class_names=class_names,
        train_rows=sum(len(targets) for *_, targets in parts[0]) if len(parts) == 2 else None,
        columns=columns,
        source=source,
        split="official" if len(parts) == 2 else LOCAL_SPLIT,
        vocabulary=vocabulary,
    )


def _labels(user: User, classes: int) -> np.ndarray:
    labels = np.asarray(user.y)
    if labels.size and (
        labels.ndim != 1 or labels.dtype.kind not in "iu" or not 0 <= labels.min() <= labels.max() < classes
    ):
        raise EvenhandError(f"{user.said}: labels must be class numbers 0 to {classes - 1}")
    return labels.astype(np.int64)


def femnist(shelf: Shelf, *, keep: str = "0-9A-Za-z") -> Dataset:
    """Handwritten characters by writer; `keep="a-j"`: some of them only."""
    found = _require(shelf, "femnist")

    def convert(user: User) -> tuple[str, str, np.ndarray, np.ndarray]:
        try:
            images = np.asarray(user.x, np.float32).reshape(len(user.x), 1, 28, 28)
        except ValueError as failure:
            raise EvenhandError(f"{user.said}: images must be lists of 784 numbers ({failure})") from failure
        return user.name, user.group, images, _labels(user, 62)

    parts = [[convert(user) for user in users(paths)] for paths in found.parts]
    whole = _assemble("femnist", parts, 62, tuple(CHARACTERS), str(found.folder))
    return keep_classes(whole, character_range(keep))


def sent140(shelf: Shelf, *, words: int = TWEET_WORDS, vocabulary: int = 10_000) -> Dataset:
    """Tweets by author, positive or negative: the numbers of the first words.

    The vocabulary is the most frequent words of the official training rows (of all rows where LEAF has made no split).
    """
    number("words", words, low=1, whole=True)
    number("vocabulary", vocabulary, low=3, whole=True)
    found = _require(shelf, "sent140")

    def convert(user: User) -> tuple[str, list[list[str]], np.ndarray]:
        try:
            texts = [words_of(tweet if isinstance(tweet, str) else tweet[4]) for tweet in user.x]
        except (IndexError, TypeError, AttributeError) as failure:
            raise EvenhandError(f"{user.said}: a tweet must be [id, date, query, user, text]") from failure
        return user.name, texts, _labels(user, 2)

    read = [[convert(user) for user in users(paths)] for paths in found.parts]
    known = vocabulary_of((text for _, texts, _ in read[0] for text in texts), vocabulary)
    parts = [[(name, "", encode_words(texts, known, words), labels) for name, texts, labels in part] for part in read]
    return _assemble("sent140", parts, 2, ("negative", "positive"), str(found.folder), vocabulary=known)


def shakespeare(shelf: Shelf, *, stride: int = 1, test: float = 0.2) -> Dataset:
    """The next character after 80 others, by speaking role; LEAF's alphabet.

    From LEAF's JSON, or from plain text (`NAME:` blocks). Windows overlap, so a random split would show test
    characters in training: unless LEAF has split the data, the last `test` of each role's windows are its test set,
    and the windows between that overlap both are left out (LEAF's rule). Roles too short for both are left out.
    `stride`: every n-th window.
    """
    number("stride", stride, low=1, whole=True)
    number("test", test, above=0, high=0.9)
    found = layout(shelf, "shakespeare")
    if found is None:
        _, (path,) = shelf.require(["shakespeare"], {"text": [("input.txt",)]}, remotes=[PLAYS])
        roles = speeches(read_text(path), str(path))
        texts = [(role, "", windows(encode_characters(flatten(text)), stride)) for role, text in roles.items()]
        return _plays(_cut(texts, test, stride), str(path), len(texts))
    parts = [[(u.name, u.group, _strings(u, stride)) for u in users(paths)] for paths in found.parts]
    if len(parts) == 1:
        return _plays(_cut(parts[0], test, stride), str(found.folder), len(parts[0]))
    return _plays(parts, str(found.folder), len(parts[0]))


Role = tuple[str, str, Windows]


def _strings(user: User, stride: int) -> Windows:
    x, y = user.x[::stride], user.y[::stride]
    if any(len(text) != WINDOW for text in x) or any(len(character) != 1 for character in y):
        raise EvenhandError(f"{user.said}: expected strings of {WINDOW} characters and the one that follows")
    return Windows(encode_characters("".join(x)).reshape(-1, WINDOW), encode_characters("".join(y)))


def _cut(roles: Sequence[Role], test: float, stride: int) -> list[list[Role]]:
    train, later = [], []
    for name, group, given in roles:
        count = len(given.targets)
        first, second = ordered_cut(count, test, stride)
        if count and second < count:
            train.append((name, group, Windows(given.inputs[:first], given.targets[:first])))
            later.append((name, group, Windows(given.inputs[second:], given.targets[second:])))
    return [train, later]


def _plays(parts: Sequence[Sequence[Role]], source: str, roles: int) -> Dataset:
    if not parts[0]:
        raise EvenhandError(f"shakespeare: no role in {source} is long enough for training and test windows")
    left_out = roles - len(parts[0])
    return _assemble(
        "shakespeare",
        [[(name, group, given.inputs, given.targets) for name, group, given in part] for part in parts],
        len(ALPHABET),
        tuple(ALPHABET),
        source + (f" ({left_out} of {roles} roles are too short)" if left_out else ""),
        group_column="play",
        vocabulary=tuple(ALPHABET),
    )
