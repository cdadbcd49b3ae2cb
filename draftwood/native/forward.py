"""Decoders from tokens to logits by compiled operators: the lean path's and a drafter's, in bf16 on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, byref, c_float, c_int64, c_void_p, pointer
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.cores import threads
from draftwood.decoder import Layer, Shape, Sight
from draftwood.errors import BadModel
from draftwood.native import records
from draftwood.native.build import Built, address, operators
from draftwood.native.candidates import Rows
from draftwood.native.records import NOWHERE, TAP, Parts, Table, at
from draftwood.packing import LEAST_ROWS, panels_of
from draftwood.plan import Verified, moved
from draftwood.rotary import Rotary
from draftwood.tree import Ints

LANES = 16  # the most of native.h
MOST_DIM = 512  # as in native.h


def declines(shape: Shape, hidden: int, inner: int, dtype: torch.dtype) -> str | None:
    """Why the operators cannot serve a model; None if they can."""
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, not bfloat16"
    if any(size % LANES for size in (shape.head_dim, hidden, inner)) or shape.head_dim > MOST_DIM:
        return f"heads of {shape.head_dim}, {hidden} and {inner} are not all multiples of {LANES}"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What comes before and after a model's layers."""

    embedding: Tensor  # [V, hidden]
    scale: float  # of its rows
    rotary: Rotary
    norm: Tensor  # [hidden]
    head: nn.Module  # hidden -> vocabulary

    def embed(self, tokens: Tensor) -> Tensor:
        """`[N, hidden]` of `tokens` [N]."""
        rows = F.embedding(tokens, self.embedding)
        return rows if self.scale == 1.0 else rows * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Fusing:
    """What turns taps into context features, and these into keys and values in all layers."""

    fuse: nn.Module  # taps * hidden -> hidden
    norm: Tensor  # [hidden]
    kv: nn.Module  # hidden -> layers * 2 * G * D
    k_norm: Tensor | None  # [layers, G, D]


def bind(shape: Shape, scale: float, layers: Sequence[Layer], sights: Sequence[Sight], ends: Ends) -> Native | str:
    """The operators bound to a model, or why there are none."""
    if ends.norm.device.type != "cpu":
        return "the model is not on a CPU"
    reason = declines(shape, len(ends.norm), _inner(layers), ends.norm.dtype)
    if reason is not None:
        return reason
    built = operators()
    return Native(built, shape, scale, layers, sights, ends) if built.library else built.reason


class Native:
    """The operators bound to one model."""

    def __init__(
        self, built: Built, shape: Shape, scale: float, layers: Sequence[Layer], sights: Sequence[Sight], ends: Ends
    ) -> None:
        self.built, self._shape, self._scale, self._ends = built, shape, scale, ends
        self._layers, self._sights, self._table = layers, sights, records.table_of(layers, sights)
        self._tappings: dict[tuple[int, ...], _Tapping] = {}
        hidden, inner = len(ends.norm), _inner(layers)
        self._sizes = records.Sizes(shape.heads, shape.kv_heads, shape.head_dim, hidden, inner, shape.norm_eps, scale)
        self._head = panels_of(ends.head)
        head: Any = ends.head
        vocab, addresses = (head.out_features, self._head) if self._head else (hidden, (0, 0))
        self._around = records.Ends(ends.embedding.data_ptr(), ends.norm.data_ptr(), *addresses, vocab, ends.scale)
        table = None if self._table is None else address(self._table)
        self._decoder = records.Decoder(table, len(layers), pointer(self._sizes), pointer(self._around))

    @property
    def calls_per_layer(self) -> int:
        """Calls from Python."""
        return 9 if self._table is None else 0

    def decoder(self, longest: int) -> records.Decoder:
        """The whole model as the operators read it, for texts of so many tokens."""
        self._decoder.cosines, self._decoder.sines = (table.data_ptr() for table in self._tables(longest))
        return self._decoder

    def _tables(self, longest: int) -> tuple[Tensor, Tensor]:
        """The tables for texts of so many tokens. An address that may have changed is read anew."""
        self._around.embedding = self._ends.embedding.data_ptr()  # a drafter's is the target's, whose owner may move it
        return self._ends.rotary.reserve(longest)

    @property
    def whole(self) -> bool:
        """Whether one call runs the whole model."""
        return self._table is not None and self._head is not None

    def run(
        self,
        tokens: Ints,
        positions: Ints,
        parts: Parts,
        tapped: Sequence[int] = (),
        wanted: Tensor | None = None,
    ) -> Verified:
        """Logits `[N, V]` of `tokens` [N] at `positions` [N], or of the rows `wanted` [W] alone, and the outputs of the
        layers `tapped`."""
        if self._table is None:
            return self._run_apart(tokens, positions, parts, tapped, wanted)
        cosines, sines = self._tables(parts.longest)
        numbers = c_int64 * len(tokens)  # not numpy's addresses or tensors of them, which take longer
        rows, hidden, like = len(tokens), len(self._ends.norm), self._ends.norm
        taps = like.new_empty(rows, len(tapped) * hidden) if tapped else None
        tapping = self._tapping(tuple(tapped), self._table)
        wants = rows if wanted is None else len(wanted)
        out = like.new_empty(wants, self._around.vocab)
        found = Rows(out, out.data_ptr(), self._around.vocab, self._around.vocab)
        if self.built.functions.forward(
            tapping.at, c_int64(len(tapping.table)), byref(self._sizes), byref(self._around),
            numbers(*tokens.tolist()), numbers(*positions.tolist()), c_int64(rows), at(cosines), at(sines),
            *parts.everywhere(), at(taps), tapping.last, c_int64(len(tapped) * hidden), at(wanted), c_int64(wants),
            c_void_p(found.begin), threads(),
        ):  # fmt: skip
            raise BadModel(f"{rows} rows of texts of up to {parts.longest} tokens do not fit in memory.")
        return Verified(out, taps, found) if self._head else Verified(self._headed(out), taps)

    @torch.inference_mode()
    def _headed(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._ends.head(hidden)
        return logits

    def _tapping(self, tapped: tuple[int, ...], table: Table) -> _Tapping:
        if tapped not in self._tappings:
            places = np.full(len(table) + 1, NOWHERE)  # layer i's output is the sum that layer i + 1 begins with
            places[np.array(tapped, np.int64) + 1] = np.arange(len(tapped)) * len(self._ends.norm)
            bound = table.copy()
            bound[:, TAP] = places[:-1]
            self._tappings[tapped] = _Tapping(bound, address(bound), c_int64(places[-1]))
        return self._tappings[tapped]

    @torch.inference_mode()
    def _run_apart(
        self, tokens: Ints, positions: Ints, parts: Parts, tapped: Sequence[int], wanted: Tensor | None
    ) -> Verified:
        """`run` around products that are not compiled."""
        rows, ends, delta = len(tokens), self._ends, None
        ids, places = (moved(numbers, ends.norm.device) for numbers in (tokens, positions))
        cos, sin = (table[places] for table in self._tables(parts.longest))
        x = ends.embed(F.pad(ids, (0, max(0, LEAST_ROWS - rows))))
        taps = x.new_empty(len(x), len(tapped), x.shape[1])
        into = {layer + 1: taps[:, place] for place, layer in enumerate(tapped)}
        for i, (layer, sight) in enumerate(zip(self._layers, self._sights, strict=True)):
            qkv = layer.qkv(self._add_norm(x, delta, layer.input_norm, into.get(i)))
            seen = self._attend(layer, qkv, cos, sin, parts.at(i, not sight.causal), parts.longest, sight.window)
            gate_up = layer.gate_up(self._add_norm(x, layer.output(seen), layer.post_norm))
            delta = layer.down(self._swiglu(gate_up))
        x = self._add_norm(x, delta, ends.norm, into.get(len(self._layers)))
        wants = rows if wanted is None else len(wanted)
        if wanted is not None:
            x = F.pad(x[wanted], (0, 0, 0, max(0, LEAST_ROWS - wants)))
        return Verified(ends.head(x)[:wants], taps[:rows].flatten(1) if tapped else None)

    def fused(self, fusing: Fusing) -> Fused | None:
        """What `project` needs; None where these products are not compiled."""
        fuse, kv = panels_of(fusing.fuse), panels_of(fusing.kv)
        return Fused(records.Linear(*fuse), fusing.norm, records.Linear(*kv), fusing.k_norm) if fuse and kv else None

    def project(self, taps: Tensor, start: int, parts: Parts, fused: Fused) -> None:
        """Write keys and values of tokens from `start` on to their slots, of the first of taps `[N, taps * hidden]`."""
        turn = (at(table, start) for table in self._ends.rotary.reserve(parts.longest))
        part, _, slots = parts.everywhere()
        if self.built.functions.project(
            at(taps), c_int64(taps.shape[1]), byref(fused.fuse), at(fused.norm), byref(fused.kv), at(fused.k_norm),
            c_int64(len(self._layers)), byref(self._sizes), *turn, part, slots, threads(),
        ):  # fmt: skip
            raise BadModel(f"{parts.longest - start} context features do not fit in memory.")

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, tap: Tensor | None = None) -> Tensor:
        """`x += delta` in place, and in `tap`; returns RMSNorm(x) * weight. All `[N, hidden]`."""
        out = torch.empty_like(x)
        taken = at(tap), c_int64(0 if tap is None else tap.stride(0))
        eps, sizes = c_float(self._shape.norm_eps), _sizes(*x.shape)
        self.built.functions.add_norm(at(x), at(delta), at(weight), at(out), *taken, eps, *sizes, threads())
        return out

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        """`[N, I]` of `[N, 2 I]`."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.built.functions.swiglu(at(gate_up), at(out), *_sizes(*out.shape), threads())
        return out

    def _attend(
        self,
        layer: Layer,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        where: tuple[Array[c_int64], c_int64],
        longest: int,
        window: int | None,
    ) -> Tensor:
        """What each token sees, `[N, H * D]`, for qkv `[N, (H + 2 G) * D]`; keys and values go into their slots."""
        shape, functions = self._shape, self.built.functions
        q = qkv.new_empty(len(qkv), shape.heads, shape.head_dim)
        sizes = _sizes(shape.heads, shape.kv_heads, shape.head_dim)
        turn = (at(layer.qk_norm), at(cos), at(sin))
        functions.rotate_store(
            at(qkv), c_int64(qkv.stride(0)), *turn, at(q), *where, *sizes, c_float(shape.norm_eps), threads()
        )
        seen = torch.zeros_like(q)  # rows without a token go through the products, too
        how = (c_int64(window or 0), c_float(self._scale), threads())
        if functions.attend(at(q), *where, at(seen), *sizes, *how):
            raise BadModel(f"Attention over {longest} tokens does not fit in memory with its scores.")
        return seen.flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Tapping:
    """The table of layers where some are tapped."""

    table: Table
    at: c_void_p
    last: c_int64  # where the last layer's output goes in a row of taps


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """`Fusing` as the operators read it."""

    fuse: records.Linear
    norm: Tensor
    kv: records.Linear
    k_norm: Tensor | None


def _inner(layers: Sequence[Layer]) -> int:
    """How wide the MLP is inside."""
    down: Any = layers[0].down
    return int(down.in_features)


def _sizes(*sizes: int) -> list[c_int64]:
    return [c_int64(size) for size in sizes]
