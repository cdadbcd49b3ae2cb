"""Weights of linear layers laid out for CPUs, once, in the order in which products read them.

PyTorch hands oneDNN row-major weights, which oneDNN reorders at every call. For the few rows of a decoding step the
reordering costs as much as the product. oneDNN's own layout avoids that, but products of few rows read it at only half
of memory's speed. The compiled products (`native/products.py`) do better; they serve bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from draftwood.native.build import operators
from draftwood.native.products import Panels, takes

PACKABLE = (torch.bfloat16, torch.float32)
LEAST_ROWS = 4  # oneDNN's products of 1 to 3 rows take longer than those of 4
TRIALS, MOST_ROWS = 200_000, 4096  # outputs that `differs_alone` compares, and most rows of its weight


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@functools.cache
@torch.inference_mode()
def differs_alone(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether, on this machine, a product of one row sums in another order than one of several, for such a weight.

    The last bit of one output in some ten thousand then differs, which may decide a near-tie between two tokens some
    layers later. A single row must then be multiplied together with a second one.
    """
    like = torch.Generator().manual_seed(0)
    rows = min(rows, MOST_ROWS)
    packed = pack(torch.randn(rows, columns, generator=like).to(dtype))
    x = torch.randn(2 + TRIALS // rows, columns, generator=like).to(dtype)
    alone = torch.cat([product(row, packed, None) for row in x.split(1)])
    return not torch.equal(alone, product(x, packed, None))


class Blocks:
    """A weight `[out, in]` in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = pack(weight)
        self._pairs = differs_alone(*weight.shape, weight.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` of `x` [..., in]."""
        if self._pairs and x.shape[:-1].numel() == 1:
            return product(torch.cat([x, x]), self._packed, bias)[:1]
        return product(x, self._packed, bias)

    def dense(self) -> Tensor:
        """The weight again, as a copy."""
        return self._packed.to_dense()


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed; replaces the `nn.Linear` it was made from."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.layout = Panels(weight) if takes(weight) else Blocks(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layout.product(x, self.bias)

    def unpacked(self) -> Tensor:
        """The row-major weight `[out, in]` again, as a copy."""
        return self.layout.dense()


class PackedPart(nn.Module):
    """One of several linear layers that are packed as one. For the model's own forward: lean code runs the whole."""

    def __init__(self, whole: PackedLinear, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.start : self.stop]


def panels_of(layer: nn.Module) -> tuple[int, int] | None:
    """The addresses of a layer's weight and bias (0 if it has none) for the compiled products; None if other products
    serve it."""
    if isinstance(layer, PackedLinear) and isinstance(layer.layout, Panels):
        return layer.layout.address, 0 if layer.bias is None else layer.bias.data_ptr()
    return None


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
    """Whether there is a packed product for this weight on this machine."""
    if takes(weight):
        return True
    if weight.device.type != "cpu" or weight.dtype not in PACKABLE:
        return False
    return onednn_has_bf16() if weight.dtype == torch.bfloat16 else torch.backends.mkldnn.is_available()


def onednn_has_bf16() -> bool:
    """Whether this processor has products of bf16 matrices that oneDNN uses."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def kind(dtype: torch.dtype) -> str:
    """Which products of packed weights run here; measured times belong to one kind of them."""
    like = torch.empty(2, 2, dtype=dtype)
    if takes(like):
        return f"compiled products {operators().version}"
    return "oneDNN's products" if can_pack(like) else "plain products"


def pack_linears(model: nn.Module) -> None:
    """Replace every plain `nn.Linear` of `model` in place. A weight tied to an embedding stays there as well.

    All other parameters are copied out of the file that they may be mapped from, which can then leave memory.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        for p in model.parameters():
            p.data = p.data.clone()


def fuse(parent: nn.Module, names: Sequence[str]) -> nn.Linear:
    """Join linear layers of one input into one. The weights move into it; the layers themselves keep views of them."""
    parts = [parent.get_submodule(name) for name in names]
    whole = nn.Linear(1, 1, bias=False, device="meta")
    for kind in ("weight", "bias"):
        tensors: list[Tensor] = [getattr(part, kind) for part in parts]
        if tensors[0] is None:
            continue
        joined = torch.cat(tensors).detach()
        setattr(whole, kind, nn.Parameter(joined, requires_grad=False))
        for part, view in zip(parts, joined.split([len(t) for t in tensors]), strict=True):
            getattr(part, kind).data = view  # the same parameter: its owner may train it
    whole.out_features, whole.in_features = whole.weight.shape
    return whole


def fuse_packed(parent: nn.Module, names: Sequence[str]) -> nn.Module:
    """The same, packed where that is possible. The layers of `parent` are then replaced by parts of it."""
    widths: list[int] = [getattr(parent, name).out_features for name in names]
    whole = fuse(parent, names)
    if not can_pack(whole.weight):
        return whole
    packed = PackedLinear(whole.weight, whole.bias)
    for name, stop, width in zip(names, accumulate(widths), widths, strict=True):
        setattr(parent, name, PackedPart(packed, stop - width, stop))
    return packed
