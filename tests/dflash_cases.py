"""DFlash checkpoints in every form of their config, with random weights, and a target as small as they need."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_config import parse_config
from draftwood.packing import linear

HIDDEN, INNER, VOCAB, MASK, LAYERS = 24, 40, 101, 7, 2
BASE = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None,
    "num_target_layers": 6, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]},
    "vocab_size": VOCAB, "max_position_embeddings": 512, "something_unknown": [1, 2],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
FORMS: dict[str, dict[str, object]] = {
    "nested": {},
    "top-level": {"dflash_config": None, "mask_token_id": MASK, "target_layer_ids": [0, 5]},
    "layers by formula": {"dflash_config": {"mask_token_id": MASK}},
    "no architectures": {"architectures": None},
    "block 10 without GQA": {"block_size": 10, "num_key_value_heads": 4},
    "block 16, one key head": {"block_size": 16, "num_key_value_heads": 1},
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "llama3": {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    "bias": {"attention_bias": True},
    "sliding": SLIDING,
    "sliding, block larger than window": {**SLIDING, "sliding_window": 5},
    "sliding, bidirectional": {**SLIDING, "sliding_window": 5, "is_causal": False},
    "causal everywhere": {"is_causal": True},
    "max_window_layers": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
    "use_swa": {
        "dflash_config": {
            "mask_token_id": MASK, "target_layer_ids": [2], "use_swa": True, "swa_window_size": 11,
            "causal": False,
        },
    },
    "scaled embedding": {"input_embedding_scale": 3.0},
    "the root predicts, too": {"sample_from_anchor": True},
}  # fmt: skip
SIZES = {
    "mask_token_id": MASK, "target_layer_ids": [1, 3, 4], "conv_kernel_size": 2, "conv_group_size": 6,
    "selector_rank": 5, "selector_top_k": 4,
}  # fmt: skip
SECOND = {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": SIZES}  # DFlash 2
SPARK = {  # DSpark, whose root predicts, too
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "dflash_config": None, "mask_token_id": MASK,
    "target_layer_ids": [1, 3, 4], "markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True,
}  # fmt: skip
SECOND_FORMS: dict[str, dict[str, object]] = {
    "as published": {**SLIDING, **SECOND},
    "three taps, causal": {**SECOND, "is_causal": True, "dflash_config": {**SIZES, "conv_kernel_size": 3}},
    "DSpark": SPARK,
}


@dataclass
class TinyTarget:
    """What a drafter uses of a target: its embedding, its head and its shapes."""

    name: str = "tiny"
    hidden_size: int = HIDDEN
    num_layers: int = 6
    vocab_size: int = VOCAB
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    finishes: bool = False

    def __post_init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        shape = (self.vocab_size, self.hidden_size)
        self.embedding, self._rows = (
            torch.randn(shape, generator=numbers, dtype=torch.float64).to(self.dtype) for _ in range(2)
        )
        self.output = linear(self._rows)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def head_rows(self, tokens: Tensor | None = None) -> tuple[Tensor, None]:
        return self._rows if tokens is None else self._rows[tokens], None

    def finish(self, logits: Tensor) -> Tensor:
        return logits


def make_tensors(config: dict, qk_norm: bool = True) -> dict[str, Tensor]:
    """Random weights under the names of z-lab's checkpoints."""
    fields = parse_config(config, "made")
    hidden, inner = fields.hidden_size, fields.intermediate_size
    heads, keys = fields.num_heads * fields.head_dim, fields.num_kv_heads * fields.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(fields.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(fields.num_layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {f"layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        for name, rows, columns in (
            ("q", heads, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, heads),
        ):  # fmt: skip
            shapes[f"{attention}{name}_proj.weight"] = (rows, columns)
            if fields.attention_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        if qk_norm:
            shapes |= {f"{attention}{n}_norm.weight": (fields.head_dim,) for n in "qk"}
        shapes |= {f"{mlp}{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{mlp}down_proj.weight"] = (hidden, inner)
        for part in ("attention_conv", "mlp_conv") if fields.taps else ():
            shapes[f"layers.{i}.{part}.base_kernel"] = (2, fields.taps, hidden)
            shapes[f"layers.{i}.{part}.kernel_projection.weight"] = (2 * fields.taps * fields.groups, hidden)
    if fields.spark_rank:
        shapes |= {f"markov_head.markov_w{i}.weight": (VOCAB, fields.spark_rank) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + fields.spark_rank), "confidence_head.proj.bias": (1,)}
    if fields.selector_rank:
        shapes |= {
            f"candidate_selector.{n}_codebook": (VOCAB, fields.selector_rank) for n in ("predecessor", "successor")
        }
        shapes["candidate_selector.hidden_projection.weight"] = (fields.selector_rank, hidden)
    numbers = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=numbers, dtype=torch.float64) * 0.4 + float("norm" in name)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def some_taps(drafter: DFlashDrafter, count: int, seed: int = 3) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count, drafter.config.tap_width, generator=numbers, dtype=torch.float64).to(
        drafter._target.dtype
    )
