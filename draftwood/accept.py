"""Sample and walk: the one acceptance rule, exact at every temperature.

At each visited node the target draws its own token y from its processed distribution there. If y is a child of the
node, the walk goes on from that child; if not, y is the bonus token and the round ends (methods: DDTree, arXiv
2604.12989 §4). The random numbers behind the draw at each position are fixed in advance (`noise.py`), so the text is
the one that plain decoding writes with the same seed, whatever the tree. A tree may even depend on these numbers
(`foresight.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from draftwood.tree import Tree

# (node, tokens on the path to it) -> the target's token after that node
Draw = Callable[[int, Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The target's own log-probability of an emitted token, before sampling parameters or rules change it."""

    logp: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's verdict on a tree: the accepted node indices in order (without the root), then one bonus token."""

    path: list[int]
    accepted: list[int]  # the tokens of `path`
    bonus: int
    likelihoods: tuple[Likelihood, ...] | None = None  # of each emitted token, if requested
    confidence: float | None = None  # see `Round.confidence`; only in rounds that measure it

    @property
    def tokens(self) -> list[int]:
        """What the round emits: 1 + len(path) tokens."""
        return [*self.accepted, self.bonus]


def accept(tree: Tree, draw: Draw, ends: Container[int] = ()) -> Verdict:
    """Walk from the root while the target's own token is a child and not among `ends`, behind which nothing is drawn: a
    rule may have no answer there."""
    child = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True), 1)
    }
    path: list[int] = []
    accepted: list[int] = []
    node = 0
    while True:
        token = draw(node, accepted)
        found = child.get((node, token))
        if found is None or token in ends:
            return Verdict(path, accepted, token)
        node = found
        path.append(node)
        accepted.append(token)
