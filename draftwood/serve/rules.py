"""What shapes a distribution besides sampling: biases, penalties and grammars, at every node along its path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftwood.serve.grammar import Grammar


@dataclass
class Shaping:
    """OpenAI's rules as one `sampling.Rule`. The penalties count what was written, not the prompt."""

    prompt: int  # tokens
    bias: Mapping[int, float]
    presence: float = 0.0
    frequency: float = 0.0
    least: int = 0  # tokens before one of `ends` may come
    ends: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    def __call__(self, tokens: list[int], scores: Tensor) -> Tensor:
        """`scores` [V] after `tokens`, prompt included."""
        written, scores = tokens[self.prompt :], scores.clone()
        if self.bias:
            ids, values = self._bias
            scores[ids.to(scores.device)] += values.to(scores)
        if written and (self.presence or self.frequency):
            seen, counts = np.unique(written, return_counts=True)
            penalty = torch.from_numpy(self.presence + self.frequency * counts).to(scores)
            scores[torch.from_numpy(seen).to(scores.device)] -= penalty
        if len(written) < self.least and not (self.grammar and self.grammar.complete(written)):
            scores[list(self.ends)] = -math.inf
        return scores if self.grammar is None else self.grammar.mask(written, scores)

    @property
    def broken(self) -> bool:
        """Whether the grammar hit a limit of its own, which ended the text."""
        return self.grammar is not None and self.grammar.broken

    @cached_property
    def _bias(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(list(self.bias)), torch.tensor(list(self.bias.values()))
