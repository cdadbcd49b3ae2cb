"""How the verbs of a round run: the interface that the engine's loop drives, and its form on the host.

The other form, on the device with static shapes, is `device/rounds.py`. Both give the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from draftwood.accept import Verdict, accept
from draftwood.cache import KVCache
from draftwood.drafters.base import Drafter, Request
from draftwood.memory import require_request
from draftwood.plan import Verified
from draftwood.policies.base import Policy
from draftwood.sampling import Sampler
from draftwood.target import Target
from draftwood.tree import Lattice, Tree

RECORDED = 16  # candidates of each depth that a round's record keeps
PREFILL_CHUNK = 512  # tokens: bounds the mask and the activations of a long prompt


@dataclass(slots=True)
class Clock:
    """Seconds by verb of one round."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, verb: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(verb, time.perf_counter() - start)

    def add(self, verb: str, seconds: float) -> None:
        self.seconds[verb] = self.seconds.get(verb, 0.0) + seconds


class Rounds(Protocol):
    """The rounds of one request: `prefill`, then `propose`, `verify`, `settle` again and again, then `close`.

    The last token of the request's sampler is the root. The engine adds what `settle` gave before it proposes again.
    """

    @property
    def ahead(self) -> bool:
        """Whether a round is begun before the text of the one before leaves, so that its work goes on meanwhile."""
        ...

    @property
    def widths(self) -> tuple[int, ...] | None:
        """How many tokens a forward can have, the root included, in ascending order; None: any number."""
        ...

    @property
    def lattice(self) -> Lattice | None:
        """Candidates that `propose` grew from, for the record; None if there are none, or the tree says it all."""
        ...

    def prefill(self) -> int:
        """Read the prompt; the token after it."""
        ...

    def propose(self, drafts: bool, clock: Clock) -> Tree | None:
        """draft, grow: a tree below the root, or None if nothing was drafted.

        Where rounds run ahead, `drafts` asks for the tree after this one.
        """
        ...

    def verify(self, tree: Tree, clock: Clock) -> None:
        """Run the target over a prefix of the proposed tree, or over the root alone. May return before it is done."""
        ...

    def settle(self, clock: Clock) -> Verdict:
        """accept, commit: what the target made of the tree."""
        ...

    def close(self) -> None:
        """The request is over, or abandoned."""
        ...


class HostRounds:
    """Every verb on the host, one after the other. Serves every target, drafter, policy and rule."""

    ahead = False
    widths = None
    lattice: Lattice | None = None

    def __init__(self, target: Target, drafter: Drafter | None, policy: Policy, sampler: Sampler, end: int) -> None:
        """`end` is how many tokens prompt and answer may have together."""
        self._target, self._drafter, self._policy, self._sampler, self._end = target, drafter, policy, sampler, end
        capacity = end + 1 + policy.n_max
        require_request(target, drafter, capacity, 1 + policy.n_max)
        self._cache: KVCache = target.new_cache(capacity)
        self._state: Any = drafter.open(capacity) if drafter else None
        self._verified: tuple[Tree, Verified] | None = None

    def prefill(self) -> int:
        return self._sampler.draw(prefill(self._target, self._cache, self._sampler.tokens, self._extend))

    def propose(self, drafts: bool, clock: Clock) -> Tree | None:
        self.lattice = None
        if self._drafter is None or not drafts:
            return None
        root, remaining = self._sampler.tokens[-1], self._end - len(self._sampler.tokens)
        with clock("draft"):
            draft = self._drafter.draft([Request(self._state, root, self._policy.width)])[0]
        if isinstance(draft, Lattice):
            self.lattice = Lattice(draft.tokens[:, :RECORDED].copy(), draft.logp[:, :RECORDED].copy())
        with clock("grow"):
            # A node at depth d can only be emitted if d more tokens fit before the bonus token.
            return self._policy.grow(draft, root).up_to_depth(remaining - 1)

    def verify(self, tree: Tree, clock: Clock) -> None:
        with clock("verify"):
            plan = self._target.plan([tree], self._cache, [0])
            self._verified = tree, self._target.verify(plan, self._cache)

    def settle(self, clock: Clock) -> Verdict:
        assert self._verified is not None, "settle follows verify"
        tree, result = self._verified
        with clock("accept"):
            verdict = accept(tree, lambda node, path: self._sampler.draw(result.logits[node], path))
        with clock("commit"):
            self._cache.commit(0, verdict.path)
            taps = None if result.taps is None else result.taps[[0, *verdict.path]]
            self._extend([int(tree.tokens[0]), *verdict.accepted], taps)
        return verdict

    def close(self) -> None:
        """Everything here belongs to the request and goes with it."""

    def _extend(self, tokens: Sequence[int], taps: Tensor | None) -> None:
        if self._drafter is not None:
            self._drafter.extend(self._state, list(tokens), taps)


def prefill(
    target: Target, cache: KVCache, prompt: Sequence[int], extend: Callable[[Sequence[int], Tensor | None], None]
) -> Tensor:
    """Commit a prompt in chunks, handing each with its taps to `extend`; the logits `[V]` after its last token."""
    for at in range(0, len(prompt), PREFILL_CHUNK):
        chunk = prompt[at : at + PREFILL_CHUNK]
        result = target.prefill(chunk, cache, 0)
        extend(chunk, result.taps)
    return result.logits[-1]
