"""A beam of fixed width and depth, all of it verified: what best-first trees are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.errors import BadInput
from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class Beam:
    """`beam:4x15`: at each of 15 depths the 4 likeliest children (BASTION, arXiv 2605.29727, fig. 5)."""

    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = False

    width: int = 4
    depth: int = 15

    @classmethod
    def parse(cls, argument: str | None) -> Beam:
        if argument is None:
            return cls()
        width, cross, depth = argument.partition("x")
        if not cross:
            raise BadInput(f"beam:{argument}: a beam needs a width and a depth; write for example beam:4x15.")
        spec, example = f"beam:{argument}", "beam:4x15"
        return cls(read.count(spec, width, "paths", example, 64), read.count(spec, depth, "depths", example, 64))

    @property
    def name(self) -> str:
        return f"beam:{self.width}x{self.depth}"

    @property
    def n_max(self) -> int:
        return self.width * self.depth

    def drafts(self, outlook: Outlook) -> bool:
        return True

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max, self.width, self.depth)

    def choose(self, mass: Floats, costs: Costs) -> int:
        return len(mass)
