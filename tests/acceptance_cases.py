"""Trees, what drafters get right of them, and rounds that accept a given path: what acceptance models learn from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from draftwood.acceptance import AcceptanceModel
from draftwood.grow import grow
from draftwood.policies.base import Costs
from draftwood.trace import Round
from draftwood.tree import Lattice, Tree

Truth = Callable[[np.ndarray, np.ndarray], np.ndarray]
COSTS = Costs(1.0, 0.2, np.full(65, 0.05), 1 + 0.02 * np.arange(65))
TRUTHS: dict[str, Truth] = {
    "mass ** 1.5": lambda mass, depth: mass**1.5,
    "mass / 2": lambda mass, depth: mass / 2,
    "0.7 for each depth": lambda mass, depth: mass * 0.7 ** (depth - 1),
}


def a_tree(rng: np.random.Generator, n: int = 16) -> Tree:
    """A best-first tree; some lattices are sharp, some flat."""
    logits = rng.normal(size=(12, 30)) * rng.uniform(0.5, 4)
    logp = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True))), axis=1)
    return grow(Lattice(np.arange(360).reshape(12, 30), logp.astype(np.float32)), 0, n)


def sure(n: int, mass: float) -> Tree:
    """n children of the root, each of this mass."""
    parents = np.array([-1] + [0] * n)
    return Tree(np.arange(1 + n), parents, (parents >= 0) * 1, np.array([1.0] + [mass] * n, np.float32))


def chain(depth: int, step: float = 0.5) -> Tree:
    steps = np.arange(1 + depth)
    return Tree(steps, steps - 1, steps, (step**steps).astype(np.float32))


def walk(tree: Tree, p: np.ndarray, rng: np.random.Generator) -> list[int]:
    """The path of one walk in which node i is reached with probability p[i], the root with 1."""
    path = [0]
    while True:
        node = path[-1]
        children = np.flatnonzero(tree.parents == node)
        chosen = np.searchsorted(np.cumsum(p[children]) / p[node], rng.uniform())
        if chosen >= len(children):
            return path[1:]
        path.append(int(children[chosen]))


def a_round(tree: Tree, accepted: int | list[int] = 0, drafted: bool = True) -> Round:
    """`accepted` is a path, or how deep the likeliest node was that was."""
    if isinstance(accepted, int):
        accepted = tree.path(int(np.flatnonzero(tree.depths == accepted)[0]))
    return Round(0, len(tree), drafted, tree.mass[1:], tree.depths[1:], accepted, {}, {})


def train(model: AcceptanceModel, truth: Truth, rng: np.random.Generator, rounds: int = 400) -> None:
    for _ in range(rounds):
        tree = a_tree(rng)
        p = np.append(1.0, truth(tree.mass[1:].astype(float), tree.depths[1:]))
        model.observe(a_round(tree, walk(tree, p, rng)))
