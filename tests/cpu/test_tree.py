"""Trees: prefixes, masks, and how a forward lays them out."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.accept import accept
from draftwood.plan import make_plan
from draftwood.tree import Tree, chain_tree, root_only


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(1, 25))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, size))]
    depths = [0]
    for p in parents[1:]:
        depths.append(depths[p] + 1)
    # siblings have different tokens, as in every draft
    tokens = [draw(st.integers(0, 9)), *(100 + i for i in range(1, size))]
    return Tree(*(np.array(a) for a in (tokens, parents, depths)), mass=np.ones(size, np.float32))


@given(trees())
def test_ancestors_are_the_path_and_the_node_itself(tree: Tree) -> None:
    seen = tree.ancestors()
    for node in range(len(tree) + 1):
        assert np.flatnonzero(seen[node]).tolist() == sorted({0, node, *tree.path(node)})


@given(trees(), st.integers(0, 30))
def test_every_prefix_is_a_connected_tree(tree: Tree, n: int) -> None:
    part = tree[:n]
    assert len(part) == min(n, len(tree))
    assert (part.parents[1:] < np.arange(1, len(part) + 1)).all() and part.parents[0] == -1


@given(trees(), st.integers(0, 6))
def test_cutting_by_depth_keeps_the_paths_above(tree: Tree, depth: int) -> None:
    cut = tree.up_to_depth(depth)
    paths = {tuple(int(tree.tokens[i]) for i in tree.path(n)) for n in range(len(tree) + 1)}
    expected = {p for p in paths if len(p) <= depth}
    assert {tuple(int(cut.tokens[i]) for i in cut.path(n)) for n in range(len(cut) + 1)} == expected


@given(st.lists(trees(), min_size=1, max_size=4))
def test_a_plan_lays_trees_one_behind_the_other(members: list[Tree]) -> None:
    contexts = [7 * b for b in range(len(members))]
    plan = make_plan(members, contexts, torch.float32, torch.device("cpu"), range(len(members)))
    for part, tree, context in zip(plan.segments, members, contexts, strict=True):
        span = slice(part.start, part.stop)
        assert plan.tokens[span].tolist() == tree.tokens.tolist()
        assert plan.positions[span].tolist() == [context + depth for depth in tree.depths.tolist()]
        sees = np.tri(part.size, dtype=bool) if part.visible is None else part.visible
        assert sees.tolist() == tree.ancestors().tolist()
    assert len(plan.tokens) == plan.segments[-1].stop == sum(len(tree.tokens) for tree in members)


def test_chains_and_roots() -> None:
    assert root_only(5).is_chain and chain_tree([1, 2, 3]).is_chain
    assert len(root_only(5)) == 0 and chain_tree([1, 2, 3]).ancestors().tolist() == np.tri(3, dtype=bool).tolist()


@given(trees(), st.randoms(use_true_random=False))
def test_the_walk_follows_the_targets_own_tokens(tree: Tree, random) -> None:  # type: ignore[no-untyped-def]
    says = [random.choice([*tree.tokens[1:].tolist(), -5]) for _ in range(len(tree) + 1)]
    visited: list[tuple[int, list[int]]] = []

    def draw(node: int, path) -> int:  # type: ignore[no-untyped-def]
        visited.append((node, list(path)))
        return says[node]

    verdict = accept(tree, draw)
    assert [n for n, _ in visited] == [0, *verdict.path]
    assert all(path == [int(tree.tokens[i]) for i in tree.path(n)] for n, path in visited)
    assert verdict.tokens == [says[n] for n, _ in visited]
    last = verdict.path[-1] if verdict.path else 0
    children = tree.tokens[np.flatnonzero(tree.parents == last)].tolist()
    assert verdict.bonus not in children
