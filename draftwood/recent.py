"""Recent drafted rounds: what they verified and what they gave. The latest count most."""

from __future__ import annotations

from math import nan
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Floats, Ints

Array = NDArray[np.float64]
Mass: TypeAlias = Floats | Array
Depths: TypeAlias = Ints | Array

FAINTEST, SURE = 1e-38, 1 - 1e-5  # no mass counts as less or more: its logarithms would drown all others
KEPT = 128  # rounds
TINY = 1e-100  # scale below which shares are written out anew
HANDED_ON = 16  # rounds that stand for all of them in a later process


class Recent:
    """The latest rounds, in order. Lists, because calls of numpy take longer than so few numbers are worth."""

    def __init__(self) -> None:
        self._masses: list[Mass] = []  # [n] masses of each one's nodes; never written into, nor are their depths
        self._depths: list[Depths] = []
        self.sizes: list[int] = []  # nodes of each
        self.emitted: list[float] = []  # tokens that each gave, the bonus token included
        self.confidences: list[float] = []  # the target's before each; NaN if unknown
        self._shares: list[float] = []  # weight of each over `_scale`, so that fading changes one number
        self._scale = 1.0
        self.weight = 0.0  # of all
        self._known = self._sure = 0.0  # weight of those with known confidence, and the sum of weight × confidence

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def shares(self) -> list[float]:
        """The weight of each round."""
        return [self._scale * share for share in self._shares]

    @property
    def confidence(self) -> float:
        """The target's, on average; NaN if unknown."""
        return self._sure / self._known if self._known else nan

    def features(self, latest: int) -> Array:
        """`[N, 4]` features of the nodes of the `latest` so many rounds, one behind the other."""
        masses, depths = self._masses[-latest:], self._depths[-latest:]
        return features_of(np.concatenate(masses, dtype=np.float64), np.concatenate(depths, dtype=np.float64))

    def copy(self) -> Recent:
        made = Recent()
        made.weight, made._scale, made._known, made._sure = self.weight, self._scale, self._known, self._sure
        for rows, row in zip(made._rows(), self._rows(), strict=True):
            rows.extend(row)
        return made

    def fade(self, factor: float) -> None:
        if self._scale < TINY:
            self._shares, self._scale = self.shares, 1.0
        self._scale *= factor
        self.weight, self._known, self._sure = factor * self.weight, factor * self._known, factor * self._sure

    def add(self, mass: Mass, depths: Depths, emitted: float, confidence: float, share: float = 1.0) -> None:
        """Add a round; the oldest one goes if there are too many."""
        if len(self) == KEPT:
            self._count(-self._scale * self._shares[0], self.confidences[0])
            for row in self._rows():
                del row[0]
        self._count(share, confidence)
        share /= self._scale
        for row, value in zip(self._rows(), (mass, depths, len(mass), emitted, confidence, share), strict=True):
            row.append(value)

    def _count(self, share: float, confidence: float) -> None:
        self.weight += share
        if confidence == confidence:
            self._known, self._sure = self._known + share, self._sure + share * confidence

    def _rows(self) -> tuple[list[Any], ...]:
        return self._masses, self._depths, self.sizes, self.emitted, self.confidences, self._shares

    def to_json(self) -> list[dict[str, object]]:
        """A few rounds, from the poorest to the richest, that stand for all of them: the same mean, the same spread."""
        order = np.argsort(self.emitted, kind="stable")
        reached = np.cumsum(np.array(self.shares)[order])
        steps = (np.arange(HANDED_ON) + 0.5) * self.weight / HANDED_ON
        return [self._row_to_json(int(i)) for i in order[np.searchsorted(reached, steps)]]

    def _row_to_json(self, i: int) -> dict[str, object]:
        (rare, common), sure = sides(self._masses[i]), self.confidences[i]
        return {
            "logits": (rare + common).round(3).tolist(),
            "depths": [int(depth) - 1 for depth in self._depths[i]],
            "emitted": round(self.emitted[i], 3),
            "confidence": round(sure, 4) if sure == sure else None,
        }

    @classmethod
    def of_json(cls, rounds: list[dict[str, object]], weight: float) -> Recent:
        """Rounds that together have this weight. Raises ValueError, KeyError or TypeError for any other data."""
        recent = cls()
        for one in rounds:
            logits, depths = np.array(one["logits"], np.float64), 1 + np.array(one["depths"], np.float64)
            mass = 1 / (1 + np.exp(-logits))
            emitted, confidence = np.array([one["emitted"], one["confidence"]], np.float64)  # None becomes NaN
            fits = mass.shape == depths.shape == (mass.size,) and emitted >= 1 and not np.isinf(confidence)
            if not (fits and np.isfinite(mass + depths).all()):
                raise ValueError("a round has nodes and emits a token or more")
            recent.add(mass, depths, float(emitted), float(confidence), weight / len(rounds))
        return recent


def sides(mass: Mass) -> tuple[Array, Array]:
    """`[N]` log mass, and -log(1 - mass). Their sum is its logit."""
    known = np.minimum(np.maximum(mass.astype(np.float64), FAINTEST), SURE)
    return np.log(known), -np.log1p(-known)


def features_of(mass: Mass, depths: Depths) -> Array:
    """`[N, 4]`: 1, the two `sides` of the mass, depth - 1."""
    features = np.ones((len(mass), 4))
    features[:, 1], features[:, 2] = sides(mass)
    features[:, 3] = depths - 1
    return features
