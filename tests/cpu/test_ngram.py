"""The n-gram drafter: finds what followed before, in one well-formed tree, and forgets what is rewound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.drafters.base import Request
from draftwood.drafters.ngram import LEAST_MASS, NgramDrafter, NgramState
from draftwood.errors import BadInput
from draftwood.tree import Tree

TOKENS = st.lists(st.integers(0, 4), max_size=60)  # a small alphabet matches often


def drafter(argument: str = "") -> NgramDrafter:
    return NgramDrafter.load(argument, target=None)


def state_of(drafter: NgramDrafter, tokens: list[int]) -> NgramState:
    state = drafter.open(capacity=8)
    drafter.extend(state, tokens, None)
    return state


def draft(tokens: list[int], root: int, argument: str = "") -> Tree:
    made = drafter(argument)
    return made.draft([Request(state_of(made, tokens), root, width=8)])[0]


def paths(tree: Tree) -> list[list[int]]:
    """The token sequences below the root, one for every node."""
    return [[int(tree.tokens[i]) for i in tree.path(node)] for node in range(1, len(tree) + 1)]


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.integers(0, 4))
def test_trees_are_best_first_and_their_masses_are_probabilities(tokens: list[int], root: int) -> None:
    tree = draft(tokens, root)
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.mass[0]) == (root, -1, 0, 1.0)
    assert tree.tokens.dtype == tree.parents.dtype == np.int64 and tree.mass.dtype == np.float32
    assert (np.diff(tree.mass) <= 0).all() and tree.depths.max() <= drafter().max_depth
    for node in range(1, len(tree) + 1):
        assert 0 <= tree.parents[node] < node and tree.depths[node] == tree.depths[tree.parents[node]] + 1
    for node in range(len(tree) + 1):
        children = tree.parents == node
        assert tree.mass[children].sum() <= tree.mass[node] and len(set(tree.tokens[children])) == children.sum()
    assert (tree.mass >= LEAST_MASS).all()


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.integers(0, 4))
def test_proposes_exactly_what_followed_an_earlier_occurrence(tokens: list[int], root: int) -> None:
    text = [*tokens, root]
    followed = {text[i + 1] for i in range(len(text) - 1) if text[i] == root}
    first = {path[0] for path in paths(draft(tokens, root))}
    assert first <= followed and bool(first) == bool(followed)


@settings(max_examples=100, deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 60), st.integers(0, 4))
def test_rewinding_is_as_if_it_had_never_been(tokens: list[int], more: list[int], length: int, root: int) -> None:
    length, made = min(length, len(tokens)), drafter()
    state = state_of(made, tokens)
    made.rewind(state, length)
    made.extend(state, more, None)
    fresh = state_of(made, tokens[:length] + more)
    assert state == fresh
    a, b = made.draft([Request(state, root, 8), Request(fresh, root, 8)])
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.mass, b.mass)


def test_drafting_changes_nothing() -> None:
    made = drafter()
    state = state_of(made, [1, 2, 3, 1, 2])
    before = state_of(made, [1, 2, 3, 1, 2])
    made.draft([Request(state, 9, 8), Request(state, 3, 8)])
    assert state == before


def test_merges_continuations_that_begin_alike() -> None:
    tree = draft([1, 2, 3, 4, 8, 1, 2, 3, 5, 8, 1, 2], root=3, argument="max_depth=2")
    assert sorted(paths(tree)) == [[4], [4, 8], [5], [5, 8]]
    shared = draft([1, 2, 6, 4, 8, 1, 2, 6, 5, 8, 1], root=2, argument="max_depth=2")
    assert sorted(paths(shared)) == [[6], [6, 4], [6, 5]]


def test_longer_matches_count_more_than_recent_ones() -> None:
    tree = draft([1, 2, 3, 4, 9, 9, 3, 5, 9, 1, 2], root=3, argument="max_depth=1")
    assert tree.tokens[1:].tolist() == [4, 5]


def test_of_equal_matches_the_recent_one_counts_more() -> None:
    tree = draft([7, 3, 4, 8, 3, 5, 6], root=3, argument="max_depth=1")
    assert tree.tokens[1:].tolist() == [5, 4]


def test_a_longer_match_is_trusted_more() -> None:
    text = [1, 2, 3, 4, 5, 6, 0]
    masses = [float(draft([*text, *text[5 - n : 4]], root=5, argument="max_depth=1").mass[1]) for n in range(1, 6)]
    assert all(a < b for a, b in pairwise(masses))
    beyond = [float(draft([*text, *text[:4]], 5, f"max_n={n},max_depth=1").mass[1]) for n in (3, 2, 1)]
    assert beyond == masses[2::-1]


def test_a_loop_is_continued_round_and_round() -> None:
    tree = draft([5, 1, 2, 3, 1, 2], root=3, argument="max_depth=7")
    assert [1, 2, 3, 1, 2, 3, 1] in paths(tree)


def test_nothing_known_is_only_the_root() -> None:
    for tokens in ([], [1, 2, 3]):
        assert len(draft(tokens, root=9)) == 0


def test_needs_no_target_features_and_no_arithmetic() -> None:
    made = drafter()
    assert made.tap_layers == () and made.work(1000).flops == 0 and made.max_depth == 12


def test_parameters() -> None:
    made = drafter("max_n=2, max_depth=3")
    assert (made.options.max_n, made.max_depth) == (2, 3)
    for argument, message in (
        ("max_m=3", "Did you mean 'max_n'"), ("max_n", "whole number"), ("max_n=-1", "whole number"),
        ("max_n=0", "from 1 to"), ("max_depth=1000", "from 1 to"), ("max_n=x", "whole number"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            drafter(argument)
