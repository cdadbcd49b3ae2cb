"""Tree attention as two Triton kernels: splits of the context attended side by side, then merged.

A program of the first kernel takes 64 rows of one key head, where a row is one node's query in one of the heads that
share it, and walks over one split of the keys straight in the slot cache: committed slots first, then the tree's own,
masked by the ancestors' bits. The second kernel merges the splits of each row (flash decoding, Dao et al. 2023).
Except for the number of nodes, everything that changes from round to round is read on the device, so a launch may sit
in a CUDA graph; its grid follows from the number of nodes and of splits alone, and idle programs return at once.

Which sums depend on the width. Rows never mix, a program always has 64 of them, keys come in blocks at multiples of
the block and splits begin at multiples of a power of two that follows from context, window and `splits`, and splits
are merged in order. So with the same `splits` a node's result has the same bits whatever other nodes run beside it,
and a node of a chain the same as in plain decoding wherever both contexts give the same split length. For a node
with siblings before it, and with the default of `splits`, which falls with the width, only `triton_alone.py`
guarantees that.

Scores and sums are float32; the weights are rounded to the cache's format before they meet the values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a program, at any width: its four warps take 16 each side by side
LEAST_SPLIT = 128  # keys, two blocks of 64
MOST_SPLITS = 64
BLOCK_BYTES = 16384  # of keys at a time, and as much of values
LOWEST = tl.constexpr(-1e30)  # the maximum of no scores; finite, so that a difference of two is not NaN
LOG2E = 1.4426950408889634


def tree_attention(
    query: Tensor,  # [N, H, d]
    keys: Tensor,  # [H_kv, S, d]: one row of the slot cache, the tree's own keys included
    values: Tensor,  # [H_kv, S, d]
    context: Tensor,  # one int32 or int64: committed slots before the tree
    ancestors: Tensor | None,  # int32 [N, ceil(N / 32)]: bit j of row i is set if node i sees node j; None: a chain
    depths: Tensor | None,  # integers [N]; read only with both ancestors and a window
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    splits: int | None = None,
    ahead: bool = False,
) -> Tensor:
    """What each node sees of the context, its ancestors and itself: `[N, H, d]`, in `out` if given.

    All tensors lie on one device and are contiguous along d. Nothing waits for the device. In a captured graph give
    `out` and a float32 `workspace` of `workspace_size(...)` elements; without them they are allocated. Slots from
    `context + N` on are never read. `splits` is how many pieces a long context is cut into (`default_splits`). With
    `ahead` the bits of `ancestors` may also name nodes that come later, as in a block whose tokens see each other.
    """
    nodes, heads, size = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    splits = default_splits(nodes, heads, kv_heads, query.device) if splits is None else splits
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    accumulators, statistics = _partials(nodes, heads, size, splits, query.device, workspace)
    padded = padded_size(query)
    shared = dict(HEADS=heads, SIZE=size, PADDED=padded, LEAST=LEAST_SPLIT, WINDOWED=window is not None)
    grid = (triton.cdiv(nodes * groups, ROWS), len(accumulators), kv_heads)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend_split[grid](
            query, keys, values, context, ancestors, depths, accumulators, statistics,
            nodes, 0 if ancestors is None else ancestors.stride(0), splits, window or 0, scale * LOG2E,
            *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
            **shared, GROUPS=groups, ROWS=ROWS,
            KEYS=keys_at_once(query),
            TREE=ancestors is not None, AHEAD=ahead, DOT=product_format(query),
            num_warps=4 if padded <= 128 else 8, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        _merge_splits[(nodes, heads)](
            accumulators, statistics, context, out, nodes, splits, window or 0, *out.stride()[:2],
            **shared, AHEAD=ahead, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def padded_size(query: Tensor) -> int:
    """Lanes of a head: a power of two, and what tensor cores take."""
    return max(16, triton.next_power_of_2(query.shape[-1]))


def keys_at_once(query: Tensor) -> int:
    """Keys of a block."""
    return min(64, max(16, BLOCK_BYTES // (padded_size(query) * query.element_size())))


def default_splits(nodes: int, heads: int, kv_heads: int, device: torch.device) -> int:
    """Enough splits for two programs on each of the device's processors; wide trees need few."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    programs = triton.cdiv(nodes * (heads // kv_heads), ROWS) * kv_heads
    return min(MOST_SPLITS, triton.cdiv(2 * processors, programs))


def workspace_size(nodes: int, heads: int, size: int, splits: int) -> int:
    """Elements of the float32 workspace for up to `nodes` nodes of `heads` query heads of `size`."""
    return _pieces(nodes, splits) * nodes * heads * (size + 2)


def _pieces(nodes: int, splits: int) -> int:
    """Splits that context and tree can touch: the context's, the tree's own, and one for a window's edge."""
    return splits + triton.cdiv(nodes, LEAST_SPLIT) + 1


def _partials(
    nodes: int, heads: int, size: int, splits: int, device: torch.device, workspace: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Unnormalised sums `[pieces, N, H, d]`, and maximum and total weight `[pieces, N, H, 2]`, of each split."""
    needed = workspace_size(nodes, heads, size, splits)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    assert workspace.numel() >= needed, f"the workspace has {workspace.numel()} elements of {needed}"
    rows = _pieces(nodes, splits) * nodes * heads
    sums, rest = workspace.view(-1)[: rows * size], workspace.view(-1)[rows * size : rows * (size + 2)]
    return sums.view(-1, nodes, heads, size), rest.view(-1, nodes, heads, 2)


def product_format(query: Tensor) -> tl.dtype:
    """The operands' own format; Triton's interpreter multiplies bfloat16 wrongly, so float32 on a CPU."""
    formats = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return formats.get(query.dtype, tl.float32) if query.is_cuda else tl.float32


@triton.jit
def _extent(context_at, splits, window, LEAST: tl.constexpr, WINDOWED: tl.constexpr):
    """Committed slots, the first slot that any node sees, and the keys of one split."""
    context = tl.load(context_at).to(tl.int32)
    first = context * 0
    if WINDOWED:
        first = tl.maximum(context - window + 1, 0)
    length = first * 0 + LEAST
    while length * splits < context - first:
        length *= 2
    return context, first, length


@triton.jit
def block_scores(q, keys, slots, inside, stride, scale, SIZE: tl.constexpr, PADDED: tl.constexpr, DOT: tl.constexpr):
    """q · k for a block of slots, in units of log2."""
    lanes = tl.arange(0, PADDED)
    where = keys + slots[:, None] * stride + lanes[None, :]
    k = tl.load(where, mask=inside[:, None] & (lanes < SIZE)[None, :], other=0.0)
    return tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * scale


@triton.jit
def fold(
    peak, total, sums, scores, values, slots, inside, stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add a block of slots to the running softmax."""
    lanes = tl.arange(0, PADDED)
    where = values + slots[:, None] * stride + lanes[None, :]
    v = tl.load(where, mask=inside[:, None] & (lanes < SIZE)[None, :], other=0.0)
    higher = tl.maximum(peak, tl.max(scores, 1))
    fade = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    rounded = weights.to(v.dtype).to(DOT)
    sums = tl.dot(rounded, v.to(DOT), sums * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), sums


@triton.jit
def _seen(
    slots, inside, context, node, real, position, ancestors, words, depths, window,
    TREE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Which of a block's slots each row sees, where some of them belong to the tree: `[ROWS, KEYS]`."""
    seen = slots[None, :] <= (context + node)[:, None]
    slot_position = slots
    if TREE:
        grown = (slots >= context) & inside
        other = tl.where(grown, slots - context, 0)
        where = ancestors + node[:, None] * words + (other // 32)[None, :]
        bits = tl.load(where, mask=real[:, None] & grown[None, :], other=0)
        seen = (slots < context)[None, :] | (((bits >> (other % 32)[None, :]) & 1) != 0)
        if WINDOWED:
            depth = tl.load(depths + other, mask=grown, other=0).to(tl.int32)
            slot_position = tl.where(grown, context + depth, slots)
    if WINDOWED:
        seen = seen & (position[:, None] - slot_position[None, :] < window)
    return seen


@triton.jit(do_not_specialize=["ancestors", "depths", "nodes", "words", "splits", "window"])  # one kernel, any width
def _attend_split(
    query, keys, values, context_at, ancestors, depths, accumulators, statistics,
    nodes, words, splits, window, scale,
    query_node, query_head, key_head, key_slot, value_head, value_slot,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, LEAST: tl.constexpr, TREE: tl.constexpr, WINDOWED: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile, split, key head): 64 rows against one split of the keys."""
    tile, split, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    context, first, length = _extent(context_at, splits, window, LEAST, WINDOWED)
    begin = (first // length + split) * length
    last = nodes - 1
    if not AHEAD:
        last = tl.minimum(((tile + 1) * ROWS - 1) // GROUPS, nodes - 1)
    end = tl.minimum(begin + length, context + last + 1)  # ancestors come before a node: no row looks further
    if begin >= end:
        return

    rows = tile * ROWS + tl.arange(0, ROWS)
    node, head = rows // GROUPS, kv_head * GROUPS + rows % GROUPS
    real = node < nodes
    lanes = tl.arange(0, PADDED)
    stored = real[:, None] & (lanes < SIZE)[None, :]
    q = tl.load(query + (node * query_node + head * query_head)[:, None] + lanes[None, :], mask=stored, other=0.0)
    q = q.to(DOT)
    keys += kv_head * key_head
    values += kv_head * value_head
    position = context + node
    if TREE and WINDOWED:
        position = context + tl.load(depths + node, mask=real, other=0).to(tl.int32)

    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    begin = tl.maximum(begin, first // KEYS * KEYS)
    mixed = tl.maximum(begin, tl.minimum(end, context // KEYS * KEYS))  # the first block with a slot of the tree
    for at in range(begin, mixed, KEYS):
        slots = at + tl.arange(0, KEYS)
        inside = slots < end
        scores = block_scores(q, keys, slots, inside, key_slot, scale, SIZE, PADDED, DOT)
        if WINDOWED:
            scores = tl.where(position[:, None] - slots[None, :] < window, scores, float("-inf"))
        peak, total, sums = fold(peak, total, sums, scores, values, slots, inside, value_slot, SIZE, PADDED, DOT)
    for at in range(mixed, end, KEYS):
        slots = at + tl.arange(0, KEYS)
        inside = slots < end
        scores = block_scores(q, keys, slots, inside, key_slot, scale, SIZE, PADDED, DOT)
        seen = _seen(
            slots, inside, context, node, real, position, ancestors, words, depths, window, TREE, WINDOWED
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, sums = fold(peak, total, sums, scores, values, slots, inside, value_slot, SIZE, PADDED, DOT)

    place = (split.to(tl.int64) * nodes + node) * HEADS + head
    tl.store(accumulators + place[:, None] * SIZE + lanes[None, :], sums, mask=stored)
    tl.store(statistics + 2 * place, peak, mask=real)
    tl.store(statistics + 2 * place + 1, total, mask=real)


@triton.jit(do_not_specialize=["nodes", "splits", "window"])
def _merge_splits(
    accumulators, statistics, context_at, out, nodes, splits, window, out_node, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (node, head): the splits of one row, in order."""
    node, head = tl.program_id(0), tl.program_id(1)
    context, first, length = _extent(context_at, splits, window, LEAST, WINDOWED)
    last = nodes - 1 if AHEAD else node
    used = (context + last) // length - first // length + 1
    row, lanes = node.to(tl.int64) * HEADS + head, tl.arange(0, PADDED)
    merged = merged_splits(accumulators, statistics, row, nodes * HEADS, used, SIZE, PADDED)
    where = out + node.to(tl.int64) * out_node + head * out_head + lanes
    tl.store(where, merged.to(out.dtype.element_ty), mask=lanes < SIZE)


@triton.jit
def merged_splits(accumulators, statistics, row, step, used, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The first `used` splits of one row, in order."""
    lanes = tl.arange(0, PADDED)
    peak = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([PADDED], tl.float32)
    for split in range(used):
        place = row + split * step
        found = tl.load(statistics + 2 * place)
        higher = tl.maximum(peak, found)
        fade, weight = tl.exp2(peak - higher), tl.exp2(found - higher)
        part = tl.load(accumulators + place * SIZE + lanes, mask=lanes < SIZE, other=0.0)
        total = total * fade + tl.load(statistics + 2 * place + 1) * weight
        sums = sums * fade + part * weight
        peak = higher
    return sums / total
