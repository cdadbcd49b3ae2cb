"""Moving slots of a KV cache on a CPU, all layers in one call, and rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, memmove

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.native.build import address, library, operators


def takes(states: Sequence[Tensor]) -> bool:
    """Whether the compiled operator serves these tensors `[H, S, d]`: it moves the same bytes in all of them."""
    like = states[0]
    alike = all(state.is_contiguous() and state.shape == like.shape for state in states)
    return like.device.type == "cpu" and operators().library is not None and alike


def addresses(states: Sequence[Tensor]) -> NDArray[np.int64]:
    """The addresses at which they begin."""
    return np.array([tensor.data_ptr() for tensor in states])


def move(begins: NDArray[np.int64], like: Tensor, source: Sequence[int], start: int) -> None:
    """Gather slots `source`, ascending and none before its new place, into the slots from `start` on, in all tensors
    that begin at `begins`, which are `like` this one."""
    heads, slots, _ = like.shape
    sizes = (len(source), start, heads, slots, like.stride(1) * like.itemsize)
    where = address(begins), c_int64(begins.size), (c_int64 * len(source))(*source)
    library().move_slots(*where, *map(c_int64, sizes))


def picked(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Some ascending rows of a matrix; on a CPU copies of them."""
    if not _in_line(matrix):
        first, end = rows[0], rows[-1] + 1
        return matrix[first:end] if end - first == len(rows) else matrix[rows]
    found, size = matrix.new_empty(len(rows), matrix.shape[1]), matrix.shape[1] * matrix.itemsize
    begin, to = matrix.data_ptr(), found.data_ptr()
    for place, row in enumerate(rows):  # where caches are cold, PyTorch's indexing takes three times as long
        memmove(to + place * size, begin + row * size, size)
    return found


def put(rows: Tensor, matrix: Tensor, start: int) -> None:
    """Copy rows over those of a matrix from `start` on."""
    if _in_line(rows) and _in_line(matrix) and rows.dtype == matrix.dtype:
        memmove(matrix.data_ptr() + start * matrix.shape[1] * matrix.itemsize, rows.data_ptr(), rows.nbytes)
    else:
        with torch.inference_mode():
            matrix[start : start + len(rows)] = rows


def _in_line(matrix: Tensor) -> bool:
    return matrix.is_cpu and matrix.is_contiguous()
