"""What tokens see where only the device knows the length of the context: a plan with static shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from draftwood.attention.args import AttentionArgs
from draftwood.attention.dispatch import choose
from draftwood.cache import finite
from draftwood.plan import Sight


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """N tokens behind `context` slots: each sees the context that is in reach, and some of the N.

    Backends get all slots of a cache. A kernel that reads the context's length leaves out those behind the tokens; the
    others mask them, so they must hold finite numbers.
    """

    static: ClassVar[bool] = True

    context: Tensor  # [] int64
    depths: Tensor  # [N] int64: token i is at position context + depths[i], in slot context + i
    seen: Tensor  # [N, N] bool: row i is true at the tokens that token i sees
    bits: Tensor | None  # [N, words] int32: the same as bits; None: a chain, where token i sees tokens 0..i
    slots: int  # S
    dtype: torch.dtype
    ahead: bool = False
    lineage: Tensor | None = None  # [N, C] int64: a node must get the bits that plain decoding would give it
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    _sights: list[Sight] = field(default_factory=list)

    def attend(self, kv: Tensor, scale: float, window: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention's output [N, H * d] for `query` [N, H, d]. Keys and values first go into `kv` [2, H_kv, S, d]."""
        slots = self.context + torch.arange(len(query), device=query.device)
        kv.index_copy_(2, slots, finite(torch.stack([key.transpose(0, 1), value.transpose(0, 1)])))
        folded = query.unflatten(1, (kv.shape[1], -1)).permute(1, 2, 0, 3)
        args = AttentionArgs(folded, kv[0], kv[1], scale, window, None, None, self, 0)
        return choose(args).run(args).permute(2, 0, 1, 3).flatten(1)

    def mask(self, index: int, window: int | None, groups: int) -> Tensor:
        """Additive mask `[groups * N, S]`, made once; rows repeat for each folded query head."""
        key = window, groups
        if key not in self._masks:
            bias = torch.zeros(len(self.depths), self.slots, dtype=self.dtype, device=self.depths.device)
            self._masks[key] = bias.masked_fill_(~self._visible(window), -torch.inf).repeat(groups, 1)
        return self._masks[key]

    def sight(self, index: int) -> Sight:
        """The same for kernels that need no mask, made once."""
        if not self._sights:
            self._sights.append(
                Sight(self.context.int(), self.depths.int(), self.bits, self.lineage, self.lineage is not None)
            )
        return self._sights[0]

    def _visible(self, window: int | None) -> Tensor:
        slot = torch.arange(self.slots, device=self.context.device)
        token = (slot - self.context).clamp(0, len(self.depths) - 1)
        before, inside = slot < self.context, slot < self.context + len(self.depths)
        visible = before | (self.seen[:, token] & inside)
        if window is None:
            return visible
        position = torch.where(before, slot, self.context + self.depths[token])
        return visible & (self.context + self.depths[:, None] - position < window)
