"""A generation in a terminal: draft tokens coloured apart from bonus tokens, and the last draft tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.style import Style
from rich.text import Text
from rich.tree import Tree as Drawing

from draftwood.llm import Generation, Piece, Stream
from draftwood.tree import Tree

STYLES = {"draft": "green", "bonus": "bold"}


@dataclass(frozen=True, slots=True)
class Screen:
    """Where the text goes, and whether it is shown at all."""

    console: Console
    shows_text: bool

    @classmethod
    def of(cls, stdout_taken: bool) -> Screen:
        """Stdout; if JSON takes that, stderr, which shows text only in a terminal."""
        console = Console(stderr=stdout_taken, highlight=False)
        return cls(console, console.is_terminal or not stdout_taken)

    def write(self, piece: Piece) -> None:
        """Write a piece: coloured in a terminal, otherwise exactly its text."""
        if not self.shows_text:
            return
        if self.console.is_terminal:
            self.console.print(Text(piece.text, STYLES[piece.origin]), end="", soft_wrap=True)
        else:
            self.console.file.write(piece.text)
        self.console.file.flush()


def play(stream: Stream, tokenizer: Any, screen: Screen, show_tree: bool) -> bool:
    """Show an answer as it comes. Returns whether Ctrl-C ended it; what came until then is kept."""
    origin = "bonus"
    interrupted = False
    try:
        for piece in stream:
            screen.write(piece)
            origin = piece.origin if piece.token_ids else origin
    except KeyboardInterrupt:
        stream.close()
        interrupted = True
    generation = stream.generation
    if screen.shows_text:
        screen.console.file.write("\n")
    if screen.console.is_terminal:
        Console(stderr=True).print(Text(summary(generation), "dim"))
    if show_tree:
        bonus = generation.token_ids[-1] if origin == "bonus" and generation.token_ids else None
        screen.console.print(draw(stream.last_round_tree, stream.last_accepted, bonus, tokenizer))
    return interrupted


def follow(stream: Stream) -> bool:
    """Take part in an answer that another process shows. Returns whether Ctrl-C ended it."""
    try:
        for _ in stream:
            pass
    except KeyboardInterrupt:
        stream.close()
        return True
    return False


def summary(generation: Generation) -> str:
    """`96 tokens · 41.2 tokens/s · τ 2.13 · mean width 9.4 · bastion`."""
    facts = [
        f"{len(generation.token_ids)} tokens",
        f"{generation.tokens_per_s:.1f} tokens/s",
        f"τ {generation.tau:.2f}",
        f"mean width {generation.mean_width:.1f}",
        generation.policy,
    ]
    return " · ".join(facts if generation.rounds else [facts[0], facts[-1]])


def draw(tree: Tree | None, accepted: Collection[int], bonus: int | None, tokenizer: Any) -> Drawing | str:
    """The tree that the last round verified: token, path mass, the accepted path marked, the bonus token."""
    if tree is None:
        return "There was no round after the first token, so there is no tree to draw."
    root = Drawing(Text(f"{spelled(tokenizer, tree.tokens[0])}  last committed token", STYLES["bonus"]))
    drawn = [root]
    for node in range(1, 1 + len(tree)):
        kept = node in accepted
        style = Style.parse(f"bold {STYLES['draft']}" if kept else "dim")
        label = Text(spelled(tokenizer, tree.tokens[node]), style)
        label.append(f"  {tree.mass[node]:.3f}{' ✓' if kept else ''}")
        drawn.append(drawn[tree.parents[node]].add(label))
    if bonus is not None:
        end = max(accepted, default=0)
        drawn[end].add(Text(f"{spelled(tokenizer, bonus)}  bonus", STYLES["bonus"]))
    return root


def spelled(tokenizer: Any, token: int) -> str:
    """A token's text in quotes, with blanks and line breaks visible."""
    return repr(tokenizer.decode([int(token)]))


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal. It moves when what this yields is called with (done, of)."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label)
        yield lambda done, of: bar.update(task, completed=done, total=of)
