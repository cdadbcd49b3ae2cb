"""Whether pooling pays: the probability that it adds to what the target chooses.

That is a matter of the text. Where what was just written occurred before, and in answers that copy, a pool doubles
what is accepted; elsewhere it costs its time. So it is judged apart by how many tokens before a draft's root occurred
earlier, and by what it brought in the request's own text. In numbers: docs/drafters.md.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

LONGER = (3, 6)  # tokens before the root that occurred earlier, from which on a draft is of the next kind
GUESSES = (0.0, 0.05, 0.2)  # of each kind's gain,
GUESSED = 16  # and choices that they count for
RECENT = 0.01  # weight of a kind's newest choice
LATEST, DOUBT = 32, 8  # choices of its own that a text's difference is of, and that it is doubted for
# Trees of 9 nodes get exp(2 gain) times as many tokens (docs/log.md), and pooling takes 3 % of a round.
PAYS = 0.015
# Choices in each of which pooling is judged whether it pays or not, at first and in each text; after these, drafts of
# which one is. Most of what pooling takes is for learning.
NEW, FIRST, SELDOM = 512, 16, 16


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
    """Drafts behind about as long a match, of all requests."""

    gain: Gain
    waiting: int = 0  # drafts since one was judged


@dataclass(slots=True)
class Gains:
    """What pooling brought so far. Shared by all requests of a drafter."""

    kinds: list[Kind] = field(default_factory=lambda: [Kind(Gain(guess, GUESSED)) for guess in GUESSES])

    @property
    def choices(self) -> int:
        """Of all kinds, guesses not counted."""
        return sum(kind.gain.choices - GUESSED for kind in self.kinds)

    def case(self, match: int, own: Gain) -> Case:
        """That of a draft before whose root `match` tokens occurred earlier, in a text whose difference is `own`."""
        return Case(self, self.kinds[bisect_right(LONGER, match)], own)


@dataclass(frozen=True, slots=True)
class Case:
    """One draft, which may be pooled."""

    gains: Gains
    kind: Kind
    own: Gain

    @property
    def pays(self) -> bool:
        """Whether the pool should be followed."""
        trusted = self.own.choices / (self.own.choices + DOUBT)
        return self.kind.gain.mean + trusted * self.own.mean > PAYS

    def due(self) -> bool:
        """Whether there should be a pool, be it only to be judged. Counts the draft."""
        self.kind.waiting += 1
        new = self.gains.choices < NEW or self.own.choices < FIRST
        due = new or self.pays or self.kind.waiting >= SELDOM
        self.kind.waiting = 0 if due else self.kind.waiting
        return due

    def judge(self, pooled: float, alone: float) -> None:
        """A token was chosen that the pool gave probability `pooled` and the first lattice alone `alone`."""
        self.own.add(pooled - alone - self.kind.gain.mean, 1 / LATEST)
        self.kind.gain.add(pooled - alone, RECENT)
