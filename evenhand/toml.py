"""Descriptions as TOML: read with the standard library, written here, with "none" where TOML has no word."""

from __future__ import annotations

import json
import numbers
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenhand.checks import EvenhandError

NONE = "none"
BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a file; the text "none" stands for None."""
    if Path(path).is_dir():
        inside = sorted(map(str, Path(path).glob("*.toml")))
        hint = f"; did you mean {inside[0]!r}?" if inside else ""
        raise EvenhandError(f"{str(path)!r} is a folder, not a TOML file{hint}")
    try:
        values: dict[str, Any] = _with_none(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise EvenhandError(f"there is no file {str(path)!r}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise EvenhandError(f"{str(path)!r} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise EvenhandError(f"{str(path)!r} is not valid TOML: {error}") from error
    return values


def read_value(text: str) -> Any:
    """One value as a person writes it on a command line: TOML where it is TOML, else a word (`none` is None)."""
    text = text.strip()
    try:
        return _with_none(tomllib.loads(f"value = {text}")["value"])
    except (tomllib.TOMLDecodeError, KeyError):
        words = {"true": True, "false": False, NONE: None}
        return words.get(text.lower(), text)


def to_toml(values: Mapping[str, Any]) -> str:
    """Nested plain values as TOML."""
    text = "".join(_line(name, value) for name, value in values.items() if not isinstance(value, Mapping))
    for name, value in values.items():
        if isinstance(value, Mapping):
            text += _table(_key(name), value)
    return text


def _table(path: str, table: Mapping[str, Any]) -> str:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    text = "".join(_line(key, value) for key, value in table.items() if key not in inner)
    head = f"\n[{path}]\n" if text or not inner else ""
    return head + text + "".join(_table(f"{path}.{_key(key)}", value) for key, value in inner.items())


def _line(name: str, value: Any) -> str:
    return f"{_key(name)} = {written(value)}\n"


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _text(name)


def written(value: Any) -> str:
    """A plain value as TOML."""
    if value is None:
        return _text(NONE)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, numbers.Real):
        return repr(int(value) if isinstance(value, numbers.Integral) else float(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(written, value)) + "]"
    raise EvenhandError(f"{value!r} ({type(value).__name__}) cannot be written to TOML")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_none(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_none(entry) for entry in value]
    return None if value == NONE else value
