"""Sample and walk on the device: `accept.py` for all nodes at once.

The target's token is drawn at every node. A node is on the path if it and all its ancestors are what was drawn
at their parents; siblings have different tokens, so the path is unique.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The target's verdict on a tree, in static shapes."""

    path: Tensor  # [P] int64 accepted nodes, then 0 …
    length: Tensor  # [] int64 accepted nodes
    tokens: Tensor  # [P] int64 their tokens, then the bonus token …
    bonus: Tensor  # [1] int64


def walk(tokens: Tensor, parents: Tensor, depths: Tensor, line: Tensor, drawn: Tensor, n: Tensor, most: int) -> Walk:
    """Walk from the root while the target's own token is a child.

    `tokens`, `parents`, `depths` [M] are a tree's, `line` [M, C] its lineage, `drawn` [M] the target's token after
    each node. Only the root and the first `n` [] nodes count. Paths have at most `most` (P) nodes.
    """
    if not most:  # a root alone: of a small model's forward the operators below are a fortieth
        nothing = drawn[:0]
        return Walk(nothing, drawn.new_zeros(()), nothing, drawn[:1])
    node = torch.arange(len(tokens), device=tokens.device)
    agreed = ((tokens == drawn[parents]) & (node <= n)) | (node == 0)
    on_path = agreed[line].all(1)
    length = on_path.sum() - 1
    # Entry d is the node at depth d; what is not on the path goes to an entry of its own at the end.
    by_depth = node.new_zeros(most + 2).scatter_(0, torch.where(on_path, depths, most + 1), node)
    path = by_depth[1 : 1 + most]
    bonus = drawn[by_depth.gather(0, length[None])]
    inside = torch.arange(most, device=tokens.device) < length
    return Walk(path, length, torch.where(inside, tokens[path], bonus), bonus)


def compaction(walk: Walk, context: Tensor) -> tuple[Tensor, Tensor]:
    """Slots `[P]` to read and to write so that the path lies behind its root, which is in slot `context` [].

    Entries after the path read the slots that they write. If the path is a prefix of the tree, all entries do.
    """
    step = torch.arange(1, 1 + len(walk.path), device=context.device)
    source = torch.where(step <= walk.length, walk.path, step)
    return context + source, context + step


def compact(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Move slots of `kv` [..., S, d] in place; everything is read before it is written, so overlap is safe."""
    kv.index_copy_(-2, target, kv.index_select(-2, source))
