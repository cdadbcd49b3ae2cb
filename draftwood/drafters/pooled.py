"""Several drafters at once: their proposals, and what the target said after each token, in one heap.

A proposal is a lattice, a tree, or an opinion that is asked for node by node (`Voice`). `pool.py` weighs each by what
it was worth so far, over all requests. While pooling is not worth its time, the first lattice alone is the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from draftwood.drafters.base import Carded, Drafter, Learner, Request, Stateful, state_bytes
from draftwood.drafters.lattice import candidates
from draftwood.errors import BadInput
from draftwood.experts import ConditionalExpert, Expert, LatticeExpert, TreeExpert
from draftwood.latency import Work
from draftwood.native.pooled import quicker
from draftwood.native.successors import quickest
from draftwood.plan import taps_of
from draftwood.pool import Pool, View
from draftwood.pool_gain import Case, Gain, Gains
from draftwood.pool_weights import Weights
from draftwood.successors import LEARNED, Array, Successors
from draftwood.target import Target
from draftwood.tree import Draft, Ints, Tree
from draftwood.trellis import Block

CANDIDATES = 16  # least candidates of each depth that a lattice is asked for
MOST_SAID = 256  # rounds whose logits wait for a draft before the table learns them: by then none is left to be judged


class Voice(ABC):
    """A drafter that only rates continuations of a path. Its state follows the prefix as any drafter's does."""

    name: str
    max_depth: int

    @abstractmethod
    def open(self, capacity: int) -> Any: ...

    @abstractmethod
    def extend(self, state: Any, tokens: list[int]) -> None: ...

    @abstractmethod
    def rewind(self, state: Any, length: int) -> None: ...

    @abstractmethod
    def fresh(self) -> Voice:
        """The same with nothing learned from earlier requests."""

    @abstractmethod
    def experts(self, state: Any, root: int, source: int) -> list[Expert]:
        """Its opinions on paths below `root`."""


class Recycling:
    """`recycling`: what the target predicted after the same token elsewhere (Token Recycling, arXiv 2408.08696)."""

    name = "recycling"
    max_depth = 8

    def __init__(self) -> None:
        self.table = Successors()

    @classmethod
    def load(cls, argument: str, target: Target) -> Recycling:
        """It has no parameters. Raises BadInput."""
        if argument:
            raise BadInput(f"recycling:{argument}: recycling takes no parameter; write recycling.")
        return cls()

    def fresh(self) -> Recycling:
        return Recycling()


Part = Drafter | Voice | Recycling
Said = tuple[Sequence[int], Ints, Array]  # tokens, their followers and probabilities, not in the table yet


@dataclass(slots=True, eq=False)
class Expectation:
    """What a draft expected of which nothing was verified: the text may still go on that way."""

    pool: Pool
    views: list[tuple[View, int]]  # along the path, with their first choices; the next one last

    def hears(self, tokens: Sequence[int]) -> bool:
        """Learn from what the target wrote next. Returns whether the text may go on as expected."""
        for token in tokens:
            if not self.views:
                return False
            view, expected = self.views.pop()
            self.pool.learn_at(view, token)
            if token != expected:
                return False
        return bool(self.views)


@dataclass(slots=True, eq=False)
class PooledState:
    states: list[Any]  # of each part
    pool: Pool | None = None  # the last draft, as long as it can be learned from
    heard: list[int] = field(default_factory=list)  # what was committed since, the draft's root first
    expectations: list[Expectation] = field(default_factory=list)  # of earlier drafts that the text still follows
    gain: Gain = field(default_factory=Gain)  # how what pooling brings differs in this text

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledState:
        return PooledState(deepcopy(self.states, memo))  # not the draft: it refers to tables that all requests share


@dataclass(frozen=True, slots=True)
class _Plan:
    """One draft in the making: its request, and what each part proposes."""

    request: Request
    case: Case
    voices: dict[int, list[Expert]]
    drafts: dict[int, Draft] = field(default_factory=dict)


class Pooled(Learner, Carded, Stateful):
    """Drafters, voices and a successor table as one drafter."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.name = "+".join(part.name for part in parts)
        self._drafters = {i: part for i, part in enumerate(parts) if not isinstance(part, (Voice, Recycling))}
        self.tap_layers = tuple(dict.fromkeys(layer for part in self._drafters.values() for layer in part.tap_layers))
        self.max_depth = max(part.max_depth for part in parts)
        self._recycling = next((part for part in parts if isinstance(part, Recycling)), None)
        self._said: list[Said] = []
        self._learn, self._quicker = quickest(), quicker()
        self.weights, self.gains = Weights(), Gains()
        self._listens = True

    @staticmethod
    def comments(part: object) -> bool:
        """Whether `part` is no drafter by itself."""
        return isinstance(part, (Voice, Recycling))

    @property
    def promised_tau(self) -> float | None:
        """The best that one of them promises: pooling is meant to add to it."""
        promises = [part.promised_tau for part in self.parts if isinstance(part, Carded)]
        return max((tau for tau in promises if tau is not None), default=None)

    def state_bytes(self, capacity: int) -> int:
        return sum(state_bytes(part, capacity) for part in self.parts)

    def fresh(self) -> Pooled:
        return Pooled([part.fresh() if isinstance(part, (Voice, Recycling)) else part for part in self.parts])

    def authors(self, tree: Tree) -> list[str]:
        """Which part each node of a tree is from, the root included; for a lattice's tree, the drafters together."""
        if tree.sources is None:
            return ["+".join(part.name for part in self._drafters.values())] * len(tree.tokens)
        return [self.parts[source].name for source in tree.sources]

    def open(self, capacity: int) -> PooledState:
        return PooledState([None if isinstance(part, Recycling) else part.open(capacity) for part in self.parts])

    def extend(self, state: PooledState, tokens: list[int], taps: Tensor | None) -> None:
        for part, own in zip(self.parts, state.states, strict=True):
            if isinstance(part, Voice):
                part.extend(own, tokens)
            elif not isinstance(part, Recycling):
                part.extend(own, tokens, taps_of(part.tap_layers, self.tap_layers, taps))
        if state.heard:  # nothing was drafted in between: another text may go on from here
            state.pool, state.expectations = None, []
        elif state.pool is not None or state.expectations:
            state.heard += tokens

    def rewind(self, state: PooledState, length: int) -> None:
        state.pool, state.expectations, state.gain = None, [], Gain()
        for part, own in zip(self.parts, state.states, strict=True):
            if not isinstance(part, Recycling):
                part.rewind(own, length)

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One proposal per request: the first lattice alone, or a conditional draft of everything."""
        for request in requests:
            self._hear(request)
        self._take_over()
        plans = [self._plan(request) for request in requests]
        asked = [plan for plan in plans if plan.case.asks]
        for i, part in self._drafters.items() if asked else ():
            for plan, draft in zip(asked, part.draft([_own(plan.request, i) for plan in asked]), strict=True):
                plan.drafts[i] = draft
        self._listens = False
        return [self._pool(plan) for plan in plans]

    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        if self._recycling is not None:
            followers, logp = candidates(logits, LEARNED)
            if len(self._said) == MOST_SAID:
                self._take_over()
            said = np.nan_to_num(np.exp(logp.cpu().numpy(), dtype=np.float64))  # a table would never forget a NaN
            self._said.append((tokens, followers.cpu().numpy(), said))

    def work(self, context: int) -> Work:
        """The drafters' work together. Pooling itself takes host time, which the latency model learns."""
        works = [part.work(context) for part in self._drafters.values()]
        return Work(
            sum(work.flops for work in works),
            sum(work.bytes for work in works),
            sum(work.launches for work in works),
            sum(work.shared for work in works),
        )

    def _hear(self, request: Request) -> None:
        """Learn what the target made of the request's last draft, and of earlier ones that the text still follows."""
        state: PooledState = request.state
        written = [*state.heard[1:], request.root]
        state.expectations = [kept for kept in state.expectations if kept.hears(written)]
        if state.pool is not None:
            state.pool.learn(written)
            if len(written) == 1:
                state.expectations.append(Expectation(state.pool, state.pool.expected(request.root)[::-1]))
        state.heard = []

    def _take_over(self) -> None:
        """Let the table learn what the target said. Drafts are judged first, or the table would know their outcome."""
        if self._recycling is not None:
            for said in self._said:
                self._learn(self._recycling.table, *said)
        self._said.clear()

    def _plan(self, request: Request) -> _Plan:
        """What the voices say after a request's root, and whether the other drafters are asked, too."""
        voices = {
            i: part.experts(own, request.root, i)
            for i, (part, own) in enumerate(zip(self.parts, request.state.states, strict=True))
            if isinstance(part, Voice)
        }
        match = max((expert.match for experts in voices.values() for expert in experts), default=0)
        return _Plan(request, self.gains.case(match, request.state.gain), voices)

    def _pool(self, plan: _Plan) -> Draft:
        request, case, drafts = plan.request, plan.case, plan.drafts
        state: PooledState = request.state
        lattices = [i for i, draft in drafts.items() if isinstance(draft, Block)]
        first = drafts[lattices[0]] if lattices else None
        assert first is None or isinstance(first, Block)
        if first is not None and not case.pools:
            state.pool = None
            return first
        self._listens = True
        experts = [
            expert for i in range(len(self.parts)) for expert in plan.voices.get(i) or _spoken(drafts.get(i), first, i)
        ]
        table = self._recycling.table if self._recycling else None
        own, most = lattices[0] if lattices else 0, self.max_depth
        sources = own, self._learned
        state.pool = Pool(request.root, first, table, experts, self.weights, most, *sources, self._quicker, case)
        return state.pool if first is None or case.pays else first

    @property
    def listens(self) -> bool:
        """Whether a draft of this round is pooled, even if only to be judged, and there is a table that learns."""
        return self._listens and self._recycling is not None

    @property
    def _learned(self) -> int:
        """The source of tokens that only the successor table knows."""
        return next((i for i, part in enumerate(self.parts) if isinstance(part, Recycling)), 0)


def _own(request: Request, part: int) -> Request:
    """The request for one part, with more candidates: the one the pool prefers may be far down in its order."""
    state = request.state.states[part]
    return Request(state, request.root, max(request.width, CANDIDATES), request.depth, request.ahead)


def _spoken(draft: Draft | None, first: Draft | None, source: int) -> list[Expert]:
    """A drafter's proposal as an expert, unless it is the block that others are weighed against."""
    if draft is None or draft is first:
        return []
    if isinstance(draft, Tree):
        return [TreeExpert(draft, source)]
    return [LatticeExpert(draft, source) if isinstance(draft, Block) else ConditionalExpert(draft, source)]
