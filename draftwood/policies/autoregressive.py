"""Plain decoding: one token a round, no drafter. The baseline of every other rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats


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

    @property
    def grow(self) -> Growth:
        return Growth(0)

    def choose(self, mass: Floats, costs: Costs) -> int:
        return 0
