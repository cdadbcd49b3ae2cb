"""Answers in a given form: llguidance says which tokens may follow, at any node of a tree."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftwood.errors import BadInput
from draftwood.tree import shared

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ANY_OBJECT = {"type": "object"}
FORM: JsonCompileOptions = {"whitespace_pattern": r"[ \n\t]{0,8}"}  # unbounded, a model may write nothing else
WHOLE = (
    "NotStopped",
    "NoExtension",
    "NoExtensionBias",
    "EndOfSentence",
)  # any other stop reason is one of a matcher's limits


class Grammars:
    """Makes grammars for one tokenizer, which llguidance reads once (about a second)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, ends: Collection[int]) -> None:
        self._tokenizer, self._vocab, self._ends = tokenizer, vocab, sorted(ends)
        self._read: LLTokenizer | None = None

    def make(self, grammar: str) -> Grammar:
        """From what `of_schema`, `of_lark` and `of_regex` give. Raises BadInput with llguidance's reason."""
        if self._read is None:
            try:
                self._read = from_tokenizer(self._tokenizer, self._vocab, self._ends or None)  # type: ignore[arg-type]
            except Exception as error:
                raise BadInput(f"This model's tokenizer cannot be used with grammars: {error}") from error
        matcher = LLMatcher(self._read, grammar, log_level=0)
        if matcher.is_error():
            raise BadInput(f"The grammar or schema cannot be used: {matcher.get_error()}")
        return Grammar(matcher, self._ends)


def of_schema(schema: Any) -> str:
    """A grammar of JSON texts that a JSON schema allows."""
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=FORM))
    except Exception as error:
        raise BadInput(f"The JSON schema cannot be used: {error}") from error


def of_lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


def of_regex(text: str) -> str:
    return str(LLMatcher.grammar_from_regex(text))


class Grammar:
    """Where one answer is in its grammar. It follows a path forward and, if asked about another one, goes back."""

    def __init__(self, matcher: LLMatcher, ends: Collection[int]) -> None:
        self._matcher, self._ends = matcher, frozenset(ends)
        self._at: list[int] = []  # tokens that the matcher has seen
        self.broken = False  # whether it hit one of its limits: the answer ends there, its form incomplete

    def mask(self, written: list[int], scores: Tensor) -> Tensor:
        """`scores` [V] with every token that may not follow `written` at -inf."""
        if self.complete(written):
            allowed = torch.zeros(len(scores), dtype=torch.bool)
            allowed[list(self._ends)] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            flags = np.unpackbits(bits, bitorder="little", count=min(8 * len(bits), len(scores)))
            allowed = torch.from_numpy(flags).bool()
            allowed = torch.nn.functional.pad(allowed, (0, len(scores) - len(allowed)))
        self.broken = self.broken or self._matcher.stop_reason() not in WHOLE
        return scores.masked_fill(~allowed.to(scores.device), -math.inf)

    def complete(self, written: list[int]) -> bool:
        """Whether only an end token may follow."""
        same = shared(self._at, written)
        news = written[same:]
        if not self._ends.isdisjoint(news):  # a tree may go on after an end, but a matcher cannot go back past it
            return True
        if same < len(self._at):
            self._matcher.rollback(len(self._at) - same)
        self._matcher.consume_tokens(news)
        self._at = list(written)
        return self._matcher.is_stopped()
