"""EAGLE-3 checkpoints (arXiv 2503.01840) as SafeAILab, SpecForge, AngelSlim and speculators publish them.

A checkpoint has one layer whose attention reads embedding and feature side by side, `fc` over three tapped target
layers, and usually a head of its own over the commonest tokens: `d2t` plus a row's number is the target's token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.drafters import mark, speculators
from draftwood.drafters.checkpoint import Taker, checkpoint_folder, read_json, read_tensors, weight_files
from draftwood.drafters.dflash_config import Keys, read_rope
from draftwood.errors import BadModel
from draftwood.packing import linear
from draftwood.target import Target

FORM = "EAGLE-3's format"
LAYER = ("midlayer.", "layers.0.")  # its prefix: the authors' and SpecForge's, speculators'
TAPS = 3
IDS = "eagle_aux_hidden_state_layer_ids"
UNKNOWN = ("attention_bias", "norm_before_fc", "norm_output", "fc_norm")
PADDING = 512  # by so many tokens the vocabularies of a drafter and its target may differ: some configs leave it out
ROWS = 4096  # of an embedding that are compared at once


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    hidden_size: int
    target_size: int  # the target's hidden size, which may be another one
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Mapping[str, Any]
    max_positions: int
    draft_vocab: int
    tap_layers: tuple[int, ...]  # target layers whose outputs are read
    normed: bool = False  # whether attention's output is added to the normalised feature instead of the feature itself


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Weights:
    """H heads of queries, G of keys and values, D wide."""

    fc: nn.Module  # 3 * the target's hidden -> hidden
    input_norm: Tensor  # [hidden] of embeddings
    hidden_norm: Tensor  # [hidden] of features
    qkv: nn.Module  # 2 * hidden -> (H + 2 G) * D
    output: nn.Module  # H * D -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: nn.Module
    down: nn.Module
    norm: Tensor  # [hidden]
    head: nn.Module | None  # hidden -> draft_vocab; None: the target's own
    ids: Tensor | None  # [draft_vocab] the target's token of each row; None: the row's own number
    embedding: Tensor | None  # [vocab, hidden]; None: the target's own


def load_eagle3(name: str, target: Target) -> tuple[Eagle3Config, Eagle3Weights]:
    """A checkpoint from a folder or the Hub. Raises BadModel if there is none, or it does not fit the target."""
    folder = checkpoint_folder(name, pickles=True)
    config = parse_config(read_json(folder / "config.json"), name, target)
    return config, build_weights(read_tensors(folder, pickles=True), config, name, target)


def weight_bytes(name: str, itemsize: int) -> int:
    """Bytes of the checkpoint's files, in their own number format: most are published in the one they run in."""
    return sum(file.stat().st_size for file in weight_files(checkpoint_folder(name, pickles=True)))


def parse_config(values: Mapping[str, Any], name: str, target: Target) -> Eagle3Config:
    """Raises BadModel naming the key that is wrong, or what does not fit."""
    values = speculators.flat(values, name)
    keys = Keys(values, name, FORM)
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    read = keys.whole("target_hidden_size", hidden)
    if keys.whole("num_hidden_layers", 1) != 1:
        raise keys.wrong("num_hidden_layers", "1")
    vocab = keys.whole("vocab_size", target.vocab_size)
    if read != target.hidden_size or abs(vocab - target.vocab_size) > PADDING:
        raise BadModel(
            f"The drafter {name} does not fit {target.name}: its hidden size is {read} and its vocabulary has "
            f"{vocab} tokens, the target's {target.hidden_size} and {target.vocab_size}. Name the drafter of this "
            "target, or 'ngram', which works with every target."
        )
    mark.check_mark(keys.reals(mark.KEY), name, target)
    if keys.get("hidden_act", "silu") != "silu":
        raise keys.wrong("hidden_act", "silu")
    for key in UNKNOWN:
        if keys.flag(key, False):
            raise keys.wrong(key, "false, which is all that draftwood runs")
    rope = {"rope_theta": 10000.0, **{k: v for k, v in values.items() if v is not None}}
    return Eagle3Config(
        hidden_size=hidden,
        target_size=read,
        intermediate_size=keys.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=keys.whole("num_key_value_heads", heads),
        head_dim=keys.whole("head_dim", hidden // heads),
        norm_eps=keys.real("rms_norm_eps", 1e-6),
        rope=read_rope(Keys(rope, name, FORM)),
        max_positions=keys.whole("max_position_embeddings", 32768),
        draft_vocab=keys.whole("draft_vocab_size", target.vocab_size),
        tap_layers=_tap_layers(keys, target.num_layers),
        normed=keys.flag("norm_before_residual", False),
    )


def _tap_layers(keys: Keys, depth: int) -> tuple[int, ...]:
    """The layers that the checkpoint names; else the authors': what enters layers 2, L / 2 and L - 3.

    SpecForge names layers whose outputs are read (`eagle_config`), vLLM those whose inputs are read (the top level).
    """
    eagle = keys.get("eagle_config")
    outputs = (eagle if isinstance(eagle, dict) else {}).get(IDS)
    key, first, layers = ("eagle_config", 0, outputs) if outputs is not None else (IDS, 1, keys.get(IDS))
    if layers is None:
        layers = [2, depth // 2, depth - 3]
    whole = isinstance(layers, list) and all(type(i) is int for i in layers)
    if not whole or len(layers) != TAPS or not all(0 <= i - first < depth for i in layers):
        raise keys.wrong(key, f"three of the target's layers {first} to {depth - 1 + first}")
    return tuple(i - first for i in layers)


def build_weights(tensors: dict[str, Tensor], config: Eagle3Config, name: str, target: Target) -> Eagle3Weights:
    """Raises BadModel for what is missing, misshapen or foreign."""
    tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    layer = next((prefix for prefix in LAYER if f"{prefix}hidden_norm.weight" in tensors), LAYER[0])
    take = Taker(tensors, name, "EAGLE-3", target.device, target.dtype)
    h, inner = config.hidden_size, config.intermediate_size
    widths = {"q": config.num_heads * config.head_dim} | dict.fromkeys("kv", config.num_kv_heads * config.head_dim)
    qkv = [take(f"{layer}self_attn.{part}_proj.weight", width, 2 * h) for part, width in widths.items()]
    head = linear(take("lm_head.weight", config.draft_vocab, h)) if take.has("lm_head.weight") else None
    ids = speculators.own_tokens(tensors, config.draft_vocab, target.vocab_size, name)
    if ids is not None and head is None:
        raise BadModel(f"The drafter {name} has a d2t, but no lm_head.weight that names its tokens; fetch it again.")
    embedding = take("embed_tokens.weight", target.vocab_size, h) if take.has("embed_tokens.weight") else None
    if h != target.hidden_size and (head is None or embedding is None):
        raise BadModel(
            f"The drafter {name} has a hidden size of {h} and {target.name} one of {target.hidden_size}, so it needs "
            "an embed_tokens.weight and an lm_head.weight of its own, and has not both; fetch it again."
        )
    weights = Eagle3Weights(
        fc=linear(take("fc.weight", h, TAPS * config.target_size)),
        input_norm=take(f"{layer}input_layernorm.weight", h),
        hidden_norm=take(f"{layer}hidden_norm.weight", h),
        qkv=linear(torch.cat(qkv)),
        output=linear(take(f"{layer}self_attn.o_proj.weight", h, widths["q"])),
        post_norm=take(f"{layer}post_attention_layernorm.weight", h),
        gate_up=linear(torch.cat([take(f"{layer}mlp.{part}_proj.weight", inner, h) for part in ("gate", "up")])),
        down=linear(take(f"{layer}mlp.down_proj.weight", h, inner)),
        norm=take("norm.weight", h),
        head=head,
        ids=None if ids is None else ids.to(target.device),
        embedding=None if embedding is None or _targets(embedding, target) else embedding,
    )
    take.nothing_left(but=("d2t", "t2d"))
    return weights


def _targets(embedding: Tensor, target: Target) -> bool:
    """Whether an embedding is the target's own, which some checkpoints repeat."""
    if embedding.shape[1] != target.hidden_size:
        return False
    parts = torch.arange(len(embedding), device=embedding.device).split(ROWS)
    return all(torch.equal(embedding[part], target.embed(part)) for part in parts)
