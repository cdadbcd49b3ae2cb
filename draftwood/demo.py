"""Plain decoding and draftwood side by side in the terminal, then a table of policies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftwood.bench.measure import Settings, measure, method_names
from draftwood.bench.prompts import Prompt, load_prompts
from draftwood.bench.report import progress_bar, speed_table
from draftwood.cli_show import STYLES
from draftwood.llm import LLM, Piece, Stream

LEFT, RIGHT = "autoregressive", "bastion"
POLICIES = ("dflash", "ddtree:8", "caddtree", "bastion")


@dataclass(slots=True)
class Lane:
    """One answer on its way, and the time that it alone has used."""

    title: str
    stream: Stream
    pieces: Iterator[Piece]
    text: Text = field(default_factory=Text)
    tokens: int = 0
    seconds: float = 0.0
    done: bool = False

    @classmethod
    def of(cls, llm: LLM, title: str, prompt: str, max_new_tokens: int, policy: str) -> Lane:
        stream = llm.fresh().stream(prompt, max_new_tokens=max_new_tokens, policy=policy)
        return cls(title, stream, iter(stream))

    def advance(self) -> None:
        """Take one more piece; the time of a round counts for its first piece."""
        start = time.perf_counter()
        piece = next(self.pieces, None)
        self.seconds += time.perf_counter() - start
        if piece is None:
            self.done = True
            return
        self.text.append(piece.text, STYLES[piece.origin])
        self.tokens += len(piece.token_ids)

    def panel(self, height: int) -> Panel:
        """The answer under what it took; `height` in lines, the frame included."""
        speed = f"{self.tokens} tokens in {self.seconds:.1f} s"
        return Panel(self.text, title=f"{self.title} · {speed}", height=height, border_style="dim")


def run_demo(llm: LLM, limit: int, max_new_tokens: int) -> None:
    """Show `limit` prompts of the packaged set, then measure both baselines and POLICIES on them."""
    console = Console(highlight=False)
    prompts = load_prompts([], limit)
    for policy in (LEFT, RIGHT):  # first calls allocate and page in, which would count for the first lane alone
        llm.generate(prompts[0].turns[0], max_new_tokens=4, policy=policy)
    for prompt in prompts:
        console.print(Text(f"\n{prompt.turns[0]}\n", "italic"))
        show_race(console, [
            Lane.of(llm, "plain decoding", prompt.turns[0], max_new_tokens, LEFT),
            Lane.of(llm, "draftwood", prompt.turns[0], max_new_tokens, RIGHT),
        ])  # fmt: skip
    show_table(console, llm, prompts, max_new_tokens)


def race(lanes: list[Lane]) -> Iterator[None]:
    """Advance the lane that has used less time, so that two lanes on one machine progress as if each were alone."""
    while running := [lane for lane in lanes if not lane.done]:
        min(running, key=lambda lane: lane.seconds).advance()
        yield


def show_race(console: Console, lanes: list[Lane]) -> None:
    if not console.is_terminal:
        for _ in race(lanes):
            pass
        for lane in lanes:
            console.print(f"{lane.title}, {lane.tokens} tokens in {lane.seconds:.1f} s:", style="bold")
            console.print(lane.text, soft_wrap=True)
        return
    with Live(console=console, refresh_per_second=12) as live:
        for _ in race(lanes):
            live.update(side_by_side(console, lanes))


def side_by_side(console: Console, lanes: list[Lane]) -> Group:
    """Columns of equal width, as high as the longer answer is now."""
    width = max(console.width // len(lanes) - 4, 10)
    rows = max(len(lane.text.wrap(console, width)) for lane in lanes)
    grid = Table.grid(expand=True)
    for _ in lanes:
        grid.add_column(ratio=1)
    grid.add_row(*(lane.panel(rows + 2) for lane in lanes))
    key = Text.assemble(
        ("accepted draft tokens", STYLES["draft"]), ", ", ("tokens of the model itself", STYLES["bonus"])
    )
    return Group(grid, key)


def show_table(console: Console, llm: LLM, prompts: list[Prompt], max_new_tokens: int) -> None:
    runs = sum(len(prompt.turns) for prompt in prompts) * len(method_names(POLICIES))
    with progress_bar(runs) as started:
        summary = measure(llm, prompts, POLICIES, Settings(max_new_tokens), started=started)
    if summary.partial:
        raise KeyboardInterrupt
    console.print()
    console.print(speed_table(summary.policies))
    console.print("identical: answers whose text equals plain decoding's")
