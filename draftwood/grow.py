"""Best-first growth: the n likeliest prefixes of a draft, as a tree whose every prefix is a tree.

Under a block drafter's surrogate (independent depths) the n most probable prefixes are the best tree of n
nodes (DDTree, arXiv 2604.12989 §3). Equal masses are ordered by depth, then by the parent's place in the
tree, then by rank, so that growth is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import islice
from math import inf, log
from typing import Any

import numpy as np

from draftwood.tree import Child, Conditional, Draft, Growable, Lattice, Tree, matched


@dataclass(frozen=True, slots=True)
class Growth:
    """How a policy grows its tree, in numbers. The host calls it; a device follows the numbers with static shapes."""

    n_max: int  # nodes in all
    per_depth: int | None = None  # nodes of one depth: 1 for a chain, a beam's width; None: any number
    depth: int | None = None  # of the deepest node; None: the draft's
    spine: bool = False  # include the whole likeliest chain, whatever its mass: for records that other policies replay

    def __call__(self, draft: Draft, root: int, faint: float = 0.0, most: int | None = None) -> Tree:
        """The tree below the token `root`. Nodes of less mass than `faint` need not be grown, as in `grow`, nor more
        than `most` nodes of a best-first tree."""
        if self.per_depth is None:
            tree = grow(draft, root, self.n_max if most is None else min(self.n_max, most), faint)
            return joined(tree, chain(draft, root, self.n_max)) if self.spine else tree
        if self.per_depth == 1:
            return chain(draft, root, self.n_max)
        return beam(draft, root, self.per_depth, self.depth or self.n_max)

    def size(self, depth: int, width: int) -> int:
        """The most nodes that a lattice [depth, width] can give."""
        total, level = 0, 1
        for _ in range(min(depth, self.depth or depth)):
            level = min(level * width, self.per_depth or self.n_max, self.n_max)
            total += level
        return min(total, self.n_max)


def grow(draft: Draft, root: int, n_max: int, faint: float = 0.0) -> Tree:
    """The best-first tree of at most `n_max` nodes below the token `root`, none of less mass than `faint`.

    A conditional draft has a `faint` of its own, which is a limit, too. And its nodes get no children if their odds are
    less than twice those of the argument `faint`: few of these would reach it, and asking the draft for a node's
    children takes longer than the heap.

    A node whose mass is 0 in float32 is dead: it is left out, and so is everything after it.
    """
    if isinstance(draft, Tree):
        tree = best_first(draft, root)[:n_max]
        return tree[: np.count_nonzero(tree.mass[1:] >= faint)]
    if not isinstance(draft, Lattice):
        return _alive(_grow_conditional(draft, root, n_max, faint))
    return _alive(_tree(draft, root, *_pop(_edge_costs(draft), n_max, _most(faint))))


def chain(draft: Draft, root: int, n_max: int) -> Tree:
    """The heaviest child of the heaviest child …, at most `n_max` nodes: DFlash's draft (2602.06036)."""
    if isinstance(draft, Lattice):
        return grow(draft.narrow(1), root, n_max)
    if not isinstance(draft, Tree):
        return grow(_Narrow(draft, 1), root, n_max)
    tree, spine = best_first(draft, root), [0]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent == spine[-1]:  # in best-first order a node's first child is its heaviest
            spine.append(node)
    return tree.subtree(np.array(spine[: 1 + n_max]))


def joined(tree: Tree, spine: Tree) -> Tree:
    """A best-first tree with those nodes of a chain of the same draft added whose mass was too small to be in it."""
    path = matched(tree, spine.tokens[1:].tolist())
    missing = len(spine) - len(path)
    if not missing:
        return tree
    rest, size = slice(-missing, None), len(tree.tokens)
    parents = np.array([path[-1] if path else 0, *range(size, size + missing - 1)], np.int64)
    sources = None if tree.sources is None or spine.sources is None else (tree.sources, spine.sources[rest])
    return Tree(
        np.concatenate([tree.tokens, spine.tokens[rest]]),
        np.concatenate([tree.parents, parents]),
        np.concatenate([tree.depths, spine.depths[rest]]),
        np.concatenate([tree.mass, spine.mass[rest]]),
        None if sources is None else np.concatenate(sources),
    )


def beam(draft: Draft, root: int, width: int, depth: int) -> Tree:
    """At each of `depth` depths the `width` likeliest children of the nodes kept before, in best-first order.

    BASTION (arXiv 2605.29727, fig. 5) compares best-first trees with it.
    """
    if isinstance(draft, Lattice):
        return best_first(_beam(draft, root, width, depth), root)
    if not isinstance(draft, Tree):
        return best_first(_beam_conditional(draft, root, width, depth), root)
    tree, kept = best_first(draft, root), {0: 0}  # node -> depth
    for node, (parent, level) in enumerate(zip(tree.parents.tolist(), tree.depths.tolist(), strict=True)):
        if parent in kept and level <= depth and list(kept.values()).count(level) < width:
            kept[node] = level
    return tree.subtree(np.array(list(kept)))


def best_first(tree: Tree, root: int) -> Tree:
    """The same tree with its nodes in best-first order and the dead ones left out."""
    assert tree.tokens[0] == root, f"a draft must start at the request's root {root}, not at {tree.tokens[0]}"
    assert (tree.mass[1:] <= tree.mass[tree.parents[1:]]).all(), "a child cannot be likelier than its parent"
    # Depths become positions: wrong ones would give another text, or lie beyond the tables of rotations.
    sound = not tree.depths[0] and (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert sound, "the root's depth is 0, and a child is one deeper than its parent"
    # Where masses tie, the shallower node comes first: a parent always precedes its children.
    order = np.lexsort((tree.depths, -tree.mass))
    return tree.subtree(order[: np.count_nonzero(tree.mass)])


def _pop(edges: list[list[float]], n_max: int, most: float) -> tuple[list[float], list[int], list[int], list[int]]:
    """Costs, depths, parents and ranks of the root and the first `n_max` nodes in best-first order, none over `most`.

    The only nodes that can follow a node directly are its next sibling and its first child, so a heap that
    gets these two at each pop always holds the next node. Costs are plain floats: a heap of numpy scalars is
    several times slower.
    """
    costs, depths, parents, ranks = [0.0], [0], [-1], [0]
    heap = [(edges[0][0], 1, 0, 0)] if edges and edges[0] else []
    for node in range(1, 1 + n_max):
        if not heap or heap[0][0] > most:
            break
        cost, depth, parent, rank = heap[0]
        costs.append(cost)
        depths.append(depth)
        parents.append(parent)
        ranks.append(rank)
        rank += 1
        level = edges[depth - 1]
        if rank < len(level):
            heapreplace(heap, (costs[parent] + level[rank], depth, parent, rank))
        else:
            heappop(heap)
        if depth < len(edges):
            heappush(heap, (cost + edges[depth][0], depth + 1, node, 0))
    return costs, depths, parents, ranks


def _beam(draft: Lattice, root: int, width: int, depth: int) -> Tree:
    """The beam's nodes, level by level."""
    nodes, front = [(0.0, 0, -1, 0)], range(1)
    for level, edge in enumerate(_edge_costs(draft)[:depth], 1):
        children = sorted((nodes[p][0] + e, level, p, r) for p in front for r, e in enumerate(edge[:width]))
        front = range(len(nodes), len(nodes) + len(children[:width]))
        nodes += children[:width]
    return _tree(draft, root, *zip(*nodes, strict=True))


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A conditional draft of which only the `width` likeliest children of every node count."""

    draft: Conditional
    width: int

    @property
    def faint(self) -> float:
        return self.draft.faint

    def start(self) -> Any:
        return self.draft.start()

    def children(self, place: Any) -> Iterator[Child]:
        return islice(self.draft.children(place), self.width)

    def step(self, place: Any, token: int) -> Any:
        return self.draft.step(place, token)


class _Nodes:
    """Nodes of a conditional draft as they are taken, the root first."""

    def __init__(self, draft: Conditional, root: int) -> None:
        self.draft = draft
        self.costs, self.depths, self.parents, self.tokens, self.sources = [0.0], [0], [-1], [root], [0]
        self.places = [draft.start()]

    def add(self, cost: float, parent: int, token: int, source: int) -> None:
        self.costs.append(cost)
        self.depths.append(self.depths[parent] + 1)
        self.parents.append(parent)
        self.tokens.append(token)
        self.sources.append(source)
        self.places.append(self.draft.step(self.places[parent], token))

    def tree(self) -> Tree:
        mass = np.exp(-np.array(self.costs)).astype(np.float32)
        rows = (self.tokens, self.parents, self.depths)
        tokens, parents, depths = (np.array(row, np.int64) for row in rows)
        return Tree(tokens, parents, depths, mass, np.array(self.sources, np.int64))


def _grow_conditional(draft: Conditional, root: int, n_max: int, faint: float) -> Tree:
    barren = log((1 + faint) / (2 * faint)) if faint else inf  # cost at twice the odds of `faint`
    quickly = draft.grown(root, n_max, _most(faint), barren) if isinstance(draft, Growable) else None
    if quickly is not None:
        return quickly
    return _pop_conditional(draft, root, n_max, _most(max(faint, draft.faint)), barren)


def _most(faint: float) -> float:
    """The cost of a path whose mass is `faint`; infinite for 0."""
    return -log(faint) if faint else inf


def _pop_conditional(draft: Conditional, root: int, n_max: int, most: float, barren: float) -> Tree:
    """Best first: the heap holds the next child of every node taken so far that has one."""
    nodes = _Nodes(draft, root)
    heap: list[tuple[float, int, int, int, int]] = []
    queues: list[Iterator[Child]] = []
    for newest in range(n_max):
        queues.append(draft.children(nodes.places[newest]) if nodes.costs[newest] <= barren else iter(()))
        for parent in {newest, nodes.parents[newest]} - {-1}:
            child = next(queues[parent], None)
            if child is not None:
                cost, token, source = child
                total = nodes.costs[parent] + max(cost, 0.0)
                heappush(heap, (total, nodes.depths[parent] + 1, parent, token, source))
        if not heap or heap[0][0] > most:
            break
        cost, _, parent, token, source = heappop(heap)
        nodes.add(cost, parent, token, source)
    return nodes.tree()


def _beam_conditional(draft: Conditional, root: int, width: int, depth: int) -> Tree:
    nodes, front = _Nodes(draft, root), range(1)
    for _ in range(depth):
        children = sorted(
            (nodes.costs[p] + max(cost, 0.0), p, token, source)
            for p in front
            for cost, token, source in islice(draft.children(nodes.places[p]), width)
        )
        front = range(len(nodes.costs), len(nodes.costs) + len(children[:width]))
        for child in children[:width]:
            nodes.add(*child)
    return nodes.tree()


def _edge_costs(draft: Lattice) -> list[list[float]]:
    """`[D, K]` negated log-probabilities in float64; NaN is dead."""
    # A sure candidate's logp can be rounded to just above 0; a child would then outweigh its parent.
    costs = np.maximum(-draft.logp.astype(np.float64), 0.0)
    costs[np.isnan(costs)] = np.inf
    edges: list[list[float]] = costs.tolist()
    return edges


def _tree(
    draft: Lattice,
    root: int,
    costs: Sequence[float],
    depths: Sequence[int],
    parents: Sequence[int],
    ranks: Sequence[int],
) -> Tree:
    levels = np.array(depths)
    tokens = np.append(root, draft.tokens[levels[1:] - 1, np.array(ranks[1:], np.int64)])
    return Tree(tokens, np.array(parents), levels, np.exp(-np.array(costs)).astype(np.float32))


def _alive(tree: Tree) -> Tree:
    """A best-first tree up to its first dead node."""
    return tree[: np.count_nonzero(tree.mass) - 1]
