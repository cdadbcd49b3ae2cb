"""Seconds over width, learned: a prior times observed over expected at a few widths. See docs/latency-model.md.

The logarithms of these ratios are a Gaussian random walk that a Kalman filter follows. Widths near each other are off
alike, so what is learned of one says something about others, about the less known ones most.
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
# Each one up to 8: kernels step there, and policies choose between neighbours.
WIDTHS = np.array([*range(1, 9), 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64)
WIDE = 8  # tokens: from here on a doubling says more of arithmetic than of luck

GAIN = 0.12  # weight of a new observation in the long run
CALM = 0.2  # the same for the spread
DOUBT = 0.3  # spread of log-ratios that is expected before any is known
LEAST_SPREAD = 0.01
HEAD_START = 4.0  # observations that a level learned elsewhere counts as
LIMIT = 3.0  # spreads: an observation further off moves nothing more than one at this distance
LONG = 1 / 64  # weight of a new point of a slope in the long run: it takes many to tell one from noise
NARROW = 0.25  # variance of places from which on a slope is believed: where all are alike there is none to see

# Variances of the log-ratios at WIDTHS, in those of one observation: what all of them share, what those within some
# doublings do, what neighbours do, own.
APART = np.log2(WIDTHS[:, None] / WIDTHS)  # in doublings
BROAD, ALIKE, OWN = 1 / (1 + (APART / 4) ** 2), 1 / (1 + APART**2), np.eye(len(WIDTHS))
SURE = 0.25  # a width of less variance is known better than by what wider ones say
RUN = 0.5  # of a forward: a width that has so much of one was run itself, not just a neighbour of what was
WORTH_A_TRY = 16  # tokens, at most, of a width that is tried because its price is not known: wider ones cost too much,
LITTLE = 1.2  # except where it is believed to cost little: at most so many times the widest's


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How seconds over width may differ from a prior, in variances as above."""

    unknown: Array  # of a curve that starts at the prior
    inherited: Array  # of one that starts like another
    untried: float  # besides, of a width that the other one never ran: its first forwards say what it takes
    drift: Array  # from one observation to the next
    rises: bool  # widths beyond those known are believed to take more

    def inheriting(self, seen: Array) -> Array:
        """Of a curve that starts like one that has `seen` so much of each width."""
        return self.inherited + self.untried * np.diag(seen < RUN)


FORWARD = Kind(
    # The first round says how far off the prior is, others whether it rises enough. What a width is off by itself is
    # less than one observation is: at once it would be noise, and a width that seldom runs would be left with that.
    unknown=1e6 + 100 * BROAD + 5 * ALIKE + 0.1 * OWN,
    inherited=1 + 0.05 * ALIKE + 0.01 * OWN,
    untried=30.0,
    # A machine's moods come and go for all widths (the pace), or for those that wait for memory (`learn`'s `mood`).
    # Else ratios hardly move, and a policy lives by these: what drifted faster would follow the moods.
    drift=5e-4 * (0.75 * ALIKE + 0.25 * OWN),
    rises=True,
)
# What the host does for a tree has no steps, and it varies much: what widths seem to differ by is mostly when they ran,
# at first in cold caches. Where that was believed, a policy stayed with the width that was in use when it got quicker.
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
        """A head start for what is like it and not the same: few observations, and doubt."""
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
    """By how much one number rises with another: a line through points, the latest of which count most."""

    seen: float = 0.0  # points
    x: float = 0.0  # means,
    y: float = 0.0
    xx: float = 0.0  # the variance of one and the covariance of both
    xy: float = 0.0

    @property
    def value(self) -> float:
        return max(self.xy / (self.xx + NARROW), 0.0)

    def move(self, x: float, y: float) -> None:
        """A point. One far above the others counts as twice their mean: the machine paused."""
        y = min(y, 2 * self.y) if self.seen else y
        self.seen += 1
        share = max(1 / self.seen, LONG)
        dx, dy = x - self.x, y - self.y
        self.x, self.y = self.x + share * dx, self.y + share * dy
        self.xx, self.xy = (1 - share) * (self.xx + share * dx * dx), (1 - share) * (self.xy + share * dx * dy)

    def again(self) -> Slope:
        """A head start for what is like it and not the same."""
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
    """The spread behind an observation that far off: lasting errors widen it until they are believed."""
    return max(spread + CALM * (abs(error) / 0.8 - spread), LEAST_SPREAD)  # a normal error is 0.8 deviations on average


class Curve:
    """Seconds over width: a prior times what was learned at each of `WIDTHS`."""

    def __init__(self, like: Curve | None = None, kind: Kind = FORWARD) -> None:
        """`like` is where to start from: its kind and its values, believed as little as a profile of another day."""
        self._kind: Kind = kind if like is None else like._kind
        self._value: Array = np.zeros(len(WIDTHS)) if like is None else like._value  # log of observed over expected
        # Their covariance, in variances of one observation.
        self._doubt: Array = self._kind.unknown if like is None else self._kind.inheriting(like._seen)
        self._seen: Array = np.zeros(len(WIDTHS)) if like is None else np.minimum(like._seen, HEAD_START)
        self._spread = DOUBT  # of an observation: the root of its variance
        self._last: tuple[Array, Array] | None = None  # a prior and its `seconds`, until something is learned

    def seconds(self, prior: Array) -> Array:
        """`[len(WIDTHS)]` seconds at `WIDTHS`, given the prior's.

        A width that was not run is not believed to be cheaper than a narrower one that was: a prior too hopeful about
        wide forwards would lure a policy there. Nor is one of which little is known, or was long ago, believed to be
        dearer than a wider one that is well known: what it learned in a bad moment would keep a policy from running it.
        Beyond the widths known, seconds go on to rise, except where something was run. The next width beyond all that
        were run is believed to take no more than those, until it is run: what a prior or a slope says of it would never
        be put to the test by a policy that chooses by price.
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
        """The same, wary of wide forwards that were not run, but for the next one, which gets its try.

        One that was run is believed as measured: held to the rise until it is well known, it would be left after its
        try however cheap it was, and never become well known.
        """
        run = self._seen >= RUN
        seconds = np.where(run, seconds, _rising(seconds, self._seen >= HEAD_START))
        untried = _following(run, seconds)
        seconds[untried] = np.minimum(seconds[untried], least[untried])
        return seconds

    def learn(
        self, width: int, seconds: float, prior: Array, times: int = 1, mood: Array | float = 0.0
    ) -> tuple[float, float]:
        """One observation, or what several of one width have in common. A round adds `mood` to the covariance, besides
        its kind's drift. Returns the log of observed over expected, and how much of that the curve's own doubt does not
        explain, from 0 to 1."""
        parts, now = parts_of(width), self.seconds(prior)
        expected = seconds_at(width, now)
        error = log(seconds / expected)
        doubt = self._doubt + times * (self._kind.drift + mood)
        slope = parts * now / (parts @ now)  # of the expected log by each ratio's
        pull = doubt @ slope
        own = 1 / times
        variance = own + float(slope @ pull)  # of the error: the observation's and the curve's
        scale = sqrt(variance)
        moved = clipped(error / scale, self._spread)
        share = moved * scale / error if error else 1.0  # of the observation that is believed: it teaches no more
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
    """Of a forward of `width` tokens, given those at `WIDTHS`."""
    if width > WIDTHS[-1]:
        return float(extended(np.array([float(width)]), WIDTHS, seconds)[0])
    left, right = between(width)  # two numbers: a product with `parts_of` takes as long as all the rest of a prediction
    return float(seconds[left] + right * (seconds[left + 1] - seconds[left]))


@functools.cache
def between(width: int) -> tuple[int, float]:
    """Where the wider of the two widths around `width` stands, less one, and how much of a forward that one is."""
    place = float(np.interp(width, WIDTHS, np.arange(len(WIDTHS))))  # a wider one than all counts as the last
    left = min(int(place), len(WIDTHS) - 2)
    return left, place - left


@functools.cache
def parts_of(width: int) -> Array:
    """`[len(WIDTHS)]` how much of a forward of `width` tokens each of the two widths around it is."""
    left, right = between(width)
    parts = np.zeros(len(WIDTHS))
    parts[left : left + 2] = 1 - right, right
    return parts


def _following(run: Bools, seconds: Array) -> slice:
    """The next of `WIDTHS` beyond all that were run, if one was and it is worth a try: one place or none."""
    places = np.flatnonzero(run)
    if not len(places) or places[-1] + 1 == len(WIDTHS):
        return slice(0)
    widest, following = places[-1], places[-1] + 1
    worth = WIDTHS[following] <= WORTH_A_TRY or seconds[following] <= LITTLE * seconds[widest]
    return slice(following, following + worth)


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
