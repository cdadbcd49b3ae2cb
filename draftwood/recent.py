"""Drafted rounds of late: what they verified and what came of it, the latest counting most."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Ints

Array = NDArray[np.float64]

KEPT = 128  # rounds
HANDED_ON = 16  # rounds that stand for all of them in a later process


class Recent:
    """In the order of their coming. Arrays are replaced, never written into, so a copy is one of its own."""

    def __init__(self) -> None:
        self.features: Array = np.empty((0, 3))  # of the nodes of all rounds, one round's behind the other's
        self.sizes: Ints = np.empty(0, np.int64)  # nodes of each
        self.emitted: Array = np.empty(0)  # tokens that each gave, the bonus token included
        self.confidences: Array = np.empty(0)  # the target's before each; NaN if unknown
        self.shares: Array = np.empty(0)  # what each weighs

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def weight(self) -> float:
        return float(self.shares.sum())

    @property
    def confidence(self) -> float:
        """The target's, on average; NaN if unknown."""
        weights = np.where(np.isnan(self.confidences), 0.0, self.shares)
        total = float(weights.sum())
        return float(weights @ np.nan_to_num(self.confidences)) / total if total else float("nan")

    def fade(self, factor: float) -> None:
        self.shares = self.shares * factor

    def add(self, features: Array, emitted: float, confidence: float, share: float = 1.0) -> None:
        """One more round; the oldest one goes if there are too many."""
        oldest, kept = int(self.sizes[0]) if len(self) == KEPT else 0, slice(1 - KEPT, None)
        self.features = np.concatenate([self.features[oldest:], features])
        self.sizes = np.append(self.sizes[kept], len(features))
        self.emitted, self.shares = np.append(self.emitted[kept], emitted), np.append(self.shares[kept], share)
        self.confidences = np.append(self.confidences[kept], confidence)

    def to_json(self) -> list[dict[str, object]]:
        """A few rounds, from the poorest to the richest, that stand for all of them: the same mean, the same spread."""
        order = np.argsort(self.emitted, kind="stable")
        reached = np.cumsum(self.shares[order])
        steps = (np.arange(HANDED_ON) + 0.5) * self.weight / HANDED_ON
        parts = np.split(self.features, np.cumsum(self.sizes)[:-1])
        return [
            {
                "logits": parts[i][:, 1].round(3).tolist(),
                "depths": parts[i][:, 2].astype(int).tolist(),
                "emitted": round(float(self.emitted[i]), 3),
                "confidence": None if np.isnan(self.confidences[i]) else round(float(self.confidences[i]), 4),
            }
            for i in order[np.searchsorted(reached, steps)]
        ]

    @classmethod
    def of_json(cls, rounds: list[dict[str, object]], weight: float) -> Recent:
        """Rounds that weigh so much together. Raises ValueError, KeyError or TypeError for anything else."""
        recent = cls()
        for one in rounds:
            logits, depths = np.array(one["logits"], np.float64), np.array(one["depths"], np.float64)
            features = np.stack([np.ones(len(logits)), logits, depths], 1)
            emitted, confidence = np.array([one["emitted"], one["confidence"]], np.float64)  # None becomes NaN
            if not (np.isfinite(features).all() and emitted >= 1):
                raise ValueError("a round has nodes and emits a token or more")
            recent.add(features, float(emitted), float(confidence), weight / len(rounds))
        return recent
