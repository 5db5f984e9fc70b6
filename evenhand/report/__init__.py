"""A run, or a comparison, as one HTML page that can be mailed, and its figures as files for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evenhand import storage
from evenhand.report.comparison_figures import COMPARISON_FIGURES
from evenhand.report.comparison_page import comparison_page
from evenhand.report.figure import Figure, check_kind, find, save
from evenhand.report.run_figures import RUN_FIGURES
from evenhand.report.run_page import run_page

if TYPE_CHECKING:
    from evenhand.comparison import Comparison
    from evenhand.runs import Runs

__all__ = [
    "COMPARISON_FIGURES",
    "RUN_FIGURES",
    "comparison_page",
    "draw_comparison",
    "draw_run",
    "figures_of",
    "run_page",
    "write_comparison",
    "write_run",
]


def write_run(runs: Runs, path: str | Path) -> Path:
    """Write the page of a run."""
    storage.write_bytes(path, run_page(runs).encode())
    return Path(path)


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page of a comparison."""
    storage.write_bytes(path, comparison_page(comparison).encode())
    return Path(path)


def figures_of(shown: Runs | Comparison) -> dict[str, Figure]:
    """Every figure that a run or a comparison has, by name."""
    from evenhand.comparison import Comparison

    makers = COMPARISON_FIGURES if isinstance(shown, Comparison) else RUN_FIGURES
    drawn = {name: make(shown) for name, make in makers.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw_run(runs: Runs, name: str, path: str | Path) -> Path:
    """Write one figure of a run; the suffix says how."""
    check_kind(path)
    found: Figure = find(RUN_FIGURES, runs, name)
    return save(found, path)


def draw_comparison(comparison: Comparison, name: str, path: str | Path) -> Path:
    """Write one figure of a comparison."""
    check_kind(path)
    return save(find(COMPARISON_FIGURES, comparison, name), path)
