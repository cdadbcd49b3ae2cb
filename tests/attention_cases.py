"""Random trees behind random contexts for the attention kernels, with the truth by the reference backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftwood.attention.args import AttentionArgs, Backend
from draftwood.attention.reference import REFERENCE
from draftwood.plan import Plan, make_plan
from draftwood.tree import Tree, chain_tree, root_only


def random_tree(size: int, seed: int = 0) -> Tree:
    """`size` tokens, the root included; mostly deep, with siblings that share a position."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(max(0, i - int(rng.integers(1, 5))) for i in range(1, size))])
    depths = np.zeros(size, int)
    for i in range(1, size):
        depths[i] = depths[parents[i]] + 1
    return Tree(np.arange(size), parents, depths, np.ones(size, np.float32))


def a_tree(kind: str, size: int) -> Tree:
    return {"tree": random_tree, "chain": lambda n: chain_tree(range(n)), "one": lambda n: root_only(0)}[kind](size)


@dataclass(frozen=True)
class Case:
    """Queries of one tree and a slot cache whose slots behind it hold NaN: whoever reads them is found out."""

    tree: Tree
    context: int
    query: Tensor  # [N, H, d]
    keys: Tensor  # [H_kv, S, d]
    values: Tensor  # [H_kv, S, d]
    window: int | None = None

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    @property
    def plan(self) -> Plan:
        return make_plan([self.tree], [self.context], self.query.dtype, self.query.device, [0])

    def attend(self, **options: object) -> Tensor:
        """The kernel's answer, `[N, H, d]`."""
        from draftwood.attention.triton_tree import tree_attention

        sight = self.plan.sight(0)
        found = tree_attention(
            self.query, self.keys, self.values, sight.context, sight.ancestors, sight.depths, self.scale, self.window,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return found

    def alone(self) -> Tensor:
        """The answer of the kernel that keeps bits, `[N, H, d]`."""
        from draftwood.attention.triton_alone import attention_alone

        sight = replace(self.plan, alone=True).sight(0)
        return attention_alone(
            self.query, self.keys, self.values, sight.context, sight.lineage, sight.depths, self.scale, self.window
        )

    def plain(self, node: int) -> Case:
        """What plain decoding would have been asked at `node`: its ancestors committed, in order, and it alone."""
        path = np.flatnonzero(self.tree.ancestors()[node])
        last = self.context + len(path) - 1
        keys, values = self.keys.clone(), self.values.clone()
        for moved, states in ((keys, self.keys), (values, self.values)):
            moved[:, self.context : last + 1] = states[:, self.context + path]
            moved[:, last + 1 :] = torch.nan
        return Case(root_only(0), last, self.query[node : node + 1], keys, values, self.window)

    def truth(self, backend: Backend = REFERENCE) -> Tensor:
        extent = self.context + len(self.tree) + 1
        query = self.query.transpose(0, 1).unflatten(0, (len(self.keys), -1))
        args = AttentionArgs(
            query, self.keys[:, :extent], self.values[:, :extent], self.scale, self.window, None, None, self.plan, 0
        )
        return backend.run(args).flatten(0, 1).transpose(0, 1)


def make_case(
    tree: Tree,
    context: int,
    kv_heads: int = 1,
    groups: int = 2,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Keys of row 1 of a cache of two, as the engine hands them over: views with strides, never copies."""
    chance = torch.Generator().manual_seed(seed)
    nodes, slots = len(tree) + 1, context + len(tree) + 1 + 7
    query = torch.randn(kv_heads * groups, nodes, size, generator=chance).to(device, dtype).transpose(0, 1)
    keys, values = torch.randn(2, 2, kv_heads, slots, size, generator=chance).to(device, dtype)
    keys[:, :, -7:], values[:, :, -7:] = torch.nan, torch.nan
    return Case(tree, context, query, keys[1], values[1], window)


def texts_of_one_token(
    lengths: list[int], groups: int, size: int, dtype: torch.dtype, window: int | None, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """What `rows_attention` says of texts of these lengths, their newest tokens included, and the truth in float32.

    Slots that a text does not see hold NaN.
    """
    from draftwood.attention.triton_rows import rows_attention

    rng = torch.Generator(device).manual_seed(0)
    rows, slots = len(lengths), max(lengths) + 3
    query = torch.randn(rows, 2 * groups, size, generator=rng, dtype=torch.float32, device=device).to(dtype)
    kv = torch.randn(2, rows, 2, slots, size, generator=rng, dtype=torch.float32, device=device).to(dtype)
    truth = torch.zeros(query.shape, device=device)
    for row, length in enumerate(lengths):
        seen = slice(0 if window is None else max(0, length - window), length)
        keys, values = (part[row, :, seen].float().repeat_interleave(groups, 0) for part in kv)
        share = (torch.einsum("hd,hsd->hs", query[row].float(), keys) * size**-0.5).softmax(-1)
        truth[row] = torch.einsum("hs,hsd->hd", share, values)
        kv[:, row, :, : seen.start] = torch.nan
        kv[:, row, :, length:] = torch.nan
    places = torch.tensor(lengths, device=device) - 1
    return rows_attention(query, *kv, places, size**-0.5, window), truth
