"""DFlash 2's convolutions over the tokens of a block (z-lab/dflash, `GroupedDynamicCausalConv`).

A part of a layer, its attention or its MLP, sees a mixture of each token and the ones before it, and so do those who
read its output. With y the part's normed input, T taps, and channels in groups that share what is dynamic:

    mixed_t = sum_{o < T} (base_o + K_o y_t) * x_{t - o}

in front of the part with x = y, and behind it with the part's output as x and a second kernel of the same y. Tokens of
the context take no part, so what comes before a block's root counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """One part's two convolutions."""

    base: Tensor  # [2, taps, hidden]: in front of the part and behind it
    kernels: nn.Module  # hidden -> 2 * taps * groups

    def around(self, part: Callable[[Tensor], Tensor], y: Tensor, size: int) -> Tensor:
        """What the part gives for `y` `[R * size, hidden]`, blocks of `size` tokens, between both convolutions."""
        taps = self.base.shape[1]
        front, behind = self.kernels(y).unflatten(-1, (2, taps, -1)).unbind(1)
        return mixed(part(mixed(y, front, self.base[0], size)), behind, self.base[1], size)


def mixed(x: Tensor, dynamic: Tensor, base: Tensor, size: int) -> Tensor:
    """Each token of `x` `[R * size, hidden]` with those before it in its block; kernels are `dynamic`
    `[R * size, taps, groups]` and `base` `[taps, hidden]`."""
    taps, groups = dynamic.shape[1:]
    blocks = x.unflatten(0, (-1, size))
    kernel = base.unflatten(-1, (groups, -1)) + dynamic[..., None]  # [R * size, taps, groups, channels]
    shifted = (F.pad(blocks, (0, 0, tap, 0))[:, :size].reshape(x.shape) for tap in range(taps))
    parts = [kernel[:, tap] * row.unflatten(-1, (groups, -1)) for tap, row in enumerate(shifted)]
    total: Tensor = sum(parts[1:], parts[0])
    return total.flatten(1)
