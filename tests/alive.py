"""Processes as Linux shows them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path


def alive(number: int) -> bool:
    """Whether a process runs; one that is dead and that nobody has asked how does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(numbers: Iterable[int], seconds: float) -> bool:
    """Wait until none of them runs any more."""
    numbers, deadline = list(numbers), time.monotonic() + seconds
    while any(map(alive, numbers)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
