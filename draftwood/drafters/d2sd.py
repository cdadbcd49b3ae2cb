"""D²SD (arXiv 2606.04446): a second drafter begins again where the first is likeliest to be rejected.

The first drafter's chain is accepted for exactly i tokens with probability r(i) = c_1 … c_i (1 - c_{i+1}), c_k being
the confidence of its k-th token. At the boundaries with the largest r, a variable-prefix drafter sees the chain so far
and predicts the rest, all of them in one batched pass over a context that they share. What it says becomes the
conditional lattice of the chain's node there, so that growth mixes the first pass's siblings with the second pass's
continuations by mass, and nothing is verified twice. Whether the second pass is worth its time is decided each round.

Where trees reach the block's end and its chain is likely to be accepted whole, a further block can follow: the end of
the chain is seen, the rest predicted. Of drafted tokens there are no target features, so it knows less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from draftwood.drafters.base import Carded, Request, Weighed, taps_of
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.options import parse
from draftwood.drafters.worth import Trials
from draftwood.errors import BadModel
from draftwood.latency import Work
from draftwood.target import Target
from draftwood.tree import FAINT, Child, Draft, Floats, Lattice, Tree

NEVER, ALWAYS, DECIDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the drafter, as in `d2sd:FIRST,SECOND,boundaries=2`."""

    boundaries: int = field(default=4, metadata={"least": 1, "most": 16})  # K of the paper
    passes: int = field(
        default=1, metadata={"least": 1, "most": 3}
    )  # of the second drafter; 2: the paper's third level
    samples: int = field(default=0, metadata={"least": 0, "most": 16})  # chains drawn instead of a second pass
    again: int = field(default=DECIDED, metadata={"least": NEVER, "most": DECIDED})  # 0 never, 1 always, 2 if it pays
    further: int = field(default=DECIDED, metadata={"least": NEVER, "most": DECIDED})  # the same of a further block


@dataclass(frozen=True, slots=True)
class D2SDState:
    first: Any
    second: Any
    trials: Trials  # of the second pass
    further: Trials  # of a further block


class Anchored:
    """Lattices by the path at which each begins again: a conditional draft. A place is (lattice, depth, path or None).

    `path` is the way from the root, for as long as some lattice begins on it or behind it.
    """

    faint = FAINT

    def __init__(self, first: Lattice) -> None:
        self.anchors: dict[tuple[int, ...], Lattice] = {(): first}
        self._prefixes: set[tuple[int, ...]] = {()}

    def add(self, path: tuple[int, ...], lattice: Lattice) -> None:
        """A lattice that has seen the tokens `path`; its rows before count for nothing."""
        self.anchors[path] = lattice
        self._prefixes |= {path[:i] for i in range(len(path) + 1)}

    def start(self) -> tuple[Lattice, int, tuple[int, ...] | None]:
        return self.anchors[()], 0, ()

    def step(
        self, place: tuple[Lattice, int, tuple[int, ...] | None], token: int
    ) -> tuple[Lattice, int, tuple[int, ...] | None]:
        lattice, depth, path = place
        longer = None if path is None else (*path, token)
        if longer not in self._prefixes:
            return lattice, depth + 1, None
        return self.anchors.get(longer, lattice), depth + 1, longer

    def children(self, place: tuple[Lattice, int, tuple[int, ...] | None]) -> Iterator[Child]:
        lattice, depth, _ = place
        source = int(lattice is not self.anchors[()])
        if depth < len(lattice.tokens):
            for token, logp in zip(lattice.tokens[depth].tolist(), lattice.logp[depth].tolist(), strict=True):
                if not logp > -np.inf:  # dead, or not a number
                    return
                yield max(-logp, 0.0), token, source


class D2SDDrafter(Weighed, Carded):
    """Two DFlash drafters; of the second one only checkpoints with variable prefixes are worth much."""

    def __init__(self, first: DFlashDrafter, second: DFlashDrafter, options: Options, name: str) -> None:
        self.name, self._first, self._second, self._options = name, first, second, options
        self.tap_layers = tuple(dict.fromkeys((*first.tap_layers, *second.tap_layers)))
        self._seen = second.max_depth // 2  # tokens of the chain's end in a further block
        longest = first.max_depth + second.max_depth - self._seen
        self.max_depth = longest if options.further else max(first.max_depth, second.max_depth)

    @classmethod
    def load(cls, argument: str, target: Target) -> D2SDDrafter:
        """From `FIRST,SECOND,boundaries=4`; without SECOND the first drafter is used twice. BadInput, BadModel."""
        names, options = split(argument)
        first = DFlashDrafter.load(names[0], target)
        second = DFlashDrafter.load(names[1], target) if len(names) > 1 else first
        return cls(first, second, parse(Options, "d2sd", options), f"d2sd:{argument}")

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
        for trials in (state.trials, state.further):
            trials.forget()
        self._first.rewind(state.first, length)
        if not self._once:
            self._second.rewind(state.second, length)

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One conditional draft per request, or its first lattice alone."""
        lattices = self._first.draft_behind([(_of(r, "first"), ()) for r in requests])
        if self._options.samples:
            return [self._samples(request, lattice) for request, lattice in zip(requests, lattices, strict=True)]
        drafts = [Anchored(lattice) for lattice in lattices]
        again = [i for i, draft in enumerate(drafts) if self._begins_again(requests[i].state, draft)]
        for _ in range(self._options.passes):
            self._anchor([requests[i] for i in again], [drafts[i] for i in again])
        further = [i for i, draft in enumerate(drafts) if self._goes_further(requests[i], draft)]
        self._follow([requests[i] for i in further], [drafts[i] for i in further])
        return [draft if len(draft.anchors) > 1 else draft.anchors[()] for draft in drafts]

    def work(self, context: int) -> Work:
        """The first pass; what a second one takes is learned with the rounds."""
        return self._first.work(context)

    @property
    def _once(self) -> bool:
        return self._second is self._first

    def _samples(self, request: Request, lattice: Lattice) -> Tree:
        """Drawn with a seed that only the place in the text decides: a draft may not know the target's draws."""
        seed = len(request.state.first), request.root
        return naive_samples(lattice, request.root, self._options.samples, np.random.default_rng(seed))

    def _begins_again(self, state: D2SDState, draft: Anchored) -> bool:
        scores = first_rejection(draft.anchors[()])[1:]
        chance = float(np.sort(scores)[-self._options.boundaries :].sum())
        decided = state.trials.choose(chance)
        return (False, True, decided)[self._options.again]

    def _goes_further(self, request: Request, draft: Anchored) -> bool:
        """Only behind a whole block, and if recent trees went to its end; then what it brought so far decides."""
        trials, deepest = request.state.further, self._first.max_depth
        whole = len(draft.anchors[()].tokens) == deepest and (request.depth is None or request.depth > deepest)
        if self._options.further == NEVER or not whole:
            trials.forget()
            return False
        decided = trials.choose(_mass(draft, tuple(draft.anchors[()].tokens[:, 0].tolist())))
        return self._options.further == ALWAYS or decided

    def _follow(self, requests: Sequence[Request], drafts: Sequence[Anchored]) -> None:
        """One batched pass: a further block behind each chain, which begins in it."""
        gap = self._first.max_depth - self._seen
        chains = [draft.anchors[()].tokens[:, 0].tolist() for draft in drafts]
        blocks = [
            (replace(_of(request, "second"), root=chain[gap - 1], depth=None), chain[gap:])
            for request, chain in zip(requests, chains, strict=True)
        ]
        if blocks:
            lattices = self._second.draft_behind(blocks, gap)
            for draft, chain, lattice in zip(drafts, chains, lattices, strict=True):
                before = ((gap, 0), (0, 0))  # rows of depths that the block leaves out: they count for nothing
                rows = Lattice(np.pad(lattice.tokens, before), np.pad(lattice.logp, before, constant_values=-np.inf))
                draft.add(tuple(chain), rows)

    def _anchor(self, requests: Sequence[Request], drafts: Sequence[Anchored]) -> None:
        """One batched pass: new lattices at the likeliest first rejections of those that are there."""
        blocks, places = [], []
        for request, draft in zip(requests, drafts, strict=True):
            for path in boundaries(draft, self._options.boundaries, self._second.max_depth):
                blocks.append((_of(request, "second"), path))
                places.append((draft, path))
        if blocks:
            for (draft, path), lattice in zip(places, self._second.draft_behind(blocks), strict=True):
                draft.add(path, lattice)


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


def first_rejection(lattice: Lattice) -> Floats:
    """r(i) `[D]`: the probability that exactly the first i of the likeliest tokens are accepted, i < D."""
    confidence = np.exp(np.minimum(np.nan_to_num(lattice.logp[:, 0], nan=-np.inf), 0.0))
    reached = np.concatenate([[1.0], np.cumprod(confidence)[:-1]])
    scores: Floats = (reached * (1 - confidence)).astype(np.float32)
    return scores


def boundaries(draft: Anchored, count: int, depth: int) -> list[tuple[int, ...]]:
    """The `count` paths with the largest r at which no lattice begins yet; the root's is the first pass's own."""
    found: dict[tuple[int, ...], float] = {}
    for path, lattice in draft.anchors.items():
        rest = Lattice(lattice.tokens[len(path) :], lattice.logp[len(path) :])
        mass = _mass(draft, path)
        for i, score in enumerate(first_rejection(rest).tolist()):
            longer = (*path, *rest.tokens[:i, 0].tolist())
            if 0 < len(longer) < depth and longer not in draft.anchors:
                found[longer] = max(found.get(longer, 0.0), mass * score)
    return sorted(found, key=lambda path: (-found[path], path))[:count]


def _mass(draft: Anchored, path: tuple[int, ...]) -> float:
    """The drafts' probability of a path."""
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
