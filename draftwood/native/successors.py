"""Learning what follows tokens in one call: in Python a dozen tokens take as long as a small drafter's forward."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p

import numpy as np

from draftwood.native.build import address, library, operators
from draftwood.successors import Array, Learn, Successors
from draftwood.tree import Ints


class Table(Structure):
    """As in successors.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("slots", "seen", "names", "probs")),
        *((name, c_int64) for name in ("known", "rows")),
    )


def table_of(known: Successors) -> Table:
    """Where its arrays are. They may be other ones once it has learned."""
    arrays = (known.slots, known.seen, known.names, known.probs)
    return Table(*(address(array) for array in arrays), len(known.slots), known.rows)


def quickest() -> Learn:
    """`Successors.learn`, compiled if that is possible."""
    return learn if operators().library is not None else Successors.learn


def learn(known: Successors, tokens: Sequence[int], followers: Ints, probs: Array) -> None:
    """`Successors.learn`, compiled."""
    known.make_room(tokens)
    table, given = table_of(known), np.array(tokens, np.int64)
    arrays = (given, np.ascontiguousarray(followers, np.int64), np.ascontiguousarray(probs, np.float64))
    library().learn_successors(byref(table), *map(address, arrays), *map(c_int64, followers.shape))
    known.rows = table.rows
