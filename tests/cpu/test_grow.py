"""Growth is best first, deterministic, and each prefix of what it grows is a tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.drafters.beam import BeamTree
from draftwood.grow import _alive, _edge_costs, _tree, beam, best_first, chain, grow, joined
from draftwood.tree import Lattice, Tree

ROOT = 7
# Few distinct values, so that masses tie often; -800 underflows, -inf is dead, 1e-7 is a rounding accident.
LOGP = st.sampled_from([1e-7, 0.0, -0.25, -0.5, -1.0, -2.0, -40.0, -800.0, -np.inf])


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    depth, width = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    rows = [sorted(draw(st.lists(LOGP, min_size=width, max_size=width)), reverse=True) for _ in range(depth)]
    logp = np.array(rows, np.float32).reshape(depth, width)
    return Lattice(np.arange(depth * width).reshape(depth, width), logp)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree that a drafter may hand over: parents before children, masses that never rise along a path."""
    parents, depths, mass = [-1], [0], [1.0]
    for node in range(1, 1 + draw(st.integers(0, 20))):
        parents.append(draw(st.integers(0, node - 1)))
        depths.append(1 + depths[parents[-1]])
        mass.append(mass[parents[-1]] * draw(st.sampled_from([1.0, 0.5, 0.25, 0.0])))
    tokens = np.array([ROOT, *range(100, 99 + len(parents))])
    return Tree(tokens, np.array(parents), np.array(depths), np.array(mass, np.float32))


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    """Every path of the tree as its tokens, with its mass."""
    nodes = range(1, len(tree.tokens))
    return {tuple(tree.tokens[tree.path(n)].tolist()): float(tree.mass[n]) for n in nodes}


def check_tree(tree: Tree) -> None:
    """Root first, parents before children, depths that follow, live masses that never rise."""
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.mass[0]) == (ROOT, -1, 0, 1)
    assert (tree.parents[1:] >= 0).all() and (tree.parents < np.arange(1 + len(tree))).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert (np.diff(tree.mass) <= 0).all() and (tree.mass > 0).all()
    assert tree.mass.dtype == np.float32 and tree.tokens.dtype == tree.parents.dtype == np.int64


def grow_reference(draft: Lattice, root: int, n_max: int) -> Tree:
    """`grow` by its definition, and slow: of all children of the nodes taken so far, take the first."""
    edges = _edge_costs(draft)
    taken = [(0.0, 0, -1, 0)]  # (cost, depth, parent, rank): the order itself; the root needs no rank
    children: set[tuple[float, int, int, int]] = set()
    while len(taken) <= n_max:
        cost, depth, _, _ = taken[-1]
        for rank, edge in enumerate(edges[depth] if depth < len(edges) else []):
            children.add((cost + edge, depth + 1, len(taken) - 1, rank))
        if not children:
            break
        taken.append(min(children))
        children.remove(taken[-1])
    return _alive(_tree(draft, root, *zip(*taken, strict=True)))


def same(a: Tree, b: Tree) -> bool:
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("tokens", "parents", "depths", "mass"))


@given(lattices(), st.integers(0, 60))
def test_fast_growth_equals_the_definition(draft: Lattice, n_max: int) -> None:
    tree = grow(draft, ROOT, n_max)
    check_tree(tree)
    assert same(tree, grow_reference(draft, ROOT, n_max))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_fast_growth_equals_the_definition_on_untied_lattices(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(9, 12)) * 2
    logp = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True))), axis=1).astype(np.float32)
    draft = Lattice(np.arange(9 * 12).reshape(9, 12), logp)
    assert same(grow(draft, ROOT, 80), grow_reference(draft, ROOT, 80))


@given(lattices(), st.integers(0, 30))
def test_the_grown_nodes_are_the_likeliest_prefixes(draft: Lattice, n_max: int) -> None:
    logp = np.minimum(draft.logp.astype(np.float64), 0)
    every = [
        np.exp(sum(logp[d, r] for d, r in enumerate(ranks)))
        for depth in range(1, 1 + len(logp))
        for ranks in itertools.product(range(logp.shape[1]), repeat=depth)
    ]
    best = np.sort(np.array(every, np.float32))[::-1][:n_max]
    np.testing.assert_allclose(grow(draft, ROOT, n_max).mass[1:], best[best > 0], rtol=1e-6)


@given(lattices(), st.integers(0, 30), st.integers(0, 30))
def test_a_smaller_tree_is_a_prefix_of_a_larger_one(draft: Lattice, a: int, b: int) -> None:
    small, large = sorted((a, b))
    assert same(grow(draft, ROOT, small), grow(draft, ROOT, large)[:small])


@given(lattices() | trees(), st.integers(0, 30), st.floats(0.001, 1.0))
def test_what_is_too_faint_is_not_grown_and_the_rest_is_the_same(
    draft: Lattice | Tree, n_max: int, faint: float
) -> None:
    whole, cut = grow(draft, ROOT, n_max), grow(draft, ROOT, n_max, faint)
    assert same(cut, whole[: len(cut)])
    assert (cut.mass[1:] >= faint * (1 - 1e-6)).all() and (whole.mass[1 + len(cut) :] <= faint * (1 + 1e-6)).all()


def test_ties_go_by_depth_then_parent_then_rank() -> None:
    half = np.log(np.float32(0.5))
    draft = Lattice(np.array([[10, 11], [20, 21]]), np.array([[half, half], [0, -np.inf]], np.float32))
    tree = grow(draft, ROOT, 9)
    assert tree.tokens.tolist() == [ROOT, 10, 11, 20, 20]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2]


def test_nan_is_dead() -> None:
    draft = Lattice(np.array([[1, 2], [3, 4]]), np.array([[-0.5, np.nan], [np.nan, np.nan]], np.float32))
    assert grow(draft, ROOT, 9).tokens.tolist() == [ROOT, 1]


def test_nan_is_dead_in_a_tree_that_a_model_grew_level_by_level() -> None:
    nodes = BeamTree([ROOT])
    front = nodes.level([0], torch.tensor([[1, 2]]), torch.tensor([[-0.5, torch.nan]]), beam=2)
    nodes.level(front, torch.tensor([[3, 4], [5, 6]]), torch.tensor([[torch.nan, torch.nan], [-0.1, -0.2]]), beam=2)
    assert grow(nodes.tree(), ROOT, 9).tokens.tolist() == [ROOT, 1]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_an_empty_lattice_grows_the_root_alone(shape: tuple[int, int]) -> None:
    draft = Lattice(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    for tree in (grow(draft, ROOT, 8), chain(draft, ROOT, 8), beam(draft, ROOT, 2, 4)):
        check_tree(tree)
        assert len(tree) == 0


@given(trees(), st.integers(0, 25))
def test_growing_a_tree_orders_it_and_keeps_the_heaviest(draft: Tree, n_max: int) -> None:
    tree = grow(draft, ROOT, n_max)
    check_tree(tree)
    assert tree.mass.tolist() == sorted(draft.mass[draft.mass > 0].tolist(), reverse=True)[: 1 + n_max]
    assert paths(tree).items() <= paths(draft).items()


@given(lattices(), st.integers(0, 30))
def test_growing_a_grown_tree_changes_nothing(draft: Lattice, n_max: int) -> None:
    tree = grow(draft, ROOT, n_max)
    assert same(tree, best_first(tree, ROOT))


@given(lattices(), st.integers(0, 8))
def test_the_chain_is_the_likeliest_token_of_each_depth(draft: Lattice, n_max: int) -> None:
    tree = chain(draft, ROOT, n_max)
    check_tree(tree)
    alive = np.exp(np.cumsum(np.minimum(draft.logp[:, 0].astype(np.float64), 0))).astype(np.float32) > 0
    assert tree.is_chain
    assert tree.tokens[1:].tolist() == draft.tokens[alive, 0][:n_max].tolist()


@given(lattices())
def test_the_chain_of_a_grown_tree_is_the_chain_of_its_lattice(draft: Lattice) -> None:
    width = draft.logp.shape[1]
    everything = grow(draft, ROOT, sum(width**d for d in range(1, 1 + len(draft.logp))))
    assert np.array_equal(chain(everything, ROOT, 9).mass, chain(draft, ROOT, 9).mass)


@given(lattices(), st.integers(0, 12))
def test_joining_the_chain_adds_only_what_a_tree_lacks_of_it(draft: Lattice, n_max: int) -> None:
    tree, spine = grow(draft, ROOT, n_max), chain(draft, ROOT, 99)
    whole = joined(tree, spine)
    check_tree(whole)
    assert same(whole[: len(tree)], tree)
    assert paths(whole).keys() == paths(tree).keys() | paths(spine).keys()


def beam_by_definition(draft: Lattice, width: int, depth: int) -> list[float]:
    """Masses of a w x d beam, from nothing but its definition."""
    front, masses = [0.0], []
    for row in draft.logp[:depth].astype(np.float64):
        front = sorted((p + min(c, 0.0) for p in front for c in row), reverse=True)[:width]
        masses += front
    return sorted((float(m) for m in np.exp(masses).astype(np.float32) if m > 0), reverse=True)


@given(lattices(), st.integers(1, 4), st.integers(1, 6))
def test_a_beam_keeps_the_heaviest_of_each_depth(draft: Lattice, width: int, depth: int) -> None:
    tree = beam(draft, ROOT, width, depth)
    check_tree(tree)
    assert len(tree) == 0 or np.bincount(tree.depths)[1:].max() <= width
    np.testing.assert_allclose(tree.mass[1:], beam_by_definition(draft, width, depth), rtol=1e-6)


@given(trees(), st.integers(1, 3), st.integers(1, 4))
def test_a_beam_of_a_tree_keeps_the_heaviest_children(draft: Tree, width: int, depth: int) -> None:
    tree = beam(draft, ROOT, width, depth)
    check_tree(tree)
    known, kept = paths(draft), paths(tree)
    for level in range(1, 1 + depth):
        children = [m for p, m in known.items() if len(p) == level and m > 0 and (level == 1 or p[:-1] in kept)]
        chosen = sorted((m for p, m in kept.items() if len(p) == level), reverse=True)
        assert chosen == sorted(children, reverse=True)[:width]
    assert max(tree.depths) <= depth


def test_a_draft_must_start_at_the_root_and_masses_must_not_rise() -> None:
    mass = np.array([1, 0.2, 0.3], np.float32)
    rising = Tree(np.array([ROOT, 1, 2]), np.array([-1, 0, 1]), np.arange(3), mass)
    with pytest.raises(AssertionError, match="likelier"):
        grow(rising, ROOT, 2)
    with pytest.raises(AssertionError, match="root"):
        grow(rising[:1], ROOT + 1, 2)


@pytest.mark.parametrize("depths", [[0, 1, 2, 2], [0, 900, 901, 2], [1, 2, 3, 3], [0, -1, 0, 1]])
def test_a_draft_must_say_how_deep_its_nodes_are(depths: list[int]) -> None:
    """The target turns keys by what it says, and with other positions it would write another text."""
    mass = np.array([1, 0.5, 0.3, 0.2], np.float32)
    with pytest.raises(AssertionError, match="deeper than its parent"):
        grow(Tree(np.array([ROOT, 1, 2, 3]), np.array([-1, 0, 1, 0]), np.array(depths), mass), ROOT, 3)
