"""The KV cache of a target: addressed by slot, rotated by position, moved by `commit` alone.

Each request owns one row of slots. Its first `length` slots hold committed tokens in order; a verified tree
lies behind them, node i in slot length + i, until `commit` keeps the accepted path and forgets the rest. Rows have
tensors of their own, so requests come, grow and go without moving each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftwood.native import slots
from draftwood.plan import Plan

MOST_SPARE = 256  # slots, at most, that a row grows by beyond what it needs: memory was not counted for them

Slots = list[Tensor]  # of one layer: a tensor [H_kv, S, d] for each row


def stored(dtype: torch.dtype, exact: bool) -> torch.dtype:
    """The number format in which keys and values of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32) if exact else dtype


def finite(states: Tensor) -> Tensor:
    """Zeros for what fp16 could not hold: masked attention to it is NaN times 0, which would reach those who do not see
    it."""
    return states.nan_to_num(0.0, 0.0, 0.0) if states.dtype == torch.float16 else states


class Row:
    """One request's slots: keys and values of every layer, `[H_kv, S, d]`, made when the first tokens are written."""

    def __init__(self, layers: int, capacity: int, exact: bool = False) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.capacity, self.exact = capacity, exact
        self.length = 0
        self._addresses: NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_addresses": None}  # a copy has other addresses

    @classmethod
    def over(cls, kv: Tensor) -> Row:
        """An inexact row in the buffer `kv` [layers, 2, H_kv, S, d], which stays where it is."""
        row = cls(len(kv), kv.shape[3])
        row.keys, row.values = [part[0] for part in kv], [part[1] for part in kv]
        return row

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store the tokens `[H_kv, N, d]` in the slots from `start` on; returns all slots of the layer."""
        kept, kept_values = self.layer(layer, keys, values)
        stop = start + keys.shape[1]
        kept[:, start:stop] = keys
        kept_values[:, start:stop, : values.shape[2]] = values
        return kept, kept_values

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All slots of a layer, made for keys and values like these `[H_kv, …, d]` if there are none yet."""
        kept, kept_values = self.keys[layer], self.values[layer]
        if kept is None or kept_values is None:
            kept, kept_values = self._made(keys, 0), self._made(values, int(self.exact))
            if self.exact:
                kept_values[..., -1] = 1
            self.keys[layer], self.values[layer] = kept, kept_values
        return kept, kept_values

    def addresses(self, like: Tensor) -> NDArray[np.int64]:
        """`[layers, 2]`: the addresses of the keys and values of each layer, made for tensors `like` this if needed."""
        if self._addresses is None:
            made = [self.layer(layer, like, like) for layer in range(len(self.keys))]
            self._addresses = np.array([[keys.data_ptr(), values.data_ptr()] for keys, values in made])
        return self._addresses

    def _made(self, like: Tensor, ones: int) -> Tensor:
        dtype = stored(like.dtype, self.exact)
        return like.new_empty(like.shape[0], self.capacity, like.shape[-1] + ones, dtype=dtype)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens; a row that has to grow gets some spare slots, too."""
        if capacity > self.capacity:
            self._resize(max(capacity, self.capacity + min(self.capacity, MOST_SPARE)))

    @torch.inference_mode()
    def _resize(self, capacity: int) -> None:
        """Move to tensors of this capacity, which has room for at least all committed slots."""
        self.capacity, kept, self._addresses = capacity, min(capacity, self.capacity), None
        for states, has_ones in ((self.keys, False), (self.values, self.exact)):
            for layer, old in enumerate(states):
                if old is not None:
                    new = old.new_empty(old.shape[0], capacity, old.shape[2])
                    new[:, :kept] = old[:, :kept]
                    if has_ones:
                        new[..., -1] = 1
                    states[layer] = new

    def copy(self, length: int, capacity: int) -> Row:
        """A separate row that holds the first `length` tokens and has room for `capacity`."""
        assert length <= self.length, f"cannot copy {length} of {self.length} tokens"
        other = Row(len(self.keys), length, self.exact)
        other.keys = [None if states is None else states[:, :length] for states in self.keys]
        other.values = [None if states is None else states[:, :length] for states in self.values]
        other.length = length
        other._resize(max(length, capacity))
        return other

    def advance(self, tokens: int) -> None:
        """Keep the first `tokens` of the tokens just written (a prompt chunk, or a root and its chain)."""
        self.length += tokens

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the accepted nodes `path` of the tree just verified. Nodes in place are not moved."""
        kept = 0  # nodes that are already in place
        while kept < len(path) and path[kept] == kept + 1:
            kept += 1
        if kept < len(path):
            self._move([self.length + node for node in path[kept:]], self.length + 1 + kept)
        self.advance(1 + len(path))

    def _move(self, source: list[int], start: int) -> None:
        """Gather slots `source` into the slots from `start` on; read before written, so overlap is safe."""
        if self._addresses is not None and self.keys[0] is not None:  # a compiled forward has asked where they are
            slots.move(self._addresses, self.keys[0], source, start)
        else:
            self._gather(source, start)

    @torch.inference_mode()
    def _gather(self, source: list[int], start: int) -> None:
        for kept in (self.keys, self.values):
            tensors = [states for states in kept if states is not None]
            if slots.takes(tensors):
                slots.move(slots.addresses(tensors), tensors[0], source, start)
                continue
            places = torch.tensor(source, device=tensors[0].device)
            for states in tensors:
                states[:, start : start + len(source)] = states.index_select(1, places)

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` committed tokens."""
        assert 0 <= length <= self.length, f"cannot rewind {self.length} tokens to {length}"
        self.length = length

    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(states.nbytes for states in (*self.keys, *self.values) if states is not None)


class SlotLayer(CacheLayerMixin):
    """The interface that transformers expects of a layer's cache. The slots themselves are in the rows."""

    is_croppable = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("rows make their slots")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("slots are written through KVCache.update, which knows the plan")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name before transformers 5.20
        return -1


class KVCache(Cache):
    """The rows of one forward. `rows` may be exchanged between forwards; segments of a plan name them by index.

    An `exact` cache is what `attention/invariant.py` reads: in at least fp32, with a column of ones behind the values.
    """

    def __init__(self, layers: int, rows: Sequence[Row]) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(layers)])
        self.rows = list(rows)
        self._plan: Plan | None = None

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.length for row in self.rows]

    @property
    def exact(self) -> bool:
        return self.rows[0].exact

    def clear(self) -> None:
        """Release the rows and the plan of the last forward."""
        self.rows, self._plan = [], None

    def place(self, plan: Plan) -> None:
        """Set which slots the next forward writes, and make room for them."""
        for part in plan.segments:
            self.rows[part.row].reserve(part.context + part.size)
        self._plan = plan

    def update(  # type: ignore[override]  # rows differ in length, so there is no tensor of all
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Slots, Slots]:
        """Store the flattened tokens `[1, H_kv, sum N, d]`; every slot of each segment, in the plan's order.

        Called by the model's attention, which hands the result on. The plan says which slots are visible.
        """
        assert self._plan is not None, "place(plan) comes before the forward"
        keys, values = finite(key_states[0]), finite(value_states[0])
        if len(self._plan.segments) == 1:
            (part,) = self._plan.segments
            written = [self.rows[part.row].write(layer_idx, keys, values, part.context)]
        else:
            written = list(self._write(self._plan, keys, values, layer_idx))
        return [slots for slots, _ in written], [slots for _, slots in written]

    def _write(self, plan: Plan, keys: Tensor, values: Tensor, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        for part in plan.segments:
            span = slice(part.start, part.stop)
            yield self.rows[part.row].write(layer, keys[:, span], values[:, span], part.context)

    def advance(self, row: int, tokens: int) -> None:
        self.rows[row].advance(tokens)

    def commit(self, row: int, path: Sequence[int]) -> None:
        self.rows[row].commit(path)

    def rewind(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(row.nbytes() for row in self.rows)


def head_dims(text: PretrainedConfig) -> list[int]:
    """The size of one head in each layer."""
    return [getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads for c in _layers(text)]


def kv_widths(text: PretrainedConfig) -> list[int]:
    """The size of a token's key in each layer, all heads together."""
    heads = [getattr(c, "num_key_value_heads", None) or c.num_attention_heads for c in _layers(text)]
    return [count * dim for count, dim in zip(heads, head_dims(text), strict=True)]


def query_widths(text: PretrainedConfig) -> list[int]:
    """The size of a token's query in each layer, all heads together."""
    return [c.num_attention_heads * dim for c, dim in zip(_layers(text), head_dims(text), strict=True)]


def _layers(text: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """A config for each layer. In some families (Gemma 4) layers differ, and the overall config has no one answer."""
    differ = getattr(text, "is_heterogeneous", False)
    return list(text.per_layer_config) if differ else [text] * text.num_hidden_layers
