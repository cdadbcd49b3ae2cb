"""The suffix automaton of a text, compiled: a token takes a fraction of the time that it takes in Python."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from draftwood.native.build import address, library

Rows = NDArray[np.int32]

LEAST = 256  # states that there is room for at first
FOLLOWERS = 64  # of a state, that are read at once


class Automaton(Structure):
    """As in substrings.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("link", "length", "count", "latest", "newest")),
        *((name, c_void_p) for name in ("older", "from_", "token", "to", "slots")),
        *((name, c_int64) for name in ("states", "edges", "state_room", "edge_room", "mask", "end_")),
    )


class Substrings:
    """`SuffixAutomaton`, in arrays that growth reads, too."""

    def __init__(self, links: int) -> None:
        self.at, self._links = Automaton(), links
        self._states, self._edges = np.empty((5, 0), np.int32), np.empty((4, 0), np.int32)
        self._enlarge(LEAST, 2 * LEAST)
        library().begin_text(byref(self.at))
        self._found, self._length = np.empty((2, FOLLOWERS), np.int32), c_int32()

    @property
    def states(self) -> int:
        return int(self.at.states)

    @property
    def end(self) -> tuple[int, int]:
        return self.at.end_, int(self._states[1, self.at.end_])

    def extend(self, tokens: Sequence[int]) -> None:
        text, done = np.array(tokens, np.int32), 0
        while done < len(text):
            rest = address(text[done:]), c_int64(len(text) - done), c_int64(self._links)
            done += library().append_text(byref(self.at), *rest)
            if done < len(text):
                self._enlarge(2 * self.at.state_room, 2 * self.at.edge_room)

    def part(self) -> None:
        self.at.end_ = 0

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        self._length.value = length
        after = library().step_text(byref(self.at), c_int64(state), c_int64(token), byref(self._length))
        return after, self._length.value

    def shorter(self, state: int) -> tuple[int, int]:
        link, length = self._states[:2]
        return int(link[state]), int(length[link[state]])

    def followers(self, state: int) -> dict[int, int]:
        room = self._found.shape[1]
        where = address(self._found), c_int64(room)
        count = library().followers(byref(self.at), c_int64(state), *where)
        if count > room:
            self._found = np.empty((2, 2 * count), np.int32)
            return self.followers(state)
        tokens, times = self._found[:, :count].tolist()
        return dict(zip(tokens, times, strict=True))

    def latest(self, state: int) -> int:
        return int(self._states[3, state])

    def _enlarge(self, states: int, edges: int) -> None:
        at = self.at
        self._states, self._edges = _wider(self._states, states), _wider(self._edges, edges)
        slots = 1 << (2 * edges - 1).bit_length()
        self._slots = np.empty(slots, np.int32)
        at.link, at.length, at.count, at.latest, at.newest = (row.ctypes.data for row in self._states)
        at.older, at.from_, at.token, at.to = (row.ctypes.data for row in self._edges)
        at.slots, at.mask = self._slots.ctypes.data, slots - 1
        at.state_room, at.edge_room = states, edges
        library().move_text(byref(at))


def _wider(rows: Rows, width: int) -> Rows:
    made = np.empty((len(rows), width), np.int32)
    made[:, : rows.shape[1]] = rows
    return made
