"""Whether pooling pays, and the pooled block: judged by the probability that each adds to what the target chooses.

That depends on the text. Where what was just written occurred before, and in answers that copy, a pool doubles what is
accepted; elsewhere it only costs time. So it is judged separately by how many tokens before a draft's root occurred
earlier, and by what it gained in the request's own text. Behind long matches the block, in turn, adds nothing to what
the text says, and its drafter does not run. In numbers: docs/drafters.md.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

LONGER = (3, 6)  # tokens before the root that occurred earlier, from which on a draft is of the next kind
GUESSES = ((0.0, 0.3), (0.05, 0.06), (0.2, 0.01))  # of each kind: what pooling adds, and the block,
GUESSED = 16  # and choices that they count for
RECENT = 0.01  # weight of a kind's newest choice
LATEST, DOUBT = 32, 8  # latest choices that a text's difference is the mean of, and choices at which half of it counts
# Trees of 8 nodes get exp(2 gain) times as many tokens (docs/log.md), and pooling takes 3 % of a round.
PAYS = 0.015
BLOCK_PAYS = 0.025  # likewise: a drafter's forward takes 5 % at least
# The first NEW choices of all and the first FIRST of each text are pooled and judged even if that does not pay; later,
# one draft of SELDOM is. Most of the time that pooling takes goes into learning.
NEW, FIRST, SELDOM = 512, 16, 16
SURE = GUESSED + 48  # choices of a kind, guesses counted, before its drafts may do without the block


@dataclass(slots=True)
class Gain:
    """A mean over choices: of the probability that pooling added to each, or of how that differs from its kind's."""

    mean: float = 0.0
    choices: int = 0

    def add(self, value: float, least: float) -> None:
        """The newest weighs `least` at least."""
        self.choices += 1
        self.mean += max(least, 1 / self.choices) * (value - self.mean)


@dataclass(slots=True)
class Kind:
    """Drafts behind matches of about the same length, over all requests."""

    gain: Gain  # of pooling, over the block alone
    block: Gain  # of the block, over all the rest
    waiting: int = 0  # drafts since one was judged


@dataclass(slots=True)
class Gains:
    """What pooling brought so far. Shared by all requests of a drafter."""

    kinds: list[Kind] = field(
        default_factory=lambda: [Kind(Gain(gain, GUESSED), Gain(block, GUESSED)) for gain, block in GUESSES]
    )

    @property
    def choices(self) -> int:
        """Choices of all kinds, without the guesses."""
        return sum(kind.gain.choices - GUESSED for kind in self.kinds)

    def case(self, match: int, own: Gain) -> Case:
        """The case of a draft before whose root `match` tokens occurred earlier; `own` is the text's difference."""
        kind = self.kinds[bisect_right(LONGER, match)]
        kind.waiting += 1
        seldom = kind.waiting >= SELDOM
        asks = seldom or kind.block.choices < SURE or kind.block.mean > BLOCK_PAYS
        pays = kind.gain.mean + own.choices / (own.choices + DOUBT) * own.mean > PAYS
        pools = seldom or pays or not asks or self.choices < NEW or own.choices < FIRST
        if asks and pools:
            kind.waiting = 0
        return Case(kind, own, asks, pools, pays)


@dataclass(frozen=True, slots=True)
class Case:
    """One draft, which may be pooled, and may do without the block."""

    kind: Kind
    own: Gain
    asks: bool  # whether there should be a block, if only to judge it
    pools: bool  # whether there should be a pool, if only to judge it
    pays: bool  # whether the pool should be followed

    def judge(self, pooled: float, alone: float, without: float) -> None:
        """Learn that a token was chosen to which the pool gave probability `pooled`, the block alone `alone`, and all
        but the block `without`."""
        self.own.add(pooled - alone - self.kind.gain.mean, 1 / LATEST)
        self.kind.gain.add(pooled - alone, RECENT)
        self.kind.block.add(pooled - without, RECENT)
