"""The lean path's layers through the compiled operators: bf16 on a CPU, packed weights."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.cache import KVCache
from draftwood.decoder import Layer, Shape
from draftwood.errors import BadModel
from draftwood.native.build import Built
from draftwood.plan import Plan

LANES = 16  # as in ops.c
MOST_DIM = 512


def declines(shape: Shape, hidden: int, inner: int, dtype: torch.dtype) -> str | None:
    """Why the operators cannot serve a model; None if they can."""
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, not bfloat16"
    if any(size % LANES for size in (shape.head_dim, hidden, inner)) or shape.head_dim > MOST_DIM:
        return f"heads of {shape.head_dim}, {hidden} and {inner} are not all multiples of {LANES}"
    return None


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

    def attend(
        self,
        layer: Layer,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        parts: Parts,
        cache: KVCache,
        index: int,
        window: int | None,
    ) -> Tensor:
        """What each token sees, `[N, H * D]`, for qkv `[N, (H + 2 G) * D]`; keys and values go into `cache`."""
        shape, functions = self.shape, self.built.functions
        q = qkv.new_empty(len(qkv), shape.heads, shape.head_dim)
        where = parts.at(cache, index, qkv.new_empty(shape.kv_heads, 0, shape.head_dim))
        sizes = _sizes(shape.heads, shape.kv_heads, shape.head_dim)
        turn = (_at(layer.qk_norm), _at(cos), _at(sin))
        functions.rotate_store(_at(qkv), *turn, _at(q), *where, *sizes, c_float(shape.norm_eps), _threads())
        seen = torch.zeros_like(q)  # rows of no token go through the products, too
        how = (c_int64(window or 0), c_float(self.scale), _threads())
        if functions.attend(_at(q), *where, _at(seen), *sizes, *how):
            raise BadModel(f"Attention over {parts.longest} tokens found no memory for its scores.")
        return seen.flatten(1)


class Parts:
    """The segments of a plan as the operators read them: `Part` in ops.c, a row for each."""

    def __init__(self, plan: Plan, cache: KVCache) -> None:
        self._segments, self.longest = plan.segments, max(part.context + part.size for part in plan.segments)
        self._visible = [None if p.visible is None else np.ascontiguousarray(p.visible) for p in plan.segments]
        masks = [0 if visible is None else visible.ctypes.data for visible in self._visible]
        rows = [cache.rows[part.row].capacity for part in plan.segments]
        self._table = np.array(
            [
                (0, 0, mask, part.depths.ctypes.data, part.start, part.size, slots, part.context)
                for part, mask, slots in zip(plan.segments, masks, rows, strict=True)
            ],
            np.int64,
        )

    def at(self, cache: KVCache, layer: int, like: Tensor) -> tuple[c_void_p, c_int64]:
        """The table with the slots of one layer, whose keys and values are `like` this `[G, 0, D]`; its length."""
        slots = [cache.rows[part.row].layer(layer, like, like) for part in self._segments]
        self._table[:, :2] = [(keys.data_ptr(), values.data_ptr()) for keys, values in slots]
        return c_void_p(self._table.ctypes.data), c_int64(len(slots))


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]


def _threads() -> int:
    return torch.get_num_threads()
