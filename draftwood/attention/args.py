"""The one record that every attention backend takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionArgs:
    """One request in one layer. G query heads share a key head: H = G * H_kv."""

    query: Tensor  # [H_kv, G, N, d]
    key: Tensor  # [H_kv, T, d], T = context + N
    value: Tensor  # [H_kv, T, d_v]
    mask: Tensor | None  # [G * N, T] additive; None: every query sees every key
    scale: float
    softcap: float | None  # Gemma: scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None  # [H] GPT-OSS: a logit that takes probability and gives no value


# A backend returns [H_kv, G, N, d_v], or None to decline.
Backend = Callable[[AttentionArgs], Tensor | None]
