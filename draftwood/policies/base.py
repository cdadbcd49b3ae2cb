"""What a policy is: which tree to grow, whether drafting pays at all, and how many nodes to verify.

Policies are pure: numpy in, a number out. What is learned from round to round lives in the latency model
(`latency.py`) and the acceptance model (`acceptance.py`), which hand their opinion over as plain records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.tree import Draft, Floats, Tree

OPTIMISM = 1.5  # standard errors: going on in doubt costs little, stopping costs what drafting would have gained


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of the parts of a round. Arrays are indexed by n, nodes without the root: 1 + n tokens run."""

    plain_s: float  # T_AR: one plain one-token step
    draft_s: float  # T_draft: the drafter's pass
    aux_s: NDArray[np.float64]  # [n_max + 1] T_aux(n): grow + choose + accept + commit + observe
    verify_s: NDArray[np.float64]  # [n_max + 1] T_verify(1 + n, context)
    requests: int = 1  # that share the round
    resume_s: float = 0.0  # what a draft after a pause takes beyond draft_s
    position_s: float = 0.0  # what a draft takes for one more position

    @property
    def resume(self) -> float:
        """`resume_s` in plain steps."""
        return self.resume_s / self.plain_s

    @property
    def position(self) -> float:
        """`position_s` in plain steps."""
        return self.position_s / self.plain_s

    @cached_property
    def round_s(self) -> NDArray[np.float64]:
        """`[n_max + 1]` seconds of a drafted round that verifies n nodes."""
        return self.draft_s + self.aux_s + self.verify_s

    def stepped(self, widths: Sequence[int]) -> Costs:
        """The costs where only these numbers of tokens can run (ascending, the last at least n_max + 1)."""
        widths = tuple(widths)
        if widths not in self._stepped:
            ran = np.asarray(widths)[np.searchsorted(widths, np.arange(1, 1 + len(self.verify_s)))]
            self._stepped[widths] = replace(self, verify_s=self.verify_s[ran - 1])
        return self._stepped[widths]

    @cached_property
    def _stepped(self) -> dict[tuple[int, ...], Costs]:
        return {}  # kept, since rounds of one price ask again and again

    def beside(self, tokens: int, requests: int = 1, read: int = 0) -> Costs:
        """The costs of nodes in a batch whose forward also holds `tokens` others, and reads `read` tokens of prompts.

        Reading is paid for whatever is drafted, so only what it does to the price of nodes counts: a round must not
        draft because it takes long anyway. Drafts are those of all requests together.
        """
        held = tokens + read
        if not held:
            return self
        verify_s = self.verify_s[held:] - (self.verify_s[held] - self.verify_s[tokens])
        plain_s = self.plain_s + float(self.verify_s[tokens] - self.verify_s[0])
        return replace(self, plain_s=plain_s, aux_s=self.aux_s[:-held], verify_s=verify_s, requests=requests)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a drafted round would give one request, on average."""

    tokens: float  # emitted, the bonus token included
    nodes: float  # verified
    doubt: float = 0.0  # standard error of `tokens`


@dataclass(frozen=True, slots=True)
class Outlook:
    """What recent drafted rounds say about the next one, before it is drafted."""

    gain: float  # tokens per second to expect of a drafted round, over plain decoding's; NaN if unknown
    idle: int  # rounds since the drafter last ran
    resume: float = 0.0  # plain steps that a draft after a pause takes beyond one that goes on
    hope: float = 0.0  # how much more gain is possible, by the doubt about it and what the ledger affords
    saved: float = 0.0  # share of the time that drafting has saved lately


class Policy(Protocol):
    """One rule. Instances are frozen dataclasses whose fields are the rule's parameters."""

    @property
    def name(self) -> str:
        """As written on the command line, parameters included: `ddtree:32`."""
        ...

    @property
    def n_max(self) -> int:
        """The most nodes it can ask for; 0 means that it never drafts."""
        ...

    @property
    def width(self) -> int:
        """Candidates per depth (K) that it wants from a drafter."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether `choose` gets masses calibrated by experience; the papers' rules get the drafter's own."""
        ...

    @property
    def convex(self) -> bool:
        """Whether it needs a convex cost curve: it gets the offline profile where there is one."""
        ...

    def drafts(self, outlook: Outlook) -> bool:
        """Whether to run the drafter this round."""
        ...

    def grow(self, draft: Draft, root: int, faint: float = 0.0, most: int | None = None) -> Tree:
        """The candidate tree, at most `n_max` nodes, best first. A `Growth` can also be followed on a device.

        A calibrated policy gets limits: recent trees had no use for nodes of less mass than `faint`, or for more than
        `most`.
        """
        ...

    def choose(self, mass: Floats, costs: Costs) -> int:
        """How many of the `len(mass)` nodes to verify; `mass` [N] excludes the root."""
        ...


def expected(mass: Floats | NDArray[np.float64], requests: int = 1) -> NDArray[np.float64]:
    """`[N + 1]` tokens that a round emits if it verifies n nodes: a bonus token of each request, and the masses."""
    tokens = np.empty(1 + len(mass))
    tokens[0], tokens[1:] = requests, mass
    return tokens.cumsum()


class Joint(ABC):
    """A policy that can decide for several requests at once. Costs are those of all of them together."""

    @abstractmethod
    def together(
        self, prospects: Sequence[Prospect | None], idle: int, costs: Costs, draft_s: Sequence[float]
    ) -> list[bool]:
        """For which requests to run the drafter.

        A prospect of None says that nothing is known about the request. `idle` counts rounds since all requests were
        drafted for; `draft_s[k]` is what drafting for k requests takes.
        """

    @abstractmethod
    def share(self, masses: Sequence[Floats], costs: Costs) -> list[int]:
        """How many nodes of each request to verify; costs are indexed by the nodes of all requests together."""
