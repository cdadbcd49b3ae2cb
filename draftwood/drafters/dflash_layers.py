"""DFlash drafters from blocks to logits: by compiled operators where they can run, else by PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.decoder import Sight, norm
from draftwood.drafters.dflash_config import DFlashConfig
from draftwood.drafters.dflash_weights import Weights, context_kv
from draftwood.native.block import Blocks
from draftwood.native.forward import Ends, Fusing, Native, bind
from draftwood.native.records import Parts
from draftwood.packing import LEAST_ROWS
from draftwood.plan import Segment
from draftwood.rotary import Rotary

if TYPE_CHECKING:
    from draftwood.drafters.dflash_state import DFlashState

View = tuple[int, Tensor | None]  # the first key that a block sees, and a mask if it needs one


class BlockLayers(Protocol):
    """A drafter from tokens to logits, the head included."""

    def __call__(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        """Logits `[R * depth, V]` of the `depth` tokens after the root of every block. Blocks `[R * B]` follow the
        context of their state and a gap.

        A state has room for a block after its context; keys and values of the block go there.
        """
        ...

    def hidden(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        """The normed states `[R * depth, hidden]` that the head turns into these logits."""
        ...

    def whole(self, ids: Tensor | None, tables: tuple[Tensor, Tensor] | None) -> Blocks | None:
        """What drafts for one request in a single call, if the layers can; `ids` and `tables` as for `Blocks`."""
        ...

    def project(self, state: DFlashState, taps: Tensor, count: int) -> None:
        """Fuse taps `[M, taps * hidden]` to features, and store keys and values of the first `count` in all layers."""
        ...


def block_layers(config: DFlashConfig, weights: Weights, ends: Ends) -> BlockLayers:
    found = bind(config.shape, config.head_dim**-0.5, weights.layers, config.sights, ends)
    plain = TorchLayers(config, weights, ends)
    # The operators apply no window to tokens ahead, so a bidirectional layer's window must hold the whole block.
    near = all(sight.causal or (sight.window or config.block_size) >= config.block_size for sight in config.sights)
    known = near and not config.taps  # nor do they know convolutions
    return NativeLayers(found, weights, plain, config.first) if isinstance(found, Native) and known else plain


class NativeLayers:
    """By compiled operators: on a CPU half of a small drafter's time is spent between the matrix products."""

    def __init__(self, native: Native, weights: Weights, plain: TorchLayers, first: int) -> None:
        self._native, self._plain, self._first = native, plain, first
        self._fused = native.fused(Fusing(weights.fc, weights.feature_norm, weights.context_kv, weights.context_k_norm))

    def __call__(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        # Blocks of one state use the same slots, and all keys are written before any query: they need separate passes.
        size, passes = len(tokens) // len(states), apart(states)
        if len(passes) == 1:
            return self._pass(tokens, states, gap, depth)
        found = [
            self._pass([t for r in rows for t in tokens[r * size :][:size]], [states[r] for r in rows], gap, depth)
            for rows in passes
        ]
        order = torch.tensor([r for rows in passes for r in rows]).argsort()
        return torch.cat([part.unflatten(0, (-1, depth)) for part in found])[order].flatten(0, 1)

    def _pass(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        size = len(tokens) // len(states)
        steps = np.arange(size)
        contexts = [state.projected for state in states]
        segments = [Segment(r, r * size, (r + 1) * size, context, steps, None) for r, context in enumerate(contexts)]
        blocks = np.arange(len(states))[:, None]
        positions = np.array(contexts)[:, None] + gap + steps
        wanted = blocks * size + self._first + np.arange(depth)
        rows = torch.from_numpy(wanted.ravel())
        return self._native.run(np.array(tokens), positions.ravel(), _parts(segments, states, gap), wanted=rows).logits

    def hidden(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        return self._plain.hidden(tokens, states, gap, depth)

    def whole(self, ids: Tensor | None, tables: tuple[Tensor, Tensor] | None) -> Blocks | None:
        return Blocks(self._native, self._fused, ids, tables) if self._native.whole and self._fused else None

    def project(self, state: DFlashState, taps: Tensor, count: int) -> None:
        if self._fused:
            segment = Segment(0, 0, count, state.projected, np.arange(count), None)
            self._native.project(taps.contiguous(), state.projected, _parts([segment], [state], 0), self._fused)
        else:
            self._plain.project(state, taps, count)


def apart(states: Sequence[DFlashState]) -> list[list[int]]:
    """Indices of `states`, in groups that hold each state at most once."""
    passes: list[list[int]] = []
    for place, state in enumerate(states):
        free = (rows for rows in passes if all(states[r] is not state for r in rows))
        if (rows := next(free, None)) is None:
            passes.append([place])
        else:
            rows.append(place)
    return passes


def _parts(segments: Sequence[Segment], states: Sequence[DFlashState], gap: int) -> Parts:
    return Parts(segments, [state.kv.shape[3] for state in states], [state.addresses for state in states], gap)


class TorchLayers:
    """By PyTorch's operators, in any dtype on any device."""

    def __init__(self, config: DFlashConfig, weights: Weights, ends: Ends) -> None:
        self._config, self._weights, self._ends = config, weights, ends

    def __call__(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        logits: Tensor = self._ends.head(self.hidden(tokens, states, gap, depth))
        return logits

    def hidden(self, tokens: list[int], states: Sequence[DFlashState], gap: int, depth: int) -> Tensor:
        config, ends, size = self._config, self._ends, len(tokens) // len(states)
        x = ends.embed(torch.tensor(tokens, device=ends.norm.device))
        cos, sin = turns(ends.rotary, states, size, gap)
        groups = config.num_heads // config.num_kv_heads
        views = {
            sight: [see(sight, state.projected, size, groups, x.device) for state in states]
            for sight in set(config.sights)
        }
        for i, (layer, sight) in enumerate(zip(self._weights.layers, config.sights, strict=True)):
            x = layer.run(x, cos, sin, config.shape, partial(self._attend, i, states, views[sight]), size)
        x = norm(x, ends.norm, config.norm_eps).unflatten(0, (len(states), -1))
        return x[:, config.first : config.first + depth].flatten(0, 1)

    def whole(self, ids: Tensor | None, tables: tuple[Tensor, Tensor] | None) -> None:
        return None

    def project(self, state: DFlashState, taps: Tensor, count: int) -> None:
        start, taps = state.projected, taps[: max(count, LEAST_ROWS)]
        turn = self._ends.rotary(start, start + len(taps))
        keys, values = context_kv(self._config, self._weights, taps, *turn)
        state.kv[:, 0, :, start : start + count] = keys[:, :, :count]
        state.kv[:, 1, :, start : start + count] = values[:, :, :count]

    def _attend(
        self, layer: int, states: Sequence[DFlashState], views: list[View], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Every block attends to its own context: `[R * B, H * D]`."""
        q, k, v = (part.unflatten(0, (len(states), -1)) for part in (q, k, v))
        return torch.cat(
            [attend(state.kv[layer], state.projected, q[r], k[r], v[r], *views[r]) for r, state in enumerate(states)]
        )


def turns(rotary: Rotary, states: Sequence[DFlashState], size: int, gap: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every block's positions, each `[R * B, 1, D]`."""
    starts = [state.projected + gap for state in states]
    cos, sin = zip(*(rotary(start, start + size) for start in starts), strict=True)
    return torch.cat(cos), torch.cat(sin)


def see(sight: Sight, context: int, size: int, groups: int, device: torch.device) -> View:
    """What a block after `context` tokens sees: the first key, and a mask `[groups * size, keys]` if needed.

    Keys before the first are out of every block token's window. Mask rows repeat for each folded query head.
    """
    first = 0 if sight.window is None else max(0, context + 1 - sight.window)
    if not sight.causal and (sight.window is None or context + size - first <= sight.window):
        return first, None
    queries = torch.arange(context, context + size, device=device)[:, None]
    ahead = torch.arange(first, context + size, device=device) - queries
    return first, sight.covers(ahead).repeat(groups, 1)


def attend(kv: Tensor, context: int, q: Tensor, k: Tensor, v: Tensor, first: int, mask: Tensor | None) -> Tensor:
    """Attention of one block, `[B, H * D]`; its keys and values go into the free slots after the context.

    The heads that share a key head are folded into the query axis: no key is read or copied twice.
    """
    size, heads, dim = q.shape
    stop = context + size
    kv[0, :, context:stop] = k.transpose(0, 1)
    kv[1, :, context:stop] = v.transpose(0, 1)
    folded = q.unflatten(1, (kv.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)
    seen = F.scaled_dot_product_attention(folded[None], kv[None, 0, :, first:stop], kv[None, 1, :, first:stop], mask)
    return seen[0].unflatten(1, (-1, size)).permute(2, 0, 1, 3).reshape(size, heads * dim)
