"""Drafters made worse on purpose that stay as confident as before: a policy must not trust them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftwood.drafters.base import Candidates, Drafter, Learner, Placeable, Placed, Request
from draftwood.latency import Work
from draftwood.noise import Ahead
from draftwood.pool import Pool
from draftwood.tree import Child, Conditional, Draft, Growable, Ints, Lattice, Tree
from draftwood.trellis import Trellis

DRAFTS = 1024  # different ways in which drafts on a device are made worse


def worse(inner: Drafter, share: float, vocab: int) -> Worse:
    """`inner` with random tokens at a `share` of the depths, from 0 to 1; on a device where `inner` runs there."""
    return (PlaceableWorse if isinstance(inner, Placeable) else Worse)(inner, share, vocab)


class Worse(Learner):
    """Some depths of each draft, or nodes of each tree, get random tokens; log-probabilities stay."""

    def __init__(self, inner: Drafter, share: float, vocab: int) -> None:
        """`share` of the depths, from 0 to 1; which ones depends on the root and the draft alone."""
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

    @property
    def listens(self) -> bool:
        return isinstance(self._inner, Learner) and self._inner.listens

    def learn(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        if isinstance(self._inner, Learner):
            self._inner.learn(tokens, logits)

    def fresh(self) -> Worse:
        inner = self._inner.fresh() if isinstance(self._inner, Learner) else self._inner
        return type(self)(inner, self._share, self._vocab)

    def draft(self, requests: list[Request]) -> list[Draft]:
        drafts = self._inner.draft(requests)
        return [self._worsened(draft, request.root) for draft, request in zip(drafts, requests, strict=True)]

    def _worsened(self, draft: Draft, root: int) -> Draft:
        if not isinstance(draft, (Lattice, Tree)):
            rng = np.random.default_rng([root])
            shifts = rng.integers(1, self._vocab, self.max_depth) * (rng.random(self.max_depth) < self._share)
            if not isinstance(draft, Trellis):
                return Shifted(draft, shifts, self._vocab)
            tokens = (draft.lattice.tokens + shifts[: len(draft), None]) % self._vocab  # pairs go by place
            return Trellis(replace(draft.lattice, tokens=tokens), draft.pairs, draft.grow)
        rng = np.random.default_rng([root, int(draft.tokens.sum())])
        rows = draft.tokens if isinstance(draft, Lattice) else draft.tokens[1:]
        spoiled = rng.random(len(rows)) < self._share
        tokens = rows.copy()
        tokens[spoiled] = rng.integers(0, self._vocab, rows[spoiled].shape)
        if isinstance(draft, Lattice):
            return replace(draft, tokens=tokens)
        return replace(draft, tokens=np.append(draft.tokens[0], tokens))


class PlaceableWorse(Worse, Placeable):
    """The same for a drafter that runs on static buffers."""

    def place(self, capacity: int) -> Placed:
        assert isinstance(self._inner, Placeable)
        return PlacedWorse(self._inner.place(capacity), self._share, self._vocab)


class PlacedWorse:
    """A placed drafter whose token ids are shifted at some depths; root and draft decide where and how far."""

    def __init__(self, inner: Placed, share: float, vocab: int) -> None:
        self.max_depth, self.paired = inner.max_depth, inner.paired
        self._inner, self._vocab = inner, vocab
        rng, size = np.random.default_rng(0), (DRAFTS, inner.max_depth)
        self._shifts = torch.from_numpy(rng.integers(1, vocab, size) * (rng.random(size) < share))

    def extend(self, taps: torch.Tensor, start: torch.Tensor) -> None:
        self._shifts = self._shifts.to(start.device)  # before any draft, and so before a capture
        self._inner.extend(taps, start)

    def draft(self, root: torch.Tensor, context: torch.Tensor, width: int, ahead: Ahead | None = None) -> Candidates:
        draft = self._inner.draft(root, context, width, ahead)
        at = (root + draft.tokens.sum()) % DRAFTS  # [1]: a scalar index would wait for the device
        return replace(draft, tokens=(draft.tokens + self._shifts[at][0, :, None]) % self._vocab)

    def nbytes(self) -> int:
        return self._inner.nbytes() + self._shifts.nbytes


@dataclass(frozen=True, slots=True)
class Shifted(Growable):
    """A conditional draft with the token ids of each depth shifted by a number. Siblings stay different."""

    inner: Conditional
    shifts: Ints  # [D], by depth, the root's children first; 0 leaves a depth as it is
    vocab: int

    @property
    def faint(self) -> float:
        return self.inner.faint

    @property
    def asked(self) -> bool:
        return not isinstance(self.inner, Growable) or self.inner.asked

    def start(self) -> tuple[int, Any]:
        return 0, self.inner.start()

    def children(self, place: tuple[int, Any]) -> Iterator[Child]:
        depth, inner = place
        for cost, token, source in self.inner.children(inner):
            yield cost, (token + int(self.shifts[depth])) % self.vocab, source

    def step(self, place: tuple[int, Any], token: int) -> tuple[int, Any]:
        depth, inner = place
        return depth + 1, self.inner.step(inner, (token - int(self.shifts[depth])) % self.vocab)

    def grown(self, root: int, n_max: int, most: float, barren: float, ahead: Ahead | None = None) -> Tree | None:
        if not isinstance(self.inner, Pool):
            return None
        return self.inner.grown(root, n_max, most, barren, ahead, self.shifts, self.vocab)
