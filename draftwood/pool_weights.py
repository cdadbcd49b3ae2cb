"""What a pool has learned from the tokens that the target chose: exponents and shares.

`native/judged.c` learns them in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableSequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwood.experts import KINDS, Opinion, trust

Array = NDArray[np.float64]

NEVER = 1e-4  # probability that learning assumes for a token that nobody lists
DEPTHS = 8  # depths that learn exponents of their own; deeper ones share the last
STEP, STEEP = 0.005, 8.0  # step and largest gradient: a smaller limit would cut what tables say of unlikely tokens
EVIDENCE = 4.0  # choices that a share's first guess counts for
LEAST = 0.1  # choices that an opinion always keeps, however long it was useless: a share of 0 could never grow again
MEMORY = 0.99  # share of the evidence that each later choice with this opinion leaves
LOWEST_A, HIGHEST = 0.3, 1.5  # exponents stay in here


@dataclass(slots=True)
class Weights:
    """What the pool has learned. Shared by all requests of a drafter."""

    # [DEPTHS, 4]: for each depth a, then b for tokens that the table hardly knows, knows somewhat, and knows well.
    exponents: Array = field(default_factory=lambda: np.tile([0.9, 0.6, 0.6, 0.6], (DEPTHS, 1)))
    evidence: dict[Hashable, list[float]] = field(default_factory=dict)  # choices for the others and for the opinion
    _matched: dict[Hashable, Array] = field(default_factory=dict)

    def matched(self, name: str) -> Array:
        """`[*KINDS, 2]`: the evidence of every kind of match in texts of that name. Learning changes it in place."""
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
        """Learn that a token was chosen to which the others gave probability `others` and the opinion `own`; returns
        the opinion's share before."""
        pair, share = self._evidence(opinion), self.share(opinion)
        by = share * own / (share * own + (1 - share) * max(others, NEVER))
        pair[0] = MEMORY * pair[0] + 1 - by
        pair[1] = max(MEMORY * pair[1] + by, LEAST)
        return share

    def move(self, depth: int, which: int, gradient: float) -> None:
        """Move an exponent (`which`: 0 for a) along the gradient of the log-probability of what was chosen."""
        row, lowest = self.exponents[min(depth, DEPTHS - 1)], 0.0 if which else LOWEST_A
        row[which] = min(max(float(row[which]) + STEP * min(max(gradient, -STEEP), STEEP), lowest), HIGHEST)


def known(seen: int) -> int:
    """The index of the exponent of s for a token that was seen so often."""
    return 1 + (seen > 2) + (seen > 9)


def _guessed(share: float) -> list[float]:
    """Evidence of a share that nothing is known of yet."""
    return [EVIDENCE * (1 - share), EVIDENCE * share]
