"""What transformers calls in each layer: hands every request's part to the first backend that takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from draftwood.attention.args import AttentionArgs, Backend
from draftwood.attention.reference import reference
from draftwood.attention.sdpa import sdpa
from draftwood.errors import BadModel
from draftwood.plan import Plan

NAME = "draftwood"
BACKENDS: tuple[Backend, ...] = (sdpa, reference)  # the last one takes everything


def register() -> None:
    """Make `attn_implementation="draftwood"` known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, sum N, d]
    key: Tensor,  # [B, H_kv, S, d]: every slot of the cache
    value: Tensor,  # [B, H_kv, S, d_v]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    plan: Plan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Returns `[1, sum N, H, d_v]`."""
    if plan is None:  # nothing says what a token may see, and attending to everything would be silently wrong
        raise BadModel(
            f"{type(module).__name__} was run with draftwood's attention but without a plan: either the model does "
            "not hand keyword arguments to its attention, or it was called outside draftwood's engine."
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    seen = attend_slots(query[0], key, value, plan, scale, sliding_window, softcap, s_aux)
    return seen[None].contiguous(), None


def attend_slots(
    query: Tensor,  # [H, sum N, d]
    key: Tensor,  # [B, H_kv, S, d]: every slot of the cache
    value: Tensor,  # [B, H_kv, S, d_v]
    plan: Plan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the plan's tokens see in their slots: `[sum N, H, d_v]`."""
    groups = query.shape[0] // key.shape[1]
    parts = []
    for index, part in enumerate(plan.segments):
        extent = part.context + part.size
        args = AttentionArgs(
            query=query[:, part.start : part.stop].unflatten(0, (key.shape[1], groups)),
            key=key[part.row, :, :extent],
            value=value[part.row, :, :extent],
            mask=plan.mask(index, window, groups),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        parts.append(_first(args).flatten(0, 1).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _first(args: AttentionArgs) -> Tensor:
    for backend in BACKENDS:
        out = backend(args)
        if out is not None:
            return out
    raise AssertionError("the reference backend takes everything")
