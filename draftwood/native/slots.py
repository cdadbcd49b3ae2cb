"""Moving slots of a KV cache on a CPU, all layers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwood.native.build import address, library, operators


def takes(states: Sequence[Tensor]) -> bool:
    """Whether the compiled operator serves these tensors `[H, S, d]`: it moves the same bytes in all of them."""
    like = states[0]
    alike = all(state.is_contiguous() and state.shape == like.shape for state in states)
    return like.device.type == "cpu" and operators().library is not None and alike


def addresses(states: Sequence[Tensor]) -> NDArray[np.int64]:
    """Where they begin."""
    return np.array([tensor.data_ptr() for tensor in states])


def move(begins: NDArray[np.int64], like: Tensor, source: Sequence[int], start: int) -> None:
    """Gather slots `source`, ascending and none before its new place, into the slots from `start` on, of all tensors
    that begin there and are `like` this one."""
    heads, slots, _ = like.shape
    sizes = (len(source), start, heads, slots, like.stride(1) * like.itemsize)
    where = address(begins), c_int64(begins.size), (c_int64 * len(source))(*source)
    library().move_slots(*where, *map(c_int64, sizes))
