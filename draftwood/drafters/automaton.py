"""A suffix automaton over token ids: every earlier occurrence of any suffix, found in time that does not depend on it.

Its states are the sets of substrings that end at the same places (Blumer et al. 1985). Built online, one token after
another; counts are kept up to date along the suffix links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftwood.native import substrings

MANY = 64  # tokens of a text that are read at once
LINKS = 32  # suffix links that are followed to count an occurrence: in "aaaa…" there is one for each length


class SuffixAutomaton:
    """State 0 is the empty string. A state's `length` is that of its longest substring."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.next: dict[int, dict[int, int]] = {0: {}}
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]  # occurrences
        self.latest: list[int] = [-1]  # the token that followed the most recent occurrence
        self.end = 0  # the state of everything so far
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; where something compiles, a whole text takes a sixth of the time of its tokens."""
        made = substrings.read(tokens) if len(self.link) == 1 and len(tokens) >= MANY else None
        if made:
            self.next, self.link, self.length, self.count = made.next, made.link, made.length, made.count
            self.latest, self.end = made.latest, made.end
        else:
            for token in tokens:
                self.append(token)

    def append(self, token: int) -> None:
        for state in self._suffixes(self.end):
            self.latest[state] = token
        new = self._state({}, 0, self.length[self.end] + 1, 0, -1)
        state = self.end
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._split(state, token)
        self.end = new
        for state in self._suffixes(new):
            self.count[state] += 1

    def part(self) -> None:
        """What comes next does not follow what was before: another text begins."""
        self.end = 0

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (`length` tokens that led to `state`, `token`) that occurred, and its length."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        after = self.next[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def followers(self, state: int) -> dict[int, int]:
        """Which tokens followed, and how often."""
        return {token: self.count[after] for token, after in self.next[state].items()}

    def _split(self, state: int, token: int) -> int:
        """The suffix link of a new state whose longest known suffix is `state` and `token`."""
        after = self.next[state][token]
        if self.length[after] == self.length[state] + 1:
            return after
        clone = self._state(
            dict(self.next[after]),
            self.link[after],
            self.length[state] + 1,
            self.count[after],
            self.latest[after],
        )
        while state >= 0 and self.next[state].get(token) == after:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[after] = clone
        return clone

    def _state(self, after: dict[int, int], link: int, length: int, count: int, latest: int) -> int:
        made = len(self.link)
        self.next[made] = after
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(latest)
        return made

    def _suffixes(self, state: int) -> Iterator[int]:
        """`state` and the next LINKS along its suffix links, the empty string left out."""
        for _ in range(LINKS):
            if state <= 0:
                return
            yield state
            state = self.link[state]
