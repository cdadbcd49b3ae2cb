"""Rotary position embeddings as a growing table, whose rows are sliced or looked up in every round."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STATIC = ("default", "linear", "llama3", "yarn")  # kinds whose frequencies do not depend on the length
FIRST_ROWS = 1024


class Rotary:
    """Cosines and signed sines of positions, as a transformers rotary embedding makes them."""

    def __init__(self, embedding: nn.Module, like: Tensor) -> None:
        """`embedding(x, position_ids)` gives cosines and sines `[1, N, D]` in the dtype of `like`, a weight."""
        self._embedding, self._like = embedding, like
        self._cos, self._sin = self._rows(FIRST_ROWS)
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # captured graphs may read them; as large as one more table

    def reserve(self, count: int) -> tuple[Tensor, Tensor]:
        """Make rows for the positions 0 to `count` - 1."""
        if count > len(self._cos):
            self._outgrown.append((self._cos, self._sin))
            self._cos, self._sin = self._rows(max(count, 2 * len(self._cos)))
        return self._cos, self._sin

    def __call__(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions start..stop-1, each `[stop - start, 1, D]`."""
        self.reserve(stop)
        return self._cos[start:stop], self._sin[start:stop]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same for any `positions` `[N]`; `reserve` comes first, so that nothing waits for a device."""
        return self._cos[positions], self._sin[positions]

    @torch.inference_mode()
    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._embedding(self._like, torch.arange(count, device=self._like.device)[None])
        # The sign of rotate_half sits in the table, which leaves a plain roll for every round.
        sin = torch.cat([-sin[0, :, : sin.shape[-1] // 2], sin[0, :, sin.shape[-1] // 2 :]], -1)
        return cos[0, :, None], sin[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[N, heads, D]` turned to the positions of `cos` and `sin`, `[N, 1, D]` each."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
