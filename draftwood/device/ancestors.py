"""Who sees whom in a tree on the device: lineages, a dense mask and a bitmask, from the parents alone."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32  # bits


def lineage(parents: Tensor, depth: int) -> Tensor:
    """Each node, its parent, its parent's parent …, the root repeated at the end: `[M, C]`, C > `depth`.

    In `parents` [M] the root is its own parent. By pointer jumping, each step doubles the generations.
    """
    line = torch.arange(len(parents), device=parents.device)[:, None]
    jump = parents
    while line.shape[1] <= depth:
        line = torch.cat([line, line[jump]], 1)
        jump = jump[jump]
    return line


def visible(line: Tensor) -> Tensor:
    """`[M, M]` bool: row i is true at i and at its ancestors. `line` is a lineage [M, C]."""
    return torch.zeros(len(line), len(line), dtype=torch.bool, device=line.device).scatter_(1, line, True)


def bitmask(seen: Tensor) -> Tensor:
    """`[M, ceil(M / 32)]` int32: bit j % 32 of word j // 32 says whether row i of `seen` [M, M] is true at j."""
    size = seen.shape[1]
    words = -(-size // WORD)
    padded = torch.nn.functional.pad(seen, (0, words * WORD - size)).unflatten(1, (words, WORD))
    bits = torch.arange(WORD, device=seen.device)
    unsigned = (padded.long() << bits).sum(-1)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int()
