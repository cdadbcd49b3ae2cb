"""Drafts after every token and verifies nothing: from its trace every other policy can be replayed, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats


@dataclass(frozen=True, slots=True)
class Record:
    """Plain decoding with a drafter that runs after every token: for `draftwood bench --trace`, slower than either."""

    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = False
    name: str = "record"
    n_max: int = 256  # of the trees that are recorded where there is no lattice
    width: int = 16

    @classmethod
    def parse(cls, argument: str | None) -> Record:
        read.none("record", argument)
        return cls()

    def drafts(self, outlook: Outlook) -> bool:
        return True

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max, spine=True)

    def choose(self, mass: Floats, costs: Costs) -> int:
        return 0
