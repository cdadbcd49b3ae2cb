"""Growing the likeliest paths of a pool in one call: asked for node by node, each takes a tenth of a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_double, c_int64, c_void_p, cast

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BadModel
from draftwood.experts import Expert, Matches
from draftwood.native.build import operators
from draftwood.native.substrings import Substrings
from draftwood.noise import Ahead
from draftwood.pool import Pool, Quicker, Weights
from draftwood.successors import KEPT, Successors
from draftwood.tree import Ints, Tree
from draftwood.trellis import Block, Trellis

MOST_TEXTS = 4  # as in pooled.c


class _Table(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("slots", "seen", "names", "probs")),
        *((name, c_int64) for name in ("known", "kept")),
    )


class _Matches(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("text", "shares")),
        *((name, c_int64) for name in ("state", "length", "source")),
    )


class _Pool(Structure):
    """As in pooled.c, like the two above."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "logp", "pairs")),
        ("table", POINTER(_Table)),
        ("exponents", c_void_p),
        ("matches", POINTER(_Matches)),
        *((name, c_void_p) for name in ("keys", "shifts")),
        ("heat", c_double),
        *((name, c_int64) for name in ("depth", "k", "texts", "seen", "vocab", "most", "own", "learned")),
    )


def quicker() -> Quicker | None:
    """How pools grow, if that is compiled."""
    return grown if operators().library is not None else None


def grown(
    pool: Pool, n_max: int, most: float, barren: float, ahead: Ahead | None, shifts: Ints | None, vocab: int
) -> Tree | None:
    """The same tree as by `pool.children`; None if some of its experts are not compiled."""
    texts = _texts(pool.experts)
    if texts is None or (isinstance(pool.lattice, Trellis) and pool.lattice.ahead is not None):
        return None
    own, held = _Pool(), _lattice(pool.lattice)  # `held` is what the addresses are of
    own.tokens, own.logp, own.pairs = (_at(part) for part in held)
    own.depth, own.k = (0, 0) if held[0] is None else held[0].shape
    table = None if pool.table is None else _table(pool.table)
    own.table = None if table is None else POINTER(_Table)(table)
    own.exponents, own.texts = _at(pool.weights.exponents), len(texts)
    own.matches = cast((_Matches * len(texts))(*(_matches(text, pool.weights) for text in texts)), POINTER(_Matches))
    if ahead is not None:
        own.keys, own.heat, own.seen = _at(ahead.keys), ahead.heat, len(ahead.keys)
    own.shifts, own.vocab = _at(shifts), vocab
    own.most, own.own, own.learned = pool.max_depth, pool.own, pool.table_source
    return _tree(own, pool.root, max(n_max, 0), most, barren)


def _tree(own: _Pool, root: int, n_max: int, most: float, barren: float) -> Tree:
    rows, costs = np.empty((4, 1 + n_max), np.int64), np.empty(1 + n_max)
    rows[0, 0] = root
    bounds = c_int64(n_max), c_double(most), c_double(barren)
    count = operators().functions.grow_pooled(byref(own), _at(rows), _at(costs), *bounds)
    if count < 0:
        raise BadModel(f"A tree of {n_max} nodes found no memory.")
    tokens, parents, depths, sources = rows[:, : 1 + count]
    return Tree(tokens, parents, depths, np.exp(-costs[: 1 + count]).astype(np.float32), sources)


def _texts(experts: Sequence[Expert]) -> list[Matches] | None:
    found = [one for one in experts if isinstance(one, Matches) and isinstance(one.text, Substrings)]
    return found if len(found) == len(experts) <= MOST_TEXTS else None


def _lattice(block: Block | None) -> tuple[NDArray[np.generic] | None, ...]:
    if block is None:
        return None, None, None
    lattice, pairs = (block.lattice, block.pairs) if isinstance(block, Trellis) else (block, None)
    logp, pairs = (None if part is None else np.ascontiguousarray(part, np.float32) for part in (lattice.logp, pairs))
    return np.ascontiguousarray(lattice.tokens, np.int64), logp, pairs


def _table(known: Successors) -> _Table:
    rows = (known.slots, known.seen, known.names, known.probs)
    return _Table(*(_at(row) for row in rows), len(known.slots), KEPT)


def _matches(one: Matches, weights: Weights) -> _Matches:
    assert isinstance(one.text, Substrings)
    return _Matches(addressof(one.text.at), _at(weights.shares(one.name)), *one.start(), one.source)


def _at(array: NDArray[np.generic] | None) -> c_void_p:
    return c_void_p(None if array is None else array.ctypes.data)
