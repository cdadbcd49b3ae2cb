"""Attention on a CPU that gives a token the same bits alone, in a chain and anywhere in a tree.

A near-tie between two tokens is decided by the last bit. If verifying a tree summed in another order than plain
decoding does, a bf16 text would soon become another one. Three things keep the order here: products of enough
rows (fewer take another kernel), sums over keys in fixed blocks, each in the order of the keys, and the softmax's
denominator as one more column of values, summed by the same product. A masked key adds an exact zero,
so the gaps that siblings leave between a node's ancestors do not matter, except where a gap shifts an ancestor
across the border of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.plan import Plan

ROWS, PER_ROW = 4, 16  # fewest query rows of a product, and most numbers of a head for each of its rows
LEAST_KEYS = 16  # fewest keys of a product: fewer rows or keys take other kernels
KEYS = 192  # most keys of one product: the library splits more, at places that depend on their number
SCORES = 1 << 19  # most at once, so that they stay in the processor's cache


def attend_invariantly(
    query: Tensor,  # [sum N, H, d]
    key: Sequence[Tensor],  # [H_kv, S, d] of each segment, in at least fp32
    value: Sequence[Tensor],  # [H_kv, S, d_v + 1], the last column holds ones
    plan: Plan,
    scale: float,
    window: int | None,
) -> Tensor:
    """What the plan's tokens see in their slots: `[sum N, H * d_v]`."""
    scaled = (query.to(key[0].dtype) * scale).view(len(query), len(key[0]), -1, query.shape[2])  # [sum N, H_kv, G, d]
    seen = query.new_empty(*scaled.shape[:3], value[0].shape[2] - 1)
    for index, part in enumerate(plan.segments):
        extent = part.context + part.size
        mine = scaled[part.start : part.stop].permute(1, 2, 0, 3)
        mask = plan.mask(index, window, mine.shape[1])
        folded = mine.reshape(len(mine), -1, mine.shape[3])
        sums = _in_blocks(folded, key[index][:, :extent], value[index][:, :extent], mask)
        sums = sums.view(*mine.shape[:3], -1).permute(2, 0, 1, 3)
        torch.div(sums[..., :-1], sums[..., -1:], out=seen[part.start : part.stop])
    return seen.flatten(1)


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """`[H_kv, M, d_v + 1]` weighted sums for scaled queries `[H_kv, M, d]`; not too many rows at once, nor too few."""
    heads, rows, width = query.shape
    least = max(ROWS, width // PER_ROW)
    short = LEAST_KEYS - key.shape[1]
    if short > 0:
        key, value = (F.pad(states, (0, 0, 0, short)) for states in (key, value))
        mask = F.pad(query.new_zeros(rows, LEAST_KEYS - short) if mask is None else mask, (0, short), value=-torch.inf)
    if rows < least:
        mask = mask if mask is None else F.pad(mask, (0, 0, 0, least - rows))
        return _see(F.pad(query, (0, 0, 0, least - rows)), key, value, mask)[:, :rows]
    most = max(SCORES // (heads * key.shape[1]), 2 * least)
    if rows <= most:
        return _see(query, key, value, mask)
    parts = -(-rows // most)
    masks = [None] * parts if mask is None else mask.tensor_split(parts)
    queries = query.tensor_split(parts, 1)
    return torch.cat([_see(q, key, value, m) for q, m in zip(queries, masks, strict=True)], 1)


def _see(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.bmm(query, key.mT)
    if mask is not None:
        scores += mask
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()  # exp2's bits depend on the place in the tensor
    total = torch.bmm(weights[..., :KEYS], value[:, :KEYS])
    for start in range(KEYS, value.shape[1], KEYS):
        total.baddbmm_(weights[..., start : start + KEYS], value[:, start : start + KEYS])
    return total
