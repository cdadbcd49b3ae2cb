"""DDTree (arXiv 2604.12989): the best-first tree of a fixed number of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class DDTree:
    """`ddtree:32` verifies 32 nodes and the root."""

    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = False

    n_max: int = 32

    @classmethod
    def parse(cls, argument: str | None) -> DDTree:
        if argument is None:
            return cls()
        return cls(read.count(f"ddtree:{argument}", argument, "nodes", "ddtree:32"))

    @property
    def name(self) -> str:
        return f"ddtree:{self.n_max}"

    @property
    def width(self) -> int:
        """A node of rank r comes after its r likelier siblings, so more candidates than nodes would be of no use."""
        return self.n_max

    def drafts(self, outlook: Outlook) -> bool:
        return True

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max)

    def choose(self, mass: Floats, costs: Costs) -> int:
        return len(mass)
