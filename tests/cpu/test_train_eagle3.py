"""EAGLE-3's objective: the module predicts what the drafter drafts, learns, and is exported in the authors' form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftwood.drafters.base import Request
from draftwood.drafters.eagle3 import Eagle3Drafter
from draftwood.errors import BadInput
from draftwood.target import Target
from draftwood.train import run
from draftwood.train.blocks import OBJECTIVES, make_blocks
from draftwood.train.data import Identity, Manifest
from draftwood.train.eagle3 import start_eagle3
from draftwood.train.fleet import Fleet
from draftwood.train.holdout import held_out_tau, lattices
from draftwood.train.shards import write_shard
from draftwood.train.show import read_log
from tests.reference import byte_tokenizer
from tests.train_cases import MASK, RECIPE, TEXTS, make_course, make_trainee, run_to_the_end, some_text

EAGLE = replace(RECIPE, objective="eagle3", block_size=5)
TOKENS = torch.arange(0, 97, 2)


def test_every_place_is_a_row_and_only_the_answer_is_predicted() -> None:
    text = some_text(1, length=14, prompt=5)
    anchors, shown = OBJECTIVES["eagle3"].draw(np.random.default_rng(0), text, 3, 4)
    assert anchors.tolist() == list(range(1, 13))
    blocks = make_blocks([text], [anchors], [shown], 4, MASK, 2.0, teacher_forced=True)
    assert (blocks.tokens[:10] == text.tokens[anchors[:10, None] + np.arange(4)]).all(), "nothing is masked"
    assert not blocks.weights[:4].any() and (blocks.weights[4:, 0] == 1).all()
    assert blocks.labels[4].tolist() == text.tokens[6:9].tolist()


def test_blocks_that_begin_in_the_prompt_of_a_short_answer_predict_nothing() -> None:
    text = some_text(1, length=7, prompt=5)
    anchors, shown = OBJECTIVES["eagle3"].draw(np.random.default_rng(0), text, 3, 16)
    blocks = make_blocks([text], [anchors], [shown], 16, MASK, 7.0, teacher_forced=True)
    assert np.count_nonzero(blocks.weights, axis=1).tolist() == [0, 0, 0, 0, 1]


def test_the_kind_of_drafter_decides_layers_and_taps() -> None:
    assert (EAGLE.layers, EAGLE.taps) == (1, 3)


@pytest.mark.parametrize("trimmed", [False, True])
def test_the_module_predicts_what_the_exported_drafter_drafts(single: Target, tmp_path: Path, trimmed: bool) -> None:
    """Down the drafter's own chain at several places: the same tokens with the same probabilities."""
    course = make_course(single, tmp_path, EAGLE, tokens=TOKENS if trimmed else None)
    model = make_trainee(course).model
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p + 0.3 * torch.randn_like(p)).bfloat16())  # what a file can hold
    course.export(model, None)
    found = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight"} <= set(found)
    assert ("d2t" in found) == ("t2d" in found) == trimmed
    head = replace(course.head, weight=found["lm_head.weight"].float())  # rounded, as in the file
    drafter = Eagle3Drafter.load(f"{tmp_path},depth=4,beam=1", single)
    single.tap(drafter.tap_layers)
    text = TEXTS[2]
    for place in (text.prompt, text.prompt + 7):
        cache, state = single.new_cache(64), drafter.open(64)  # training reads features in bf16
        tokens = text.tokens[:place].tolist()
        drafter.extend(state, tokens, single.prefill(tokens, cache).taps.bfloat16().float())
        chain = drafter.draft([Request(state, int(text.tokens[place]), 4)])[0]
        path = [*text.tokens[: place + 1], *chain.tokens[1:], 0]
        drafted = replace(text, tokens=np.array(path))
        rows = lattices(model, single, head, drafted, course.features([2])[0], 1, 4, teacher_forced=True)
        row = rows[place - text.prompt]
        assert row.tokens[:4, 0].tolist() == chain.tokens[1:].tolist()
        np.testing.assert_allclose(np.exp(np.cumsum(row.logp[:4, 0])), chain.mass[1:], rtol=1e-4)


def test_it_learns_and_its_tau_is_that_of_the_chain(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path, replace(EAGLE, steps=60, lr=1e-2), held_out=TEXTS[:2])
    run_to_the_end(course)
    losses = [line["loss"] for line in read_log(tmp_path) if "loss" in line]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    taus = [line["tau"] for line in read_log(tmp_path) if "tau" in line]
    assert all(set(tau) == {"dflash"} for tau in taus) and taus[-1]["dflash"] > 1
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    assert held_out_tau(make_trainee(course).model, single, course.head, [], []) == {}


@pytest.mark.parametrize("part", [{"final_logit_softcapping": 30.0}, {"logit_scale": 0.5}])
def test_a_target_whose_logits_the_checkpoint_cannot_finish_is_refused(
    part: dict[str, float], single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_tokenizer", lambda name, trusted: byte_tokenizer())
    monkeypatch.setattr(single, "_finishing", (part.get("logit_scale"), 1.0, part.get("final_logit_softcapping")))
    Manifest(Identity.of(single), "default", {}).save(tmp_path)
    write_shard(tmp_path, 0, TEXTS)
    with pytest.raises(BadInput, match=r"eagle3: the logits of .* are scaled or capped"):
        run.prepare(run.TrainOptions([tmp_path], tmp_path), replace(EAGLE, mask_token=MASK), single, Fleet())


def test_it_begins_from_the_target_or_anew(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path, EAGLE)
    hidden = single.hidden_size
    model = start_eagle3(course.config, "target", single, 0)
    assert torch.equal(model.fc.weight[:, -hidden:], torch.eye(hidden)) and not model.fc.weight[:, :-hidden].any()
    assert model.midlayer.self_attn.q_proj.weight[:, hidden:].std() > 0.1
    assert start_eagle3(course.config, "random", single, 0).midlayer.self_attn.q_proj.weight.std() < 0.03
    with pytest.raises(BadInput, match="target or random"):
        start_eagle3(course.config, "some/checkpoint", single, 0)
