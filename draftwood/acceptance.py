"""How likely a path of given drafter mass is to be accepted, learned from what was accepted before.

A drafter's masses are opinions: too high where its depths are not independent, too low where the target is
greedy. The model is p = exp(a) · mass^b · exp(c · (depth - 1)) with b > 0 >= c, so that p never rises along a
path, whatever was learned. Formulas: docs/policies.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.policies.base import Costs, Outlook
from draftwood.trace import Round
from draftwood.tree import Floats, Ints

Array = NDArray[np.float64]

NEUTRAL = np.array([0.0, 1.0, 0.0])  # a, b, c that believe the drafter
LOWEST, HIGHEST = np.array([-3.0, 0.25, -1.0]), np.array([1.0, 4.0, 0.0])
PRIOR = np.diag([8.0, 40.0, 200.0])  # how firmly the neutral values are held, in accepted tokens
MEMORY = 1 - 1 / 256  # of a drafted round's evidence, per later drafted round
RECENT = 1 - 1 / 24  # of a drafted round's yield in the outlook, per later round of any kind
TRIALS = 8  # drafted rounds before there is an outlook


class AcceptanceModel:
    """Turns path masses into probabilities of acceptance, and remembers how well drafting went."""

    def __init__(self) -> None:
        self.weights = NEUTRAL.copy()  # a, b, c
        self._information = PRIOR.copy()
        self._drafted, self._idle = 0, 0
        self._expected, self._nodes = 0.0, 0.0  # running means over drafted rounds: tokens Â(n), nodes n

    def calibrate(self, mass: Floats, depths: Ints) -> Floats:
        """`[N]` probabilities that each path is accepted: in [0, 1], never rising along a path."""
        a, b, c = self.weights
        p: Floats = np.minimum(np.exp(a + b * _log(mass) + c * (depths - 1)), 1.0).astype(np.float32)
        return p

    def observe(self, round: Round) -> None:
        """Learn from which depths were accepted."""
        if not round.drafted:
            self._idle += 1
            return
        p = self.calibrate(round.mass, round.depths).astype(np.float64)
        self._remember(1 + float(p.sum()), round.n)
        if round.n:
            self._learn(p, round)

    def outlook(self, costs: Costs) -> Outlook:
        """Expected tokens per second of a drafted round like the recent ones, over plain decoding's."""
        if self._drafted < TRIALS:
            return Outlook(float("nan"), self._idle)
        n = min(round(self._nodes), len(costs.verify_s) - 1)
        seconds = costs.draft_s + costs.aux_s[n] + costs.verify_s[n]
        return Outlook(float(self._expected * costs.plain_s / seconds), self._idle)

    def _remember(self, expected: float, n: int) -> None:
        # What was seen long ago says little, however few rounds were drafted since: a look after a long pause
        # weighs more, though never more than everything before it.
        new = 1.0 if not self._drafted else min(1 - RECENT ** (1 + self._idle), 0.5)
        self._expected += new * (expected - self._expected)
        self._nodes += new * (n - self._nodes)
        self._drafted, self._idle = self._drafted + 1, 0

    def _learn(self, p: Array, round: Round) -> None:
        """One Newton step of a Poisson regression with forgetting.

        At each depth either one node was accepted or none; expected is the sum of their p. The gradient of
        its logarithm is the p-weighted mean of the nodes' features: 1, log mass, depth - 1.
        """
        expected = np.bincount(round.depths, p)[1:]
        level = np.flatnonzero(expected > 0)
        expected = expected[level]
        log_mass = np.bincount(round.depths, p * _log(round.mass))[1:][level] / expected
        gradient = np.stack([np.ones(len(level)), log_mass, level], axis=1)
        surprise = (level < round.accepted) - expected
        forget = (1 - MEMORY) * PRIOR
        evidence = (gradient * expected[:, None]).T @ gradient
        self._information = MEMORY * self._information + forget + evidence
        pull = gradient.T @ surprise + forget @ (NEUTRAL - self.weights)
        step = np.linalg.solve(self._information, pull)
        self.weights = np.clip(self.weights + step, LOWEST, HIGHEST)


def _log(mass: Floats) -> Array:
    logs: Array = np.log(np.maximum(mass, np.finfo(np.float32).tiny).astype(np.float64))
    return logs
