"""How likely a path of given drafter mass is to be accepted, learned from what was accepted before.

A drafter's masses are opinions: too high where its depths are not independent, too low where the target is greedy.
The model is logit p = a + b · log mass - e · log(1 - mass) + c · (depth - 1) with b > 0 and e >= 0: beta calibration
(Kull et al. 2017, doi 10.1214/17-EJS1338SI) and a slope of the depth. Where c > 0, as for a greedy target, a step that
the drafter is sure of can raise p by no more than that. Formulas: docs/policies.md; what else was tried: docs/log.md.
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

NEUTRAL = np.array([0.0, 1.0, 1.0, 0.0])  # a, b, e, c that believe the drafter
LOWEST, HIGHEST = np.array([-6.0, 0.25, 0.0, -2.0]), np.array([3.0, 4.0, 4.0, 0.5])
PRIOR = np.diag([0.5, 10.0, 10.0, 100.0])  # how firmly the neutral values are held, in nodes of even odds
MEMORY = 1 - 1 / 256  # of a drafted round's evidence, per later drafted round
RECENT = 1 - 1 / 64  # of a drafted round's weight in the outlook, per later round of any kind
SHAPED = 48  # rounds that say how deep, how wide and how far trees are grown
TRIALS = 6  # drafted rounds before there is an outlook, and before they shape others
TRIAL_NODES = 6  # the most that one of them verifies: enough to learn from, and never dear
LEAST_GROWN = 8  # nodes that are always grown
SHALLOWEST = 3  # positions that are always drafted: a look at a drafter that failed must be able to show better
WORTH = 12.0  # times its price that a position must bring if all tokens behind it were won: other nodes win some, too
JUDGED = 2.0  # rounds that the model's opinion of recent trees counts as, beside what became of them
LOOKED_AT = 32  # rounds, the latest, of which it has one
STEADY = 4  # the outlook is formed anew when the rounds behind it grew by one in so many
TOGETHER = 8  # rounds learned from at once: beside forwards, which empty the caches, in half the time of one by one
CARRIED = 8.0  # recent drafted rounds, in the outlook, that all earlier texts count as at the start of one
RECALLED = 4.0  # the same of texts of an earlier process, which may have been of another kind
BETWEEN = 0.3  # tokens of a drafted round by which texts are thought to differ that are as predictable
KINDS = 0.8  # tokens of a drafted round by which an earlier process's texts are thought to differ from this one's
HOPE = 1.0  # standard errors that a drafted round may be better than expected, times what the ledger affords
HOTTEST = 8.0  # temperature: from here on all tokens are about as likely
HERITAGE = 1 / 16  # what another text's evidence weighs beside a text's own


# Probabilities [N]: of weights [4], their covariance [4, 4], masses and depths [N], with so many standard errors more.
Chances: TypeAlias = Callable[[Array, Array, Floats, Ints, float], Floats]


def chances_of(weights: Array, covariance: Array, mass: Floats, depths: Ints, optimism: float) -> Floats:
    """What the model says of paths."""
    # Written out: beside forwards, which empty the caches, products of so small matrices take twice as long.
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
    """Turns path masses into probabilities of acceptance, and remembers how well drafting went."""

    def __init__(self) -> None:
        self.weights = NEUTRAL.copy()  # a, b, e, c
        self._inform(PRIOR)
        self._recent = Recent()
        self._unlearned: list[Round] = []
        self._paths: deque[int] = deque(maxlen=SHAPED)  # nodes that each of them accepted
        self._depth = SHALLOWEST
        self._widths: deque[int] = deque(maxlen=SHAPED)  # the most nodes of one depth that each of them verified
        self._faintest: deque[float] = deque(maxlen=SHAPED)  # mass below which none of them verified a node
        self._ledger = Ledger()
        self._text = Predictability()
        self._seen = 0.0  # drafted rounds, the latest counting most; pauses do not count as forgetting
        self._texts = 0  # of requests alone, this one included
        self._own = 0  # drafted rounds of this text
        self._since = inf  # drafted rounds since this was recalled from an earlier process; inf: it was not
        self._idle = 0
        self._prospect: Prospect | None = None  # at the usual confidence
        self._verified = np.zeros(0, np.int64), np.zeros(0)  # nodes of the rounds behind it, and what each weighs
        self._priced: Costs | None = None  # what they are priced at, and by that
        self._worth = float("nan")  # of one of their tokens, in those of plain decoding
        self._usual = float("nan")  # the target's confidence where it was drafted
        self._unjudged = 0  # rounds since it was formed that may have changed it

    @property
    def faint(self) -> float:
        """Below what mass no node is worth growing, by what recent trees ended with; 0 if unknown.

        Where growing on pays, trees end with nodes of about the same mass, and few with less. A tree of which all
        was verified says that too little was grown: else what was not grown would never be seen to be missing.
        """
        return 0.0 if len(self._faintest) < TRIALS else 0.45 * sorted(self._faintest)[len(self._faintest) // 4]

    @property
    def depth(self) -> int | None:
        """How deep it is worth to draft: one more than the longest of recent paths, or than one of the next where
        positions are dear; None if unknown.

        A position takes up to a hundredth of a round on a CPU. A path that used all of them makes the next draft half
        as long again, so a text that becomes predictable is followed at once.
        """
        return None if len(self._paths) < TRIALS else self._depth

    @property
    def width(self) -> int | None:
        """How many candidates of a depth are worth drafting, by the same rule: twice what recent trees had of one."""
        return None if len(self._widths) < TRIALS else 2 * max(self._widths)

    @property
    def nodes(self) -> int:
        """How many nodes are worth growing, by the same rule. Where all masses are alike, none of them is faint."""
        if len(self._recent) < TRIALS:
            return TRIAL_NODES
        return max(3 * sorted(self._recent.sizes)[-2] // 2, LEAST_GROWN)

    def calibrate(self, mass: Floats, depths: Ints, optimism: float = 0.0, chances: Chances = chances_of) -> Floats:
        """`[N]` probabilities that each path is accepted; with `optimism`, so many standard errors higher.

        By `chances` where they are worked out in a quicker way.
        """
        return chances(self.weights, self._covariance, mass, depths, optimism)

    def likely(self, mass: Floats, depths: Ints, optimism: float = 0.0, chances: Chances = chances_of) -> Floats:
        """The same, of no more nodes than may be verified before it is known whether drafting pays.

        Optimism lets nodes be verified that look too unlikely: else they would never be seen to be likelier. It is
        shared among recent rounds: standard errors hardly shrink with more of these, and each would pay for it again.
        """
        known = slice(TRIAL_NODES if len(self._recent) < TRIALS else None)
        return self.calibrate(mass[known], depths[known], optimism / max(self._recent.weight, 1.0), chances)

    def charge(self, round: Round, plain_s: float) -> None:
        """Of a request alone, when all of a round's seconds are known: with what a plain step would have taken."""
        self._ledger.enter(round, plain_s)

    def observe(self, round: Round, typical: bool = True, position: float = 0.0) -> None:
        """Learn from which nodes were accepted. A `position` of a draft takes so many plain steps.

        A round that is not `typical` was drafted because much was expected of it: it says nothing about others, so the
        outlook leaves it out.
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
        """To another text: earlier ones say less about it than its own rounds will, so there is hope anew."""
        self._ledger.turn()
        self._text.turn()
        self._texts, self._own, self._prospect = self._texts + 1, 0, None
        if (weight := self._recent.weight) > CARRIED:
            self._recent.fade(CARRIED / weight)
            self._seen = min(self._seen, CARRIED)

    def prospect(self) -> Prospect | None:
        """A drafted round like the recent ones, in a text as predictable as this one is now; None before there were
        enough of them."""
        due = self._prospect is None or self._unjudged * STEADY >= self._recent.weight
        if due and len(self._recent) >= TRIALS:
            self._prospect, self._usual, self._unjudged = self._judged(), self._recent.confidence, 0
        usual, factor = self._prospect, self._text.factor(self._usual)
        if usual is None or factor == 1:
            return usual
        # That a text is predictable makes drafting worth more, and what is known of it not less certain.
        return Prospect(1 + factor * (usual.tokens - 1), usual.nodes, min(factor, 1.0) * usual.doubt)

    def _judged(self) -> Prospect:
        # What came out alone is mostly luck where it is little. What is known now of recent trees is steadier, but slow
        # to believe that a drafter is no good at all.
        recent, weight = self._recent, self._recent.weight
        shares, came = np.array(recent.shares) / weight, np.array(recent.emitted)
        self._verified, self._priced = (np.array(recent.sizes), shares), None
        expected = self._expected(shares)
        emitted = shares @ came
        tokens = (JUDGED * expected + weight * emitted) / (JUDGED + weight)
        # That a few rounds came out alike does not mean that all will: the model's variance, that of a geometric number
        # of its mean, counts as one more. And a pause adds no doubt, or a look that failed would be followed by others.
        squares = self._seen * (shares @ (came - emitted) ** 2) + expected * (expected - 1)
        variance = squares / (self._seen + 1) / (self._seen + JUDGED)
        # This text may be unlike the others: the less so, the more of either were seen.
        variance += BETWEEN**2 / (1 + self._own) / max(1, self._texts - 1) if self._texts else 0.0
        variance += KINDS**2 / (1 + self._since)  # all that was recalled may be of texts of another kind
        return Prospect(float(tokens), float(shares @ recent.sizes), float(np.sqrt(variance)))

    def _expected(self, shares: Array) -> float:
        """Tokens of a recent round, as the model has it; of the latest ones, for it counts where there are few."""
        shares, sizes = shares[-LOOKED_AT:], self._recent.sizes[-LOOKED_AT:]
        likely = _sigmoid(self._recent.features(LOOKED_AT) @ self.weights)
        return float(1 + np.repeat(shares / shares.sum(), sizes) @ likely)

    def outlook(self, costs: Costs) -> Outlook:
        """Tokens per second to expect, and to hope for, of a drafted round like the recent ones, over plain ones."""
        prospect = self.prospect()
        if prospect is None:
            return Outlook(float("nan"), self._idle)
        if self._priced is not costs:
            self._priced, self._worth = costs, self._worth_of_a_token(costs)
        hope, worth = HOPE * prospect.doubt * self._ledger.affords, self._worth
        return Outlook(prospect.tokens * worth, self._idle, costs.resume, hope * worth, self._ledger.wealth)

    def _worth_of_a_token(self, costs: Costs) -> float:
        # What these rounds would cost, each at its own size: seconds rise in steps, so those of a mean size are none's.
        sizes, shares = self._verified
        seconds = shares @ costs.round_s[np.minimum(sizes, len(costs.verify_s) - 1)]
        return float(costs.plain_s / seconds)

    def child(self) -> AcceptanceModel:
        """A model of one request in a batch: it starts from here, and soon knows its own text better."""
        model = AcceptanceModel()
        model._inherit(self.weights, self._information)
        model._recent, model._seen, model._idle = self._recent.copy(), self._seen, self._idle
        return model

    def to_json(self) -> dict[str, object] | None:
        """What was learned, for `of_json` in a later process; None for as long as drafting is on trial."""
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
        """A model that goes on from there as it would with another text, and believes its weights as little as those
        that one request hands on to another. How much texts differ is open again: these may be of another kind.

        Raises ValueError, KeyError or TypeError for anything else.
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
        # What was seen long ago says little, however few rounds were drafted since: a look after a long pause
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
        seldom = min(int(WORTH * position * SHAPED), len(self._paths) - 1)  # paths that are too few for one
        self._depth = max(1 + sorted(self._paths)[-1 - seldom], SHALLOWEST)
        if whole:
            self._depth = max((3 * round.accepted + 1) // 2, self._depth)
        depths = round.depths.tolist()  # numpy's own count takes twice as long where caches are cold
        self._widths.append(max(map(depths.count, set(depths)), default=0))

    def _learn(self) -> None:
        """One Newton step of a logistic regression with forgetting."""
        rounds, self._unlearned = self._unlearned, []  # answers of other threads may add to it meanwhile
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
        """What another text taught."""
        self.weights = weights.copy()
        self._inform(PRIOR + HERITAGE * (information - PRIOR))

    def _inform(self, information: Array) -> None:
        self._information = information
        self._covariance: Array = np.linalg.inv(information).astype(np.float64, copy=False)  # of the weights


def temperature_bucket(temperature: float) -> float:
    """Temperatures that share what is learned: 0, and from there to the nearest half; all hot ones together."""
    return 0.0 if temperature == 0 else max(round(2 * min(temperature, HOTTEST)) / 2, 0.5)


def _accepted(rounds: Sequence[Round]) -> Array:
    """`[N]`: 1 for each node of all rounds that was accepted."""
    accepted = np.zeros(sum(round.n for round in rounds))
    start = -1  # of the root's node, which is none of them
    for round in rounds:
        accepted[[start + node for node in round.path]] = 1
        start += round.n
    return accepted


def _sigmoid(x: Array) -> Array:
    p: Array = 1 / (1 + np.exp(-x))
    return p
