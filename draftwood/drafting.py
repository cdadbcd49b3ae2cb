"""A drafter at work on the host: what it is asked for, how its drafts become trees, and what it learns of the texts."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood import limits
from draftwood.accept import Verdict
from draftwood.clock import Clock
from draftwood.drafters import base
from draftwood.errors import BadModel
from draftwood.foresight import foreseen
from draftwood.native.slots import picked
from draftwood.request import Part, Request
from draftwood.target import Target
from draftwood.tree import Draft, Growable, Lattice, Tree

MOST_UNTOLD = 64  # rounds whose taps wait for the drafter: bounds the memory that they hold

Committed = tuple[list[int], Tensor | None]  # tokens and their taps


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A tree below a request's root, and what the record keeps of the draft."""

    tree: Tree
    draft: Lattice | Tree
    # Positions that the drafter was asked for, if more of them make its forward longer; 0: it did not run.
    positions: int | None = None
    faint: float = 0.0  # of a conditional draft: the mass below which none of its chains goes

    @property
    def asked(self) -> bool:
        """Whether a drafter ran."""
        return self.positions != 0


def ran(proposals: Sequence[Proposal | None]) -> int:
    """For how many requests a drafter ran."""
    return sum(found is not None and found.asked for found in proposals)


class Drafting:
    """One drafter and its states, for the requests of a batch."""

    def __init__(self, drafter: base.Drafter, target: Target) -> None:
        self._drafter, self._target = drafter, target
        self._learner = drafter if isinstance(drafter, base.Learner) else None
        self._states: dict[Request, Any] = {}
        self._untold: dict[Request, list[Committed]] = {}  # committed, but not yet read by the drafter
        self._drafted: set[Request] = set()  # requests that this round drafted for
        self._vocab = target.vocab_size
        self._deepens = drafter.work(0).flops > 0

    def join(self, request: Request, state: Any) -> None:
        self._states[request] = state

    def leave(self, request: Request) -> Any:
        """Remove a request; returns the drafter's state, which has then read all committed tokens."""
        self._tell(request)
        return self._states.pop(request)

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        """draft, grow: as in `Rounds`."""
        asked = [request for request, asks in zip(requests, drafts, strict=True) if asks]
        self._drafted = set(asked)
        if not asked:
            return [None] * len(requests)
        start = time.perf_counter()
        for request in asked:
            self._tell(request)
        asks = list(map(self._asks, asked))
        found = self._drafter.draft(asks)
        positions = [self._positions(ask, draft) for ask, draft in zip(asks, found, strict=True)]
        # Seconds count as "draft" only if a drafter ran: the price of drafts is learned from them.
        clock.add("draft" if any(at != 0 for at in positions) else "grow", time.perf_counter() - start)
        with clock("grow"):
            found = [foreseen(d, ask.ahead) if ask.ahead else d for d, ask in zip(found, asks, strict=True)]
            trees = list(map(grown, asked, found))
            self._require_known(trees)
            self._require_shallow(trees)
        proposals = iter(map(Proposal, trees, map(_recorded, found, trees), positions, map(_faint, found)))
        return [next(proposals) if drafted else None for drafted in drafts]

    def commit(self, part: Part, nodes: Sequence[int], taps: Tensor | None, start: int) -> None:
        """Take in committed nodes of a part; `taps` are the whole forward's, and the part's begin at `start`."""
        untold, tokens = self._untold.setdefault(part.request, []), part.tree.tokens.tolist()
        untold.append(([tokens[node] for node in nodes], _taps_of(taps, start, nodes)))
        if part.known or self._drafted or len(untold) == MOST_UNTOLD:  # beside drafts, taps are a part of many
            self._tell(part.request)

    @property
    def listens(self) -> bool:
        """Whether the drafter wants to learn from the target's logits of this round."""
        return self._learner is not None and self._learner.listens

    def learn(self, parts: Sequence[Part], verdicts: Sequence[Verdict | None], logits: Tensor) -> None:
        """Teach the drafter the target's `logits` of all parts, one behind the other; known text has one row."""
        assert self._learner is not None
        tokens, rows = _committed(parts, verdicts, self._drafted)
        if tokens:
            first, end = rows[0], rows[-1] + 1
            whole = rows == list(range(first, end))  # the usual case, in which nothing need be copied
            self._learner.learn(tokens, logits[first:end] if whole else logits[rows])

    def _positions(self, ask: base.Request, draft: Draft) -> int | None:
        if isinstance(draft, Growable) and not draft.asked:
            return 0
        return ask.depth if self._deepens else None

    def _require_known(self, trees: Sequence[Tree]) -> None:
        """Raise BadModel for tokens that the target does not know: they would be looked up beyond its weights."""
        for tree in trees:
            tokens = tree.tokens.tolist()
            least, most = min(tokens), max(tokens)
            if least < 0 or most >= self._vocab:
                raise BadModel(
                    f"The drafter {self._drafter.name} proposed the token id {least if least < 0 else most}, but "
                    f"{self._target.name} knows the ids 0 to {self._vocab - 1}; use a drafter made for this target."
                )

    def _require_shallow(self, trees: Sequence[Tree]) -> None:
        """Raise BadModel for nodes deeper than a drafter says it goes: a device's buffers have no room for them."""
        deepest, most = max((int(tree.depths.max()) for tree in trees), default=0), self._drafter.max_depth
        if deepest > most:
            raise BadModel(
                f"The drafter {self._drafter.name} proposed a token at depth {deepest}, but its max_depth is {most}; "
                "its author has to raise it."
            )

    def _asks(self, request: Request) -> base.Request:
        asked = limits.asked(request.policy, request.acceptance, request.remaining)
        ahead = request.sampler.ahead if request.foresees else None
        return base.Request(self._states[request], request.root, asked.width, asked.positions, ahead)

    def _tell(self, request: Request) -> None:
        """Give the drafter what was committed since it last heard of a request."""
        committed = self._untold.pop(request, [])
        if not committed:
            return
        tokens = [token for told, _ in committed for token in told]
        taps = [part for _, part in committed if part is not None]
        joined = torch.cat(taps) if len(taps) > 1 else next(iter(taps), None)
        self._drafter.extend(self._states[request], tokens, joined)


def grown(request: Request, draft: Draft) -> Tree:
    """The tree that a request's policy grows from a draft."""
    return limits.grown(request.policy, request.acceptance, draft, request.root, request.remaining)


def _recorded(draft: Draft, tree: Tree) -> Lattice | Tree:
    """What the record keeps: a lattice's likeliest candidates, copied so that the rest can be freed, or else the
    tree."""
    if not isinstance(draft, Lattice):
        return tree
    return Lattice(draft.tokens[:, : limits.RECORDED].copy(), draft.logp[:, : limits.RECORDED].copy())


def _faint(draft: Draft) -> float:
    return 0.0 if isinstance(draft, Lattice | Tree) else draft.faint


def _taps_of(taps: Tensor | None, start: int, nodes: Sequence[int]) -> Tensor | None:
    """The taps of some nodes of the part whose taps begin at `start`; a range of nodes is the whole part."""
    if taps is None or len(nodes) == taps.shape[0]:
        return taps
    if isinstance(nodes, range):
        return taps[start : start + len(nodes)]
    return picked(taps, [start + node for node in nodes])


def _committed(
    parts: Sequence[Part], verdicts: Sequence[Verdict | None], drafted: Container[Request]
) -> tuple[list[int], list[int]]:
    """Committed tokens that have logits, and the rows of these: what a drafter may learn from.

    The softmax of all rows of a tree would take as long as growing it. Requests without a draft are left out: plain
    decoding needs no drafter, and where drafting does not pay, learning for it does not either.
    """
    tokens: list[int] = []
    rows: list[int] = []
    start = 0
    for part, verdict in zip(parts, verdicts, strict=True):
        if verdict is not None and (part.request in drafted or (part.known and part.request.policy.n_max)):
            kept = [-1] if part.known else [0, *verdict.path]
            tokens += part.tree.tokens[kept].tolist()
            rows += [start + max(node, 0) for node in kept]  # of known text there is one row, its last
        start += 1 if part.known else part.size
    return tokens, rows
