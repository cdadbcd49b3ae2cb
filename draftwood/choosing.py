"""Which requests are drafted for in a round, and how much of each tree is verified: policies decide at its prices.

A lone request's policy decides for it alone. In a batch, a policy that can decide for several requests at once
(`Joint`) decides for all of its requests together, beside the trees of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan

from draftwood.drafting import Proposal, ran
from draftwood.latency import LatencyModel
from draftwood.native.chances import quickest
from draftwood.offline_profile import ConvexCosts
from draftwood.policies.base import OPTIMISM, Costs, Joint, Policy
from draftwood.request import Request
from draftwood.rounds import Rounds
from draftwood.tree import Floats, Tree, root_only

MOST_TOGETHER = 1024  # nodes of all requests in one round
# While a request rests without drafts, its policy is asked again after so many tokens; while several rest together,
# after so many rounds. To ask every time would take half a percent longer, or two percent.
ASKED = 4
ALIKE, KEPT = 8, 7  # equal choices in a row of a lone request, and the rounds that then keep the last one
# Rounds that a lone request goes on to draft before its policy is asked again, per unit of gain over plain rounds, and
# the most: where drafting gains much, asking takes longer than it could save.
UNASKED, MOST_UNASKED = 12.0, 15


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What shares the forward of a round."""

    writing: Sequence[Request]  # those that write: each has a root, and perhaps a tree
    requests: int  # how many in all, including those that still read their prompts
    read: int  # prompt tokens

    @property
    def beside(self) -> int:
        """How many roots of other requests a request has beside its own."""
        return max(len(self.writing) - 1, 0)

    @property
    def context(self) -> int:
        return mean_context(self.writing)

    @property
    def groups(self) -> dict[Joint, list[int]]:
        """Indices of the requests that compete under each joint policy. A lone request competes with none."""
        groups: dict[Joint, list[int]] = {}
        for i, request in enumerate(self.writing if len(self.writing) > 1 else ()):
            if isinstance(request.policy, Joint):
                groups.setdefault(request.policy, []).append(i)
        return groups

    def most(self, policy: Policy) -> int:
        """Most nodes that a round may verify under a policy: for all requests together where the policy is joint."""
        several = len(self.writing) if isinstance(policy, Joint) else 1
        return max(policy.n_max, min(several * policy.n_max, MOST_TOGETHER))


class Chooser:
    """Asks the policies of one batch."""

    def __init__(
        self, rounds: Rounds, drafts: bool, latency_of: Callable[[int], LatencyModel], offline: ConvexCosts | None
    ) -> None:
        """The arguments are those of `Batch`."""
        self._rounds, self._has_drafter, self._latency_of, self._offline = rounds, drafts, latency_of, offline
        self._idle: dict[Joint, int] = {}  # rounds since all requests of a policy were drafted for
        self._resting: dict[Joint, _Resting] = {}  # requests of a policy that last chose to draft for none of them
        self._rests = False  # whether a lone request's policy last wanted no draft
        # Whether it wanted a draft that is not expected to pay, and will be asked again before that draft's outcome.
        self._looks = False
        self._settled = 0  # rounds that a lone request goes on to draft before its policy is asked
        self._chosen: _Chosen | None = None  # for a lone request
        self._chances = quickest()

    def costs(self, load: Load) -> dict[Policy, Costs]:
        """For each policy, the costs of a request's tree beside the others' roots and chunks of prompts."""
        policies = {request.policy for request in load.writing}
        costs = {policy: self._price(policy, load.most(policy), load, load.beside) for policy in policies}
        if len(load.writing) == 1 < load.requests:  # requests that read their prompts are not drafted for
            draft_s = self.draft_s(1, load.context)
            return {policy: replace(price, draft_s=draft_s) for policy, price in costs.items()}
        return costs

    def _price(self, policy: Policy, n_max: int, load: Load, beside: int) -> Costs:
        # Requests that read count, too: in a batch that stays full, the model for the writing ones hardly ever learns.
        widths, latency, requests = self._rounds.widths, self._latency_of(load.requests), len(load.writing)
        if policy.convex and self._offline:
            prices = self._offline.costs(n_max + beside + load.read, load.context)
            return prices.beside(beside, requests, load.read)
        if widths is None:
            prices = latency.costs(n_max + beside + load.read, load.context)
            return prices.beside(beside, requests, load.read)
        costs = latency.costs(widths[-1] - 1, load.context)
        return costs if policy.convex else costs.stepped(widths)  # a convex policy would stop at a step

    def drafts(self, load: Load, costs: Mapping[Policy, Costs]) -> list[bool]:
        """Whether to run the drafter for each request. A joint policy decides for all of its requests together."""
        writing, groups, able = load.writing, load.groups, self.able(load.writing)
        drafts = list(able)
        for i, request in enumerate(writing):
            if able[i] and not any(i in members for members in groups.values()):
                drafts[i] = self._wants(request, costs[request.policy], alone=len(writing) == 1)
        for policy, members in groups.items():
            members = [i for i in members if able[i]]
            chosen = self._together(policy, [writing[i] for i in members], load, costs)
            self._idle[policy] = 0 if all(chosen) else self._idle.get(policy, 0) + 1
            for i, asks in zip(members, chosen, strict=True):
                drafts[i] = asks
        self._idle = {policy: idle for policy, idle in self._idle.items() if policy in groups}
        self._resting = {policy: rest for policy, rest in self._resting.items() if policy in groups}
        return drafts

    def _together(
        self, policy: Joint, requests: Sequence[Request], load: Load, costs: Mapping[Policy, Costs]
    ) -> list[bool]:
        """For which of these requests a policy drafts. While the same ones rest, it is not asked in every round."""
        rest = self._resting.get(policy)
        if rest and rest.requests == requests and rest.rounds < ASKED:
            rest.rounds += 1
            return [False] * len(requests)
        prospects = [request.own.prospect() or request.acceptance.prospect() for request in requests]
        seconds = [self.draft_s(k, load.context) for k in range(1 + len(requests))]
        idle = self._idle.get(policy, 0)
        chosen = policy.together(prospects, idle, costs[requests[0].policy], seconds) if requests else []
        self._resting.pop(policy, None)
        if not any(chosen):
            self._resting[policy] = _Resting(requests)
        return chosen

    def able(self, writing: Sequence[Request]) -> list[bool]:
        """Which requests may be drafted for at all."""
        return [self._has_drafter and request.policy.n_max > 0 and request.remaining > 1 for request in writing]

    def _wants(self, request: Request, costs: Costs, alone: bool) -> bool:
        """Whether a request's own policy wants a draft. Of a lone request it is not asked in every round."""
        written = len(request.sampler.tokens) - request.prompt
        if alone and self._rests and written % ASKED != 1:  # the first round of an answer asks
            return False
        if self._looks:
            self._looks = False
            return False
        if alone and self._settled and written != 1:
            self._settled -= 1
            return True
        outlook = request.acceptance.outlook(costs)
        wants = request.policy.drafts(outlook)
        self._rests = alone and not wants
        self._looks = self._rounds.ahead and request.policy.calibrated and wants and outlook.gain < 1
        self._settled = _unasked(outlook.gain) if alone and wants else 0
        return wants

    def draft_s(self, requests: int, context: int) -> float:
        """Seconds that drafting for so many requests takes."""
        return self._latency_of(requests).draft_s(context) if requests else 0.0

    def position_s(self, requests: int, context: int) -> float:
        """Seconds that one more position takes in each draft when so many requests are drafted for."""
        return self._latency_of(requests).position_s(context) / requests if requests else 0.0

    def choose(self, load: Load, proposed: Sequence[Proposal | None], costs: Mapping[Policy, Costs]) -> list[Tree]:
        """The part of each request's tree to verify. A joint policy chooses for all of its requests together."""
        writing = load.writing
        trees = [
            proposal.tree if proposal else root_only(request.root)
            for request, proposal in zip(writing, proposed, strict=True)
        ]
        if not any(proposed):
            return trees
        if len(writing) == 1 and writing[0].policy.calibrated:
            request, tree = writing[0], trees[0]
            if self._chosen is None or self._chosen.request is not request:
                self._chosen = _Chosen(request)
            n = self._chosen(lambda: self._filled(request, self._mass(request, tree, True), costs[request.policy]))
            return [tree[:n]]
        groups = load.groups
        masses = [self._mass(request, tree, not groups) for request, tree in zip(writing, trees, strict=True)]
        sizes = [
            0 if isinstance(request.policy, Joint) and groups else request.policy.choose(mass, costs[request.policy])
            for request, mass in zip(writing, masses, strict=True)
        ]
        drafted = ran(proposed)
        for policy, members in groups.items():
            own = writing[members[0]].policy  # the same object, typed as a `Policy`
            price = costs[own]
            if any(sizes):  # nodes of other policies' requests, which share the forward
                price = self._price(own, load.most(own), load, load.beside + sum(sizes))
            price = replace(price, draft_s=self.draft_s(drafted, load.context))
            for i, n in zip(members, policy.share([masses[i] for i in members], price), strict=True):
                sizes[i] = n
        return [tree[:n] for tree, n in zip(trees, sizes, strict=True)]

    def _filled(self, request: Request, mass: Floats, costs: Costs) -> int:
        """What a lone request's policy chooses, and what else the same forward can hold: it would run padding there.

        Choices that differ within a forward's width alone come out alike, too.
        """
        n, widths = request.policy.choose(mass, costs), self._rounds.widths
        return n if widths is None or not n else next((width for width in widths if width > n), widths[-1]) - 1

    def _mass(self, request: Request, tree: Tree, alone: bool) -> Floats:
        """The masses of a tree's nodes that the request's policy sees. They are optimistic unless requests compete, for
        then the others would pay for optimism."""
        mass, model = tree.mass[1:], request.acceptance if alone else request.own
        if not len(tree) or not request.policy.calibrated:
            return mass
        return model.likely(mass, tree.depths[1:], OPTIMISM if alone else 0.0, self._chances)


@dataclass(slots=True, eq=False)
class _Resting:
    """Requests of one policy that rest together."""

    requests: Sequence[Request]
    rounds: int = 1  # since the policy was asked about them, that one included


@dataclass(slots=True, eq=False)
class _Chosen:
    """Keeps a choice that was the same for several rounds, because choosing takes half a percent of a round."""

    request: Request
    n: int = -1
    alike: int = 0
    kept: int = 0  # rounds for which the last choice still holds

    def __call__(self, choose: Callable[[], int]) -> int:
        if self.kept:
            self.kept -= 1
            return self.n
        n = choose()
        self.alike = self.alike + 1 if n == self.n else 1
        self.n, self.kept = n, KEPT if n and self.alike >= ALIKE else 0
        return n


def _unasked(gain: float) -> int:
    return 0 if isnan(gain) else min(max(int(UNASKED * (gain - 1)), 0), MOST_UNASKED)


def mean_context(requests: Sequence[Request]) -> int:
    """Tokens in the cache of a request, on average."""
    return sum(request.filled for request in requests) // max(len(requests), 1)
