"""What all figures share: a size, dashes and markers that keep lines apart in grey prints, and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"), ("X", "-."), ("*", ":"))
GREYS = ("#1b3a5c", "#b5541c", "#3f7f4f", "#8a6fb0", "#c2a83e", "#5fa8c4", "#a33b52", "#777777")  # differ in grey, too
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "++")


def styles() -> Iterator[dict[str, Any]]:
    """Keyword arguments for one line after another."""
    for (marker, line), colour in cycle(list(zip(STYLES, GREYS, strict=True))):
        yield {"marker": marker, "linestyle": line, "color": colour, "markersize": 5}


def save_figure(path: Path, draw: Callable[[Axes], None]) -> None:
    """Draw into one pair of axes and write a PNG. Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra(
            "Figures are drawn with matplotlib, which is not installed; run: pip install 'draftwood[bench]'"
        ) from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=120)


def save_figures(folder: Path, drawings: Mapping[str, Callable[[Axes], None]]) -> str:
    """Write a PNG for each name. Returns a sentence that says what happened: without matplotlib there are none."""
    try:
        for name, draw in drawings.items():
            save_figure(folder / f"{name}.png", draw)
    except MissingExtra:
        return "No plots: matplotlib is not installed (pip install 'draftwood[bench]')."
    first, *others = (f"{name}.png" for name in drawings)
    return f"Plots: {', '.join([str(folder / first), *others])}."
