"""Drafting from the text itself: what followed earlier occurrences of the last few tokens, as one tree.

Needs no model. Prompt lookup with several continuations: long matches count more than short ones, recent ones
more than old ones, and continuations that begin alike share nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np

from draftwood.drafters.base import Request
from draftwood.errors import BadInput, nearest
from draftwood.latency import Work
from draftwood.target import Target
from draftwood.tree import Lattice, Tree

MATCHES = 8  # earlier occurrences that may vote: more add little and cost time
RECENCY = 0.9  # vote of an occurrence relative to the next more recent one
ESCAPE = 2.0  # after a match of m tokens something new follows about ESCAPE times in m + ESCAPE
LEAST_MASS = 1e-3  # no policy pays for a node less likely than this


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the drafter, as in `ngram:max_n=4,max_depth=8`."""

    max_n: int = 5  # longest match that is looked for, in tokens
    max_depth: int = 12  # longest continuation

    def __post_init__(self) -> None:
        for name, most in (("max_n", 16), ("max_depth", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise BadInput(f"ngram: {name} is {getattr(self, name)}; write a number from 1 to {most}.")


@dataclass(slots=True)
class NgramState:
    """The tokens of one request, and where each n-gram of them was followed by what."""

    tokens: list[int] = field(default_factory=list)
    # n-gram -> rising positions of the token after it; the last one may be where the next token will be
    followers: defaultdict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, slots=True)
class _Match:
    """An earlier occurrence of the current suffix."""

    start: int  # position of the token that followed it
    length: int  # tokens that match
    recency: float  # 1 for the most recent


class NgramDrafter:
    """Reads no target features and has no weights; the same class serves every target."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, options: Options) -> None:
        self.options = options
        self.max_depth = options.max_depth
        self.name = "ngram"

    @classmethod
    def load(cls, argument: str, target: Target) -> NgramDrafter:
        """From what follows `ngram:`, for example `max_n=4`; empty for the defaults. Raises BadInput."""
        return cls(parse_options(argument))

    def open(self, capacity: int) -> NgramState:
        """A fresh state; `capacity` does not matter."""
        return NgramState()

    def extend(self, state: NgramState, tokens: list[int], taps: object) -> None:
        """Append tokens and index the n-grams that end in them."""
        for token in tokens:
            state.tokens.append(token)
            for gram in self._suffixes(state.tokens):
                state.followers[gram].append(len(state.tokens))

    def rewind(self, state: NgramState, length: int) -> None:
        """Keep the first `length` tokens. The last token's n-grams are always last in their lists."""
        assert 0 <= length <= len(state.tokens), f"cannot rewind {len(state.tokens)} tokens to {length}"
        while len(state.tokens) > length:
            for gram in self._suffixes(state.tokens):
                state.followers[gram].pop()
                if not state.followers[gram]:
                    del state.followers[gram]
            state.tokens.pop()

    def draft(self, requests: list[Request]) -> list[Lattice | Tree]:
        """One tree per request, in best-first order; only the root where nothing matches."""
        return [self._tree(request.state, request.root) for request in requests]

    def work(self, context: int) -> Work:
        """No arithmetic and no weights: only Python's time, which the latency model learns."""
        return Work(flops=0.0, bytes=0.0, launches=0)

    def _suffixes(self, tokens: list[int]) -> Iterator[tuple[int, ...]]:
        """The n-grams at the end of `tokens`, shortest first."""
        tail = tuple(tokens[-self.options.max_n :])
        return (tail[-n:] for n in range(1, len(tail) + 1))

    def _tree(self, state: NgramState, root: int) -> Tree:
        text = [*state.tokens, root]
        builder = _Builder(text, self.options.max_depth)
        builder.expand(0, list(self._matches(state, text)))
        return builder.tree()

    def _matches(self, state: NgramState, text: list[int]) -> Iterator[_Match]:
        """At most MATCHES occurrences, longest first, then most recent first; each at its full length."""
        found: set[int] = set()
        for gram in reversed(list(self._suffixes(text))):
            for start in reversed(state.followers.get(gram, ())):
                if len(found) == MATCHES:
                    return
                if start not in found:
                    yield _Match(start, len(gram), RECENCY ** len(found))
                    found.add(start)


class _Builder:
    """A trie of continuations with path masses."""

    def __init__(self, text: list[int], max_depth: int) -> None:
        self.text, self.max_depth = text, max_depth
        self.tokens, self.parents, self.depths, self.mass = [text[-1]], [-1], [0], [1.0]

    def expand(self, node: int, matches: list[_Match]) -> None:
        """Add the subtree of the continuations that run through `node`.

        A child's probability is its share of the votes, less what goes to tokens that never followed. A vote
        counts the tokens that would match by then, so trust grows along a path.
        """
        depth = self.depths[node]
        votes = [(match.length + depth) * match.recency for match in matches]
        longest = max((match.length + depth for match in matches), default=0)
        familiar = self.mass[node] * longest / (longest + ESCAPE)
        by_token: dict[int, list[int]] = {}
        for i, match in enumerate(matches):
            by_token.setdefault(self._continuation(match, depth), []).append(i)
        for token, members in by_token.items():
            mass = familiar * sum(votes[i] for i in members) / sum(votes)
            if mass < LEAST_MASS:
                continue
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(depth + 1)
            self.mass.append(mass)
            if depth + 1 < self.max_depth:
                self.expand(len(self.tokens) - 1, [matches[i] for i in members])

    def tree(self) -> Tree:
        """All nodes in best-first order: masses fall along a path, so parents stay before their children."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.mass[node], self.depths[node]))
        place = {node: at for at, node in enumerate(order)}
        return Tree(
            np.array([self.tokens[node] for node in order]),
            np.array([place.get(self.parents[node], -1) for node in order]),
            np.array([self.depths[node] for node in order]),
            np.array([self.mass[node] for node in order], np.float32),
        )

    def _continuation(self, match: _Match, step: int) -> int:
        """The token `step` places into a continuation; at the end of the text it goes round in circles."""
        return self.text[match.start + step % (len(self.text) - match.start)]


def parse_options(argument: str) -> Options:
    """`"max_n=4,max_depth=8"` -> Options. Raises BadInput for an unknown name or no number."""
    known = [option.name for option in fields(Options)]
    values: dict[str, int] = {}
    for part in filter(None, argument.split(",")):
        name, _, value = (text.strip() for text in part.partition("="))
        if name not in known:
            raise BadInput(f"ngram has no parameter '{name}'.{nearest(name, known)} Valid: {', '.join(known)}.")
        if not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise BadInput(f"ngram: {name} is '{value}'; write a whole number, for example ngram:{name}=4.")
        values[name] = int(value)
    return Options(**values)
