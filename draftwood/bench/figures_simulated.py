"""Figures of simulations: which policy, how wide, on which card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftwood.bench.figures import styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from draftwood.bench.simulation import Cell


def frontier(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that no other one beats in both speed and work, by rising work."""
    best: list[Cell] = []
    for cell in sorted(cells, key=lambda c: (c.work, -c.speedup)):
        if not best or cell.speedup > best[-1].speedup:
            best.append(cell)
    return best


def draw_pareto(axes: Axes, cells: Sequence[Cell]) -> None:
    """Speed against work, a line for each machine's frontier."""
    for name, style in zip(dict.fromkeys(c.hardware for c in cells), styles(), strict=False):
        own = [c for c in cells if c.hardware == name]
        best = frontier(own)
        axes.plot([c.work for c in best], [c.speedup for c in best], **style, label=name)
        rest = [c for c in own if c not in best]
        axes.plot([c.work for c in rest], [c.speedup for c in rest], **{**style, "linestyle": "", "fillstyle": "none"})
    names = dict.fromkeys(c.policy for c in cells)
    tops = [max((c for c in cells if c.policy == name), key=lambda c: c.speedup) for name in names]
    for i, top in enumerate(sorted(tops, key=lambda c: c.work)):  # neighbours on both sides, or names would overlap
        at, above = (top.work, top.speedup), (0, -13 if i % 2 else 7)
        axes.annotate(top.policy, at, above, textcoords="offset points", fontsize=7, ha="center")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(0.08, 0.12)
    axes.set_xlabel("work: tokens the target runs for each token written")
    axes.set_ylabel("simulated speed, × plain decoding")
    axes.legend(title="line: best policies of a machine", fontsize="small")
