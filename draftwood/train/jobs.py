"""What the target is asked to write: prompts in its chat template, in every temperature, and prompts of its own.

Jobs are numbered, and a number says everything about its job, so that a run that was cut off goes on with the
numbers that are missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftwood.bench.prompts import Prompt, load_prompts
from draftwood.errors import BadInput, check_one_of
from draftwood.loading import tokenized
from draftwood.names import SELF

THINKING = ("default", "on", "off")
MARK = "\x02user-turn\x02"  # stands for the user's text while the template is taken apart
SELF_TEMPERATURE = 1.0
TEXTS = "texts "  # what a digest is of: older digests were of tokens
BARREN = 256  # fewer repeated answers in a row do not mean much yet
SELF_TOKENS = 160  # longest prompt that the target writes for itself


@dataclass(frozen=True, slots=True)
class Job:
    """One text to write: the tokens it begins with, and how it goes on."""

    number: int
    tokens: tuple[int, ...]
    temperature: float
    source: str
    writes_prompt: bool = False  # the target first writes the user's turn itself
    written: int = 0  # how many of the tokens an earlier run wrote
    thinking: str = "default"


@dataclass(frozen=True, slots=True)
class Opening:
    """What a text begins with."""

    source: str  # a data set's name, which may be any
    tokens: tuple[int, ...]
    own: bool = False  # the target writes the user's turn


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template around one user turn, as token ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]  # ends with what makes the assistant begin

    def answer_to(self, turn: Sequence[int]) -> tuple[int, ...]:
        return (*self.before, *turn, *self.after)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str, thinking: str) -> list[int]:
    """A user's message as the chat template puts it before the target."""
    return list(tokenized(tokenizer, rendered(tokenizer, text, thinking), add_special_tokens=False).input_ids)


def raw_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A text as it stands."""
    return list(tokenized(tokenizer, text).input_ids)


def rendered(tokenizer: PreTrainedTokenizerBase, text: str, thinking: str) -> str:
    """Raises BadInput without a template, or for a thinking switch that it does not have."""
    template = tokenizer.chat_template
    if template is None:
        raise BadInput(
            "The target has no chat template, so there is no user's turn to answer; name an instruction-tuned "
            "target, or give --raw to have prompts continued as they stand."
        )
    check_one_of("--thinking", thinking, THINKING)
    if thinking != "default" and "enable_thinking" not in str(template):
        raise BadInput(f"--thinking {thinking}: the target's chat template has no such switch; leave it out.")
    switch: dict[str, Any] = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
    message, template = [{"role": "user", "content": text}], tokenizer.apply_chat_template
    return str(tokenized(template, message, tokenize=False, add_generation_prompt=True, **switch))


def user_template(tokenizer: PreTrainedTokenizerBase, thinking: str) -> Template:
    """What stands before and after a user's turn."""
    before, found, after = rendered(tokenizer, MARK, thinking).partition(MARK)
    if not found:
        raise BadInput("--prompts self: the target's chat template does not show the user's text as it is.")
    ids = [tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after)]
    if not all(ids):
        raise BadInput(
            "--prompts self: the target's chat template does not mark both ends of a user's turn; name prompts."
        )
    return Template(*ids)


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """All jobs in order: pass after pass over the prompts, each time at the next temperature."""

    prompts: tuple[Opening, ...]
    temperatures: tuple[float, ...]
    template: Template | None  # for prompts of its own; None: there are none
    thinking: str = "default"
    digest: str = ""  # of the prompts in their order: with other prompts the numbers mean other jobs

    @property
    def patience(self) -> int:
        """Repeated answers in a row after which nothing new is expected: one for every prompt and temperature."""
        return max(len(self.prompts) * len(self.temperatures), BARREN)

    def __iter__(self) -> Iterator[Job]:
        """Endless while something new can come: at temperature 0 the same prompt gives the same answer."""
        size, heats = len(self.prompts), len(self.temperatures)
        # A prompt and the `self` after it share a temperature, or `self` would miss half of them.
        each = len({prompt.own for prompt in self.prompts})
        number = 0
        while True:
            turn = number // size
            if turn >= heats and self.template is None and not any(self.temperatures):
                return
            for at, prompt in enumerate(self.prompts):
                heat = self.temperatures[(at // each + turn) % heats]
                if prompt.own or heat > 0 or turn < heats:
                    yield Job(number, prompt.tokens, heat, prompt.source, prompt.own, thinking=self.thinking)
                number += 1


def make_jobs(
    sources: Sequence[str],
    temperatures: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    thinking: str = "default",
    raw: bool = False,
    limit: int | None = None,
) -> Jobs:
    """Jobs of prompt files, data sets by name, and `self`: half of all prompts if there are others."""
    named = [source for source in sources if source != SELF]
    prompts: list[Prompt] = load_prompts(named, limit) if named or not sources else []
    texts = [(p.dataset, p.turns[0]) for p in prompts]
    if raw and thinking != "default":
        raise BadInput(
            f"--thinking {thinking} is a switch of the chat template, which --raw leaves out; give one of them."
        )
    heats = tuple(dict.fromkeys(temperatures))
    # Earlier versions gave such jobs' numbers other temperatures.
    paired = ["pairs"] if named and SELF in sources and len(heats) > 1 else []
    digest = digest_of(texts, SELF in sources, tokenizer.chat_template, *paired)
    encode = partial(raw_ids, tokenizer) if raw else partial(chat_ids, tokenizer, thinking=thinking)
    asked = [Opening(dataset, tuple(encode(text))) for dataset, text in texts]
    if SELF not in sources:
        return Jobs(tuple(asked), heats, None, thinking, digest)
    if raw:
        raise BadInput("--prompts self needs the chat template that --raw leaves out; give one of the two.")
    template = user_template(tokenizer, thinking)
    own = Opening(SELF, template.before, own=True)
    mixed = [prompt for each in asked for prompt in (each, own)] or [own]
    return Jobs(tuple(mixed), heats, template, thinking, digest)


def digest_of(*asked: Any) -> str:
    """A digest of prompts as they were given, not of their tokens: some chat templates contain the date."""
    return TEXTS + hashlib.sha256(repr(asked).encode("utf-8", "replace")).hexdigest()[:16]
