"""Numbers sent between host and device, without one waiting for what the other does now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(values: Sequence[float] | NDArray[Any], device: torch.device) -> Tensor:
    """The same numbers on the device, without waiting for what it does now."""
    here = torch.tensor(values)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


class Post:
    """Rows of numbers on the device, filled from the host without either waiting for the other.

    They may be filled again only when the host knows that the device is done with the ones before.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.buffer = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host = torch.zeros_like(self.buffer, device="cpu", pin_memory=device.type == "cuda")
        self._rows = self._host.numpy()

    def fill(self, rows: Sequence[NDArray[Any]], rest: Sequence[int]) -> None:
        """Start the copy of `rows`, of any length up to the buffer's; what is behind each one's end becomes `rest`."""
        for to, row, padding in zip(self._rows, rows, rest, strict=True):
            to[: len(row)], to[len(row) :] = row, padding
        self.buffer.copy_(self._host, non_blocking=True)


class Mail:
    """A buffer on the device with a copy on the host, sent without either waiting for the other."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros_like(self.buffer, device="cpu", pin_memory=device.type == "cuda")
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def send(self) -> None:
        """Start the copy, behind what the current stream does now."""
        self._host.copy_(self.buffer, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def here(self) -> bool:
        """Whether what was sent last has arrived."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> None:
        """Wait until what was sent last is here."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def values(self) -> list[int]:
        """All of the copy, as soon as what was sent last is here."""
        self.wait()
        return self._host.tolist()

    def rows(self, part: Tensor) -> np.ndarray:
        """The same part of the copy on the host."""
        return self._host.as_strided(part.shape, part.stride(), part.storage_offset()).numpy()
