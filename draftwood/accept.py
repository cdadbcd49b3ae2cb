"""Sample and walk: the one acceptance rule, exact at every temperature.

At each visited node the target draws its own token y from its processed distribution there. If y is a child
the walk goes on from that child; if not, y is the bonus token and the round ends (methods: DDTree, arXiv 2604.12989
§4). What decides the draw at a position is fixed beforehand (`noise.py`), so the text is the one that plain decoding
writes with the same seed, whatever the tree; a tree may even depend on the draws to come (`foresight.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwood.tree import Tree

# (node, tokens on the path to it) -> the target's token after that node
Draw = Callable[[int, Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """What the target itself thought of an emitted token, before anything shaped its distribution."""

    logp: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a tree: the accepted node indices in order (no root), then one bonus token."""

    path: list[int]
    accepted: list[int]  # the tokens of `path`
    bonus: int
    likelihoods: tuple[Likelihood, ...] | None = None  # of each emitted token, if asked for
    confidence: float | None = None  # see `Round.confidence`, if asked for

    @property
    def tokens(self) -> list[int]:
        """What the round emits: 1 + len(path) tokens."""
        return [*self.accepted, self.bonus]


def accept(tree: Tree, draw: Draw) -> Verdict:
    """Walk from the root while the target's own token is a child."""
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
        if found is None:
            return Verdict(path, accepted, token)
        node = found
        path.append(node)
        accepted.append(token)
