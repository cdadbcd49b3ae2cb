"""Attention of many texts by one token each, in Triton: each reads its own keys and no more.

PyTorch's kernels read every text as far as the longest one goes, and a captured graph of them is made for each such
length. Here a program takes the query heads that share one key head of one text, and walks over that text's slots;
how many there are is read on the device, so one captured graph serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.attention.triton_alone import LEAST_ROWS
from draftwood.attention.triton_tree import (
    LOG2E,
    LOWEST,
    block_scores,
    fold,
    keys_at_once,
    padded_size,
    product_format,
)


def rows_attention(
    query: Tensor,  # [N, H, d]
    keys: Tensor,  # [N, H_kv, S, d], those of the tokens themselves included
    values: Tensor,  # [N, H_kv, S, d]
    places: Tensor,  # integers [N]: the slot of each text's token, the last one that it sees
    scale: float,
    window: int | None = None,
) -> Tensor:
    """What each text's token sees of that text: `[N, H, d]`. Contiguous along d; nothing waits for the device."""
    rows, heads, size = query.shape
    kv_heads = keys.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend_row[(rows, kv_heads)](
            query, keys, values, places, out, window or 0, scale * LOG2E,
            *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2],
            GROUPS=heads // kv_heads, ROWS=max(LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
            SIZE=size, PADDED=padded_size(query), KEYS=keys_at_once(query),
            WINDOWED=window is not None, DOT=product_format(query), num_warps=2, num_stages=2,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window"])
def _attend_row(
    query, keys, values, places, out, window, scale,
    query_row, query_head, key_row, key_head, key_slot, value_row, value_head, value_slot, out_row, out_head,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (text, key head)."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.load(places + row).to(tl.int32)
    first = place * 0
    if WINDOWED:
        first = tl.maximum(place - window + 1, 0)
    shared, lanes = tl.arange(0, ROWS), tl.arange(0, PADDED)
    stored = (shared < GROUPS)[:, None] & (lanes < SIZE)[None, :]
    head = kv_head * GROUPS + shared
    q = tl.load(query + row * query_row + (head * query_head)[:, None] + lanes[None, :], mask=stored, other=0.0).to(DOT)
    keys += row * key_row + kv_head * key_head
    values += row * value_row + kv_head * value_head

    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(first // KEYS * KEYS, place + 1, KEYS):
        slots = at + tl.arange(0, KEYS)
        inside = (slots >= first) & (slots <= place)
        scores = block_scores(q, keys, slots, inside, key_slot, scale, SIZE, PADDED, DOT)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        peak, total, sums = fold(peak, total, sums, scores, values, slots, inside, value_slot, SIZE, PADDED, DOT)

    where = out + row * out_row + (head * out_head)[:, None] + lanes[None, :]
    tl.store(where, (sums / total[:, None]).to(out.dtype.element_ty), mask=stored)
