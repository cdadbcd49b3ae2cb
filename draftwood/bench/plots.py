"""The summary as pictures; needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.bench.figures import GREYS, HATCHES, save_figures, styles
from draftwood.bench.stats import MethodStats
from draftwood.trace import VERBS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Policies = Mapping[str, MethodStats]


def save_plots(policies: Policies, folder: Path) -> str:
    """Write speedup.png, rounds.png and widths.png; returns a sentence that says what happened."""
    drawings = {"speedup": draw_speedups, "rounds": draw_rounds, "widths": draw_widths}
    return save_figures(folder, {name: partial(draw, policies=policies) for name, draw in drawings.items()})


def draw_speedups(axes: Axes, policies: Policies) -> None:
    """Bars over plain decoding, with 95 % intervals."""
    for name, stats in policies.items():
        value = stats.speedup_vs_plain
        low, high = stats.speedup_vs_plain_interval or (value, value)
        errors: Any = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.bar(name, value, yerr=errors, capsize=4, color="tab:blue")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("decoding speed, × plain decoding")
    axes.tick_params(axis="x", rotation=20)


def draw_rounds(axes: Axes, policies: Policies) -> None:
    """A round's mean milliseconds, stacked by verb."""
    shown = {name: stats for name, stats in policies.items() if stats.verb_ms}
    bottom = dict.fromkeys(shown, 0.0)
    for verb, grey, hatch in zip(VERBS, GREYS, HATCHES, strict=False):
        heights = {name: stats.verb_ms[verb] for name, stats in shown.items()}
        drawn: dict[str, Any] = {"color": grey, "hatch": hatch, "edgecolor": "white", "label": verb}
        axes.bar(list(shown), list(heights.values()), bottom=list(bottom.values()), **drawn)
        bottom = {name: bottom[name] + heights[name] for name in shown}
    axes.set_ylabel("mean milliseconds of a round")
    axes.tick_params(axis="x", rotation=20)
    axes.legend(fontsize="small", handlelength=3, handleheight=1.4)  # shows the hatches


def draw_widths(axes: Axes, policies: Policies) -> None:
    """How often each width was verified; 0 for widths at which no round ran."""
    shown = {name: stats for name, stats in policies.items() if stats.rounds}
    widths = range(1, 1 + max((max(stats.widths) for stats in shown.values()), default=1))
    for (name, stats), style in zip(shown.items(), styles(), strict=False):
        shares = [stats.widths.get(width, 0) / stats.rounds for width in widths]
        ran = [width - 1 for width in stats.widths]  # places of the markers
        axes.plot(widths, shares, **style, markevery=ran, label=name)
    axes.set_xlabel("tokens verified, the root included")
    axes.set_ylabel("share of rounds")
    axes.legend(fontsize="small")
