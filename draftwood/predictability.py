"""How predictable a text is just now, by the target's own confidence in what it writes.

What a draft brings rises with it, and rounds that draft nothing tell it, too: a text that is not drafted for says by
itself when it is worth another look. Measured in docs/log.md.
"""

from __future__ import annotations

from math import isfinite, isnan, nan

POWER = 1  # of confidence, that accepted nodes follow
MEMORY = 1 - 1 / 16  # of a round's weight, per later round of the text
SLOW = 16.0  # rounds that what is usual counts as, beside those of this text
MOST = 2.0  # times what is usual that confidence counts as, and one in so many the least


class Predictability:
    """Of one text at a time."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def turn(self) -> None:
        """To another text."""
        self._sum = self._weight = 0.0

    def see(self, confidence: float | None) -> None:
        """A round's, see `Round.confidence`; None says nothing."""
        if confidence is not None and isfinite(confidence):  # a target may write what is not a number
            self._sum = MEMORY * self._sum + confidence
            self._weight = MEMORY * self._weight + 1

    def now(self, usual: float) -> float:
        """The confidence of late; `usual`, which may be NaN, for as long as nothing was seen of this text."""
        if isnan(usual):
            return self._sum / self._weight if self._weight else nan
        return (SLOW * usual + self._sum) / (SLOW + self._weight)

    def factor(self, usual: float) -> float:
        """Times what drafts brought where confidence was `usual` that one may be expected to bring now."""
        if isnan(usual):
            return 1.0
        return min(max(self.now(usual) / usual, 1 / MOST), MOST) ** POWER
