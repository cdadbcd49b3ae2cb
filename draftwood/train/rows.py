"""Many texts at once, one token each per forward: the target's plain decoding for throughput.

Keys and values lie in pages of 64 slots that belong to one text each. One product computes the scores of all
pages, another one sums their values, and a text's pages are merged in its softmax: the cache is read once, without
padding and without a loop over texts. Compiled operators do that without pages, and targets that the lean path declines
go through their own modules, text by text. On a GPU rows are captured (`captured_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftwood.cache import Row
from draftwood.lean import Lean
from draftwood.native.forward import Native
from draftwood.native.pages import pages
from draftwood.target import Target
from draftwood.train.captured_rows import CapturedRows
from draftwood.train.padded import Padded
from draftwood.tree import Tree, chain_tree, root_only

PAGE = 64  # slots
CHUNK = 512  # tokens of prompts that run at once


class Rows(Protocol):
    """Texts being written, each in a row of its own."""

    chunk: int  # tokens of prompts that are best read at once

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin a text in each of these free rows: logits `[len(rows), V]` after their prompts."""
        ...

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Append one token to each of these rows: logits `[len(rows), V]` after them."""
        ...

    def free(self, row: int) -> None:
        """Forget a row's text."""
        ...


def open_rows(target: Target, rows: int, capacity: int) -> Rows:
    """Room for `rows` texts of at most `capacity` tokens, in the fastest way that the target allows."""
    target.tap(())
    path = target.path
    if not isinstance(path, Lean) or isinstance(path.native, Native):
        return PlainRows(target, rows, capacity)
    return (CapturedRows if target.device.type == "cuda" else PagedRows)(target, rows, capacity)


class PlainRows:
    """Any target: one flattened forward, attention text by text. With compiled operators the fastest way."""

    chunk = CHUNK

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        self._target, self._cache = target, target.new_cache(capacity, rows)
        if isinstance(target.path, Lean) and isinstance(target.path.native, Native):  # huge pages are read faster
            shape = target.path.shape
            size = (target.num_layers, 2, shape.kv_heads, capacity, shape.head_dim)
            self._cache.rows = [Row.over(pages().empty(size, target.dtype)) for _ in range(rows)]

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        ends = [(len(prompt) - 1) // self.chunk * self.chunk for prompt in prompts]  # where the last chunks begin
        for row, prompt, end in zip(rows, prompts, ends, strict=True):
            for at in range(0, end, self.chunk):
                self._target.prefill(prompt[at : at + self.chunk], self._cache, row)
        return self._append(rows, [chain_tree(prompt[end:]) for prompt, end in zip(prompts, ends, strict=True)])

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        return self._append(rows, [root_only(token) for token in tokens])

    def _append(self, rows: Sequence[int], chains: Sequence[Tree]) -> Tensor:
        plan = self._target.plan(chains, self._cache, rows, [True] * len(rows))
        logits = self._target.verify(plan, self._cache).logits
        for row, part in zip(rows, chains, strict=True):
            self._cache.advance(row, len(part.tokens))
        return logits

    def free(self, row: int) -> None:
        self._cache.rewind(row, 0)


class PagedRows:
    """Targets on the lean path: all texts in two products a layer."""

    chunk = CHUNK

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        assert isinstance(target.path, Lean)
        self._path = target.path
        shape = target.path.shape
        per_row = -(-capacity // PAGE)
        size = (target.num_layers, rows * per_row, shape.kv_heads, PAGE, shape.head_dim)
        # Zeros, not garbage: a slot that holds nothing is multiplied by 0, and 0 times NaN would be NaN.
        self._keys, self._values = (torch.zeros(size, dtype=target.dtype, device=target.device) for _ in range(2))
        self._path.rotary.reserve(capacity)
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self._lengths = np.zeros(rows, np.int64)
        self._owner = np.full(rows * per_row, -1)  # row of each page
        self._first = np.zeros(rows * per_row, np.int64)  # place in its text of each page's first slot

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        sizes, device = [len(prompt) for prompt in prompts], self._keys.device
        for row, size in zip(rows, sizes, strict=True):
            while len(self._pages[row]) * PAGE < size:
                self._add_page(row)
        self._lengths[list(rows)] = sizes
        owners = np.concatenate([np.repeat(self._pages[row], PAGE)[:n] for row, n in zip(rows, sizes, strict=True)])
        padded = Padded.of(sizes, device)
        pages, slots = torch.from_numpy(owners).to(device), padded.steps % PAGE

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            self._keys[layer][pages, :, slots], self._values[layer][pages, :, slots] = k, v

        return padded.forward(self._path, prompts, padded.ends, keep).logits

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        for row in rows:
            if self._lengths[row] == len(self._pages[row]) * PAGE:
                self._add_page(row)
        device = self._keys.device
        lengths = self._lengths[list(rows)]
        places = torch.from_numpy(lengths).to(device)
        pages = torch.tensor([self._pages[r][n // PAGE] for r, n in zip(rows, lengths, strict=True)], device=device)
        attend = partial(self._attend, *self._visible(rows), pages, places % PAGE)
        logits = self._path.forward(torch.tensor(list(tokens), device=device), places, attend).logits
        self._lengths[list(rows)] += 1
        return logits

    def free(self, row: int) -> None:
        self._owner[self._pages[row]] = -1
        self._pages[row], self._lengths[row] = [], 0

    def _add_page(self, row: int) -> None:
        """The first free page, so that those in use stay together."""
        page = int(np.flatnonzero(self._owner < 0)[0])
        self._owner[page], self._first[page] = row, len(self._pages[row]) * PAGE
        self._pages[row].append(page)

    def _visible(self, rows: Sequence[int]) -> tuple[Tensor, dict[int | None, Tensor]]:
        """For the pages up to the last one used: the owner's place in `rows` (one beyond them for pages of others),
        and additive masks `[pages, 1, 1, PAGE]` by window. The token that is about to be written is visible."""
        used = 1 + int(np.flatnonzero(self._owner >= 0)[-1])
        place = np.full(len(self._lengths) + 1, len(rows))
        place[list(rows)] = np.arange(len(rows))
        owner, device = self._owner[:used], self._keys.device
        newest = np.append(self._lengths, -1)[owner][:, None]
        slot = self._first[:used, None] + np.arange(PAGE)
        masks = {}
        for window in set(self._path.windows):
            seen = (slot <= newest) & (window is None or newest - slot < window)
            mask = torch.zeros(seen.shape, dtype=self._keys.dtype)
            # Finite: a page without a visible slot gets a mass of 0, not of NaN.
            mask.masked_fill_(torch.from_numpy(~seen), torch.finfo(mask.dtype).min / 2)
            masks[window] = mask[:, None, None].to(device)
        return torch.from_numpy(place[owner]).to(device), masks

    def _attend(
        self,
        owner: Tensor,
        masks: dict[int | None, Tensor],
        pages: Tensor,
        slots: Tensor,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """`[B, H * D]`. Each page has a softmax of its own; a text's pages are then weighed by their masses."""
        keys, values = self._keys[layer], self._values[layer]
        keys[pages, :, slots], values[pages, :, slots] = k, v
        rows, heads, used = len(q), keys.shape[1], len(owner)
        q = torch.cat([q * self._path.scale, q[:1]]).unflatten(1, (heads, -1))[owner]  # [pages, G, R, D]
        scores = torch.bmm(q.flatten(0, 1), keys[:used].flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], PAGE)
        scores += masks[self._path.windows[layer]]
        wide = torch.promote_types(scores.dtype, torch.float32)
        share = scores.softmax(-1, dtype=wide)  # within the page
        log_mass = scores.amax(-1).to(wide) - share.amax(-1).log()
        weighted = torch.bmm(share.to(values.dtype).flatten(0, 1), values[:used].flatten(0, 1)).view(q.shape)
        best = log_mass.new_full((rows + 1, *q.shape[1:3]), -torch.inf)
        best = best.scatter_reduce(0, owner[:, None, None].expand(log_mass.shape), log_mass, "amax")
        mass = (log_mass - best[owner]).exp()
        total = torch.zeros_like(best).index_add(0, owner, mass)
        summed = best.new_zeros(rows + 1, *q.shape[1:]).index_add(0, owner, weighted * mass[..., None])
        return (summed / total[..., None])[:rows].flatten(1).to(v.dtype)
