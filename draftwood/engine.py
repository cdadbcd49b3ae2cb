"""The round: draft, grow, choose, verify, accept, commit, observe. The file to read first.

    context --draft--> lattice --grow--> tree --choose--> tree[:n] --verify--> logits, taps
            --accept--> verdict --commit--> cache, drafter state --observe--> latency, acceptance

The engine knows tokens, not text. Everything that belongs to one request lives in its `_Request`, so a stream
that is abandoned leaves nothing behind, and engines share nothing but the models they were given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftwood.accept import Verdict, accept
from draftwood.acceptance import AcceptanceModel
from draftwood.cache import KVCache
from draftwood.drafters.base import Drafter, Request
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel
from draftwood.offline_profile import ConvexCosts
from draftwood.policies.base import Costs, Outlook, Policy
from draftwood.sampling import Rule, Sampler, Sampling
from draftwood.target import Target, Verified
from draftwood.trace import Round
from draftwood.tree import Tree, root_only

PREFILL_CHUNK = 512  # tokens: bounds the mask and the activations of a long prompt


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one round emits: accepted draft tokens, then the bonus token."""

    tokens: list[int]
    tree: Tree | None  # the verified tree; None for the step that ends the prefill
    path: list[int]  # accepted nodes of `tree`; len(tokens) == len(path) + 1
    round: Round | None
    seconds: float


@dataclass(slots=True, eq=False)
class _Request:
    """One request's state. The last token of `sampler.tokens` is the root: committed, but in no cache yet."""

    cache: KVCache
    sampler: Sampler
    end: int  # tokens that prompt and answer may have together
    draft_state: Any
    row: int = 0

    @property
    def root(self) -> int:
        return self.sampler.tokens[-1]

    @property
    def remaining(self) -> int:
        return self.end - len(self.sampler.tokens)


@dataclass(slots=True)
class _Clock:
    """Seconds by verb of one round."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, verb: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[verb] = self.seconds.get(verb, 0.0) + time.perf_counter() - start


class Engine:
    """Tree speculative decoding of one request at a time with one target, drafter and policy."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        latency: LatencyModel,
        offline: ConvexCosts | None = None,
        remember: Callable[[], None] = lambda: None,
    ) -> None:
        """`offline` prices policies that need convex costs; `remember` is called when a run ends."""
        self.target, self.drafter, self.policy, self.latency = target, drafter, policy, latency
        self._offline, self._remember = offline, remember
        self._acceptance: dict[tuple[str, bool], AcceptanceModel] = {}
        target.tap(drafter.tap_layers if drafter else ())

    def run(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
        rule: Rule | None = None,
        policy: Policy | None = None,
    ) -> Generator[Step, None, None]:
        """Yield the rounds of one answer; the first step is the token that follows the prompt.

        Stops after `max_new_tokens`, or with the first token of `stop_ids` (which is emitted).
        Closing the iterator at any time is harmless.
        """
        sampling = sampling or Sampling()
        policy = policy or self.policy
        request = self._open(prompt, max_new_tokens, sampling, rule, policy)
        model = self._acceptance.setdefault((policy.name, sampling.greedy), AcceptanceModel())
        step = self._prefill(request)
        try:
            while True:
                step = _cut(step, request.remaining, stop_ids)
                request.sampler.commit(step.tokens)
                yield step
                if request.remaining <= 0 or step.tokens[-1] in stop_ids:
                    return
                step = self._round(request, policy, model)
        finally:
            self._remember()

    def check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raise BadInput for a request that cannot be served."""
        if not prompt:
            raise BadInput("The prompt is empty; give at least one token of text.")
        if max_new_tokens < 1:
            raise BadInput(f"max_new_tokens is {max_new_tokens}; it must be 1 or more.")
        limit = self.target.context_limit
        if len(prompt) >= limit:
            raise BadInput(
                f"The prompt has {len(prompt)} tokens, but {self.target.name} has a context window of {limit}; "
                "shorten the prompt or name a target with a longer window."
            )

    def _open(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        rule: Rule | None,
        policy: Policy,
    ) -> _Request:
        self.check(prompt, max_new_tokens)
        end = min(self.target.context_limit, len(prompt) + max_new_tokens)
        capacity = end + 1 + policy.n_max
        state = self.drafter.open(capacity) if self.drafter else None
        return _Request(self.target.new_cache(capacity), Sampler(sampling, prompt, rule), end, state)

    def _prefill(self, request: _Request) -> Step:
        start = time.perf_counter()
        prompt = request.sampler.tokens
        for at in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[at : at + PREFILL_CHUNK]
            result = self.target.prefill(chunk, request.cache, request.row)
            self._extend(request, chunk, result.taps)
        token = request.sampler.draw(result.logits[-1])
        return Step([token], None, [], None, time.perf_counter() - start)

    def _round(self, request: _Request, policy: Policy, model: AcceptanceModel) -> Step:
        start = time.perf_counter()
        clock = _Clock()
        context = request.cache.lengths[request.row]
        with clock("choose"):
            costs = self._costs(policy, context)
            drafts = self._drafts(request, policy, model.outlook(costs))
        tree = self._draft(request, policy, clock) if drafts else root_only(request.root)
        with clock("choose"):
            mass, depths = tree.mass[1:], tree.depths[1:]
            tree = tree[: policy.choose(model.calibrate(mass, depths) if policy.calibrated else mass, costs)]
        with clock("verify"):
            plan = self.target.plan([tree], request.cache, [request.row])
            result = self.target.verify(plan, request.cache)
        with clock("accept"):
            draw = request.sampler.draw
            verdict = accept(tree, lambda node, path: draw(result.logits[node], path))
        with clock("commit"):
            self._commit(request, verdict, result)
        with clock("observe"):
            record = Round(
                context,
                len(tree),
                drafts,
                tree.mass[1:],
                tree.depths[1:],
                len(verdict.path),
                clock.seconds,
                self.latency.predict_round(len(tree), context, drafts),
            )
            self.latency.observe(record)
            model.observe(record)
        return Step(verdict.tokens, tree, verdict.path, record, time.perf_counter() - start)

    def _costs(self, policy: Policy, context: int) -> Costs:
        if policy.convex and self._offline:
            return self._offline.costs(policy.n_max, context)
        return self.latency.costs(policy.n_max, context)

    def _drafts(self, request: _Request, policy: Policy, outlook: Outlook) -> bool:
        return self.drafter is not None and request.remaining > 1 and policy.drafts(outlook)

    def _draft(self, request: _Request, policy: Policy, clock: _Clock) -> Tree:
        assert self.drafter is not None
        with clock("draft"):
            asked = Request(request.draft_state, request.root, policy.width)
            draft = self.drafter.draft([asked])[0]
        with clock("grow"):
            # A node at depth d can only be emitted if d more tokens fit before the bonus token.
            return policy.grow(draft, request.root).up_to_depth(request.remaining - 1)

    def _commit(self, request: _Request, verdict: Verdict, result: Verified) -> None:
        root = request.root
        request.cache.commit(request.row, verdict.path)
        taps = None if result.taps is None else result.taps[[0, *verdict.path]]
        self._extend(request, [root, *verdict.accepted], taps)

    def _extend(self, request: _Request, tokens: Sequence[int], taps: Tensor | None) -> None:
        if self.drafter is not None:
            self.drafter.extend(request.draft_state, list(tokens), taps)


def _cut(step: Step, remaining: int, stop_ids: frozenset[int]) -> Step:
    """End the step at its first stop token or where the answer is full."""
    tokens = step.tokens[:remaining]
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
    tokens = tokens if stop is None else tokens[: stop + 1]
    if len(tokens) == len(step.tokens):
        return step
    return Step(tokens, step.tree, step.path[: len(tokens)], step.round, step.seconds)
