"""An audit of many predictions: seconds to read, to measure, and to shuffle.

Made-up predictions with 20 clients, two attributes (2 and 5 groups) and scores; the table says what each part takes.

    python benchmarks/audit.py
    python benchmarks/audit.py --rows 100000
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow.parquet
from machine import best_time, provenance

from evenhand.auditing import audit
from evenhand.columns import read
from evenhand.counts import measures_from_counts
from evenhand.groups import group_fairness

ROLES = {"label": "y", "client": "hospital", "sensitive": "sex,age_band"}


def people(rows: int, clients: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    score = rng.random(rows)
    return {
        "hospital": rng.integers(clients, size=rows).astype(str),
        "sex": rng.choice(["F", "M"], rows),
        "age_band": rng.choice(["<25", "25-39", "40-54", "55-69", "70+"], rows),
        "y": (rng.random(rows) < score).astype(np.int64),
        "yhat": (score > 0.5).astype(np.int64),
        "p": score.round(6),
    }


def write_files(table: dict[str, np.ndarray], path: Path) -> None:
    columns = [values.astype(str).tolist() for values in table.values()]
    path.write_text("\n".join(map(",".join, [list(table), *zip(*columns, strict=True)])) + "\n")
    pyarrow.parquet.write_table(pyarrow.table(table), path.with_suffix(".parquet"))


def parts(table: dict[str, np.ndarray], path: Path) -> dict[str, Callable[[], object]]:
    given = table["y"], table["yhat"], {name: table[name] for name in ("sex", "age_band")}
    return {
        f"read {path.stat().st_size / 1e6:.0f} MB of CSV": partial(read, path, list(table)[:-1], ["p"]),
        "read the same as Parquet": partial(read, path.with_suffix(".parquet"), list(table)[:-1], ["p"]),
        "group_fairness on arrays": partial(group_fairness, *given, clients=table["hospital"]),
        "the same with scores": partial(group_fairness, *given, clients=table["hospital"], scores=table["p"]),
        "audit of the file, at most 999 shuffles": partial(audit, path, prediction="yhat", score="p", **ROLES),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    print(provenance())
    print("\n| what | rows | clients | seconds |\n|---|---|---|---|")
    for clients in (20, 1000):
        table = people(rows, clients)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "predictions.csv"
            write_files(table, path)
            for name, work in parts(table, path).items():
                start = perf_counter()
                work()
                print(f"| {name} | {rows:,} | {clients:,} | {perf_counter() - start:.2f} |", flush=True)
    counts = np.random.default_rng(0).integers(1, 100, (100, 4, 2, 2))
    seconds = best_time(partial(measures_from_counts, counts))
    print(f"| measures_from_counts, 4 groups, two classes | - | 100 | {seconds:.6f} |")


if __name__ == "__main__":
    main()
