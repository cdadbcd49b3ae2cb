"""How predictable a text is just now, by the target's own confidence in what it writes.

The higher it is, the more a draft gains. Rounds without a draft measure it, too, so a text that is not drafted for
shows by itself when to try another draft. Measured in docs/log.md.
"""

from __future__ import annotations

from math import isfinite, isnan, nan

POWER = 1  # power of confidence that accepted nodes are proportional to
MEMORY = 1 - 1 / 16  # share of a round's weight that each later round of the text leaves
SLOW = 16.0  # weight, in rounds, of the usual confidence against that of this text
MOST = 2.0  # confidence counts as at most so many times the usual, and as at least one in so many


class Predictability:
    """The target's confidence in one text at a time."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def turn(self) -> None:
        """Begin another text."""
        self._sum = self._weight = 0.0

    def see(self, confidence: float | None) -> None:
        """Take in the confidence of a round (`Round.confidence`); None says nothing."""
        if confidence is not None and isfinite(confidence):  # a target may write what is not a number
            self._sum = MEMORY * self._sum + confidence
            self._weight = MEMORY * self._weight + 1

    def now(self, usual: float) -> float:
        """The recent confidence, which starts from the `usual` one (NaN: unknown) and follows that of this text."""
        if isnan(usual):
            return self._sum / self._weight if self._weight else nan
        return (SLOW * usual + self._sum) / (SLOW + self._weight)

    def factor(self, usual: float) -> float:
        """How many times as much a draft may be expected to gain now as drafts did where confidence was `usual`."""
        if isnan(usual):
            return 1.0
        return min(max(self.now(usual) / usual, 1 / MOST), MOST) ** POWER
