"""Three clients, one model: who pays for the plain average, and what the fair rules do instead.

Each client has a bowl-shaped loss over a model of two parameters: "loud" a steep one, hence a large gradient; "quiet"
the largest loss, but a small gradient. The numbers are picked so that every conflict-aware rule succeeds. That is no
general promise: fedmgda+ and fedlf keep it (fedlf may stand still), adafed and, up to its ridge, even keep it where
the updates are independent, which three clients on two parameters never are, and fedfv may break it anywhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import evenhand as eh

try:
    from matplotlib import lines, patches, patheffects
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Column, Table
except ImportError as missing:
    sys.exit(f'This demo needs {missing.name}. Install it with: pip install "evenhand[report]"')

Vector = np.ndarray[Any, np.dtype[np.float64]]
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "three-clients.png"
CLIENTS = ("loud", "middle", "quiet")
OPTIMA = np.array([[1.1, 0.2], [1.9, 1.6], [-2.2, 1.5]])  # the parameters that would suit each client best
STEEPNESS = np.array([2.7, 0.54, 0.52])
START = np.zeros(2)
LEARNING_RATE, DECAY, ROUNDS = 0.05, 0.98, 200
RULES: dict[str, dict[str, Any]] = {
    "fedavg": {"weights": "uniform"},
    "qffl": {"q": 1.0},
    "term": {},
    "fedmgda+": {"epsilon": 1.0, "reference": "uniform", "length": "mean"},
    "fedfv": {},
    "fedlf": {},
    "adafed": {},
    "even": {},
}
STYLES = (("#D55E00", "o"), ("#0072B2", "s"), ("#009E73", "^"))  # Okabe and Ito: safe for colour-blind readers
INK, COMMON = "#222222", "#F6EDB8"


def losses_at(model: Vector) -> Vector:
    """Each client's loss: half its steepness times the squared distance from its optimum."""
    return STEEPNESS / 2 * ((model - OPTIMA) ** 2).sum(axis=1)


def gradients_at(model: Vector) -> Vector:
    """Each client's gradient, one a row."""
    return STEEPNESS[:, None] * (model - OPTIMA)


def combine(rule: str, model: Vector, rate: float = LEARNING_RATE, state: eh.State | None = None) -> eh.Aggregate:
    """One round: every client takes one gradient step from the model, and the rule combines the updates."""
    updates, losses = rate * gradients_at(model), losses_at(model)
    return eh.aggregate(rule, updates, losses=losses, lr=rate, clients=CLIENTS, state=state, **RULES[rule])


def first_step(outcome: eh.Aggregate) -> Vector:
    """The rule's first move, given the length of the plain mean, so that rules differ by direction alone."""
    mean = LEARNING_RATE * gradients_at(START).mean(axis=0)
    return -outcome.update * np.linalg.norm(mean) / np.linalg.norm(outcome.update)


def train(rule: str) -> Vector:
    """The clients' losses after many rounds, with the step length that the rule itself chooses."""
    model, state = START, None
    for number in range(ROUNDS):
        # Rules that keep the mean's length never come to rest; a falling learning rate lets them settle.
        outcome = combine(rule, model, LEARNING_RATE * DECAY**number, state)
        model, state = model - outcome.update, outcome.state
    return losses_at(model)


def step_table(changes: dict[str, Vector], against: dict[str, int]) -> Table:
    """Change of each loss after one step; a rise has a plus sign and is bold red."""
    numbers = [Column(heading, justify="right") for heading in (*(f"{c}, %" for c in CLIENTS), "goes against")]
    table = Table("rule", *numbers, title="One step of equal length: change of each client's loss")
    for rule, change in changes.items():
        cells = [f"[bold red]{x:+.1f}[/]" if x > 0 else f"{x:+.1f}" for x in change]
        table.add_row(rule, *cells, f"{against[rule]} of {len(CLIENTS)}")
    return table


def training_table() -> Table:
    """Losses after training; those above the start say "up" and are bold red."""
    start = losses_at(START)
    numbers = [Column(heading, justify="right") for heading in (*CLIENTS, "worst", "spread (std)")]
    table = Table("rule", *numbers, title=f"After {ROUNDS} rounds: each client's loss (up: above its start)")
    for rule, final in {"(start)": start, **{rule: train(rule) for rule in RULES}}.items():
        rises = final > 1.005 * start  # less than half a percent is no difference worth a mark
        cells = [f"[bold red]up {x:.2f}[/]" if up else f"{x:.2f}" for x, up in zip(final, rises, strict=True)]
        table.add_row(rule, *cells, f"{final.max():.2f}", f"{final.std():.2f}", end_section=rule == "(start)")
    return table


def angle_of(vector: Vector) -> float:
    """Degrees, counter-clockwise from the first axis."""
    return float(np.degrees(np.arctan2(vector[1], vector[0])))


def spread_apart(angles: list[float], gap: float) -> Vector:
    """The ascending angles, moved to stand `gap` degrees apart, so that labels do not overlap."""
    placed = np.array(angles)
    for _ in range(1000):
        push = np.maximum(gap - np.diff(placed), 0.0) / 2
        placed += np.append(0.0, push) - np.append(push, 0.0)
    return placed


def draw_clients(axes: Axes) -> None:
    """The parameter plane: each client's optimum, loss rings and pull, and the directions that suit all three."""
    pulls = -gradients_at(START)
    angles = [angle_of(pull) for pull in pulls]  # a direction suits a client if it is within 90 degrees of its own
    axes.add_patch(patches.Wedge(tuple(START), 2.38, max(angles) - 90, min(angles) + 90, color=COMMON, zorder=0))
    for client, optimum, pull, (colour, marker) in zip(CLIENTS, OPTIMA, pulls, STYLES, strict=True):
        for share, width in ((1.0, 1.8), (0.5, 0.6)):  # the outer ring is the loss at the start
            radius = share * float(np.linalg.norm(optimum - START))
            axes.add_patch(patches.Circle(tuple(optimum), radius, fill=False, ec=colour, lw=width, alpha=0.55))
        axes.plot(*optimum, marker=marker, color=colour, markersize=9)
        axes.annotate(client, optimum, (0, 9), textcoords="offset points", color=colour, ha="center", weight="bold")
        thick = {"width": 5, "headwidth": 13, "headlength": 10, "color": colour, "linewidth": 0, "shrink": 0}
        axes.annotate("", START + 0.32 * pull, START, arrowprops=thick)
    axes.plot(*START, "o", color=INK, markersize=6)
    axes.annotate("start", START, (-8, -4), textcoords="offset points", ha="right")
    axes.set(xlim=(-2.6, 2.44), ylim=(-0.66, 2.51), aspect="equal", xticks=[], yticks=[], xlabel="two parameters")
    axes.set_title("Where the clients pull and where each rule goes", loc="left", weight="bold")


def draw_rules(axes: Axes, steps: dict[str, Vector], against: dict[str, int]) -> None:
    """Each rule's direction, dashed where it goes against a client, and the panel's legend."""
    order = sorted(steps, key=lambda rule: angle_of(steps[rule]))
    for rule, place in zip(order, spread_apart([angle_of(steps[rule]) for rule in order], gap=6.5), strict=True):
        heading = steps[rule] / np.linalg.norm(steps[rule])
        label = np.array([np.cos(np.radians(place)), np.sin(np.radians(place))])
        style = {"arrowstyle": "-|>", "linewidth": 1.3, "linestyle": "--" if against[rule] else "-", "color": INK}
        axes.annotate("", START + 1.4 * heading, START + 0.5 * heading, arrowprops=style)
        axes.plot(*zip(START + 1.4 * heading, START + 1.56 * label, strict=True), color=INK, linewidth=0.6)
        text = axes.text(*(START + 1.6 * label), rule, rotation=place, rotation_mode="anchor", va="center_baseline")
        behind = "white" if against[rule] else COMMON  # keeps the rings off the letters
        text.set_path_effects([patheffects.withStroke(linewidth=3, foreground=behind)])
    ring = lines.Line2D([], [], color="grey", linewidth=1.8, label="loss as at the start (inside: lower)")
    suits = patches.Patch(color=COMMON, label="directions that lower every client's loss")
    solid = lines.Line2D([], [], color=INK, label="rule, against no client")
    dashed = lines.Line2D([], [], color=INK, linestyle="--", label="rule, against a client")
    axes.legend(handles=[ring, suits, solid, dashed], loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=2)


def draw_changes(axes: Axes, changes: dict[str, Vector]) -> None:
    """A row a rule, a pin a client: the loss changes of the first table."""
    table = np.array(list(changes.values()))
    axes.axvspan(0, 100, color="#EEEEEE", zorder=0)
    axes.axvline(0, color=INK, linewidth=1)
    for index, (client, (colour, marker)) in enumerate(zip(CLIENTS, STYLES, strict=True)):
        heights = np.arange(len(table)) + 0.24 * (index - 1)
        axes.hlines(heights, 0, table[:, index], color=colour, linewidth=1.6)
        axes.plot(table[:, index], heights, marker, color=colour, label=client)
        for row in np.flatnonzero(table[:, index] > 0):
            axes.text(table[row, index] + 0.3, heights[row], f"{table[row, index]:+.1f}", va="center", color=colour)
    axes.set(xlim=(table.min() - 0.6, 3.2), ylim=(len(table) - 0.4, -0.6), xlabel="change of loss, % (grey: it rises)")
    axes.set_yticks(np.arange(len(table)), list(changes))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("Each client's loss after one such step", loc="left", weight="bold")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def main() -> None:
    """Print both tables and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="PATH", help="the PNG to write (%(default)s)")
    path = parser.parse_args().out
    outcomes = {rule: combine(rule, START) for rule in RULES}
    steps = {rule: first_step(outcome) for rule, outcome in outcomes.items()}
    changes = {rule: 100 * (losses_at(START + step) / losses_at(START) - 1) for rule, step in steps.items()}
    against = {rule: int(outcome.diagnostics.conflicts.sum()) for rule, outcome in outcomes.items()}
    console = Console(highlight=False)
    console.print(step_table(changes, against), training_table(), sep="\n")
    console.print("Numbers picked for clarity: on others fedfv, adafed or even can fail a client.")
    console.print("Read the spread beside the losses: a rule that hardly moves is level, too.")
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    plane, pins = figure.subplots(1, 2, width_ratios=(1.5, 1))
    draw_clients(plane)
    draw_rules(plane, steps, against)
    draw_changes(pins, changes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150, metadata={"Software": None})  # no version: same picture, same file
    print(f"\nPicture: {path}\nNext, in Python: import evenhand as eh; print(eh.methods())")


if __name__ == "__main__":
    main()
