"""Many texts at once, one token each per forward: the target's plain decoding for throughput.

Keys and values lie in pages of 64 slots that belong to one text each. One product takes the scores of all
pages, one their values, and a text's pages meet in its softmax: the cache is read once, without padding and
without a loop over texts. Compiled operators do that without pages, and targets that the lean path declines go through
their own modules, text by text. On a GPU, where starting a thousand kernels takes longer than they do, each row has
room of its own and all of them step in one captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.device.graphs import Graphs
from draftwood.lean import Lean
from draftwood.native.forward import Native
from draftwood.target import Target
from draftwood.train.padded import Padded
from draftwood.tree import Ints, Tree, chain_tree, root_only

PAGE = 64  # slots
CHUNK = 512  # tokens of prompts that run at once
GPU_CHUNK = 16384  # the same on a GPU, where few tokens take as long as many
BUCKET = 128  # slots: a captured step reads the next multiple of the longest row's


class Rows(Protocol):
    """Texts being written, each in a row of its own."""

    @property
    def chunk(self) -> int:
        """Tokens of prompts that are best read at once."""
        ...

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin a text in each of these free rows: logits `[len(rows), V]` behind their prompts."""
        ...

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Append one token to each of these rows: logits `[len(rows), V]` behind them."""
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


def read_prompts(
    path: Lean, prompts: Sequence[Sequence[int]], device: torch.device, keep: Callable[[int, Tensor, Tensor], None]
) -> Tensor:
    """Logits `[len(prompts), V]` behind prompts that run side by side; `keep` is told each layer's keys and values.

    Only here are texts padded, and behind their ends, where none of them looks.
    """
    sizes = [len(prompt) for prompt in prompts]
    padded = Padded.of(sizes, device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep(layer, k, v)
        return padded.attend(q, k, v, path.scale, path.windows[layer])

    tokens = torch.tensor(list(chain.from_iterable(prompts)), device=device)
    wanted = torch.from_numpy(np.cumsum(sizes) - 1).to(device)
    return path.forward(tokens, padded.steps, attend, wanted).logits


class PlainRows:
    """Any target: one flattened forward, attention text by text. With compiled operators the fastest way."""

    @property
    def chunk(self) -> int:
        return CHUNK

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        self._target, self._cache = target, target.new_cache(capacity, rows)

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        ends = [(len(prompt) - 1) // CHUNK * CHUNK for prompt in prompts]  # where the last chunks begin
        for row, prompt, end in zip(rows, prompts, ends, strict=True):
            for at in range(0, end, CHUNK):
                self._target.prefill(prompt[at : at + CHUNK], self._cache, row)
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

    @property
    def chunk(self) -> int:
        return CHUNK

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
        sizes = np.array([len(prompt) for prompt in prompts])
        for row, size in zip(rows, sizes, strict=True):
            while len(self._pages[row]) * PAGE < size:
                self._add_page(row)
        self._lengths[list(rows)] = sizes
        device = self._keys.device
        owners = np.concatenate([np.repeat(self._pages[row], PAGE)[:n] for row, n in zip(rows, sizes, strict=True)])
        pages, slots = (torch.from_numpy(places).to(device) for places in (owners, _steps(sizes) % PAGE))

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            self._keys[layer][pages, :, slots], self._values[layer][pages, :, slots] = k, v

        return read_prompts(self._path, prompts, device, keep)

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
        """For the pages up to the last one used: place of the owner in `rows` (a place behind them for others'),
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


class CapturedRows:
    """Targets on the lean path, on a GPU: every row has `capacity` slots, and all rows step at once, used or not."""

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

    @property
    def chunk(self) -> int:
        return GPU_CHUNK

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        sizes = np.array([len(prompt) for prompt in prompts])
        self._lengths[list(rows)] = sizes
        device = self._kv.device
        row, slots = (torch.from_numpy(places).to(device) for places in (np.repeat(rows, sizes), _steps(sizes)))

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            keys, values = self._kv[layer]
            keys[row, :, slots], values[row, :, slots] = k, v

        return read_prompts(self._path, prompts, device, keep)

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        given = np.zeros_like(self._lengths)
        given[list(rows)] = tokens
        self._inputs.copy_(torch.from_numpy(np.stack([given, self._lengths])))
        used = (int(self._lengths.max()) // BUCKET + 1) * BUCKET
        stage = partial(self._step, used)
        self._graphs.prepare(used, stage, ())
        self._graphs.run(used, stage)
        self._lengths[list(rows)] += 1
        return self._logits[list(rows)]

    def free(self, row: int) -> None:
        self._lengths[row] = 0

    @torch.inference_mode()
    def _step(self, used: int) -> None:
        """What is captured: nothing in here waits for the device."""
        tokens, places = self._inputs
        slots = torch.arange(used, device=places.device)
        masks = {}
        for window in set(self._path.windows):
            ago = places[:, None] - slots
            seen = (ago >= 0) & (ago < (used if window is None else window))
            masks[window] = torch.zeros(seen.shape, dtype=self._kv.dtype, device=seen.device)
            masks[window] = masks[window].masked_fill_(~seen, -torch.inf)[:, None, None]
        self._logits.copy_(self._path.forward(tokens, places, partial(self._attend, used, masks, places)).logits)

    def _attend(
        self,
        used: int,
        masks: dict[int | None, Tensor],
        places: Tensor,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """`[B, H * D]`: heads that share a key head are queries side by side."""
        keys, values = self._kv[layer]
        keys[self._each, :, places], values[self._each, :, places] = k, v
        queries = q.unflatten(1, (keys.shape[1], -1))  # [B, G, R, D]
        mask = masks[self._path.windows[layer]].expand(*queries.shape[:3], used)
        seen = keys[:, :, :used], values[:, :, :used]
        return F.scaled_dot_product_attention(queries, *seen, mask, scale=self._path.scale).flatten(1)


def _steps(sizes: Ints) -> Ints:
    """Of texts that lie one behind the other: the place of each token in its own."""
    return np.concatenate([np.arange(size) for size in sizes])
