"""Decoder layers through the compiled operators: the lean path's and a drafter's, in bf16 on a CPU, packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.decoder import Layer, Shape, Sight
from draftwood.errors import BadModel
from draftwood.native.build import Built, operators
from draftwood.packing import LEAST_ROWS, panels_of
from draftwood.plan import Segment

LANES = 16  # as in native.h
MOST_DIM = 512  # as in ops.c
TAP = -1  # the column of the table that changes from call to call

Table: TypeAlias = NDArray[np.int64]


def declines(shape: Shape, hidden: int, inner: int, dtype: torch.dtype) -> str | None:
    """Why the operators cannot serve a model; None if they can."""
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, not bfloat16"
    if any(size % LANES for size in (shape.head_dim, hidden, inner)) or shape.head_dim > MOST_DIM:
        return f"heads of {shape.head_dim}, {hidden} and {inner} are not all multiples of {LANES}"
    return None


def bind(
    shape: Shape, scale: float, layers: Sequence[Layer], sights: Sequence[Sight], last_norm: Tensor
) -> Native | str:
    """The operators bound to a model's layers and the norm behind them, or why there are none."""
    if last_norm.device.type != "cpu":
        return "the model is not on a CPU"
    reason = declines(shape, len(last_norm), _inner(layers), last_norm.dtype)
    if reason is not None:
        return reason
    built = operators()
    return Native(built, shape, scale, layers, sights, last_norm) if built.library else built.reason


class Native:
    """The operators bound to one model's layers."""

    def __init__(
        self,
        built: Built,
        shape: Shape,
        scale: float,
        layers: Sequence[Layer],
        sights: Sequence[Sight],
        last_norm: Tensor,
    ) -> None:
        self.built, self._shape, self._scale, self._last_norm = built, shape, scale, last_norm
        self._layers, self._sights, self._table = layers, sights, _table(layers, sights)
        inner = _inner(layers)
        self._sizes = _Sizes(shape.heads, shape.kv_heads, shape.head_dim, len(last_norm), inner, shape.norm_eps, scale)

    @property
    def calls_per_layer(self) -> int:
        """Calls from Python."""
        return 9 if self._table is None else 0

    @property
    def least_rows(self) -> int:
        """Forwards of fewer rows are no quicker than of so many."""
        return LEAST_ROWS if self._table is None else 1

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, parts: Parts, taps: Mapping[int, Tensor]) -> Tensor:
        """All layers over `x` [N, hidden], which is written over, and the norm behind them; `cos` and `sin` [N, D].

        `taps[i]` [N, hidden] takes what layer i - 1 gave.
        """
        if self._table is None:
            return self._run_apart(x, cos, sin, parts, taps)
        table, out = self._table.copy(), torch.empty_like(x)
        for i, tap in taps.items():
            if i < len(table):
                table[i, TAP] = tap.data_ptr()
        stride = next((tap.stride(0) for tap in taps.values()), 0)
        failed = self.built.functions.run_layers(
            c_void_p(table.ctypes.data), c_int64(len(table)), byref(self._sizes), _at(x), _at(out), c_int64(len(x)),
            _at(cos), _at(sin), *parts.everywhere(), _at(self._last_norm), _at(taps.get(len(table))), c_int64(stride),
            _threads(),
        )  # fmt: skip
        if failed:
            raise BadModel(f"{len(x)} rows behind {parts.longest} tokens found no memory.")
        return out

    def _run_apart(self, x: Tensor, cos: Tensor, sin: Tensor, parts: Parts, taps: Mapping[int, Tensor]) -> Tensor:
        """`run` around products that are not compiled."""
        delta = None
        for i, (layer, sight) in enumerate(zip(self._layers, self._sights, strict=True)):
            qkv = layer.qkv(self.add_norm(x, delta, layer.input_norm, taps.get(i)))
            seen = self._attend(layer, qkv, cos, sin, parts.at(i, not sight.causal), parts.longest, sight.window)
            gate_up = layer.gate_up(self.add_norm(x, layer.output(seen), layer.post_norm))
            delta = layer.down(self._swiglu(gate_up))
        return self.add_norm(x, delta, self._last_norm, taps.get(len(self._layers)))

    def store(self, kv: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, parts: Parts) -> None:
        """Keys and values of context tokens, `[N, layers * 2 * G * D]`, into the slots of one segment: keys normalised
        by `k_norm` [layers, G, D] and turned."""
        shape, (part, _, slots) = self._shape, parts.everywhere()
        sizes = (*_sizes(shape.kv_heads, shape.head_dim), c_float(shape.norm_eps), _threads())
        where = (_at(k_norm), _at(cos), _at(sin), part, slots)
        self.built.functions.store_layers(_at(kv), c_int64(len(self._layers)), *where, *sizes)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, tap: Tensor | None = None) -> Tensor:
        """`x += delta` in place, and in `tap`; returns RMSNorm(x) * weight. All `[N, hidden]`."""
        out = torch.empty_like(x)
        taken = _at(tap), c_int64(0 if tap is None else tap.stride(0))
        eps, sizes = c_float(self._shape.norm_eps), _sizes(*x.shape)
        self.built.functions.add_norm(_at(x), _at(delta), _at(weight), _at(out), *taken, eps, *sizes, _threads())
        return out

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        """`[N, I]` of `[N, 2 I]`."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.built.functions.swiglu(_at(gate_up), _at(out), *_sizes(*out.shape), _threads())
        return out

    def _attend(
        self,
        layer: Layer,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        where: tuple[c_void_p, c_int64],
        longest: int,
        window: int | None,
    ) -> Tensor:
        """What each token sees, `[N, H * D]`, for qkv `[N, (H + 2 G) * D]`; keys and values go into their slots."""
        shape, functions = self._shape, self.built.functions
        q = qkv.new_empty(len(qkv), shape.heads, shape.head_dim)
        sizes = _sizes(shape.heads, shape.kv_heads, shape.head_dim)
        turn = (_at(layer.qk_norm), _at(cos), _at(sin))
        functions.rotate_store(
            _at(qkv), c_int64(qkv.stride(0)), *turn, _at(q), *where, *sizes, c_float(shape.norm_eps), _threads()
        )
        seen = torch.zeros_like(q)  # rows of no token go through the products, too
        how = (c_int64(window or 0), c_float(self._scale), _threads())
        if functions.attend(_at(q), *where, _at(seen), *sizes, *how):
            raise BadModel(f"Attention over {longest} tokens found no memory for its scores.")
        return seen.flatten(1)


class _Sizes(Structure):
    """`Shape` in layers.c."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "hidden", "inner")),
        ("eps", c_float),
        ("scale", c_float),
    )


def _inner(layers: Sequence[Layer]) -> int:
    """How wide the MLP is inside."""
    down: Any = layers[0].down
    return int(down.in_features)


def _table(layers: Sequence[Layer], sights: Sequence[Sight]) -> Table | None:
    """`Layer` in layers.c, a row for each; None where products are not compiled."""
    rows = []
    for layer, sight in zip(layers, sights, strict=True):
        linears = [panels_of(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        if None in linears:
            return None
        norms = [
            0 if weight is None else weight.data_ptr() for weight in (layer.input_norm, layer.qk_norm, layer.post_norm)
        ]
        addresses = (address for linear in linears if linear for address in linear)
        rows.append([*norms, *addresses, sight.window or 0, not sight.causal, 0])
    return np.array(rows, np.int64)


class Parts:
    """Segments as the operators read them: `Part` in native.h, a row for each."""

    def __init__(
        self, segments: Sequence[Segment], capacities: Sequence[int], addresses: Sequence[NDArray[np.int64]]
    ) -> None:
        """`capacities` count the slots of each, and `addresses` [layers, 2] are where its keys and values [G, slots, D]
        begin."""
        self._addresses = np.stack(addresses, 1)
        self.longest = max(part.context + part.size for part in segments)
        self._kept = [(p.depths, None if p.visible is None else np.ascontiguousarray(p.visible)) for p in segments]
        masks = [0 if visible is None else visible.ctypes.data for _, visible in self._kept]
        self._table = np.array(
            [
                (0, 0, mask, part.depths.ctypes.data, part.start, part.size, room, part.context, 0)
                for part, mask, room in zip(segments, masks, capacities, strict=True)
            ],
            np.int64,
        )

    def everywhere(self) -> tuple[c_void_p, c_int64, c_void_p]:
        """The table, its length, and where each layer's slots are."""
        return c_void_p(self._table.ctypes.data), c_int64(len(self._table)), c_void_p(self._addresses.ctypes.data)

    def at(self, layer: int, whole: bool) -> tuple[c_void_p, c_int64]:
        """The table with the slots of one layer, and its length."""
        self._table[:, :2] = self._addresses[layer]
        self._table[:, -1] = whole
        return self.everywhere()[:2]


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]


def _threads() -> int:
    return torch.get_num_threads()
