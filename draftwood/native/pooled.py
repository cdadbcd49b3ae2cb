"""Growing the likeliest paths of a pool, and its learning, in one call each: in Python a node takes a tenth of a
millisecond between forwards, which empty the caches."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_double, c_int64, c_void_p, cast

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BadModel
from draftwood.experts import Matches
from draftwood.native.build import address, library, operators
from draftwood.native.growth import masses
from draftwood.native.substrings import Substrings
from draftwood.native.successors import Table, table_of
from draftwood.noise import Ahead
from draftwood.pool import Pool, Quicker
from draftwood.pool_weights import Array, Weights
from draftwood.tree import Ints, Tree
from draftwood.trellis import Block, Trellis

Rows = NDArray[np.generic]

MOST_TEXTS = 4  # as in pooled.h


class _Matches(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("text", "evidence")),
        *((name, c_int64) for name in ("state", "length", "source")),
    )


class _Pool(Structure):
    """As in pooled.h, like `_Matches`."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "logp", "pairs")),
        ("table", POINTER(Table)),
        ("exponents", c_void_p),
        ("matches", POINTER(_Matches)),
        *((name, c_void_p) for name in ("keys", "shifts")),
        ("heat", c_double),
        *((name, c_int64) for name in ("depth", "k", "texts", "seen", "vocab", "most", "own", "learned")),
    )
    held: tuple[Rows | None, ...]


def quicker() -> Quicker | None:
    """How pools grow and learn, if that is compiled."""
    return Quicker(grown, learned) if operators().library is not None else None


def grown(
    pool: Pool, n_max: int, most: float, barren: float, ahead: Ahead | None, shifts: Ints | None, vocab: int
) -> Tree | None:
    """The same tree as by `pool.children`; None if some of its experts are not compiled."""
    own = _bound(pool)
    if own is None:
        return None
    if ahead is not None:
        own.keys, own.heat, own.seen = address(ahead.keys), ahead.heat, len(ahead.keys)
    own.shifts, own.vocab = address(shifts), vocab
    return _tree(own, pool.root, max(n_max, 0), most, barren)


def learned(pool: Pool, chosen: Sequence[int]) -> Array | None:
    """As `pool.learn`; None if some of its experts are not compiled."""
    own = _bound(pool)
    if own is None:
        return None
    tokens, judged = np.array(chosen, np.int64), np.empty((len(chosen), 3))
    what = c_int64(pool.root), address(tokens), c_int64(len(tokens)), address(judged)
    return judged[: library().learn_pooled(byref(own), *what)]


def _bound(pool: Pool) -> _Pool | None:
    texts = [one for one in pool.experts if isinstance(one, Matches) and isinstance(one.text, Substrings)]
    seen = isinstance(pool.lattice, Trellis) and pool.lattice.ahead is not None
    if seen or len(texts) < len(pool.experts) or len(texts) > MOST_TEXTS:
        return None
    own = _Pool()
    own.held = held = _lattice(pool.lattice)  # what addresses point to has to stay
    own.tokens, own.logp, own.pairs = map(address, held)
    own.depth, own.k = (0, 0) if held[0] is None else held[0].shape
    if pool.table is not None:
        own.table = POINTER(Table)(table_of(pool.table))
    own.exponents, own.texts = address(pool.weights.exponents), len(texts)
    own.matches = cast((_Matches * len(texts))(*(_matches(text, pool.weights) for text in texts)), POINTER(_Matches))
    own.most, own.own, own.learned = pool.max_depth, pool.own, pool.table_source
    return own


def _tree(own: _Pool, root: int, n_max: int, most: float, barren: float) -> Tree:
    rows, logs = np.empty((4, 1 + n_max), np.int64), np.empty(1 + n_max)
    rows[0, 0] = root
    bounds = c_int64(n_max), c_double(most), c_double(barren)
    count = library().grow_pooled(byref(own), address(rows), address(logs), *bounds)
    if count < 0:
        raise BadModel(f"A tree of {n_max} nodes does not fit in memory.")
    tokens, parents, depths, sources = rows[:, : 1 + count]
    return Tree(tokens, parents, depths, masses(logs[: 1 + count]), sources)


def _lattice(block: Block | None) -> tuple[Rows | None, ...]:
    if block is None:
        return None, None, None
    lattice, pairs = (block.lattice, block.pairs) if isinstance(block, Trellis) else (block, None)
    logp, pairs = (None if part is None else np.ascontiguousarray(part, np.float32) for part in (lattice.logp, pairs))
    return np.ascontiguousarray(lattice.tokens, np.int64), logp, pairs


def _matches(one: Matches, weights: Weights) -> _Matches:
    assert isinstance(one.text, Substrings)
    return _Matches(addressof(one.text.at), address(weights.matched(one.name)), *one.start(), one.source)
