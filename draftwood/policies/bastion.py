"""BASTION (arXiv 2605.29727): the tree size with the best expected tokens per second. The default rule.

`bastion` is ours: it reads the whole curve, so costs may have steps, and may verify nothing or skip the
drafter. `bastion:paper` is the authors' released stopping rule, for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook, Policy
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class Bastion:
    """The smallest n with the largest (1 + Φ(n)) / (T_draft + T_aux(n) + T_verify(1 + n))."""

    calibrated: ClassVar[bool] = True
    convex: ClassVar[bool] = False

    n_max: int = 256
    widths: tuple[int, ...] = ()  # the tokens (1 + n) worth running, such as captured graphs; () is all
    toll: float = 0.01  # the share of time that probing an unprofitable drafter may cost

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
        """Whether drafting has paid lately, or is due another look.

        At gain g a drafted round wastes 1/g - 1 of the time its tokens would have taken without a drafter.
        Spread over the idle rounds before it that must stay below `toll`: the worse, the rarer the look.
        """
        hopeful = np.isnan(outlook.gain) or outlook.gain >= 1
        return bool(hopeful or outlook.idle * self.toll * outlook.gain >= 1 - outlook.gain)

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max)

    def choose(self, mass: Floats, costs: Costs) -> int:
        # The draft is paid for by now and still counts: over a long run, tokens per second are the expected
        # tokens of a round over its expected seconds (renewal-reward), and these include the draft. The
        # paper's factor T_AR makes a speedup of this; being constant it does not move the maximum.
        size = len(mass)
        rate = np.cumsum([1.0, *mass]) / costs.round_s()[: 1 + size]
        if not self.widths:
            return int(np.argmax(rate))
        nodes = np.array(sorted({0, size, *(w - 1 for w in self.widths if w <= size)}))
        return int(nodes[np.argmax(rate[nodes])])


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
        expected = np.cumsum([1.0, *mass])[:size]
        gain = mass * costs.round_s()[:size]
        loss = expected * np.diff(costs.verify_s[: 1 + size])
        stops = np.flatnonzero(gain <= loss)
        stops = stops[stops >= self.bucket - 1]
        tokens = 1 + int(stops[0] if len(stops) else size)
        return min(size, max(self.bucket, tokens // self.bucket * self.bucket) - 1)
