"""BASTION (arXiv 2605.29727): the tree size with the best expected tokens per second. The default rule.

`bastion` is ours: it reads the whole curve, so costs may have steps, and may verify nothing or skip the
drafter. `bastion:paper` is the authors' released stopping rule, for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isnan, sqrt
from operator import itemgetter
from typing import ClassVar

import numpy as np

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import OPTIMISM, Costs, Joint, Outlook, Policy, Prospect, expected
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class Bastion(Joint):
    """The smallest n whose (1 + Φ(n)) / (T_draft + T_aux(n) + T_verify(1 + n)) is within `slack` of the largest.

    In a batch the nodes of all requests are put into one order by mass, and the best n of that order are verified.
    """

    calibrated: ClassVar[bool] = True
    convex: ClassVar[bool] = False

    n_max: int = 256
    widths: tuple[int, ...] = ()  # the tokens (1 + n) worth running, such as captured graphs; () is all
    slack: float = 0.005  # of the best rate, for a request alone: the largest of many estimates owes that to luck
    toll: float = 0.003  # the share of time that probing an unprofitable drafter may cost,
    reinvested: float = 0.1  # plus this share of the time that drafting has saved
    hysteresis: float = 0.02  # gain required to draft again after a pause: prices waver by as much, and resuming costs
    margin: float = 0.025  # gain required for each other request of a batch: the best of many guesses is too high
    crowd: int = 15  # other requests, beyond which the margin no longer grows: drafting for 128 may gain threefold
    apart: float = 0.5  # of what seems to set a request of a batch apart from the others: the other half is luck
    fairness: float = 0.5  # the least share of its speed in a plain batch that a request may be left with

    @classmethod
    def parse(cls, argument: str | None) -> Policy:
        if argument == "paper":
            return BastionPaper()
        if argument is None:
            return cls()
        return cls(read.count(f"bastion:{argument}", argument, "nodes", "bastion:256 or bastion:paper"))

    @property
    def name(self) -> str:
        return "bastion" if self.n_max == Bastion().n_max else f"bastion:{self.n_max}"

    @property
    def width(self) -> int:
        return min(self.n_max, 64)

    def drafts(self, outlook: Outlook) -> bool:
        """Whether drafting has paid lately, or a look (`_due`) is due."""
        least = 1 + (self.hysteresis if outlook.idle else 0)
        hopeful = isnan(outlook.gain) or outlook.gain + outlook.hope >= least
        return bool(hopeful or self._due(outlook.idle, outlook.gain, outlook.resume, outlook.saved))

    def _due(self, idle: int, gain: float, resume: float, saved: float = 0.0) -> bool:
        """Whether so many idle rounds pay for a look: a drafted round that shows whether drafting pays again.

        At gain g it wastes 1/g - 1 of the time that its tokens would have taken without a drafter, and what it takes to
        resume. Spread over the idle rounds before it, this must stay below `toll` plus a part of what drafting has
        saved. So the worse the drafter, the rarer the look.
        """
        return idle * (self.toll + self.reinvested * saved) * gain >= 1 - gain + resume * gain

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max)

    def choose(self, mass: Floats, costs: Costs) -> int:
        # The draft is paid for by now and still counts: over a long run, tokens per second are the expected
        # tokens of a round over its expected seconds (renewal-reward), and these include the draft. The
        # paper's factor T_AR makes a speedup of this; being constant it does not move the maximum.
        # Plain numbers: beside forwards, which empty the caches, numpy takes three times as long for those of a tree.
        tokens, seconds = accumulate([1.0, *mass.tolist()]), costs.round_s[: 1 + len(mass)].tolist()
        rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
        if self.widths:
            worth = {0, len(mass), *(width - 1 for width in self.widths)}
            rates = [rate if n in worth else 0.0 for n, rate in enumerate(rates)]
        least = (1 - self.slack) * max(rates)
        return next(n for n, rate in enumerate(rates) if rate >= least)

    def together(
        self, prospects: Sequence[Prospect | None], idle: int, costs: Costs, draft_s: Sequence[float]
    ) -> list[bool]:
        # Every draft costs the same, so the best k requests are those with the most tokens. Now and then all requests
        # are drafted for, to see whether that pays, as in `drafts`.
        known = [prospect for prospect in prospects if prospect is not None]
        if len(known) < len(prospects):
            return [True] * len(prospects)
        order = sorted(range(len(known)), key=lambda i: -known[i].tokens)
        rates = self._rates([known[i] for i in order], costs, draft_s)
        best, least = rates.index(max(rates)), (1 + self.margin * min(costs.requests - 1, self.crowd)) * rates[0]
        look = rates[-1] / max(rates[best], least)
        if rates[best] < least:
            best = 0
        if self._due(idle, look, costs.resume):
            best = len(known)
        drafted = set(order[:best])
        return [i in drafted for i in range(len(known))]

    def _rates(self, prospects: Sequence[Prospect], costs: Costs, draft_s: Sequence[float]) -> list[float]:
        """Optimistic tokens per second if the drafter runs for no request, for the first, for the first two …"""
        mean, most = sum(one.tokens for one in prospects) / len(prospects), len(costs.verify_s) - 1
        tokens, variance, nodes = float(costs.requests), 0.0, 0.0
        rates = [tokens / costs.plain_s]
        for one, seconds in zip(prospects, draft_s[1:], strict=True):
            tokens += mean + self.apart * (one.tokens - mean) - 1
            variance += one.doubt**2
            nodes += one.nodes
            n = min(round(nodes), most)  # the host's part is as learned, for any number of drafts
            seconds += float(costs.aux_s[n] + costs.verify_s[n])
            rates.append((tokens + OPTIMISM * sqrt(variance)) / seconds)
        return rates

    def share(self, masses: Sequence[Floats], costs: Costs) -> list[int]:
        own = [mass.tolist() for mass in masses]
        # A calibrated mass may be above the one before it, but the nodes of a tree have to come in their order.
        line = [(-key, i) for i, mass in enumerate(own) for key in accumulate(mass, min)]
        line = sorted(line, key=itemgetter(0))[: len(costs.verify_s) - 1]
        seconds = costs.round_s[: 1 + len(line)].tolist()
        tokens, sizes = [1.0] * costs.requests, [0] * len(masses)  # of each request
        emitted, best, found = float(costs.requests), costs.requests / seconds[0], list(sizes)
        for (_, i), s in zip(line, seconds[1:], strict=True):
            gain = own[i][sizes[i]]
            tokens[i], emitted, sizes[i] = tokens[i] + gain, emitted + gain, sizes[i] + 1
            if emitted / s > best and min(tokens) * costs.plain_s >= self.fairness * s:
                best, found = emitted / s, list(sizes)
        return found


@dataclass(frozen=True, slots=True)
class BastionPaper:
    """The released code's rule: from 32 tokens on, stop at the first node whose gain is not worth its cost.

    Tokens include the root. The result is cut to a multiple of 32 tokens; a smaller tree is verified whole.
    """

    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = False

    name: str = "bastion:paper"
    n_max: int = 1024  # the authors allow 8192, which a batch of one never comes near
    width: int = 128
    bucket: int = 32  # tokens: the smallest tree, and what sizes are multiples of

    def drafts(self, outlook: Outlook) -> bool:
        return True

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max)

    def choose(self, mass: Floats, costs: Costs) -> int:
        size = len(mass)
        gain = mass * costs.round_s[:size]
        loss = expected(mass)[:size] * np.diff(costs.verify_s[: 1 + size])
        stops = np.flatnonzero(gain <= loss)
        stops = stops[stops >= self.bucket - 1]
        tokens = 1 + int(stops[0] if len(stops) else size)
        return min(size, max(self.bucket, tokens // self.bucket * self.bucket) - 1)
