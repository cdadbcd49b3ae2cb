"""The likeliest tokens of bf16 logits on a CPU, in one pass over them."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from draftwood.native.build import operators


def takes(logits: Tensor) -> bool:
    """Whether the compiled operators serve these logits `[N, V]`."""
    return logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and operators().library is not None


def choices(logits: Tensor) -> list[int]:
    """The place of the largest of each row, the first of equals."""
    logits = logits.contiguous()
    places = torch.empty(len(logits), dtype=torch.int64)
    addresses = [c_void_p(tensor.data_ptr()) for tensor in (logits, places)]
    operators().functions.choices(*addresses, *map(c_int64, logits.shape), torch.get_num_threads())
    return places.tolist()


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places and float32 log-probabilities `[N, k]` of the k largest of each row, the first of equals first."""
    logits = logits.contiguous()
    places = torch.empty(len(logits), k, dtype=torch.int64)
    logp = torch.empty(len(logits), k)
    addresses = [c_void_p(tensor.data_ptr()) for tensor in (logits, places, logp)]
    operators().functions.candidates(*addresses, *map(c_int64, (*logits.shape, k)), torch.get_num_threads())
    return places, logp
