"""Attention by its formula: slow, serves everything, the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.attention.args import AttentionArgs, Backend


def reference(args: AttentionArgs) -> Tensor:
    """softmax(q k^T) v in fp32 or better, with soft-capping and sinks where the model has them."""
    heads, groups, size, _ = args.query.shape
    exact = torch.promote_types(args.query.dtype, torch.float32)
    query = args.query.reshape(heads, groups * size, -1).to(exact)
    scores = query @ args.key.to(exact).mT * args.scale
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    mask = args.mask
    if mask is not None:
        scores = scores + mask
    if args.sinks is not None:
        sink = args.sinks.to(exact).view(heads, groups, 1, 1).expand(-1, -1, size, -1)
        scores = torch.cat([scores, sink.reshape(heads, groups * size, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : args.key.shape[1]]
    out = weights @ args.value.to(exact)
    return out.view(heads, groups, size, -1).to(args.query.dtype)


REFERENCE = Backend("reference", lambda args: None, reference)
