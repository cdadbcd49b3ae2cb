"""A policy of your own: verify every node whose path is likely enough."""

from __future__ import annotations

from dataclasses import dataclass

import draftwood
from draftwood.grow import Growth
from draftwood.policies.base import Costs, Outlook
from draftwood.tree import Floats


@dataclass(frozen=True)
class Likely:
    """Verifies the nodes of mass `least` or more: calibrated masses hardly ever rise, so these nodes come first."""

    least: float = 0.1
    name: str = "likely"
    n_max: int = 64
    width: int = 16
    calibrated: bool = True  # masses corrected by experience, not the drafter's own
    convex: bool = False  # costs do not matter to it

    @property
    def grow(self) -> Growth:
        return Growth(self.n_max)  # the best-first tree

    def drafts(self, outlook: Outlook) -> bool:
        return True

    def choose(self, mass: Floats, costs: Costs) -> int:
        return int((mass >= self.least).sum())


llm = draftwood.load()
answer = llm.generate("Write a Python function that adds two numbers.", max_new_tokens=48, policy=Likely())

print(answer.text)
for step in answer.rounds:
    print(f"{step.n:3} nodes verified, {step.accepted} accepted")

# To use it by name, as in `draftwood generate --policy likely`, register it as an entry point: docs/extend.md.
