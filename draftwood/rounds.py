"""How the verbs of a round run: the interface that the batch's loop drives, and its form on the host.

The other form, on the device with static shapes, is `device/rounds.py`. Both give the same text.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwood import limits
from draftwood.accept import Likelihood, Verdict, accept
from draftwood.cache import KVCache, Row
from draftwood.clock import Clock
from draftwood.drafters import base
from draftwood.errors import BadModel
from draftwood.foresight import foreseen
from draftwood.memory import require_request
from draftwood.native.candidates import Rows
from draftwood.native.slots import picked
from draftwood.plan import Verified
from draftwood.request import Part, Request
from draftwood.sampling import Sampler
from draftwood.target import Target
from draftwood.tree import Draft, Growable, Lattice, Tree

PREFILL_CHUNK = 512  # tokens: bounds the mask and the activations of a long prompt
MOST_UNTOLD = 64  # rounds whose taps wait for the drafter: bounds the memory that they hold

Committed = tuple[list[int], Tensor | None]  # tokens and their taps


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What the caches hold of one text: the target's keys and values and the drafter's state, never one alone."""

    row: Row
    state: Any  # of the drafter; None without one


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A tree below a request's root, and for the record what it was grown from, or itself."""

    tree: Tree
    draft: Lattice | Tree
    # That the drafter was asked for, where a forward takes the longer the more these are; 0: it did not run.
    positions: int | None = None

    @property
    def asked(self) -> bool:
        """Whether a drafter ran."""
        return self.positions != 0


def ran(proposals: Sequence[Proposal | None]) -> int:
    """For how many requests a drafter ran."""
    return sum(found is not None and found.asked for found in proposals)


class Rounds(Protocol):
    """The rounds of the requests that have joined: `propose`, `verify`, `settle`, again and again.

    A prompt comes as known parts. The batch commits to a request's sampler what `settle` gave before it proposes again.
    """

    @property
    def ahead(self) -> bool:
        """Whether a round is begun before the text of the one before leaves, so that its work goes on meanwhile."""
        ...

    @property
    def widths(self) -> tuple[int, ...] | None:
        """How many tokens a forward can have, the root included, in ascending order; None: any number."""
        ...

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        """Make room for a request, whose text may begin with a `prefix` that it then owns."""
        ...

    def leave(self, request: Request) -> Prefix | None:
        """The request is over, or abandoned; what is left of it, if that is its own."""
        ...

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        """draft, grow: something for each request, or None if nothing was drafted for it.

        Where rounds run ahead, `drafts` asks for the trees after these.
        """
        ...

    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        """Run the target over prefixes of the proposed trees, or roots alone, or known text. May return before it
        is done."""
        ...

    def settle(self, clock: Clock) -> list[Verdict | None]:
        """accept, commit: what the target made of each part; None of a chunk that does not end its prompt."""
        ...


class HostRounds:
    """Every verb on the host, one after the other. Serves every target, drafter, policy and rule."""

    ahead = False
    widths = None

    def __init__(self, target: Target, drafter: base.Drafter | None) -> None:
        self._target, self._drafter = target, drafter
        self._learner = drafter if isinstance(drafter, base.Learner) else None
        self._cache = KVCache(target.num_layers, [])
        self._prefixes: dict[Request, Prefix] = {}
        self._untold: dict[Request, list[Committed]] = {}  # to the drafter, which hears of it when it drafts
        self._verified: tuple[Sequence[Part], Verified] | None = None
        self._drafted: set[Request] = set()  # in this round
        self._vocab = target.vocab_size
        self._deepens = drafter is not None and drafter.work(0).flops > 0

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        if prefix is None:
            capacity = request.capacity
            width = 1 + request.policy.n_max
            self._target.group.every(lambda: require_request(self._target, self._drafter, capacity, width))
            state = self._drafter.open(capacity) if self._drafter else None
            prefix = Prefix(self._target.new_row(capacity), state)
        self._prefixes[request] = prefix

    def leave(self, request: Request) -> Prefix:
        self._tell(request)
        return self._prefixes.pop(request)

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        drafts = self._target.group.decide(lambda: list(drafts))
        asked = [request for request, asks in zip(requests, drafts, strict=True) if asks]
        self._drafted = set(asked)
        if self._drafter is None or not asked:
            return [None] * len(requests)
        start = time.perf_counter()
        for request in asked:
            self._tell(request)
        asks = list(map(self._asks, asked))
        found = self._drafter.draft(asks)
        positions = [self._positions(ask, draft) for ask, draft in zip(asks, found, strict=True)]
        # What only the text's own memory drafted took no draft's time, by which others would be priced.
        clock.add("draft" if any(at != 0 for at in positions) else "grow", time.perf_counter() - start)
        with clock("grow"):
            found = [foreseen(d, ask.ahead) if ask.ahead else d for d, ask in zip(found, asks, strict=True)]
            trees = list(map(grown, asked, found))
            self._require_known(trees, self._drafter.name)
        proposals = iter(map(Proposal, trees, map(_recorded, found, trees), positions))
        return [next(proposals) if drafted else None for drafted in drafts]

    def _positions(self, ask: base.Request, draft: Draft) -> int | None:
        if isinstance(draft, Growable) and not draft.asked:
            return 0
        return ask.depth if self._deepens else None

    def _require_known(self, trees: Sequence[Tree], drafter: str) -> None:
        """Raise BadModel for tokens that the target does not know: they would be looked up beyond its weights."""
        for tree in trees:
            tokens = tree.tokens.tolist()
            least, most = min(tokens), max(tokens)
            if least < 0 or most >= self._vocab:
                raise BadModel(
                    f"The drafter {drafter} proposed the token id {least if least < 0 else most}, but "
                    f"{self._target.name} knows the ids 0 to {self._vocab - 1}; use a drafter made for this target."
                )

    def _asks(self, request: Request) -> base.Request:
        asked = limits.asked(request.policy, request.acceptance, request.remaining)
        ahead = request.sampler.ahead if request.foresees else None
        return base.Request(self._prefixes[request].state, request.root, asked.width, asked.positions, ahead)

    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        with clock("verify"):
            self._cache.rows = [self._prefixes[part.request].row for part in parts]
            known = [part.known for part in parts]
            plan = self._target.plan([part.tree for part in parts], self._cache, range(len(parts)), known)
            self._verified = parts, self._target.verify(plan, self._cache)

    def settle(self, clock: Clock) -> list[Verdict | None]:
        assert self._verified is not None, "settle follows verify"
        parts, result = self._verified
        with clock("accept"):
            verdicts = self._target.group.decide(lambda: _verdicts(parts, result))
        with clock("commit"):
            start = 0
            for part, verdict in zip(parts, verdicts, strict=True):
                self._commit(part, verdict, result.taps, start)
                start += part.size
        if self._learner is not None and self._learner.listens:
            with clock("observe"):
                tokens, rows = _committed(parts, verdicts, self._drafted)
                if tokens:
                    first, end = rows[0], rows[-1] + 1
                    whole = rows == list(range(first, end))  # mostly, and then nothing need be copied
                    self._learner.learn(tokens, result.logits[first:end] if whole else result.logits[rows])
        self._verified = None
        self._cache.clear()  # or a request that leaves would keep its memory until the next forward
        return verdicts

    def _commit(self, part: Part, verdict: Verdict | None, taps: Tensor | None, start: int) -> None:
        """`taps` are those of the whole forward, and the part's begin at `start`."""
        row = self._prefixes[part.request].row
        nodes: Sequence[int] = range(part.size)
        if part.known:
            row.advance(part.size)
        else:
            assert verdict is not None
            nodes = [0, *verdict.path]
            row.commit(verdict.path)
        if self._drafter is not None:
            untold, tokens = self._untold.setdefault(part.request, []), part.tree.tokens.tolist()
            untold.append(([tokens[node] for node in nodes], _taps_of(taps, start, nodes)))
            if part.known or self._drafted or len(untold) == MOST_UNTOLD:  # beside drafts, taps are a part of many
                self._tell(part.request)

    def _tell(self, request: Request) -> None:
        """Give the drafter what was committed since it last heard of a request."""
        committed = self._untold.pop(request, [])
        if self._drafter is None or not committed:
            return
        tokens = [token for told, _ in committed for token in told]
        taps = [part for _, part in committed if part is not None]
        joined = torch.cat(taps) if len(taps) > 1 else next(iter(taps), None)
        self._drafter.extend(self._prefixes[request].state, tokens, joined)


def _taps_of(taps: Tensor | None, start: int, nodes: Sequence[int]) -> Tensor | None:
    """Of some nodes of the part whose taps begin at `start`; of all of it where these are a range."""
    if taps is None or len(nodes) == taps.shape[0]:
        return taps
    if isinstance(nodes, range):
        return taps[start : start + len(nodes)]
    return picked(taps, [start + node for node in nodes])


def grown(request: Request, draft: Draft) -> Tree:
    """What a request's policy makes of a draft."""
    return limits.grown(request.policy, request.acceptance, draft, request.root, request.remaining)


def _recorded(draft: Draft, tree: Tree) -> Lattice | Tree:
    """A lattice's likeliest candidates, copied so that the others can go; of anything else what was grown from it."""
    if not isinstance(draft, Lattice):
        return tree
    return Lattice(draft.tokens[:, : limits.RECORDED].copy(), draft.logp[:, : limits.RECORDED].copy())


def _committed(
    parts: Sequence[Part], verdicts: Sequence[Verdict | None], drafted: Container[Request]
) -> tuple[list[int], list[int]]:
    """Committed tokens that logits were computed for, and their rows: what a drafter may learn from.

    The softmax of a whole tree's rows would take as long as growing it. Rounds without a draft pay for none: plain
    decoding asks for none, and where drafting does not pay, learning for it does not either.
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


def _verdicts(parts: Sequence[Part], result: Verified) -> list[Verdict | None]:
    rows = result.rows or Rows.of(result.logits)
    if len(parts) == 1:  # often: no view is made
        return [_judge(parts[0], result.logits, rows)]
    sizes = [1 if part.known else part.size for part in parts]
    each = zip(parts, result.logits.split(sizes), accumulate(sizes, initial=0), strict=False)
    return [_judge(part, logits, rows and rows.behind(start)) for part, logits, start in each]


def _judge(part: Part, logits: Tensor, rows: Rows | None) -> Verdict | None:
    """The target's verdict on a part, from its `logits` [1 + N, V]; of known text those of the last token."""
    if part.known and not part.ends_prompt:
        return None
    top = part.request.likelihoods
    verdict = _accepted(part.tree[:0] if part.known else part.tree, part.request.sampler, logits, rows)
    visited = [0, *verdict.path]
    sure = _confidence(logits, rows, visited) if _heeds(part) else None
    told = None if top is None else likelihoods(logits[visited], verdict.tokens, top)
    return Verdict(verdict.path, verdict.accepted, verdict.bonus, told, sure)


def _heeds(part: Part) -> bool:
    """Whether to look how sure the target is: a pass over a row of each visited node, so only at every fourth token."""
    request = part.request
    return request.policy.calibrated and not part.known and len(request.sampler.tokens) % 4 == 0


def _accepted(tree: Tree, sampler: Sampler, logits: Tensor, rows: Rows | None) -> Verdict:
    """What the target draws at the nodes that are visited: few are, of a wide tree."""
    if sampler.shaped or rows is None:
        return accept(tree, lambda node, path: sampler.draw(logits[node], path))
    # No node is deeper than there are nodes.
    return rows.walk(tree, sampler.sampling, None if sampler.plain else sampler.keys(0, len(tree.tokens)))


def _confidence(logits: Tensor, rows: Rows | None, nodes: Sequence[int]) -> float:
    """The probability of the likeliest token, on average of some nodes."""
    if rows is not None:
        return sum(map(rows.confidence, nodes)) / len(nodes)
    return float(torch.softmax(logits[nodes].float(), -1).amax(-1).mean())


def likelihoods(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Likelihood, ...]:
    """Of each of `tokens`, drawn from a row of `logits` [M, V]: its log-probability and the `top` likeliest."""
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    own = logp[torch.arange(len(tokens)), list(tokens)].tolist()
    values, ids = (part.tolist() for part in logp.topk(top))
    best = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    return tuple(map(Likelihood, own, best))
