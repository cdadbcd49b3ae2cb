"""Sequences of different lengths side by side: on a GPU launches cost more than what is wasted on padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftwood.lean import Lean
from draftwood.plan import Verified

MULTIPLE = 8  # the padded length is one of it: products of half-precision matrices are slower with other sizes
# Not cuDNN's attention, which is built anew for every shape: 50 ms each on an H200.
READY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Keep = Callable[[int, Tensor, Tensor], None]  # of a layer: its number, keys and values [flat, G, D]


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """N sequences that lie one after the other on a flat axis, and their places side by side."""

    places: Tensor  # [N, longest] on the flat axis; beyond a sequence's end its last one. A multiple of MULTIPLE
    inside: Tensor  # [flat] on the axis of all N * longest places

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Padded:
        ends = np.cumsum(sizes)[:, None]
        starts, span = ends - np.asarray(sizes)[:, None], np.arange(-(-max(sizes) // MULTIPLE) * MULTIPLE)
        places = np.clip(starts + span, 0, np.maximum(ends - 1, 0))
        inside = np.flatnonzero(starts + span < ends)
        return cls(torch.from_numpy(places).to(device), torch.from_numpy(inside).to(device))

    @property
    def steps(self) -> Tensor:
        """`[flat]` place of each in its own sequence."""
        return self.inside % self.places.shape[1]

    @property
    def ends(self) -> Tensor:
        """`[N]` place of each sequence's last one on the flat axis."""
        return self.places[:, -1]

    def spread(self, x: Tensor) -> Tensor:
        """`[flat, ...]` -> `[N, longest, ...]`"""
        return x.index_select(0, self.places.flatten()).unflatten(0, self.places.shape)

    def joined(self, x: Tensor) -> Tensor:
        """`[N, longest, ...]` -> `[flat, ...]`"""
        return x.flatten(0, 1).index_select(0, self.inside)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """`[flat, H * D]`: causal attention of each sequence to itself. Nothing sees beyond its end."""
        q, k, v = (self.spread(states).transpose(1, 2) for states in (q, k, v))
        size = q.shape[2]
        seen = None
        if window is not None and window < size:
            seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=True)
        return self.joined(out.transpose(1, 2)).flatten(1)

    def forward(
        self,
        path: Lean,
        texts: Sequence[Sequence[int]],
        wanted: Tensor | None = None,
        keep: Keep = lambda layer, k, v: None,
    ) -> Verified:
        """Run the target over texts of these sizes. `wanted` are the places whose logits are needed, as in `Lean`, and
        `keep` gets each layer's keys and values."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keep(layer, k, v)
            return self.attend(q, k, v, path.scale, path.windows[layer])

        tokens = torch.tensor(list(chain.from_iterable(texts)), device=self.inside.device)
        with sdpa_kernel(READY):
            return path.forward(tokens, self.steps, attend, wanted)
