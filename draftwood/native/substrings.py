"""Reading a whole text into a suffix automaton in one call, where one token after another would take longer."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np

from draftwood.errors import BadModel
from draftwood.native.build import operators


class Edges(dict[int, dict[int, int]]):
    """Where each state's tokens lead. Those of a text that was read at once are made when they are asked for."""

    def __init__(self, starts: list[int], tokens: list[int], to: list[int]) -> None:
        self._starts, self._tokens, self._to = starts, tokens, to

    def __missing__(self, state: int) -> dict[int, int]:
        places = slice(*self._starts[state : state + 2])
        found = self[state] = dict(zip(self._tokens[places], self._to[places], strict=True))
        return found


@dataclass(frozen=True, slots=True)
class Substrings:
    """What `drafters/automaton.py` keeps of a text."""

    next: Edges
    link: list[int]
    length: list[int]
    count: list[int]
    latest: list[int]
    end: int


def read(tokens: Sequence[int]) -> Substrings | None:
    """All substrings of a text; None where nothing is compiled. Raises BadModel if memory ran out."""
    if operators().library is None:
        return None
    n = len(tokens)
    text, end = np.array(tokens, np.int32), c_int64()
    states, edges = np.empty((5, 2 * n + 2), np.int32), np.empty((2, 3 * n + 1), np.int32)
    addresses = [c_void_p(array.ctypes.data) for array in (states, edges)]
    count = operators().functions.read_text(c_void_p(text.ctypes.data), c_int64(n), *addresses, byref(end))
    if count < 0:
        raise BadModel(f"The substrings of {n} tokens found no memory.")
    starts = states[4, : 1 + count].tolist()
    link, length, occurrences, latest = states[:4, :count].tolist()
    following = Edges(starts, *edges[:, : starts[-1]].tolist())
    return Substrings(following, link, length, occurrences, latest, end.value)
