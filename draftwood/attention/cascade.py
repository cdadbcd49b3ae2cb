"""Attention in two parts, the context that all nodes share and the tree, merged by their log-sum-exp.

D²SD (arXiv 2606.04446, §3) calls it cascade attention. The shared part needs no mask, and the mask of the tree's part
is small. On a CPU that is the whole gain, so this backend takes only long contexts under wide trees.
Where Triton runs, its kernel splits the keys in the same way and comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.attention.args import AttentionArgs, Backend

LEAST_CONTEXT, LEAST_NODES = 4096, 32  # below these the mask costs no more than a second call: docs/log.md


def declines(args: AttentionArgs) -> str | None:
    nodes, keys = args.query.shape[2], args.key.shape[1]
    if args.query.device.type != "cpu":
        return "it is measured on CPUs only"
    if args.plan.static:
        return "the tree's keys must be the last ones"
    if args.softcap is not None or args.sinks is not None:
        return "the fused kernels know neither soft caps nor attention sinks"
    if args.window is not None and args.window < keys:
        return "with a window not all nodes see the same context"
    if args.key.shape[-1] != args.value.shape[-1]:
        return "keys and values differ in size"
    if nodes < LEAST_NODES or keys - nodes < LEAST_CONTEXT:
        return f"for fewer than {LEAST_NODES} nodes or {LEAST_CONTEXT} tokens of context a mask is as fast"
    return None


def cascade(args: AttentionArgs) -> Tensor:
    heads, groups, nodes, _ = args.query.shape
    folded = args.query.reshape(1, heads, groups * nodes, -1)
    context = args.key.shape[1] - nodes
    mask = None if args.mask is None else args.mask[:, context:].contiguous()
    shared, weight = _flash(folded, args.key[None, :, :context], args.value[None, :, :context], args.scale, None)
    own, other = _flash(folded, args.key[None, :, context:], args.value[None, :, context:], args.scale, mask)
    share = torch.sigmoid(weight - other).to(own.dtype)[..., None]  # the context's, of both sums of exponentials
    return torch.lerp(own, shared, share).view(heads, groups, nodes, -1)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its denominator, `[1, H_kv, M, d]` and `[1, H_kv, M]`."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen, weight = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return seen, weight


CASCADE = Backend("cascade", declines, cascade)
