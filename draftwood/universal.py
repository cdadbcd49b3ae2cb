"""The universal path: a model's own modules run, with draftwood's attention and cache and with the plan passed down.

Works for any transformers causal LM that lets its attention be exchanged and its cache be rewound. Tapped layers
are read by forward hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from draftwood import attention
from draftwood.cache import KVCache
from draftwood.errors import BadModel
from draftwood.packing import pack_linears
from draftwood.plan import Plan, Verified


class Taps:
    """Outputs of chosen decoder layers, collected by forward hooks (hidden_states[l + 1] of transformers)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._outputs: list[Tensor | None] = [None] * len(layers)
        self._handles: list[RemovableHandle] = [
            layer.register_forward_hook(self._hook(i)) for i, layer in enumerate(layers)
        ]

    def _hook(self, index: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[index] = output[0] if isinstance(output, tuple) else output

        return keep

    def take(self) -> Tensor | None:
        """`[sum N, layers * hidden]` of the last forward, and forget it."""
        outputs = [o for o in self._outputs if o is not None]
        self._outputs = [None] * len(self._outputs)
        return torch.cat([o[0] for o in outputs], dim=-1) if outputs else None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Universal:
    """The forward of `model` itself."""

    name = kind = "universal"
    launches_per_layer = 40  # of one eager decoder layer, for the latency prior only
    exact_cache = False

    def __init__(self, model: PreTrainedModel, name: str, pack: bool = False) -> None:
        """`pack` lays the weights out for a CPU: for models that nobody else uses."""
        if not getattr(model, "_supports_attention_backend", False):
            raise BadModel(
                f"{name} ({type(model).__name__}) does not let its attention be exchanged; draftwood needs a "
                "transformers model that supports attention backends."
            )
        attention.register()
        if pack:
            pack_linears(model)
        self.model = model
        self._usual_attention = model.config._attn_implementation
        self._layers: tuple[int, ...] = ()
        self._taps = Taps([])

    def tap(self, layers: Sequence[int]) -> None:
        """Collect the outputs of these decoder layers from now on."""
        self._taps.remove()
        self._layers = tuple(layers)
        self._taps = Taps([decoder_layers(self.model)[i] for i in layers])

    def attach(self) -> None:
        """Exchange the model's attention for ours and hook its tapped layers."""
        self.model.set_attn_implementation(attention.NAME)
        self.tap(self._layers)

    def release(self) -> None:
        """Give the model back in the state that its users know; `attach` takes it again."""
        self._taps.remove()
        self.model.set_attn_implementation(self._usual_attention)

    @torch.inference_mode()
    def verify(self, plan: Plan, cache: KVCache) -> Verified:
        """One forward over the plan's tokens."""
        out = self.model(
            input_ids=plan.tokens[None],
            position_ids=plan.positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=0 if plan.wanted is None else plan.wanted,
            plan=plan,
        )
        return Verified(out.logits[0], self._taps.take())


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers, whatever the family calls it."""
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else model.base_model
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise BadModel(f"No stack of {count} decoder layers was found in {type(model).__name__}; it cannot be tapped.")
