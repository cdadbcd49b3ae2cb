"""What transformers calls in each layer: hands every request's part to the first backend that takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from draftwood.attention.args import AttentionArgs, Backend
from draftwood.attention.cascade import CASCADE
from draftwood.attention.reference import REFERENCE
from draftwood.attention.sdpa import SDPA
from draftwood.attention.triton_backend import TRITON
from draftwood.errors import BadModel
from draftwood.plan import Plan, make_plan
from draftwood.tree import root_only

NAME = "draftwood"
FAR = 2**62  # positions: a mask without a window
BACKENDS: tuple[Backend, ...] = (TRITON, CASCADE, SDPA, REFERENCE)  # the last one takes everything


def register() -> None:
    """Make `attn_implementation="draftwood"` known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, window_mask)


def window_mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor:
    """transformers' mask interface: how many positions back a mask reaches, FAR: all. The plan says the rest.

    The window is taken from the mask because transformers' own attention obeys the mask: some models give a window to
    the mask alone, others to the attention alone, where it has no effect.
    """
    return torch.tensor(FAR if local_size is None else local_size)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, sum N, d]
    key: Sequence[Tensor],  # [H_kv, S, d] of each segment: every slot of its row
    value: Sequence[Tensor],  # [H_kv, S, d_v]
    attention_mask: Tensor | None,  # see `window_mask`
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
    reach = sliding_window if attention_mask is None else int(attention_mask)
    window = None if reach == FAR else reach
    seen = attend_slots(query[0], key, value, plan, scale, window, softcap, s_aux)
    return seen[None].contiguous(), None


def attend_slots(
    query: Tensor,  # [H, sum N, d]
    key: Sequence[Tensor],  # [H_kv, S, d] of each segment: every slot of its row
    value: Sequence[Tensor],  # [H_kv, S, d_v]
    plan: Plan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the plan's tokens see in their slots: `[sum N, H, d_v]`."""
    heads = key[0].shape[0]
    groups = query.shape[0] // heads
    parts = []
    for index, part in enumerate(plan.segments):
        extent = part.context + part.size
        args = AttentionArgs(
            query=query[:, part.start : part.stop].unflatten(0, (heads, groups)),
            key=key[index][:, :extent],
            value=value[index][:, :extent],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            plan=plan,
            segment=index,
        )
        parts.append(choose(args).run(args).flatten(0, 1).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose(args: AttentionArgs) -> Backend:
    """The first backend that does not decline."""
    return next(backend for backend in BACKENDS if backend.declines(args) is None)


def explain(device: torch.device, dtype: torch.dtype, head: int, softcap: float | None = None) -> dict[str, str | None]:
    """Why each backend before the chosen one declines a model with heads of `head`; None for the chosen, last one."""
    plan = make_plan([root_only(0)], [0], dtype, device, [0])
    query = torch.zeros(1, 1, 1, head, dtype=dtype, device=device)
    args = AttentionArgs(query, query[0], query[0], 1.0, None, softcap, None, plan, 0)
    chosen = BACKENDS.index(choose(args))
    return {backend.name: backend.declines(args) for backend in BACKENDS[: chosen + 1]}
