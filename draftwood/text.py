"""From token ids to text as they come: whole characters only, stop strings held back and cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from draftwood.errors import BadInput

CONTEXT = 8  # tokens that decide how the next one is spelled
PATIENCE = 32  # tokens that may wait for a whole character: it takes no more than a few
CHARACTER = 4  # bytes of a character, at most


class Decoder(Protocol):
    """The one method of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


class TextStream:
    """Turns one request's tokens into text pieces whose concatenation is the text."""

    def __init__(self, tokenizer: Decoder, stops: str | Iterable[str] | None = (), before: Sequence[int] = ()) -> None:
        """`before`: tokens that this text continues, since some decoders drop the blank at the beginning of a text."""
        stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        if not all(isinstance(s, str) and s for s in stops):
            raise BadInput("A stop string is empty; give the text at which to stop.")
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids = list(before[-CONTEXT:])
        self._start, self._read = 0, len(self._ids)  # decoding [start:] sees enough context; [:read] is already text
        self._held = ""  # text that could still become a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character or a stop string may be unfinished."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) > len(before) and not after.endswith("�"):
            return self._take(before, after, len(self._ids))
        return self._unfinished(before, after) if len(self._ids) - self._read > PATIENCE else ""

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._start : self._read])
        rest = self._held + self._decode(self._ids[self._start :])[len(before) :]
        self._start = self._read = len(self._ids)
        self._held = ""
        return rest

    def _take(self, before: str, after: str, read: int) -> str:
        self._start, self._read = self._read, read
        return self._release(after[len(before) :])

    def _unfinished(self, before: str, after: str) -> str:
        """The text to show after many tokens without a whole character: all but the last few, which may begin one. Else
        all of them would be decoded again for each new token, and none would ever be shown."""
        if not self._decode(self._ids[-1:]) and self._decode(self._ids[self._start : -1]) == after:  # a special token
            self._ids.pop()
            return ""
        last = len(self._ids) - CHARACTER + 1
        for read in range(last, last - CHARACTER, -1):
            known = self._decode(self._ids[self._start : read])
            if known + self._decode(self._ids[read:]) == after:  # not in the middle of a character
                return self._take(before, known, read)
        return ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _release(self, text: str) -> str:
        text = self._held + text
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
