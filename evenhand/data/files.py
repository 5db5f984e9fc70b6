"""Finding, fetching and reading the files data sets are published in; a bad file is named with what was expected.

A file given by the caller is checked by what it holds, because the same contents come in several packings. A download
is checked against the published checksum where one is known.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import logging
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.checks import EvenhandError
from evenhand.data.optional import need

DATA_VARIABLE = "EVENHAND_DATA"
CACHE_VARIABLE = "EVENHAND_CACHE"

Alternatives = tuple[str, ...]  # names under which one and the same file is found; a folder's ends in "/"


@dataclass(frozen=True)
class Remote:
    """One official file on the network."""

    file: str
    url: str
    checksum: str | None = None
    """As pooch writes it, `md5:...`; None where none is published, and the contents are checked instead."""


@dataclass(frozen=True)
class Shelf:
    """Where to look for files: a folder the caller names; else EVENHAND_DATA, packages' folders and the cache."""

    given: Path | None = None

    @classmethod
    def at(cls, data_dir: str | Path | None) -> Shelf:
        """The shelf for a caller's `data_dir`, which must exist."""
        if data_dir is None:
            return cls()
        return cls(_existing(Path(data_dir), f"data_dir={str(data_dir)!r}"))

    def folders(self, names: Sequence[str], system: Sequence[str] = ()) -> list[Path]:
        """The folders that may hold a data set known by `names`, best first."""
        variable = os.environ.get(DATA_VARIABLE)
        root = self.given
        if root is None and variable:
            root = _existing(Path(variable), f"the environment variable {DATA_VARIABLE}={variable!r}")
        found = [] if root is None else [*(root / name for name in names), root]
        if self.given is None:
            found += [*map(Path, system), cache_folder() / names[0]]
        return found

    def find(
        self, names: Sequence[str], forms: Mapping[str, Sequence[Alternatives]], system: Sequence[str] = ()
    ) -> tuple[str, list[Path]] | None:
        """The first folder that holds every file of one of the forms: which form, and its files in order."""
        for folder in self.folders(names, system):
            for form, files in forms.items():
                paths = [_first(folder, alternatives) for alternatives in files]
                if all(paths):
                    return form, [path for path in paths if path]
        return None

    def require(
        self,
        names: Sequence[str],
        forms: Mapping[str, Sequence[Alternatives]],
        *,
        system: Sequence[str] = (),
        remotes: Sequence[Remote] = (),
        advice: str = "",
    ) -> tuple[str, list[Path]]:
        """`find`, or fetch the official files into the cache, or say what was looked for and where."""
        found = self.find(names, forms, system)
        if found:
            return found
        if remotes and self.given is None:
            for remote in remotes:
                fetch(remote, cache_folder() / names[0])
            found = self.find(names, forms, system)
            if found:
                return found
        raise EvenhandError(self._missing(names, forms, system, remotes, advice))

    def _missing(
        self,
        names: Sequence[str],
        forms: Mapping[str, Sequence[Alternatives]],
        system: Sequence[str],
        remotes: Sequence[Remote],
        advice: str,
    ) -> str:
        folders = self.folders(names, system)
        # The form of which most is there is the one the caller meant.
        lacking = min(
            ([a[0] for a in files if not any(_first(folder, a) for folder in folders)] for files in forms.values()),
            key=len,
        )
        said = f"{names[0]}: no {', '.join(lacking)} in {', '.join(map(str, folders))}"
        urls = ", ".join(remote.url for remote in remotes)
        way = advice or (f"put the official files there ({urls})" if urls else f"or set {DATA_VARIABLE}")
        return f"{said}; {way}"


def _existing(folder: Path, said: str) -> Path:
    if not folder.expanduser().is_dir():
        raise EvenhandError(f"{said} is not a folder")
    return folder.expanduser()


def _first(folder: Path, alternatives: Alternatives) -> Path | None:
    return next((folder / name for name in alternatives if _is_there(folder / name, name.endswith("/"))), None)


def _is_there(path: Path, folder: bool) -> bool:
    return path.is_dir() if folder else path.is_file()


def cache_folder() -> Path:
    """Where downloads are kept: EVENHAND_CACHE, or the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "evenhand"


def fetch(remote: Remote, folder: Path) -> Path:
    """Download one official file into a folder, once; its checksum is verified where one is published."""
    pooch = need("pooch", f"downloading {remote.file}")
    # pooch logs the checksum of a file that comes without one; that is no news to the user.
    logging.getLogger("pooch").setLevel(logging.WARNING)
    try:
        return Path(
            pooch.retrieve(
                url=remote.url,
                known_hash=remote.checksum,
                fname=remote.file,
                path=folder,
                progressbar=importlib.util.find_spec("tqdm") is not None,
            )
        )
    except Exception as failure:
        reason = str(failure).strip().split("\n")[0]
        raise EvenhandError(
            f"could not download {remote.file} from {remote.url} ({type(failure).__name__}: {reason}); "
            f"put the file into {folder}, or into a folder named by data_dir or {DATA_VARIABLE}"
        ) from failure


def checksum(path: Path, kind: str = "md5") -> str:
    """The checksum of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def expect_checksum(path: Path, expected: str) -> None:
    """Insist on the published checksum, given as `md5:...` or `sha256:...`."""
    kind, _, digits = expected.partition(":")
    found = checksum(path, kind)
    if found != digits:
        raise EvenhandError(
            f"{path} is not the published file: its {kind} is {found}, expected {digits}; fetch it again"
        )


def read_bytes(path: Path) -> bytes:
    """The contents of a file, unpacked when it is gzipped."""
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as failure:
        raise EvenhandError(f"{path} is truncated or corrupt: it does not unpack as gzip ({failure})") from failure


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file, with the file named when it is not text."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as failure:
        raise EvenhandError(f"{path} is not a text file ({failure.reason} at byte {failure.start})") from failure


def read_idx(path: Path, dimensions: int, content: str = "") -> np.ndarray:
    """An IDX file of unsigned bytes (MNIST's form), gzipped or not; `content` is the published md5 of what it holds."""
    raw = read_bytes(path)
    magic = bytes([0, 0, 8, dimensions])
    if raw[:4] != magic:
        raise EvenhandError(
            f"{path} is not an IDX file of bytes in {dimensions} dimensions: "
            f"it begins with {raw[:4].hex() or 'nothing'}, expected {magic.hex()}"
        )
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise EvenhandError(f"{path} is truncated: {len(raw)} bytes do not hold the header's {start}")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, 4))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        kind = "truncated" if len(raw) < expected else "longer than it says"
        raise EvenhandError(f"{path} is {kind}: {len(raw):,} bytes, expected {expected:,} for shape {shape}")
    if content:
        found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
        if found != content:
            raise EvenhandError(f"{path} does not hold the published data: md5 {found} unpacked, expected {content}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; pickled objects are refused."""
    try:
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise EvenhandError(f"{path} holds a single array, expected an npz file of named ones")
            return {name: archive[name] for name in archive.files}
    except EvenhandError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, zlib.error) as failure:
        raise EvenhandError(f"{path} is not a readable npz file of plain arrays ({failure})") from failure


def read_members(path: Path, members: Sequence[str]) -> dict[str, bytes]:
    """Some members of a tar archive, in memory: nothing is unpacked to disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for entry in archive:
                name = entry.name.removeprefix("./")
                if name in members and entry.isfile():
                    stream = archive.extractfile(entry)
                    found[name] = stream.read() if stream else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as failure:
        raise EvenhandError(f"{path} is truncated or not a tar archive ({failure})") from failure
    for name in members:
        if name not in found:
            raise EvenhandError(f"{path} does not hold {name}")
    return found


@dataclass(frozen=True)
class Tree:
    """Many small files: in a folder, or still in a tar or zip archive, from which nothing is unpacked to disk."""

    path: Path

    def names(self) -> list[str]:
        """The paths of all files, with "/" between folders, sorted; hidden files are none of a data set's."""
        if self.path.is_dir():
            walk = os.walk(self.path, followlinks=True)
            inside = ((Path(folder).relative_to(self.path), files) for folder, _, files in walk)
            found = [(folder / file).as_posix() for folder, files in inside for file in files]
        else:
            found = [name for name, _ in self._unpacked(None)]
        return sorted(name for name in found if not name.rpartition("/")[2].startswith("."))

    def read(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Some of the files, one at a time with its path, in whatever order is cheapest."""
        if self.path.is_dir():
            return ((name, (self.path / name).read_bytes()) for name in names)
        return self._unpacked(names)

    def _unpacked(self, names: Collection[str] | None) -> Iterator[tuple[str, bytes]]:
        """An archive's files in its order: those named with what they hold, or (None) all of them without."""
        try:
            if self.path.suffix == ".zip":
                with zipfile.ZipFile(self.path) as packed:
                    for member in packed.infolist():
                        if not member.is_dir() and (names is None or member.filename in names):
                            yield member.filename, b"" if names is None else packed.read(member)
                return
            with tarfile.open(self.path) as archive:
                for entry in archive:
                    name = entry.name.removeprefix("./")
                    if entry.isfile() and (names is None or name in names):
                        stream = None if names is None else archive.extractfile(entry)
                        yield name, stream.read() if stream else b""
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as failure:
            raise EvenhandError(f"{self.path} is truncated or not an archive ({failure})") from failure


def unpickle(raw: bytes, said: str) -> Any:
    """Numbers, texts, lists, dictionaries and numpy arrays from a pickle; anything that could run code is refused."""
    try:
        return _PlainUnpickler(io.BytesIO(raw), said).load()
    except EvenhandError:
        raise
    except Exception as failure:  # a broken pickle can raise nearly anything
        raise EvenhandError(f"{said} is truncated or not a pickle ({type(failure).__name__}: {failure})") from failure


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, said: str) -> None:
        super().__init__(stream, encoding="bytes")
        self._said = said

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in known:
            raise EvenhandError(
                f"{self._said} asks for {module}.{name}, which a data file has no need of; it was not run"
            )
        return known[module, name]


def _empty_array(_kind: type, _shape: tuple[int, ...], _dtype: bytes) -> np.ndarray:
    return np.ndarray((0,), np.uint8)  # the pickled state that follows sets shape, type and contents


def _latin1(text: str, _encoding: object = None) -> bytes:
    return text.encode("latin-1")
