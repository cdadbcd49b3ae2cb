"""Candidates under the noise of draws to come, with static shapes: `foresight.py` for a lattice or a trellis."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.drafters.base import Candidates
from draftwood.noise import Ahead


def foreseen(draft: Candidates, ahead: Ahead) -> Candidates:
    """The draft, weighed by the noise of the draws at all its depths."""
    noise = ahead.over(draft.tokens)
    logp, order = weighed(draft.logp, noise).sort(dim=-1, descending=True, stable=True)
    tokens, pairs = draft.tokens.gather(1, order), draft.pairs
    if pairs is not None:
        pairs = weighed(pairs, noise[1:, None])
        pairs = pairs.gather(1, order[:-1, :, None].expand_as(pairs)).gather(2, order[1:, None].expand_as(pairs))
    return Candidates(tokens, logp, pairs)


def weighed(logp: Tensor, noise: Tensor) -> Tensor:
    """`trellis.weighed` of rows `[..., K]`, in float32."""
    logp = logp.double().nan_to_num(-torch.inf, 0.0, -torch.inf).clamp_max(0)
    sums = logp + noise
    rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp_min(0)
    total: Tensor = sums - (sums.exp().sum(-1, keepdim=True) + rest).log()
    return total.float()
