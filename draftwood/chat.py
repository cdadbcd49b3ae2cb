"""A conversation in the terminal: every line is a turn, and a line that begins with / is a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from draftwood import registry
from draftwood.cli_show import Screen, play
from draftwood.errors import BadInput, DraftwoodError, nearest
from draftwood.llm import LLM, Messages
from draftwood.sampling import Sampling

HELP = """\
/policy SPEC        how much to verify: bastion, ddtree:32, autoregressive ...
/temperature T      0 always takes the likeliest token
/system TEXT        set the system prompt and begin anew; without a text, none
/reset              begin anew
/undo               take back the last question and its answer
/tree               show or hide each answer's last draft tree
/help               this list
/exit               leave, as Ctrl-D does; Ctrl-C ends an answer
A line that ends in \\ continues on the next one."""


@dataclass(slots=True)
class Chat:
    """The state of one conversation."""

    llm: LLM
    screen: Screen
    sampling: Sampling
    max_new_tokens: int
    policy: str | None = None
    system: str | None = None
    messages: Messages = field(default_factory=list)
    shows_tree: bool = False

    def say(self, text: str) -> None:
        """Ask, and show the answer as it comes. A refused question leaves the conversation as it was."""
        asked: Messages = [*self.messages, {"role": "user", "content": text}]
        options: dict[str, Any] = {"policy": self.policy, "system": self.system, "max_new_tokens": self.max_new_tokens}
        stream = self.llm.stream(asked, **options, **asdict(self.sampling))
        play(stream, self.llm.tokenizer, self.screen, self.shows_tree)
        if stream.generation.text:  # empty if it was interrupted before the first piece
            self.messages = [*asked, {"role": "assistant", "content": stream.generation.text}]

    def command(self, line: str) -> str:
        """Carry out a command, given without its /; returns the message for the user.

        Raises BadInput for an unknown command or a value that it cannot use.
        """
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "policy": self._set_policy,
            "temperature": self._set_temperature,
            "system": self._set_system,
            "reset": lambda _: self._reset(),
            "undo": lambda _: self._undo(),
            "tree": lambda _: self._toggle_tree(),
            "help": lambda _: HELP,
        }
        if name not in commands:
            raise BadInput(f"There is no command /{name}; /help lists all of them.{nearest(name, commands)}")
        return commands[name](rest.strip())

    def _set_policy(self, spec: str) -> str:
        name = registry.policy(spec).name
        self.policy = spec
        return f"Policy: {name}."

    def _set_temperature(self, text: str) -> str:
        try:
            temperature = float(text)
        except ValueError:
            raise BadInput(f"/temperature needs a number, not {text!r}.") from None
        self.sampling = replace(self.sampling, temperature=temperature)
        return f"Temperature: {self.sampling.temperature:g}."

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return self._reset()

    def _reset(self) -> str:
        self.messages = []
        return "A new conversation."

    def _undo(self) -> str:
        self.messages = self.messages[:-2]
        return f"{len(self.messages) // 2} questions are left."

    def _toggle_tree(self) -> str:
        self.shows_tree = not self.shows_tree
        return f"Trees are {'shown' if self.shows_tree else 'hidden'}."


def converse(chat: Chat, lines: Iterator[str]) -> None:
    """Take turns until the lines end or one of them is /exit. A mistake is reported in a sentence and ends nothing."""
    notes = Console(stderr=True, highlight=False)
    for line in lines:
        if line.strip() in ("/exit", "/quit"):
            return
        try:
            if line.startswith("/"):
                notes.print(Text(chat.command(line[1:]), "dim"))
            elif line.strip():
                chat.say(line)
        except DraftwoodError as mistake:
            notes.print(Text(" ".join(str(mistake).split()), "yellow"))


def prompt_lines() -> Iterator[str]:
    """Lines typed behind a prompt in a terminal, or piped in."""
    if sys.stdin is None:  # the parent process closed it
        return iter(())
    if not sys.stdin.isatty():
        return read_lines(input)
    Console(stderr=True).print(Text("/help lists the commands, Ctrl-D leaves.", "dim"))
    return read_lines(lambda: input("\n> "))


def read_lines(ask: Callable[[], str]) -> Iterator[str]:
    """The lines that `ask` gives, until it has no more; one that ends in a backslash continues on the next."""
    kept = ""
    while True:
        try:
            line = ask()
            line.encode()  # invalid bytes arrive as surrogates, which cannot be encoded
        except (EOFError, KeyboardInterrupt):
            if kept:
                yield kept
            return
        except UnicodeError:
            raise BadInput("What was piped in is not valid UTF-8 text; convert it first.") from None
        if line.endswith("\\"):
            kept += line[:-1] + "\n"
        else:
            yield kept + line
            kept = ""
