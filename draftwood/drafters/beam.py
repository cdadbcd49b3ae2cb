"""A tree that grows level by level: a model predicts what follows each node of the level before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draftwood.tree import Tree


@dataclass(slots=True)
class BeamTree:
    """All nodes so far, parents before children, the root first."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    mass: list[float] = field(default_factory=lambda: [1.0])

    def level(self, front: Sequence[int], tokens: Tensor, logp: Tensor, beam: int) -> list[int]:
        """Children `tokens` [F, K] with `logp` [F, K] of the F nodes `front`; the heaviest `beam` of them, in order."""
        first = len(self.tokens)
        for parent, names, probs in zip(front, tokens.tolist(), logp.exp().tolist(), strict=True):
            for token, p in zip(names, probs, strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.depths.append(self.depths[parent] + 1)
                self.mass.append(self.mass[parent] * max(0.0, min(p, 1.0)))  # NaN counts as 0
        heaviest = np.argsort(-np.array(self.mass[first:]), kind="stable")[:beam]
        return [first + int(node) for node in np.sort(heaviest)]

    def tree(self) -> Tree:
        tokens, parents, depths = (np.array(row, np.int64) for row in (self.tokens, self.parents, self.depths))
        return Tree(tokens, parents, depths, np.array(self.mass, np.float32))
