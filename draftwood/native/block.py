"""A block drafter's draft for one request in one call, from waiting taps to candidates and their pairs."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from draftwood.cores import threads
from draftwood.errors import BadModel
from draftwood.native.build import address, library
from draftwood.native.forward import Fused, Native
from draftwood.native.growth import grown
from draftwood.noise import Ahead
from draftwood.tree import Ints, Lattice
from draftwood.trellis import Block, Trellis


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """What comes before a block."""

    taps: Tensor  # [any, taps * hidden], of which the first `waiting` have no keys and values yet
    waiting: int
    context: int  # tokens that have keys and values
    room: int  # slots of each layer, the block's own included
    slots: Ints  # [layers, 2]: where the keys and values of each layer begin


class Blocks:
    """The drafts of one block drafter, whose products are all compiled."""

    def __init__(self, native: Native, fused: Fused, ids: Tensor | None, tables: tuple[Tensor, Tensor] | None) -> None:
        """`ids` [V] are the tokens of the head's rows (None: their numbers); the two `tables` [V, r] score pairs."""
        self._native, self._held = native, (fused, ids, tables)  # what addresses point to has to stay
        self._own = own = _Drafter(None, addressof(fused.fuse), addressof(fused.kv), fused.norm.data_ptr())
        own.k_norm, own.ids = (None if part is None else part.data_ptr() for part in (fused.k_norm, ids))
        if tables is not None:
            own.before, own.after, own.rank = *(table.data_ptr() for table in tables), tables[0].shape[1]

    def draft(self, behind: Behind, block: Sequence[int], depth: int, k: int, ahead: Ahead | None = None) -> Block:
        """`k` candidates of each of the first `depth` tokens after the root of `block`, which are masks; with noise
        `ahead` those that it favours. From now on the waiting taps have keys and values."""
        own, size = self._own, len(block)
        decoder = self._native.decoder(behind.context + behind.waiting + size)
        own.decoder, own.wide = addressof(decoder), behind.taps.shape[1]
        tokens, logp = np.empty((depth, k), np.int64), np.empty((depth, k), np.float32)
        pairs = np.empty((depth - 1, k, k), np.float32) if own.before else None
        keys, heat = (None, 0.0) if ahead is None else (ahead.keys, ahead.heat)
        taps, slots = behind.taps.data_ptr(), address(behind.slots)
        stands = _Behind(taps, slots, behind.waiting, behind.context, behind.room)
        found = _Found(address(keys), heat, depth, k, *map(address, (tokens, logp, pairs)))
        what = byref(own), byref(stands), (c_int64 * size)(*block), c_int64(size), byref(found)
        if library().draft_block(*what, threads()):
            raise BadModel(f"A block of {size} tokens after {behind.context} does not fit in memory.")
        lattice = Lattice(tokens, logp)
        return lattice if pairs is None else Trellis(lattice, pairs, grown)


class _Drafter(Structure):
    """`Drafter` in block.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("decoder", "fuse", "kv", "norm", "k_norm", "ids", "before", "after")),
        *((name, c_int64) for name in ("wide", "rank")),
    )


class _Behind(Structure):
    """`Behind` there."""

    _fields_ = (
        *((name, c_void_p) for name in ("taps", "slots")),
        *((name, c_int64) for name in ("waiting", "context", "room")),
    )


class _Found(Structure):
    """`Found` there: where candidates and pairs go."""

    _fields_ = (
        ("keys", c_void_p),
        ("heat", c_double),
        *((name, c_int64) for name in ("depth", "k")),
        *((name, c_void_p) for name in ("tokens", "logp", "pairs")),
    )
