"""The round: draft, grow, choose, verify, accept, commit, observe. The file to read first.

    context --draft--> lattice --grow--> tree --choose--> tree[:n] --verify--> logits, taps
            --accept--> verdict --commit--> cache, drafter state --observe--> latency, acceptance

One loop drives the verbs for all requests of a batch, be it one or many: their trees lie one behind the other on the
token axis of one forward. Requests join and leave between rounds; a prompt is read in chunks beside the trees of the
others. The verbs run on the host (`rounds.py`) or, for one request with static shapes, on the device
(`device/rounds.py`). What belongs to one request lives in its `Request`, so an abandoned one leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from draftwood.accept import Likelihood, Verdict
from draftwood.choosing import Chooser, Load, mean_context
from draftwood.clock import Clock
from draftwood.latency import LatencyModel
from draftwood.learned import reach
from draftwood.offline_profile import ConvexCosts
from draftwood.policies.base import Costs, Policy
from draftwood.request import Part, Request
from draftwood.rounds import PREFILL_CHUNK, Prefix, Proposal, Rounds, ran
from draftwood.trace import Round
from draftwood.tree import Tree, chain_tree

SURPRISING = 1.2  # times the expected seconds of a forward
# Rounds whose seconds are learned from at once: at first, and of all that are known one in so many, at most.
SECONDS_TOGETHER, ONE_IN, MOST_TOGETHER = 4, 8, 32
CHUNK_BESIDE = 128  # tokens of prompts that are read in a round beside others' trees: bounds how long these wait

Keep = Callable[[Request, Prefix], None]  # what becomes of the prefix of a request that leaves
Decide = Callable[[Callable[[], list[Tree]]], list[Tree]]  # who chooses trees


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one round emits for one request: accepted draft tokens, then the bonus token."""

    tokens: list[int]
    tree: Tree | None  # the verified tree; None for the step that ends the prefill
    path: list[int]  # accepted nodes of `tree`; len(tokens) == len(path) + 1
    round: Round | None
    seconds: float  # of the round; of the step that ends the prefill: since the request joined
    likelihoods: tuple[Likelihood, ...] | None = None  # of each token, if asked for
    plain_s: float | None = None  # what a round without drafts was expected to take instead; None as for `round`


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A round whose parts have gone to the target."""

    start: float
    clock: Clock
    parts: list[Part]
    costs: Mapping[Policy, Costs]  # as expected before the round
    proposals: list[Proposal | None]  # for each part what its tree was chosen from
    first: bool  # drafts where the round before it did not
    typical: bool  # everyone was drafted for who could be


class _Kind(NamedTuple):
    """Of rounds that teach the same thing."""

    requests: int
    first: bool  # as in `_Begun`
    drafted: bool
    n: int
    padding: int
    reach: int


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A round for the latency model. It is learned from when it is over, so in a later one's `observe`."""

    round: Round
    requests: int
    drafted: int  # requests
    first: bool  # as in `_Begun`

    @property
    def surprises(self) -> bool:
        """Whether the forward took much longer than was expected: who chose its width would choose it again."""
        return self.round.seconds.get("verify", 0.0) > SURPRISING * self.round.predicted.get("verify", inf)

    @property
    def kind(self) -> _Kind:
        r = self.round
        return _Kind(self.requests, self.first, r.drafted, r.n, r.padding, reach(r.context))


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
        """`drafts`: there is a drafter. `latency_of(requests)` is the model for batches of that size, `offline` prices
        policies that need convex costs, and `keep` gets the prefix of every request that leaves. Where processes share
        the target, `decide` lets one of them choose the trees and tells the others."""
        self.requests: list[Request] = []
        self._rounds, self._latency_of, self._keep, self._decide = rounds, latency_of, keep, decide
        self._chooser = Chooser(rounds, drafts, latency_of, offline)
        self._begun: _Begun | None = None
        self._timed: list[_Timed] = []
        self._learning_s = 0.0  # of one of those that were learned from last
        self._drafted = False  # in the latest round

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        """Take a request in from the next round on; `prefix` holds the first `request.filled` of its tokens."""
        self._rounds.join(request, prefix)
        alone = self.requests if len(self.requests) == 1 else []  # what it learned until now is its own, too
        for one in (*alone, request):
            one.own = one.acceptance.child()  # not before: another thread may be making requests
        if not self.requests:  # beside others it starts from a model of its own
            request.acceptance.turn()
        self.requests.append(request)

    def leave(self, request: Request) -> None:
        """Let go of a request that is over or abandoned."""
        self.requests.remove(request)
        prefix = self._rounds.leave(request)
        self._begun = None
        if not self.requests:
            self._learn()
        if prefix is not None:
            self._keep(request, prefix)

    def close(self) -> None:
        """Let go of every request."""
        for request in list(self.requests):
            self.leave(request)

    def round(self) -> dict[Request, Step]:
        """Run one round; what it emits for whom. A request that only read a part of its prompt emits nothing."""
        steps = self._end(self._begun or self._begin())
        self._begun = self._begin() if self._rounds.ahead and self.requests else None
        return steps

    # --- draft, grow, choose, verify ---------------------------------------------------------------------
    def _begin(self) -> _Begun:
        start, clock = time.perf_counter(), Clock()
        chunks, writing = self._chunks(), [request for request in self.requests if not request.reads]
        load = Load(writing, len(self.requests), sum(chunk.size for chunk in chunks))
        with clock("choose"):
            costs = self._chooser.costs(load)
            drafts = self._chooser.drafts(load, costs)
            first = not self._drafted
            typical = drafts == self._chooser.able(writing)
        proposed = self._rounds.propose(writing, drafts, clock)
        self._drafted = ran(proposed) > 0
        with clock("choose"):
            trees = self._decide(lambda: self._chooser.choose(load, proposed, costs))
        parts = [*map(Part, writing, trees), *chunks]
        self._rounds.verify(parts, clock)
        return _Begun(start, clock, parts, costs, [*proposed, *(None for _ in chunks)], first, typical)

    def _chunks(self) -> list[Part]:
        """What this round reads of prompts, first come, first served."""
        reading = [request for request in self.requests if request.reads]
        room, chunks = PREFILL_CHUNK if len(reading) == len(self.requests) else CHUNK_BESIDE, []
        for request in reading:
            chunk = request.sampler.tokens[request.filled : request.prompt][:room]
            if chunk:
                chunks.append(Part(request, chain_tree(chunk), known=True))
                room -= len(chunk)
        return chunks

    # --- accept, commit, observe -------------------------------------------------------------------------
    def _end(self, begun: _Begun) -> dict[Request, Step]:
        clock = begun.clock
        verdicts = self._rounds.settle(clock)
        self._learn_seconds(clock)
        with clock("observe"):
            records = self._observe(begun, verdicts)
        if len(begun.parts) == 1 and (alone := records[0]):
            request = begun.parts[0].request
            request.acceptance.charge(alone, begun.costs[request.policy].plain_s)
        seconds = time.perf_counter() - begun.start
        steps = {}
        for part, verdict, record in zip(begun.parts, verdicts, records, strict=True):
            kept = part.size if verdict is None or part.known else 1 + len(verdict.path)
            part.request.filled += kept
            if verdict is not None:
                plain_s = None if part.known else begun.costs[part.request.policy].plain_s
                steps[part.request] = self._emit(part, verdict, record, seconds, plain_s)
        return steps

    def _observe(self, begun: _Begun, verdicts: Sequence[Verdict | None]) -> list[Round | None]:
        """A record for each part that is a tree; the models learn from them."""
        parts, seconds = begun.parts, begun.clock.seconds
        writing = [part.request for part in parts if not part.known]
        if not writing:
            return [None] * len(parts)
        width, drafted = self._width(sum(part.size for part in parts)), ran(begun.proposals)
        nodes = sum(len(part.tree) for part in parts if not part.known)
        context, padding = mean_context(writing), width - 1 - nodes
        predicted = self._latency_of(len(self.requests)).predict(nodes, context, any(begun.proposals), padding)
        if drafted < len(self.requests) and "draft" in predicted:
            predicted = {**predicted, "draft": self._chooser.draft_s(drafted, context)}
        records = [
            None if part.known or verdict is None else _record(part, verdict, proposal, width, seconds, predicted)
            for part, verdict, proposal in zip(parts, verdicts, begun.proposals, strict=True)
        ]
        for part, record in zip(parts, records, strict=True):
            if record is not None:
                position = self._position(begun.costs[part.request.policy], drafted, len(writing), context)
                part.request.acceptance.observe(record, begun.typical, position)
                if len(writing) > 1:
                    part.request.own.observe(record, position=position)
        if len(writing) == len(parts) and records[0]:  # chunks are another kind of work
            whole = records[0]
            if len(writing) > 1:
                positions = _deepest(begun.proposals)
                whole = replace(
                    whole, context=context, n=nodes, drafted=any(begun.proposals), padding=padding, positions=positions
                )
            self._timed.append(_Timed(whole, len(writing), drafted, begun.first))
        return records

    def _position(self, costs: Costs, drafted: int, writing: int, context: int) -> float:
        """What one more position takes of one request's draft, in plain steps of one request."""
        if drafted in (0, len(self.requests)):  # priced before the round; no need to price it anew
            return costs.position
        return self._chooser.position_s(drafted, context) * writing / costs.plain_s

    def _learn_seconds(self, clock: Clock) -> None:
        """Every so many rounds, the more the more are known, and at once where one was far off. Each round's `observe`
        pays the same part of it, or one of them would look dear."""
        rounds, known = len(self._timed), self._latency_of(len(self.requests)).seen
        due = min(max(SECONDS_TOGETHER, known // ONE_IN), MOST_TOGETHER)
        if rounds >= due or (self._timed and self._timed[-1].surprises):
            start = time.perf_counter()
            self._learn()
            self._learning_s = (time.perf_counter() - start) / rounds
        clock.add("observe", self._learning_s)

    def _learn(self) -> None:
        """What the last rounds took. Drafting for some is another model's business than verifying beside all."""
        alike: dict[_Kind, list[Round]] = {}
        for timed in self._timed:
            round = timed.round
            if timed.requests > 1 and (draft_s := round.seconds.get("draft", 0.0)):
                model = self._latency_of(timed.drafted)
                model.observe_draft(draft_s, round.context, timed.first, round.positions)
                round = replace(round, seconds={verb: s for verb, s in round.seconds.items() if verb != "draft"})
            alike.setdefault(timed.kind, []).append(round)
        for kind, rounds in alike.items():
            self._latency_of(kind.requests).observe(*rounds, first=kind.first)
        self._timed.clear()

    def _width(self, tokens: int) -> int:
        """How many tokens a forward of `tokens` runs."""
        widths = self._rounds.widths
        return tokens if widths is None else next(width for width in widths if width >= tokens)

    def _emit(self, part: Part, verdict: Verdict, record: Round | None, seconds: float, plain_s: float | None) -> Step:
        """Commit a verdict to the request's text, and let go of the request if that ends it."""
        request = part.request
        if part.known:
            step = Step([verdict.bonus], None, [], None, time.perf_counter() - request.start, verdict.likelihoods)
        else:
            step = Step(verdict.tokens, part.tree, verdict.path, record, seconds, verdict.likelihoods, plain_s)
        step = _cut(step, request.remaining, request.stop_ids)
        request.sampler.commit(step.tokens)
        request.finished = request.remaining <= 0 or step.tokens[-1] in request.stop_ids
        if request.finished:
            self.leave(request)
        return step


def _deepest(proposals: Sequence[Proposal | None]) -> int | None:
    """How many positions were drafted: all requests' blocks are as long as the longest."""
    return max((found.positions for found in proposals if found and found.positions is not None), default=None)


def _record(
    part: Part,
    verdict: Verdict,
    proposal: Proposal | None,
    width: int,
    seconds: dict[str, float],
    predicted: Mapping[str, float],
) -> Round:
    tree, n = part.tree, len(part.tree)
    return Round(
        context=part.request.filled,
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
    )


def _cut(step: Step, remaining: int, stop_ids: frozenset[int]) -> Step:
    """End the step at its first stop token or where the answer is full."""
    tokens = step.tokens[:remaining]
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
    tokens = tokens if stop is None else tokens[: stop + 1]
    if len(tokens) == len(step.tokens):
        return step
    told = step.likelihoods and step.likelihoods[: len(tokens)]
    round = step.round and replace(step.round, path=step.round.path[: len(tokens) - 1])  # tokens, the last one as bonus
    return replace(step, tokens=tokens, path=step.path[: len(tokens)], round=round, likelihoods=told)
