"""What is made of bf16 logits on a CPU: the likeliest tokens, which one follows which, and the target's own draws."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.accept import Verdict
from draftwood.cores import threads
from draftwood.errors import BadModel
from draftwood.native.build import library, operators
from draftwood.noise import Ahead
from draftwood.sampling import Sampling
from draftwood.tree import Ints, Tree

NUMBER = torch.bfloat16.itemsize


def takes(logits: Tensor) -> bool:
    """Whether the compiled operators serve these logits `[N, V]`."""
    return logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and operators().library is not None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where rows of logits `[N, V]` lie. After a forward caches are cold: asking a tensor takes as long as finding a
    row's largest number."""

    held: Tensor  # what lies there
    begin: int  # an address
    pace: int  # numbers from one row to the next
    vocab: int

    @classmethod
    def of(cls, logits: Tensor) -> Rows | None:
        """None where the compiled operators do not serve them."""
        if not takes(logits):
            return None
        held = logits if logits.stride(1) == 1 else logits.contiguous()
        return cls(held, held.data_ptr(), held.stride(0), held.shape[1])

    def behind(self, rows: int) -> Rows:
        """The rows from number `rows` on."""
        return Rows(self.held, self.begin + NUMBER * rows * self.pace, self.pace, self.vocab)

    def walk(self, tree: Tree, sampling: Sampling, keys: Ints | None) -> Verdict:
        """The target's verdict on a tree of N - 1 nodes, as `accept` gives it.

        `keys` are those of the draws to come (`noise.py`), one for each depth and one more; None at temperature 0.
        """
        tokens, size = tree.tokens.tolist(), len(tree)
        numbers = c_int64 * (1 + size)  # arrays of ctypes: numpy's addresses take long
        rules = None if sampling.greedy else byref(_Rules.of(sampling, self.vocab))
        nodes, found = (numbers(*tokens), numbers(*tree.parents.tolist()), c_int64(size)), numbers()
        own = None if keys is None else numbers(*keys.tolist())
        count = library().walk(c_void_p(self.begin), c_int64(self.pace), c_int64(self.vocab), *nodes, rules, own, found)
        if count < 0:
            raise BadModel(f"A draw from {self.vocab} tokens does not fit in memory.")
        *path, bonus = found[: 1 + count]
        return Verdict(path, [tokens[node] for node in path], bonus)

    def confidence(self, row: int) -> float:
        """The probability of the likeliest token of a row, to about a percent."""
        share: float = library().confidence(c_void_p(self.begin + NUMBER * row * self.pace), c_int64(self.vocab))
        return share


def drawn_each(logits: Tensor, temperatures: Sequence[float], keys: Sequence[int]) -> Tensor:
    """`[N]` places drawn from rows of logits `[N, V]`, with a temperature and a key for each row; at 0 the largest."""
    logits, places = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
    heat, under = np.array(temperatures, np.float64), np.array(keys, np.int64)
    at = [c_void_p(address) for address in (heat.ctypes.data, under.ctypes.data, places.data_ptr())]
    first, sizes = c_void_p(logits.data_ptr()), map(c_int64, logits.shape)
    library().draw_each(first, *sizes, *at, threads())
    if len(places) and int(places.min()) < 0:
        raise BadModel(f"Draws from {logits.shape[1]} tokens do not fit in memory.")
    return places


class _Rules(Structure):
    """`Rules` in logits.c."""

    _fields_ = (("temperature", c_double), ("top_k", c_int64), ("top_p", c_double), ("min_p", c_double))

    @classmethod
    def of(cls, sampling: Sampling, vocab: int) -> _Rules:
        return cls(sampling.temperature, sampling.top_k or vocab, sampling.top_p, sampling.min_p)


def likeliest(logits: Tensor, k: int, ids: Tensor | None = None, ahead: Ahead | None = None) -> tuple[Tensor, Tensor]:
    """Places and float32 log-probabilities `[N, k]` of the k largest of each row, the first of equals first.

    With noise `ahead` of the tokens `ids` (or of places), the k that it favours.
    """
    logits = logits.contiguous()
    places = torch.from_numpy(np.empty((len(logits), k), np.int64))
    logp = torch.from_numpy(np.empty((len(logits), k), np.float32))
    names, keys, scratch, heat = None, None, None, 0.0
    if ahead is not None:
        names, keys, scratch, heat = ids, torch.as_tensor(ahead.keys), torch.empty_like(places), float(ahead.heat)
    given = (logits, places, logp, names, keys, scratch)
    addresses = (c_void_p(None if part is None else part.data_ptr()) for part in given)
    sizes = map(c_int64, (*logits.shape, k))
    library().candidates(*addresses, *sizes, c_double(heat), threads())
    return places, logp


def pairs(rows: Tensor, logp: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """`Markov.pairs` of tables `[V, r]` in bf16."""
    depths, k = rows.shape
    out = torch.empty(max(depths - 1, 0), k, k)
    tensors = (rows.contiguous(), logp.contiguous(), before, after, out)
    sizes = map(c_int64, (depths, k, before.shape[1]))
    addresses = (c_void_p(tensor.data_ptr()) for tensor in tensors)
    if library().pair_scores(*addresses, *sizes, threads()):
        raise BadModel(f"{k} candidates of a depth do not fit in memory with their scores.")
    return out
