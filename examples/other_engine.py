"""Another engine calls grow, choose and accept; target, cache and forward are the engine's own. It needs only numpy."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from draftwood.accept import accept
from draftwood.acceptance import AcceptanceModel
from draftwood.foresight import foreseen
from draftwood.latency import LatencyModel, Machine, Work
from draftwood.noise import Ahead, gumbel, keys
from draftwood.policies.bastion import Bastion
from draftwood.trace import Round
from draftwood.tree import Lattice, Tree, root_only

VOCAB, SEED = 50, 7


class Model:
    """Stands for the engine's target: random, but confident; it reads the last two tokens."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).gumbel(size=(VOCAB, VOCAB, VOCAB)) * 2

    def forward(self, context: list[int], tree: Tree) -> np.ndarray:
        """Logits [1 + n, V] after the root and each node, in one forward.

        A transformer would run `tree.tokens` at the positions `len(context) + tree.depths` and let node i see the
        context and every node j of which `tree.ancestors()[i, j]` is true.
        """
        before = np.where(tree.parents < 0, context[-1], tree.tokens[tree.parents])
        return self.table[before, tree.tokens]


def draft(model: Model, context: list[int], root: int, depth: int = 6, width: int = 8) -> Lattice:
    """Stands for a drafter: it knows the model, up to some noise, and goes on from its own guess at each depth."""
    noise = np.random.default_rng(len(context)).normal(size=(depth, VOCAB))
    logits, before, last = [], context[-1], root
    for level in noise:
        logits.append(model.table[before, last] + level)
        before, last = last, int(logits[-1].argmax())
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)  # exact over the whole vocabulary
    order = np.argsort(-logp, axis=1)[:, :width]
    return Lattice(order, np.take_along_axis(logp, order, 1).astype(np.float32))


def sample(logits: np.ndarray, position: int) -> int:
    """The engine's sampler. Its noise depends on seed, position and token: one text a seed, whatever the policy."""
    return int((logits + gumbel(keys(SEED, position, 1), np.arange(VOCAB))).argmax())


class Speculation:
    """What draftwood brings: a policy, and two models that learn from every round."""

    def __init__(self) -> None:
        machine = Machine("mine", peak=1e12, bandwidth=1e11, launch_s=1e-6)  # a first guess
        self.latency = LatencyModel(
            machine, lambda tokens, context: Work(1e6 * tokens, 1e6, 10), lambda c: Work(0, 0, 9)
        )
        self.acceptance, self.policy = AcceptanceModel(), Bastion(n_max=32)

    def round(self, model: Model, text: list[int]) -> Round:
        """Extend `text` by one forward of the target."""
        context, root, times = text[:-1], text[-1], [perf_counter()]
        costs = self.latency.costs(self.policy.n_max, len(context))
        drafts = self.policy.drafts(self.acceptance.outlook(costs))
        lattice = draft(model, context, root) if drafts else None
        times.append(perf_counter())
        if lattice is not None:  # the noise of the draws to come is known; the temperature is 1
            lattice = foreseen(lattice, lambda depths: Ahead(keys(SEED, len(text), depths), heat=1.0))
        tree = root_only(root) if lattice is None else self.policy.grow(lattice, root)
        mass = self.acceptance.calibrate(tree.mass[1:], tree.depths[1:])
        tree = tree[: self.policy.choose(mass, costs)]
        times.append(perf_counter())
        logits = model.forward(context, tree)
        times.append(perf_counter())
        verdict = accept(tree, lambda node, path: sample(logits[node], len(text) + len(path)))
        # Here the engine keeps the cache entries of the root and of the nodes in verdict.path, and drops the others.
        text += verdict.tokens
        times.append(perf_counter())
        seconds = dict(zip(("draft", "grow", "verify", "accept"), np.diff(times).tolist(), strict=True))
        predicted = self.latency.predict(len(tree), len(context), drafts)
        record = Round(
            len(context), len(tree), drafts, tree.mass[1:], tree.depths[1:], verdict.path, seconds, predicted
        )
        self.latency.observe(record)
        self.acceptance.observe(record)
        return record


def main() -> None:
    model, speculation, text = Model(), Speculation(), [1, 2, 3]
    while len(text) < 120:
        record = speculation.round(model, text)
        print(f"{record.n:3} nodes verified, {record.accepted} accepted")
    print(*text)


if __name__ == "__main__":
    main()
