"""The round: draft, grow, choose, verify, accept, commit, observe. The file to read first.

    context --draft--> lattice --grow--> tree --choose--> tree[:n] --verify--> logits, taps
            --accept--> verdict --commit--> cache, drafter state --observe--> latency, acceptance

One loop drives the verbs for all requests of a batch, whether one or many: their trees lie one behind the other on the
token axis of one forward. Requests join and leave between rounds. A prompt is read in chunks, in the same forwards as
the other requests' trees. The verbs run on the host (`rounds.py`) or, for one request with static shapes, on the device
(`device/rounds.py`). What belongs to one request lives in its `Request`, so an abandoned one leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from draftwood.accept import Likelihood, Verdict
from draftwood.choosing import Chooser, Load
from draftwood.clock import Clock
from draftwood.drafting import Proposal, ran
from draftwood.latency import LatencyModel
from draftwood.offline_profile import ConvexCosts
from draftwood.policies.base import Costs, Policy
from draftwood.request import Part, Request
from draftwood.rounds import PREFILL_CHUNK, Prefix, Rounds
from draftwood.timings import Timings
from draftwood.trace import Round
from draftwood.tree import Tree, chain_tree

CHUNK_BESIDE = 128  # prompt tokens that a round reads beside other requests' trees: bounds how long these wait

Keep = Callable[[Request, Prefix], None]  # takes the prefix of a request that leaves
Decide = Callable[[Callable[[], list[Tree]]], list[Tree]]  # lets one of several processes choose the trees


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one round emits for one request: accepted draft tokens, then the bonus token."""

    tokens: list[int]
    tree: Tree | None  # the verified tree; None for the step that ends the prefill
    path: list[int]  # accepted nodes of `tree`: one fewer than tokens, unless the last of these ended the text
    round: Round | None
    seconds: float  # of the round; for the step that ends the prefill, since the request joined
    likelihoods: tuple[Likelihood, ...] | None = None  # of each token, if requested
    plain_s: float | None = None  # what a round without drafts was expected to take instead; None as for `round`


class _Wanted(NamedTuple):
    """Which of the requests that write are drafted for."""

    drafts: list[bool]
    typical: bool  # every request that can be drafted for is


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A round whose parts have been sent to the target."""

    start: float
    clock: Clock
    load: Load
    parts: list[Part]
    costs: Mapping[Policy, Costs]  # as expected before the round
    proposals: list[Proposal | None]  # what the tree of each part was chosen from
    filled: list[int]  # tokens in the caches of each part's request before the round
    first: bool  # the round before it did not draft
    typical: bool  # as in `_Wanted`


class _Emitted(NamedTuple):
    """What a round added to one request's text."""

    tokens: list[int]
    seconds: float  # as in `Step`


class Batch:
    """Requests that share the rounds of an engine."""

    def __init__(
        self,
        rounds: Rounds,
        drafts: bool,
        latency_of: Callable[[int], LatencyModel],
        offline: ConvexCosts | None = None,
        keep: Keep = lambda request, prefix: None,
        decide: Decide = lambda choose: choose(),
    ) -> None:
        """`drafts` says whether there is a drafter. `latency_of(requests)` is the model for batches of that size,
        `offline` prices policies that need convex costs, and `keep` gets the prefix of every request that leaves. Where
        several processes share the target, `decide` lets one of them choose the trees and tells the others."""
        self.requests: list[Request] = []
        self._rounds, self._latency_of, self._keep, self._decide = rounds, latency_of, keep, decide
        self._chooser = Chooser(rounds, drafts, latency_of, offline)
        self._begun: _Begun | None = None
        self._next: _Wanted | None = None  # of the next trees, where rounds run ahead
        self._timings = Timings(latency_of)
        self._drafted = False  # whether the latest round drafted

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        """Admit a request from the next round on; `prefix` holds the first `request.filled` of its tokens."""
        self._rounds.join(request, prefix)
        alone = self.requests if len(self.requests) == 1 else []  # what it learned so far is about its own text, too
        for one in (*alone, request):
            one.own = one.acceptance.child()  # not earlier: another thread may be creating requests
        if not self.requests:  # beside others it uses its own model
            request.acceptance.turn()
        self.requests.append(request)

    def leave(self, request: Request) -> None:
        """Remove a request that is finished or abandoned."""
        self.requests.remove(request)
        prefix = self._rounds.leave(request)
        self._begun = self._next = None
        if not self.requests:
            self._timings.learn()
        if prefix is not None:
            self._keep(request, prefix)

    def close(self) -> None:
        """Remove every request."""
        for request in list(self.requests):
            self.leave(request)

    def round(self) -> dict[Request, Step]:
        """Run one round; returns what each request emits. One that only read a part of its prompt emits nothing."""
        begun, ahead = self._begun or self._begin(), self._rounds.ahead
        verdicts = self._rounds.settle(begun.clock)
        # While the device drafts, the host has time to learn, and the next choice may profit from what a tree taught.
        # Otherwise the device would wait, so the host learns behind the next forward.
        meanwhile = self._next is not None and any(self._next.drafts)
        records = self._heed(begun, verdicts) if meanwhile or not ahead else None
        emitted = self._emit(begun, verdicts)
        self._begun = self._begin() if ahead and self.requests else None
        records = records or self._heed(begun, verdicts)
        if self._begun is not None:
            self._draft_ahead(self._begun)
        elif not self.requests:
            self._timings.learn()  # again: the last request may have left before its last round was heeded
        return {
            part.request: _step(part, verdict, record, text, begun.costs)
            for part, verdict, record, text in zip(begun.parts, verdicts, records, emitted, strict=True)
            if verdict is not None and text is not None
        }

    # --- draft, grow, choose, verify ---------------------------------------------------------------------
    def _begin(self) -> _Begun:
        start, clock = time.perf_counter(), Clock()
        chunks, writing = self._chunks(), [request for request in self.requests if not request.reads]
        load = Load(writing, len(self.requests), sum(chunk.size for chunk in chunks))
        with clock("choose"):
            costs = self._chooser.costs(load)
            wanted, first = self._next or self._want(load, costs), not self._drafted
        proposed = self._rounds.propose(writing, wanted.drafts, clock)
        self._drafted = ran(proposed) > 0
        with clock("choose"):
            trees = self._decide(lambda: self._chooser.choose(load, proposed, costs))
        parts = [*map(Part, writing, trees), *chunks]
        self._rounds.verify(parts, clock)
        proposals = [*proposed, *(None for _ in chunks)]
        filled = [part.request.filled for part in parts]
        return _Begun(start, clock, load, parts, costs, proposals, filled, first, wanted.typical)

    def _want(self, load: Load, costs: Mapping[Policy, Costs]) -> _Wanted:
        drafts = self._chooser.drafts(load, costs)
        return _Wanted(drafts, drafts == self._chooser.able(load.writing))

    def _draft_ahead(self, begun: _Begun) -> None:
        """Decide, while a forward runs, whether the next trees are drafted behind it."""
        self._next = None
        if begun.load.writing:
            with begun.clock("choose"):
                self._next = self._want(begun.load, begun.costs)
            self._rounds.draft_ahead(self._next.drafts)

    def _chunks(self) -> list[Part]:
        """The chunks of prompts that this round reads, first come, first served."""
        reading = [request for request in self.requests if request.reads]
        room, chunks = PREFILL_CHUNK if len(reading) == len(self.requests) else CHUNK_BESIDE, []
        for request in reading:
            chunk = request.sampler.tokens[request.filled : request.prompt][:room]
            if chunk:
                chunks.append(Part(request, chain_tree(chunk), known=True))
                room -= len(chunk)
        return chunks

    # --- accept, commit, observe -------------------------------------------------------------------------
    def _heed(self, begun: _Begun, verdicts: Sequence[Verdict | None]) -> list[Round | None]:
        """Record each part that is a tree. The models learn from the records, and from the seconds of earlier ones."""
        clock = begun.clock
        clock.add("observe", self._timings.learn_some(begun.load.requests))
        with clock("observe"):
            records = self._observe(begun, verdicts)
        clock.close()
        if len(begun.parts) == 1 and (alone := records[0]):
            request = begun.parts[0].request
            request.acceptance.charge(alone, begun.costs[request.policy].plain_s)
        return records

    def _observe(self, begun: _Begun, verdicts: Sequence[Verdict | None]) -> list[Round | None]:
        parts, seconds, requests = begun.parts, begun.clock.seconds, begun.load.requests
        filled = [tokens for part, tokens in zip(parts, begun.filled, strict=True) if not part.known]
        if not filled:
            return [None] * len(parts)
        width, drafted = self._width(sum(part.size for part in parts)), ran(begun.proposals)
        nodes = sum(len(part.tree) for part in parts if not part.known)
        context, padding = sum(filled) // len(filled), width - 1 - nodes
        predicted = self._latency_of(requests).predict(nodes, context, any(begun.proposals), padding)
        if drafted < requests and "draft" in predicted:
            predicted = {**predicted, "draft": self._chooser.draft_s(drafted, context)}
        records = [
            None if part.known or verdict is None else _record(part, held, verdict, proposal, width, seconds, predicted)
            for part, held, verdict, proposal in zip(parts, begun.filled, verdicts, begun.proposals, strict=True)
        ]
        for part, record in zip(parts, records, strict=True):
            if record is not None:
                position = self._position(begun.costs[part.request.policy], drafted, requests, len(filled), context)
                part.request.acceptance.observe(record, begun.typical, position)
                if len(filled) > 1:
                    part.request.own.observe(record, position=position)
        if len(filled) == len(parts) and records[0]:  # reading prompts is another kind of work
            whole = records[0]
            if len(filled) > 1:
                positions = _deepest(begun.proposals)
                whole = replace(
                    whole, context=context, n=nodes, drafted=any(begun.proposals), padding=padding, positions=positions
                )
            self._timings.add(whole, len(filled), drafted, begun.first)
        return records

    def _position(self, costs: Costs, drafted: int, requests: int, writing: int, context: int) -> float:
        """The price of one more position in the draft of one request, in plain steps of one request."""
        if drafted in (0, requests):  # already priced before the round
            return costs.position
        return self._chooser.position_s(drafted, context) * writing / costs.plain_s

    def _width(self, tokens: int) -> int:
        """How many tokens a forward of `tokens` really runs: captured widths are fixed."""
        widths = self._rounds.widths
        return tokens if widths is None else next(width for width in widths if width >= tokens)

    def _emit(self, begun: _Begun, verdicts: Sequence[Verdict | None]) -> list[_Emitted | None]:
        """Commit verdicts to the requests' texts, and remove those that are finished."""
        seconds = time.perf_counter() - begun.start
        return [self._commit(*of, seconds) for of in zip(begun.parts, verdicts, strict=True)]

    def _commit(self, part: Part, verdict: Verdict | None, seconds: float) -> _Emitted | None:
        request = part.request
        request.filled += part.size if verdict is None or part.known else 1 + len(verdict.path)
        if verdict is None:
            return None
        tokens = _cut([verdict.bonus] if part.known else verdict.tokens, request)
        request.sampler.commit(tokens)
        request.finished = request.remaining <= 0 or tokens[-1] in request.stop_ids
        if request.finished:
            self.leave(request)
        return _Emitted(tokens, time.perf_counter() - request.start if part.known else seconds)


def _deepest(proposals: Sequence[Proposal | None]) -> int | None:
    """How many positions were drafted: all requests' blocks are as long as the longest."""
    return max((found.positions for found in proposals if found and found.positions is not None), default=None)


def _record(
    part: Part,
    filled: int,
    verdict: Verdict,
    proposal: Proposal | None,
    width: int,
    seconds: dict[str, float],
    predicted: Mapping[str, float],
) -> Round:
    tree, n = part.tree, len(part.tree)
    return Round(
        context=filled,
        n=n,
        drafted=proposal is not None,
        mass=tree.mass[1:],
        depths=tree.depths[1:],
        path=verdict.path,
        seconds=seconds,
        predicted=predicted,
        padding=width - 1 - n,
        draft=proposal.draft if proposal else None,
        positions=proposal.positions if proposal else None,
        grown=len(proposal.tree) if proposal else None,
        confidence=verdict.confidence,
        faint=proposal.faint if proposal else 0.0,
    )


def _cut(tokens: list[int], request: Request) -> list[int]:
    """Up to the first stop token, or to where the answer is full."""
    tokens = tokens[: request.remaining]
    stop = next((i for i, token in enumerate(tokens) if token in request.stop_ids), None)
    return tokens if stop is None else tokens[: stop + 1]


def _step(part: Part, verdict: Verdict, record: Round | None, emitted: _Emitted, costs: Mapping[Policy, Costs]) -> Step:
    tokens, count = emitted.tokens, len(emitted.tokens)
    told = verdict.likelihoods and verdict.likelihoods[:count]
    if part.known:
        return Step(tokens, None, [], None, emitted.seconds, told)
    if record and count < len(verdict.tokens):
        record = replace(record, path=record.path[: count - 1])  # tokens, the last one as bonus
    plain_s = costs[part.request.policy].plain_s
    return Step(tokens, part.tree, verdict.path[:count], record, emitted.seconds, told, plain_s)
