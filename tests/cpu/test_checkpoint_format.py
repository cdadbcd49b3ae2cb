"""Drafters that draftwood writes have the keys and tensors that other DFlash engines document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from draftwood.drafters.dflash_config import check_fits, parse_config
from draftwood.embedded import EMBEDDED_DRAFTER
from draftwood.errors import BadModel
from draftwood.target import Target
from draftwood.train.recipe import Recipe, drafter_config
from tests.reference import tiny_model, tiny_target

# As published with z-lab's checkpoints, which vLLM's and SGLang's DFlash methods load.
KEYS = {
    "architectures", "model_type", "block_size", "dflash_config", "num_target_layers", "hidden_size",
    "num_hidden_layers", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta",
    "rope_scaling", "vocab_size", "tie_word_embeddings", "attention_bias", "max_position_embeddings", "dtype",
}  # fmt: skip
# What either engine also looks for, and what would change the meaning of the keys above.
OTHERWISE = {
    "eagle_aux_hidden_state_layer_ids", "eagle_config", "use_aux_hidden_state", "draft_vocab_size",
    "target_hidden_size", "is_causal", "is_neox_style",
}  # fmt: skip
OTHERWISE_OWN = {
    "causal", "use_swa", "attention_sink_bias", "projector_type", "conv_kernel_size", "selector_rank",
    "output_multiplier",
}  # fmt: skip
OUTSIDE = {"fc.weight", "hidden_norm.weight", "norm.weight"}
OF_A_LAYER = {
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm.weight", "post_attention_layernorm.weight",
}  # fmt: skip


def shipped() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EMBEDDED_DRAFTER / "config.json").read_text())
    return config


@pytest.fixture(params=["trained", "shipped"])
def config(request: pytest.FixtureRequest, target: Target) -> dict[str, Any]:
    if request.param == "shipped":
        return shipped()
    return json.loads(json.dumps(drafter_config(Recipe(layers=2, taps=2), target, mask_token=96)))


def test_the_documented_keys_are_there(config: dict[str, Any]) -> None:
    assert not KEYS - config.keys()
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dtype"] == "bfloat16" and not config["attention_bias"]


def test_the_numbers_fit_together(config: dict[str, Any]) -> None:
    own = config["dflash_config"]
    assert 0 <= own["mask_token_id"] < config["vocab_size"]
    assert all(0 <= layer < config["num_target_layers"] for layer in own["target_layer_ids"])
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0 and config["block_size"] > 1


def test_the_keys_are_what_vllm_and_sglang_read(config: dict[str, Any]) -> None:
    """Types and ranges that their loaders demand."""
    own = config["dflash_config"]
    assert isinstance(own["target_layer_ids"], list) and own["target_layer_ids"]
    assert all(type(layer) is int for layer in own["target_layer_ids"])
    assert type(own["mask_token_id"]) is int and type(config["block_size"]) is int
    assert config["hidden_act"] == "silu" and config["num_target_layers"] >= 1
    assert len(kinds := set(config["layer_types"])) == 1 and kinds <= {"full_attention", "sliding_attention"}
    assert ("sliding_attention" in kinds) == config["use_sliding_window"] == (type(config["sliding_window"]) is int)
    assert OTHERWISE & config.keys() <= {"is_causal"} and not OTHERWISE_OWN & own.keys()
    assert config.get("is_causal", True)  # only where it says more than its absence


def test_the_tensors_are_those_of_the_format() -> None:
    config, folder = shipped(), Path(EMBEDDED_DRAFTER)
    layers = {f"layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in OF_A_LAYER}
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        fc = file.get_slice("fc.weight").get_shape()
    assert names == OUTSIDE | layers and len(OF_A_LAYER) == 11
    assert fc == [config["hidden_size"], len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]]


def test_the_page_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    own = {"target_layer_ids", "mask_token_id", "objective", "thinking", "tau", "target_mark", "markov_rank"}
    assert set(re.findall(r"`(?:dflash_config\.)?(\w+)`", page)) >= KEYS | OTHERWISE | OTHERWISE_OWN | own
    assert shipped()["dflash_config"].keys() <= own


def test_a_drafter_tells_its_target_from_another_of_the_same_shape(target: Target) -> None:
    """In whatever dtype, and tuned; where its maker left no mark, any target of the shape will do."""
    values = drafter_config(Recipe(layers=2, taps=2), target, mask_token=96)
    made, other = parse_config(values, "ours"), tiny_target(seed=5)
    tuned = Target(tiny_model().to(torch.bfloat16), "tuned")
    with torch.no_grad():
        weight = tuned.model.get_input_embeddings().weight
        weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    for fits in (target, tuned):
        check_fits(made, "ours", fits)
    with pytest.raises(BadModel, match="ours was made for another model of the shape of tiny-llama"):
        check_fits(made, "ours", other)
    del values["dflash_config"]["target_mark"]
    check_fits(parse_config(values, "theirs"), "theirs", other)


@pytest.mark.parametrize("mark", [[0.1, 0.2], "abc", [None], []])
def test_a_damaged_mark_is_named(mark: object, target: Target) -> None:
    values = drafter_config(Recipe(layers=2, taps=2), target, mask_token=96)
    values["dflash_config"]["target_mark"] = mark
    with pytest.raises(BadModel, match="target_mark"):
        check_fits(parse_config(values, "ours"), "ours", target)
