"""Training blocks: which anchors of a text are drawn, what each block shows, and what it must predict.

A block of B tokens begins at an anchor, a token of the answer. It shows the anchor and, for a variable-prefix
drafter, the text's own next tokens; the rest are masks. Position p of the block predicts the token p places
behind the anchor (DFlash, arXiv 2602.06036 §4; D2SD, arXiv 2606.04446).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.train.data import Text
from draftwood.tree import Floats, Ints

PREFIX_BASE = 0.9  # of the variable-prefix objective: a prefix longer by one is drawn this much less often

# (generator, blocks, tokens of a block) -> how many tokens each block shows, the anchor included
Prefixes = Callable[[np.random.Generator, int, int], Ints]


def anchor_only(rng: np.random.Generator, blocks: int, size: int) -> Ints:
    """DFlash: a block shows its anchor."""
    return np.ones(blocks, np.int64)


def geometric_prefix(rng: np.random.Generator, blocks: int, size: int) -> Ints:
    """D2SD's second drafter: from 2 to size - 1 tokens, each length less often than the one before."""
    lengths = np.arange(min(2, size - 1), size)
    odds = PREFIX_BASE**lengths
    return rng.choice(lengths, blocks, p=odds / odds.sum())


OBJECTIVES: dict[str, Prefixes] = {"dflash": anchor_only, "variable-prefix": geometric_prefix}


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """M blocks of B tokens, text by text. Position 0 is the anchor, which nothing predicts."""

    tokens: Ints  # [M, B]
    anchors: Ints  # [M] place in the text
    labels: Ints  # [M, B - 1]
    weights: Floats  # [M, B - 1]; 0: not to be predicted, the token is shown or behind the end of the text
    counts: tuple[int, ...]  # blocks of each text
    lengths: tuple[int, ...]  # tokens of each text


def draw_anchors(rng: np.random.Generator, text: Text, count: int) -> Ints:
    """At most `count` different places of the answer that have a next token, in rising order."""
    places = np.arange(text.prompt, len(text.tokens) - 1)
    return np.sort(rng.choice(places, min(count, len(places)), replace=False))


def make_blocks(
    texts: Sequence[Text], anchors: Sequence[Ints], shown: Sequence[Ints], size: int, mask: int, gamma: float
) -> Blocks:
    """Blocks at the given `anchors` of each text, `shown` tokens of each visible, weights exp(-(p - shown) / gamma)."""
    parts = [_blocks_of(*args, size, mask, gamma) for args in zip(texts, anchors, shown, strict=True)]
    tokens, labels, weights = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Blocks(
        tokens,
        np.concatenate(list(anchors)),
        labels,
        weights,
        tuple(len(a) for a in anchors),
        tuple(len(t.tokens) for t in texts),
    )


def _blocks_of(text: Text, anchors: Ints, shown: Ints, size: int, mask: int, gamma: float) -> tuple[Ints, Ints, Floats]:
    place = np.arange(size)
    shown = np.minimum(shown, len(text.tokens) - 1 - anchors)[:, None]  # one token is left to predict
    at = anchors[:, None] + place
    inside = at < len(text.tokens)
    tokens = text.tokens[np.where(inside, at, 0)]
    weights = np.where(inside & (place >= shown), np.exp(-(place - shown) / gamma), 0.0).astype(np.float32)
    return np.where(place < shown, tokens, mask), tokens[:, 1:], weights[:, 1:]
