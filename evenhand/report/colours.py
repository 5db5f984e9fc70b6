"""The colours of pages and figures: one set on light paper, one on dark, each told apart by colour-blind readers.

The eight series colours were chosen by search: as far from each other as possible, in the OKLab space, as seen with
normal sight and with each of the three dichromacies (Machado et al. 2009), at 3 to 1 contrast with the paper at least.
Lines and points also differ by dash and shape, so that no reading hangs on colour alone.
"""

from __future__ import annotations

SERIES = 8  # further ones repeat the colours with another dash or shape
LEVELS = 7  # of a heat map: from nothing to everything

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2126",
    "soft": "#59636d",
    "grid": "#e4e7eb",
    "tile": "#f4f6f8",
    "c0": "#1e6978",
    "c1": "#ff4b0f",
    "c2": "#870fd2",
    "c3": "#00a587",
    "c4": "#69002d",
    "c5": "#c369f0",
    "c6": "#2d1e87",
    "c7": "#a52d00",
}
DARK = {
    "paper": "#14181c",
    "ink": "#e7eaed",
    "soft": "#a3acb5",
    "grid": "#2c333a",
    "tile": "#1d2329",
    "c0": "#4bf0ff",
    "c1": "#f0961e",
    "c2": "#8769ff",
    "c3": "#69c3a5",
    "c4": "#e14b4b",
    "c5": "#c396ff",
    "c6": "#b469a5",
    "c7": "#e1e178",
}


# Letters need more contrast than lines do: 4.5 to 1.
LETTERS = {"c1": "#d23a00", "c3": "#00806a", "c5": "#a445d8"}
LIGHT |= {f"t{number}": LETTERS.get(f"c{number}", LIGHT[f"c{number}"]) for number in range(SERIES)}
DARK |= {f"t{number}": DARK[f"c{number}"] for number in range(SERIES)}


def colour(number: int) -> str:
    """A series' colour, as the page or the figure defines it."""
    return f"var(--c{number % SERIES})"


def letters(number: int) -> str:
    """The same for what is written in it."""
    return f"var(--t{number % SERIES})"


def declared(colours: dict[str, str]) -> str:
    """The colours as CSS."""
    return "; ".join(f"--{name}: {value}" for name, value in colours.items())


def filled_in(text: str, colours: dict[str, str] = LIGHT) -> str:
    """Text with the colours themselves, for readers that know no CSS variables."""
    for name, value in colours.items():
        text = text.replace(f"var(--{name})", value)
    return text
