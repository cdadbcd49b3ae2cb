"""The noise that decides draws: a number for each seed, position and token, the same wherever and whenever it is made.

The token with the largest sum of score and Gumbel noise is a draw from the softmax of the scores (the Gumbel-max trick;
Maddison et al. 2014, arXiv 1411.0030 §2). So a seed gives one text, whatever is drafted, and a drafter may look at the
noise of positions to come (`foresight.py`).

A position's key is a word of Philox (Salmon et al. 2011); a token's bits are those of SplitMix64 (Steele et al. 2014,
doi 10.1145/2660193.2660195), started at that key. Both generators are counters, so nothing is stored and the noise of
any token can be computed alone. `native/logits.c` computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # what needs torch imports it when it is called: without it sampling parameters still import
    from torch import Tensor

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = TypeVar("Words", Ints, "Tensor")  # 64 bits each, of whose products the lowest 64 count

FAVOUR = 8.0  # most noise that counts where candidates are chosen: tokens that need more are too unlikely to search for
HOTTEST = 8.0  # highest temperature in foresight: from there on noise decides alone, and exp stays finite
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's, as signed numbers
BITS = 52  # of a uniform number; half of the last one is added, so that it is never 0 or 1


def keys(seed: int, start: int, count: int) -> Ints:
    """`[count]` keys of the positions from `start` on. Philox counts positions and makes four words for each; the first
    is the key."""
    return np.random.Philox(key=seed, counter=start).random_raw(4 * count)[::4].copy().view(np.int64)


def gumbel(keys: Ints, tokens: Ints) -> Array:
    """The noise of each token, under keys that broadcast against the tokens."""
    noise: Array = -np.log(-np.log((_bits(keys + (tokens + 1) * STEP) + 0.5) * 2.0**-BITS))
    return noise


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """The noise of draws to come, times their temperature."""

    keys: Any  # [D] contiguous, of numpy or on a device, like the heat []
    heat: Any

    def of(self, depths: Ints, tokens: Ints) -> Array:
        """The noise of tokens at depths (from 0 on) that broadcast against them."""
        noise: Array = self.heat * gumbel(self.keys[depths], tokens)
        return noise

    def over(self, tokens: Tensor) -> Tensor:
        """`[D, V]` noise of tokens `[V]` or `[D, V]`, on their device."""
        import torch

        noise: Tensor = self.heat * gumbel_of(torch.as_tensor(self.keys, device=tokens.device)[:, None], tokens)
        return noise

    def favour(self, tokens: Tensor) -> Tensor:
        """`over`, cut to what counts where candidates are chosen."""
        return self.over(tokens).clamp_max(FAVOUR * self.heat)

    def row(self, depth: int, tokens: Sequence[int]) -> list[float]:
        """The noise of some tokens of one depth, equal to that of compiled growth to the last bit."""
        bits = _bits(self.keys[depth] + (np.array(tokens, np.int64) + 1) * STEP).tolist()
        return [self.heat * -log(-log((found + 0.5) * 2.0**-BITS)) for found in bits]


def noisiest(scores: Tensor, keys: Ints | Tensor) -> Tensor:
    """`[M]` places of the largest of scores `[M, V]` with the noise of keys `[M]`: draws from the rows' softmax."""
    import torch

    tokens = torch.arange(scores.shape[-1], device=scores.device)
    return (scores + gumbel_of(torch.as_tensor(keys, device=scores.device)[:, None], tokens)).argmax(-1)


def gumbel_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """`gumbel` on a device."""
    uniform = (_bits(keys + (tokens + 1) * STEP).double() + 0.5) * 2.0**-BITS
    return -(-uniform.log()).log()


def _bits(state: Words) -> Words:
    """The upper BITS of SplitMix64's output in this state."""
    state = (state ^ _right(state, 30)) * FIRST
    state = (state ^ _right(state, 27)) * SECOND
    return _right(state ^ _right(state, 31), 64 - BITS)


def _right(words: Words, by: int) -> Words:
    """Shifted right, with zeros from the left."""
    return (words >> by) & (2 ** (64 - by) - 1)
