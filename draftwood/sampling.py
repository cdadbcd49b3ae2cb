"""Sampling parameters, the processed distribution they define, and one counter-based draw per position.

The order of the rules is that of transformers: repetition penalty, temperature, top-k, top-p, min-p. What decides a
draw (`noise.py`) depends on seed and position alone, so a seed gives the same text under every policy and tree width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.errors import BadInput
from draftwood.noise import HOTTEST, Ahead, Ints, keys, noisiest

if TYPE_CHECKING:  # what follows uses methods of tensors alone: without torch the parameters still import
    from torch import Tensor

AT_ONCE = 32  # positions whose keys are made together: setting a generator up takes longer than its numbers do
LENIENT, HARSH = 0.01, 100.0  # penalties on repetition: far beyond them float32 makes scores infinite, or no number

# (committed tokens + path, scores [V]) -> scores [V]: anything else that shapes the distribution at a node.
Rule = Callable[[list[int], "Tensor"], "Tensor"]


def finite(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. The defaults are greedy decoding."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the smallest set that holds this probability
    min_p: float = 0.0  # keep what has at least this share of the likeliest token's probability
    repetition_penalty: float = 1.0  # divide (or multiply, if negative) the scores of tokens seen before
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not finite(value):
                raise BadInput(f"{field.name} is {value!r}; it must be a finite number.")
            whole = field.name in ("top_k", "seed")
            if whole and (value != int(value) or not 0 <= value < 2**63):
                raise BadInput(f"{field.name} is {value}; it must be a whole number from 0 up, below 2^63.")
            object.__setattr__(self, field.name, int(value) if whole else float(value))  # from numpy's, or from 50.0
        if self.temperature < 0:
            raise BadInput(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise BadInput(f"min_p is {self.min_p}; it must be between 0 and 1.")
        if not LENIENT <= self.repetition_penalty <= HARSH:
            bounds = f"between {LENIENT} and {HARSH:g} (1: none)"
            raise BadInput(f"repetition_penalty is {self.repetition_penalty}; it must be {bounds}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def penalize(scores: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Make tokens seen before less likely (CTRL, arXiv 1909.05858 §4.1). `scores` [V], `seen` token ids."""
    scores, touched = scores.clone(), scores[seen]
    scores[seen] = (touched * penalty).where(touched < 0, touched / penalty)
    return scores


def warp(scores: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, top-k, top-p and min-p on `scores` [V]; what is cut becomes -inf."""
    # From the top and in double: a tiny temperature must not overflow the best score, nor round to zero.
    scores = (scores - scores.max()).double() / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(stable=True)
        cut = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        cut[-1] = False  # one token always stays
        scores = scores.masked_fill(cut.scatter(0, order, cut), -math.inf)  # back in the order of the ids
    if sampling.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.max(), -math.inf)
    return scores


class Sampler:
    """Draws the tokens of one request from the target's logits, at any node of a tree."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], rule: Rule | None = None, heat: float | None = None
    ) -> None:
        """`heat` is the temperature that a `rule` applies by itself; None: only the sampling's applies."""
        self.sampling = sampling
        self._heat = min(sampling.temperature if heat is None else heat, HOTTEST)
        self.tokens = list(prompt)  # everything committed
        self._rule = rule
        self._start, self._keys = 0, np.zeros(0, np.int64)  # keys of positions from `_start` on

    @property
    def shaped(self) -> bool:
        """Whether logits are changed by what was written before."""
        return self.sampling.repetition_penalty != 1 or self._rule is not None

    @property
    def plain(self) -> bool:
        """Whether the token of the largest logit is always drawn."""
        return self.sampling.greedy and not self.shaped

    def keys(self, ahead: int, count: int = 1) -> Ints:
        """`[count]` keys (`noise.py`) of draws; the first draw is `ahead` tokens behind the committed ones."""
        start = len(self.tokens) + ahead - self._start
        if not 0 <= start <= len(self._keys) - count:
            self._start, start = len(self.tokens) + ahead, 0
            self._keys = keys(self.sampling.seed, self._start, count + AT_ONCE)
        return self._keys[start : start + count]

    def ahead(self, depths: int) -> Ahead:
        """The noise of so many draws to come."""
        return Ahead(self.keys(0, depths), self._heat)

    def draw(self, logits: Tensor, path: Sequence[int] = ()) -> int:
        """The token after the committed ones and `path`; `logits` [V] are the target's at that node."""
        scores = self.process(logits, path)
        if self.sampling.greedy:
            return int(scores.max(0).indices)  # the first of equals, as argmax, in a quarter of its time
        return int(noisiest(scores[None], self.keys(len(path))))

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Scores [V] whose softmax is the processed distribution (greedy: whose argmax is the choice)."""
        sampling = self.sampling
        if self.plain:
            return logits
        scores = logits if logits.element_size() == 8 else logits.float()
        if self._rule is not None:
            scores = self._rule([*self.tokens, *path], scores)
        if sampling.repetition_penalty != 1:
            scores = penalize(scores, sorted({*self.tokens, *path}), sampling.repetition_penalty)
        return scores if sampling.greedy else warp(scores, sampling)

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
