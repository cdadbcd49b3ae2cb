"""Products with bf16 weights on a CPU: a weight in panels, in the order in which `products.c` reads it."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from draftwood.cores import threads
from draftwood.errors import BadModel
from draftwood.native.build import in_panels, library, operators


def takes(weight: Tensor) -> bool:
    """Whether the compiled products serve this weight `[out, in]`."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.shape[-1] % 2:
        return False
    built = operators()
    return built.library is not None and bool(built.functions.has_products())


class Panels:
    """A weight `[out, in]` in panels."""

    def __init__(self, weight: Tensor) -> None:
        self._width, self._depth = weight.shape
        self._panels = in_panels(weight, library().panel_width())

    @property
    def address(self) -> int:
        return self._panels.data_ptr()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` of `x` [..., in]."""
        x = x.contiguous()
        rows, out = x.numel() // self._depth, x.new_empty(*x.shape[:-1], self._width)
        parts = (x, self._panels, bias, out)
        addresses = [c_void_p(None if part is None else part.data_ptr()) for part in parts]
        sizes = map(c_int64, (rows, self._depth, self._width))
        if library().multiply(*addresses, *sizes, threads()):
            raise BadModel(f"A product of {rows} rows does not fit in memory.")
        return out

    def dense(self) -> Tensor:
        """The weight again, as a copy."""
        return self._panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self._width].contiguous()
