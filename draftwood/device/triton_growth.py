"""Best-first growth and the tables of ancestors in Triton: a kernel each, where torch's form takes hundreds.

One program holds the next child of every node taken so far, as the heap of `grow.py` does, and takes the cheapest again
and again. So its time is proportional to the number of nodes, and the order is the same, ties included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.device.growth import DeviceTree, Grower, edge_costs
from draftwood.drafters.base import Candidates
from draftwood.grow import Growth

LAST = tl.constexpr(2**63 - 1)  # no key is higher
SLOTS_OF_A_WARP = 256  # whose numbers fit into its registers


class TritonGrower(Grower):
    """The same trees as `Grower`'s, without its tables of levels."""

    def __init__(self, growth: Growth, depth: int, width: int, device: torch.device, paired: bool = False) -> None:
        self.growth, self.size = growth, growth.size(depth, width)

    def __call__(self, draft: Candidates, root: Tensor, limit: Tensor, most: Tensor) -> DeviceTree:
        growth, (depths, width) = self.growth, draft.tokens.shape
        depth = min(depths, growth.depth or depths)
        assert max(self.size, depth, width) < 2**15, "a key has 16 bits for each of its numbers"
        places = torch.empty(3, 1 + self.size, dtype=torch.int64, device=root.device)
        mass, count = root.new_empty(1 + self.size, dtype=torch.float32), root.new_empty((), dtype=torch.int64)
        slots = triton.next_power_of_2(max(self.size, 1))
        behind = which = None  # what each candidate's children cost in ascending order, and which they are
        if draft.pairs is not None:
            behind, which = edge_costs(draft.pairs, limit, 2).sort(stable=True)
        with torch.cuda.device_of(root):  # Triton launches on the current device
            _best_first[1,](
                draft.logp.contiguous(), draft.tokens.contiguous(), behind, which, root, limit, most,
                *places, mass, count,
                DEPTH=depth, WIDTH=width, NODES=self.size, SLOTS=slots, PAIRED=behind is not None,
                CAP=growth.per_depth or 0, LEVELS=triton.next_power_of_2(2 + depth),
                num_warps=min(max(slots // SLOTS_OF_A_WARP, 1), 8),
            )  # fmt: skip
        tokens, parents, depths = places
        return DeviceTree(tokens, parents, depths, mass, count)

    def relate(self, parents: Tensor, line: Tensor, seen: Tensor, bits: Tensor) -> None:
        nodes, words = bits.shape
        with torch.cuda.device_of(parents):
            _relate[nodes,](
                parents, line, seen, bits, nodes, line.shape[1], words,
                NODES=triton.next_power_of_2(nodes), WORDS=triton.next_power_of_2(words), num_warps=1,
            )  # fmt: skip


@triton.jit
def _edge(logp, behind, depth, parent, rank, limit, WIDTH: tl.constexpr, PAIRED: tl.constexpr):
    """What the step to the child `rank` at `depth` costs, below the candidate `parent`; infinite if there is none."""
    there = (rank < WIDTH) & (depth <= limit)
    raw = tl.load(logp + (depth - 1) * WIDTH + rank, mask=there, other=float("-inf")).to(tl.float64)
    cost = tl.where(raw != raw, float("inf"), tl.maximum(-raw, 0.0))
    if PAIRED:
        later = there & (depth > 1)
        paired = tl.load(behind + ((depth - 2) * WIDTH + parent) * WIDTH + rank, mask=later, other=float("inf"))
        cost = tl.where(depth > 1, paired, cost)
    return cost


@triton.jit
def _key(depth, node, candidate):
    """Of a node's first child: its depth, the node, its rank, the node's candidate. Ties go by the first two."""
    return (depth << 48) | (node << 32) | candidate


@triton.jit
def _best_first(
    logp, names, behind, which, root_at, limit_at, most_at, tokens, parents, depths, mass, count_at,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr, SLOTS: tl.constexpr, PAIRED: tl.constexpr,
    CAP: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """`names` are the candidates' tokens. Slot i is about node i: what it costs, and the next of its children.

    `CAP` is the most nodes of a depth; 0: any number.
    """
    slots, levels = tl.arange(0, SLOTS), tl.arange(0, LEVELS)
    root = tl.load(root_at)
    most = tl.minimum(tl.load(most_at), NODES)
    limit = tl.minimum(tl.load(limit_at), DEPTH)
    zero, never = limit * 0, float("inf")
    room, none = slots < NODES, tl.zeros([SLOTS], tl.int64)
    tl.store(tokens, root)
    tl.store(parents, zero)
    tl.store(depths, zero)
    tl.store(mass, 1.0)
    tl.store(tokens + 1 + slots, none + root, mask=room)  # absent ones
    tl.store(parents + 1 + slots, none, mask=room)
    tl.store(depths + 1 + slots, none + 1, mask=room)
    tl.store(mass + 1 + slots, none.to(tl.float32), mask=room)
    tl.debug_barrier()  # another thread wrote where the first one is about to

    first = slots == 0
    own = tl.where(first, 0.0, never).to(tl.float64)
    due = tl.where(first, _edge(logp, behind, zero + 1, zero, zero, limit, WIDTH, PAIRED), never)
    keys = tl.where(first, _key(zero + 1, zero, zero), LAST)
    taken = tl.zeros([LEVELS], tl.int32)
    node, alive = zero + 1, most > 0
    while alive:
        cost = tl.min(due, 0)
        key = tl.min(tl.where(due == cost, keys, LAST), 0)
        depth, parent, rank, above = key >> 48, (key >> 32) & 65535, (key >> 16) & 65535, key & 65535
        share = tl.exp(-cost).to(tl.float32)
        alive = share > 0
        if alive:
            candidate = rank
            if PAIRED:
                place = ((depth - 2) * WIDTH + above) * WIDTH + rank
                candidate = tl.where(depth > 1, tl.load(which + place, mask=depth > 1, other=0), rank)
            tl.store(tokens + node, tl.load(names + (depth - 1) * WIDTH + candidate))
            tl.store(parents + node, parent)
            tl.store(depths + node, depth)
            tl.store(mass + node, share)
            is_parent, is_node = slots == parent, slots == node
            edge = _edge(logp, behind, depth, above, rank + 1, limit, WIDTH, PAIRED)
            sibling = tl.min(tl.where(is_parent, own, never), 0) + edge
            child = cost + _edge(logp, behind, depth + 1, candidate, zero, limit, WIDTH, PAIRED)
            if CAP > 0:
                taken += (levels == depth).to(tl.int32)
                below = tl.sum(tl.where(levels == depth + 1, taken, 0), 0)
                child = tl.where(below >= CAP, never, child)
            own = tl.where(is_node, cost, own)
            due = tl.where(is_parent, sibling, tl.where(is_node, child, due))
            keys = tl.where(is_parent, keys + 65536, tl.where(is_node, _key(depth + 1, node, candidate), keys))
            if CAP > 0:
                full = tl.sum(tl.where(levels == depth, taken, 0), 0) >= CAP
                due = tl.where(full & ((keys >> 48) == depth), never, due)
            node += 1
            alive = node <= most
    tl.store(count_at, node - 1)


@triton.jit(do_not_specialize=["nodes", "generations", "words"])
def _relate(
    parents, line, seen, bits, nodes, generations, words, NODES: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Program `node`: its rows of the lineage, of the mask and of the bits."""
    node = tl.program_id(0).to(tl.int64)
    lanes, places = tl.arange(0, NODES), tl.arange(0, WORDS)
    row = lanes < 0
    packed = tl.zeros([WORDS], tl.int32)
    at = node
    for generation in range(generations):
        tl.store(line + node * generations + generation, at)
        row = row | (lanes == at)
        packed = packed | tl.where(places == at // 32, 1 << (at % 32).to(tl.int32), 0)
        at = tl.load(parents + at)
    tl.store(seen + node * nodes + lanes, row, mask=lanes < nodes)
    tl.store(bits + node * words + places, packed, mask=places < words)
