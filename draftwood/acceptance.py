"""The probability that the target accepts a path, given the drafter's mass for it; learned from earlier rounds.

A drafter's masses are biased: too high where its depths are not independent, too low where the target is greedy.
The model is logit p = a + b · log mass - e · log(1 - mass) + c · (depth - 1) with b > 0 and e >= 0: beta calibration
(Kull et al. 2017, doi 10.1214/17-EJS1338SI) plus a slope over the depth. Where c > 0, as for a greedy target, a step
of which the drafter is certain may raise p, in log-odds by c at most. Formulas: docs/policies.md; alternatives that
were tried: docs/log.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftwood.ledger import Ledger
from draftwood.policies.base import Costs, Outlook, Prospect
from draftwood.predictability import Predictability
from draftwood.recent import Recent, features_of, sides
from draftwood.trace import Round
from draftwood.tree import Floats, Ints

Array = NDArray[np.float64]

NEUTRAL = np.array([0.0, 1.0, 1.0, 0.0])  # a, b, e, c with which p is the drafter's mass
LOWEST, HIGHEST = np.array([-6.0, 0.25, 0.0, -2.0]), np.array([3.0, 4.0, 4.0, 0.5])
PRIOR = np.diag([0.5, 10.0, 10.0, 100.0])  # how strongly the neutral values are held, in nodes of even odds
MEMORY = 1 - 1 / 256  # share of a drafted round's evidence that each later drafted round leaves
RECENT = 1 - 1 / 64  # share of a drafted round's weight in the outlook that each later round of any kind leaves
SHAPED = 48  # latest rounds that decide how deep, how wide and to which mass trees are grown
TRIALS = 6  # drafted rounds before there is an outlook, and before they limit later trees
TRIAL_NODES = 6  # most nodes that a trial verifies: enough to learn from, and never expensive
LEAST_GROWN = 8  # nodes that are always grown
SHALLOWEST = 3  # positions that are always drafted: else a drafter that failed could not show that it improved
WORTH = 12.0  # a position must seem to bring so many times its price: other nodes would win a part of its tokens, too
JUDGED = 2.0  # weight, in rounds, of the model's opinion of recent trees against the tokens that they gave
LOOKED_AT = 32  # latest rounds that this opinion covers
STEADY = 4  # the outlook is formed anew when the rounds behind it have grown by one in so many
TOGETHER = 8  # rounds learned from at once: forwards empty the caches, so learning one by one takes twice as long
CARRIED = 8.0  # weight in the outlook, in drafted rounds, of all earlier texts when a text begins
RECALLED = 4.0  # the same for texts of an earlier process, which may have been of another kind
BETWEEN = 0.3  # assumed difference between texts of equal predictability, in tokens per drafted round
KINDS = 0.8  # assumed difference between an earlier process's texts and this one's, in tokens per drafted round
HOPE = 1.0  # standard errors that a drafted round may be better than expected, times what the ledger affords
HOTTEST = 8.0  # temperature from which on all tokens are about equally likely
HERITAGE = 1 / 16  # weight of another text's evidence, relative to a text's own


# Weights [4], their covariance [4, 4], masses [N], depths [N], standard errors to add -> probabilities [N]
Chances: TypeAlias = Callable[[Array, Array, Floats, Ints, float], Floats]


def chances_of(weights: Array, covariance: Array, mass: Floats, depths: Ints, optimism: float) -> Floats:
    """The model's probabilities of paths."""
    # Written out: forwards empty the caches, and products of matrices as small as these then take twice as long.
    a, b, e, c = weights.tolist()
    faint, sure = sides(mass)
    below = depths - 1
    odds = a + b * faint + e * sure + c * below
    if optimism:
        (aa, ab, ae, ac), (_, bb, be, bc), (_, _, ee, ec), (*_, cc) = covariance.tolist()
        variance = aa + faint * (2 * ab + bb * faint + 2 * be * sure + 2 * bc * below)
        variance += sure * (2 * ae + ee * sure + 2 * ec * below) + below * (2 * ac + cc * below)
        odds += optimism * np.sqrt(variance)
    p: Floats = _sigmoid(odds).astype(np.float32)
    return p


class AcceptanceModel:
    """Turns path masses into probabilities of acceptance, and keeps a record of how well drafting went."""

    def __init__(self) -> None:
        self.weights = NEUTRAL.copy()  # a, b, e, c
        self._inform(PRIOR)
        self._recent = Recent()
        self._unlearned: list[Round] = []
        self._paths: deque[int] = deque(maxlen=SHAPED)  # accepted nodes of each of the latest rounds
        self._depth = SHALLOWEST
        self._widths: deque[int] = deque(maxlen=SHAPED)  # most nodes that each verified at one depth
        self._faintest: deque[float] = deque(maxlen=SHAPED)  # mass below which each verified no node
        self._ledger = Ledger()
        self._text = Predictability()
        self._seen = 0.0  # drafted rounds, the latest counting most; pauses do not fade them
        self._texts = 0  # texts of requests that were alone, this one included
        self._own = 0  # drafted rounds of this text
        self._since = inf  # drafted rounds since an earlier process's experience was restored; inf: it was not
        self._idle = 0
        self._prospect: Prospect | None = None  # at the usual confidence
        self._verified = np.zeros(0, np.int64), np.zeros(0)  # nodes and weight of each round behind the prospect
        self._priced: Costs | None = None  # the costs that `_worth` was computed from
        self._worth = float("nan")  # seconds of a plain step over those of such a round
        self._usual = float("nan")  # the target's mean confidence before those rounds
        self._unjudged = 0  # rounds since the prospect was formed that may have changed it

    @property
    def faint(self) -> float:
        """The mass below which no node is worth growing, judged by the last nodes of recent trees; 0 if unknown.

        Verifying stops paying at about the same mass in every tree, and few trees end lower. A tree that was verified
        whole lowers the limit, since too little was grown: nodes that are never grown would never be missed.
        """
        return 0.0 if len(self._faintest) < TRIALS else 0.45 * sorted(self._faintest)[len(self._faintest) // 4]

    @property
    def depth(self) -> int | None:
        """How many positions are worth drafting: one more than the longest of recent paths, or than one of the next
        longest where positions are expensive; None if unknown.

        A position takes up to a hundredth of a round on a CPU. After a path that used all positions the next draft is
        half as long again, so that drafts follow at once when a text becomes predictable.
        """
        return None if len(self._paths) < TRIALS else self._depth

    @property
    def width(self) -> int | None:
        """How many candidates per depth are worth drafting: twice the most that a recent tree had at one depth; None
        if unknown."""
        return None if len(self._widths) < TRIALS else 2 * max(self._widths)

    @property
    def nodes(self) -> int:
        """How many nodes are worth growing: half as many again as the second largest of recent trees had.

        The limit on masses alone would not do: where all masses are alike, none is below it.
        """
        if len(self._recent) < TRIALS:
            return TRIAL_NODES
        return max(3 * sorted(self._recent.sizes)[-2] // 2, LEAST_GROWN)

    def calibrate(self, mass: Floats, depths: Ints, optimism: float = 0.0, chances: Chances = chances_of) -> Floats:
        """`[N]` probabilities that each path is accepted, raised by `optimism` standard errors of the log-odds.

        `chances` computes them; a caller may have a faster way than `chances_of`.
        """
        return chances(self.weights, self._covariance, mass, depths, optimism)

    def likely(self, mass: Floats, depths: Ints, optimism: float = 0.0, chances: Chances = chances_of) -> Floats:
        """`calibrate`, but only for as many nodes as a trial may verify until it is known whether drafting pays.

        Optimism lets nodes be verified that look too unlikely; otherwise they would never prove to be likelier. It is
        divided among recent rounds: standard errors hardly shrink with more of these, and each round would pay for the
        whole of it again.
        """
        known = slice(TRIAL_NODES if len(self._recent) < TRIALS else None)
        return self.calibrate(mass[known], depths[known], optimism / max(self._recent.weight, 1.0), chances)

    def charge(self, round: Round, plain_s: float) -> None:
        """Enter a round of a request that is alone, once all its seconds are known; a plain step would have taken
        `plain_s`."""
        self._ledger.enter(round, plain_s)

    def observe(self, round: Round, typical: bool = True, position: float = 0.0) -> None:
        """Learn from which nodes were accepted. `position` is the price of one position of a draft, in plain steps.

        A round that is not `typical` was drafted because much was expected of it. It says nothing about other rounds,
        so the outlook leaves it out.
        """
        if not round.drafted:
            self._idle += 1
            self._text.see(round.confidence)
            return
        self._unjudged += 1 + self._idle
        if round.n:
            self._unlearned.append(round)
            if len(self._recent) < TRIALS or len(self._unlearned) >= TOGETHER:
                self._learn()
            whole = round.n == round.grown
            self._faintest.append(0.5 * self.faint if whole else float(round.mass[-1]))
        if typical:
            self._remember(round)
        if round.asked:
            self._reach(round, position)
        self._text.see(round.confidence)

    def turn(self) -> None:
        """Begin another text. Earlier texts say less about it than its own rounds will, so the drafter gets another
        chance."""
        self._ledger.turn()
        self._text.turn()
        self._texts, self._own, self._prospect = self._texts + 1, 0, None
        if (weight := self._recent.weight) > CARRIED:
            self._recent.fade(CARRIED / weight)
            self._seen = min(self._seen, CARRIED)

    def prospect(self) -> Prospect | None:
        """What a drafted round like the recent ones would give in a text as predictable as this one is now; None until
        there were enough of them."""
        due = self._prospect is None or self._unjudged * STEADY >= self._recent.weight
        if due and len(self._recent) >= TRIALS:
            self._prospect, self._usual, self._unjudged = self._judged(), self._recent.confidence, 0
        usual, factor = self._prospect, self._text.factor(self._usual)
        if usual is None or factor == 1:
            return usual
        # A more predictable text makes drafting worth more, but leaves the doubt as it was.
        return Prospect(1 + factor * (usual.tokens - 1), usual.nodes, min(factor, 1.0) * usual.doubt)

    def _judged(self) -> Prospect:
        # The tokens that few rounds gave are mostly luck. The model's opinion of their trees is steadier, but slow to
        # conclude that a drafter is useless.
        recent, weight = self._recent, self._recent.weight
        shares, came = np.array(recent.shares) / weight, np.array(recent.emitted)
        self._verified, self._priced = (np.array(recent.sizes), shares), None
        expected = self._expected(shares)
        emitted = shares @ came
        tokens = (JUDGED * expected + weight * emitted) / (JUDGED + weight)
        # A few rounds that gave the same do not mean that all will. So the model's variance, that of a geometric number
        # of its mean, counts as one more round. A pause adds no doubt, or one failed draft after it would cause others.
        squares = self._seen * (shares @ (came - emitted) ** 2) + expected * (expected - 1)
        variance = squares / (self._seen + 1) / (self._seen + JUDGED)
        # This text may be unlike the others; the more of its rounds and of other texts were seen, the less that counts.
        variance += BETWEEN**2 / (1 + self._own) / max(1, self._texts - 1) if self._texts else 0.0
        variance += KINDS**2 / (1 + self._since)  # restored experience may be of another kind of text
        return Prospect(float(tokens), float(shares @ recent.sizes), float(np.sqrt(variance)))

    def _expected(self, shares: Array) -> float:
        """Tokens of a recent round by the model's opinion. The latest rounds suffice: it counts only while there are
        few."""
        shares, sizes = shares[-LOOKED_AT:], self._recent.sizes[-LOOKED_AT:]
        likely = _sigmoid(self._recent.features(LOOKED_AT) @ self.weights)
        return float(1 + np.repeat(shares / shares.sum(), sizes) @ likely)

    def outlook(self, costs: Costs) -> Outlook:
        """The speed to expect of a drafted round like the recent ones, relative to plain rounds, and how much more the
        doubt about it leaves open."""
        prospect = self.prospect()
        if prospect is None:
            return Outlook(float("nan"), self._idle)
        if self._priced is not costs:
            self._priced, self._worth = costs, self._worth_of_a_token(costs)
        hope, worth = HOPE * prospect.doubt * self._ledger.affords, self._worth
        return Outlook(prospect.tokens * worth, self._idle, costs.resume, hope * worth, self._ledger.wealth)

    def _worth_of_a_token(self, costs: Costs) -> float:
        # Each round is priced at its own size: seconds rise in steps, so the price of the mean size may be no round's.
        sizes, shares = self._verified
        seconds = shares @ costs.round_s[np.minimum(sizes, len(costs.verify_s) - 1)]
        return float(costs.plain_s / seconds)

    def child(self) -> AcceptanceModel:
        """A model for one request of a batch. It starts from this one, and soon knows its own text better."""
        model = AcceptanceModel()
        model._inherit(self.weights, self._information)
        model._recent, model._seen, model._idle = self._recent.copy(), self._seen, self._idle
        return model

    def to_json(self) -> dict[str, object] | None:
        """What was learned, for `of_json` in a later process; None while drafting is on trial."""
        if len(self._recent) < TRIALS:
            return None
        return {
            "weights": self.weights.round(4).tolist(),
            "information": self._information.round(2).tolist(),
            "rounds": self._recent.to_json(),
            "weight": min(self._recent.weight, RECALLED),
            "depth": self._depth,
            "paths": list(self._paths),
            "widths": list(self._widths),
            "faintest": [float(f"{mass:.4g}") for mass in self._faintest],
        }

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> AcceptanceModel:
        """A model that continues from what `to_json` gave, as with another text.

        It trusts the weights as little as one request trusts those of another, and doubts anew how much texts differ:
        this process's texts may be of another kind.

        Raises ValueError, KeyError or TypeError for any other data.
        """
        weights, information = np.array(data["weights"], np.float64), np.array(data["information"], np.float64)
        if weights.shape != (4,) or information.shape != (4, 4) or not np.isfinite(information).all():
            raise ValueError("a model has four weights, and what is known of each pair")
        model = cls()
        model._inherit(np.minimum(np.maximum(weights, LOWEST), HIGHEST), information)
        model._recent = Recent.of_json(data["rounds"], float(data["weight"]))
        model._seen, model._depth = float(data["weight"]), int(data["depth"])
        model._since = 0.0
        model._paths.extend(map(int, data["paths"]))
        model._widths.extend(map(int, data["widths"]))
        model._faintest.extend(map(float, data["faintest"]))
        return model

    def _remember(self, round: Round) -> None:
        # What was seen long ago says little, however few rounds were drafted since. So a draft after a long pause
        # weighs more, though never more than everything before it.
        self._recent.fade(max(RECENT ** (1 + self._idle), 1 / max(self._recent.weight, 1.0)))
        self._recent.add(round.mass, round.depths, 1 + round.accepted, self._text.now(self._recent.confidence))
        self._seen = RECENT * self._seen + 1
        self._own += 1
        self._since += 1
        self._idle = 0

    def _reach(self, round: Round, position: float) -> None:
        whole = self.depth is not None and round.accepted >= self.depth
        self._paths.append(round.accepted)
        seldom = min(int(WORTH * position * SHAPED), len(self._paths) - 1)  # paths that are too few to pay for one
        self._depth = max(1 + sorted(self._paths)[-1 - seldom], SHALLOWEST)
        if whole:
            self._depth = max((3 * round.accepted + 1) // 2, self._depth)
        depths = round.depths.tolist()  # numpy's own count takes twice as long where caches are cold
        self._widths.append(max(map(depths.count, set(depths)), default=0))

    def _learn(self) -> None:
        """One Newton step of a logistic regression with forgetting."""
        rounds, self._unlearned = self._unlearned, []  # answers in other threads may add to the list meanwhile
        if not rounds:
            return
        features = features_of(np.concatenate([r.mass for r in rounds]), np.concatenate([r.depths for r in rounds]))
        accepted, memory = _accepted(rounds), MEMORY ** len(rounds)
        p = _sigmoid(features @ self.weights)
        forget = (1 - memory) * PRIOR
        evidence = (features * (p * (1 - p))[:, None]).T @ features
        self._inform(memory * self._information + forget + evidence)
        pull = features.T @ (accepted - p) + forget @ (NEUTRAL - self.weights)
        self.weights = np.minimum(np.maximum(self.weights + self._covariance @ pull, LOWEST), HIGHEST)

    def _inherit(self, weights: Array, information: Array) -> None:
        """Start from what another text taught."""
        self.weights = weights.copy()
        self._inform(PRIOR + HERITAGE * (information - PRIOR))

    def _inform(self, information: Array) -> None:
        self._information = information
        self._covariance: Array = np.linalg.inv(information).astype(np.float64, copy=False)  # of the weights


def temperature_bucket(temperature: float) -> float:
    """The bucket of temperatures that share what is learned: 0, or else the nearest half from 0.5 to `HOTTEST`."""
    return 0.0 if temperature == 0 else max(round(2 * min(temperature, HOTTEST)) / 2, 0.5)


def _accepted(rounds: Sequence[Round]) -> Array:
    """`[N]`: 1 for each accepted node of all rounds, 0 for the others."""
    accepted = np.zeros(sum(round.n for round in rounds))
    start = -1  # where the round's root would stand, which is not among the nodes
    for round in rounds:
        accepted[[start + node for node in round.path]] = 1
        start += round.n
    return accepted


def _sigmoid(x: Array) -> Array:
    p: Array = 1 / (1 + np.exp(-x))
    return p
