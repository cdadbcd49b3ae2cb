"""The round: draft, grow, choose, verify, accept, commit, observe. The file to read first.

    context --draft--> lattice --grow--> tree --choose--> tree[:n] --verify--> logits, taps
            --accept--> verdict --commit--> cache, drafter state --observe--> latency, acceptance

One loop drives the verbs, which run on the host (`rounds.py`) or, with static shapes, on the device
(`device/rounds.py`). The engine knows tokens, not text. Everything that belongs to one request lives in its `_Request`,
so a stream that is abandoned leaves nothing behind, and engines share nothing but the models they were given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from draftwood.acceptance import AcceptanceModel, temperature_bucket
from draftwood.device.rounds import Device, DeviceRounds
from draftwood.drafters.base import Drafter
from draftwood.errors import BadInput, nearest
from draftwood.latency import LatencyModel
from draftwood.offline_profile import ConvexCosts
from draftwood.policies.base import Costs, Outlook, Policy
from draftwood.rounds import Clock, HostRounds, Rounds
from draftwood.sampling import Rule, Sampler, Sampling
from draftwood.target import Target
from draftwood.trace import Round
from draftwood.tree import Lattice, Tree, root_only

BACKENDS = ("auto", "host", "device")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one round emits: accepted draft tokens, then the bonus token."""

    tokens: list[int]
    tree: Tree | None  # the verified tree; None for the step that ends the prefill
    path: list[int]  # accepted nodes of `tree`; len(tokens) == len(path) + 1
    round: Round | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Backend:
    """Where rounds run, `host` or `device`, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """One request. The last token of `sampler.tokens` is the root: committed, but in no cache yet."""

    sampler: Sampler
    end: int  # tokens that prompt and answer may have together
    policy: Policy
    acceptance: AcceptanceModel
    rounds: Rounds

    @property
    def root(self) -> int:
        return self.sampler.tokens[-1]

    @property
    def context(self) -> int:
        """Tokens in the caches."""
        return len(self.sampler.tokens) - 1

    @property
    def remaining(self) -> int:
        return self.end - len(self.sampler.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A round whose tree has gone to the target."""

    start: float
    clock: Clock
    tree: Tree
    draft: Lattice | Tree | None  # what the tree was grown from

    @property
    def drafted(self) -> bool:
        return self.draft is not None


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
        backend: str = "auto",
    ) -> None:
        """`offline` prices policies that need convex costs; `remember` is called when a run ends.

        `backend` is auto (the device where it is a GPU and can run all of a request's rounds), host or device.

        Raises
        ------
        BadInput: an unknown backend, or the device for parts that cannot run there.
        """
        self.target, self.drafter, self.policy, self.latency = target, drafter, policy, latency
        self._offline, self._remember = offline, remember
        self._acceptance: dict[tuple[str, float], AcceptanceModel] = {}
        self._asked, self.device = backend, Device(target, drafter)
        if backend not in BACKENDS:
            raise BadInput(
                f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}.{nearest(backend, BACKENDS)}"
            )
        if backend == "device" and (reason := self.device.declines(policy, None)):
            raise BadInput(f"Rounds cannot run on the device: {reason}; use the backend auto or host.")
        target.tap(drafter.tap_layers if drafter else ())

    def backend(self, policy: Policy | None = None, rule: Rule | None = None) -> Backend:
        """Where the rounds of a request run that starts now."""
        if self._asked == "host":
            return Backend("host", "it was asked for")
        if self._asked == "auto" and self.target.device.type != "cuda":
            return Backend("host", f"on a {self.target.device.type} nothing is gained by static shapes")
        reason = self.device.declines(policy or self.policy, rule)
        return Backend("device", "every part of the round can run there") if reason is None else Backend("host", reason)

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
        request = self._open(prompt, max_new_tokens, sampling or Sampling(), rule, policy or self.policy)
        try:
            step = self._prefill(request)
            while True:
                step = _cut(step, request.remaining, stop_ids)
                request.sampler.commit(step.tokens)
                if request.remaining <= 0 or step.tokens[-1] in stop_ids:
                    yield step
                    return
                begun = self._begin(request) if request.rounds.ahead else None
                yield step
                step = self._end(request, begun or self._begin(request))
        finally:
            request.rounds.close()
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
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, rule: Rule | None, policy: Policy
    ) -> _Request:
        self.check(prompt, max_new_tokens)
        end = min(self.target.context_limit, len(prompt) + max_new_tokens)
        sampler = Sampler(sampling, prompt, rule)
        acceptance = self._acceptance.setdefault(
            (policy.name, temperature_bucket(sampling.temperature)), AcceptanceModel()
        )
        rounds: Rounds
        if self.backend(policy, rule).name == "device":
            rounds = DeviceRounds(self.device, self.target, policy, sampler, end)
        else:
            rounds = HostRounds(self.target, self.drafter, policy, sampler, end)
        return _Request(sampler, end, policy, acceptance, rounds)

    def _prefill(self, request: _Request) -> Step:
        start = time.perf_counter()
        token = request.rounds.prefill()
        return Step([token], None, [], None, time.perf_counter() - start)

    def _begin(self, request: _Request) -> _Begun:
        """draft, grow, choose, verify."""
        start, clock, rounds, policy = time.perf_counter(), Clock(), request.rounds, request.policy
        with clock("choose"):
            costs = self._costs(request)
            drafts = self._drafts(request, request.acceptance.outlook(costs))
        tree = rounds.propose(drafts, clock)
        draft = tree if rounds.lattice is None else rounds.lattice
        with clock("choose"):
            tree = root_only(request.root) if tree is None else tree
            mass, depths = tree.mass[1:], tree.depths[1:]
            mass = request.acceptance.calibrate(mass, depths) if policy.calibrated else mass
            tree = tree[: policy.choose(mass, costs)]
        rounds.verify(tree, clock)
        return _Begun(start, clock, tree, draft)

    def _end(self, request: _Request, begun: _Begun) -> Step:
        """accept, commit, observe."""
        context, clock, tree = request.context, begun.clock, begun.tree
        verdict = request.rounds.settle(clock)
        with clock("observe"):
            padding = _padding(1 + len(tree), request.rounds.widths)
            record = Round(
                context,
                len(tree),
                begun.drafted,
                tree.mass[1:],
                tree.depths[1:],
                verdict.path,
                clock.seconds,
                self.latency.predict(len(tree), context, begun.drafted, padding),
                padding,
                begun.draft,
            )
            self.latency.observe(record)
            request.acceptance.observe(record)
        return Step(verdict.tokens, tree, verdict.path, record, time.perf_counter() - begun.start)

    def _costs(self, request: _Request) -> Costs:
        policy, context, widths = request.policy, request.context, request.rounds.widths
        if policy.convex and self._offline:
            return self._offline.costs(policy.n_max, context)
        if widths is None:
            return self.latency.costs(policy.n_max, context)
        costs = self.latency.costs(widths[-1] - 1, context)
        return costs if policy.convex else costs.stepped(widths)  # a step would look to it like the end

    def _drafts(self, request: _Request, outlook: Outlook) -> bool:
        return self.drafter is not None and request.remaining > 1 and request.policy.drafts(outlook)


def _padding(tokens: int, widths: Sequence[int] | None) -> int:
    """Tokens that a forward of `tokens` runs besides, where only `widths` can run."""
    return 0 if widths is None else next(width for width in widths if width >= tokens) - tokens


def _cut(step: Step, remaining: int, stop_ids: frozenset[int]) -> Step:
    """End the step at its first stop token or where the answer is full."""
    tokens = step.tokens[:remaining]
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
    tokens = tokens if stop is None else tokens[: stop + 1]
    if len(tokens) == len(step.tokens):
        return step
    return Step(tokens, step.tree, step.path[: len(tokens)], step.round, step.seconds)
