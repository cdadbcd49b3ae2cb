"""Many texts at once, one token each, in one captured graph: on a GPU, launching a thousand kernels takes longer.

Each row has room of its own, so that shapes never change. Triton's kernel reads each row to its own end, PyTorch's
attention reads all rows to the end of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.attention.triton_backend import FORMATS, WIDEST_HEAD, missing
from draftwood.device.graphs import Graphs
from draftwood.device.mail import sent
from draftwood.lean import Lean
from draftwood.target import Target
from draftwood.train.padded import Padded

BUCKET = 128  # slots: without Triton a step reads the next multiple of it after the longest row

See = Callable[[int | None, Tensor, Tensor, Tensor], Tensor]  # window, queries [B, H, D], keys, values -> [B, ..., D]


class CapturedRows:
    """Targets on the lean path, on a GPU: every row has `capacity` slots, and all rows step at once, used or not."""

    chunk = 16384  # tokens: on a GPU few take as long as many

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        assert isinstance(target.path, Lean)
        self._path, device = target.path, target.device
        shape, slots = target.path.shape, -(-capacity // BUCKET) * BUCKET
        size = (target.num_layers, 2, rows, shape.kv_heads, slots, shape.head_dim)
        # Zeros, not garbage: what a mask hides is multiplied by 0, and 0 times NaN would be NaN.
        self._kv = torch.zeros(size, dtype=target.dtype, device=device)
        self._path.rotary.reserve(slots)
        self._lengths = np.zeros(rows, np.int64)
        self._inputs = torch.zeros(2, rows, dtype=torch.int64, device=device)  # tokens, and their places
        self._logits = torch.zeros(rows, target.vocab_size, dtype=target.dtype, device=device)
        self._each = torch.arange(rows, device=device)
        self._graphs = Graphs(device)
        fits = target.dtype in FORMATS and shape.head_dim <= WIDEST_HEAD
        self._own = fits and device.type == "cuda" and missing(device) is None

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        sizes, device = [len(prompt) for prompt in prompts], self._kv.device
        self._lengths[list(rows)] = sizes
        padded = Padded.of(sizes, device)
        row, slots = torch.from_numpy(np.repeat(rows, sizes)).to(device), padded.steps

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            keys, values = self._kv[layer]
            keys[row, :, slots], values[row, :, slots] = k, v

        return padded.forward(self._path, prompts, padded.ends, keep).logits

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        given = np.zeros_like(self._lengths)
        given[list(rows)] = tokens
        self._inputs.copy_(sent(np.stack([given, self._lengths]), self._inputs.device))
        used = self._kv.shape[4] if self._own else (int(self._lengths.max()) // BUCKET + 1) * BUCKET
        stage = partial(self._step, used)
        self._graphs.prepare(used, stage, ())
        self._graphs.run(used, stage)
        self._lengths[list(rows)] += 1
        return self._logits[sent(rows, self._logits.device)]

    def free(self, row: int) -> None:
        self._lengths[row] = 0

    @torch.inference_mode()
    def _step(self, used: int) -> None:
        """What is captured: nothing in here waits for the device."""
        tokens, places = self._inputs
        attend = partial(self._attend, partial(self._see, places) if self._own else self._look(used, places), places)
        self._logits.copy_(self._path.forward(tokens, places, attend).logits)

    def _attend(self, see: See, places: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, H * D]`"""
        keys, values = self._kv[layer]
        keys[self._each, :, places], values[self._each, :, places] = k, v
        return see(self._path.windows[layer], q, keys, values).flatten(1)

    def _see(self, places: Tensor, window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        from draftwood.attention.triton_rows import rows_attention

        return rows_attention(q, keys, values, places, self._path.scale, window)

    def _look(self, used: int, places: Tensor) -> See:
        """The same by PyTorch: heads that share a key head are queries side by side."""
        slots = torch.arange(used, device=places.device)
        masks = {}
        for window in set(self._path.windows):
            ago = places[:, None] - slots
            seen = (ago >= 0) & (ago < (used if window is None else window))
            masks[window] = torch.zeros(seen.shape, dtype=self._kv.dtype, device=seen.device)
            masks[window] = masks[window].masked_fill_(~seen, -torch.inf)[:, None, None]

        def see(window: int | None, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries = q.unflatten(1, (keys.shape[1], -1))  # [B, G, R, D]
            mask = masks[window].expand(*queries.shape[:3], used)
            return F.scaled_dot_product_attention(
                queries, keys[:, :, :used], values[:, :, :used], mask, scale=self._path.scale
            )

        return see
