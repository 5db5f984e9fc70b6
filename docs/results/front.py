"""The README's first table and picture: every method at the same work, from the runs of even/ablation.

python docs/results/front.py prints the table and writes docs/images/worst-served.png.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURE = HERE.parent / "images" / "worst-served.png"
PARTS = {
    "CIFAR-10, two shards": "CIFAR-10,\ntwo shards",
    "CIFAR-10, two shards, full batch": "CIFAR-10,\nfull batch",
    "Fashion-MNIST, one class": "F-MNIST,\none class",
    "Fashion-MNIST, two classes": "F-MNIST,\ntwo classes",
    "Fashion-MNIST, Dir(0.1)": "F-MNIST,\nDir(0.1)",
}
ROWS = ["FedAvg", "q-FFL q=1", "TERM", "FedMGDA+", "AdaFed", "FedFV", "FedLF", "even"]  # as published, and ours
WITH_A_MEAN = {
    "FedAvg, recent": "FedAvg, mean of models",
    "FedLF, recent": "FedLF, mean of models",
}  # in the table alone
COLUMNS = ("mean", "worst:10")
INK, OTHERS, OURS = "#333333", "#7F8FA6", "#C2452D"

Runs = dict[tuple[str, str], dict[str, list[float]]]


def read() -> Runs:
    """Every row's and part's runs: the mean over the clients and over the tenth served worst, in percent."""
    found: Runs = defaultdict(lambda: {column: [] for column in COLUMNS})
    with (HERE / "even-ablation" / "results.csv").open(newline="", encoding="utf-8") as lines:
        for run in csv.DictReader(lines):
            for column in COLUMNS:
                found[run["row"], run["part"]][column].append(100.0 * float(run[column]))
    return dict(found)


def table(runs: Runs) -> str:
    """Worst tenth (mean), a line a method; the best of a column in bold."""
    rows = {row: row for row in ROWS[:-1]} | WITH_A_MEAN | {ROWS[-1]: ROWS[-1]}
    best = {part: max(mean(runs[row, part]["worst:10"]) for row in rows if (row, part) in runs) for part in PARTS}
    titles = [title.replace("\n", " ") for title in PARTS.values()]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(PARTS)]
    for row, name in rows.items():
        cells = []
        for part in PARTS:
            if (row, part) not in runs:
                cells.append("-")
                continue
            worst, every = runs[row, part]["worst:10"], runs[row, part]["mean"]
            shown = f"{mean(worst):.1f}"
            shown = f"**{shown}**" if mean(worst) == best[part] else shown
            cells.append(f"{shown} ± {stdev(worst):.1f} ({mean(every):.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(axes: Axes, runs: Runs, part: str) -> None:
    """A line a method, from the worst-served tenth to the mean of all clients."""
    for height, row in enumerate(ROWS):
        if (row, part) not in runs:
            continue
        worst, every = (mean(runs[row, part][column]) for column in ("worst:10", "mean"))
        colour = OURS if row == "even" else OTHERS
        axes.plot([worst, every], [height, height], color=colour, linewidth=2.5, solid_capstyle="round", zorder=1)
        axes.plot(worst, height, "o", color=colour, markersize=7)
        axes.plot(every, height, "o", color=colour, markerfacecolor="white", markersize=7)
        axes.text(worst, height - 0.28, f"{worst:.0f}", ha="center", va="bottom", color=colour, fontsize=8)
    axes.set_title(PARTS[part], fontsize=10, color=INK)
    axes.set_ylim(len(ROWS) - 0.5, -0.8)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#E5E5E5", zorder=0)
    axes.set_axisbelow(True)


def main() -> None:
    """Print the table, draw the picture."""
    runs = read()
    print(table(runs))
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    panels = figure.subplots(1, len(PARTS), sharey=True)
    for axes, part in zip(panels, PARTS, strict=True):
        draw(axes, runs, part)
    figure.suptitle(
        "Accuracy: the tenth of the clients served worst (●) and the mean of all (○), %", color=INK, fontsize=11
    )
    figure.savefig(PICTURE, format="png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
