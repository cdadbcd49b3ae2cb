"""Predicted probabilities against what happened: reliability diagrams and the expected calibration error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Bools, Floats, Ints

Array = NDArray[np.float64]
BINS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """What was predicted against what happened, by bins of equal width over [0, 1]."""

    said: Array  # [bins] mean probability; NaN in an empty bin
    happened: Array  # [bins] share
    count: Ints  # [bins]
    spread: Array  # [bins] standard deviation of `happened` if the probabilities are right, outcomes independent

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of the two, weighted by count."""
        return self._mean(abs(self.said - self.happened))

    @property
    def chance(self) -> float:
        """The `error` to expect of probabilities that are right, which so few outcomes do not show exactly: the mean
        absolute deviation of a normal distribution, sqrt(2 / pi) of its standard deviation, in each bin."""
        return self._mean(math.sqrt(2 / math.pi) * self.spread)

    def _mean(self, values: Array) -> float:
        return float(np.nansum(self.count * values) / max(self.count.sum(), 1))


def reliability(said: Array | Floats, happened: Bools) -> Reliability:
    """Probabilities `[N]` against outcomes `[N]`."""
    place = np.minimum((said * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(place, values.astype(np.float64), BINS) / count for values in (said, happened)]
        spread = np.sqrt(np.bincount(place, said * (1 - said), BINS)) / count
    return Reliability(means[0], means[1], count, spread)
