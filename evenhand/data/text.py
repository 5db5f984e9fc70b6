"""Characters and words as numbers, and plain-text plays as clients: one speaking role each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.checks import EvenhandError

# LEAF's alphabet, in its order. What is not in it becomes the last character, as in LEAF's own one-hot coding.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80  # characters in, the next one out

_TABLE = np.full(256, len(ALPHABET) - 1, np.int64)
_TABLE[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))

PADDING, UNKNOWN = "<pad>", "<unknown>"
_WORD = re.compile(r"[\w']+|[.,!?;]")


def encode_characters(text: str) -> np.ndarray:
    """Each character's number in the alphabet."""
    return _TABLE[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def speeches(text: str, said: str) -> dict[str, str]:
    """Everything each role says, from blocks `NAME:` + lines, split by blank lines; roles in order of appearance."""
    spoken: dict[str, list[str]] = {}
    for number, block in enumerate(filter(None, re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip("\n"))), 1):
        head, _, lines = block.partition("\n")
        if not head.rstrip().endswith(":"):
            raise EvenhandError(
                f"{said}: block {number} begins with {head[:40]!r}, expected a speaker such as 'ROMEO:'"
            )
        spoken.setdefault(head.rstrip()[:-1], []).append(lines)
    spoken = {role: parts for role, parts in spoken.items() if any(parts)}
    if not spoken:
        raise EvenhandError(f"{said} holds no speeches; expected blocks of 'NAME:' and lines, split by blank lines")
    return {role: "\n".join(parts) for role, parts in spoken.items()}


def flatten(text: str) -> str:
    """LEAF's cleaning of white space: lines joined, runs of blanks made one."""
    return re.sub("  +", " ", text.replace("\n", " "))


@dataclass(frozen=True)
class Windows:
    """Next-character samples of one client, in the order of its text."""

    inputs: np.ndarray  # (n, 80)
    targets: np.ndarray  # (n,)


def windows(tokens: np.ndarray, stride: int) -> Windows:
    """Every `stride`-th run of 80 characters and the character after it."""
    if len(tokens) <= WINDOW:
        return Windows(np.empty((0, WINDOW), np.int64), np.empty(0, np.int64))
    runs = np.lib.stride_tricks.sliding_window_view(tokens, WINDOW + 1)[::stride]
    return Windows(runs[:, :WINDOW], runs[:, WINDOW])


def ordered_cut(count: int, test: float, stride: int) -> tuple[int, int]:
    """LEAF's split by time: windows [0, first) train, [second, count) test; those between would overlap both."""
    first = max(1, int((1 - test) * count))
    return first, min(count, first - 1 + -(-WINDOW // stride))


def words_of(text: str) -> list[str]:
    """Lower-case words and punctuation marks, by LEAF's rule."""
    return _WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """Padding, unknown, and the most frequent words (ties in alphabetical order)."""
    counts = Counter(word for text in texts for word in text)
    common = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return (PADDING, UNKNOWN, *common)


def encode_words(texts: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """(texts, length) word numbers: the first `length` words, padded at the end."""
    numbers = {word: number for number, word in enumerate(vocabulary)}
    encoded = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        found = [numbers.get(word, 1) for word in text[:length]]
        encoded[row, : len(found)] = found
    return encoded
