"""Packages that only some data sets need: imported where they are used, with the way to get them when missing."""

from __future__ import annotations

import importlib
from typing import Any

from evenhand.checks import EvenhandError

# Import name -> (name on PyPI, the extra of evenhand that brings it).
PACKAGES = {
    "datasets": ("datasets", "hub"),
    "matplotlib.figure": ("matplotlib", "report"),
    "PIL.Image": ("pillow", "data"),
    "pooch": ("pooch", "data"),
    "pyarrow.parquet": ("pyarrow", "data"),
    "sklearn": ("scikit-learn", "data"),
}


def need(module: str, purpose: str) -> Any:
    """The imported module, or an error that says what it is for and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise EvenhandError(missing_hint(module, purpose)) from missing


def missing_hint(module: str, purpose: str) -> str:
    """What to tell a person who lacks the package."""
    package, extra = PACKAGES[module]
    return f"{purpose} needs {package}: pip install 'evenhand[{extra}]' (or pip install {package})"
