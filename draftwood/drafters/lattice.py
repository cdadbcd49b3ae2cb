"""Logits to lattice: the K likeliest tokens of every depth with exact log-probabilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.native.candidates import likeliest, takes
from draftwood.noise import Ahead

CHUNK = 64  # tokens per first-stage maximum; 32 to 256 are within 2x of each other for K up to 64


def candidates(logits: Tensor, width: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and float32 log-probabilities `[D, min(width, V)]` of logits `[D, V]`, normalised over V in at least
    float32.

    With `ids` `[V]` the logits are of these tokens only, and so are the log-probabilities.
    """
    rows, logp = head_rows(logits, width, ids)
    return named(rows, ids), logp


def head_rows(
    logits: Tensor, width: int, ids: Tensor | None = None, ahead: Ahead | None = None
) -> tuple[Tensor, Tensor]:
    """The same, as rows of the head. With noise `ahead` those that it favours, even if they are otherwise unlikely."""
    width = min(width, logits.shape[-1])
    if takes(logits):
        return likeliest(logits, width, ids, ahead)
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    if ahead is None:
        values, rows = top_k(logp, width)
        return rows, values.float()
    tokens = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    _, rows = top_k(logp + ahead.favour(tokens), width)
    values, order = logp.gather(1, rows).sort(dim=-1, descending=True, stable=True)
    return rows.gather(1, order), values.float()


def named(rows: Tensor, ids: Tensor | None) -> Tensor:
    """The tokens of rows of a head over the tokens `ids` `[V]`, or over all."""
    if ids is None:
        return rows
    if rows.device.type == "cpu":  # for so few rows numpy's lookup takes a tenth of torch's time
        return torch.from_numpy(ids.numpy()[rows.numpy()])
    return ids[rows]


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` over the last axis of `[D, V]`, exact and sorted, in two stages.

    The k largest entries lie in the k chunks with the largest maxima (a chunk outside them has k maxima above
    all of its entries), so only k * CHUNK entries are sorted: several times faster than one topk over V.
    """
    rows, size = scores.shape
    if k * CHUNK >= size:
        values, indices = scores.topk(k)
        return values, indices
    whole = scores if size % CHUNK == 0 else F.pad(scores, (0, -size % CHUNK), value=-torch.inf)  # pad always copies
    chunks = whole.view(rows, -1, CHUNK)
    best = chunks.amax(-1).topk(k, sorted=False).indices  # [D, k]
    candidates = chunks.gather(1, best[..., None].expand(-1, -1, CHUNK)).view(rows, -1)
    values, places = candidates.topk(k)
    return values, best.gather(1, places // CHUNK) * CHUNK + places % CHUNK
