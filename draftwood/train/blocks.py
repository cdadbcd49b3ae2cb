"""Training blocks: which anchors of a text are drawn, what each block shows, and what it must predict.

A block of B tokens begins at an anchor, a token of the answer. It shows the anchor and, for a variable-prefix
drafter, the text's own next tokens; the rest are masks. Position p of the block predicts the token p places
after the anchor (DFlash, arXiv 2602.06036 §4; D2SD, arXiv 2606.04446).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwood.train.shards import Text
from draftwood.tree import Floats, Ints

PREFIX_BASE = 0.9  # of the variable-prefix objective: a prefix longer by one is drawn so many times as often

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


@dataclass(frozen=True, slots=True)
class Objective:
    """How blocks are made for one kind of training."""

    prefixes: Prefixes = anchor_only
    form: str = "dflash"  # the kind of drafter, see forms.py
    shown: int = 1  # tokens that a block shows when it is evaluated
    teacher_forced: bool = False  # blocks begin at all places from 1 on, and show every token to those that follow
    fixed: Mapping[str, int] = field(default_factory=dict)  # values of the recipe that the kind decides

    def draw(self, rng: np.random.Generator, text: Text, count: int, size: int) -> tuple[Ints, Ints]:
        """Anchors in a text, and how many tokens each block shows; shown tokens are not predicted."""
        if self.teacher_forced:
            anchors = np.arange(1, len(text.tokens) - 1)
            return anchors, np.where(anchors < text.prompt, size, 1)
        anchors = draw_anchors(rng, text, count)
        return anchors, self.prefixes(rng, len(anchors), size)


OBJECTIVES = {
    "dflash": Objective(),
    "variable-prefix": Objective(geometric_prefix, shown=2),
    "eagle3": Objective(
        form="eagle3", teacher_forced=True, fixed={"layers": 1, "taps": 3, "markov_rank": 0, "window": 0}
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """M blocks of B tokens, text by text. Position 0 is the anchor, which nothing predicts."""

    tokens: Ints  # [M, B]
    anchors: Ints  # [M] place in the text
    labels: Ints  # [M, B - 1]
    weights: Floats  # [M, B - 1]; 0: not to be predicted, since it is shown or beyond the end of the text
    counts: tuple[int, ...]  # blocks of each text
    lengths: tuple[int, ...]  # tokens of each text


def draw_anchors(rng: np.random.Generator, text: Text, count: int) -> Ints:
    """At most `count` different places of the answer that have a next token, in rising order."""
    places = np.arange(text.prompt, len(text.tokens) - 1)
    return np.sort(rng.choice(places, min(count, len(places)), replace=False))


def make_blocks(
    texts: Sequence[Text],
    anchors: Sequence[Ints],
    shown: Sequence[Ints],
    size: int,
    mask: int,
    gamma: float,
    teacher_forced: bool = False,
) -> Blocks:
    """Blocks at the given `anchors` of each text, `shown` tokens of each visible, weights exp(-(p - shown) / gamma).

    `teacher_forced`: all tokens are visible, and those after the shown ones are predicted nonetheless.
    """
    counts, lengths = tuple(len(a) for a in anchors), tuple(len(t.tokens) for t in texts)
    first, length = (np.repeat(x, counts)[:, None] for x in (np.cumsum([0, *lengths[:-1]]), lengths))
    anchor, place = np.concatenate(list(anchors)), np.arange(size)
    at = anchor[:, None] + place
    seen = np.concatenate(list(shown))[:, None]
    if not teacher_forced:  # there, blocks that begin in the prompt predict nothing
        seen = np.minimum(seen, length - 1 - anchor[:, None])  # one is left to predict
    inside = at < length
    tokens = np.concatenate([t.tokens for t in texts])[first + np.where(inside, at, 0)]
    weights = np.where(inside & (place >= seen), np.exp(-(place - seen) / gamma), 0.0).astype(np.float32)
    given = np.where(teacher_forced | (place < seen), tokens, mask)
    return Blocks(given, anchor, tokens[:, 1:], weights[:, 1:], counts, lengths)
