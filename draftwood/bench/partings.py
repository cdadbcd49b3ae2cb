"""Where a text parts from plain decoding's, and how near to a tie the target was there: was rounding the reason?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwood.rounds import PREFILL_CHUNK
from draftwood.target import Target


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place with different tokens; None if one text goes on where the other ends, or they are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


@torch.inference_mode()
def tie(target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> float | None:
    """How far the less likely of the two tokens at the parting is below the target's best one; None without a parting.

    In units in the last place of the largest logit, in the target's number format. If it is a few units, rounding made
    greedy texts part; if it is more, they do not part over the target's two best tokens.
    """
    at = parting(plain, other)
    if at is None:
        return None
    known = [*prompt, *plain[:at]]
    cache = target.new_cache(len(known))
    for start in range(0, len(known), PREFILL_CHUNK):
        logits = target.prefill(known[start : start + PREFILL_CHUNK], cache).logits
    last = logits[-1].double()
    unit = torch.finfo(target.dtype).eps * 2 ** last.abs().max().log2().floor()
    return float((last.max() - last[[plain[at], other[at]]].min()) / unit)
