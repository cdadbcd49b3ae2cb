"""CaDDTree (arXiv 2606.01813): verify nodes until the first that does not raise tokens per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook, expected
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class CaDDTree:
    """Stops at the first n where (1 + Φ(n)) / (C_draft + C_verify) does not rise (the paper's §4).

    That is the best n if C_verify is convex, which is why the paper fits a convex curve. `caddtree` prices a
    tree of n nodes as the 1 + n tokens that the target runs; `caddtree:paper` prices it as n tokens, as the
    authors' code does. Neither counts what the host spends on a round.
    """

    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = True

    n_max: int = 256
    root_inclusive: bool = True

    @classmethod
    def parse(cls, argument: str | None) -> CaDDTree:
        if argument == "paper":
            return cls(1024, root_inclusive=False)
        if argument is None:
            return cls()
        return cls(read.count(f"caddtree:{argument}", argument, "nodes", "caddtree:256 or caddtree:paper"))

    @property
    def name(self) -> str:
        if not self.root_inclusive:
            return "caddtree:paper"
        return "caddtree" if self.n_max == CaDDTree().n_max else f"caddtree:{self.n_max}"

    @property
    def width(self) -> int:
        return min(self.n_max, 128)

    def drafts(self, outlook: Outlook) -> bool:
        return True

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max)

    def choose(self, mass: Floats, costs: Costs) -> int:
        nodes = np.arange(1 + len(mass))
        verify = costs.verify_s[nodes if self.root_inclusive else np.maximum(nodes - 1, 0)]
        rate = expected(mass) / (costs.draft_s + verify)
        stops = np.flatnonzero(rate[1:] <= rate[:-1])
        return int(stops[0]) if len(stops) else len(mass)
