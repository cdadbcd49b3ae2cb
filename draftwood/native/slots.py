"""Moving slots of a KV cache on a CPU, all layers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

from torch import Tensor

from draftwood.native.build import operators


def takes(states: Sequence[Tensor]) -> bool:
    """Whether the compiled operator serves these tensors `[H, S, d]` of equal shapes."""
    like = states[0]
    return like.device.type == "cpu" and operators().library is not None and all(s.is_contiguous() for s in states)


def move(states: Sequence[Tensor], source: Sequence[int], start: int) -> None:
    """Gather slots `source`, ascending and none before its new place, into the slots from `start` on."""
    heads, slots, _ = states[0].shape
    operators().functions.move_slots(
        (c_void_p * len(states))(*(tensor.data_ptr() for tensor in states)),
        c_int64(len(states)),
        (c_int64 * len(source))(*source),
        *map(c_int64, (len(source), start, heads, slots, states[0].stride(1) * states[0].itemsize)),
    )
