"""Blocks by definition; many at once are each alone, and the module predicts what the exported drafter drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.decoder import Sight
from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.markov import Markov, on_host, propose
from draftwood.target import Target
from draftwood.train import attention
from draftwood.train.attention import Layout
from draftwood.train.blocks import OBJECTIVES, draw_anchors, make_blocks
from draftwood.train.holdout import forward
from draftwood.train.loop import Course
from draftwood.train.model import TrainableDFlash
from draftwood.train.shards import Text
from draftwood.train.state import export
from tests.reference import VOCAB, tiny_target
from tests.train_cases import (
    MASK,
    RECIPE,
    TEXTS,
    make_course,
    make_trainee,
    noisy_model,
    some_text,
    taps_by_transformers,
)


def test_a_block_shows_its_prefix_and_predicts_the_rest_of_the_text() -> None:
    text = some_text(1, length=12)
    blocks = make_blocks([text], [np.array([7, 9])], [np.array([1, 2])], size=5, mask=MASK, gamma=2.0)
    t = text.tokens
    assert blocks.tokens.tolist() == [[t[7], MASK, MASK, MASK, MASK], [t[9], t[10], MASK, MASK, MASK]]
    assert blocks.labels[0].tolist() == t[8:12].tolist()
    assert blocks.labels[1][1] == t[11]
    np.testing.assert_allclose(blocks.weights[0], np.exp([0, -0.5, -1, -1.5]), rtol=1e-6)
    np.testing.assert_allclose(blocks.weights[1], [0, 1, 0, 0])  # shown; predicted; behind the end twice


@pytest.mark.parametrize("objective", ["dflash", "variable-prefix"])
def test_anchors_lie_in_the_answer_and_leave_something_to_predict(objective: str) -> None:
    rng, text = np.random.default_rng(0), some_text(2, length=20, prompt=8)
    for count in (1, 5, 100):
        anchors = draw_anchors(rng, text, count)
        assert len(set(anchors)) == len(anchors) == min(count, 11)
        assert anchors.min() >= text.prompt and anchors.max() <= len(text.tokens) - 2
        shown = OBJECTIVES[objective].prefixes(rng, len(anchors), 6)
        assert (shown == 1).all() if objective == "dflash" else ((shown >= 2) & (shown <= 5)).all()
        assert (make_blocks([text], [anchors], [shown], 6, MASK, 4.0).weights.max(1) == 1).all()


def test_anchors_are_drawn_anew_in_every_epoch_and_every_text_is_seen_once_in_it() -> None:
    places = [pair for step in range(6) for pair in RECIPE.batch(step, 8)]
    assert [epoch for epoch, _ in places] == sorted(epoch for epoch, _ in places)
    for epoch in range(3):
        assert sorted(text for e, text in places if e == epoch) == list(range(8))
    assert [t for e, t in places if e == 0] != [t for e, t in places if e == 1]
    draws = [draw_anchors(RECIPE.anchor_rng(epoch, 3), some_text(3), 5).tolist() for epoch in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


# --- attention and the module --------------------------------------------------------------------------------


SIGHTS = [Sight(None, False), Sight(7, False), Sight(7, True)]


def attention_inputs(counts: tuple[int, ...] = (3, 1, 2)) -> tuple[Layout, list[Tensor]]:
    torch.manual_seed(0)
    layout = Layout(4, (9, 5, 20), counts, torch.tensor([2, 5, 7, 3, 0, 19]))
    q, k, v = (torch.randn(24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    ck, cv = (torch.randn(34, 2, 8, dtype=torch.float64) for _ in range(2))
    return layout, [q, ck, cv, k, v]


def block_alone(layout: Layout, inputs: list[Tensor], sight: Sight, block: int) -> Tensor:
    """One block by definition: its own text's features before the anchor, and itself, under one mask."""
    q, ck, cv, k, v = inputs
    text = int(np.searchsorted(np.cumsum(layout.counts), block, side="right"))
    begin, anchor = sum(layout.lengths[:text]), int(layout.anchors[block])
    own = slice(4 * block, 4 * block + 4)
    keys, values = (torch.cat([far[begin : begin + anchor], near[own]]) for far, near in ((ck, k), (cv, v)))
    ahead = torch.arange(anchor + 4) - (anchor + torch.arange(4))[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if sight.window is not None:
        seen &= ahead.abs() < sight.window
    if sight.causal:
        seen &= ahead <= 0
    heads = (q[own].transpose(0, 1), *(x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values)))
    return F.scaled_dot_product_attention(*heads, seen).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("make", [attention.text_by_text, attention.side_by_side])
@pytest.mark.parametrize("sight", SIGHTS)
def test_many_blocks_at_once_are_each_block_alone(make: Callable, sight: Sight) -> None:
    layout, inputs = attention_inputs()
    together = make(layout, sight)(*inputs)
    alone = torch.cat([block_alone(layout, inputs, sight, b) for b in range(6)])
    torch.testing.assert_close(together, alone)


@pytest.fixture(params=["llama", "qwen3"])
def double(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param)


@pytest.mark.parametrize("trimmed", [False, True])
def test_the_exported_drafter_drafts_what_the_module_predicts(double: Target, trimmed: bool, tmp_path: Path) -> None:
    kept = torch.arange(0, VOCAB, 3) if trimmed else None
    course = make_course(double, tmp_path, tokens=kept)
    model = noisy_model(course)
    export(tmp_path, model, course.config, kept)
    drafter = DFlashDrafter.load(str(tmp_path), double)
    text, shown = TEXTS[4], 1
    taps = taps_by_transformers(double, text, drafter.tap_layers)
    found = drafts_of(model, course, text, taps, shown)
    for place, draft in enumerate(found[:8]):
        at = text.prompt + place
        state = drafter.open(64)
        drafter.extend(state, text.tokens[:at].tolist(), taps[:at])
        expected = drafter.draft([Request(state, int(text.tokens[at]), 5)])[0]
        np.testing.assert_array_equal(draft.lattice.tokens, expected.lattice.tokens)
        np.testing.assert_allclose(draft.lattice.logp, expected.lattice.logp, atol=1e-5)
        np.testing.assert_allclose(draft.pairs, expected.pairs, atol=1e-4)
        assert np.abs(draft.pairs - draft.lattice.logp[1:, None]).max() > 0.1
        assert not trimmed or set(expected.lattice.tokens.ravel().tolist()) <= set(kept.tolist())


@torch.no_grad()
def drafts_of(model: TrainableDFlash, course: Course, text: Text, taps: Tensor, shown: int) -> list:
    anchors = np.arange(text.prompt, len(text.tokens) - 1)
    size = course.recipe.block_size
    blocks = make_blocks([text], [anchors], [np.full(len(anchors), shown)], size, MASK, 4.0)
    hidden = forward(model, course.target, blocks.tokens, [taps], Layout.of(blocks, taps.device))
    markov = Markov.of(*model.markov.matrices, course.target, course.head.tokens)
    return [on_host(propose(course.head.logits(h), 8, course.head.tokens, markov)) for h in hidden]


def test_texts_do_not_see_each_other(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    model = make_trainee(course).model
    anchors = [np.array([8, 11]), np.array([9]), np.array([6, 20, 21])]
    texts, taps = TEXTS[:3], [f.taps for f in course.features(range(3))]

    def run(which: list[int]) -> Tensor:
        chosen = [anchors[i] for i in which]
        blocks = make_blocks([texts[i] for i in which], chosen, [np.ones(len(a), int) for a in chosen], 6, MASK, 4.0)
        layout = Layout.of(blocks, single.device)
        return forward(model, single, blocks.tokens, [taps[i] for i in which], layout)

    together = run([0, 1, 2])
    torch.testing.assert_close(together, torch.cat([run([0]), run([1]), run([2])]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_block_predicts_what_a_longer_one_begins_with(single: Target, tmp_path: Path, causal: bool) -> None:
    recipe = replace(RECIPE, causal=causal)
    model, text = noisy_model(make_course(single, tmp_path, recipe)), TEXTS[4]
    taps = taps_by_transformers(single, text, model.config.target_layer_ids)
    hidden = []
    for size in (6, 3):
        blocks = make_blocks([text], [np.arange(8, 20)], [np.ones(12, np.int64)], size, MASK, 1.0)
        hidden.append(forward(model, single, blocks.tokens, [taps], Layout.of(blocks, single.device))[:, :2])
    assert torch.allclose(*hidden, atol=1e-5) is causal
