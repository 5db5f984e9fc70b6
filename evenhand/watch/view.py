"""What can be seen of a folder at this moment: its page, and in a line how far it has got.

Everything comes from the files, so it does not matter who writes them, or whether anybody does: a training that was
killed and goes on, or has not begun, is seen as well as one in this process.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Any

from evenhand.checks import EvenhandError, near_miss
from evenhand.comparison import folder_names, load_comparison, read_description
from evenhand.folders import COMPARISON, DIVERGED, REPORT, SUMMARY, ComparisonFolder, RunFolder
from evenhand.logs import CLIENTS, ROUNDS
from evenhand.running import load_runs
from evenhand.runs import Runs

WAITING, RUNNING, ENDED, TROUBLE = "waiting", "running", "ended", "trouble"
AT_LEAST = 1.0  # seconds between two pages
SHARE = 0.1  # of the time, at most, goes into pages


@dataclass(frozen=True)
class Seen:
    """A folder at one moment."""

    phase: str
    said: str
    page: bytes = b""
    version: str = ""  # of the page; empty where there is none
    written: float = 0.0  # when a file was last written to

    def to_dict(self) -> dict[str, Any]:
        """All but the page, and for how long nothing has been written."""
        found = asdict(replace(self, page=b""))
        del found["page"], found["written"]
        return found | {"idle": round(max(0.0, time() - self.written), 1) if self.written else None}


class View:
    """Looks at a folder; safe to ask from several threads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._marks: object = None
        self._due = 0.0
        self._seen = Seen(WAITING, "")

    def look(self) -> Seen:
        """The newest page. One is made only when somebody asks, something was written, and there is time for it."""
        with self._lock:
            if monotonic() < self._due:
                return self._seen
            started, marks = monotonic(), list(_marks(self.folder))
            if marks != self._marks:
                self._seen, understood = self._render(max((mark[1] for mark in marks), default=0) / 1e9)
                self._marks = marks if understood else None
            self._due = monotonic() + max(AT_LEAST, (monotonic() - started) / SHARE)
            return self._seen

    def _render(self, written: float) -> tuple[Seen, bool]:
        try:
            phase, said, page = _look(self.folder)
        except Exception as error:  # whatever is in the files, the view stays: with the last page, and the reason
            why = str(error) if isinstance(error, EvenhandError) else f"{type(error).__name__}: {error}"
            return replace(self._seen, phase=TROUBLE, said=why, written=written), False
        if not page and self._seen.page and phase == WAITING:  # begun anew: the old page is better than none
            return replace(self._seen, phase=phase, said=said, written=written), True
        version = hashlib.sha256(page).hexdigest()[:16] if page else ""
        return Seen(phase, said, page, version, written), True


def waiting_for(folder: Path) -> str:
    """What a person should know who watches a folder in which nothing has begun; a folder that cannot be is refused."""
    if folder.exists() and not folder.is_dir():
        raise EvenhandError(f"{str(folder)!r} is a file, not the folder of a run")
    if RunFolder(folder).started or ComparisonFolder(folder).started:
        return ""
    if folder.is_dir() and any(not entry.name.endswith(".part") for entry in folder.iterdir()):
        raise EvenhandError(f"{str(folder)!r} is not the folder of a run or a comparison: it holds other files")
    beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    return (
        f"nothing has begun in {str(folder)!r} yet; waiting for it{near_miss(folder.name, set(beside) - {folder.name})}"
    )


def _marks(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Name, time and size of every file that a page depends on."""
    names = {RunFolder.description, COMPARISON, SUMMARY, DIVERGED, REPORT, ROUNDS, CLIENTS}
    for pattern in ("*", "*/*", "*/*/*"):
        for path in sorted(folder.glob(pattern)):
            if path.name not in names:
                continue
            try:
                found = path.stat()
            except OSError:  # gone in between
                continue
            yield str(path.relative_to(folder)), found.st_mtime_ns, found.st_size


def _look(folder: Path) -> tuple[str, str, bytes]:
    """Phase, words and page of a folder."""
    if ComparisonFolder(folder).started:
        return _look_at_comparison(ComparisonFolder(folder))
    if RunFolder(folder).started:
        return _look_at_run(RunFolder(folder))
    return WAITING, f"waiting for a run to begin in {folder}", b""


def _look_at_run(folder: RunFolder) -> tuple[str, str, bytes]:
    if folder.finished and (folder.path / REPORT).is_file():
        return ENDED, "finished", (folder.path / REPORT).read_bytes()
    runs = load_runs(folder.path)
    said = _said(runs, folder)
    phase = ENDED if folder.finished or folder.diverged is not None else RUNNING
    if not runs[0].evaluations:
        return WAITING if phase == RUNNING else phase, f"{said}; no client has been measured yet", b""
    return phase, said, _page(runs)


def _said(runs: Runs, folder: RunFolder) -> str:
    if folder.diverged is not None:
        return f"diverged in round {folder.diverged:,}"
    return "finished" if folder.finished else f"round {len(runs[0].rounds):,} of {runs.experiment.rounds:,}"


def _look_at_comparison(folder: ComparisonFolder) -> tuple[str, str, bytes]:
    if folder.finished and (folder.path / REPORT).is_file():
        return ENDED, "finished", (folder.path / REPORT).read_bytes()
    _, methods = read_description(folder.path / COMPARISON)
    told, seen = [], False
    for label, name in folder_names(methods).items():
        place = RunFolder(folder.path / name)
        if not place.started:
            continue
        runs = load_runs(place.path)
        seen = seen or bool(runs[0].evaluations and place.diverged is None)
        told.append(f"{label} {_said(runs, place)}")
    to_come = len(methods) - len(told)
    said = ", ".join([*told, *([f"{to_come} to come"] if to_come else [])])
    phase = ENDED if folder.finished else RUNNING
    if not seen:
        return WAITING if phase == RUNNING else phase, f"{said}; no client has been measured yet", b""
    return phase, said, _page(load_comparison(folder.path, unfinished=True))


def _page(found: Any) -> bytes:
    """The report as it would be written now."""
    with tempfile.TemporaryDirectory(prefix="evenhand-") as place:
        return Path(found.report(Path(place) / REPORT)).read_bytes()
