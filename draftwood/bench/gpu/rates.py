"""Synthetic acceptance: how often the target's own token is which candidate of a drafter, depth by depth.

Random weights accept nothing, so the speed of whole answers is measured with proposals that are right as often as
published or recorded ones were. The rest of the round, the draft included, is real.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BadInput
from draftwood.recording import Trace
from draftwood.tree import Lattice, Tree

RANKS = 16  # candidates of a depth that can be right
SECOND, FADE, BRANCH = 0.37, 0.5, 0.708  # see `model_rates`
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Chances that the target's token at a depth is the candidate of a rank, given that all before it were candidates.

    What a row lacks to 1 is the chance that no candidate is right.
    """

    name: str
    source: str
    spine: Array  # [D, RANKS] where every token before was the likeliest candidate
    branch: Array  # [D, RANKS] where some token before was another

    def __post_init__(self) -> None:
        assert self.spine.shape == self.branch.shape and self.spine.shape[1] == RANKS
        assert (self.spine >= 0).all() and (self.branch >= 0).all()
        assert max(self.spine.sum(1).max(), self.branch.sum(1).max()) <= 1 + 1e-9

    def to_depth(self, depth: int) -> Rates:
        """The first `depth` depths; where there are fewer, the last one is repeated."""
        rows = np.minimum(np.arange(depth), len(self.spine) - 1)
        return Rates(self.name, self.source, self.spine[rows], self.branch[rows])

    def draw(self, rounds: int, seed: int) -> NDArray[np.int64]:
        """Ranks `[rounds, D]` of the target's tokens; from the first rank of RANKS on, a draft is wrong."""
        rng = np.random.default_rng(seed)
        uniform = rng.random((rounds, len(self.spine)))
        ranks = np.full(uniform.shape, RANKS)
        on_spine, alive = np.ones(rounds, bool), np.ones(rounds, bool)
        for d in range(uniform.shape[1]):
            chances = np.where(on_spine[:, None], self.spine[d], self.branch[d])
            rank = (uniform[:, d, None] >= chances.cumsum(1)).sum(1)
            ranks[alive, d] = rank[alive]
            on_spine &= rank == 0
            alive &= rank < RANKS
        return ranks

    def logp(self, width: int) -> NDArray[np.float32]:
        """Log-probabilities `[D, width]` of a drafter that knows its rates, but nothing about the text."""
        rest = np.maximum(1 - self.spine.sum(1, keepdims=True), 1e-6) / 1e5  # shared by the rest of the vocabulary
        known = np.maximum(self.spine, rest)
        chances = np.concatenate([known, np.repeat(rest, max(0, width - RANKS), 1)], 1)[:, :width]
        return np.log(np.minimum.accumulate(chances, 1)).astype(np.float32)

    def expected_tau(self, tree: Tree) -> float:
        """Tokens that a round with this tree emits on average, the bonus token included.

        A node's rank is its place among its siblings: the likelier ones are verified first.
        """
        chance, on_spine = np.ones(1 + len(tree)), np.ones(1 + len(tree), bool)
        children = np.zeros(1 + len(tree), int)
        for node in range(1, 1 + len(tree)):
            parent, depth = tree.parents[node], tree.depths[node]
            rank, row = children[parent], (self.spine if on_spine[parent] else self.branch)[depth - 1]
            children[parent] += 1
            chance[node] = chance[parent] * (row[rank] if rank < RANKS else 0.0)
            on_spine[node] = on_spine[parent] and rank == 0
        return float(chance.sum())

    def ranked(self, width: int) -> Lattice:
        """The drafter's lattice, with ranks in place of tokens."""
        tokens = np.tile(np.arange(width), (len(self.spine), 1))
        return Lattice(tokens, self.logp(width))


def model_rates(name: str, source: str, hits: Sequence[float]) -> Rates:
    """Rates from a few numbers.

    `hits` [D]: how often the likeliest candidate is right on the spine. The second one catches the share SECOND of its
    misses, and each further one FADE times as many as the one before. Off the spine the likeliest is right BRANCH times
    as often.
    """
    spine, off = (rank_rows(np.asarray(top)) for top in (hits, np.asarray(hits) * BRANCH))
    return Rates(name, source, spine, off)


def rank_rows(top: Array) -> Array:
    others = (1 - top)[:, None] * SECOND * FADE ** np.arange(RANKS - 1)
    return np.concatenate([top[:, None], others], 1)


# z-lab/dflash issue 166 (Qwen3-8B, b16, GSM8K): 11.2 % of the rounds accept nothing, 8.4 % a whole block, and a round
# emits 6.39 tokens. Between these ends the curve is the straight line with that mean. The second candidate catches 37 %
# of the misses (vllm-ddtree's replication). FADE and BRANCH are our choice: with them a tree of 256 nodes emits 7.77
# tokens, as JetSpec's authors measured DDTree on the same model and prompts.
GSM8K = model_rates(
    "gsm8k",
    "Qwen3-8B with its DFlash drafter on GSM8K: published ends and mean of the histogram, a line between them; the "
    "second candidate catches 37 % of misses; the rest set so that 256 nodes emit the published 7.77 tokens a round",
    hits=[0.888, *np.linspace(0.8544, 0.8361, 14)],
)

# The τ that JetSpec's engine reports at 128 nodes on MATH-500. No histogram is published, so all depths are alike.
TAU_9_56 = model_rates(
    "tau9.56",
    "made up so that 128 nodes emit 9.56 tokens a round; no published histogram",
    hits=[0.9112] * 15,
)
PUBLISHED = {rates.name: rates for rates in (GSM8K, TAU_9_56)}


def find_rates(spec: str) -> Rates:
    """By name, or from a trace of `draftwood bench --trace`. Raises BadInput for anything else."""
    if spec in PUBLISHED:
        return PUBLISHED[spec]
    path = Path(spec)
    if not path.is_file():
        raise BadInput(f"--rates names {spec!r}; expected {', '.join(PUBLISHED)} or a file of draftwood bench --trace.")
    trace = Trace.load(path)
    mark = hashlib.sha256(path.read_bytes()).hexdigest()[:8]  # all traces have the same file name
    return from_trace(trace, f"{path.absolute().parent.name}/{path.name} {mark}")


def from_trace(trace: Trace, name: str) -> Rates:
    """How often each candidate was right in the widest drafts of a trace, judged by what the target wrote afterwards.

    In narrower drafts, which policies with few nodes ask for, the right candidate may be one that was not recorded.
    """
    found = [(r.draft, r.context, a) for a in trace.answers for r in a.rounds if isinstance(r.draft, Lattice)]
    if not found:
        raise BadInput(
            f"{name} holds no recorded lattice; record one with draftwood bench --trace --device cpu and a DFlash "
            "drafter by itself, without scores of pairs (markov_rank 0)."
        )
    widest = min(RANKS, max(draft.tokens.shape[1] for draft, *_ in found))
    drafts = [one for one in found if one[0].tokens.shape[1] >= widest]
    depth = max(len(draft.tokens) for draft, *_ in drafts)
    counts = np.zeros((2, depth, RANKS + 1))  # on the spine and off it; the last rank is a miss
    for draft, context, answer in drafts:
        count(counts, draft, answer.continuation(context))
    total = np.maximum(counts.sum(2, keepdims=True), 1)
    spine, branch = (counts / total)[:, :, :RANKS]
    source = f"recorded: {len(drafts)} drafts of {trace.header.drafter} for {trace.header.target}"
    return Rates(name, source, spine, branch)


def count(counts: Array, draft: Lattice, text: Sequence[int]) -> None:
    """Add one draft, as far as the `text` after its root goes and the candidates were right."""
    off = 0
    for d, (row, token) in enumerate(zip(draft.tokens, text, strict=False)):
        found = np.flatnonzero(row[:RANKS] == token)
        rank = int(found[0]) if len(found) else RANKS
        counts[off, d, rank] += 1
        if rank == RANKS:
            return
        off = int(off or rank > 0)
