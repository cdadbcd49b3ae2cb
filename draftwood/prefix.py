"""Texts that stay in memory when their requests leave, so that those that begin alike need not be read again.

What is kept is a `Prefix`: the target's keys and values together with the drafter's state. A drafter that has lost its
context would propose next to nothing, and whatever the target was saved would be lost again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.drafters.base import Drafter
from draftwood.request import Request
from draftwood.rounds import Prefix
from draftwood.tree import Ints

LEAST = 16  # tokens: what is shorter is read faster than it is found
SPARE = 1 / 16  # of a text: so much room behind it is neither counted nor worth a copy without it


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
        self.counts = Counts()

    @property
    def tokens(self) -> int:
        """Tokens that are kept."""
        return sum(len(tokens) for tokens, _ in list(self._kept.values()))  # metrics ask from another thread

    @torch.inference_mode()
    def keep(self, request: Request, prefix: Prefix) -> None:
        """Take over what is left of a request; shorter texts that it begins with are dropped, and the oldest ones."""
        tokens = np.array(request.sampler.tokens[: prefix.row.length])
        if not LEAST <= len(tokens) <= self.capacity or self._covered(tokens):
            return
        for key, (old, _) in list(self._kept.items()):
            if common(old, tokens) == len(old):
                del self._kept[key]
        self.shrink(self.capacity - len(tokens))
        if prefix.row.capacity > (1 + SPARE) * len(tokens):  # room for what would have come
            prefix = Prefix(prefix.row.copy(len(tokens), len(tokens)), copy.deepcopy(prefix.state))
        self._kept[tokens.tobytes()] = tokens, prefix

    def find(self, request: Request) -> Prefix | None:
        """A copy of the longest known beginning of the prompt, with room for the request; its last token is left out.

        Sets `request.filled`.
        """
        prompt = np.array(request.sampler.tokens[: request.prompt])
        found = {key: common(tokens, prompt[:-1]) for key, (tokens, _) in self._kept.items()}
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
            self._kept.popitem(last=False)

    def _covered(self, tokens: Ints) -> bool:
        """Whether a kept text begins with these tokens; it then counts as used."""
        for key, (old, _) in self._kept.items():
            if common(old, tokens) == len(tokens):
                self._kept.move_to_end(key)
                return True
        return False

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
