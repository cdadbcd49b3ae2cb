"""What the target itself said follows a token: learned from what it verifies, at no forward of its own.

As in token recycling (arXiv 2408.08696), but with averaged probabilities, so that it can be weighed against others.
"""

from __future__ import annotations

from collections.abc import Sequence

LEARNED = 8  # of the target's candidates at a node, how many are taken over
KEPT = 12  # successors that are remembered of each token
RECENT = 0.3  # weight of the newest observation against all before it, once there were a few


class Successors:
    """For each token that was seen its likeliest successors, averaged over the contexts. A token takes 1.3 KB."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, dict[int, float]]] = {}

    def of(self, token: int) -> tuple[int, dict[int, float]]:
        """How often `token` was seen, and the probabilities of what may follow it, falling. To be read only."""
        return self._known.get(token, (0, {}))

    def learn(
        self, tokens: Sequence[int], followers: Sequence[Sequence[int]], probs: Sequence[Sequence[float]]
    ) -> None:
        """`tokens` [M] were each followed by `followers` [M, k] with probabilities `probs` [M, k]."""
        for token, names, values in zip(tokens, followers, probs, strict=True):
            seen, before = self.of(token)
            new = max(RECENT, 1 / (1 + seen))
            mean = {follower: (1 - new) * p for follower, p in before.items()}
            for follower, p in zip(names, values, strict=True):
                mean[follower] = mean.get(follower, 0.0) + new * p
            best = sorted(mean, key=mean.__getitem__, reverse=True)[:KEPT]
            self._known[token] = seen + 1, {follower: mean[follower] for follower in best}
