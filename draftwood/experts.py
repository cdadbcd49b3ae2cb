"""Opinions about the next token, each by somebody who knows the path to it: what a pool is made of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp
from typing import Any, Protocol

from draftwood.tree import Conditional, Tree
from draftwood.trellis import Block

SPOKEN = 16  # children of a conditional draft that count as its opinion
DEPTHS = 8  # deeper opinions of a draft are of one kind


@dataclass(frozen=True, slots=True)
class Opinion:
    """Some tokens' probabilities at a place, at most 1 together, and what this opinion's worth depends on."""

    kind: Hashable  # opinions of one kind share what is learned about them
    guess: float  # share that is believed before anything is learned
    probs: dict[int, float]


class Expert(Protocol):
    """Somebody with opinions about paths. Its places are its own affair; None: it has lost the path."""

    source: int

    def start(self) -> Any: ...
    def step(self, place: Any, token: int) -> Any: ...

    def opinions(self, place: Any) -> Sequence[Opinion]:
        """The best first."""
        ...


class LatticeExpert:
    """A further lattice, by depth."""

    def __init__(self, lattice: Block, source: int) -> None:
        self._lattice, self.source = lattice, source

    def start(self) -> tuple[int, int]:
        return 0, -1

    def step(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        return place[0] + 1, token

    def opinions(self, place: tuple[int, int]) -> Sequence[Opinion]:
        depth, before = place
        if depth >= len(self._lattice):
            return ()
        tokens, logp = self._lattice.row(depth, before)
        probs = [exp(min(x, 0.0)) if x == x else 0.0 for x in logp]  # NaN is dead
        return (Opinion((self.source, min(depth, DEPTHS)), 0.5, dict(zip(tokens, probs, strict=True))),)


class TreeExpert:
    """A tree, by node."""

    def __init__(self, tree: Tree, source: int) -> None:
        self.source = source
        self._children: dict[int, dict[int, int]] = {}
        self._tokens, self._mass, self._depths = tree.tokens.tolist(), tree.mass.tolist(), tree.depths.tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            if parent >= 0:
                self._children.setdefault(parent, {})[self._tokens[node]] = node

    def start(self) -> int:
        return 0

    def step(self, place: int, token: int) -> int | None:
        return self._children.get(place, {}).get(token)

    def opinions(self, place: int) -> Sequence[Opinion]:
        found = self._children.get(place)
        if not found or not self._mass[place]:
            return ()
        probs = {token: min(self._mass[node] / self._mass[place], 1.0) for token, node in found.items()}
        return (Opinion((self.source, min(self._depths[place], DEPTHS)), 0.5, probs),)


class ConditionalExpert:
    """A conditional draft, by its own places."""

    def __init__(self, draft: Conditional, source: int) -> None:
        self._draft, self.source = draft, source

    def start(self) -> tuple[int, Any]:
        return 0, self._draft.start()

    def step(self, place: tuple[int, Any], token: int) -> tuple[int, Any]:
        return place[0] + 1, self._draft.step(place[1], token)

    def opinions(self, place: tuple[int, Any]) -> Sequence[Opinion]:
        probs = {token: exp(-cost) for cost, token, _ in islice(self._draft.children(place[1]), SPOKEN)}
        return (Opinion((self.source, min(place[0], DEPTHS)), 0.5, probs),) if probs else ()
