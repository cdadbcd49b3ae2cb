"""What a pool has learned from the tokens that the target chose: exponents, shares, and whether pooling pays.

`native/judged.c` learns the first two as they are learned here.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableSequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwood.experts import KINDS, Opinion, trust

Array = NDArray[np.float64]

NEVER = 1e-4  # probability of a token that nobody lists, in the eyes of what is learned
DEPTHS = 8  # depths that learn exponents of their own; deeper ones share the last
STEP, STEEP = 0.005, 8.0  # of the gradient, and its largest: a smaller one would cut what tables say of the unlikely
EVIDENCE = 4.0  # choices that a share's first guess counts for
MEMORY = 0.99  # of a share's evidence, per later choice that it is seen in
LOWEST_A, HIGHEST = 0.3, 1.5  # exponents stay in here
TRIAL = 64  # choices in each of which pooling is judged before it is trusted,
NEW = 512  # and in each of which it is judged, trusted or not: first weights say little of what it will come to
RECENT, RARE = 0.004, 0.016  # weight of the newest, and of one that is judged now and then
# Probability that pooling must add to the chosen tokens. Trees of 5 nodes get exp(1.4 gain) times as many tokens
# (docs/log.md), and pooling takes 3 % of a round: more than this is more tokens per second. Estimates waver by
# 0.02, so what has not paid yet must seem to bring twice as much.
WORTH, PROVEN = 0.03, 0.06
# Drafts of which one is pooled all the same, to be judged: where pooling promises something, and elsewhere. Most of
# what it takes is for learning.
OFTEN, SELDOM = 4, 16


@dataclass(slots=True)
class Weights:
    """What the pool has learned. Shared by all requests of a drafter."""

    # [DEPTHS, 4]: for each depth a, and b for tokens that the table knows hardly, somewhat, well.
    exponents: Array = field(default_factory=lambda: np.tile([0.9, 0.6, 0.6, 0.6], (DEPTHS, 1)))
    evidence: dict[Hashable, list[float]] = field(default_factory=dict)  # choices for the others and for the opinion
    gain: float = 0.0  # probability that the pool adds to the first lattice's of a chosen token
    choices: int = 0
    worth: bool = False  # whether pooling pays
    _matched: dict[Hashable, Array] = field(default_factory=dict)

    def matched(self, name: str) -> Array:
        """`[*KINDS, 2]`: the evidence of every kind of match in texts of that name, which changes as it is learned."""
        if name not in self._matched:
            pairs = [self.evidence.pop((name, *kind), _guessed(trust(kind[1]))) for kind in np.ndindex(*KINDS)]
            self._matched[name] = np.array(pairs).reshape(*KINDS, 2)
        return self._matched[name]

    def share(self, opinion: Opinion) -> float:
        """The opinion's share w in the mixture."""
        against, by = self._evidence(opinion)
        return float(by / (against + by))

    def _evidence(self, opinion: Opinion) -> MutableSequence[float] | Array:
        """Choices for the others and for the opinion."""
        if (matched := self._matched.get(opinion.kind[0])) is not None:
            return matched[opinion.kind[1:]]
        return self.evidence.setdefault(opinion.kind, _guessed(opinion.guess))

    def credit(self, opinion: Opinion, others: float, own: float) -> float:
        """A token was chosen that the others gave probability `others` and the opinion `own`; its share so far."""
        pair, share = self._evidence(opinion), self.share(opinion)
        by = share * own / (share * own + (1 - share) * max(others, NEVER))
        pair[0] = MEMORY * pair[0] + 1 - by
        pair[1] = MEMORY * pair[1] + by
        return share

    def move(self, depth: int, which: int, gradient: float) -> None:
        """An exponent, 0 for a, along the gradient of the log-probability of what was chosen."""
        row, lowest = self.exponents[min(depth, DEPTHS - 1)], 0.0 if which else LOWEST_A
        row[which] = min(max(float(row[which]) + STEP * min(max(gradient, -STEEP), STEEP), lowest), HIGHEST)

    def judge(self, pooled: float, alone: float) -> None:
        """A token was chosen that the pool gave probability `pooled` and the first lattice alone `alone`."""
        self.choices += 1
        step = max(RECENT if self.worth else RARE, 1 / self.choices)
        self.gain += step * (pooled - alone - self.gain)
        self.worth = not self.on_trial and self.gain > (WORTH if self.worth else PROVEN)

    @property
    def on_trial(self) -> bool:
        """Whether too little is known to say: first weights may do harm, so such a pool is judged and not followed."""
        return self.choices < TRIAL

    @property
    def every(self) -> int:
        """Drafts of which one is to be pooled."""
        if self.choices < NEW or self.worth:
            return 1
        return OFTEN if self.gain > WORTH / 2 else SELDOM


def known(seen: int) -> int:
    """Which of the exponents of s belongs to a token that was seen so often."""
    return 1 + (seen > 2) + (seen > 9)


def _guessed(share: float) -> list[float]:
    """Evidence of a share that nothing is known of yet."""
    return [EVIDENCE * (1 - share), EVIDENCE * share]
