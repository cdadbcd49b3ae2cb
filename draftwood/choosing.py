"""Who is drafted for in a round, and how much of each tree is verified: policies, asked with this round's prices.

A lone request is asked about alone. In a batch, requests whose policy can decide for several at once (`Joint`) are
its business together, beside the trees of the others.
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
# Tokens behind which a lone request that rests is asked anew, and rounds behind which several are: to ask each time
# would take half a percent longer, or two.
ASKED = 4
ALIKE, KEPT = 8, 7  # choices of a lone request that came out alike, and rounds that then do without another one
# Rounds that a lone request goes on to draft unasked, for what it gains over plain rounds, and the most: where drafting
# wins much, asking takes longer than could be won by it.
UNASKED, MOST_UNASKED = 12.0, 15


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What shares the forward of a round."""

    writing: Sequence[Request]  # those that write: each has a root, and perhaps a tree
    requests: int  # all of them, those that read their prompts included
    read: int  # tokens of prompts

    @property
    def beside(self) -> int:
        """Roots beside that of any one request."""
        return max(len(self.writing) - 1, 0)

    @property
    def context(self) -> int:
        return mean_context(self.writing)

    @property
    def groups(self) -> dict[Joint, list[int]]:
        """Places of requests that compete under one policy. A lone request does not."""
        groups: dict[Joint, list[int]] = {}
        for i, request in enumerate(self.writing if len(self.writing) > 1 else ()):
            if isinstance(request.policy, Joint):
                groups.setdefault(request.policy, []).append(i)
        return groups

    def most(self, policy: Policy) -> int:
        """Nodes that a round may verify under a policy: of all requests together, where it decides for them."""
        several = len(self.writing) if isinstance(policy, Joint) else 1
        return max(policy.n_max, min(several * policy.n_max, MOST_TOGETHER))


class Chooser:
    """Asks the policies of one batch."""

    def __init__(
        self, rounds: Rounds, drafts: bool, latency_of: Callable[[int], LatencyModel], offline: ConvexCosts | None
    ) -> None:
        """As for `Batch`."""
        self._rounds, self._has_drafter, self._latency_of, self._offline = rounds, drafts, latency_of, offline
        self._idle: dict[Joint, int] = {}  # rounds since all requests of a policy were drafted for
        self._resting: dict[Joint, _Resting] = {}  # those of which none was when it was asked last
        self._rests = False  # a lone request whose policy wanted no draft when it was asked last
        self._looks = False  # it wants one in hope, and the next one is asked for before it is known what came of it
        self._settled = 0  # rounds that a lone request goes on to draft before it is asked
        self._chosen: _Chosen | None = None  # for a lone request
        self._chances = quickest()

    def costs(self, load: Load) -> dict[Policy, Costs]:
        """For each policy what a request's tree costs beside the others' roots and chunks of prompts."""
        policies = {request.policy for request in load.writing}
        costs = {policy: self._price(policy, load.most(policy), load, load.beside) for policy in policies}
        if len(load.writing) == 1 < load.requests:  # readers beside it are not drafted for
            draft_s = self.draft_s(1, load.context)
            return {policy: replace(price, draft_s=draft_s) for policy, price in costs.items()}
        return costs

    def _price(self, policy: Policy, n_max: int, load: Load, beside: int) -> Costs:
        # Those that read take part: the model of as many writers alone hardly ever learns in a batch that stays full.
        widths, latency, requests = self._rounds.widths, self._latency_of(load.requests), len(load.writing)
        if policy.convex and self._offline:
            prices = self._offline.costs(n_max + beside + load.read, load.context)
            return prices.beside(beside, requests, load.read)
        if widths is None:
            prices = latency.costs(n_max + beside + load.read, load.context)
            return prices.beside(beside, requests, load.read)
        costs = latency.costs(widths[-1] - 1, load.context)
        return costs if policy.convex else costs.stepped(widths)  # a step would look to it like the end

    def drafts(self, load: Load, costs: Mapping[Policy, Costs]) -> list[bool]:
        """For whom to run the drafter: for all together where the policy can decide so, else one by one."""
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
        """For whom of these a policy drafts; it is not asked in every round in which the same ones rest."""
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
        """Who may be drafted for at all."""
        return [self._has_drafter and request.policy.n_max > 0 and request.remaining > 1 for request in writing]

    def _wants(self, request: Request, costs: Costs, alone: bool) -> bool:
        """What a request's own policy says, which is not asked in every round of one that is alone."""
        written = len(request.sampler.tokens) - request.prompt
        if alone and self._rests and written % ASKED != 1:  # an answer's first round asks
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
        """Seconds that one more position takes in each draft, where so many requests are drafted for."""
        return self._latency_of(requests).position_s(context) / requests if requests else 0.0

    def choose(self, load: Load, proposed: Sequence[Proposal | None], costs: Mapping[Policy, Costs]) -> list[Tree]:
        """What to verify of each request's tree: for all together where the policy can, else one by one."""
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
            choose = request.policy.choose
            return [tree[: self._chosen(lambda: choose(self._mass(request, tree, True), costs[request.policy]))]]
        groups = load.groups
        masses = [self._mass(request, tree, not groups) for request, tree in zip(writing, trees, strict=True)]
        sizes = [
            0 if isinstance(request.policy, Joint) and groups else request.policy.choose(mass, costs[request.policy])
            for request, mass in zip(writing, masses, strict=True)
        ]
        drafted = ran(proposed)
        for policy, members in groups.items():
            own = writing[members[0]].policy  # the same, as what it is beside being joint
            price = costs[own]
            if any(sizes):  # nodes of others, beside which these will be
                price = self._price(own, load.most(own), load, load.beside + sum(sizes))
            price = replace(price, draft_s=self.draft_s(drafted, load.context))
            for i, n in zip(members, policy.share([masses[i] for i in members], price), strict=True):
                sizes[i] = n
        return [tree[:n] for tree, n in zip(trees, sizes, strict=True)]

    def _mass(self, request: Request, tree: Tree, alone: bool) -> Floats:
        """What the request's policy is told of a tree's nodes: for one alone with hope, which in a batch the others
        pay."""
        mass, model = tree.mass[1:], request.acceptance if alone else request.own
        if not len(tree) or not request.policy.calibrated:
            return mass
        return model.likely(mass, tree.depths[1:], OPTIMISM if alone else 0.0, self._chances)


@dataclass(slots=True, eq=False)
class _Resting:
    """Requests of one policy that rest together."""

    requests: Sequence[Request]
    rounds: int = 1  # since it was asked about them, that one included


@dataclass(slots=True, eq=False)
class _Chosen:
    """Choices that came out alike for so long that the next ones will: choosing takes half a percent of a round."""

    request: Request
    n: int = -1
    alike: int = 0
    kept: int = 0  # rounds for which the last one still holds

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
