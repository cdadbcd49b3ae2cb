"""Decoder layers through the compiled operators: the lean path's and a drafter's, in bf16 on a CPU, packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.decoder import Layer, Shape
from draftwood.errors import BadModel
from draftwood.native.build import Built, operators
from draftwood.plan import Segment

LANES = 16  # as in ops.c
MOST_DIM = 512


def declines(shape: Shape, hidden: int, inner: int, dtype: torch.dtype) -> str | None:
    """Why the operators cannot serve a model; None if they can."""
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, not bfloat16"
    if any(size % LANES for size in (shape.head_dim, hidden, inner)) or shape.head_dim > MOST_DIM:
        return f"heads of {shape.head_dim}, {hidden} and {inner} are not all multiples of {LANES}"
    return None


def bind(shape: Shape, scale: float, hidden: int, inner: int, like: Tensor) -> Native | str:
    """The operators bound to a model whose weights are `like` this one, or why there are none."""
    if like.device.type != "cpu":
        return "the model is not on a CPU"
    reason = declines(shape, hidden, inner, like.dtype)
    if reason is not None:
        return reason
    built = operators()
    return Native(built, shape, scale) if built.library else built.reason


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """The operators bound to one model's shape."""

    built: Built
    shape: Shape
    scale: float

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, tap: Tensor | None = None) -> Tensor:
        """`x += delta` in place, and in `tap`; returns RMSNorm(x) * weight. All `[N, hidden]`."""
        out = torch.empty_like(x)
        taken = _at(tap), c_int64(0 if tap is None else tap.stride(0))
        eps, sizes = c_float(self.shape.norm_eps), _sizes(*x.shape)
        self.built.functions.add_norm(_at(x), _at(delta), _at(weight), _at(out), *taken, eps, *sizes, _threads())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`[N, I]` of `[N, 2 I]`."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.built.functions.swiglu(_at(gate_up), _at(out), *_sizes(*out.shape), _threads())
        return out

    def run(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        parts: Parts,
        windows: Sequence[int | None],
        last_norm: Tensor,
        taps: Mapping[int, Tensor],
    ) -> Tensor:
        """All layers over `x` [N, hidden], which is written over, and the norm behind them; `cos` and `sin` [N, D].

        `taps[i]` [N, hidden] takes what layer i - 1 gave.
        """
        delta = None
        for i, layer in enumerate(layers):
            qkv = layer.qkv(self.add_norm(x, delta, layer.input_norm, taps.get(i)))
            seen = self._attend(layer, qkv, cos, sin, parts, i, windows[i])
            gate_up = layer.gate_up(self.add_norm(x, layer.output(seen), layer.post_norm))
            delta = layer.down(self.swiglu(gate_up))
        return self.add_norm(x, delta, last_norm, taps.get(len(layers)))

    def _attend(
        self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor, parts: Parts, index: int, window: int | None
    ) -> Tensor:
        """What each token sees, `[N, H * D]`, for qkv `[N, (H + 2 G) * D]`; keys and values go into their slots."""
        shape, functions = self.shape, self.built.functions
        q = qkv.new_empty(len(qkv), shape.heads, shape.head_dim)
        where = parts.at(index)
        sizes = _sizes(shape.heads, shape.kv_heads, shape.head_dim)
        turn = (_at(layer.qk_norm), _at(cos), _at(sin))
        functions.rotate_store(_at(qkv), *turn, _at(q), *where, *sizes, c_float(shape.norm_eps), _threads())
        seen = torch.zeros_like(q)  # rows of no token go through the products, too
        how = (c_int64(window or 0), c_float(self.scale), _threads())
        if functions.attend(_at(q), *where, _at(seen), *sizes, *how):
            raise BadModel(f"Attention over {parts.longest} tokens found no memory for its scores.")
        return seen.flatten(1)


class Parts:
    """Segments as the operators read them: `Part` in ops.c, a row for each."""

    def __init__(
        self,
        segments: Sequence[Segment],
        capacities: Sequence[int],
        addresses: Sequence[NDArray[np.int64]],
        whole: Callable[[int], bool] = lambda layer: False,
    ) -> None:
        """`capacities` count the slots of each, and `addresses` [layers, 2] are where its keys and values [G, slots, D]
        begin. In layers that are `whole` all tokens of a segment see each other."""
        self._addresses, self._whole = np.stack(addresses, 1), whole
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

    def at(self, layer: int) -> tuple[c_void_p, c_int64]:
        """The table with the slots of one layer, and its length."""
        self._table[:, :2] = self._addresses[layer]
        self._table[:, -1] = self._whole(layer)
        return c_void_p(self._table.ctypes.data), c_int64(len(self._table))


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]


def _threads() -> int:
    return torch.get_num_threads()
