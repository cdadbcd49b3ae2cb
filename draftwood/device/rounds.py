"""The rounds of a request on the device: in each round the host starts two stages, and two short reports come back.

    host      choose n    start verify n, start the next draft   (text leaves)   verdict: stops, observe    tree
    device                verify, accept, commit | draft, grow
    side                                         | verdict to the host

The verdict travels on a side stream while the device drafts. The device has to wait only while the tree travels, from
which the host chooses the next width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from draftwood.accept import Verdict
from draftwood.clock import Clock
from draftwood.device.graphs import Graphs, Span, Stage
from draftwood.device.stages import Stages
from draftwood.device.state import OWED, State
from draftwood.drafters.base import Drafter, Learner, Placeable
from draftwood.drafting import Proposal
from draftwood.errors import BadInput
from draftwood.grow import Growth
from draftwood.lean import Lean
from draftwood.memory import require_request
from draftwood.plan import Verified
from draftwood.policies.base import Policy
from draftwood.request import Part, Request
from draftwood.rotary import Rotary
from draftwood.rounds import Prefix
from draftwood.sampling import Rule
from draftwood.target import Target
from draftwood.tree import Tree

MOST_STAGES = 16  # kinds of trees that buffers and graphs are kept for; a client may name any number
LEAST_CAPACITY = 512  # tokens; capacities are powers of two, so that few requests need new buffers and graphs

Key = tuple[Hashable, ...]
Make = Callable[[Lean, State], Stages]
P = ParamSpec("P")
T = TypeVar("T")


class Device:
    """What rounds on the device share between requests: buffers for one request at a time, stages and their graphs."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self._target, self.drafter = target, drafter
        # Whether trees come from the host, of a drafter that has no form with static buffers.
        self.hosted = drafter is not None and not isinstance(drafter, Placeable)
        self._state: State | None = None
        self._stages: dict[Key, Stages] = {}
        self._rotary: Rotary | None = None
        self.graphs = Graphs(target.device)
        self.busy = False

    def declines(self, policy: Policy, rule: Rule | None) -> str | None:
        """Why the host must run the rounds of a request; None if they can run here."""
        if not isinstance(self._target.path, Lean):
            return f"{self._target.name} takes the {self._target.path.name} path, which cannot be captured"
        if self.hosted and self.drafter is not None and self.drafter.tap_layers:
            return f"the drafter {self.drafter.name} reads the target's layers on the host"
        if not self.hosted and not isinstance(policy.grow, Growth):
            return f"the policy {policy.name} grows its trees with a function of its own"
        if not self.hosted and isinstance(policy.grow, Growth) and policy.grow.spine:
            return f"the policy {policy.name} keeps the whole likeliest chain, which is grown on the host"
        if rule is not None:
            return "logits processors run on the host"
        if self.graphs.short:
            return "there was too little memory for its CUDA graphs"
        if self.busy:
            return "another answer of this engine is being written on the device"
        return None

    @torch.inference_mode(False)
    def open(self, policy: Policy, end: int, key: Key, make: Make) -> tuple[State, Stages]:
        """Buffers and stages for one request of at most `end` tokens, until `close`; `make` makes the stages of `key`.

        Raises BadInput if they do not fit into the device's memory.
        """
        assert isinstance(self._target.path, Lean)
        needed = end + 1 + policy.n_max
        path = self._target.path
        moved = path.rotary is not self._rotary  # the model's owner has moved its weights: graphs read the old ones
        if self._state is None or self._state.capacity < needed or moved:
            self._state, self._stages = None, {}  # freed before the new ones are made
            self.graphs.clear()
            self._state = self._roomy(needed, 1 + policy.n_max)
        if key not in self._stages:
            if len(self._stages) == MOST_STAGES:
                self._stages = {}
                self.graphs.clear()
            self._stages[key] = make(path, self._state)
        self.busy = True
        return self._state, self._stages[key]

    def close(self) -> None:
        self.busy = False

    def nbytes(self) -> dict[str, int]:
        """Device memory held between requests."""
        return {"buffers": self._state.nbytes() if self._state else 0, "graphs": self.graphs.nbytes}

    def _roomy(self, needed: int, width: int) -> State:
        """A state with room for longer requests, too, unless memory is too short for that."""
        roomy = min(max(LEAST_CAPACITY, 1 << (needed - 1).bit_length()), self._target.context_limit + width)
        roomy = max(roomy, needed)
        with suppress(BadInput):
            return self._allocate(roomy, width)
        return self._allocate(needed, width)

    def _allocate(self, capacity: int, width: int) -> State:
        target, device = self._target, self._target.device
        require_request(target, self.drafter, capacity, width, self.hosted and isinstance(self.drafter, Learner))
        assert isinstance(target.path, Lean)
        self._rotary = target.path.rotary
        self._rotary.reserve(capacity)
        shape = target.path.shape
        kv = torch.zeros(
            target.num_layers, 2, shape.kv_heads, capacity, shape.head_dim, dtype=target.dtype, device=device
        )
        if not isinstance(self.drafter, Placeable):
            return State(kv, target.vocab_size, None, (0, 0))
        owed = OWED + 1 + self.drafter.max_depth
        placed = self.drafter.place(capacity + owed)  # all of it is read, the nonsense behind what is owed, too
        return State(kv, target.vocab_size, placed, (owed, len(self.drafter.tap_layers) * target.hidden_size))


def stages_of(policy: Policy) -> tuple[Key, Make]:
    """The key under which stages for a policy are kept, and how they are made."""
    grow = policy.grow
    assert isinstance(grow, Growth)
    return (grow, policy.width), partial(Stages, growth=grow, width=policy.width)


def _there(method: Callable[Concatenate[DeviceRounds, P], T]) -> Callable[Concatenate[DeviceRounds, P], T]:
    """Run a method with the target's device as PyTorch's current one, whose streams and events are the default."""

    @wraps(method)
    def run(self: DeviceRounds, *args: P.args, **more: P.kwargs) -> T:
        with torch.cuda.device(self.index):
            return method(self, *args, **more)

    return run


class DeviceRounds:
    """One request's rounds on `device`: a batch of one."""

    ahead = True

    def __init__(self, device: Device, target: Target) -> None:
        self._device, self._target = device, target
        self.index = target.device.index if target.device.type == "cuda" else -1  # PyTorch's for none

    @property
    def widths(self) -> tuple[int, ...]:
        return self._stages.widths

    @_there
    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        assert not self._device.busy and prefix is None, "buffers are for one request, from its first token on"
        policy, self._request = request.policy, request
        self._key, make = self._ways(policy)
        self._state, self._stages = self._device.open(policy, request.end, self._key, make)
        self._state.most.fill_(policy.n_max)
        self._state.cache.rewind(0, 0)
        self._report = self._stages.report
        self._drafts = False  # whether the stages of this round end with a draft
        self._owed = 0  # tokens that the drafter has not read
        self._verified: Tree | int | None = None  # a tree, the token that ends the prompt, or None after other chunks
        self._drafting = self._verifying = Span(self._target.device)
        self._settled: float | None = None  # when the verdict before this one was here
        self._hidden = 0.0  # seconds since then that the device spent on a draft

    def leave(self, request: Request) -> None:
        self._device.close()

    @_there
    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        return [self._propose(asked, clock) for asked in drafts]

    @_there
    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        (part,) = parts
        if part.known:
            self._verified = self._read(part)
        else:
            self._verify(part.tree)

    @_there
    def draft_ahead(self, drafts: Sequence[bool]) -> None:
        (self._drafts,) = drafts
        if self._drafts:
            self._start_draft()

    @_there
    def settle(self, clock: Clock) -> list[Verdict | None]:
        if not isinstance(self._verified, Tree):
            return [None if self._verified is None else Verdict([], [], self._verified)]
        early = self._report.verdict_mail.here  # before the host asks: how long it was under way is not known
        verdict, now = self._report.verdict(self._verified), time.perf_counter()
        begun, seconds = self._verifying.begun, self._verifying.seconds
        if not self.ahead:  # nothing else is done meanwhile: the launch and the verdict's way are waited for, too
            seconds = now - begun
        clock.add("verify", seconds)
        if self._settled is not None:
            travel = 0.0 if early else now - begun - seconds
            clock.exposed = max(begun - self._settled - self._hidden, 0.0) + max(travel, 0.0)
        if self.ahead:  # else the device works for no longer than the host waits, and its laps are all of it
            self._settled = now
        if not self._drafts:
            self._owed += len(verdict.tokens)
        return [verdict]

    def _ways(self, policy: Policy) -> tuple[Key, Make]:
        return stages_of(policy)

    @torch.inference_mode()
    def _read(self, part: Part) -> int | None:
        """Commit a chunk of the prompt; the token after it if it is the last one."""
        state, request, chunk = self._state, part.request, part.tree.tokens.tolist()
        result = self._target.prefill(chunk, state.cache)
        self._hear(part, result)
        if not part.ends_prompt:
            return None
        sampler = request.sampler
        token = sampler.draw(result.logits[-1])
        state.reset(sampler.sampling, [*sampler.tokens, token], request.end, request.foresees)
        self._prepare()
        return token

    def _hear(self, part: Part, found: Verified) -> None:
        """Let the drafter read a chunk of the prompt."""
        if self._stages.drafter is not None and found.taps is not None:
            self._stages.drafter.extend(found.taps, torch.tensor(part.request.filled, device=found.taps.device))

    def _propose(self, drafts: bool, clock: Clock) -> Proposal | None:
        if drafts and not self._drafts:  # nothing ran ahead of the first round
            self._start_draft()
        self._drafts, self._hidden = False, 0.0
        if not drafts:
            return None
        tree, seconds = self._report.tree(), self._drafting.seconds
        clock.add("draft", seconds)
        if self._target.device.type == "cuda":  # elsewhere it was over before the verdict was asked for
            self._hidden = seconds
        return Proposal(tree, tree)  # the candidates stay on the device

    def _verify(self, tree: Tree) -> None:
        self._verified = tree
        self._state.n.fill_(len(tree))
        width = next(width for width in self.widths if width >= 1 + len(tree))
        if self._stages.drafter is not None and self._owed >= OWED:
            self._run(*self._catch_up_stage())
            self._owed = 0
        self._verifying = self._run(*self._verify_stage(width))
        self._report.send_verdict()

    def _prepare(self) -> None:
        """Capture the draft and every width that the policy can use; the widest first: the others use its memory."""
        drafts = [self._catch_up_stage(), self._draft_stage()] if self._stages.drafter is not None else []
        for key, stage in (*map(self._verify_stage, reversed(self.widths)), *drafts):
            self._device.graphs.prepare(key, stage, self._stages.changing)

    def _start_draft(self) -> None:
        if self._request.policy.calibrated:
            self._state.most.fill_(self._request.acceptance.nodes)
        self._drafting = self._run(*self._draft_stage())
        self._owed = 0
        self._report.tree_mail.send()

    def _catch_up_stage(self) -> tuple[Hashable, Stage]:
        return (*self._key, "catch up"), self._stages.catch_up

    def _draft_stage(self) -> tuple[Hashable, Stage]:
        return (*self._key, "draft ahead" if self._state.dice.foresees else "draft"), self._stages.draft

    def _verify_stage(self, width: int) -> tuple[Hashable, Stage]:
        return (*self._key, width, self._state.dice.kind), partial(self._stages.verify, width)

    def _run(self, key: Hashable, stage: Stage) -> Span:
        self._device.graphs.prepare(key, stage, self._stages.changing)
        span = Span(self._target.device)  # a capture is nothing that the next round will pay
        self._device.graphs.run(key, stage)
        span.end()
        return span
