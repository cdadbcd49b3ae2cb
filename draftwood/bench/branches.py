"""What recorded drafts know after a sibling was taken: the question on which marginal trees fail.

At each node that the text goes through, its heaviest child is right or not. Two kinds of nodes are counted apart: those
reached through heaviest children alone (the spine), and those after a sibling of one, for which independent marginals
were not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftwood.bench.stats import quotient
from draftwood.grow import grow
from draftwood.recording import Answer
from draftwood.tree import Lattice, Tree

NODES = 32  # of the trees that are grown from recorded lattices


@dataclass(slots=True)
class Branch:
    """How often the heaviest child was right at accepted nodes of one kind."""

    nodes: int = 0
    right: int = 0

    @property
    def share(self) -> float:
        return quotient(self.right, self.nodes)

    def to_json(self) -> dict[str, float]:
        return {"nodes": self.nodes, "right": self.right, "share": self.share}


def branches(answers: Iterable[Answer]) -> dict[str, Branch]:
    """`spine` and `sibling` over all rounds with a draft."""
    found = {"spine": Branch(), "sibling": Branch()}
    for answer in answers:
        for round in answer.rounds:
            if round.draft is not None:
                text = answer.tokens[round.context - answer.prompt_tokens :]
                draft = round.draft
                tree = grow(draft, int(text[0]), NODES) if isinstance(draft, Lattice) else draft
                follow(tree, text[1:], found)
    return found


def follow(tree: Tree, text: Sequence[int], found: dict[str, Branch]) -> None:
    """Count along `text`, as far as the tree follows it. The root is not counted: it comes after neither kind."""
    children: dict[int, list[int]] = {}  # heaviest first, as trees are best first
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    node, spine = 0, True
    for token in text:
        below = children.get(node, [])
        if node and below:  # a leaf says nothing: its tree's budget or depth ended there
            branch = found["spine" if spine else "sibling"]
            branch.nodes += 1
            branch.right += int(tree.tokens[below[0]]) == token
        taken = next((child for child in below if int(tree.tokens[child]) == token), None)
        if taken is None:
            return
        node, spine = taken, spine and taken == below[0]
