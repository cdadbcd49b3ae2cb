"""What drafting has gained and cost lately against plain decoding, which limits what optimism may still cost.

An upper confidence bound goes on with a drafter that pays too little for as long as that could be bad luck, and
the doubt about the latest rounds never ends. So, as in conservative bandits (Wu et al., arXiv 1602.04282), optimism is
allowed only while all of it has cost no more than a share of the time. Where drafting has saved much, to draft too
often costs a part of that at most, while to rest too often costs what drafting would have gained.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.trace import Round

SHARE = 0.015  # share of the time that optimistic drafting may lose
RICH = 0.1  # share of the time saved from which on optimism counts twice
ADVANCE = 100.0  # plain steps that count as spent before the first round, because trials come first
AFRESH = 1.0  # plain steps that it may lose in a new text whatever was lost before: the text may be of another kind
KEPT = 1 - 1 / 512  # share of what was spent and saved that each round leaves
# A round counts as at most so many times what was expected of it: neither a pause of the machine nor what the first
# draft of a long text reads is a loss.
ODD = 1.25


@dataclass(slots=True)
class Ledger:
    """An account of the rounds of one request at a time."""

    spent: float = 0.0  # in all rounds, in plain steps
    saved: float = 0.0  # in drafted rounds, in plain steps; below 0 is lost

    @property
    def wealth(self) -> float:
        """The share of the time that drafting has saved lately."""
        return max(self.saved, 0.0) / (self.spent + ADVANCE)

    @property
    def affords(self) -> float:
        """The factor by which optimism counts: 0 if too much was lost, else 1, or up to 2 where much was saved."""
        return 1 + min(self.wealth / RICH, 1.0) if self.saved >= -self._room else 0.0

    @property
    def _room(self) -> float:
        return SHARE * (self.spent + ADVANCE)

    def turn(self) -> None:
        """Begin another text."""
        self.saved = max(self.saved, AFRESH - self._room)

    def enter(self, round: Round, plain_s: float) -> None:
        """Enter a round; a plain step would have taken `plain_s` then."""
        most = ODD * round.predicted_s if round.predicted else round.total_s
        steps = min(round.total_s, most) / plain_s
        self.spent = KEPT * self.spent + steps
        self.saved *= KEPT
        if round.drafted:
            self.saved += 1 + round.accepted - steps
