"""What a drafter begins as: the end of its target, or a checkpoint, whose settings go on; and how far it looks back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood.decoder import Sight
from draftwood.drafters.dflash_config import parse_config
from draftwood.errors import BadInput, BadModel
from draftwood.target import Target
from draftwood.train.data import usual_length
from draftwood.train.recipe import Recipe, drafter_config
from draftwood.train.start import inherited, inherited_tokens, start
from draftwood.train.state import export
from tests.reference import VOCAB, tiny_target
from tests.train_cases import MASK, RECIPE, make_course, noisy_model, some_text


def test_it_begins_as_the_end_of_its_target(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    model = start(course.config, "target", single, 0)
    source = tiny_target(dtype=torch.float32).model.model
    for layer, theirs in zip(model.layers, source.layers[-2:], strict=True):
        for part in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            assert torch.equal(layer.get_submodule(part).weight, theirs.get_submodule(part).weight)
    taps = torch.randn(3, 64)
    assert torch.equal(model.fc(taps), taps[:, -32:])


def test_a_run_may_start_from_a_checkpoint_of_the_same_shape(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    model = noisy_model(course)
    export(tmp_path, model, course.config, None)
    again = start(course.config, str(tmp_path), single, 0)
    assert all(torch.equal(a, b.float()) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    with pytest.raises(BadModel, match="another"):
        start({**course.config, "intermediate_size": 24}, str(tmp_path), single, 0)
    with pytest.raises(BadModel, match="has 2 layers; give --layers 2"):
        start({**course.config, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, str(tmp_path), single, 0)


def test_a_checkpoint_to_begin_from_decides_what_is_read_and_other_taps_are_refused(single: Target) -> None:
    first = {"target_layer_ids": [0, 1]}
    for taps in (2, Recipe().taps):
        found = drafter_config(replace(RECIPE, taps=taps), single, MASK, first=first)
        assert found["dflash_config"]["target_layer_ids"] == [0, 1]
    with pytest.raises(BadInput, match=r"--taps is 3, but --init old/drafter reads 2 target layers"):
        drafter_config(replace(RECIPE, taps=3, init="old/drafter"), single, MASK, first=first)


def test_a_drafter_that_goes_on_from_a_checkpoint_reads_the_same_target_layers(single: Target, tmp_path: Path) -> None:
    recipe = replace(RECIPE, taps=1)
    course = make_course(single, tmp_path, recipe)
    config = drafter_config(recipe, single, 7, first={"target_layer_ids": [0]})
    export(tmp_path, start(config, "random", single, 0), config, None)
    first = inherited(str(tmp_path))
    assert (first["target_layer_ids"], first["mask_token_id"]) == ([0], 7)
    assert course.config["dflash_config"]["target_layer_ids"] != [0]
    again = drafter_config(recipe, single, first["mask_token_id"], first=first)
    start(again, str(tmp_path), single, 0)
    assert again == config and inherited("target") == inherited("random") == {}


def test_a_checkpoint_of_other_heads_than_the_targets_is_gone_on_from_as_it_is(single: Target, tmp_path: Path) -> None:
    theirs = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True}
    rope = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = {**drafter_config(RECIPE, single, MASK), **theirs, **rope, "input_embedding_scale": 3.0}
    model = start(config, "random", single, 0)
    export(tmp_path, model, config, None)
    again = drafter_config(RECIPE, single, MASK, first=inherited(str(tmp_path)))
    assert parse_config(again, "again") == parse_config(config, "before")
    start(again, str(tmp_path), single, 0)


def test_rotary_settings_that_depend_on_the_length_are_the_targets_alone(
    single: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"longrope": {"short_factor": [1.0]}, "dynamic": {"factor": 2.0}, "linear": {"factor": 2.0}}
    for kind, more in kinds.items():
        settings = {"rope_type": kind, "rope_theta": 500.0, **more}
        monkeypatch.setattr(single.config, "rope_parameters", settings)
        rope = parse_config(drafter_config(RECIPE, single, MASK), "made").rope
        assert rope["rope_theta"] == 500.0 and rope["rope_type"] == (kind if kind == "linear" else "default")


def test_a_drafter_that_goes_on_from_a_checkpoint_proposes_the_same_tokens(single: Target, tmp_path: Path) -> None:
    config = drafter_config(RECIPE, single, MASK)
    export(tmp_path, start(config, "random", single, 0), config, torch.tensor([3, 5, 8]))
    assert inherited_tokens(str(tmp_path), VOCAB) == [3, 5, 8] and inherited_tokens("target", VOCAB) is None
    export(tmp_path, start(config, "random", single, 0), config, None)
    assert inherited_tokens(str(tmp_path), VOCAB) is None, "all of them"


def test_a_causal_drafter_may_go_on_from_one_that_is_not_and_stays_causal(single: Target, tmp_path: Path) -> None:
    plain, causal = drafter_config(RECIPE, single, MASK), drafter_config(replace(RECIPE, causal=True), single, MASK)
    (tmp_path / "plain").mkdir()
    (tmp_path / "causal").mkdir()
    export(tmp_path / "plain", start(plain, "random", single, 0), plain, None)
    model = start(causal, str(tmp_path / "plain"), single, 0)
    assert model.config.causal and not parse_config(plain, "plain").causal
    export(tmp_path / "causal", model, causal, None)
    assert drafter_config(RECIPE, single, MASK, first=inherited(str(tmp_path / "causal"))) == causal


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_what_every_layer_looks_back_and_goes_on_from_a_checkpoint(
    single: Target, tmp_path: Path, causal: bool
) -> None:
    recipe = replace(RECIPE, causal=causal, window=9)
    config = drafter_config(recipe, single, MASK, first={"sliding_window": 70})
    assert parse_config(config, "windowed").sights == (Sight(9, causal),) * 2
    export(tmp_path, start(config, "random", single, 0), config, None)
    first = inherited(str(tmp_path))
    assert drafter_config(RECIPE, single, MASK, first=first) == config
    whole, wider = (drafter_config(replace(RECIPE, window=size), single, MASK, first=first) for size in (0, 12))
    assert start(whole, str(tmp_path), single, 0).config.window is None
    assert {sight.window for sight in start(wider, str(tmp_path), single, 0).config.sights} == {12}
    assert parse_config({**config, "layer_types": ["full_attention", "sliding_attention"]}, "mixed").window is None
    with pytest.raises(BadInput, match=r"--block-size is 10, but --init old looks back 9 tokens"):
        drafter_config(replace(RECIPE, block_size=10, init="old"), single, MASK, first=first)
    with pytest.raises(BadInput, match="--window is 5; it must be 0"):
        replace(RECIPE, window=5)


def test_a_drafter_looks_back_as_far_as_most_texts_are_long() -> None:
    texts = [some_text(1, length=length) for length in [40] * 17 + [100, 120, 3000]]
    assert usual_length(texts) == 128 and usual_length(texts[:17]) == 64
    assert usual_length(texts, 64) == 128 and usual_length(texts[:17], 80) == 128, "and no less than a block"
