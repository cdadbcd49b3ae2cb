"""PyTorch's fused attention with the GQA groups folded into the query axis: keys are never repeated."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from draftwood.attention.args import AttentionArgs, Backend


def declines(args: AttentionArgs) -> str | None:
    if args.softcap is not None:
        return "the fused kernels do not soft-cap scores"
    if args.sinks is not None:
        return "the fused kernels know no attention sinks"
    return None


def sdpa(args: AttentionArgs) -> Tensor:
    heads, groups, size, _ = args.query.shape
    folded = args.query.reshape(1, heads, groups * size, -1)
    out = F.scaled_dot_product_attention(
        folded, args.key[None], args.value[None], attn_mask=args.mask, scale=args.scale
    )
    return out.view(heads, groups, size, -1)


SDPA = Backend("sdpa", declines, sdpa)
