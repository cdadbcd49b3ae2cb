"""How deep and wide drafts are worth making, and how many nodes are worth growing, by what trees used before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftwood.acceptance import LEAST_GROWN, TRIAL_NODES, TRIALS, AcceptanceModel
from draftwood.recent import KEPT
from draftwood.tree import Tree
from tests.acceptance_cases import a_round, a_tree, chain


def test_the_depth_worth_drafting_follows_how_long_paths_are() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.depth is None
        model.observe(a_round(chain(8), 4))
    assert model.depth == 5, "one more than any path had"
    model.observe(a_round(chain(5), 5))
    assert model.depth == 8, "all of it was used: there may be more"
    model.observe(a_round(chain(8), 3))
    assert model.depth == 6
    for _ in range(60):
        model.observe(a_round(chain(3), 0))
    assert model.depth == 3, "a look must be able to show better"


def test_paths_that_no_drafter_was_asked_for_say_nothing_of_how_deep_to_draft() -> None:
    model = AcceptanceModel()
    for _ in range(60):
        model.observe(a_round(chain(8), 2))
    model.observe(replace(a_round(chain(8), 8), positions=0))
    assert model.depth == 3


def test_drafts_are_shallower_where_positions_are_dear() -> None:
    depths = []
    for price in (0.0, 0.002, 0.02, 0.2):  # plain steps
        model = AcceptanceModel()
        for accepted in [7] + [6] * 2 + [4] * 8 + [2] * 24:
            model.observe(a_round(chain(12), accepted), position=price)
        depths.append(model.depth)
    assert depths == [8, 7, 3, 3], "one more than the longest path; the second longest; the longest but eleven; any"


def test_the_width_worth_drafting_follows_what_trees_use() -> None:
    siblings = Tree(np.arange(5), np.array([-1, 0, 0, 0, 1]), np.array([0, 1, 1, 1, 2]), np.full(5, 0.2, np.float32))
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.width is None
        model.observe(a_round(siblings))
    assert model.width == 6
    model.observe(a_round(chain(0)))
    assert model.width == 6
    for _ in range(60):
        model.observe(a_round(chain(3)))
    assert model.width == 2


def test_what_is_worth_growing_follows_what_trees_end_with() -> None:
    model = AcceptanceModel()
    assert model.faint == 0.0
    for _ in range(48):
        model.observe(a_round(chain(3)))
    assert 0.125 / 2.5 < model.faint < 0.125 / 2, "somewhat less than half of what trees end with"
    for _ in range(48):
        model.observe(a_round(chain(6)))
    assert model.faint < 0.016


def test_how_much_is_worth_growing_follows_what_trees_verify() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.nodes == TRIAL_NODES, "more are never verified"
        model.observe(a_round(chain(6)))
    assert model.nodes == 9
    for nodes in (9, 13):
        model.observe(a_round(chain(9)))
        assert model.nodes == nodes, "all of it was used twice: there may be more"
    for _ in range(KEPT):
        model.observe(a_round(chain(2)))
    assert model.nodes == LEAST_GROWN


def test_trees_that_are_verified_whole_are_grown_further() -> None:
    """Growth that ends too early must not look like trees that end there."""
    model, chosen = AcceptanceModel(), []
    for _ in range(100):
        worth_growing = sum(0.5**d >= model.faint for d in range(1, 20))
        chosen.append(min(5, worth_growing))
        model.observe(replace(a_round(chain(chosen[-1])), grown=worth_growing))
    assert min(chosen) == 5 and 0 < model.faint < 0.5**5


def test_rounds_of_the_chosen_few_teach_what_nodes_are_worth_and_nothing_about_others() -> None:
    rng = np.random.default_rng(0)
    model = AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(a_tree(rng), 1))
    before, weights = model.prospect(), model.weights.copy()
    for _ in range(20):
        model.observe(a_round(a_tree(rng, 30), [1]), typical=False)
    after = model.prospect()
    assert before is not None and after is not None and after.nodes == pytest.approx(before.nodes)
    assert not np.allclose(model.weights, weights)
