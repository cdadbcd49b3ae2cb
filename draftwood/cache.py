"""The KV cache of a target: addressed by slot, rotated by position, moved by `commit` alone.

Each request owns one row of slots. Its first `length` slots hold committed tokens in order; a verified tree
lies behind them, node i in slot length + i, until `commit` keeps the accepted path and forgets the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftwood.plan import Plan


def stored(dtype: torch.dtype, exact: bool) -> torch.dtype:
    """The number format in which keys and values of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32) if exact else dtype


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, `[B, H_kv, S, d]`; shapes are learned from the first tokens written."""

    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, requests: int, capacity: int, exact: bool) -> None:
        super().__init__()
        self.requests, self.capacity, self.exact = requests, capacity, exact

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dtype = stored(key_states.dtype, self.exact)
        keys, values = (
            states.new_empty(self.requests, states.shape[1], self.capacity, states.shape[3] + ones, dtype=dtype)
            for states, ones in ((key_states, 0), (value_states, int(self.exact)))
        )
        if self.exact:
            values[..., -1] = 1
        self.adopt(keys, values)

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values in these tensors."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("slot layers are written through KVCache.update, which knows the plan")

    def write(self, key_states: Tensor, value_states: Tensor, plan: Plan) -> None:
        """Store the flattened tokens `[1, H_kv, sum N, d]` behind each request's committed ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for part in plan.segments:
            end = part.context + part.size
            self.keys[part.row, :, part.context : end] = key_states[0, :, part.start : part.stop]
            values = self.values[part.row, :, part.context : end]
            values[..., : value_states.shape[3]] = value_states[0, :, part.start : part.stop]

    def move(self, row: int, source: Tensor, start: int) -> None:
        """Gather slots `source` into the slots from `start` on; read before written, so overlap is safe."""
        for states in (self.keys, self.values):
            states[row, :, start : start + len(source)] = states[row].index_select(1, source)

    def grow(self, capacity: int) -> None:
        self.capacity = capacity
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                if self.exact and name == "values":
                    new[..., -1] = 1
                setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name before transformers 5.20
        return -1


class KVCache(Cache):
    """Slots for `requests` requests of `capacity` tokens each; grows when a round needs more.

    An `exact` cache is what `attention/invariant.py` reads: in at least fp32, with a column of ones behind the values.
    """

    def __init__(self, layers: int, capacity: int, requests: int = 1, exact: bool = False) -> None:
        self._slots = [SlotLayer(requests, capacity, exact) for _ in range(layers)]
        super().__init__(layers=list(self._slots))
        self.lengths = [0] * requests
        self.capacity, self.exact = capacity, exact
        self._plan: Plan | None = None

    @classmethod
    def over(cls, kv: Tensor) -> KVCache:
        """An inexact cache of one request in the buffer `kv` [layers, 2, H_kv, S, d], which stays where it is."""
        cache = cls(len(kv), kv.shape[3])
        for layer, (keys, values) in zip(cache._slots, kv, strict=True):
            layer.adopt(keys[None], values[None])
        return cache

    def place(self, plan: Plan) -> None:
        """Say which slots the next forward writes, making room for them."""
        needed = max(part.context + part.size for part in plan.segments)
        if needed > self.capacity:
            self.capacity = max(needed, 2 * self.capacity)
            for layer in self._slots:
                layer.grow(self.capacity)
        self._plan = plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: returns every slot; the plan says which of them are visible."""
        assert self._plan is not None, "place(plan) comes before the forward"
        layer = self._slots[layer_idx]
        layer.write(key_states, value_states, self._plan)
        return layer.keys, layer.values

    def slots(self, layer_idx: int, like: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
        """Every slot of a layer, `[B, H_kv, S, d]` twice, for code that writes keys and values there by itself."""
        layer = self._slots[layer_idx]
        if not layer.is_initialized:
            shape = like.new_empty(1, heads, 0, dim)
            layer.lazy_initialization(shape, shape)
        return layer.keys, layer.values

    def advance(self, row: int, tokens: int) -> None:
        """Keep the first `tokens` of the tokens just written (a prompt chunk, or a root and its chain)."""
        self.lengths[row] += tokens

    @torch.inference_mode()
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep the root and the accepted nodes `path` of the tree just verified. A prefix moves nothing."""
        start = self.lengths[row]
        kept = 0  # nodes that lie where they belong
        while kept < len(path) and path[kept] == kept + 1:
            kept += 1
        if kept < len(path):
            moved = [layer for layer in self._slots if layer.is_initialized]
            source = torch.tensor([start + node for node in path[kept:]], device=moved[0].keys.device)
            for layer in moved:
                layer.move(row, source, start + 1 + kept)
        self.advance(row, 1 + len(path))

    def rewind(self, row: int, length: int) -> None:
        """Forget everything after the first `length` committed tokens."""
        assert 0 <= length <= self.lengths[row], f"cannot rewind {self.lengths[row]} tokens to {length}"
        self.lengths[row] = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._slots if layer.is_initialized)
