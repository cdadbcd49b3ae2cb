"""The loss over a trimmed head: cross-entropy by position weight, and with the target's own probabilities if wanted.

The head is frozen, so the loss needs gradients of the hidden states only. It goes through them in chunks and
hands back their gradient, so that the logits of a whole step never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.precision import computes_bf16
from draftwood.target import Target
from draftwood.train.model import MarkovHead
from draftwood.tree import Floats, Ints

CHUNK = 512  # predicted tokens whose logits exist at once
GPU_LOGITS = 2**26  # logits that exist at once on a GPU, if they are more: there many small products take longer


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The target's head for the tokens that may be drafted."""

    weight: Tensor  # [K, hidden]
    bias: Tensor | None  # [K]
    tokens: Tensor | None  # [K] their ids; None: all
    rows: Tensor  # [V] the row of each token id; -1: it has none
    finish: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, target: Target, tokens: Tensor | None) -> Head:
        """The head of all tokens, or of these."""
        rows = torch.arange(target.vocab_size, device=target.device)
        if tokens is not None:
            tokens = tokens.to(target.device)
            rows = torch.full_like(rows, -1).index_copy(0, tokens, torch.arange(len(tokens), device=target.device))
        weight, bias = target.head_rows(tokens)
        slow = weight.dtype == torch.bfloat16 and not computes_bf16(target.device)
        if slow or weight.dtype == torch.float16:  # unlikely tokens' gradients are too small for it
            weight, bias = weight.float(), None if bias is None else bias.float()
        return cls(weight, bias, tokens, rows, target.finish)

    @property
    def chunk(self) -> int:
        """Predicted tokens whose logits exist at once."""
        return max(CHUNK, GPU_LOGITS // len(self.weight)) if self.weight.is_cuda else CHUNK

    def logits(self, hidden: Tensor) -> Tensor:
        """`[N, K]` in at least float32."""
        logits = self.finish(F.linear(hidden.to(self.weight.dtype), self.weight, self.bias))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The target's likeliest next tokens after every place of a text, for soft labels."""

    tokens: Tensor  # [N, K] ids
    probs: Tensor  # [N, K]

    def __getitem__(self, places: Tensor) -> Teacher:
        return Teacher(self.tokens[places], self.probs[places])


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a step's predictions were worth: sums, which add up over parts and processes."""

    loss: Tensor  # scalar, weighted
    right: Tensor  # [B - 1] predictions that are the text's own token
    total: Tensor  # [B - 1] predictions

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.loss + other.loss, self.right + other.right, self.total + other.total)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """What blocks are to predict, on the head's device."""

    rows: Tensor  # [M * (B - 1)] of the head; -1: it has none for the text's token, so that is wrong, but no loss
    weights: Tensor  # [M * (B - 1)]
    counted: Tensor  # places with a weight: found on the host, which would have to wait for the device
    positions: int  # B - 1

    @classmethod
    def of(cls, tokens: Ints, weights: Floats, head: Head) -> Labels:
        """From `tokens` and `weights`, `[M, B - 1]` each."""
        device = head.rows.device
        asked, weighed, counted = (
            torch.from_numpy(x).to(device) for x in (tokens.ravel(), weights.ravel(), np.flatnonzero(weights))
        )
        return cls(head.rows[asked], weighed, counted, tokens.shape[1])

    def by_position(self, flat: Tensor) -> Tensor:
        """`[B - 1]` sums."""
        return flat.unflatten(0, (-1, self.positions)).sum(0)


class Before:
    """The correction by the tokens before: scores that are added to logits, and their gradient."""

    def __init__(self, markov: MarkovHead, embedded: Tensor, hidden: Tensor, head: Head) -> None:
        """`embedded` `[M, B - 1, hidden]` of the token before each predicted one. `hidden` `[M, B - 1]` says whether
        the block hides that token: one that it shows needs no correction."""
        before, after = markov.tables(embedded.flatten(0, 1), head.weight)
        self._made = before * hidden.flatten()[:, None], after
        self._dtype = head.weight.dtype
        self._leaves = [made.detach().requires_grad_() for made in self._made]

    def scores(self, part: Tensor) -> Tensor:
        """`[len(part), V]`"""
        before, after = (leaf.to(self._dtype) for leaf in self._leaves)
        return F.linear(before[part], after).to(self._leaves[0].dtype)

    def backward(self) -> None:
        torch.autograd.backward(self._made, [leaf.grad for leaf in self._leaves])


def backpropagate(
    hidden: Tensor,
    head: Head,
    labels: Labels,
    scale: float,
    teacher: Teacher | None,
    soft: float,
    before: Before | None = None,
) -> Outcome:
    """Add the gradient of `scale` times the summed loss to everything that `hidden` `[M, B - 1, h]` depends on.

    `teacher` has a row for each label in order, and counts with the share `soft` of the loss.
    """
    leaf, rows, weights = hidden.detach().flatten(0, 1).requires_grad_(), labels.rows, labels.weights
    right = torch.zeros(len(leaf), device=leaf.device)
    total_loss = torch.zeros((), device=leaf.device)
    for part in labels.counted.split(head.chunk):
        logits = head.logits(leaf[part])
        logits = logits if before is None else logits + before.scores(part)
        logp = logits.log_softmax(-1)
        losses = hard_loss(logp, rows[part])
        if teacher is not None and soft > 0:
            losses = (1 - soft) * losses + soft * soft_loss(logp, head, teacher[part])
        loss = (losses * weights[part]).sum()
        (loss * scale).backward()
        total_loss += loss.detach()
        right[part] = (logits.argmax(-1) == rows[part]).to(right)
    if leaf.grad is not None:
        hidden.backward(leaf.grad.view_as(hidden))
        if before is not None:
            before.backward()
    return Outcome(total_loss, labels.by_position(right), labels.by_position((weights > 0).to(right)))


def hard_loss(logp: Tensor, rows: Tensor) -> Tensor:
    """`[N]` cross-entropy with the text's own tokens; 0 where the head has no row (-1) for one."""
    return F.nll_loss(logp, rows, ignore_index=-1, reduction="none")


def soft_loss(logp: Tensor, head: Head, teacher: Teacher) -> Tensor:
    """`[N]` cross-entropy with the target's distribution over its likeliest tokens that the head has."""
    rows = head.rows[teacher.tokens]
    probs = torch.where(rows >= 0, teacher.probs.to(logp), 0.0)
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-6)
    return -(probs * logp.gather(-1, rows.clamp_min(0))).sum(-1)
