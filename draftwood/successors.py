"""What the target itself said follows a token: learned from what it verifies, at no forward of its own.

As in token recycling (arXiv 2408.08696), but with averaged probabilities, so that it can be weighed against others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Floats, Ints

LEARNED = 8  # of the target's candidates at a node, how many are taken over
KEPT = 12  # successors that are remembered of each token
RECENT = 0.3  # weight of the newest observation against all before it, once there were a few


class Successors:
    """For each token of the vocabulary its likeliest successors, averaged over the contexts in which it was seen."""

    def __init__(self, vocab: int) -> None:
        self._tokens: NDArray[np.int32] = np.zeros((vocab, KEPT), np.int32)
        self._probs: Floats = np.zeros((vocab, KEPT), np.float32)  # falling; 0: nothing there
        self._seen: NDArray[np.int32] = np.zeros(vocab, np.int32)

    @property
    def vocab(self) -> int:
        return len(self._seen)

    def of(self, token: int) -> tuple[int, dict[int, float]]:
        """How often `token` was seen, and the probabilities of what may follow it."""
        seen = int(self._seen[token])
        if not seen:
            return 0, {}
        pairs = zip(self._tokens[token].tolist(), self._probs[token].tolist(), strict=True)
        return seen, {follower: p for follower, p in pairs if p}

    def learn(self, tokens: Sequence[int], followers: Ints, probs: Floats) -> None:
        """`tokens` [M] were each followed by `followers` [M, k] with probabilities `probs` [M, k]."""
        for token, names, values in zip(tokens, followers.tolist(), probs.tolist(), strict=True):
            seen, known = self.of(token)
            new = max(RECENT, 1 / (1 + seen))
            known = {follower: (1 - new) * p for follower, p in known.items()}
            for follower, p in zip(names, values, strict=True):
                known[follower] = known.get(follower, 0.0) + new * p
            best = sorted(known.items(), key=lambda pair: -pair[1])[:KEPT]
            self._seen[token] = seen + 1
            self._tokens[token, : len(best)], self._probs[token, : len(best)] = zip(*best, strict=True)
