"""What drafting has brought and cost lately, against plain decoding: how much hope may still cost.

An upper confidence bound goes on with a drafter that pays too little for as long as that could be bad luck, and
the doubt about the latest rounds never ends. As in conservative bandits (Wu et al., arXiv 1602.04282) it may do so only
while all of it together has cost no more than a share of the time. Where drafting has saved much, going on or looking
again too often costs a part of that at most, while a pause too many costs what drafting would have brought.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.trace import Round

SHARE = 0.015  # of the time, that drafting in hope may lose
RICH = 0.1  # of the time saved, from which on there is twice the hope
ADVANCE = 100.0  # plain steps, counted as spent before the first round: trials come first
AFRESH = 1.0  # plain steps that it may lose in a text whatever was lost before: this one may be of another kind
KEPT = 1 - 1 / 512  # of what was spent and saved, per round
# Times what was expected of it is the most that a round counts as: a pause of the machine is no loss, nor what the
# first draft of a long text reads.
ODD = 1.25


@dataclass(slots=True)
class Ledger:
    """Of the rounds of one request at a time."""

    spent: float = 0.0  # in all rounds, in plain steps
    saved: float = 0.0  # in drafted rounds, in plain steps; below 0 is lost

    @property
    def wealth(self) -> float:
        """The share of the time that drafting has saved lately."""
        return max(self.saved, 0.0) / (self.spent + ADVANCE)

    @property
    def affords(self) -> float:
        """How much of what doubt leaves may be hoped for: none, all of it, or up to twice that."""
        return 1 + min(self.wealth / RICH, 1.0) if self.saved >= -self._room else 0.0

    @property
    def _room(self) -> float:
        return SHARE * (self.spent + ADVANCE)

    def turn(self) -> None:
        """To another text."""
        self.saved = max(self.saved, AFRESH - self._room)

    def enter(self, round: Round, plain_s: float) -> None:
        """A round, and what a plain step would have taken then."""
        most = ODD * round.predicted_s if round.predicted else round.total_s
        steps = min(round.total_s, most) / plain_s
        self.spent = KEPT * self.spent + steps
        self.saved *= KEPT
        if round.drafted:
            self.saved += 1 + round.accepted - steps
