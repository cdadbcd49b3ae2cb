"""One request in a batch: what was asked for, what it has so far, and what belongs to it alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from draftwood.acceptance import AcceptanceModel
from draftwood.policies.base import Policy
from draftwood.sampling import Sampler
from draftwood.tree import Tree

SPARE = 64  # slots, at most, for trees behind the text: `n_max` of them would spread a batch's keys over more pages


@dataclass(slots=True, eq=False)
class Request:
    """While its prompt is read, `filled` grows by chunks; then the last of its tokens is the root, in no cache yet."""

    sampler: Sampler  # holds the text so far, prompt included
    prompt: int  # tokens of the prompt
    end: int  # tokens that prompt and answer may have together
    policy: Policy
    acceptance: AcceptanceModel  # shared with other requests of its kind
    stop_ids: frozenset[int] = frozenset()
    likelihoods: int | None = None  # alternatives to report for each token; None: not even its own likelihood
    foresees: bool = False  # whether its trees know the noise of its draws (`foresight.py`)
    filled: int = 0  # tokens in the caches
    finished: bool = False
    start: float = field(default_factory=perf_counter)
    # What its own text taught, for rounds in which requests compete; exists from joining on.
    own: AcceptanceModel = field(init=False, repr=False)

    @property
    def root(self) -> int:
        return self.sampler.tokens[-1]

    @property
    def reads(self) -> bool:
        """Whether a part of its prompt is in no cache yet."""
        return self.filled < self.prompt

    @property
    def capacity(self) -> int:
        """Slots to make in the caches. They grow if a tree needs more room than the rest of the answer and SPARE."""
        return self.end + 1 + min(self.policy.n_max, SPARE)

    @property
    def remaining(self) -> int:
        return self.end - len(self.sampler.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a forward runs for one request: a draft tree, or a `known` chunk of its prompt as a chain."""

    request: Request
    tree: Tree
    known: bool = False

    @property
    def size(self) -> int:
        """Tokens of the forward."""
        return len(self.tree.tokens)

    @property
    def ends_prompt(self) -> bool:
        return self.known and self.request.filled + self.size == self.request.prompt
