"""The summary for people: tables on the terminal, and a bar that moves while measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftwood.bench.prompts import Prompt
from draftwood.bench.stats import NAN, WHAT_IF_TAUS, MethodStats
from draftwood.trace import PARTS, VERBS, Errors

Interval = tuple[float, float] | None


@contextmanager
def progress_bar(runs: int) -> Iterator[Callable[[Prompt, str], None]]:
    """A bar on stderr; call what it yields before each of the `runs` runs."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warming up", total=runs)
        done = iter(range(runs + 1))

        def started(prompt: Prompt, method: str) -> None:
            progress.update(task, description=f"{prompt.id}  {method}", completed=next(done))

        yield started


def print_tables(
    console: Console,
    policies: Mapping[str, MethodStats],
    datasets: Mapping[str, Mapping[str, MethodStats]],
    what_if: Mapping[str, Mapping[int, Mapping[str, Any]]],
    ceiling: Mapping[str, Any],
    against: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    console.print(speed_table(policies))
    if any(stats.ties for stats in policies.values()):
        console.print(ties_line(policies))
    if against:
        console.print(against_table(against["all"]))
    megabytes, bandwidth = ceiling["bytes_per_token"] / 1e6, ceiling["bandwidth_bytes_per_s"] / 1e9
    console.print(
        f"Roofline of plain decoding here: {ceiling['plain_tokens_per_s']:.1f} tokens/s "
        f"({megabytes:.0f} MB a token at {bandwidth:.1f} GB/s)."
    )
    console.print(round_table(policies))
    if len(datasets) > 1:
        console.print(dataset_table(datasets))
    if what_if:
        console.print(what_if_table(what_if))


def speed_table(policies: Mapping[str, MethodStats]) -> Table:
    prompts = max(stats.prompts for stats in policies.values())
    columns = ("tokens/s", "× transformers", "× plain", "τ", "width", "identical")
    table = new_table(f"Decoding speed over {prompts} prompts, with 95 % intervals", "method", columns)
    for name, s in policies.items():
        table.add_row(
            name,
            number(s.tokens_per_s, 1),
            ratio(s.speedup_vs_transformers, s.speedup_vs_transformers_interval),
            ratio(s.speedup_vs_plain, s.speedup_vs_plain_interval),
            number(s.tau, 2),
            number(s.mean_width, 1),
            "–" if s.identical is None else f"{s.identical}/{s.prompts}",
        )
    return table


def ties_line(policies: Mapping[str, MethodStats]) -> str:
    """Whether rounding explains the texts that are not identical."""
    parts = (f"{name} {s.ties[-1]:.1f} ({len(s.ties)} texts)" for name, s in policies.items() if s.ties)
    return (
        "Some texts differ from plain decoding's. At the first different token, the target's logits of both tokens "
        f"are at most this many units in the last place below its best logit: {', '.join(parts)}."
    )


def against_table(against: Mapping[str, Mapping[str, Any]]) -> Table:
    """Drafters under the same policy; the summary has them by data set, too."""
    table = new_table("Ratios to the same policy with the first drafter, with 95 % intervals", "method", ("speed", "τ"))
    for name, row in against.items():
        table.add_row(name, *(ratio(row[part], row[f"{part}_interval"]) for part in ("speed", "tau")))
    return table


def round_table(policies: Mapping[str, MethodStats]) -> Table:
    """Methods side by side; transformers has no rounds."""
    table = new_table("Where the time goes (errors: median, 90th percentile)", "", tuple(policies))

    def row(name: str, cell: Callable[[MethodStats], str]) -> None:
        table.add_row(name, *(cell(stats) for stats in policies.values()))

    row("tokens/s with prefill", lambda s: number(s.end_to_end_tokens_per_s, 1))
    row("first token, ms", lambda s: number(s.first_token_ms, 0))
    row("round, median ms", lambda s: number(s.round_ms, 1))
    for verb in VERBS:
        row(f"{verb}, mean ms", lambda s, verb=verb: number(s.verb_ms.get(verb, NAN), 2))  # type: ignore[misc]
    row("host share", lambda s: percent(s.host_share))
    for part in (*PARTS, "round"):
        row(f"{part} time: error", lambda s, part=part: off(s.latency_errors[part]))  # type: ignore[misc]
    return table


def dataset_table(datasets: Mapping[str, Mapping[str, MethodStats]]) -> Table:
    methods = tuple(next(iter(datasets.values())))
    table = new_table("By data set: × plain decoding, and τ", "data set", methods)
    for name, row in datasets.items():
        table.add_row(name, *(f"{number(s.speedup_vs_plain, 2)} ({number(s.tau, 2)})" for s in row.values()))
    return table


def what_if_table(what_if: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Table:
    """The most frequent width of each method; all of them are in the summary."""
    title = "Extrapolation: tokens/s (× plain) if rounds that take the measured time emitted τ tokens"
    table = new_table(title, "method", ("width", "round ms", *(f"τ = {t}" for t in WHAT_IF_TAUS)))
    for name, widths in what_if.items():
        width, row = max(widths.items(), key=lambda item: item[1]["rounds"])
        rates, gains = row["tokens_per_s"], row["speedup_vs_plain"]
        cells = [f"{rates[t]:.1f} ({number(gains[t], 2)})" if t in rates else "–" for t in WHAT_IF_TAUS]
        table.add_row(name, str(width), number(row["round_ms"], 1), *cells)
    return table


def new_table(title: str, first: str, rest: Sequence[str]) -> Table:
    """Narrow enough for a terminal of 80 columns; numbers to the right."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", overflow="fold")
    return table


def number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value == value else "–"


def off(errors: Errors) -> str:
    """Median and 90th percentile."""
    return f"{percent(errors.median)}, {percent(errors.p90)}" if errors.median == errors.median else "–"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %" if value == value else "–"


def ratio(value: float, interval: Interval) -> str:
    bounds = "" if interval is None else f" [{interval[0]:.2f}–{interval[1]:.2f}]"
    return f"{number(value, 2)}{bounds}"
