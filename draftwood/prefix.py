"""Texts that stay in memory when their requests leave, so that prompts that begin alike need not be read again.

What is kept is a `Prefix`: the target's keys and values together with the drafter's state. A drafter that has lost its
context would propose next to nothing, and what the target saved would be lost again.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.drafters.base import Drafter
from draftwood.request import Request
from draftwood.rounds import Prefix
from draftwood.tree import Ints

LEAST = 16  # tokens: what is shorter is read faster than it is found
SPARE = 1 / 16  # share of a text: so much free room behind it is neither counted nor worth a copy without it


@dataclass(frozen=True, slots=True)
class Counts:
    """How much reading was saved."""

    queries: int = 0  # tokens of prompts that were looked up
    hits: int = 0  # tokens of them that were found


class PrefixCache:
    """The most recently used texts, `capacity` tokens in all."""

    def __init__(self, drafter: Drafter | None, capacity: int) -> None:
        self._drafter, self.capacity = drafter, capacity
        self._kept: OrderedDict[bytes, tuple[Ints, Prefix]] = OrderedDict()  # the longest unused first
        # Its keys, sorted: texts that begin alike are neighbours, so a text is found among thousands as fast as among a
        # few. None begins with another.
        self._sorted: list[bytes] = []
        self.tokens = 0  # that are kept
        self.counts = Counts()

    @torch.inference_mode()
    def keep(self, request: Request, prefix: Prefix) -> None:
        """Take over what a request leaves. Kept texts that it begins with are dropped, and the oldest ones for room."""
        tokens = np.array(request.sampler.tokens[: prefix.row.length])
        key = tokens.tobytes()
        if not LEAST <= len(tokens) <= self.capacity or self._covers(key):
            return
        for old in self._neighbours(key):
            if key.startswith(old):
                self._forget(old)
        self.shrink(self.capacity - len(tokens))
        if prefix.row.capacity > (1 + SPARE) * len(tokens):  # it has room for more answer than was written
            prefix = Prefix(prefix.row.copy(len(tokens), len(tokens)), copy.deepcopy(prefix.state))
        self._kept[key], self.tokens = (tokens, prefix), self.tokens + len(tokens)
        insort(self._sorted, key)

    def find(self, request: Request) -> Prefix | None:
        """A copy of the longest known beginning of the prompt, with room for the request; its last token is left out.

        Sets `request.filled`.
        """
        prompt = np.array(request.sampler.tokens[: request.prompt])
        found = {key: common(self._kept[key][0], prompt[:-1]) for key in self._neighbours(prompt[:-1].tobytes())}
        key = max(found, key=found.__getitem__, default=b"")
        length = found.get(key, 0)
        if length < LEAST:
            length = 0
        self.counts = Counts(self.counts.queries + len(prompt), self.counts.hits + length)
        if not length:
            return None
        self._kept.move_to_end(key)
        request.filled = length
        return self._copy(self._kept[key][1], length, request.capacity)

    def shrink(self, tokens: int) -> None:
        """Forget the texts that were not used for the longest time until no more than `tokens` are kept."""
        while self._kept and self.tokens > tokens:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: bytes) -> None:
        tokens, _ = self._kept.pop(key)
        self.tokens -= len(tokens)
        del self._sorted[bisect_left(self._sorted, key)]

    def _neighbours(self, key: bytes) -> list[bytes]:
        """The kept keys next to `key` in order: one of them shares the longest beginning with it."""
        at = bisect_left(self._sorted, key)
        return self._sorted[max(at - 1, 0) : at + 1]

    def _covers(self, key: bytes) -> bool:
        """Whether a kept text begins with this one; it then counts as used."""
        longer = next((old for old in self._neighbours(key) if old.startswith(key)), None)
        if longer is not None:
            self._kept.move_to_end(longer)
        return longer is not None

    @torch.inference_mode()
    def _copy(self, prefix: Prefix, length: int, capacity: int) -> Prefix:
        state = copy.deepcopy(prefix.state)
        if self._drafter is not None:
            self._drafter.rewind(state, length)
        return Prefix(prefix.row.copy(length, capacity), state)


def common(a: Ints, b: Ints) -> int:
    """How many tokens two texts begin with alike."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
