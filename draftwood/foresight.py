"""Foresight: drafts weighed by the random numbers (noise) that will decide the target's draws.

At temperature T the target draws the token x with the largest log p(x) + T g(x), and the noise g of every position is
fixed before anything is drafted (`noise.py`). A drafter that predicts q may thus expect draws from

    q'(x) = q(x) exp(T g(x)) / Z,

and trees grow from q' instead of q. A drafter that knows p foresees every draw; at T = 0 nothing changes. That two
parties who share such noise mostly draw the same token is the Gumbel coupling of Daliri et al. (arXiv 2408.07978), who
draft chains with it. The text remains the target's own (`accept.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from draftwood.noise import Ahead
from draftwood.tree import Child, Conditional, Draft, Growable, Lattice, Tree
from draftwood.trellis import Trellis, weighed

DEEPEST = 64  # depths of a conditional draft that are weighed by noise: hardly any draft is deeper
MOST = 32  # children of a node that are weighed by noise, the likeliest ones


def foreseen(draft: Draft, ahead: Callable[[int], Ahead]) -> Draft:
    """The draft, weighed by the noise of the draws to come, which `ahead` gives for so many depths."""
    if isinstance(draft, Lattice):
        return _lattice(draft, ahead(len(draft)))
    if isinstance(draft, Trellis):
        return Trellis(draft.lattice, draft.pairs, draft.grow, ahead(len(draft)))
    if isinstance(draft, Tree):
        return _tree(draft, ahead(int(draft.depths.max())))
    return _Foreseen(draft, ahead(DEEPEST))


def _lattice(draft: Lattice, ahead: Ahead) -> Lattice:
    logp = np.where(np.isnan(draft.logp), -np.inf, draft.logp).astype(np.float64)
    sums = logp + ahead.of(np.arange(len(draft))[:, None], draft.tokens)
    rest = np.maximum(1 - np.exp(logp).sum(1, keepdims=True), 0.0)  # tokens that are no candidates keep their share
    logp = sums - np.log(np.exp(sums).sum(1, keepdims=True) + rest)
    order = (-logp).argsort(1, kind="stable")
    return Lattice(np.take_along_axis(draft.tokens, order, 1), np.take_along_axis(logp, order, 1).astype(np.float32))


def _tree(draft: Tree, ahead: Ahead) -> Tree:
    """The nodes stay the same: noise cannot add tokens that the drafter did not propose."""
    parents, nodes = draft.parents[1:], len(draft.tokens)
    mass = draft.mass.astype(np.float64)
    step = mass[1:] / np.maximum(mass[parents], np.finfo(np.float64).tiny)
    grown = step * np.exp(ahead.of(draft.depths[1:] - 1, draft.tokens[1:]))
    rest = np.maximum(1 - np.bincount(parents, step, nodes), 0.0)
    step = grown / (np.bincount(parents, grown, nodes) + rest)[parents]
    path = [1.0]
    for parent, share in zip(parents.tolist(), step.tolist(), strict=True):
        path.append(path[parent] * min(share, 1.0))
    return Tree(draft.tokens, draft.parents, draft.depths, np.array(path, np.float32), draft.sources)


class _Foreseen(Growable):
    """A conditional draft under noise. A place is (the draft's own place, the depth of its children from 0 on)."""

    def __init__(self, draft: Conditional, ahead: Ahead) -> None:
        self._draft, self._ahead = draft, ahead
        self._known: dict[tuple[int, int], float] = {}  # T g by depth and token

    @property
    def faint(self) -> float:
        return self._draft.faint

    def start(self) -> Any:
        return self._draft.start(), 0

    def children(self, place: Any) -> Iterator[Child]:
        found = list(islice(self._draft.children(place[0]), MOST))
        if not found or place[1] >= DEEPEST:
            yield from found
            return
        costs, tokens, sources = zip(*found, strict=True)
        sums, total = weighed([-cost for cost in costs], self._at(place[1], tokens))
        for i in sorted(range(len(sums)), key=lambda i: -sums[i]):
            yield max(total - sums[i], 0.0), tokens[i], sources[i]

    def step(self, place: Any, token: int) -> Any:
        return self._draft.step(place[0], token), place[1] + 1

    def grown(self, root: int, n_max: int, most: float, barren: float, ahead: Ahead | None = None) -> Tree | None:
        assert ahead is None, "noise is foreseen once"
        draft = self._draft
        return draft.grown(root, n_max, most, barren, self._ahead) if isinstance(draft, Growable) else None

    def _at(self, depth: int, tokens: tuple[int, ...]) -> list[float]:
        known = self._known
        if missing := [token for token in tokens if (depth, token) not in known]:
            noise = self._ahead.row(depth, missing)
            known.update(zip(((depth, token) for token in missing), noise, strict=True))
        return [known[depth, token] for token in tokens]
