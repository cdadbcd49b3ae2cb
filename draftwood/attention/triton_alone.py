"""Tree attention in Triton that gives a node the same bits as plain decoding: a program for each node by itself.

For a token, plain decoding would run one program over its keys in the order of their positions, in splits of fixed
length and blocks of fixed size. Here every node does exactly that: its ancestors' keys are looked up by its lineage
and stand where they would stand if they were committed. So neither the width nor the place in the tree can change an
order of summation. The price: nodes do not share what they read of the context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.attention.triton_tree import (
    LOG2E,
    LOWEST,
    block_scores,
    fold,
    keys_at_once,
    merged_splits,
    padded_size,
    product_format,
)

LEAST_ROWS = 16  # of a product; the heads that share a key head, and padding
LENGTH = 256  # keys of a split: a power of two of at least the widest block


def attention_alone(
    query: Tensor,  # [N, H, d]
    keys: Tensor,  # [H_kv, S, d]: one row of the slot cache, the tree's own keys included
    values: Tensor,  # [H_kv, S, d]
    context: Tensor,  # one int32 or int64: committed slots before the tree
    lineage: Tensor | None,  # integers [N, C]: each node, its parent, its parent's parent …; None: a chain
    depths: Tensor,  # integers [N]
    scale: float,
    window: int | None = None,
) -> Tensor:
    """What each node sees of the context, its ancestors and itself: `[N, H, d]`. Nothing waits for the device."""
    nodes, heads, size = query.shape
    kv_heads = keys.shape[0]
    groups, pieces = heads // kv_heads, triton.cdiv(keys.shape[1], LENGTH) + 1
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sums, statistics = (query.new_empty(pieces, nodes, heads, last, dtype=torch.float32) for last in (size, 2))
    padded = padded_size(query)
    shared = dict(HEADS=heads, SIZE=size, PADDED=padded, WINDOWED=window is not None)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend_alone[nodes, pieces, kv_heads](
            query, keys, values, context, lineage, depths, sums, statistics,
            nodes, 0 if lineage is None else lineage.stride(0), window or 0, scale * LOG2E,
            *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
            **shared, GROUPS=groups, ROWS=max(LEAST_ROWS, triton.next_power_of_2(groups)),
            KEYS=keys_at_once(query),
            LENGTH=LENGTH, TREE=lineage is not None, DOT=product_format(query),
            num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        _merge_alone[nodes, heads](
            sums, statistics, context, depths, out, nodes, window or 0, *out.stride()[:2],
            **shared, LENGTH=LENGTH, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def _reach(context_at, depths, node, window, WINDOWED: tl.constexpr):
    """A node's position, and the first position that it sees."""
    position = tl.load(context_at).to(tl.int32) + tl.load(depths + node).to(tl.int32)
    first = position * 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0)
    return position, first


@triton.jit(do_not_specialize=["lineage", "nodes", "generations", "window"])  # one kernel, any width
def _attend_alone(
    query, keys, values, context_at, lineage, depths, accumulators, statistics,
    nodes, generations, window, scale,
    query_node, query_head, key_head, key_slot, value_head, value_slot,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, LENGTH: tl.constexpr, TREE: tl.constexpr, WINDOWED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (node, split, key head): a node's heads against one split of its keys."""
    node, split, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    context = tl.load(context_at).to(tl.int32)
    position, first = _reach(context_at, depths, node, window, WINDOWED)
    begin = (first // LENGTH + split) * LENGTH
    end = tl.minimum(begin + LENGTH, position + 1)
    if begin >= end:
        return

    rows, lanes = tl.arange(0, ROWS), tl.arange(0, PADDED)
    real, head = rows < GROUPS, kv_head * GROUPS + rows
    stored = real[:, None] & (lanes < SIZE)[None, :]
    where = query + node.to(tl.int64) * query_node + (head * query_head)[:, None] + lanes[None, :]
    q = tl.load(where, mask=stored, other=0.0).to(DOT)
    keys += kv_head * key_head
    values += kv_head * value_head

    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(tl.maximum(begin, first // KEYS * KEYS), end, KEYS):
        positions = at + tl.arange(0, KEYS)
        inside = positions < end
        slots = positions
        if TREE:
            grown = (positions >= context) & inside
            ancestor = tl.load(lineage + node * generations + (position - positions), mask=grown, other=0)
            slots = tl.where(grown, context + ancestor.to(tl.int32), positions)
        seen = inside
        if WINDOWED:
            seen = inside & (position - positions < window)
        scores = block_scores(q, keys, slots, inside, key_slot, scale, SIZE, PADDED, DOT)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, sums = fold(peak, total, sums, scores, values, slots, inside, value_slot, SIZE, PADDED, DOT)

    place = (split.to(tl.int64) * nodes + node) * HEADS + head
    tl.store(accumulators + place[:, None] * SIZE + lanes[None, :], sums, mask=stored)
    tl.store(statistics + 2 * place, peak, mask=real)
    tl.store(statistics + 2 * place + 1, total, mask=real)


@triton.jit(do_not_specialize=["nodes", "window"])
def _merge_alone(
    accumulators, statistics, context_at, depths, out, nodes, window, out_node, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, LENGTH: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Program (node, head): the splits of one row, in order."""
    node, head = tl.program_id(0), tl.program_id(1)
    position, first = _reach(context_at, depths, node, window, WINDOWED)
    used = position // LENGTH - first // LENGTH + 1
    row, lanes = node.to(tl.int64) * HEADS + head, tl.arange(0, PADDED)
    merged = merged_splits(accumulators, statistics, row, nodes * HEADS, used, SIZE, PADDED)
    where = out + node.to(tl.int64) * out_node + head * out_head + lanes
    tl.store(where, merged.to(out.dtype.element_ty), mask=lanes < SIZE)
