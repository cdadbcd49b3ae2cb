"""Experts, of which a pool is made: each gives opinions about the next token and knows the path to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import exp
from typing import Any, Protocol

from draftwood.tree import Conditional, Tree
from draftwood.trellis import Block

SPOKEN = 16  # children of a conditional draft that count as its opinion
DEPTHS = 8  # depths whose opinions are kinds of their own; deeper ones are all of one kind
LEVELS = 2  # matches that give an opinion: the longest, and the next shorter one that occurred more often
ANEW = 0.5  # occurrences that are reserved for a token that has not followed yet
NEWS = 3.0  # further occurrences that the most recent one counts as
DOUBT = 2.0  # the first share of a match of m tokens is m / (m + DOUBT)
LONGEST = 12  # longer matches are all of one kind,
OFTEN = 3  # and so are those that occurred more often
KINDS = LEVELS, 1 + LONGEST, 1 + OFTEN, 2  # of matches: level, length, how often, and whether what followed agrees


@dataclass(frozen=True, slots=True)
class Opinion:
    """Probabilities of some tokens at a place, at most 1 together, and the kind of opinion that this is."""

    kind: tuple[Any, ...]  # the source, and what else its worth depends on: worth is learned for each kind
    guess: float  # its share in the pool before anything is learned
    probs: dict[int, float]


class Expert(Protocol):
    """Gives opinions about paths. Only it knows what its places mean; None says that it has lost the path."""

    source: int
    match: int  # tokens before the root that occurred earlier

    def start(self) -> Any: ...
    def step(self, place: Any, token: int) -> Any: ...

    def opinions(self, place: Any) -> Sequence[Opinion]:
        """The best first."""
        ...


class Occurrences(Protocol):
    """All substrings of a growing text. A state stands for some that end at the same places; 0 is the empty one."""

    @property
    def states(self) -> int:
        """How many there are."""
        ...

    @property
    def end(self) -> tuple[int, int]:
        """The state of everything so far, and its length."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        ...

    def part(self) -> None:
        """Begin another text: what comes next does not follow what came before."""
        ...

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (`length` tokens that led to `state`, `token`) that occurred, and its length."""
        ...

    def shorter(self, state: int) -> tuple[int, int]:
        """The longest suffix that occurred in more places, and its length. Not of the empty string."""
        ...

    def followers(self, state: int) -> dict[int, int]:
        """Which tokens followed, and how often."""
        ...

    def latest(self, state: int) -> int:
        """The token that followed most recently; -1 if none did."""
        ...


class Matches:
    """An expert on what followed earlier occurrences. A place is (state, length of the match)."""

    def __init__(self, text: Occurrences, start: tuple[int, int], source: int, name: str) -> None:
        """`name`: matches in texts of one name share what is learned about them."""
        self.text, self.name, self.source, self._start = text, name, source, start
        self.match = start[1]
        self._found: dict[tuple[int, int], list[Opinion]] = {}

    def start(self) -> tuple[int, int]:
        return self._start

    def step(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        return self.text.step(*place, token)

    def opinions(self, place: tuple[int, int]) -> Sequence[Opinion]:
        if place not in self._found:
            self._found[place] = self._look(*place)
        return self._found[place]

    def _look(self, state: int, length: int) -> list[Opinion]:
        found: list[Opinion] = []
        while state > 0 and len(found) < LEVELS:
            if counts := self.text.followers(state):
                found.append(self._opinion(counts, self.text.latest(state), min(length, LONGEST), len(found)))
            state, length = self.text.shorter(state)
        return found

    def _opinion(self, counts: dict[int, int], latest: int, length: int, level: int) -> Opinion:
        total = sum(counts.values())
        agree = max(counts.values()) > 0.6 * total
        weighted = {token: count + NEWS * (token == latest) for token, count in counts.items()}
        whole = total + NEWS + ANEW
        probs = {token: count / whole for token, count in weighted.items()}
        return Opinion((self.name, level, length, min(total, OFTEN), int(agree)), trust(length), probs)


def trust(length: int) -> float:
    """The share of a match of this length before anything is learned."""
    return length / (length + DOUBT)


class LatticeExpert:
    """A further lattice or trellis as an expert. A place is (depth, token before)."""

    match = 0

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
    """A tree as an expert. A place is a node."""

    match = 0

    def __init__(self, tree: Tree, source: int) -> None:
        self.source = source
        self._tokens, self._mass, self._depths = tree.tokens.tolist(), tree.mass.tolist(), tree.depths.tolist()
        self._parents = tree.parents

    @cached_property
    def _children(self) -> dict[int, dict[int, int]]:
        """Children by node and token. Made on first use: where pooling does not pay, most drafts are not pooled."""
        children: dict[int, dict[int, int]] = {}
        for node, parent in enumerate(self._parents.tolist()):
            if parent >= 0:
                children.setdefault(parent, {})[self._tokens[node]] = node
        return children

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
    """A conditional draft as an expert. A place is (depth, the draft's own place)."""

    match = 0

    def __init__(self, draft: Conditional, source: int) -> None:
        self._draft, self.source = draft, source

    def start(self) -> tuple[int, Any]:
        return 0, self._draft.start()

    def step(self, place: tuple[int, Any], token: int) -> tuple[int, Any]:
        return place[0] + 1, self._draft.step(place[1], token)

    def opinions(self, place: tuple[int, Any]) -> Sequence[Opinion]:
        probs = {token: exp(-cost) for cost, token, _ in islice(self._draft.children(place[1]), SPOKEN)}
        return (Opinion((self.source, min(place[0], DEPTHS)), 0.5, probs),) if probs else ()
