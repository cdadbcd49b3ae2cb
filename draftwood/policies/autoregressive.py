"""Plain decoding: one token a round, no drafter. The baseline of every other rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats, Lattice, Tree, root_only


@dataclass(frozen=True, slots=True)
class Autoregressive:
    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = False
    name: str = "autoregressive"
    n_max: int = 0
    width: int = 0

    @classmethod
    def parse(cls, argument: str | None) -> Autoregressive:
        read.none("autoregressive", argument)
        return cls()

    def drafts(self, outlook: Outlook) -> bool:
        return False

    def grow(self, draft: Lattice | Tree, root: int) -> Tree:
        return root_only(root)

    def choose(self, mass: Floats, costs: Costs) -> int:
        return 0
