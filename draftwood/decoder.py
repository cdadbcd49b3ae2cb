"""A decoder layer of the Llama shape in as few and large operations as possible: targets and drafters share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.convolution import Convolution
from draftwood.rotary import rotate

# Rotated queries [N, H, D], rotated keys [N, G, D] and values [N, G, D] of N tokens -> attention's output [N, H * D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Part = Callable[[Tensor], Tensor]  # of a layer: normed inputs [N, hidden] -> what is added to the stream


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layers of one model have in common."""

    heads: int  # H query heads
    kv_heads: int  # G heads of keys and values
    head_dim: int  # D
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys tokens see in a layer: those less than `window` positions away, and none ahead if causal."""

    window: int | None
    causal: bool

    def covers(self, ahead: Tensor) -> Tensor:
        """Whether a token sees the one that is `ahead` positions ahead of it, or behind where that is negative."""
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None:
            seen &= ahead.abs() < self.window
        if self.causal:
            seen &= ahead <= 0
        return seen


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one decoder layer, I wide inside the MLP."""

    input_norm: Tensor  # [hidden]
    qkv: nn.Module  # hidden -> (H + 2 G) * D
    qk_norm: Tensor | None  # [H + G, D]
    output: nn.Module  # H * D -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: nn.Module  # hidden -> 2 I
    down: nn.Module  # I -> hidden
    convolutions: tuple[Convolution, Convolution] | None = None  # around attention and MLP, of DFlash 2's drafters

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, shape: Shape, attend: Attend, size: int = 0) -> Tensor:
        """The layer's output `[N, hidden]` for `x` `[N, hidden]` at the positions of `cos` and `sin` `[N, 1, D]`.

        Convolutions mix tokens of blocks of `size`; 0: all are one block.
        """

        def attention(y: Tensor) -> Tensor:
            return self.output(attend(*self._project(y, cos, sin, shape)))

        x = x + self._part(0, attention, norm(x, self.input_norm, shape.norm_eps), size)
        return x + self._part(1, self._mlp, norm(x, self.post_norm, shape.norm_eps), size)

    def _part(self, which: int, part: Part, y: Tensor, size: int) -> Tensor:
        """What attention (0) or MLP (1) gives for `y`, with its convolutions around it if there are any."""
        return part(y) if self.convolutions is None else self.convolutions[which].around(part, y, size or len(y))

    def _mlp(self, y: Tensor) -> Tensor:
        gate, up = self.gate_up(y).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        rotated = shape.heads + shape.kv_heads
        qkv = self.qkv(x).unflatten(-1, (-1, shape.head_dim))
        qk = rotate(heads_norm(qkv[:, :rotated], self.qk_norm, shape.norm_eps), cos, sin)
        return qk[:, : shape.heads], qk[:, shape.heads :], qkv[:, rotated:]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    return F.rms_norm(x, weight.shape, weight, eps)


def heads_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last axis with a weight for each head, `[N, …, D]` by `[…, D]`; nothing without weights."""
    return x if weight is None else F.rms_norm(x, x.shape[-1:], None, eps) * weight
