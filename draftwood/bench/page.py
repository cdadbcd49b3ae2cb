"""`draftwood report`: the figures of a benchmark's trace as PNGs, and one page with all of them."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from draftwood.bench import figures_trace as draw
from draftwood.bench.figures import save_figure
from draftwood.bench.figures_trace import Story
from draftwood.bench.records import TRACE, writing
from draftwood.bench.stats import PLAIN
from draftwood.errors import BadInput
from draftwood.recording import Trace
from draftwood.trace import prediction_errors, tau

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Drawing(Protocol):
    def __call__(self, axes: Axes, story: Story) -> None: ...


FIGURES: dict[str, tuple[Drawing, str]] = {
    "speedup-by-dataset": (draw.draw_speedups, "Measured decoding speed by data set and policy."),
    "width": (
        draw.draw_width,
        "Tokens that a wider tree writes, and what it costs. τ is replayed, times are as learned; hollow markers: "
        "wider than any round that ran.",
    ),
    "beams": (draw.draw_beams, "Best-first trees compared with beams of as many nodes, replayed."),
    "budgets": (
        draw.draw_budgets,
        "Replayed speed of fixed budgets (hollow markers: wider than any round that ran), of bastion, and of the best "
        "budget of each data set, chosen afterwards.",
    ),
    "latency": (
        draw.draw_latency,
        "Time of a verification: measured, predicted from counted work alone, and predicted by what was learned.",
    ),
    "latency-error": (
        draw.draw_errors,
        "How far predictions of whole rounds were off. Each was made before its round.",
    ),
    "confidence": (
        draw.draw_confidence,
        "Predicted probabilities of paths against the share that was accepted, in trees of 32 nodes.",
    ),
    "positions": (draw.draw_positions, "Acceptance by position, replayed."),
    "widths-over-time": (draw.draw_widths, "Tokens verified in each round, as measured."),
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "img{max-width:100%}figure{margin:2em 0}figcaption{color:#555}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
)


def run_report(folder: Path) -> Path:
    """Draw everything in `folder` from its trace; returns the page.

    Raises BadInput without a trace with drafts, MissingExtra without matplotlib.
    """
    path = folder / TRACE
    if not path.exists():
        raise BadInput(f"{folder} holds no {TRACE}; make one with draftwood bench --trace --out {folder}.")
    story = Story(Trace.load(path))
    if not any(script.drafts for script in story.texts):
        raise BadInput(f"{path} holds no drafts; record one with a drafter.")
    page = folder / "report.html"
    with writing(folder):
        for name, (drawing, _) in FIGURES.items():
            save_figure(folder / f"{name}.png", partial(drawing, story=story))
        page.write_text("\n".join(page_lines(story, folder)) + "\n", encoding="utf-8")
    return page


def page_lines(story: Story, folder: Path) -> Iterator[str]:
    header = story.trace.header
    yield f"<!doctype html><html lang='en'><meta charset='utf-8'><title>draftwood report</title><style>{STYLE}</style>"
    yield f"<h1>{html.escape(header.target)} with {html.escape(header.drafter)}</h1>"
    machine = header.facts.get("machine", {}).get("name", "an unknown machine")
    prompts = len({answer.prompt for answer in story.trace.answers})
    temperatures = ", ".join(f"{t:g}" for t in sorted({a.temperature for a in story.trace.answers}))
    yield f"<p>{prompts} prompts at temperature {temperatures}, on {html.escape(machine)}.</p>"
    yield from table_lines(story)
    for name, (_, caption) in FIGURES.items():
        data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        yield f"<figure><img alt='{html.escape(caption)}' src='data:image/png;base64,{data}'>"
        yield f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    yield "</html>"


def table_lines(story: Story) -> Iterator[str]:
    heads = ("policy", "tokens/s", "× plain", "τ", "error of the predicted time of a round")
    yield f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"
    rates = draw.measured_rates(story.trace.answers)
    for name in story.measured:
        rounds = story.rounds(name)
        error = prediction_errors(rounds)["round"]
        cells = [
            f"{rates[name]:.1f}",
            f"{rates[name] / rates.get(PLAIN, float('nan')):.2f}",
            f"{tau(rounds):.2f}",
            f"median {error.median:.1%}, p90 {error.p90:.0%}",
        ]
        yield f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table>"
