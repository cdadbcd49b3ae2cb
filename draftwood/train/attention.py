"""Attention of training blocks: each sees its context features before the anchor, and itself.

All blocks of several texts go through one forward. Tokens of a block are queries; keys are the features of its
own text and the tokens of its own block, nothing else. On a CPU the two kinds of keys are two small products
under one softmax; on a GPU flex attention skips what no block sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.decoder import Sight
from draftwood.train.blocks import Blocks


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the tokens of blocks and contexts lie: M blocks of B tokens, C context features, both text by text."""

    size: int  # B
    lengths: tuple[int, ...]  # context features of each text, C in all
    counts: tuple[int, ...]  # blocks of each text, M in all
    anchors: Tensor  # [M]

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> Layout:
        anchors = torch.from_numpy(blocks.anchors).to(device)
        return cls(blocks.tokens.shape[1], blocks.lengths, blocks.counts, anchors)

    def block_positions(self) -> Tensor:
        """`[M * B]`: places in the text."""
        return (self.anchors[:, None] + torch.arange(self.size, device=self.anchors.device)).flatten()

    def context_positions(self) -> Tensor:
        """`[C]`"""
        return torch.cat([torch.arange(n, device=self.anchors.device) for n in self.lengths])


# queries [M * B, H, D], context keys and values [C, G, D], block keys and values [M * B, G, D] -> [M * B, H * D]
AttendBlocks = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def blocks_attention(layout: Layout, sight: Sight) -> AttendBlocks:
    """The fastest way here; what depends on places alone is computed now, for all layers of this sight."""
    make = flex if layout.anchors.device.type == "cuda" else two_products
    return make(layout, sight)


def two_products(layout: Layout, sight: Sight) -> AttendBlocks:
    """Text by text: scores against the context and, block by block, against the block; one softmax over both."""
    place = torch.arange(layout.size, device=layout.anchors.device)
    within = _allowed(place[:, None], place, sight)
    ends = np.cumsum(layout.counts)
    contexts = []
    for length, count, end in zip(layout.lengths, layout.counts, ends, strict=True):
        at = (layout.anchors[end - count : end, None] + place).flatten()[:, None]
        key = torch.arange(length, device=at.device)
        before = key < layout.anchors[end - count : end].repeat_interleave(layout.size)[:, None]
        contexts.append(_additive(before & _allowed(at, key, sight)))
    return partial(_two_products, layout, contexts, _additive(within))


def flex(layout: Layout, sight: Sight) -> AttendBlocks:
    """PyTorch's flex attention over one axis of all texts: keys are all features, then all block tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = layout.anchors.device
    texts = torch.arange(len(layout.counts), device=device)
    anchors = layout.anchors.repeat_interleave(layout.size)
    position, block = layout.block_positions(), torch.arange(len(anchors), device=device) // layout.size
    text = texts.repeat_interleave(torch.tensor(layout.counts, device=device)).repeat_interleave(layout.size)
    of_key = texts.repeat_interleave(torch.tensor(layout.lengths, device=device))
    key_text = torch.cat([of_key, text])
    key_block = torch.cat([torch.full_like(of_key, -1), block])
    key_position = torch.cat([layout.context_positions(), position])

    def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context = (key_block[k] < 0) & (key_text[k] == text[q]) & (key_position[k] < anchors[q])
        return (context | (key_block[k] == block[q])) & _allowed(position[q], key_position[k], sight)

    mask = create_block_mask(seen, None, None, len(position), len(key_position), device=str(device))
    return partial(_flex, mask)


def _allowed(query: Tensor, key: Tensor, sight: Sight) -> Tensor:
    """Which positions a layer's window and order let a query see."""
    ahead = key - query
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if sight.window is not None:
        allowed = allowed & (ahead.abs() < sight.window)
    return allowed & (ahead <= 0) if sight.causal else allowed


def _additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _two_products(
    layout: Layout, contexts: list[Tensor], within: Tensor, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    tokens = [count * layout.size for count in layout.counts]
    per_text = zip(
        q.split(tokens),
        ck.split(layout.lengths),
        cv.split(layout.lengths),
        k.split(tokens),
        v.split(tokens),
        contexts,
        strict=True,
    )
    return torch.cat([_one_text(q, ck, cv, k, v, context, within) for q, ck, cv, k, v, context in per_text])


def _one_text(q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, context: Tensor, within: Tensor) -> Tensor:
    """A blocks of B tokens over T features: `[A * B, H * D]`. G key heads, R = H / G query heads of each."""
    size, length = len(within), len(ck)
    q = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3) * q.shape[-1] ** -0.5  # [G, R, A * B, D]
    far = q.flatten(1, 2) @ ck.permute(1, 2, 0)  # [G, R * A * B, T]
    near = _by_block(q, size) @ k.unflatten(0, (-1, size)).permute(2, 0, 3, 1)  # [G, A, R * B, B]
    near = near.unflatten(2, (-1, size)).transpose(1, 2) + within  # [G, R, A, B, B]
    far = far.view(*q.shape[:3], length) + context
    share = torch.cat([far, near.flatten(2, 3).to(far)], -1).softmax(-1).to(v.dtype)
    out = (share[..., :length].flatten(1, 2) @ cv.transpose(0, 1)).view(q.shape)
    close = _by_block(share[..., length:], size) @ v.unflatten(0, (-1, size)).permute(2, 0, 1, 3)  # [G, A, R * B, D]
    out = out + close.unflatten(2, (-1, size)).transpose(1, 2).flatten(2, 3)
    return out.permute(2, 0, 1, 3).flatten(1)


def _by_block(x: Tensor, size: int) -> Tensor:
    """`[G, R, A * B, E]` -> `[G, A, R * B, E]`"""
    return x.unflatten(2, (-1, size)).transpose(1, 2).flatten(2, 3)


def _flex(mask: object, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = torch.cat([ck, k]), torch.cat([cv, v])
    heads = [x.transpose(0, 1)[None] for x in (q, keys, values)]
    out = _compiled_flex(q.device.type)(*heads, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@cache
def _compiled_flex(device: str) -> Any:
    """Compiled where that pays; elsewhere (in tests) as it is, which computes every score."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
