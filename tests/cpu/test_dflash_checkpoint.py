"""DFlash checkpoints: what is read of them, and what is refused in which words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftwood import registry
from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_config import parse_config
from draftwood.errors import BadModel
from tests.dflash_cases import BASE, HIDDEN, MASK, SECOND, SIZES, TinyTarget, make_tensors, write


def test_reads_what_it_says(tmp_path: Path) -> None:
    drafter = DFlashDrafter.load(write(tmp_path, BASE, make_tensors(BASE)), TinyTarget())
    assert drafter.tap_layers == (1, 3, 4)
    formula = {
        **BASE,
        "dflash_config": {"mask_token_id": MASK},
        "num_target_layers": 36,
        "num_hidden_layers": 5,
    }
    assert parse_config(formula, "made").target_layer_ids == (1, 9, 17, 25, 33)


REFUSED_CONFIGS = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "DFlash 2 without its sizes": ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size"),
    "odd groups": (
        {**SECOND, "dflash_config": {**SIZES, "conv_group_size": 7}},
        "conv_group_size = 7 .* divisor of",
    ),
    "no mask": ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
    "text for a number": ({"hidden_size": "24"}, "hidden_size = '24'"),
    "tiny block": ({"block_size": 1}, "block_size = 1"),
    "a factor of its own": ({"output_multiplier": 0.5}, "output_multiplier = 0.5 instead of 1"),
    "odd heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "linear attention": ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
    "no window": ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    "no theta": ({"rope_theta": None}, "rope_theta"),
    "dynamic rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "bad layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, "2"]}}, "target_layer_ids"),
}
REFUSED_FITS = {
    "hidden size": ({"hidden_size": 32}, "hidden size 24"),
    "layers": ({"num_layers": 5}, "number of target layers 6"),
    "vocabulary": ({"vocab_size": 200}, "vocabulary size 101"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_refuses_configs_by_key(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED_CONFIGS[case]
    with pytest.raises(BadModel, match=message):
        DFlashDrafter.load(write(tmp_path, {**BASE, **changes}, make_tensors(BASE)), TinyTarget())


@pytest.mark.parametrize("case", REFUSED_FITS)
def test_refuses_other_targets_by_name(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED_FITS[case]
    with pytest.raises(BadModel, match=message) as error:
        DFlashDrafter.load(write(tmp_path, BASE, make_tensors(BASE)), replace(TinyTarget(), **changes))
    assert "tiny" in str(error.value)


def test_refuses_layers_and_masks_outside_the_target(tmp_path: Path) -> None:
    for nested, message in (
        ({"mask_token_id": 101, "target_layer_ids": [1, 3, 4]}, "mask token 101"),
        ({"mask_token_id": MASK, "target_layer_ids": [1, 3, 6]}, "target layer 6"),
    ):
        config = {**BASE, "dflash_config": nested}
        with pytest.raises(BadModel, match=message):
            DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), TinyTarget())


def test_refuses_tensors_by_name(tmp_path: Path) -> None:
    good = make_tensors(BASE)
    without = {name: tensor for name, tensor in good.items() if name != "layers.1.mlp.up_proj.weight"}
    half_normed = {name: tensor for name, tensor in good.items() if "layers.1.self_attn.q_norm" not in name}
    one_normed = {name: t for name, t in good.items() if not name.startswith("layers.1.self_attn.") or "proj" in name}
    for tensors, message in (
        (without, "lacks the tensor layers.1.mlp.up_proj.weight"),
        (half_normed, "lacks the tensor layers.1.self_attn.q_norm.weight"),
        (one_normed, "some layers only"),
        ({**good, "fc.weight": torch.zeros(HIDDEN, HIDDEN)}, r"fc.weight is \[24, 24\]"),
        ({**good, "layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "q_proj.bias"),
        ({**good, "layers.0.attention_conv.base_kernel": torch.zeros(2)}, "base_kernel that no DFlash model"),
        ({**good, "candidate_selector.successor_codebook": torch.zeros(2)}, "codebook that no DFlash model"),
    ):
        with pytest.raises(BadModel, match=message):
            DFlashDrafter.load(write(tmp_path, BASE, tensors), TinyTarget())
    DFlashDrafter.load(write(tmp_path, BASE, {**good, "embed_tokens.weight": torch.zeros(2)}), TinyTarget())


def test_shards(tmp_path: Path) -> None:
    tensors = make_tensors(BASE)
    whole = DFlashDrafter.load(write(tmp_path / "whole", BASE, tensors), TinyTarget())
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(tensors)
    places = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "config.json").write_text(json.dumps(BASE))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    sharded = DFlashDrafter.load(str(folder), TinyTarget())
    a, b = (drafter.draft([Request(drafter.open(4), 5, 4)])[0] for drafter in (whole, sharded))
    np.testing.assert_array_equal(a.logp, b.logp)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadModel, match="lacks model-00002-of-00002"):
        DFlashDrafter.load(str(folder), TinyTarget())
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadModel, match="weight_map"):
        DFlashDrafter.load(str(folder), TinyTarget())


def test_refuses_folders_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(BadModel, match=message):
            DFlashDrafter.load(name, TinyTarget())

    def offline(name: str, **_: object) -> str:
        # Errors of the network are of whatever library brings them.
        raise RuntimeError if name == "someone/cut-off" else FileNotFoundError(f"{name} is out of reach")

    monkeypatch.setattr("draftwood.drafters.checkpoint.snapshot_download", offline)
    refused("someone/no-such-drafter", "neither a folder here nor")
    refused("someone/cut-off", "neither a folder here nor .*RuntimeError")
    refused("", "No checkpoint was named")
    refused("x" * 5000, "File name too long")
    folder = tmp_path / "drafter"
    folder.mkdir()
    refused(str(folder), "has no config.json")
    (folder / "config.json").write_text("{")
    refused(str(folder / "config.json"), "is a file")
    refused(str(folder), "cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    refused(str(folder), "not an object")
    (folder / "config.json").write_text(json.dumps(BASE))
    refused(str(folder), "no weights")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(str(folder), "only pytorch_model.bin, a pickle")
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    refused(str(folder), "is damaged")
    whole = write(tmp_path / "cut", BASE, make_tensors(BASE))
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(whole, "is damaged")


def test_loads_hub_names_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return write(tmp_path, BASE, make_tensors(BASE))

    monkeypatch.setattr("draftwood.drafters.checkpoint.snapshot_download", download)
    assert DFlashDrafter.load("z-lab/some-drafter", TinyTarget()).name == "z-lab/some-drafter"
    assert {name for name, _ in asked} == {"z-lab/some-drafter"} and "*.safetensors" in asked[-1][1]
    assert not [pattern for _, wanted in asked for pattern in wanted if pattern.endswith((".py", ".bin", "*"))]


def test_of_a_model_that_is_no_drafter_only_small_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--drafter Qwen/Qwen3-8B`, by mistake, would fetch 16 GB before it was refused."""
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": ["Qwen3ForCausalLM"]}))

    def download(name: str, allow_patterns: list[str]) -> str:
        assert all(pattern.endswith(".json") for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("draftwood.drafters.checkpoint.snapshot_download", download)
    for use in (
        lambda: DFlashDrafter.load("Qwen/Qwen3-8B", TinyTarget()),
        lambda: registry.drafter_bytes("Qwen/Qwen3-8B", 2),
    ):
        with pytest.raises(BadModel, match="Qwen3ForCausalLM"):
            use()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
NESTED = ("mask_token_id", "target_layer_ids", "use_swa", "swa_window_size", "causal")


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*BASE, *NESTED, "layer_types", "is_causal", "rope_parameters"]), JSON))
def test_any_config_parses_or_is_refused_in_a_sentence(changes: dict) -> None:
    try:
        config = parse_config({**BASE, **changes}, "odd")
    except BadModel as error:
        assert "\n" not in str(error)
    else:
        assert config.block_size >= 2 and config.num_heads % config.num_kv_heads == 0
