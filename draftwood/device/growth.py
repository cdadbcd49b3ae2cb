"""Growth with static shapes: `grow.py` as a fixed sequence of torch operations, for a lattice on the device.

Level by level: the first m nodes of a depth come from the first m nodes of the depth above, because a node never
precedes its parent. Within a level the order is (cost, parent's place, rank), over levels it is (cost, depth), so
one stable sort for each level and one over all of them give the order of the heap. The node of the p-th parent with
rank r comes after the (p + 1)(r + 1) - 1 nodes of its level with no later parent and no higher rank: only pairs with
(p + 1)(r + 1) <= m are candidates, m log m of them instead of m times K. In a trellis a later parent may have better
children, so all m times K are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.attention.triton_backend import missing
from draftwood.device.ancestors import bitmask, lineage, visible
from draftwood.drafters.base import Candidates
from draftwood.grow import Growth


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTree:
    """A tree of static size. Entries after the first 1 + `count` are absent: mass 0, children of the root."""

    tokens: Tensor  # [1 + N] int64; the root first
    parents: Tensor  # [1 + N] int64; the root is its own
    depths: Tensor  # [1 + N] int64; absent ones are at depth 1
    mass: Tensor  # [1 + N] float32
    count: Tensor  # [] int64


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """The candidates of one depth, ordered by (parent, rank)."""

    parent: Tensor  # [C] place of the parent among the nodes kept of the depth above
    rank: Tensor  # [C]
    kept: int


def _level(front: int, width: int, most: int, paired: bool, device: torch.device) -> _Level:
    """The candidates below `front` parents, of which `most` are kept."""
    ranks = torch.full((front,), most) if paired else most // torch.arange(1, front + 1)
    ranks = ranks.clamp(max=width)
    parent = torch.arange(front).repeat_interleave(ranks)
    rank = torch.arange(len(parent)) - (ranks.cumsum(0) - ranks)[parent]
    return _Level(parent.to(device), rank.to(device), min(most, len(parent)))


class Grower:
    """Grows trees of one `Growth` from lattices or trellises `[depth, width]`."""

    def __init__(self, growth: Growth, depth: int, width: int, device: torch.device, paired: bool = False) -> None:
        """`paired`: of trellises, whose candidates depend on their parent. A parent's place then bounds no rank."""
        self.growth = growth
        self.size = growth.size(depth, width)  # N
        self._levels: list[_Level] = []
        most = growth.n_max if growth.per_depth is None else min(growth.n_max, growth.per_depth)
        levels: dict[int, _Level] = {}  # by how many parents: most depths have as many
        front = 1
        for _ in range(min(depth, growth.depth or depth) if self.size else 0):
            if front not in levels:
                levels[front] = _level(front, width, most, paired, device)
            self._levels.append(levels[front])
            front = self._levels[-1].kept
        depths = [d for d, level in enumerate(self._levels, 1) for _ in range(level.kept)]
        self._depths = torch.tensor(depths, dtype=torch.int64, device=device)  # of all kept nodes

    def __call__(self, draft: Candidates, root: Tensor, limit: Tensor, most: Tensor) -> DeviceTree:
        """The best-first tree of at most `most` [] nodes below `root` [1], none deeper than `limit` []."""
        edges = edge_costs(draft.logp, limit)
        behind = None if draft.pairs is None else edge_costs(draft.pairs, limit, 2).sort(stable=True)
        cost, candidate = edges.new_zeros(1), root[:0]
        costs, above, found = [edges.new_zeros(0)], [root[:0]], [root[:0]]
        first = 0  # where the level above begins among all kept nodes, which count from 1
        for d, level in enumerate(self._levels):
            if behind is None or d == 0:
                edge, which = edges[d, level.rank], level.rank
            else:
                at = d - 1, candidate[level.parent], level.rank
                edge, which = behind.values[at], behind.indices[at]
            cost, chosen = (cost[level.parent] + edge).sort(stable=True)
            cost, chosen = cost[: level.kept], chosen[: level.kept]
            candidate = which[chosen]
            costs.append(cost)
            above.append(first + level.parent[chosen])
            found.append(draft.tokens[d, candidate])
            first = 1 if d == 0 else first + self._levels[d - 1].kept
        return self._merge(torch.cat(costs), torch.cat(above), torch.cat(found), root, most)

    def relate(self, parents: Tensor, line: Tensor, seen: Tensor, bits: Tensor) -> None:
        """Write who sees whom into buffers of the shapes that `ancestors.py` gives; `parents` [1 + N]."""
        line.copy_(lineage(parents, line.shape[1] - 1))
        seen.copy_(visible(line))
        bits.copy_(bitmask(seen))

    def _merge(self, costs: Tensor, above: Tensor, tokens: Tensor, root: Tensor, most: Tensor) -> DeviceTree:
        """All kept nodes, depth by depth, in best-first order."""
        order = costs.argsort(stable=True)
        steps = torch.arange(1 + len(order), device=order.device)
        place = torch.zeros_like(steps).scatter_(0, 1 + order, steps[1:])
        first = order[: self.size]
        mass = torch.exp(-costs[first]).float()
        alive = (mass > 0) & (steps[:-1][: self.size] < most)
        mass = torch.where(alive, mass, 0.0)
        zero, one = root.new_zeros(1), mass.new_ones(1)
        return DeviceTree(
            tokens=torch.cat([root, torch.where(alive, tokens[first], root)]),
            parents=torch.cat([zero, torch.where(alive, place[above[first]], 0)]),
            depths=torch.cat([zero, torch.where(alive, self._depths[first], 1)]),
            mass=torch.cat([one, mass]),
            count=alive.sum(),
        )


def grower(growth: Growth, depth: int, width: int, device: torch.device, paired: bool = False) -> Grower:
    """A grower that uses Triton's kernels where the device can run them."""
    if device.type != "cuda" or missing(device):
        return Grower(growth, depth, width, device, paired)
    from draftwood.device.triton_growth import TritonGrower

    return TritonGrower(growth, depth, width, device, paired)


def edge_costs(logp: Tensor, limit: Tensor, first: int = 1) -> Tensor:
    """Negated log-probabilities `[D, …]` in float64, from depth `first` on; NaN and depths beyond `limit` are dead."""
    costs = (-logp.double()).clamp_min(0)  # a sure candidate's logp can be rounded to just above 0
    depth = torch.arange(first, first + len(logp), device=logp.device).view(-1, *[1] * (logp.ndim - 1))
    return torch.where(costs.isnan() | (depth > limit), torch.inf, costs)
