"""BASTION (arXiv 2605.29727): the tree size with the best expected tokens per second. The default rule.

`bastion` is ours: it reads the whole curve, so costs may have steps, and may verify nothing or skip the
drafter. `bastion:paper` is the authors' released stopping rule, for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isnan
from typing import ClassVar

import numpy as np

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import OPTIMISM, Costs, Joint, Outlook, Policy, Prospect, expected
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class Bastion(Joint):
    """The smallest n whose (1 + Φ(n)) / (T_draft + T_aux(n) + T_verify(1 + n)) is within `slack` of the largest.

    In a batch the requests' nodes stand in one line by mass, and n, the best there, is how many of it are verified.
    """

    calibrated: ClassVar[bool] = True
    convex: ClassVar[bool] = False

    n_max: int = 256
    widths: tuple[int, ...] = ()  # the tokens (1 + n) worth running, such as captured graphs; () is all
    slack: float = 0.005  # of the best rate, of a request alone: the largest of many estimates owes that to luck
    toll: float = 0.003  # the share of time that probing an unprofitable drafter may cost,
    reinvested: float = 0.1  # and of the time that drafting has saved
    hysteresis: float = 0.02  # of gain, to draft again after a pause: prices waver by as much, and resuming costs
    margin: float = 0.025  # of gain, for each other request of a batch: the best of many guesses is too high
    crowd: int = 15  # other requests, beyond which that grows no more: drafting for 128 may bring three times as much
    apart: float = 0.5  # of what seems to set a request of a batch apart from the others: half of that is luck
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
        """Whether drafting has paid lately, or is due another look."""
        least = 1 + (self.hysteresis if outlook.idle else 0)
        hopeful = isnan(outlook.gain) or outlook.gain + outlook.hope >= least
        return bool(hopeful or self._due(outlook.idle, outlook.gain, outlook.resume, outlook.saved))

    def _due(self, idle: int, gain: float, resume: float, saved: float = 0.0) -> bool:
        """Whether so many idle rounds pay for a look.

        At gain g a drafted round wastes 1/g - 1 of the time its tokens would have taken without a drafter, and what
        it takes to resume. Spread over the idle rounds before it that must stay below `toll`, and a part of what
        drafting has saved: the worse, the rarer the look.
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
        # The k best are the best k: all of them cost the same. Now and then a look at everybody, as in `drafts`.
        if any(prospect is None for prospect in prospects):
            return [True] * len(prospects)
        known = [prospect for prospect in prospects if prospect is not None]
        tokens, doubt = (np.array(row) for row in zip(*((one.tokens, one.doubt) for one in known), strict=True))
        tokens = tokens.mean() + self.apart * (tokens - tokens.mean())
        order = np.argsort(-tokens, kind="stable")
        gained = np.cumsum([0.0, *(tokens[order] - 1)]) + OPTIMISM * np.sqrt(np.cumsum([0.0, *doubt[order] ** 2]))
        nodes = np.cumsum([0.0, *(known[i].nodes for i in order)]).round().astype(int)
        nodes = np.minimum(nodes, len(costs.verify_s) - 1)
        host = costs.aux_s[nodes]  # as learned, of however many are drafted for
        host[0] = costs.plain_s - costs.verify_s[0]
        seconds = np.asarray(draft_s) + host + costs.verify_s[nodes]
        rate = (costs.requests + gained) / seconds
        best, least = int(np.argmax(rate)), (1 + self.margin * min(costs.requests - 1, self.crowd)) * rate[0]
        look = float(rate[-1] / max(rate[best], least))
        if rate[best] < least:
            best = 0
        if self._due(idle, look, costs.resume):
            best = len(known)
        drafted = set(order[:best].tolist())
        return [i in drafted for i in range(len(known))]

    def share(self, masses: Sequence[Floats], costs: Costs) -> list[int]:
        # A calibrated mass may be above the one before it; the nodes of a tree still come in their order.
        keys = np.concatenate([np.minimum.accumulate(mass) for mass in masses])
        line = np.argsort(-keys, kind="stable")[: len(costs.verify_s) - 1]
        owner = np.repeat(np.arange(len(masses)), [len(mass) for mass in masses])[line]
        mass = np.concatenate(masses)[line].astype(np.float64)
        seconds = costs.round_s[: 1 + len(line)]
        rate = expected(mass, costs.requests) / seconds
        own = np.cumsum(np.where(owner == np.arange(len(masses))[:, None], mass, 0.0), axis=1)  # [B, N]
        slowest = 1 + (own.min(axis=0) if len(masses) == costs.requests else 0.0 * mass)
        fair = np.append(True, slowest * costs.plain_s >= self.fairness * seconds[1:])
        n = int(np.argmax(np.where(fair, rate, 0.0)))
        return [int(count) for count in np.bincount(owner[:n], minlength=len(masses))]


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
