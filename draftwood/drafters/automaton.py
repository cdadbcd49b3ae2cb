"""A suffix automaton over token ids: it finds where any suffix occurred before, however long the text is.

Its states are the sets of substrings that end at the same places (Blumer et al. 1985). It is built online, one token
after another; counts are kept up to date along the suffix links. `native/substrings.c` is the compiled version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftwood.experts import Occurrences
from draftwood.native.build import operators
from draftwood.native.substrings import Substrings

LINKS = 32  # most suffix links that are followed to count an occurrence: in "aaaa…" there is one for each length


def automaton() -> Occurrences:
    """An empty automaton, compiled where that is possible."""
    return SuffixAutomaton(LINKS) if operators().library is None else Substrings(LINKS)


class SuffixAutomaton:
    """State 0 is the empty string. A state's length is that of its longest substring."""

    def __init__(self, links: int) -> None:
        self._links = links
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]  # occurrences
        self._latest: list[int] = [-1]  # the token that followed the most recent occurrence
        self._end = 0  # the state of everything so far

    @property
    def states(self) -> int:
        return len(self._link)

    @property
    def end(self) -> tuple[int, int]:
        return self._end, self._length[self._end]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        for state in self._suffixes(self._end):
            self._latest[state] = token
        new = self._state({}, 0, self._length[self._end] + 1, 0, -1)
        state = self._end
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._end = new
        for state in self._suffixes(new):
            self._count[state] += 1

    def part(self) -> None:
        self._end = 0

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        while state > 0 and token not in self._next[state]:
            state, length = self.shorter(state)
        after = self._next[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def shorter(self, state: int) -> tuple[int, int]:
        link = self._link[state]
        return link, self._length[link]

    def followers(self, state: int) -> dict[int, int]:
        return {token: self._count[after] for token, after in self._next[state].items()}

    def latest(self, state: int) -> int:
        return self._latest[state]

    def _split(self, state: int, token: int) -> int:
        """The suffix link of a new state whose longest known suffix is `state` and `token`."""
        after = self._next[state][token]
        if self._length[after] == self._length[state] + 1:
            return after
        clone = self._state(
            dict(self._next[after]),
            self._link[after],
            self._length[state] + 1,
            self._count[after],
            self._latest[after],
        )
        while state >= 0 and self._next[state].get(token) == after:
            self._next[state][token] = clone
            state = self._link[state]
        self._link[after] = clone
        return clone

    def _state(self, after: dict[int, int], link: int, length: int, count: int, latest: int) -> int:
        self._next.append(after)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._link) - 1

    def _suffixes(self, state: int) -> Iterator[int]:
        """`state` and the next ones along its links, without the empty string."""
        for _ in range(self._links):
            if state <= 0:
                return
            yield state
            state = self._link[state]
