"""The lean path: the forward of dense Llama-shaped models as a short loop over their own, fused weights.

transformers spends more time between the matrix products of a small model than in them. Here a layer is four
products and about fifteen small operators, one more joins the taps, and the head runs only for the rows that
need logits. Results equal the universal path's up to rounding; models of any other shape are declined with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftwood.attention import attend_invariantly, attend_slots
from draftwood.cache import KVCache
from draftwood.decoder import Layer, Shape, Sight, norm
from draftwood.errors import BadModel
from draftwood.native.forward import Ends, Native, bind
from draftwood.native.records import Parts
from draftwood.packing import fuse, fuse_packed, pack_linears
from draftwood.plan import Plan, Verified, taps_of
from draftwood.rotary import STATIC, Rotary
from draftwood.uniform import UniformLinear

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Layer, rotated q [N, H, D], rotated k [N, G, D], v [N, G, D] -> [N, H * D]; also stores keys and values
AttendLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def declines(model: PreTrainedModel) -> str | None:
    """Why `model` cannot take the lean path; None if it can."""
    config = model.config
    kind = type(model)
    if kind.__name__ not in ARCHITECTURES or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is none of {', '.join(ARCHITECTURES)}"
    if (model.tp_size or 1) > 1:
        return f"its weights are divided among {model.tp_size} processes"
    if config.hidden_act not in ("silu", "swish"):
        return f"its MLP uses {config.hidden_act}, not SwiGLU"
    if model.model.rotary_emb.rope_type not in STATIC:
        return f"its rotary frequencies ({model.model.rotary_emb.rope_type}) depend on the length"
    for name, module in model.model.layers.named_modules():
        if name.endswith(PROJECTIONS) and type(module) is not nn.Linear:
            return f"its layer {name} is {type(module).__name__}, not a plain linear one"
    return None


class Lean:
    """A functional forward over the weights of `model`, which stays usable as it is."""

    name = "lean"

    def __init__(self, model: PreTrainedModel, pack: bool = False, invariant: bool = False) -> None:
        """`pack` lays the weights out for a CPU, projections of one input together: for models that nobody else uses.

        With `invariant` a token gets the same bits on a GPU, too, whatever is verified beside it. On a CPU it always
        does.
        """
        self.model, self._packed, self.invariant = model, pack, invariant
        config, decoder = model.config, model.model
        self.shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            decoder.layers[0].self_attn.head_dim,
            config.rms_norm_eps,
        )
        self.scale = decoder.layers[0].self_attn.scaling
        self.windows = [window(model, i) for i in range(len(decoder.layers))]
        self.tap(())
        self._collect_anew()

    def _collect_anew(self) -> None:
        decoder = self.model.model
        self.rotary = Rotary(decoder.rotary_emb, decoder.norm.weight)
        self._layers = [self._layer(block) for block in decoder.layers]
        if self._packed:
            pack_linears(self.model)
        sights = [Sight(window, causal=True) for window in self.windows]
        ends = Ends(decoder.embed_tokens.weight, 1.0, self.rotary, decoder.norm.weight, self.model.lm_head)
        self.native = bind(self.shape, self.scale, self._layers, sights, ends)
        self._nothing = decoder.norm.weight.new_empty(self.shape.kv_heads, 0, self.shape.head_dim)  # keys or values
        self._uniform = [uniform(layer) for layer in self._layers] if self.invariant else self._layers
        self._held = self._weights()

    def _weights(self) -> list[tuple[str, int]]:
        """Names and addresses of the model's weights."""
        return [(name, weight.data_ptr()) for name, weight in self.model.named_parameters()]

    def _layer(self, block: Any) -> Layer:
        fused = fuse_packed if self._packed else fuse
        qkv = fused(block.self_attn, ("q_proj", "k_proj", "v_proj"))
        gate_up = fused(block.mlp, ("gate_proj", "up_proj"))
        if self._packed:
            pack_linears(block)
        return Layer(
            input_norm=block.input_layernorm.weight,
            qkv=qkv,
            qk_norm=self._qk_norm(block.self_attn),
            output=block.self_attn.o_proj,
            post_norm=block.post_attention_layernorm.weight,
            gate_up=gate_up,
            down=block.mlp.down_proj,
        )

    def _qk_norm(self, attention: Any) -> Tensor | None:
        """`[H + G, D]`, a row for each head (Qwen3): a copy, which does not change when the model's owner trains."""
        if "q_norm" not in attention._modules:
            return None
        query, key = attention.q_norm.weight, attention.k_norm.weight
        return torch.cat([query.expand(self.shape.heads, -1), key.expand(self.shape.kv_heads, -1)]).detach()

    @property
    def kind(self) -> str:
        """The kind of forward that measured times belong to."""
        return f"lean, compiled operators {self.native.built.version}" if isinstance(self.native, Native) else "lean"

    @property
    def launches_per_layer(self) -> int:
        """For the latency prior only."""
        return self.native.calls_per_layer if isinstance(self.native, Native) else 20

    def tap(self, layers: Sequence[int]) -> None:
        """Collect the outputs of these decoder layers from now on."""
        self._tapped = tuple(layers)  # a layer may be asked for twice
        self._taps = tuple(dict.fromkeys(layers))

    def attach(self) -> None:
        """Catch up with the model's weights, which its owner may have moved or replaced; nothing of it is exchanged."""
        if self._packed:
            return
        reason = declines(self.model)
        if reason is not None:
            raise BadModel(f"The model has changed since it was taken over: {reason}. Take it over anew.")
        if self._weights() != self._held:
            return self._collect_anew()
        for block, layer in zip(self.model.model.layers, self._layers, strict=True):
            if (norm := self._qk_norm(block.self_attn)) is not None and layer.qk_norm is not None:
                with torch.inference_mode():  # in place, where captured graphs and compiled operators read it
                    layer.qk_norm.copy_(norm)

    def release(self) -> None:
        """Nothing of the model was exchanged."""

    def verify(self, plan: Plan, cache: KVCache) -> Verified:
        """One forward over the plan's tokens, their keys and values into `cache`."""
        if isinstance(self.native, Native):  # outside of PyTorch's inference mode, which takes a while to enter
            return self._verify_natively(self.native, plan, cache)
        return self._verify(plan, cache)

    @torch.inference_mode()
    def _verify(self, plan: Plan, cache: KVCache) -> Verified:
        self.rotary.reserve(max(part.context + part.size for part in plan.segments))
        plan = replace(plan, alone=self.invariant)
        return self.forward(plan.tokens, plan.positions, partial(self._attend, plan, cache), plan.wanted)

    def forward(self, tokens: Tensor, positions: Tensor, attend: AttendLayer, wanted: Tensor | None = None) -> Verified:
        """Taps of `tokens` [N] at `positions` [N], logits of the `wanted` ones; nothing in here waits for a device."""
        x = F.embedding(tokens, self.model.model.embed_tokens.weight)
        cos, sin = self.rotary.at(positions)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self._uniform):
            x = layer.run(x, cos, sin, self.shape, partial(attend, i))
            if i in self._taps:
                tapped[i] = x
        taps = torch.cat([tapped[layer] for layer in self._taps], 1) if tapped else None  # in one launch
        x = norm(x if wanted is None else x[wanted], self.model.model.norm.weight, self.shape.norm_eps)
        head = UniformLinear(self.model.lm_head) if self.invariant else self.model.lm_head
        return Verified(head(x), taps_of(self._tapped, self._taps, taps))

    def _verify_natively(self, native: Native, plan: Plan, cache: KVCache) -> Verified:
        """`forward` by compiled operators."""
        rows = [cache.rows[part.row] for part in plan.segments]
        parts = Parts(plan.segments, [row.capacity for row in rows], [row.addresses(self._nothing) for row in rows])
        found = native.run(plan.ids, plan.places, parts, self._taps, plan.wanted)
        if self._tapped == self._taps:
            return found
        return replace(found, taps=taps_of(self._tapped, self._taps, found.taps))

    @property
    def exact_cache(self) -> bool:
        """On a CPU attention gives a token the same bits whatever is verified beside it, which takes an exact cache."""
        return self.model.device.type == "cpu" and not isinstance(self.native, Native)

    def _attend(self, plan: Plan, cache: KVCache, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
        if cache.exact:
            return attend_invariantly(q, keys, values, plan, self.scale, self.windows[layer])
        seen = attend_slots(q.transpose(0, 1), keys, values, plan, self.scale, self.windows[layer])
        return seen.flatten(1)


def uniform(layer: Layer) -> Layer:
    """The same layer with products of a fixed number of rows."""
    return replace(
        layer,
        qkv=UniformLinear(layer.qkv),
        output=UniformLinear(layer.output),
        gate_up=UniformLinear(layer.gate_up),
        down=UniformLinear(layer.down),
    )


def window(model: PreTrainedModel, layer: int) -> int | None:
    """How many positions a layer looks back, itself included; None for all.

    Each layer of Qwen has its own window, all layers of Mistral have the config's, and Llama has none, whatever its
    config says.
    """
    attention = model.model.layers[layer].self_attn
    size: int | None = getattr(attention, "sliding_window", None)
    return model.config.sliding_window if type(model).__name__ == "MistralForCausalLM" else size
