"""What a DFlash drafter keeps of one request."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from draftwood.native.slots import put
from draftwood.tree import Ints

PENDING = 256  # context tokens whose projection may wait: rounds that do not draft then cost a small copy each


class DFlashState:
    """One request's context: projected keys and values by position, and taps that wait for projection."""

    def __init__(self, kv: Tensor, pending: Tensor) -> None:
        self._take(kv)
        self.pending = pending  # [at most PENDING, taps * hidden]
        self.projected = 0
        self.waiting = 0

    def __len__(self) -> int:
        return self.projected + self.waiting

    def __deepcopy__(self, memo: object) -> DFlashState:
        """Without spare room: a copy keeps a prefix, and gets room when a text continues from it."""
        state = DFlashState(self.kv[:, :, :, : self.projected].clone(), self.pending[: self.waiting].clone())
        state.projected, state.waiting = self.projected, self.waiting
        return state

    def wait(self, taps: Tensor) -> None:
        """Copy taps `[M, taps * hidden]`, whose buffers the target may reuse; at most PENDING may wait in all."""
        end = self.waiting + taps.shape[0]
        if end > len(self.pending):
            room = self.pending.new_empty(PENDING, self.pending.shape[1])
            room[: self.waiting] = self.pending[: self.waiting]
            self.pending = room
        put(taps, self.pending, self.waiting)
        self.waiting = end

    def reserve(self, slots: int) -> None:
        """Make room for `slots` tokens, at least doubling if there is none."""
        have = self.kv.shape[3]
        if slots > have:
            grown = self.kv.new_empty(*self.kv.shape[:3], max(slots, 2 * have), self.kv.shape[4])
            grown[:, :, :, : self.projected] = self.kv[:, :, :, : self.projected]
            self._take(grown)

    def _take(self, kv: Tensor) -> None:
        self.kv = kv  # [layers, 2, G, slots, D]; slots from `projected` on are free for a block
        layers, kinds = np.ogrid[: len(kv), :2]
        # [layers, 2]: where the keys and values of each layer begin.
        self.addresses: Ints = kv.data_ptr() + kv.itemsize * (layers * kv.stride(0) + kinds * kv.stride(1))
