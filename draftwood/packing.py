"""Weights of linear layers in oneDNN's blocked layout, for CPUs: the same products about twice as fast.

PyTorch hands oneDNN row-major weights, which it reorders at every call. For the few rows of a decoding step the
reordering costs as much as the product. Packed once, the results are the same numbers (bit for bit in bf16).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACKABLE = (torch.bfloat16, torch.float32)


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed; replaces the `nn.Linear` it was made from."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """The fastest linear layer for this weight `[out, in]` here: packed where that is possible."""
    if can_pack(weight):
        return PackedLinear(weight, bias)
    layer = nn.Linear(1, 1, bias=bias is not None, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed product for this weight on this machine."""
    if weight.device.type != "cpu" or weight.dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(model: nn.Module) -> None:
    """Replace every plain `nn.Linear` of `model` in place. A weight tied to an embedding stays there as well."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
