"""Products of a fixed number of rows, so that a row has the same bits whatever runs beside it.

Libraries choose the kernel of a matrix product, and with it the order of its sums, by the number of rows. A fixed
number has one kernel; in it a row's result does not depend on the others. Fewer rows are padded, more are cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 64  # on a GPU they take hardly longer than one


class UniformLinear(nn.Module):
    """`linear`, always run for `ROWS` rows at a time."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """`[N, in]` to `[N, out]`."""
        padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        return torch.cat([self.linear(rows) for rows in padded.split(ROWS)])[: len(x)]
