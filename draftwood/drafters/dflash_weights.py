"""The tensors of a DFlash checkpoint, checked against its config and laid out for few, large products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.convolution import Convolution
from draftwood.decoder import Layer, heads_norm, norm
from draftwood.drafters.checkpoint import Taker
from draftwood.drafters.dflash_config import DFlashConfig
from draftwood.drafters.markov import CANDIDATES
from draftwood.drafters.selector import Selector
from draftwood.drafters.speculators import own_tokens
from draftwood.errors import BadModel
from draftwood.packing import linear
from draftwood.rotary import rotate

SHARED = (
    "embed_tokens.weight",
    "lm_head.weight",
    "t2d",
    "confidence_head.proj.weight",  # DSpark's own word on how far to verify, which policies decide here
    "confidence_head.proj.bias",
)  # some exports repeat the target's own; the target's are used
SELECTOR = "candidate_selector."


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole drafter. Context features meet only `fc`, `feature_norm` and the `context_*` parts."""

    fc: nn.Module  # taps * hidden -> hidden
    feature_norm: Tensor  # [hidden]
    context_kv: nn.Module  # hidden -> layers * 2 * G * D: copies of k and v, so that one product serves all layers
    context_k_norm: Tensor | None  # [layers, G, D]
    layers: tuple[Layer, ...]
    norm: Tensor  # [hidden]
    selector: Selector | None = None
    head: OwnHead | None = None  # None: the target's


@dataclass(frozen=True, slots=True, eq=False)
class OwnHead:
    """A head that the drafter does not share with its target."""

    output: nn.Module  # hidden -> K
    tokens: list[int]  # [K] the target's ids of its rows, rising
    places: Tensor  # [K] of these rows in the checkpoint


def context_kv(config: DFlashConfig, weights: Weights, taps: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated keys and values `[layers, G, M, D]` of context tokens in all layers, from taps `[M, taps * hidden]`."""
    features = norm(weights.fc(taps.to(weights.norm)), weights.feature_norm, config.norm_eps)
    kv = weights.context_kv(features)
    kv = kv.view(len(taps), config.num_layers, 2, config.num_kv_heads, config.head_dim)
    keys = heads_norm(kv[:, :, 0], weights.context_k_norm, config.norm_eps)
    keys = rotate(keys.flatten(1, 2), cos, sin).view_as(keys)
    return keys.permute(1, 2, 0, 3), kv[:, :, 1].permute(1, 2, 0, 3)


def build_weights(
    tensors: dict[str, Tensor], config: DFlashConfig, name: str, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Consumes `tensors`. Raises BadModel for missing, misshapen and foreign ones."""
    take = Taker(tensors, name, "DFlash", device, dtype)
    own = _own_head(take, config)
    hidden, layers, keys_values, k_norms = config.hidden_size, [], [], []
    for i in range(config.num_layers):
        attention = f"layers.{i}.self_attn."
        qkv, bias = _fused(take, attention, _attention_parts(config), hidden, config.attention_bias)
        first_key = config.num_heads * config.head_dim
        keys_values.append((qkv[first_key:], None if bias is None else bias[first_key:]))
        qk_norm = _qk_norm(take, attention, config)
        k_norms.append(None if qk_norm is None else qk_norm[config.num_heads :])
        layers.append(_layer(take, f"layers.{i}.", config, linear(qkv, bias), qk_norm))
    fc = take("fc.weight", hidden, config.tap_width)
    biases = [bias for _, bias in keys_values if bias is not None]
    norms = [norm for norm in k_norms if norm is not None]
    if norms and len(norms) < config.num_layers:
        raise BadModel(f"The drafter {name} has q_norm and k_norm in some layers only; fetch it again.")
    weights = Weights(
        fc=linear(fc),
        feature_norm=take("hidden_norm.weight", hidden),
        context_kv=linear(torch.cat([kv for kv, _ in keys_values]), torch.cat(biases) if biases else None),
        context_k_norm=torch.stack(norms) if norms else None,
        layers=tuple(layers),
        norm=take("norm.weight", hidden),
        selector=_selector(take, config, own),
        head=own,
    )
    take.nothing_left(but=SHARED)
    return weights


def _own_head(take: Taker, config: DFlashConfig) -> OwnHead | None:
    """The head of a drafter that says which tokens it proposes (`d2t`); None: it has the target's."""
    size = config.draft_vocab or config.vocab_size
    ids = own_tokens(take.tensors, size, config.vocab_size, take.name)
    if ids is None:
        return None
    del take.tensors["d2t"]
    head, order = take.tensors.pop("lm_head.weight", None), ids.argsort()
    if head is None or head.shape != (size, config.hidden_size):
        found = "none" if head is None else f"one of {list(head.shape)}"
        raise BadModel(
            f"The drafter {take.name} has a d2t of {size} tokens, but instead of an lm_head.weight of "
            f"{[size, config.hidden_size]} {found}; fetch it again."
        )
    return OwnHead(linear(head[order].to(take.device, take.dtype)), ids[order].tolist(), order)


def _attention_parts(config: DFlashConfig) -> dict[str, int]:
    """Output widths of the projections that are fused for block tokens."""
    narrow = config.num_kv_heads * config.head_dim
    return {"q": config.num_heads * config.head_dim, "k": narrow, "v": narrow}


def _fused(take: Taker, prefix: str, parts: dict[str, int], width: int, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several projections of one input as one."""
    weight = torch.cat([take(f"{prefix}{part}_proj.weight", size, width) for part, size in parts.items()])
    bias = torch.cat([take(f"{prefix}{part}_proj.bias", size) for part, size in parts.items()]) if biased else None
    return weight, bias


def _layer(take: Taker, prefix: str, config: DFlashConfig, qkv: nn.Module, qk_norm: Tensor | None) -> Layer:
    hidden, inner, wide = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    mlp = prefix + "mlp."
    return Layer(
        input_norm=take(prefix + "input_layernorm.weight", hidden),
        qkv=qkv,
        qk_norm=qk_norm,
        output=linear(*_fused(take, prefix + "self_attn.", {"o": hidden}, wide, config.attention_bias)),
        post_norm=take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=linear(*_fused(take, mlp, {"gate": inner, "up": inner}, hidden, False)),
        down=linear(*_fused(take, mlp, {"down": hidden}, inner, False)),
        convolutions=(
            (_convolution(take, prefix + "attention_conv.", config), _convolution(take, prefix + "mlp_conv.", config))
            if config.taps
            else None
        ),
    )


def _convolution(take: Taker, prefix: str, config: DFlashConfig) -> Convolution:
    base = take(prefix + "base_kernel", 2, config.taps, config.hidden_size)
    kernels = take(prefix + "kernel_projection.weight", 2 * config.taps * config.groups, config.hidden_size)
    return Convolution(base, linear(kernels))


def _selector(take: Taker, config: DFlashConfig, own: OwnHead | None) -> Selector | None:
    """Of DFlash 2 or DSpark, which scores only the tokens of its `own` head."""
    if config.spark_rank:
        rows = config.vocab_size if own is None else len(own.tokens)
        before = take("markov_head.markov_w1.weight", config.vocab_size, config.spark_rank)
        after = take("markov_head.markov_w2.weight", rows, config.spark_rank)
        if own is not None:
            ids = torch.tensor(own.tokens, device=after.device)
            after = torch.zeros_like(before).index_copy_(0, ids, after[own.places.to(after.device)])
        return Selector(before, after, None, CANDIDATES)
    if not config.selector_rank:
        return None
    size = config.vocab_size, config.selector_rank
    before, after = (take(f"{SELECTOR}{which}_codebook", *size) for which in ("predecessor", "successor"))
    gate = linear(take(f"{SELECTOR}hidden_projection.weight", config.selector_rank, config.hidden_size))
    return Selector(before, after, gate, config.selector_top_k)


def _qk_norm(take: Taker, attention: str, config: DFlashConfig) -> Tensor | None:
    """`[H + G, D]`: one row per head, so that queries and keys are normalised at once; None if absent."""
    if not take.has(attention + "q_norm.weight") and not take.has(attention + "k_norm.weight"):
        return None
    query, key = (take(f"{attention}{part}_norm.weight", config.head_dim) for part in ("q", "k"))
    return torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
