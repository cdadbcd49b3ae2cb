"""D²SD (arXiv 2606.04446): a second drafter begins again where the first is likeliest to be rejected.

The first drafter's chain is accepted for exactly i tokens with probability r(i) = c_1 … c_i (1 - c_{i+1}), c_k being
the confidence of its k-th token. At the boundaries with the largest r, a variable-prefix drafter sees the chain so far
and predicts the rest; all boundaries go through one batched pass over the context that they share. Each prediction
becomes the lattice of the chain's node at that boundary, so that growth mixes the first pass's siblings with the second
pass's continuations by mass, and nothing is verified twice. Each round decides whether a second pass is worth its time.

Where trees reach the block's end and its chain is likely to be accepted whole, a further block can follow. It sees the
end of the chain and predicts what comes next. Drafted tokens have no target features, so this block knows less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from draftwood.drafters.base import Carded, Request, Stateful, Weighed
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.options import parse
from draftwood.drafters.worth import Trials
from draftwood.errors import BadModel
from draftwood.latency import Work
from draftwood.plan import taps_of
from draftwood.target import Target
from draftwood.tree import FAINT, Child, Draft, Floats, Lattice, Tree
from draftwood.trellis import Block

NEVER, ALWAYS, DECIDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the drafter, as in `d2sd:FIRST,SECOND,boundaries=2`."""

    boundaries: int = field(default=4, metadata={"least": 1, "most": 16})  # where a second pass begins: K of the paper
    passes: int = field(
        default=1, metadata={"least": 1, "most": 3}
    )  # of the second drafter; 2: the paper's third level
    samples: int = field(default=0, metadata={"least": 0, "most": 16})  # chains drawn instead of a second pass
    again: int = field(default=DECIDED, metadata={"least": NEVER, "most": DECIDED})  # 0 never, 1 always, 2 if it pays
    further: int = field(default=DECIDED, metadata={"least": NEVER, "most": DECIDED})  # the same for a further block


@dataclass(frozen=True, slots=True)
class D2SDState:
    first: Any
    second: Any
    trials: Trials  # of the second pass
    further: Trials  # of a further block


class Place(NamedTuple):
    """A node of an `Anchored` draft."""

    block: Block  # predicts its children
    row: int  # of the block
    token: int  # of the node; not used where a block begins, which has seen it
    path: tuple[int, ...] | None  # from the root; None once no block begins at it or below it


class Anchored:
    """A conditional draft: blocks by the path after which each begins."""

    faint = FAINT

    def __init__(self, first: Block) -> None:
        self.anchors: dict[tuple[int, ...], Block] = {(): first}
        self._prefixes: set[tuple[int, ...]] = {()}

    def add(self, path: tuple[int, ...], block: Block) -> None:
        """A block that has seen the tokens `path` and predicts what follows them."""
        self.anchors[path] = block
        self._prefixes |= {path[:i] for i in range(len(path) + 1)}

    def start(self) -> Place:
        return Place(self.anchors[()], 0, -1, ())

    def step(self, place: Place, token: int) -> Place:
        path = None if place.path is None else (*place.path, token)
        if path not in self._prefixes:
            path = None
        elif path in self.anchors:
            return Place(self.anchors[path], 0, token, path)
        return Place(place.block, place.row + 1, token, path)

    def children(self, place: Place) -> Iterator[Child]:
        source = int(place.block is not self.anchors[()])
        if place.row < len(place.block):
            for token, logp in zip(*place.block.row(place.row, place.token), strict=True):
                if not logp > -np.inf:  # impossible, or not a number
                    return
                yield max(-logp, 0.0), token, source


class D2SDDrafter(Weighed, Carded, Stateful):
    """Two DFlash drafters; the second is worth little unless it was trained with variable prefixes."""

    def __init__(self, first: DFlashDrafter, second: DFlashDrafter, options: Options, name: str) -> None:
        self.name, self._first, self._second, self._options = name, first, second, options
        self.tap_layers = tuple(dict.fromkeys((*first.tap_layers, *second.tap_layers)))
        self._seen = min(second.max_depth // 2, first.max_depth - 1)  # tokens at the chain's end, in a further block
        longest = first.max_depth + second.max_depth - self._seen
        self.max_depth = longest if options.further else max(first.max_depth, second.max_depth)

    @classmethod
    def load(cls, argument: str, target: Target) -> D2SDDrafter:
        """From `FIRST,SECOND,boundaries=4`; without SECOND the first drafter is used twice. BadInput, BadModel."""
        names, options = split(argument)
        how = parse(Options, "d2sd", options)  # before anything is loaded: a mistake is reported at once
        first = DFlashDrafter.load(names[0], target)
        second = DFlashDrafter.load(names[1], target) if len(names) > 1 else first
        return cls(first, second, how, f"d2sd:{argument}")

    def state_bytes(self, capacity: int) -> int:
        return sum(drafter.state_bytes(capacity) for drafter in (self._first, self._second))

    @classmethod
    def weight_bytes(cls, argument: str, itemsize: int) -> int:
        names, _ = split(argument)
        return sum(DFlashDrafter.weight_bytes(name, itemsize) for name in names)

    @property
    def promised_tau(self) -> float | None:
        """The first drafter's: a second pass is meant to add to it."""
        return self._first.promised_tau

    def open(self, capacity: int) -> D2SDState:
        first = self._first.open(capacity)
        return D2SDState(first, first if self._once else self._second.open(capacity), Trials(), Trials())

    def extend(self, state: D2SDState, tokens: list[int], taps: Tensor | None) -> None:
        for trials in (state.trials, state.further):
            trials.emitted(len(tokens))
        self._first.extend(state.first, tokens, taps_of(self._first.tap_layers, self.tap_layers, taps))
        if not self._once:
            self._second.extend(state.second, tokens, taps_of(self._second.tap_layers, self.tap_layers, taps))

    def rewind(self, state: D2SDState, length: int) -> None:
        self._first.rewind(state.first, length)
        if not self._once:
            self._second.rewind(state.second, length)

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One conditional draft per request, or its first block alone."""
        for request in requests:
            request.state.trials.begin()
            request.state.further.begin()
        blocks = self._first.draft_behind([(_of(r, "first"), ()) for r in requests])
        if self._options.samples:
            return [self._samples(request, block) for request, block in zip(requests, blocks, strict=True)]
        drafts = [Anchored(block) for block in blocks]
        again = [i for i, draft in enumerate(drafts) if self._begins_again(requests[i].state, draft)]
        for _ in range(self._options.passes):
            self._anchor([requests[i] for i in again], [drafts[i] for i in again])
        further = [i for i, draft in enumerate(drafts) if self._goes_further(requests[i], draft)]
        self._follow([requests[i] for i in further], [drafts[i] for i in further])
        return [draft if len(draft.anchors) > 1 else draft.anchors[()] for draft in drafts]

    def work(self, context: int) -> Work:
        """The first pass; the cost of a second one is learned from the rounds."""
        return self._first.work(context)

    @property
    def _once(self) -> bool:
        return self._second is self._first

    def _samples(self, request: Request, block: Block) -> Tree:
        """Drawn with a seed that depends only on the place in the text: a draft must not know the target's draws."""
        seed = len(request.state.first), request.root
        lattice = block if isinstance(block, Lattice) else block.lattice
        return naive_samples(lattice, request.root, self._options.samples, np.random.default_rng(seed))

    def _begins_again(self, state: D2SDState, draft: Anchored) -> bool:
        _, confidence = chain_of(draft.anchors[()])
        scores = first_rejection(confidence)[1:]
        chance = float(np.sort(scores)[-self._options.boundaries :].sum())
        decided = state.trials.choose(chance)
        return (False, True, decided)[self._options.again]

    def _goes_further(self, request: Request, draft: Anchored) -> bool:
        """Only after a whole block, and if recent trees reached its end; then the trials so far decide."""
        trials, deepest = request.state.further, self._first.max_depth
        whole = len(draft.anchors[()]) == deepest and (request.depth is None or request.depth > deepest)
        if self._options.further == NEVER or not whole:
            return False
        chain, _ = chain_of(draft.anchors[()])
        decided = trials.choose(_mass(draft, tuple(chain)))
        return self._options.further == ALWAYS or decided

    def _follow(self, requests: Sequence[Request], drafts: Sequence[Anchored]) -> None:
        """One batched pass: a further block after each chain; it begins inside the chain."""
        gap = self._first.max_depth - self._seen
        chains = [chain_of(draft.anchors[()])[0] for draft in drafts]
        asked = [
            (replace(_of(request, "second"), root=chain[gap - 1], depth=None), chain[gap:])
            for request, chain in zip(requests, chains, strict=True)
        ]
        if asked:
            for draft, chain, block in zip(drafts, chains, self._second.draft_behind(asked, gap), strict=True):
                draft.add(tuple(chain), block)

    def _anchor(self, requests: Sequence[Request], drafts: Sequence[Anchored]) -> None:
        """One batched pass: new blocks at the likeliest first rejections of the blocks so far."""
        asked, places = [], []
        for request, draft in zip(requests, drafts, strict=True):
            depth = min(self._second.max_depth, request.depth or self._second.max_depth)
            for path in boundaries(draft, self._options.boundaries, depth):
                asked.append((_of(request, "second"), path))
                places.append((draft, path))
        if asked:
            for (draft, path), block in zip(places, self._second.draft_behind(asked), strict=True):
                draft.add(path, block)


def naive_samples(lattice: Lattice, root: int, count: int, rng: np.random.Generator) -> Tree:
    """The likeliest chain and `count` chains drawn depth by depth, as one tree: the paper's control for a second pass.

    Best first; masses are those of the lattice's paths.
    """
    p = np.exp(np.minimum(np.nan_to_num(lattice.logp.astype(np.float64), nan=-np.inf), 0.0))
    reach = np.cumsum(p, 1) / np.maximum(p.sum(1, keepdims=True), np.finfo(np.float64).tiny)
    drawn = (rng.random((count, len(p), 1)) > reach).sum(-1)
    mass: dict[tuple[int, ...], float] = {(): 1.0}  # by the ranks that lead to a node
    for ranks in [[0] * len(p), *np.minimum(drawn, p.shape[1] - 1).tolist()]:
        for depth, rank in enumerate(ranks):
            path = tuple(ranks[:depth])
            mass[(*path, rank)] = mass[path] * float(p[depth, rank])
    order = {path: node for node, path in enumerate(sorted(mass, key=lambda path: (-mass[path], len(path), path)))}
    tokens = [int(lattice.tokens[len(path) - 1, path[-1]]) if path else root for path in order]
    parents = [order[path[:-1]] if path else -1 for path in order]
    masses = np.array([mass[path] for path in order], np.float32)
    return Tree(np.array(tokens), np.array(parents), np.array([len(path) for path in order]), masses)


def chain_of(block: Block) -> tuple[list[int], Floats]:
    """The likeliest token of each depth given the one before, and the drafter's confidence `[D]` in each."""
    tokens: list[int] = []
    logp = []
    for depth in range(len(block)):
        row, scores = block.row(depth, tokens[-1] if tokens else -1)
        tokens.append(row[0])
        logp.append(scores[0])
    confidence: Floats = np.exp(np.minimum(np.nan_to_num(np.array(logp, np.float32), nan=-np.inf), 0.0))
    return tokens, confidence


def first_rejection(confidence: Floats) -> Floats:
    """r(i) `[D]`: the probability that exactly the first i tokens of a chain are accepted, i < D."""
    reached = np.concatenate([[1.0], np.cumprod(confidence)[:-1]])
    scores: Floats = (reached * (1 - confidence)).astype(np.float32)
    return scores


def boundaries(draft: Anchored, count: int, depth: int) -> list[tuple[int, ...]]:
    """The `count` paths with the largest r at which no block begins yet; never the root, where the first begins."""
    found: dict[tuple[int, ...], float] = {}
    for path, block in draft.anchors.items():
        tokens, confidence = chain_of(block)
        mass = _mass(draft, path)
        for i, score in enumerate(first_rejection(confidence).tolist()):
            longer = (*path, *tokens[:i])
            if 0 < len(longer) < depth and longer not in draft.anchors:
                found[longer] = max(found.get(longer, 0.0), mass * score)
    return sorted(found, key=lambda path: (-found[path], path))[:count]


def _mass(draft: Anchored, path: tuple[int, ...]) -> float:
    """The draft's probability of a path."""
    place, cost = draft.start(), 0.0
    for token in path:
        cost += next((c for c, name, _ in draft.children(place) if name == token), np.inf)
        place = draft.step(place, token)
    return float(np.exp(-cost))


def _of(request: Request, part: str) -> Request:
    """The request as one of the two drafters sees it."""
    return replace(request, state=getattr(request.state, part))


def split(argument: str) -> tuple[list[str], str]:
    """Names and parameters of `FIRST,SECOND,boundaries=4`."""
    parts = [part.strip() for part in argument.split(",")]
    names = [part for part in parts if part and "=" not in part]
    if not 1 <= len(names) <= 2:
        raise BadModel(f"d2sd:{argument} names {len(names)} drafters; write d2sd:FIRST or d2sd:FIRST,SECOND.")
    return names, ",".join(part for part in parts if "=" in part)
