"""What the compiled operators read, as layers.h and native.h lay it out."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwood.decoder import Layer, Sight
from draftwood.native.build import address
from draftwood.packing import panels_of
from draftwood.plan import Segment
from draftwood.tree import Bools

TAP = -1  # the column of a table of layers that says where taps go
NOWHERE = -1
COLUMNS = 9  # of `Part` in native.h

Table: TypeAlias = NDArray[np.int64]


class Linear(Structure):
    """`Linear` in layers.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Ends(Structure):
    """`Ends` in layers.h, the head's two addresses in line."""

    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "norm", "weight", "bias")),
        ("vocab", c_int64),
        ("scale", c_float),
    )


class Sizes(Structure):
    """`Shape` in layers.h."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "hidden", "inner")),
        ("eps", c_float),
        ("scale", c_float),
    )


class Decoder(Structure):
    """`Decoder` in layers.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("count", c_int64),
        ("shape", POINTER(Sizes)),
        ("ends", POINTER(Ends)),
        *((name, c_void_p) for name in ("cosines", "sines")),
    )


def table_of(layers: Sequence[Layer], sights: Sequence[Sight]) -> Table | None:
    """`Layer` in layers.h, a row for each layer; None where products are not compiled."""
    rows = []
    for layer, sight in zip(layers, sights, strict=True):
        linears = [panels_of(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        if None in linears:
            return None
        norms = [
            0 if weight is None else weight.data_ptr() for weight in (layer.input_norm, layer.qk_norm, layer.post_norm)
        ]
        addresses = (part for linear in linears if linear for part in linear)
        rows.append([*norms, *addresses, sight.window or 0, not sight.causal, NOWHERE])
    return np.array(rows, np.int64)


class Parts:
    """Segments as the operators read them: `Part` in native.h, a row for each."""

    def __init__(
        self,
        segments: Sequence[Segment],
        capacities: Sequence[int],
        addresses: Sequence[NDArray[np.int64]],
        gap: int = 0,
    ) -> None:
        """`capacities` count the slots of each, and `addresses` [layers, 2] are where its keys and values [G, slots, D]
        begin. Positions go on `gap` after the context."""
        self._addresses = addresses[0][:, None] if len(addresses) == 1 else np.stack(addresses, 1)
        self.longest = max(part.context + gap + part.size for part in segments)
        self._kept = [_Kept.of(part) for part in segments]
        rows = [
            (0, 0, kept.mask, addressof(kept.depths), part.start, part.size, room, part.context, 0)
            for part, kept, room in zip(segments, self._kept, capacities, strict=True)
        ]
        self._count, self._table = len(rows), (c_int64 * (COLUMNS * len(rows)))(*chain.from_iterable(rows))

    def everywhere(self) -> tuple[Array[c_int64], c_int64, c_void_p]:
        """The table, its length, and where each layer's slots are."""
        return self._table, c_int64(self._count), address(self._addresses)

    def at(self, layer: int, whole: bool) -> tuple[Array[c_int64], c_int64]:
        """The table with the slots of one layer, and its length."""
        for row, slots in enumerate(self._addresses[layer].tolist()):
            self._table[COLUMNS * row : COLUMNS * row + 2] = slots
            self._table[COLUMNS * row + COLUMNS - 1] = whole
        return self._table, c_int64(self._count)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What the addresses in a row of the table point to."""

    depths: Array[c_int64]
    visible: Bools | None
    mask: int  # where it begins; 0 for None

    @classmethod
    def of(cls, part: Segment) -> _Kept:
        visible = None if part.visible is None else np.ascontiguousarray(part.visible)
        # Arrays of ctypes: after a forward, when caches are cold, numpy takes longer to make them and to find them.
        return cls((c_int64 * part.size)(*part.depths.tolist()), visible, address(visible).value or 0)


def at(tensor: Tensor | None, row: int = 0) -> c_void_p:
    """The address of a row of a contiguous tensor. Slicing would take longer than the operator that reads it."""
    if tensor is None:
        return c_void_p(None)
    return c_void_p(tensor.data_ptr() + (row and row * tensor.stride(0) * tensor.itemsize))
