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
from draftwood.plan import Plan, Segment

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

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """`x += delta` in place; returns RMSNorm(x) * weight. All `[N, hidden]`."""
        out = torch.empty_like(x)
        self.built.functions.add_norm(
            _at(x), _at(delta), _at(weight), _at(out), c_float(self.shape.norm_eps), *_sizes(*x.shape), _threads()
        )
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
        plan: Plan,
        cache: KVCache,
        index: int,
        window: int | None,
    ) -> Tensor:
        """What each token sees, `[N, H * D]`, for qkv `[N, (H + 2 G) * D]`; keys and values go into `cache`."""
        shape, functions = self.shape, self.built.functions
        q = qkv.new_empty(len(qkv), shape.heads, shape.head_dim)
        like = qkv.new_empty(shape.kv_heads, 0, shape.head_dim)
        slots = [cache.rows[part.row].layer(index, like, like) for part in plan.segments]
        for part, (keys, values) in zip(plan.segments, slots, strict=True):
            rows = slice(part.start, part.stop)
            functions.rotate_store(
                _at(qkv[rows]), _at(layer.qk_norm), _at(cos[rows]), _at(sin[rows]), _at(q[rows]),
                _at(keys), _at(values),
                *_sizes(part.size, shape.heads, shape.kv_heads, shape.head_dim, keys.shape[1], part.context),
                c_float(shape.norm_eps), _threads(),
            )  # fmt: skip
        seen = torch.zeros_like(q)  # rows of no token go through the products, too
        for part, (keys, values) in zip(plan.segments, slots, strict=True):
            self._see(part, q, keys, values, seen, window)
        return seen.flatten(1)

    def _see(self, part: Segment, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, window: int | None) -> None:
        shape, rows = self.shape, slice(part.start, part.stop)
        visible = None if part.visible is None else np.ascontiguousarray(part.visible).ctypes.data
        failed = self.built.functions.attend(
            _at(q[rows]), _at(keys), _at(values), c_void_p(visible), c_void_p(part.depths.ctypes.data), _at(seen[rows]),
            *_sizes(part.size, shape.heads, shape.kv_heads, shape.head_dim, keys.shape[1], part.context, window or 0),
            c_float(self.scale), _threads(),
        )  # fmt: skip
        if failed:
            raise BadModel(f"Attention over {part.context + part.size} tokens found no memory for its scores.")


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]


def _threads() -> int:
    return torch.get_num_threads()
