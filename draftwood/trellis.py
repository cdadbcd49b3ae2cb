"""A lattice whose candidates depend on the one before: a conditional draft that is computed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import exp, inf, log
from typing import TypeAlias

import numpy as np

from draftwood.noise import Ahead
from draftwood.tree import Child, Floats, Growable, Lattice, Tree

Place: TypeAlias = tuple[int, int]  # depth of the node's children from 0 on, and its token


class Trellis(Growable):
    """Marginals, and behind each candidate of a depth the probabilities of those of the next.

    Behind a token that is no candidate the marginals hold.
    """

    faint = 0.0

    def __init__(self, lattice: Lattice, pairs: Floats, grow: Grow | None = None, ahead: Ahead | None = None) -> None:
        """`pairs` `[D - 1, K, K]`: log p(tokens[d + 1, b] | tokens[d, a]), exact like the lattice's own.

        `grow`, if there is a quicker way, gives the tree that asking for children would. All rows are weighed by the
        noise of draws `ahead`, each when it is first read (`foresight.py`).
        """
        depth, width = lattice.tokens.shape
        assert pairs.shape == (max(depth - 1, 0), width, width), (
            f"{pairs.shape} are no pairs of a lattice {depth, width}"
        )
        self.lattice, self.pairs, self.grow, self.ahead = lattice, pairs, grow, ahead
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
        tokens = self.lattice.tokens
        ranks = np.flatnonzero(tokens[depth - 1] == before).tolist() if depth else []
        given = self.pairs[depth - 1, ranks[0]] if ranks else self.lattice.logp[depth]
        given = np.minimum(given, 0.0)  # a sure candidate's can be rounded to just above 0
        if self.ahead is None:
            order = (-given).argsort(kind="stable")  # NaN last
            return tokens[depth, order].tolist(), given[order].tolist()
        sums, total = weighed(given.tolist(), self.ahead.row(depth, tokens[depth].tolist()))
        ranked = sorted(range(len(sums)), key=lambda rank: -sums[rank])
        return tokens[depth, ranked].tolist(), [sums[rank] - total for rank in ranked]

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

    def grown(self, root: int, n_max: int, most: float, barren: float, ahead: Ahead | None = None) -> Tree | None:
        draft = self if ahead is None else Trellis(self.lattice, self.pairs, self.grow, ahead)
        return None if self.grow is None else self.grow(draft, root, n_max, most, barren)


def weighed(logp: Sequence[float], noise: Sequence[float]) -> tuple[list[float], float]:
    """Log-probabilities with noise, and the log of their sum with the rest, which keeps its share without noise.

    What is not a number is dead, too.
    """
    logp = [min(x, 0.0) if x > -inf else -inf for x in logp]
    sums = [x + g for x, g in zip(logp, noise, strict=True)]
    return sums, log(sum(map(exp, sums)) + max(1 - sum(map(exp, logp)), 0.0))


Block: TypeAlias = Lattice | Trellis  # what one block of a drafter predicts
# Trellis, root, most nodes, highest cost of a node and of one with children -> the best-first tree
Grow: TypeAlias = Callable[[Trellis, int, int, float, float], Tree]
