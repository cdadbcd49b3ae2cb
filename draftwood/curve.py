"""Seconds over width, learned: a prior times observed over expected at a few widths. See docs/latency-model.md.

The logarithms of these ratios are taken for a Gaussian random walk, which a Kalman filter follows. Widths near each
other are off by similar ratios, so an observation of one width also corrects others, most of all the least known ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Bools

Array = NDArray[np.float64]

# Widths (tokens of one forward) at which something is learned. In between, seconds are linear in width.
# All widths up to 8 are among them: kernels have steps there, and policies choose between neighbours.
WIDTHS = np.array([*range(1, 9), 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64)
WIDE = 8  # tokens: from here on the rise over a doubling is due to arithmetic rather than to luck

GAIN = 0.12  # weight of a new observation in the long run
CALM = 0.2  # the same for the spread
DOUBT = 0.3  # spread of log-ratios that is expected before any is known
LEAST_SPREAD = 0.01
HEAD_START = 4.0  # observations, at most, that a level learned elsewhere counts as
LIMIT = 3.0  # spreads: an observation further off counts as one at this distance
LONG = 1 / 64  # weight of a new point of a slope in the long run: it takes many points to tell a slope from noise
NARROW = 0.25  # added to the variance of x: where all points have the same x there is no slope to see

# Parts of the covariance of the log-ratios at WIDTHS, in variances of one observation. BROAD is shared by widths within
# some doublings, ALIKE by neighbours, OWN by none; a plain number is shared by all.
APART = np.log2(WIDTHS[:, None] / WIDTHS)  # in doublings
BROAD, ALIKE, OWN = 1 / (1 + (APART / 4) ** 2), 1 / (1 + APART**2), np.eye(len(WIDTHS))
SURE = 0.25  # variance below which a width is well known: wider ones then say nothing about it
RUN = 0.5  # forwards: a width that was seen this much was run itself, not just near one that was
WORTH_A_TRY = 16  # tokens: up to here a width is tried because its price is not known; a wider one is tried only
LITTLE = 1.2  # if it is believed to cost at most so many times the widest one that was run


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How seconds over width may differ from a prior, as covariances like those above."""

    unknown: Array  # of a curve that starts at the prior
    inherited: Array  # of a curve that starts like another
    untried: float  # added for a width that the other curve never ran: its first forwards say what it takes
    drift: Array  # added from one observation to the next
    rises: bool  # widths beyond those known are believed to take more

    def inheriting(self, seen: Array) -> Array:
        """The covariance of a curve that starts like one that has `seen` so much of each width."""
        return self.inherited + self.untried * np.diag(seen < RUN)


FORWARD = Kind(
    # The first round says how far off the prior is, others whether it rises enough. A width's own part is smaller than
    # the variance of one observation: else it would at once be noise, which a width that seldom runs would keep.
    unknown=1e6 + 100 * BROAD + 5 * ALIKE + 0.1 * OWN,
    inherited=1 + 0.05 * ALIKE + 0.01 * OWN,
    untried=30.0,
    # A machine is faster or slower for a while at all widths (the pace), or at those that wait for memory (`learn`'s
    # `mood`). Apart from that ratios hardly move, and policies rely on them: a faster drift would follow such spells.
    drift=5e-4 * (0.75 * ALIKE + 0.25 * OWN),
    rises=True,
)
# The host's work for a tree has no steps, and it varies much: widths seem to differ mostly because they ran at other
# times, the first ones in cold caches. When such differences were believed, a policy stayed with the width that was in
# use when the host got faster.
HOST = Kind(1e6 + BROAD, 1 + 0.05 * BROAD, untried=0.0, drift=0.01 + 1e-4 * BROAD, rises=False)


@dataclass(slots=True)
class Level:
    """A running log-ratio: early observations move it much, a late outlier barely."""

    value: float = 0.0
    seen: float = 0.0  # observations
    spread: float = inf  # typical distance of an observation; infinite before the first

    def move(self, error: float) -> None:
        """An observation at `value + error`."""
        error = clipped(error, self.spread)
        self.value += max(1 / (1 + self.seen / 2), GAIN) * error
        self.spread = widened(DOUBT if self.spread == inf else self.spread, error)
        self.seen += 1

    def again(self) -> Level:
        """A head start for something similar: the same value, few observations and much doubt."""
        return Level(self.value, min(self.seen, HEAD_START), DOUBT) if self.seen else Level()

    def to_json(self) -> list[float] | None:
        return [self.value, min(self.seen, HEAD_START)] if self.seen else None

    @classmethod
    def of_json(cls, data: object) -> Level:
        """Raises ValueError for anything that `to_json` does not give."""
        if data is None:
            return cls()
        numbers = data if isinstance(data, list) else []
        if len(numbers) != 2 or not all(isinstance(x, (int, float)) and abs(x) < 1e6 for x in numbers):
            raise ValueError("a level is a value and how often it was seen")
        return cls(float(numbers[0]), float(numbers[1])).again()


@dataclass(slots=True)
class Slope:
    """By how much y rises with x: a line through points, the latest of which count most."""

    seen: float = 0.0  # points
    x: float = 0.0  # means of x and y
    y: float = 0.0
    xx: float = 0.0  # variance of x, and its covariance with y
    xy: float = 0.0

    @property
    def value(self) -> float:
        return max(self.xy / (self.xx + NARROW), 0.0)

    def move(self, x: float, y: float) -> None:
        """Add a point. A y of more than twice the mean counts as twice the mean: the machine paused."""
        y = min(y, 2 * self.y) if self.seen else y
        self.seen += 1
        share = max(1 / self.seen, LONG)
        dx, dy = x - self.x, y - self.y
        self.x, self.y = self.x + share * dx, self.y + share * dy
        self.xx, self.xy = (1 - share) * (self.xx + share * dx * dx), (1 - share) * (self.xy + share * dx * dy)

    def again(self) -> Slope:
        """A head start for something similar."""
        return Slope(min(self.seen, HEAD_START), self.x, self.y, self.xx, self.xy)

    def to_json(self) -> list[float]:
        return [min(self.seen, HEAD_START), self.x, self.y, self.xx, self.xy]

    @classmethod
    def of_json(cls, data: object) -> Slope:
        """Raises ValueError for anything that `to_json` does not give."""
        found = np.array(data, np.float64)
        if found.shape != (5,) or not (np.abs(found) < 1e6).all():
            raise ValueError("a slope is how often it was seen, two means, a variance and a covariance")
        return cls(*map(float, found)).again()


def clipped(error: float, spread: float) -> float:
    return min(max(error, -LIMIT * spread), LIMIT * spread)


def widened(spread: float, error: float) -> float:
    """The spread after an observation that far off: lasting errors widen it until they are believed."""
    return max(spread + CALM * (abs(error) / 0.8 - spread), LEAST_SPREAD)  # a normal error is 0.8 deviations on average


class Curve:
    """Seconds over width: a prior times what was learned at each of `WIDTHS`."""

    def __init__(self, like: Curve | None = None, kind: Kind = FORWARD) -> None:
        """The curve starts with the kind and values of `like`, which it believes as little as a profile of another
        day."""
        self._kind: Kind = kind if like is None else like._kind
        self._value: Array = np.zeros(len(WIDTHS)) if like is None else like._value  # log of observed over expected
        # Their covariance, in variances of one observation.
        self._doubt: Array = self._kind.unknown if like is None else self._kind.inheriting(like._seen)
        self._seen: Array = np.zeros(len(WIDTHS)) if like is None else np.minimum(like._seen, HEAD_START)
        self._spread = DOUBT  # of an observation: the root of its variance
        self._last: tuple[Array, Array] | None = None  # the latest prior and its `seconds`, until something is learned

    def seconds(self, prior: Array) -> Array:
        """`[len(WIDTHS)]` seconds at `WIDTHS`, given the prior's.

        - A width that was not run is not believed to be cheaper than a narrower one that was: a prior too optimistic
          about wide forwards would lure a policy there.
        - A width of which little is known, or was known long ago, is not believed to take longer than a wider one that
          is well known: what it learned in a bad moment would keep a policy from running it.
        - Beyond the known widths seconds go on rising, except where something was run.
        - The next width beyond all that were run is believed to take no more than those until it is run: a policy that
          chooses by price would never test what a prior or a slope says of it.
        """
        if self._last is None or self._last[0] is not prior:
            self._last = prior, self._seconds(prior)
        return self._last[1]

    def _seconds(self, prior: Array) -> Array:
        seconds = prior * np.exp(self._value)
        least = np.maximum.accumulate(np.where(self._seen > 0, seconds, 0.0))
        seconds = np.where(self._seen > 0, seconds, np.maximum(seconds, least))
        sure = self._doubt.diagonal() < SURE
        most: Array = np.minimum.accumulate(np.where(sure, seconds, inf)[::-1])[::-1]
        seconds = np.where(sure, seconds, np.minimum(seconds, most))
        return self._beyond(seconds, least) if self._kind.rises else seconds

    def _beyond(self, seconds: Array, least: Array) -> Array:
        """The seconds, raised for wide forwards that were not run, except for the next one, which is tried.

        A width that was run is believed as measured. If it had to follow the rise until it is well known, a policy
        would leave it after one try however cheap it was, and it would never become well known.
        """
        run = self._seen >= RUN
        seconds = np.where(run, seconds, _rising(seconds, self._seen >= HEAD_START))
        untried = _following(run, seconds)
        seconds[untried] = np.minimum(seconds[untried], least[untried])
        return seconds

    def learn(
        self, width: int, seconds: float, prior: Array, times: int = 1, mood: Array | float = 0.0
    ) -> tuple[float, float]:
        """Learn one observation, or what several of one width (`times`) have in common. Each adds `mood` and the kind's
        drift to the covariance. Returns the log of observed over expected, and the share of it, from 0 to 1, that the
        curve's own doubt does not explain."""
        parts, now = parts_of(width), self.seconds(prior)
        expected = seconds_at(width, now)
        error = log(seconds / expected)
        doubt = self._doubt + times * (self._kind.drift + mood)
        slope = parts * now / (parts @ now)  # derivative of the expected log by each log-ratio
        pull = doubt @ slope
        own = 1 / times
        variance = own + float(slope @ pull)  # of the error: the observation's and the curve's
        scale = sqrt(variance)
        moved = clipped(error / scale, self._spread)
        share = moved * scale / error if error else 1.0  # of the error that is believed: the rest teaches nothing
        believed = np.where(parts > 0, np.log(now / prior), self._value)
        self._value = believed + pull * moved / scale
        self._doubt = doubt - share * np.outer(pull, pull) / variance
        self._spread = widened(self._spread, moved)
        self._seen = self._seen + times * parts
        self._last = None
        return error, max(1 + own - variance, 0.0)

    def to_json(self) -> list[list[float]]:
        return np.stack([self._value, np.minimum(self._seen, HEAD_START)], 1).tolist()

    @classmethod
    def of_json(cls, data: object, kind: Kind = FORWARD) -> Curve:
        """Raises ValueError for anything that `to_json` does not give."""
        found = np.array(data, np.float64)
        if found.shape != (len(WIDTHS), 2) or not (np.abs(found) < 1e6).all():
            raise ValueError("a curve has a value for each width, and how often it was seen")
        curve = cls(kind=kind)
        curve._value, curve._seen = found.T
        return cls(curve)


def extended(x: Array, knots: Array, values: Array) -> Array:
    """Linear interpolation that goes on beyond the last knot with the last slope, but never falls there."""
    inside = np.interp(x, knots, values)
    if len(knots) == 1:
        return inside
    slope = max(values[-1] - values[-2], 0.0) / (knots[-1] - knots[-2])
    beyond: Array = inside + slope * np.maximum(x - knots[-1], 0.0)
    return beyond


def seconds_at(width: int, seconds: Array) -> float:
    """Seconds of a forward of `width` tokens, given those at `WIDTHS`."""
    if width > WIDTHS[-1]:
        return float(extended(np.array([float(width)]), WIDTHS, seconds)[0])
    left, right = between(width)  # a product with `parts_of` would take as long as all the rest of a prediction
    return float(seconds[left] + right * (seconds[left + 1] - seconds[left]))


@functools.cache
def between(width: int) -> tuple[int, float]:
    """The index of the narrower of the two `WIDTHS` around `width`, and the wider one's share of a forward."""
    place = float(np.interp(width, WIDTHS, np.arange(len(WIDTHS))))  # beyond all of them it counts as the last
    left = min(int(place), len(WIDTHS) - 2)
    return left, place - left


@functools.cache
def parts_of(width: int) -> Array:
    """`[len(WIDTHS)]` shares of a forward of `width` tokens: of the two widths around it, 0 for the others."""
    left, right = between(width)
    parts = np.zeros(len(WIDTHS))
    parts[left : left + 2] = 1 - right, right
    return parts


def _following(run: Bools, seconds: Array) -> slice:
    """The next of `WIDTHS` beyond all that were run, if any was run and it is worth a try: one index or none."""
    places = np.flatnonzero(run)
    if not len(places) or places[-1] + 1 == len(WIDTHS):
        return slice(0)
    widest, following = places[-1], places[-1] + 1
    worth = WIDTHS[following] <= WORTH_A_TRY or seconds[following] <= LITTLE * seconds[widest]
    return slice(following, following + worth)


def _rising(seconds: Array, known: Bools) -> Array:
    """The seconds, where widths beyond the widest `known` one take at least what the last doubling's rise gives."""
    wide = np.flatnonzero(known & (WIDTHS >= WIDE))
    last = wide[-1] if len(wide) else 0
    narrower = np.flatnonzero(known & (WIDTHS[last] / WIDTHS >= 2))
    if not len(narrower):
        return seconds
    first = narrower[-1]
    slope = max(seconds[last] - seconds[first], 0.0) / (WIDTHS[last] - WIDTHS[first])
    beyond = np.maximum(WIDTHS - WIDTHS[last], 0.0)
    return np.where(beyond > 0, np.maximum(seconds, seconds[last] + slope * beyond), seconds)
