"""The Triton kernel as a backend: what it takes, and how it reads a plan. Triton is imported when it is needed."""

from __future__ import annotations

import shutil
from functools import cache

import torch
from torch import Tensor

from draftwood.attention.args import AttentionArgs, Backend
from draftwood.errors import first_line

FORMATS = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
MOST_NODES = 1024  # partial results grow with nodes × splits, and no tree has more


def declines(args: AttentionArgs) -> str | None:
    query = args.query
    if not query.is_cuda:  # first, since on a CPU this is called in every layer
        return "it runs on CUDA devices only"
    size, nodes = query.shape[-1], query.shape[-2]
    if args.softcap is not None:
        return "it does not soft-cap scores"
    if args.sinks is not None:
        return "it knows no attention sinks"
    if query.dtype not in FORMATS:
        return f"it multiplies bfloat16 and float16, not {str(query.dtype).removeprefix('torch.')}"
    if size > WIDEST_HEAD or args.value.shape[-1] != size:
        return f"it takes heads of up to {WIDEST_HEAD}, keys as wide as values, not {size} and {args.value.shape[-1]}"
    if nodes > MOST_NODES and (not args.sight.alone or args.sight.lineage is None):
        return f"it takes up to {MOST_NODES} tokens at a time, not {nodes}"
    if any(part.stride(-1) != 1 for part in (query, args.key, args.value)):
        return "a head's numbers do not lie side by side"
    return missing(query.device)


@cache
def missing(device: torch.device) -> str | None:
    """What Triton lacks on this machine."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0, this device has {major}.{minor}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler, and neither gcc nor clang is installed"
    return _failure(device)


def _failure(device: torch.device) -> str | None:
    """Why not even a small kernel runs: Python's headers are missing, its cache cannot be written …"""
    from draftwood.attention.triton_rows import rows_attention

    try:
        query = torch.zeros(1, 1, 16, dtype=torch.bfloat16, device=device)
        keys = query.expand(1, 16, 16)[None].contiguous()
        rows_attention(query, keys, keys, torch.zeros(1, dtype=torch.int64, device=device), 1.0).sum().item()
    except Exception as error:  # whatever compilers and drivers raise
        return f"a first kernel failed ({first_line(error)})"
    return None


def attend(args: AttentionArgs) -> Tensor:
    from draftwood.attention.triton_alone import attention_alone
    from draftwood.attention.triton_tree import tree_attention

    kv_heads, groups, _, _ = args.query.shape
    query = args.query.flatten(0, 1).transpose(0, 1)
    sight = args.sight
    at, how = (query, args.key, args.value, sight.context), (args.scale, args.window)
    if sight.alone:
        lines = [None] if sight.lineage is None else sight.lineage.split(MOST_NODES)  # nodes are independent
        parts = zip(query.split(MOST_NODES), lines, sight.depths.split(MOST_NODES), strict=True)
        seen = [attention_alone(some, *at[1:], line, depths, *how) for some, line, depths in parts]
        out = seen[0] if len(seen) == 1 else torch.cat(seen)  # a copy is another launch
    else:
        out = tree_attention(*at, sight.ancestors, sight.depths, *how, ahead=args.plan.ahead)
    return out.transpose(0, 1).unflatten(0, (kv_heads, groups))


TRITON = Backend("triton", declines, attend)
