"""What the target itself said follows a token, learned from the logits of its verifications at no extra forward.

As in token recycling (arXiv 2408.08696), but with averaged probabilities, so that they can be weighed against others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Ints

LEARNED = 8  # candidates of the target that are taken over at a node, the likeliest ones
KEPT = 12  # successors that are remembered for each token
RECENT = 0.3  # weight of the newest observation against all before it, once there were a few
LEAST = 256  # tokens that there is room for at first
NOBODY = -1

Array = NDArray[np.float64]


class Successors:
    """The likeliest successors of each token that was seen, averaged over its contexts. Growth reads the arrays."""

    def __init__(self) -> None:
        self.slots = np.full(LEAST, NOBODY, np.int32)  # [tokens] where each one's rows are
        self.seen = np.zeros(LEAST, np.int32)  # [rows] how often
        self.names = np.full((LEAST, KEPT), NOBODY, np.int32)  # [rows, KEPT] what may follow, the likeliest first,
        self.probs = np.zeros((LEAST, KEPT))  # and how likely
        self.rows = 0  # that are in use

    def of(self, token: int) -> tuple[int, dict[int, float]]:
        """How often `token` was seen, and the probabilities of what may follow it, falling."""
        at = int(self.slots[token]) if 0 <= token < len(self.slots) else NOBODY
        if at == NOBODY:
            return 0, {}
        names = [name for name in self.names[at].tolist() if name != NOBODY]
        return int(self.seen[at]), dict(zip(names, self.probs[at].tolist(), strict=False))

    def learn(self, tokens: Sequence[int], followers: Ints, probs: Array) -> None:
        """`tokens` [M] were each followed by `followers` [M, k] with probabilities `probs` [M, k]."""
        self.make_room(tokens)
        for token, names, values in zip(tokens, followers.tolist(), probs.tolist(), strict=True):
            seen, before = self.of(token)
            new = max(RECENT, 1 / (1 + seen))
            mean = {follower: (1 - new) * p for follower, p in before.items()}
            for follower, p in zip(names, values, strict=True):
                mean[follower] = mean.get(follower, 0.0) + new * p
            best = sorted(mean, key=mean.__getitem__, reverse=True)[:KEPT]
            if (at := int(self.slots[token])) == NOBODY:
                at = self.slots[token] = self.rows
                self.rows += 1
            self.seen[at] = seen + 1
            self.names[at, : len(best)] = best
            self.probs[at, : len(best)] = [mean[follower] for follower in best]

    def make_room(self, tokens: Sequence[int]) -> None:
        """Make room for the rows of all these tokens."""
        self.slots = _longer(self.slots, 1 + max(tokens, default=0), NOBODY)
        rows = self.rows + len(tokens)
        self.seen, self.probs = _longer(self.seen, rows, 0), _longer(self.probs, rows, 0.0)
        self.names = _longer(self.names, rows, NOBODY)


def _longer(rows: NDArray[Any], least: int, fill: float) -> NDArray[Any]:
    """The rows, with room for at least `least` of them."""
    if least <= len(rows):
        return rows
    more = max(least, 2 * len(rows)) - len(rows)
    return np.concatenate([rows, np.full((more, *rows.shape[1:]), fill, rows.dtype)])


# A table, and what it is to learn.
Learn: TypeAlias = Callable[[Successors, Sequence[int], Ints, Array], None]
