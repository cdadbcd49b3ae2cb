"""Drawing the target's own token at every node, on the device: `sampling.py` for rows of logits, token for token.

The host makes the keys of the noise, all of an answer at once, and copies them into a buffer that is read by position.
So a copy of 8 bytes per token of the answer replaces a second implementation of Philox.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.attention.triton_backend import missing
from draftwood.drafters.lattice import top_k
from draftwood.noise import HOTTEST, Ahead, keys, noisiest
from draftwood.sampling import Sampling

ROWS = 32  # nodes that are drawn together: bounds the float64 scores of a wide tree over a large vocabulary
FEW = 128  # the largest top-k whose bound is looked for by itself, without a sort of the vocabulary


@dataclass(frozen=True, slots=True)
class Kind:
    """Which rules a captured graph holds. Their parameters are buffers; rules that it does not hold cost nothing."""

    greedy: bool
    penalty: bool
    cut: bool  # top-p, or a large top-k: these sort the vocabulary
    few: bool = False  # a small top-k by itself

    @classmethod
    def of(cls, sampling: Sampling, vocab: int) -> Kind:
        cut = not sampling.greedy and (0 < sampling.top_k < vocab or sampling.top_p < 1)
        few = cut and sampling.top_p == 1 and sampling.top_k <= FEW
        return cls(sampling.greedy, sampling.repetition_penalty != 1, cut and not few, few)


class Dice:
    """Everything that shapes and decides the draws of one request, in static buffers."""

    def __init__(self, positions: int, vocab: int, device: torch.device) -> None:
        self.kind = Kind(greedy=True, penalty=False, cut=False)
        self.foresees = False  # whether drafts know the noise
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)  # tokens of prompt and answer so far
        self.keys = torch.zeros(positions, dtype=torch.int64, device=device)  # by position in the text
        self._temperature, self._top_p, self._min_p, self._penalty = (
            torch.ones((), dtype=torch.float64, device=device) for _ in range(4)
        )
        self._top_k = torch.ones((), dtype=torch.int64, device=device)
        self._noisiest = drawer(device)

    def reset(self, sampling: Sampling, tokens: list[int], foresees: bool = False) -> None:
        """Start an answer after `tokens`, the prompt and everything committed."""
        vocab, self.foresees = len(self.seen), foresees
        self.kind = Kind.of(sampling, vocab)
        self.seen.zero_()
        self.observe(torch.tensor(tokens, device=self.seen.device))
        if not sampling.greedy:
            self.keys.copy_(torch.from_numpy(keys(sampling.seed, 0, len(self.keys))))
            self._temperature.fill_(sampling.temperature)
        self._top_k.fill_(sampling.top_k if 0 < sampling.top_k < vocab else vocab)
        self._top_p.fill_(sampling.top_p)
        self._min_p.fill_(sampling.min_p)
        self._penalty.fill_(sampling.repetition_penalty)

    def observe(self, tokens: Tensor) -> None:
        """These tokens [M] are part of the text now."""
        self.seen.index_fill_(0, tokens, True)

    def draw(self, logits: Tensor, positions: Tensor, tokens: Tensor, line: Tensor) -> Tensor:
        """The target's token `[M]` after each of M nodes.

        `logits` [M, V]; `positions` [M] of the tokens to draw; `tokens` [M] and `line` [M, C] of the tree, whose
        paths count as seen.
        """
        if self.kind.greedy and not self.kind.penalty:
            return logits.argmax(-1)
        parts = zip(logits.split(ROWS), positions.split(ROWS), tokens[line].split(ROWS), strict=True)
        return torch.cat([self._draw(*part) for part in parts])

    def ahead(self, position: Tensor, depths: int) -> Ahead | None:
        """The noise of so many draws from `position` [] on; None if drafts are not to know it."""
        if not self.foresees:
            return None
        at = position + torch.arange(depths, device=position.device)
        return Ahead(self.keys[at.clamp_max(len(self.keys) - 1)], self._temperature.clamp_max(HOTTEST))

    def _draw(self, logits: Tensor, positions: Tensor, path: Tensor) -> Tensor:
        scores = logits.double() if logits.dtype == torch.float64 else logits.float()
        if self.kind.penalty:
            seen = self.seen.expand(len(scores), -1).scatter(1, path, True)
            scores = torch.where(seen, self._penalized(scores), scores)
        if self.kind.greedy:
            return scores.argmax(-1)
        return self._noisiest(self._warp(scores), self.keys[positions])

    def _penalized(self, scores: Tensor) -> Tensor:
        return torch.where(scores < 0, scores * self._penalty, scores / self._penalty)

    def _warp(self, scores: Tensor) -> Tensor:
        """`sampling.warp` on rows; a parameter with its neutral value cuts nothing."""
        below = scores - scores.amax(-1, keepdim=True)
        scores = below.double() / self._temperature
        if self.kind.cut:
            scores = self._cut(scores, below.sort(stable=True).indices)  # half as many bits to sort
        if self.kind.few:
            largest, _ = top_k(below, min(FEW, below.shape[1]))
            least = largest.gather(1, (self._top_k - 1).expand(len(scores), 1)).double() / self._temperature
            scores = scores.masked_fill(scores < least, -torch.inf)
        return scores.masked_fill(scores < self._min_p.log(), -torch.inf)  # the largest is 0

    def _cut(self, scores: Tensor, order: Tensor) -> Tensor:
        """Top-k and top-p with one sort: `order` is that of the scores, which rise along it."""
        ordered = scores.gather(1, order)
        least = ordered.gather(1, (scores.shape[1] - self._top_k).expand(len(scores), 1))
        scores = scores.masked_fill(scores < least, -torch.inf)
        cut = ordered.masked_fill(ordered < least, -torch.inf).softmax(-1).cumsum(-1) <= 1 - self._top_p
        cut[:, -1] = False  # one token always stays
        return scores.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -torch.inf)


@functools.cache  # a look at what Triton lacks takes as long as a draw
def drawer(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that draws from scores `[M, V]` under keys `[M]`: one kernel where the device can run it."""
    if device.type != "cuda" or missing(device):
        return noisiest
    from draftwood.device import triton_draw

    return triton_draw.noisiest
