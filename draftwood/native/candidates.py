"""The likeliest tokens of bf16 logits on a CPU, in one pass over them, and which follows which."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from draftwood.errors import BadModel
from draftwood.native.build import operators


def takes(logits: Tensor) -> bool:
    """Whether the compiled operators serve these logits `[N, V]`."""
    return logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and operators().library is not None


def choice(logits: Tensor, row: int) -> int:
    """The place of the largest of a row, the first of equals."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    first = logits.data_ptr() + row * logits.stride(0) * logits.itemsize
    place: int = operators().functions.choice(c_void_p(first), c_int64(logits.shape[1]))
    return place


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places and float32 log-probabilities `[N, k]` of the k largest of each row, the first of equals first."""
    logits = logits.contiguous()
    places = torch.empty(len(logits), k, dtype=torch.int64)
    logp = torch.empty(len(logits), k)
    addresses = [c_void_p(tensor.data_ptr()) for tensor in (logits, places, logp)]
    operators().functions.candidates(*addresses, *map(c_int64, (*logits.shape, k)), torch.get_num_threads())
    return places, logp


def pairs(rows: Tensor, logp: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """`Markov.pairs` of tables `[V, r]` in bf16."""
    depths, k = rows.shape
    out = torch.empty(max(depths - 1, 0), k, k)
    tensors = (rows.contiguous(), logp.contiguous(), before, after, out)
    sizes = map(c_int64, (depths, k, before.shape[1]))
    if operators().functions.pair_scores(*(c_void_p(tensor.data_ptr()) for tensor in tensors), *sizes):
        raise BadModel(f"{k} candidates of a depth found no memory for their scores.")
    return out
