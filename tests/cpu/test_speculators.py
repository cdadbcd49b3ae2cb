"""Drafters of the speculators library: read as the same drafter in z-lab's format, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood import registry
from draftwood.drafters import speculators
from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_config import parse_config
from draftwood.errors import BadModel
from draftwood.target import Target
from draftwood.train.start import inherited, start
from draftwood.tree import Lattice
from tests.reference import dflash_files, tiny_target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = [2 * i + 1 for i in range(40)]  # that the drafter proposes
OUTSIDE = ("architectures", "dflash_config", "block_size", "num_target_layers")  # of the layers' own config
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def as_speculators(folder: Path, target: Target, change: Change = lambda config, tensors: None) -> Path:
    """The checkpoint of `dflash_files` as speculators would write it, with a head for TOKENS; then changed."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    ids = torch.tensor(TOKENS)
    tensors |= {"lm_head.weight": target.head_rows(ids)[0].clone(), "d2t": ids - torch.arange(len(ids))}
    tensors["t2d"] = torch.isin(torch.arange(target.vocab_size), ids)
    theirs = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {key: value for key, value in config.items() if key not in OUTSIDE},
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 96,
        "block_size": config["block_size"],
        "draft_vocab_size": len(ids),
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
    }
    change(theirs, tensors)
    (folder / "config.json").write_text(json.dumps(theirs))
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafted(drafter: DFlashDrafter, target: Target) -> Lattice:
    target.tap(drafter.tap_layers)
    state = drafter.open(32)
    drafter.extend(state, PROMPT, target.prefill(PROMPT, target.new_cache(32)).taps)
    draft = drafter.draft([Request(state, 7, 4)])[0]
    assert isinstance(draft, Lattice)
    return draft


def test_it_drafts_what_the_same_weights_do_in_the_other_format(tmp_path: Path) -> None:
    target = tiny_target()
    dflash_files(target, tmp_path)
    (tmp_path / "draft_tokens.json").write_text(json.dumps(TOKENS))
    usual = drafted(DFlashDrafter.load(str(tmp_path), target), target)
    counted = DFlashDrafter.weight_bytes(str(tmp_path), 2)
    (tmp_path / "draft_tokens.json").unlink()
    theirs = DFlashDrafter.load(str(as_speculators(tmp_path, target)), target)
    assert theirs.tap_layers == (0, 2), "what enters layers 1 and 3"
    found = drafted(theirs, target)
    assert found.tokens.tolist() == usual.tokens.tolist() and found.logp == pytest.approx(usual.logp)
    assert DFlashDrafter.weight_bytes(str(tmp_path), 2) == counted


def test_a_head_of_its_own_is_used_whatever_the_order_of_its_rows(tmp_path: Path) -> None:
    target = tiny_target()
    dflash_files(target, tmp_path)

    def other_head(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        ids = torch.tensor(TOKENS).flip(0)
        tensors["d2t"], tensors["lm_head.weight"] = ids - torch.arange(len(ids)), 2 * target.head_rows(ids)[0]

    drafter = DFlashDrafter.load(str(as_speculators(tmp_path, target, other_head)), target)
    state = drafter.open(32)
    target.tap(drafter.tap_layers)
    drafter.extend(state, PROMPT, target.prefill(PROMPT, target.new_cache(32)).taps)
    doubled = drafter.draft([Request(state, 7, len(TOKENS))])[0]
    plain = np.zeros((doubled.logp.shape[0], target.vocab_size))
    np.put_along_axis(plain, doubled.tokens, doubled.logp / 2, 1)
    mine = plain[:, TOKENS] - np.log(np.exp(plain[:, TOKENS]).sum(1, keepdims=True))
    dflash_files(target, tmp_path)
    (tmp_path / "draft_tokens.json").write_text(json.dumps(TOKENS))
    usual = drafted(DFlashDrafter.load(str(tmp_path), target), target)
    for depth, (tokens, logp) in enumerate(zip(usual.tokens, usual.logp, strict=True)):
        assert mine[depth, [TOKENS.index(token) for token in tokens]] == pytest.approx(logp, abs=1e-4)


def test_all_tokens_need_no_list_and_a_repeated_head_is_the_targets(tmp_path: Path) -> None:
    target = tiny_target()
    dflash_files(target, tmp_path)
    usual = drafted(DFlashDrafter.load(str(tmp_path), target), target)

    def whole(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["draft_vocab_size"] = target.vocab_size
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = target.head_rows()[0].clone()

    found = drafted(DFlashDrafter.load(str(as_speculators(tmp_path, target, whole)), target), target)
    assert found.tokens.tolist() == usual.tokens.tolist() and found.logp == pytest.approx(usual.logp)


def test_training_may_begin_from_it(tmp_path: Path) -> None:
    target = tiny_target()
    dflash_files(target, tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), "initializer_range": 0.02}
    layer = load_file(tmp_path / "model.safetensors")["layers.1.mlp.up_proj.weight"]
    init = str(as_speculators(tmp_path, target))
    assert inherited(init)["target_layer_ids"] == [0, 2]
    assert torch.equal(start(config, init, target, 0).layers[1].mlp.up_proj.weight, layer)


def test_what_is_usual_for_a_kind_of_model_is_left_out_of_its_config() -> None:
    layers = {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 1000, "num_key_value_heads": 8}
    told = {"speculators_model_type": "dflash", "transformer_layer_config": layers, "mask_token_id": 5, "block_size": 8}
    config = parse_config({**told, "aux_hidden_state_layer_ids": [2, 9]}, "made")
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (4096, 32, 8, 128)
    assert config.target_layer_ids == (1, 8) and config.rope["rope_theta"] == 10000.0
    assert config.draft_vocab is None and not config.causal and config.window is None
    nested = {**layers, "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}
    slides = {**told, "transformer_layer_config": nested, "aux_hidden_state_layer_ids": [2, 9]}
    assert parse_config(slides, "made").window == 2048 and parse_config(slides, "made").causal
    ahead = parse_config({**slides, "sliding_window_non_causal": True}, "made")
    assert ahead.window == 2048 and not ahead.causal
    assert speculators.flat({"hidden_size": 5}, "made") == {"hidden_size": 5}


REFUSED: dict[str, tuple[Change, str]] = {
    "EAGLE-3": (lambda c, t: c.update(speculators_model_type="eagle3"), "kind 'eagle3' .*; name it eagle3:"),
    "Medusa": (lambda c, t: c.update(speculators_model_type="medusa"), "'medusa' .* which draftwood does not run"),
    "DSpark": (lambda c, t: c.update(speculators_model_type="dspark"), "markov_rank = None instead of a whole number"),
    "Domino": (lambda c, t: c.update(projector_type="domino"), "projector_type = 'domino', a variant"),
    "shifted labels": (lambda c, t: c.update(shift_label=True), "shift_label = True, a variant"),
    "layers": (lambda c, t: c.update(aux_hidden_state_layer_ids=[0, 2]), r"layer_ids = \[0, 2\] instead of a list"),
    "no layers": (lambda c, t: c.pop("aux_hidden_state_layer_ids"), "layer_ids = None instead of a list"),
    "model": (lambda c, t: c["transformer_layer_config"].update(model_type="nope"), "transformer_layer_config that"),
    "list": (lambda c, t: t["d2t"].add_(60), "d2t that leads out of"),
    "no list": (lambda c, t: t.pop("d2t"), "proposes 40 tokens, but has no d2t"),
    "no head": (lambda c, t: t.pop("lm_head.weight"), "but instead of an lm_head.weight .* none"),
    "another head": (lambda c, t: c.update(draft_vocab_size=41), "d2t that leads out of|lm_head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    target, (change, message) = tiny_target(), REFUSED[case]
    dflash_files(target, tmp_path)
    with pytest.raises(BadModel, match=message):
        registry.drafter(f"dflash:{as_speculators(tmp_path, target, change)}", target)
