"""The n-gram drafter: finds what followed before, learns how far to trust it, and forgets what is rewound."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import registry
from draftwood.drafters.automaton import LINKS, SuffixAutomaton
from draftwood.drafters.base import Request
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.pooled import Pooled
from draftwood.errors import BadInput
from draftwood.grow import grow
from draftwood.native.substrings import Substrings
from draftwood.tree import Tree

TOKENS = st.lists(st.integers(0, 4), max_size=60)  # a small alphabet matches often


def drafter(argument: str = "") -> Pooled:
    return Pooled([NgramDrafter.load(argument, None)])


def draft(tokens: list[int], root: int, argument: str = "", nodes: int = 40) -> Tree:
    made = drafter(argument)
    state = made.open(capacity=8)
    made.extend(state, tokens, None)
    return grow(made.draft([Request(state, root, width=8)])[0], root, nodes)


def paths(tree: Tree) -> list[list[int]]:
    """The token sequences below the root, one for every node."""
    return [[int(tree.tokens[i]) for i in tree.path(node)] for node in range(1, len(tree) + 1)]


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `tokens`."""
    return [i for i in range(len(part), len(tokens) + 1) if tokens[i - len(part) : i] == part]


@pytest.fixture(params=[SuffixAutomaton, Substrings], scope="module")
def kind(request: pytest.FixtureRequest, isolated_home: None) -> type[SuffixAutomaton | Substrings]:
    if request.param is Substrings:
        request.getfixturevalue("compiled")
    return request.param


LONG = st.lists(st.integers(0, 4), min_size=64, max_size=128)


@settings(max_examples=300)
@given(TOKENS | LONG, TOKENS, st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_the_automaton_finds_every_substring_and_what_followed(
    kind: type[SuffixAutomaton | Substrings], first: list[int], rest: list[int], part: list[int]
) -> None:
    tokens = first + rest
    made = kind(links=len(tokens))  # "aaaa…" has so many
    made.extend(first)
    made.extend(rest)
    state = length = 0
    for i, token in enumerate(part, 1):
        state, length = made.step(state, length, token)
        longest = max(n for n in range(i + 1) if n == 0 or occurrences(tokens, part[i - n : i]))
        assert length == longest, "the longest suffix that occurs"
    if length:
        ends = occurrences(tokens, part[len(part) - length :])
        before = 0
        for token in part[len(part) - length : -1]:
            before, _ = made.step(before, 0, token)
        assert made.followers(before)[part[-1]] == len(ends)
        followers = [tokens[end] for end in ends if end < len(tokens)]
        assert made.followers(state) == Counter(followers)
        assert made.latest(state) == (followers[-1] if followers else -1)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("alphabet", [1, 3, 400])
def test_the_compiled_automaton_is_the_other_one(alphabet: int) -> None:
    """Of texts that outgrow its first arrays, one behind another."""
    made, plain, rng = Substrings(LINKS), SuffixAutomaton(LINKS), np.random.default_rng(0)
    for size in (3, 700, 1500):
        text = rng.integers(0, alphabet, size).tolist()
        for one in (made, plain):
            one.extend(text)
        assert made.end == plain.end
        for one in (made, plain):
            one.part()
    assert made.states == plain.states
    for state in range(plain.states):
        assert made.followers(state) == plain.followers(state)
        assert made.latest(state) == plain.latest(state)
        assert state == 0 or made.shorter(state) == plain.shorter(state)


@settings(max_examples=150)
@given(TOKENS, st.integers(0, 4))
def test_trees_are_best_first_and_their_masses_are_probabilities(tokens: list[int], root: int) -> None:
    tree = draft(tokens, root)
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.mass[0]) == (root, -1, 0, 1.0)
    assert (np.diff(tree.mass) <= 0).all() and tree.depths.max() <= drafter().max_depth
    for node in range(len(tree) + 1):
        children = np.flatnonzero(tree.parents == node)
        assert (tree.depths[children] == tree.depths[node] + 1).all()
        assert tree.mass[children].sum() <= tree.mass[node] * (1 + 1e-6)
        assert len(set(tree.tokens[children])) == len(children)


@settings(max_examples=100)
@given(TOKENS, st.integers(0, 4))
def test_proposes_what_followed_an_earlier_occurrence(tokens: list[int], root: int) -> None:
    text = [*tokens, root]
    followed = {text[i + 1] for i in range(len(text) - 2) if text[i] == root}
    first = {path[0] for path in paths(draft(tokens, root))}
    assert first <= followed and bool(first) == bool(followed)


@settings(max_examples=60)
@given(TOKENS, TOKENS, st.integers(0, 60), st.integers(0, 4))
def test_rewinding_is_as_if_it_had_never_been(tokens: list[int], more: list[int], length: int, root: int) -> None:
    length, made = min(length, len(tokens)), drafter()
    state = made.open(8)
    made.extend(state, tokens, None)
    made.rewind(state, length)
    made.extend(state, more, None)
    again = grow(made.draft([Request(state, root, 8)])[0], root, 20)
    fresh = draft([*tokens[:length], *more], root, nodes=20)
    np.testing.assert_array_equal(again.tokens, fresh.tokens)
    np.testing.assert_array_equal(again.mass, fresh.mass)


def test_merges_continuations_that_begin_alike() -> None:
    tree = draft([1, 2, 3, 4, 8, 1, 2, 3, 5, 8, 1, 2], root=3, argument="max_depth=2")
    assert sorted(paths(tree)) == [[4], [4, 8], [5], [5, 8]]


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


def test_learns_how_far_to_trust_a_match() -> None:
    """What always comes true is soon believed, what never does is not."""
    masses = {}
    for comes_true in (True, False):
        made = drafter("max_depth=1")
        for _ in range(40):
            state = made.open(8)
            made.extend(state, [1, 2, 3, 4, 1, 2], None)
            tree = grow(made.draft([Request(state, 3, 8)])[0], 3, 4)
            made.extend(state, [3], None)
            made.draft([Request(state, 4 if comes_true else 9, 8)])
        masses[comes_true] = float(tree.mass[1])
    assert masses[True] > 0.7 and masses[False] < 0.2


def test_earlier_texts_are_searched_if_asked() -> None:
    for argument, found in (("earlier=1000", True), ("", False)):
        made = drafter(argument)
        first = made.open(8)
        made.extend(first, [5, 6, 7, 8], None)
        second = made.open(8)
        made.extend(second, [1, 5, 6], None)
        tree = grow(made.draft([Request(second, 7, 8)])[0], 7, 8)
        assert ([8] in paths(tree)) == found


def test_texts_that_go_on_side_by_side_or_from_copies_are_searched_too() -> None:
    made = drafter("earlier=1000")
    first, second = made.open(8), made.open(8)  # both are open before either is written
    made.extend(first, [5, 6, 7, 8], None)
    copied = deepcopy(first)  # as a prefix cache goes on from a text
    made.rewind(copied, 2)
    made.extend(copied, [9, 10], None)
    del first, copied
    third = made.open(8)
    for prompt, root, found in (([1, 5, 6], 7, [8]), ([1, 3, 9], 10, None), ([1, 9], 10, None)):
        state = deepcopy(third)
        made.rewind(state, 0)
        made.extend(state, prompt, None)
        tree = grow(made.draft([Request(state, root, 8)])[0], root, 8)
        assert ([8] in paths(tree)) if found else not len(tree)
    made.extend(second, [1, 9], None)
    made.extend(third, [9, 10, 11, 2], None)
    made.open(8)
    tree = grow(made.draft([Request(second, 10, 8)])[0], 10, 8)
    assert [11] in paths(tree)


def test_nothing_known_is_only_the_root() -> None:
    for tokens in ([], [1, 2, 3]):
        assert len(draft(tokens, root=9)) == 0


def test_needs_no_target_features_and_no_arithmetic() -> None:
    made = registry.drafter("ngram", None)
    assert made.tap_layers == () and made.work(1000).flops == 0 and made.max_depth == 24


def test_parameters() -> None:
    made = NgramDrafter.load("max_depth=3, earlier=10", None)
    assert (made.options.earlier, made.max_depth) == (10, 3)
    for argument, message in (
        ("max_dept=3", "Did you mean 'max_depth'"), ("max_depth", "whole number"), ("max_depth=-1", "whole number"),
        ("max_depth=0", "from 1 to"), ("max_depth=1000", "from 1 to"), ("max_depth=x", "whole number"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            NgramDrafter.load(argument, None)
