"""How the verbs of a round run: the interface that the batch's loop drives, and its form on the host.

The other form, on the device with static shapes, is `device/rounds.py`. Both give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwood.accept import Likelihood, Verdict, accept
from draftwood.cache import KVCache, Row
from draftwood.clock import Clock
from draftwood.drafters import base
from draftwood.drafting import Drafting, Proposal
from draftwood.memory import require_request
from draftwood.native.candidates import Rows
from draftwood.plan import Verified
from draftwood.request import Part, Request
from draftwood.target import Target
from draftwood.tree import Tree

PREFILL_CHUNK = 512  # tokens: bounds the mask and the activations of a long prompt


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What the caches hold of one text: the target's keys and values and the drafter's state, never one alone."""

    row: Row
    state: Any  # of the drafter; None without one


class Rounds(Protocol):
    """The rounds of the requests that have joined: `propose`, `verify`, `settle`, again and again.

    A prompt comes as known parts. Before it proposes again, the batch commits what `settle` gave to the request's
    sampler.
    """

    @property
    def ahead(self) -> bool:
        """Whether a round begins before the text of the previous one is handed out, so that work goes on meanwhile."""
        ...

    @property
    def widths(self) -> tuple[int, ...] | None:
        """How many tokens a forward can have, the root included, in ascending order; None: any number."""
        ...

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        """Make room for a request, whose text may begin with a `prefix` that it then owns."""
        ...

    def leave(self, request: Request) -> Prefix | None:
        """Remove a request that is finished or abandoned; returns what the caches hold of it, if it owns that."""
        ...

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        """draft, grow: a proposal for each request that `drafts` names, or None if nothing was drafted for it."""
        ...

    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        """Run the target over prefixes of the proposed trees, or roots alone, or known text. May return before it
        is done."""
        ...

    def draft_ahead(self, drafts: Sequence[bool]) -> None:
        """Start drafting the trees after these, behind the forward; for which requests, `propose` is told again. Called
        only where rounds run ahead."""
        ...

    def settle(self, clock: Clock) -> list[Verdict | None]:
        """accept, commit: the target's verdict on each part; None for a chunk that does not end its prompt."""
        ...


class HostRounds:
    """Every verb on the host, one after the other. Serves every target, drafter, policy and rule."""

    ahead = False
    widths = None

    def __init__(self, target: Target, drafter: base.Drafter | None) -> None:
        self._target, self._drafter = target, drafter
        self._drafting = Drafting(drafter, target) if drafter else None
        self._cache = KVCache(target.num_layers, [])
        self._rows: dict[Request, Row] = {}
        self._verified: tuple[Sequence[Part], Verified] | None = None

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        if prefix is None:
            capacity = request.capacity
            width = 1 + request.policy.n_max
            self._target.group.every(lambda: require_request(self._target, self._drafter, capacity, width))
            state = self._drafter.open(capacity) if self._drafter else None
            prefix = Prefix(self._target.new_row(capacity), state)
        self._rows[request] = prefix.row
        if self._drafting is not None:
            self._drafting.join(request, prefix.state)

    def leave(self, request: Request) -> Prefix:
        return Prefix(self._rows.pop(request), self._drafting.leave(request) if self._drafting else None)

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        drafts = self._target.group.decide(lambda: list(drafts))
        return self._drafting.propose(requests, drafts, clock) if self._drafting else [None] * len(requests)

    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        with clock("verify"):
            self._cache.rows = [self._rows[part.request] for part in parts]
            known = [part.known for part in parts]
            plan = self._target.plan([part.tree for part in parts], self._cache, range(len(parts)), known)
            self._verified = parts, self._target.verify(plan, self._cache)

    def draft_ahead(self, drafts: Sequence[bool]) -> None:
        raise AssertionError("these rounds draft when the tree is needed")

    def settle(self, clock: Clock) -> list[Verdict | None]:
        assert self._verified is not None, "settle follows verify"
        parts, result = self._verified
        with clock("accept"):
            verdicts = self._target.group.decide(lambda: _verdicts(parts, result))
        with clock("commit"):
            start = 0
            for part, verdict in zip(parts, verdicts, strict=True):
                self._commit(part, verdict, result.taps, start)
                start += part.size
        if self._drafting is not None and self._drafting.listens:
            with clock("observe"):
                self._drafting.learn(parts, verdicts, result.logits)
        self._verified = None
        self._cache.clear()  # or a request that leaves would keep its memory until the next forward
        return verdicts

    def _commit(self, part: Part, verdict: Verdict | None, taps: Tensor | None, start: int) -> None:
        """`taps` are those of the whole forward, and the part's begin at `start`."""
        row = self._rows[part.request]
        nodes: Sequence[int] = range(part.size)
        if part.known:
            row.advance(part.size)
        else:
            assert verdict is not None
            nodes = [0, *verdict.path]
            row.commit(verdict.path)
        if self._drafting is not None:
            self._drafting.commit(part, nodes, taps, start)


def _verdicts(parts: Sequence[Part], result: Verified) -> list[Verdict | None]:
    rows = result.rows or Rows.of(result.logits)
    if len(parts) == 1:  # the usual case, which needs no views
        return [_judge(parts[0], result.logits, rows)]
    sizes = [1 if part.known else part.size for part in parts]
    each = zip(parts, result.logits.split(sizes), accumulate(sizes, initial=0), strict=False)
    return [_judge(part, logits, rows and rows.behind(start)) for part, logits, start in each]


def _judge(part: Part, logits: Tensor, rows: Rows | None) -> Verdict | None:
    """The target's verdict on a part, from its `logits` [1 + N, V]; for known text, from those of its last token."""
    if part.known and not part.ends_prompt:
        return None
    top = part.request.likelihoods
    verdict = _accepted(part.tree[:0] if part.known else part.tree, part.request, logits, rows)
    visited = [0, *verdict.path]
    sure = _confidence(logits, rows, visited) if _heeds(part) else None
    told = None if top is None else likelihoods(logits[visited], verdict.tokens, top)
    return Verdict(verdict.path, verdict.accepted, verdict.bonus, told, sure)


def _heeds(part: Part) -> bool:
    """Whether to measure the target's confidence, only at every fourth token: it takes a pass over each visited row."""
    request = part.request
    return request.policy.calibrated and not part.known and len(request.sampler.tokens) % 4 == 0


def _accepted(tree: Tree, request: Request, logits: Tensor, rows: Rows | None) -> Verdict:
    """Walk the tree, drawing the target's token only at nodes that are visited: few are, in a wide tree."""
    sampler = request.sampler
    if sampler.shaped or rows is None:
        return accept(tree, lambda node, path: sampler.draw(logits[node], path), request.stop_ids)
    # No node is deeper than there are nodes.
    return rows.walk(tree, sampler.sampling, None if sampler.plain else sampler.keys(0, len(tree.tokens)))


def _confidence(logits: Tensor, rows: Rows | None, nodes: Sequence[int]) -> float:
    """The probability of the target's likeliest token, averaged over some nodes."""
    if rows is not None:
        return sum(map(rows.confidence, nodes)) / len(nodes)
    return float(torch.softmax(logits[nodes].float(), -1).amax(-1).mean())


def likelihoods(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Likelihood, ...]:
    """For each of `tokens`, drawn from a row of `logits` [M, V]: its log-probability and the `top` likeliest tokens."""
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    own = logp[torch.arange(len(tokens)), list(tokens)].tolist()
    values, ids = (part.tolist() for part in logp.topk(top))
    best = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    return tuple(map(Likelihood, own, best))
