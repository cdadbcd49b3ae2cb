"""Memory for weights in huge pages: with small pages a processor must look up an address for every 4 KB it reads."""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of such a page on most processors
CHUNK = 8 * HUGE  # bytes that the system is asked for at once: many weights are smaller than a page
LINE = 64  # bytes of a line of a cache; each tensor begins with one


class Pages:
    """Tensors one after the other. A chunk goes back to the system once all tensors in it are gone."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)  # what is left of the last chunk
        self._lock = threading.Lock()

    @torch.inference_mode(False)  # tensors may later be written outside of it, too
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU."""
        size = prod(shape) * dtype.itemsize
        with self._lock:
            if size > len(self._free):
                self._free = chunk(size)
            mine, self._free = self._free[:size], self._free[-(-size // LINE) * LINE :]
        return mine.view(dtype).view(shape)


@functools.cache
def pages() -> Pages:
    """The pages of this process."""
    return Pages()


def chunk(size: int) -> Tensor:
    """Bytes, at least `size`, that begin with a huge page where the system has such."""
    size = max(CHUNK, -(-size // HUGE) * HUGE)
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system may have none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE :][:size]
