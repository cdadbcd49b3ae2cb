"""Attention of training blocks: each sees its context features before the anchor, and itself.

All blocks of several texts go through one forward. Tokens of a block are queries; keys are the features of its
own text and the tokens of its own block, nothing else. The two kinds of keys are two products under one softmax: text
by text on a CPU, for all texts side by side on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftwood.decoder import Sight
from draftwood.train.blocks import Blocks
from draftwood.train.padded import Padded


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
    """The fastest way on this device. What depends on places alone is computed now, for all layers of this sight."""
    make = side_by_side if layout.anchors.device.type == "cuda" else text_by_text
    return make(layout, sight)


def text_by_text(layout: Layout, sight: Sight) -> AttendBlocks:
    """One text after another: the data of a single text suits a CPU's caches."""
    place = torch.arange(layout.size, device=layout.anchors.device)
    within = _additive(sight.covers(place - place[:, None]))
    contexts = []
    for length, anchors in zip(layout.lengths, layout.anchors.split(layout.counts), strict=True):
        contexts.append(_context(anchors[None], length, place, sight))
    return partial(_text_by_text, layout, contexts, within)


def side_by_side(layout: Layout, sight: Sight) -> AttendBlocks:
    """A handful of launches whatever the number of texts, which are padded to the longest."""
    device = layout.anchors.device
    blocks, features = Padded.of(layout.counts, device), Padded.of(layout.lengths, device)
    place = torch.arange(layout.size, device=device)
    context = _context(blocks.spread(layout.anchors), features.places.shape[1], place, sight)
    return partial(_side_by_side, blocks, features, context, _additive(sight.covers(place - place[:, None])))


def _context(anchors: Tensor, length: int, place: Tensor, sight: Sight) -> Tensor:
    """`[N, 1, 1, A * B, length]`, additive: the features that each token of `anchors` `[N, A]` sees.

    No anchor lies beyond the end of its own text, so no padding is seen.
    """
    at = (anchors[..., None] + place).flatten(1)[..., None]
    key = torch.arange(length, device=place.device)
    before = key < anchors.repeat_interleave(len(place), 1)[..., None]
    return _additive(before & sight.covers(key - at))[:, None, None]


def _additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _text_by_text(
    layout: Layout, contexts: list[Tensor], within: Tensor, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    tokens = [count * layout.size for count in layout.counts]
    split = (q.split(tokens), ck.split(layout.lengths), cv.split(layout.lengths), k.split(tokens), v.split(tokens))
    return torch.cat(
        [
            _attend(q[None], ck[None], cv[None], k[None], v[None], context, within)[0]
            for q, ck, cv, k, v, context in zip(*split, contexts, strict=True)
        ]
    )


def _side_by_side(
    blocks: Padded, features: Padded, context: Tensor, within: Tensor, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor,
    v: Tensor,
) -> Tensor:  # fmt: skip
    size = len(within)
    q, k, v = (blocks.spread(x.unflatten(0, (-1, size))).flatten(1, 2) for x in (q, k, v))
    out = _attend(q, features.spread(ck), features.spread(cv), k, v, context, within)
    return blocks.joined(out.unflatten(1, (-1, size))).flatten(0, 1)


def _attend(q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, context: Tensor, within: Tensor) -> Tensor:
    """A blocks of B tokens over T features, of N texts: `[N, A * B, H * D]`.

    Queries are `[N, A * B, H, D]`. G key heads, R = H / G query heads of each.
    """
    size, length = len(within), ck.shape[1]
    q = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4) * q.shape[-1] ** -0.5  # [N, G, R, A * B, D]
    far = q.flatten(2, 3) @ ck.permute(0, 2, 3, 1)  # [N, G, R * A * B, T]
    near = _by_block(q, size) @ k.unflatten(1, (-1, size)).permute(0, 3, 1, 4, 2)  # [N, G, A, R * B, B]
    near = near.unflatten(3, (-1, size)).transpose(2, 3) + within.to(near.dtype)  # [N, G, R, A, B, B]
    far = far.view(*q.shape[:4], length) + context.to(far.dtype)
    with torch.autocast(q.device.type, enabled=False):  # it would return float32, in which softmax sums anyway
        share = torch.cat([far, near.flatten(3, 4)], -1).softmax(-1).to(v.dtype)
    out = (share[..., :length].flatten(2, 3) @ cv.transpose(1, 2)).view(q.shape)
    close = _by_block(share[..., length:], size) @ v.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)
    out = out + close.unflatten(3, (-1, size)).transpose(2, 3).flatten(3, 4)
    return out.permute(0, 3, 1, 2, 4).flatten(2)


def _by_block(x: Tensor, size: int) -> Tensor:
    """`[N, G, R, A * B, E]` -> `[N, G, A, R * B, E]`"""
    return x.unflatten(3, (-1, size)).transpose(2, 3).flatten(3, 4)
