"""Rotary position embeddings as a growing table: positions here are contiguous, so rows are sliced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding


class Rotary:
    """Cosines and signed sines of positions, in the model's dtype, computed in at least float32."""

    def __init__(
        self,
        rope: Mapping[str, Any],
        head_dim: int,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(rope))
        frequencies = Qwen3RotaryEmbedding(config)  # transformers knows linear, llama3 and yarn scaling
        self._inv_freq = frequencies.inv_freq.to(device, torch.promote_types(dtype, torch.float32))
        self._scaling = frequencies.attention_scaling
        self._dtype = dtype
        self._cos, self._sin = self._rows(0)

    def __call__(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions start..stop-1, each `[stop - start, 1, head_dim]`."""
        if stop > len(self._cos):
            self._cos, self._sin = self._rows(max(stop, 2 * len(self._cos)))
        return self._cos[start:stop], self._sin[start:stop]

    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(count, device=self._inv_freq.device)[:, None] * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        # The sign of rotate_half sits in the table, which leaves a plain roll for every round.
        tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return tables[0].to(self._dtype)[:, None], tables[1].to(self._dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[N, heads, D]` turned to the positions of `cos` and `sin`, `[N, 1, D]` each."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
