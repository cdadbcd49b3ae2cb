"""Drafters made worse on purpose, as sure of themselves as before: what a policy must not fall for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftwood.drafters.base import Drafter, Request
from draftwood.latency import Work
from draftwood.tree import Lattice, Tree


class Worse:
    """Some depths of each lattice, or nodes of each tree, hold random tokens instead; log-probabilities stay."""

    def __init__(self, inner: Drafter, share: float, vocab: int) -> None:
        """`share` of the depths, from 0 to 1, drawn from the root and the draft alone."""
        self._inner, self._share, self._vocab = inner, share, vocab
        self.name, self.tap_layers, self.max_depth = (
            f"{inner.name}, {share:.0%} random",
            inner.tap_layers,
            inner.max_depth,
        )

    def open(self, capacity: int) -> Any:
        return self._inner.open(capacity)

    def extend(self, state: Any, tokens: list[int], taps: torch.Tensor | None) -> None:
        self._inner.extend(state, tokens, taps)

    def rewind(self, state: Any, length: int) -> None:
        self._inner.rewind(state, length)

    def work(self, context: int) -> Work:
        return self._inner.work(context)

    def draft(self, requests: list[Request]) -> list[Any]:
        drafts = self._inner.draft(requests)
        return [self._worsened(draft, request.root) for draft, request in zip(drafts, requests, strict=True)]

    def _worsened(self, draft: Any, root: int) -> Any:
        if not isinstance(draft, (Lattice, Tree)):
            return draft
        rng = np.random.default_rng([root, int(draft.tokens.sum())])
        rows = draft.tokens if isinstance(draft, Lattice) else draft.tokens[1:]
        spoiled = rng.random(len(rows)) < self._share
        tokens = rows.copy()
        tokens[spoiled] = rng.integers(0, self._vocab, rows[spoiled].shape)
        return replace(draft, tokens=tokens if isinstance(draft, Lattice) else np.append(draft.tokens[0], tokens))
