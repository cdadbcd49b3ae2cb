"""The rows for people: a table of times and one of speeds for each model, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwood.bench.report import new_table, number
from draftwood.memory import readable

PER_WIDTH = ("verify", "accept", "commit", "verify, accept, commit")
ONCE = ("transformers", "catch up", "draft", "grow", "catch up, draft, grow")
HELD = ("target", "drafter", "buffers", "graphs")
FIGURES = (  # of an answer, in the order of the table's columns: factor and digits
    ("tokens_per_s", 1, 1), ("fair_tokens_per_s", 1, 1), ("speedup", 1, 2), ("tau", 1, 2), ("width", 1, 1),
    ("round_s", 1e3, 2), ("choose_s", 1e6, 0),
)  # fmt: skip
Row = Mapping[str, Any]


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Everything that was measured; what was left out, and why, at the end."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        timings = [row for row in mine if row["kind"] == "part"]
        for context in sorted({row["context"] for row in timings}):
            console.print(part_table(model, context, [row for row in timings if row["context"] == context]))
        answers = [row for row in mine if row["kind"] == "answers"]
        if answers:
            console.print(answer_table(model, answers))
        for row in mine:
            if row["kind"] == "memory":
                sizes = (f"{name} {readable(row[name])}" for name in HELD if name in row)
                console.print(f"{model}, memory of {row['of']} at {row['context']} tokens: {', '.join(sizes)}")
            if row["kind"] == "skipped":
                console.print(f"{model}: {row['reason']}", markup=False)


def part_table(model: str, context: int, rows: Sequence[Row]) -> Table:
    """Microseconds, and their ratio to the roofline."""
    table = new_table(f"{model}, {context} tokens of context: µs (× roofline)", "tokens", PER_WIDTH)
    cells = {(row["part"], row["width"]): cell(row) for row in rows}
    for width in sorted({row["width"] for row in rows if row["part"] in PER_WIDTH}):
        table.add_row(str(width), *(cells.get((part, width), "–") for part in PER_WIDTH))
    once = [f"{row['part']} {cell(row)}" for row in rows if row["part"] in ONCE]
    table.caption, table.caption_justify = "   ".join(once), "left"
    return table


def cell(row: Row) -> str:
    times = "" if row["floor_s"] is None else f" ({row['seconds'] / row['floor_s']:.2f})"
    return f"{1e6 * row['seconds']:.0f}{times}"


def answer_table(model: str, rows: Sequence[Row]) -> Table:
    kind = "under SYNTHETIC acceptance" if rows[0]["synthetic"] else "of its own drafter"
    title = f"{model}: whole answers {kind}"
    columns = ("policy", "tokens/s", "without luck", "× plain", "τ", "width", "round ms", "choose µs", "same text")
    table = new_table(title, "rates", columns)
    for row in rows:
        cells = [known(row[name], factor, digits) for name, factor, digits in FIGURES]
        same = "–" if row["identical"] is None else f"{row['identical']:.0%}"
        table.add_row(row["rates"], row["policy"], *cells, same)
    fair = "without luck: tokens/s if each tree emitted its mean number of tokens under the rates; "
    told = "choose: the policy's time on the host; same text: answers that equal plain decoding's"
    table.caption, table.caption_justify = (fair if rows[0]["synthetic"] else "") + told, "left"
    return table


def known(value: float | None, factor: float, digits: int) -> str:
    """JSON has None where there is no figure: transformers has no rounds."""
    return "–" if value is None else number(factor * value, digits)


def save_plot(rows: Sequence[Row], folder: Path) -> str:
    """Write gpu.png: verification over width with its roofline, a line for each context. Returns what happened."""
    timings = [row for row in rows if row["kind"] == "part" and row["part"] == "verify"]
    if not timings:
        return "No plot: nothing was verified."
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No plot: matplotlib is not installed (pip install 'draftwood[bench]')."
    models = list(dict.fromkeys(row["model"] for row in timings))
    figure = Figure(figsize=(5 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for i, context in enumerate(sorted({row["context"] for row in timings if row["model"] == model})):
            line = sorted(
                (r["width"], r["seconds"], r["floor_s"])
                for r in timings
                if (r["model"], r["context"]) == (model, context)
            )
            widths, seconds, floors = zip(*line, strict=True)
            axes.plot(widths, [1e3 * s for s in seconds], marker="o", color=f"C{i}", label=f"{context} tokens")
            axes.plot(widths, [1e3 * s for s in floors], linestyle=":", color=f"C{i}")
        axes.set(title=model, xlabel="tokens verified (dotted: roofline)", ylabel="ms", xscale="log", ylim=(0, None))
        axes.legend(fontsize="small", title="context")
    figure.savefig(folder / "gpu.png", dpi=120)
    return f"Plot: {folder / 'gpu.png'}."
