"""Lattices and draft trees: flat arrays, parents before children, the root at index 0.

A `Lattice` is what a block drafter believes: K candidates for each of the next D positions. A `Tree` is
what the target verifies. The root is the last committed token (the bonus token of the round before), so a
tree of n nodes costs the target 1 + n tokens. Shapes and axis letters: docs/shapes.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftwood.noise import Ahead

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Independent candidates for each depth (DFlash's marginals, arXiv 2602.06036 §3).

    `logp` is exact over the whole vocabulary (logit - logsumexp, in fp32) and falls along K.
    """

    tokens: Ints  # [D, K]
    logp: Floats  # [D, K]

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.logp.shape and self.tokens.ndim == 2, (
            f"a lattice is [D, K] twice, not {self.tokens.shape} and {self.logp.shape}"
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, depth: int, before: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a depth, from 0 on, falling; the same behind every token `before`."""
        return self.tokens[depth].tolist(), self.logp[depth].tolist()

    def narrow(self, width: int) -> Lattice:
        """The `width` likeliest candidates of every depth."""
        return Lattice(self.tokens[:, :width], self.logp[:, :width])


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A draft tree in best-first order: every prefix is connected and masses never rise.

    Entry 0 is the root (mass 1, depth 0, parent -1). `len(tree)` counts the nodes without the root.
    `mass[i]` is the drafter's probability of the whole path to node i: rho(i) in BASTION (arXiv 2605.29727).
    """

    tokens: Ints  # [1 + N]
    parents: Ints  # [1 + N]
    depths: Ints  # [1 + N]
    mass: Floats  # [1 + N]
    sources: Ints | None = None  # [1 + N] source of the opinion that weighs most in a node; None: there is only one

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def __getitem__(self, nodes: slice) -> Tree:
        """`tree[:n]`: the root and its first n nodes, itself a valid tree."""
        assert nodes.start is None and nodes.step is None, "only prefixes of a tree are trees"
        end = 1 + min(len(self), max(0, len(self) if nodes.stop is None else nodes.stop))
        return self._with(slice(end), self.parents[:end])

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the one before it: no ancestor mask is then needed."""
        parents: list[int] = self.parents.tolist()  # quicker than numpy's comparison of so few
        return parents == list(range(-1, len(self)))

    def ancestors(self) -> Bools:
        """Which nodes each node sees: its ancestors and itself, `[1 + N, 1 + N]`."""
        size, rows = len(self.tokens), list[bytearray]()  # a row of numpy's takes ten times as long
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(rows[parent][:] if node else bytearray(size))
            rows[node][node] = 1
        return np.frombuffer(bytearray().join(rows), np.bool_).reshape(size, size)

    def up_to_depth(self, depth: int) -> Tree:
        """The tree without nodes deeper than `depth`; order and masses stay."""
        if depth >= len(self):  # none is deeper than there are nodes
            return self
        keep = self.depths <= depth
        if keep.all():
            return self
        renumbered = np.cumsum(keep) - 1
        parents = np.where(self.parents < 0, -1, renumbered[self.parents])
        return self._with(keep, parents[keep])

    def subtree(self, nodes: Ints) -> Tree:
        """These nodes, in this order; each one's parent must be among them. The root comes first."""
        place = np.full(len(self.tokens) + 1, -1)  # the last entry is where the root's parent, -1, is looked up
        place[nodes] = np.arange(len(nodes))
        return self._with(nodes, place[self.parents[nodes]])

    def _with(self, nodes: Ints | Bools | slice, parents: Ints) -> Tree:
        sources = None if self.sources is None else self.sources[nodes]
        return Tree(self.tokens[nodes], parents, self.depths[nodes], self.mass[nodes], sources)

    def path(self, node: int) -> list[int]:
        """Node indices from the root's child down to `node`; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]


# Cost -log p given the path to it (0 or more), token, source.
Child: TypeAlias = tuple[float, int, int]


# A node of a conditional draft takes some 40 µs to grow where that is not compiled. A decoder of 250 tokens/s writes
# 0.01 tokens meanwhile: nodes of less mass bring less than they cost, whatever the policy thinks of them.
FAINT = 0.01


class Conditional(Protocol):
    """A draft whose candidates depend on the path to them. Growth asks for them node by node.

    A place is whatever the draft has to know about a node; only the draft knows what is in it.
    """

    @property
    def faint(self) -> float:
        """Mass of a node below which growing it takes longer than it brings."""
        ...

    def start(self) -> Any:
        """The root's place."""
        ...

    def children(self, place: Any) -> Iterator[Child]:
        """Candidates behind a node, likeliest first, no token twice; their probabilities sum to at most 1."""
        ...

    def step(self, place: Any, token: int) -> Any:
        """The place of the child `token` of a node."""
        ...


class Growable(ABC):
    """A conditional draft that may have a quicker way to make its tree than to be asked node by node."""

    @property
    def asked(self) -> bool:
        """Whether a drafter ran for it."""
        return True

    @abstractmethod
    def grown(self, root: int, n_max: int, most: float, barren: float, ahead: Ahead | None = None) -> Tree | None:
        """The best-first tree below the token `root`: at most `n_max` nodes, none that costs more than `most`, no child
        of one that costs more than `barren`. None where there is no quicker way.

        With noise `ahead`, the tree of the draft weighed by that noise (`foresight.py`).
        """


Draft: TypeAlias = Lattice | Tree | Conditional


def root_only(token: int) -> Tree:
    """The tree of a round that drafts nothing: plain decoding."""
    return Tree(np.array([token], np.int64), *_ROOT)


_ROOT = np.array([-1]), np.array([0]), np.ones(1, np.float32)  # parents, depths and mass; nothing writes into trees


def chain_tree(tokens: Sequence[int]) -> Tree:
    """A chain of known tokens (a prompt chunk): the first is the root, every mass is 1."""
    size = len(tokens)
    steps = np.arange(size)
    return Tree(np.asarray(tokens, np.int64), steps - 1, steps, np.ones(size, np.float32))


def matched(tree: Tree, text: Sequence[int]) -> list[int]:
    """Nodes of `tree` along `text`: what is accepted if the target writes that."""
    children = {key: i for i, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)) if i}
    path: list[int] = []
    for token in text:
        node = children.get((path[-1] if path else 0, token))
        if node is None:
            break
        path.append(node)
    return path


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike. Whole parts are compared: token by token, a long text would take
    longer than a mask of its grammar."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
