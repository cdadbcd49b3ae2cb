"""A lattice whose candidates know the one before: a conditional draft that is computed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from draftwood.tree import Child, Floats, Lattice, Tree

Place: TypeAlias = tuple[int, int]  # depth of the node's children from 0 on, and its token


class Trellis:
    """Marginals, and what each candidate of a depth makes of those of the next.

    Behind a token that is no candidate the marginals hold as they are.
    """

    faint = 0.0

    def __init__(self, lattice: Lattice, pairs: Floats, grow: Grow | None = None) -> None:
        """`pairs` `[D - 1, K, K]`: log p(tokens[d + 1, b] | tokens[d, a]), exact like the lattice's own.

        `grow` gives the tree that asking for children would, if there is a quicker way.
        """
        depth, width = lattice.tokens.shape
        assert pairs.shape == (max(depth - 1, 0), width, width), (
            f"{pairs.shape} are no pairs of a lattice {depth, width}"
        )
        self.lattice, self.grow = lattice, grow
        self.pairs = np.minimum(pairs, 0.0)  # a sure candidate's can be rounded to just above 0
        self._rows: dict[Place, tuple[list[int], list[float]]] = {}

    def __len__(self) -> int:
        return len(self.lattice)

    def row(self, depth: int, before: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities behind the token `before`, falling."""
        place = depth, before
        row = self._rows.get(place)
        if row is None:
            row = self._rows[place] = self._sorted(depth, before)
        return row

    def _sorted(self, depth: int, before: int) -> tuple[list[int], list[float]]:
        ranks = np.flatnonzero(self.lattice.tokens[depth - 1] == before)
        if not depth or not len(ranks):
            return self.lattice.row(depth, before)
        given = self.pairs[depth - 1, int(ranks[0])]
        order = (-given).argsort(kind="stable")  # NaN last
        return self.lattice.tokens[depth, order].tolist(), given[order].tolist()

    def start(self) -> Place:
        return 0, -1

    def children(self, place: Place) -> Iterator[Child]:
        depth, before = place
        if depth < len(self):
            for token, logp in zip(*self.row(depth, before), strict=True):
                if not logp > -np.inf:  # dead, or not a number
                    return
                yield max(-logp, 0.0), token, 0

    def step(self, place: Place, token: int) -> Place:
        return place[0] + 1, token


Block: TypeAlias = Lattice | Trellis  # what one block of a drafter predicts
# The best-first tree below a root: most nodes, the most that one may cost, and the most that one with children may.
Grow: TypeAlias = Callable[[Trellis, int, int, float, float], Tree]
