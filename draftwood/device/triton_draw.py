"""Adds noise to scores and finds the largest of each row, in one pass: `noise.noisiest` in torch makes twenty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood import noise

BLOCK = 2048  # tokens of a program
STEP, FIRST, SECOND = (tl.constexpr(number % 2**64) for number in (noise.STEP, noise.FIRST, noise.SECOND))
REST, UNIT = tl.constexpr(64 - noise.BITS), tl.constexpr(2.0**-noise.BITS)


def noisiest(scores: Tensor, keys: Tensor) -> Tensor:
    """`noise.noisiest` on a GPU."""
    rows, size = scores.shape
    blocks = triton.cdiv(size, BLOCK)
    most = torch.empty(rows, blocks, dtype=torch.float64, device=scores.device)
    places = torch.empty(rows, blocks, dtype=torch.int64, device=scores.device)
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        _noisiest[rows, blocks](scores.contiguous(), keys.contiguous(), most, places, size, BLOCK=BLOCK, num_warps=4)
    return places.gather(1, most.argmax(1, keepdim=True))[:, 0]


@triton.jit
def _noisiest(scores, keys, most, places, size, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * size + place, mask=place < size, other=float("-inf")).to(tl.float64)
    words = tl.load(keys + row).to(tl.uint64, bitcast=True) + (place + 1).to(tl.uint64) * STEP
    words = (words ^ (words >> 30)) * FIRST
    words = (words ^ (words >> 27)) * SECOND
    bits = (words ^ (words >> 31)) >> REST
    uniform = (bits.to(tl.float64) + 0.5) * UNIT
    total = score - tl.log(-tl.log(uniform))
    total = tl.where(total == total, total, float("inf"))  # what is not a number is the largest, as for torch
    best = tl.max(total, 0)
    tl.store(most + row * tl.num_programs(1) + block, best)
    tl.store(places + row * tl.num_programs(1) + block, tl.min(tl.where(total == best, place, size), 0).to(tl.int64))
