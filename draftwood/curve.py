"""Seconds over width, learned: a prior times observed over expected at a few widths. See docs/latency-model.md."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Bools

Array = NDArray[np.float64]

# Widths (tokens of one forward) at which something is learned. In between, seconds are linear in width.
WIDTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64)
NEARNESS = 1 / (1 + np.log2(WIDTHS[:, None] / WIDTHS) ** 2)  # what one width says about another
PRIOR_WEIGHT = 0.25  # the prior counts as this many observations where only other widths have been seen
ENOUGH = 10.0  # observations after which a width is as good a witness for its neighbours as it will be
WIDE = 8  # tokens: from here on a doubling says more of arithmetic than of luck

GAIN = 0.12  # weight of a new observation in the long run
CALM = 0.2  # the same for the spread
DOUBT = 0.3  # spread of log-ratios that is expected before any is known
LEAST_SPREAD = 0.01
HEAD_START = 4.0  # observations that a level learned elsewhere counts as
LATELY = 64  # observations of the curve that count as recent, those before less and less
CURRENT = 4.0  # of them that a width must have had, or it may have changed
LIMIT = 3.0  # spreads: an observation further off moves a level no more than one at this distance


@dataclass(slots=True)
class Level:
    """A running log-ratio: early observations move it much, a late outlier barely."""

    value: float = 0.0
    seen: float = 0.0  # observations; parts of one where it is shared between two levels
    spread: float = inf  # typical distance of an observation; infinite before the first
    recent: float = 0.0  # the same as `seen`, forgetting those that were long ago

    def move(self, error: float, step: float = 1.0, weight: float = 1.0) -> None:
        """An observation at `value + error`; `step` scales the move, `weight` how much it counts as seen."""
        error = min(max(error, -LIMIT * self.spread), LIMIT * self.spread)
        self.value += step * max(1 / (1 + self.seen / 2), GAIN) * error
        if self.spread == inf:
            self.spread = DOUBT
        # A normal error is 0.8 deviations on average. Lasting errors widen the spread until believed.
        self.spread += CALM * weight * (abs(error) / 0.8 - self.spread)
        self.spread = max(self.spread, LEAST_SPREAD)
        self.seen += weight

    def again(self) -> Level:
        """A head start for what is like it and not the same: few observations, and doubt."""
        return Level(self.value, min(self.seen, HEAD_START), DOUBT) if self.seen else Level()

    def to_json(self) -> list[float] | None:
        return [self.value, self.seen] if self.seen else None

    @classmethod
    def of_json(cls, data: object) -> Level:
        """Raises ValueError for anything that `to_json` does not give."""
        if data is None:
            return cls()
        numbers = data if isinstance(data, list) else []
        if len(numbers) != 2 or not all(isinstance(x, (int, float)) and abs(x) < 1e6 for x in numbers):
            raise ValueError("a level is a value and how often it was seen")
        return cls(float(numbers[0]), float(numbers[1])).again()


class Curve:
    """Seconds over width: a prior times what was learned at each of `WIDTHS`."""

    def __init__(self, like: Curve | None = None, rises: bool = True) -> None:
        """`like` is where to start from: its values, believed as little as a profile of another day. `rises`: widths
        beyond those known are believed to take more, if they do in one that is `like` it."""
        self._rises: bool = rises if like is None else like._rises
        self.levels: list[Level] = [level.again() for level in like.levels] if like else [Level() for _ in WIDTHS]
        self._last: tuple[Array, Array] | None = None  # a prior and its `seconds`, until something is learned

    def seconds(self, prior: Array) -> Array:
        """`[len(WIDTHS)]` seconds at `WIDTHS`, given the prior's.

        A width that was run keeps what was learned there, cliffs included. One that was not takes its
        neighbours' ratio, and is not believed to be cheaper than a narrower one that was run: a prior too
        hopeful about wide forwards would lure a policy there. Nor is one that was seldom run, or not lately, believed
        to be dearer than a wider one that is well known: what it learned in a bad moment would keep a policy from
        running it again.
        """
        if self._last is None or self._last[0] is not prior:
            self._last = prior, self._seconds(prior)
        return self._last[1]

    def _seconds(self, prior: Array) -> Array:
        seen = np.array([level.seen for level in self.levels])
        value = np.array([level.value for level in self.levels])
        witness = np.minimum(seen, ENOUGH)
        neighbours = NEARNESS @ (witness * value) / (NEARNESS @ witness + PRIOR_WEIGHT)
        run = prior * np.exp(value)
        least = np.maximum.accumulate(np.where(seen > 0, run, 0.0))
        seconds = np.where(seen > 0, run, np.maximum(prior * np.exp(neighbours), least))
        sure = (seen >= ENOUGH) & np.array([level.recent >= CURRENT for level in self.levels])
        most: Array = np.minimum.accumulate(np.where(sure, run, inf)[::-1])[::-1]
        capped = np.where(sure, seconds, np.minimum(seconds, most))
        return _rising(capped, seen >= HEAD_START) if self._rises else capped

    def familiar(self, width: int) -> float:
        """How well the less known of the two widths around `width` is known, from 0 to 1."""
        left = int(np.searchsorted(WIDTHS, width, side="right")) - 1
        right = min(int(np.searchsorted(WIDTHS, width)), len(WIDTHS) - 1)
        return min(self.levels[left].seen / ENOUGH, self.levels[right].seen / ENOUGH, 1.0)

    def learn(self, width: int, seconds: float, prior: Array) -> float:
        """One observation moves the widths on both sides of it, each by its nearness.

        Returns the log of observed over expected.
        """
        left = min(int(np.searchsorted(WIDTHS, width, side="right")) - 1, len(WIDTHS) - 2)
        right_part = float((width - WIDTHS[left]) / (WIDTHS[left + 1] - WIDTHS[left]))
        now = self.seconds(prior)
        error = log(seconds / float(np.interp(width, WIDTHS, now)))
        self._last = None
        fresh = all(level.seen == 0 for level in self.levels)
        parts = {left: 1 - right_part, left + 1: right_part}
        # Normalised least mean squares: at a gain of 1 the curve would now pass through the observation.
        norm = sum(part**2 for part in parts.values())
        for level in self.levels:
            level.recent *= 1 - 1 / LATELY
        for knot, part in parts.items():
            level = self.levels[knot]
            if part and not level.seen and not fresh:  # start at what the neighbours say, and doubt the rest
                level.value, level.spread = log(now[knot] / prior[knot]), DOUBT
            if part:
                level.move(error, step=part / norm, weight=part)
                level.recent += part
        return error

    def to_json(self) -> list[list[float] | None]:
        return [level.to_json() for level in self.levels]

    @classmethod
    def of_json(cls, data: object, rises: bool = True) -> Curve:
        """Raises ValueError for anything that `to_json` does not give."""
        if not isinstance(data, list) or len(data) != len(WIDTHS):
            raise ValueError("a curve has a level for each width")
        curve = cls(rises=rises)
        curve.levels = [Level.of_json(entry) for entry in data]
        return curve


def _rising(seconds: Array, known: Bools) -> Array:
    """The same, where widths beyond the widest `known` one take no less than if they rose as over the last doubling."""
    wide = np.flatnonzero(known & (WIDTHS >= WIDE))
    last = wide[-1] if len(wide) else 0
    narrower = np.flatnonzero(known & (WIDTHS[last] / WIDTHS >= 2))
    if not len(narrower):
        return seconds
    first = narrower[-1]
    slope = max(seconds[last] - seconds[first], 0.0) / (WIDTHS[last] - WIDTHS[first])
    beyond = np.maximum(WIDTHS - WIDTHS[last], 0.0)
    return np.where(beyond > 0, np.maximum(seconds, seconds[last] + slope * beyond), seconds)
