"""DFlash on static buffers: the same pass as `dflash.py`, with the length of the context on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from draftwood.cache import finite
from draftwood.decoder import Sight
from draftwood.device.ancestors import bitmask
from draftwood.device.view import View
from draftwood.drafters.base import Candidates
from draftwood.drafters.dflash_config import DFlashConfig
from draftwood.drafters.dflash_weights import Weights, context_kv
from draftwood.noise import Ahead
from draftwood.rotary import Rotary


class StaticDFlash:
    """One request's context keys and values, and the block that follows them."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Weights,
        rotary: Rotary,
        embed: Callable[[Tensor], Tensor],  # tokens to the first layer's inputs
        candidates: Callable[[Tensor, Tensor, int, Ahead | None], Candidates],  # of the last layer's outputs and a root
        max_depth: int,
        capacity: int,
        paired: int = 0,
    ) -> None:
        self.max_depth, self.paired = max_depth, paired
        self._config, self._weights, self._rotary = config, weights, rotary
        self._embed, self._candidates = embed, candidates
        slots = capacity + config.block_size
        rotary.reserve(slots)
        shape = config.num_layers, 2, config.num_kv_heads, slots, config.head_dim
        self._kv = weights.norm.new_zeros(shape)  # zeros: what is masked must be finite
        device = self._kv.device
        self._steps = torch.arange(config.block_size, device=device)
        self._masks = torch.full((config.block_size - 1,), config.mask_token_id, device=device)
        self._seen = {sight: block_sight(sight, config.block_size, device) for sight in set(config.sights)}

    def extend(self, taps: Tensor, start: Tensor) -> None:
        positions = start + torch.arange(len(taps), device=start.device)
        kv = torch.stack(context_kv(self._config, self._weights, taps, *self._rotary.at(positions)), 1)
        self._kv.index_copy_(3, positions, finite(kv))

    def draft(self, root: Tensor, context: Tensor, width: int, ahead: Ahead | None = None) -> Candidates:
        config = self._config
        x = self._embed(torch.cat([root, self._masks]))
        cos, sin = self._rotary.at(context + self._steps)
        form = self._kv.shape[3], self._kv.dtype
        views = {
            sight: View(context, self._steps, *seen, *form, ahead=not sight.causal)
            for sight, seen in self._seen.items()
        }
        for kv, layer, sight in zip(self._kv, self._weights.layers, config.sights, strict=True):
            attend = partial(views[sight].attend, kv, config.head_dim**-0.5, sight.window)
            x = layer.run(x, cos, sin, config.shape, attend)
        return self._candidates(x[config.first : config.first + self.max_depth], root, width, ahead)

    def nbytes(self) -> int:
        return self._kv.nbytes


def block_sight(sight: Sight, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tokens of its block each one sees, `[B, B]`, as bools and as bits."""
    ahead = torch.arange(size, device=device) - torch.arange(size, device=device)[:, None]
    seen = sight.covers(ahead)
    return seen, bitmask(seen)
