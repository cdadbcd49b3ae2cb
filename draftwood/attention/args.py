"""The record that every attention backend takes, and what a backend is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftwood.plan import Sight, Visibility


@dataclass(frozen=True, slots=True, eq=False)
class AttentionArgs:
    """One request in one layer. G query heads share a key head: H = G * H_kv."""

    query: Tensor  # [H_kv, G, N, d]
    key: Tensor  # [H_kv, T, d], T = context + N
    value: Tensor  # [H_kv, T, d_v]
    scale: float
    window: int | None  # how many positions a token looks back, itself included; None: all
    softcap: float | None  # Gemma: scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None  # [H] GPT-OSS: a logit that takes probability and gives no value
    plan: Visibility
    segment: int  # of the plan

    @property
    def mask(self) -> Tensor | None:
        """`[G * N, T]` additive; None: every query sees every key. Built at most once a round."""
        return self.plan.mask(self.segment, self.window, self.query.shape[1])

    @property
    def sight(self) -> Sight:
        """The same as bits on the device, for kernels that need no mask. Built at most once a round."""
        return self.plan.sight(self.segment)


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention."""

    name: str
    declines: Callable[[AttentionArgs], str | None]  # why it does not take these; None: it does
    run: Callable[[AttentionArgs], Tensor]  # [H_kv, G, N, d_v]
