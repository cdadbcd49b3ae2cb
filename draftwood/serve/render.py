"""Answers in OpenAI's shapes: whole, and in chunks."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from draftwood.accept import Likelihood
from draftwood.serve.answer import Choice, Delta, Piece
from draftwood.serve.tools import Call, Form, Sieve

REPLACED = "\ufffd"  # what decoding makes of bytes that are not text
BLANK = "\u2581"  # in front of words in SentencePiece's vocabularies; decoding drops those that a text begins with


class Renderer(Protocol):
    """Gives one kind of answer its shape. It gets the deltas of a choice in order."""

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        ...

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]: ...
    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]: ...
    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]: ...


@dataclass
class Head:
    """What every answer begins with."""

    model: str
    kind: str  # chat.completion or text_completion
    prefix: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid4().hex}"

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        kind = self.kind + (".chunk" if streamed and self.kind == "chat.completion" else "")
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class Chat:
    """Chat completions; with a form, tool calls are taken out of the text."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, form: Form | None, logprobs: bool) -> None:
        self._head, self._tokenizer, self._form, self._logprobs = (
            Head(model, "chat.completion", "chatcmpl"), tokenizer, form, logprobs,
        )  # fmt: skip
        self._sieves: dict[int, Sieve] = {}

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        return self._head.envelope(choices, streamed)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        text, calls = delta.text, list[Call]()
        if self._form is not None:
            sieve = self._sieves.setdefault(choice.index, Sieve(self._form))
            text = sieve.push(text)
            if delta.finish:
                rest, calls = sieve.end()
                text += rest
        chunk = self._chunk(choice, {"content": text} if text else {})
        if self._logprobs:
            chunk["logprobs"] = {"content": chat_logprobs([delta], self._tokenizer)}
        if calls:
            chunk["delta"]["tool_calls"] = [{"index": i, **call.to_json()} for i, call in enumerate(calls)]
        chunk["finish_reason"] = "tool_calls" if calls else delta.finish
        return [chunk]

    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        text, calls = "".join(delta.text for delta in deltas), list[Call]()
        if self._form is not None:
            text, calls = self._form.read(text)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        logprobs = {"content": chat_logprobs(deltas, self._tokenizer), "refusal": None} if self._logprobs else None
        finish = "tool_calls" if calls else choice.finish
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


class Completion:
    """Text completions."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, logprobs: bool) -> None:
        self._head, self._tokenizer, self._logprobs = Head(model, "text_completion", "cmpl"), tokenizer, logprobs
        self._offsets: dict[int, int] = {}

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        return self._head.envelope(choices, streamed)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(choice, [delta], delta.finish)]

    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        return self._choice(choice, deltas, choice.finish)

    def _choice(self, choice: Choice, deltas: Sequence[Delta], finish: str | None) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        start = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = start + len(text)
        logprobs = completion_logprobs(deltas, self._tokenizer, start) if self._logprobs else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def chat_logprobs(deltas: Sequence[Delta], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """One entry for each token."""
    return [
        {**_told(piece.token, told.logp, tokenizer), "top_logprobs": [_told(t, p, tokenizer) for t, p in told.top]}
        for piece, told in _pairs(deltas)
    ]


def completion_logprobs(deltas: Sequence[Delta], tokenizer: PreTrainedTokenizerBase, start: int) -> dict[str, Any]:
    """Parallel lists; `start` is where the text of these deltas begins in the answer."""
    offsets = []
    for piece, _ in _pairs(deltas):
        offsets.append(start)
        start += len(piece.text)
    return {
        "tokens": [_spell(piece.token, tokenizer) for piece, _ in _pairs(deltas)],
        "token_logprobs": [told.logp for _, told in _pairs(deltas)],
        "top_logprobs": [_spelled(told, tokenizer) for _, told in _pairs(deltas)],
        "text_offset": offsets,
    }


def _pairs(deltas: Sequence[Delta]) -> list[tuple[Piece, Likelihood]]:
    return [pair for delta in deltas for pair in zip(delta.pieces, delta.likelihoods, strict=True)]


def _told(token: int, logp: float, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    text = _spell(token, tokenizer)
    return {"token": text, "logprob": max(logp, -9999.0), "bytes": _bytes(token, text, tokenizer)}


def _bytes(token: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A token's bytes. Clients join them where a character spans several tokens, none of which is text by itself."""
    if REPLACED not in text:
        return list(text.encode())
    piece, known = str(tokenizer.convert_ids_to_tokens(token)), _byte_of()
    if named := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
        return [int(named[1], 16)]
    return [known[char] for char in piece] if all(char in known for char in piece) else list(text.encode())


@cache
def _byte_of() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def _spelled(told: Likelihood, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """The likeliest tokens by their text; of several with the same text the likeliest."""
    found: dict[str, float] = {}
    for token, logp in told.top:
        found.setdefault(_spell(token, tokenizer), logp)
    return found


def _spell(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    text, piece = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
    blanks = len(piece) - len(piece.lstrip(BLANK))
    return " " * blanks + text.lstrip(" ") if blanks else text
