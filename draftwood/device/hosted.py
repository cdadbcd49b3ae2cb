"""Rounds whose target runs on the device and whose drafts are made on the host, by drafters that read only the text.

    host      draft, grow, choose n    start verify n                             verdict: stops, learn
    device                             the tree's relations, verify, accept, commit

The device waits while the host drafts. But its forwards are captured: for a small model they take a third of the time
of forwards whose operators the host launches one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from draftwood.accept import Verdict
from draftwood.clock import Clock
from draftwood.device.growth import grower
from draftwood.device.mail import Post
from draftwood.device.rounds import Device, DeviceRounds, Key, Make
from draftwood.device.stages import Stages
from draftwood.device.state import State
from draftwood.drafters.base import Drafter, Learner
from draftwood.drafting import Drafting, Proposal
from draftwood.grow import Growth
from draftwood.lean import Lean
from draftwood.plan import Verified
from draftwood.policies.base import Policy
from draftwood.request import Part, Request
from draftwood.rounds import Prefix
from draftwood.target import Target
from draftwood.tree import Tree


class HostedStages(Stages):
    """The half of a round that runs on the device. Trees come from the host."""

    def __init__(self, model: Lean, state: State, policy: Policy, drafter: Drafter) -> None:
        self.drafter = None
        self._hold(model, state, policy.n_max, min(drafter.max_depth, policy.n_max), is_chain=False)
        self._grower = grower(Growth(policy.n_max), 1, 1, state.kv.device)  # it tells who sees whom, and grows nothing
        self._given = Post((3, 1 + policy.n_max), state.kv.device)
        listens = isinstance(drafter, Learner)
        shape = 1 + policy.n_max, len(state.dice.seen)
        self.said = state.kv.new_empty(shape) if listens else None  # logits, for drafters that learn from them

    def give(self, tree: Tree) -> None:
        """Send a tree to the device without waiting."""
        self._given.fill((tree.tokens, tree.parents.clip(min=0), tree.depths), rest=(0, 0, 1))

    @torch.inference_mode()
    def verify(self, width: int) -> None:
        if width > 1:
            self._relate()
        found = self.forward(width)
        if self.said is not None:
            self.said[:width].copy_(found.logits)
        self.commit(self.accept(width, found.logits), found.taps)

    def _relate(self) -> None:
        """Fill the buffers that `forward` and `accept` read, from the tree that was given."""
        tree = self._tree
        for buffer, row in zip((tree.tokens, tree.parents, tree.depths), self._given.buffer, strict=True):
            buffer.copy_(row)
        self._grower.relate(tree.parents, self._line, self._seen, self._bits)


class HostedRounds(DeviceRounds):
    """One request's rounds, drafted by `device.drafter` on the host."""

    ahead = False
    _stages: HostedStages

    def __init__(self, device: Device, target: Target) -> None:
        assert device.drafter is not None
        super().__init__(device, target)
        self._drafter, self._proposer = device.drafter, Drafting(device.drafter, target)
        self._part: Part | None = None
        self._said: Tensor | None = None  # logits of what was verified, the root first

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        state = self._drafter.open(request.capacity)  # may fail, and then nothing has been taken yet
        super().join(request, prefix)
        self._proposer.join(request, state)

    def leave(self, request: Request) -> None:
        try:
            self._proposer.leave(request)
        finally:
            super().leave(request)

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        return self._proposer.propose(requests, drafts, clock)

    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        (self._part,) = parts
        super().verify(parts, clock)

    def settle(self, clock: Clock) -> list[Verdict | None]:
        (verdict,) = super().settle(clock)
        part = self._part
        assert part is not None
        with clock("commit"):
            nodes = range(part.size) if part.known or verdict is None else [0, *verdict.path]
            self._proposer.commit(part, nodes, None, 0)
        if verdict is not None and self._proposer.listens and self._said is not None:
            with clock("observe"):
                self._proposer.learn([part], [verdict], self._said)
        return [verdict]

    def _ways(self, policy: Policy) -> tuple[Key, Make]:
        return ("hosted", policy.n_max), partial(HostedStages, policy=policy, drafter=self._drafter)

    def _verify(self, tree: Tree) -> None:
        if len(tree):
            self._stages.give(tree)
        self._said = self._stages.said
        super()._verify(tree)

    def _hear(self, part: Part, found: Verified) -> None:
        self._said = found.logits[-1:]
