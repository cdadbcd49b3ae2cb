"""DFlash (arXiv 2602.06036): the block's likeliest chain, all of it verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.grow import Growth
from draftwood.policies import argument as read
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats

LONGEST = 64  # deeper than any block: the drafter decides


@dataclass(frozen=True, slots=True)
class DFlash:
    """`dflash` takes the drafter's whole block, `dflash:7` its first 7 tokens; for conditional drafts, see `FAINT`."""

    calibrated: ClassVar[bool] = False
    convex: ClassVar[bool] = False

    n_max: int = LONGEST
    width: int = 1

    @classmethod
    def parse(cls, argument: str | None) -> DFlash:
        if argument is None:
            return cls()
        return cls(read.count(f"dflash:{argument}", argument, "tokens", "dflash:7", LONGEST))

    @property
    def name(self) -> str:
        return "dflash" if self.n_max == LONGEST else f"dflash:{self.n_max}"

    def drafts(self, outlook: Outlook) -> bool:
        return True

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max, per_depth=1)

    def choose(self, mass: Floats, costs: Costs) -> int:
        return len(mass)
