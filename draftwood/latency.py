"""How long a round takes: a prior from counted work, corrected by every round that runs.

A prior alone is off by a factor on every machine; an average alone knows nothing about widths that have not run
and does worse (BASTION, arXiv 2605.29727, ablation). So the prior gives the shape, and what is learned is the
logarithm of observed over prior at a few widths (`curve.py`). Formulas: docs/latency-model.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import TypeVar

import numpy as np

from draftwood.curve import WIDTHS, Array, extended, seconds_at
from draftwood.errors import BadInput
from draftwood.learned import Learned
from draftwood.policies.base import Costs
from draftwood.trace import Errors, Round, prediction_errors

BUCKET = 64  # tokens of context that share one prior: their KV is small beside the weights

# The pace takes a share of each surprise, keeps a share of itself per round (it fades within some thirty) and counts a
# surprise as at most LEAP, so one round moves it by 0.035.
PACE, FADE, LEAP = 0.35, 0.97, 0.1
MOOD = 0.01  # drift of memory's speed against arithmetic's from round to round, in variances of one observation
ROUNDED = 4  # the roofline's corner: T⁴ = arithmetic⁴ + traffic⁴
USUAL = 64  # tokens of the widest forwards between which a policy mostly chooses
LATEST = 256  # rounds that `errors` covers
ROUTINE = 2.0  # drafts that must be known before a draft after a pause no longer teaches what drafts take
MOST_KEPT = 256  # prices of rounds, predictions, priors and moods
TRIAL, MISFIT = 8, 0.4  # rounds after which a kept profile is dropped if it is off by half as much again (in logs)

HOST_S = 3e-4  # a first guess of what the host spends on a round,
HOST_PRIOR = HOST_S + 3e-6 * (WIDTHS - 1)  # and on each node
LEAST_S = 1e-6  # no draft is quicker: keeps ratios finite for drafters that count no work

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Work:
    """The least that one forward must do."""

    flops: float
    bytes: float
    launches: int  # operator launches: the fixed cost that small forwards pay
    shared: float = 0.0  # of a draft's bytes, those of the target's weights, which are in memory once


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device reaches in one dtype, as measured by `probe.py`."""

    name: str
    peak: float  # FLOP/s of a large matrix product
    bandwidth: float  # bytes/s of weights streaming through a matrix-vector product
    launch_s: float  # seconds of the smallest operator
    overlap: float = 0.0  # share of the shorter of arithmetic and memory traffic that is hidden behind the longer

    def seconds(self, work: Work) -> float:
        """Seconds of arithmetic, memory traffic and launches; with an `overlap` of 1 this is the roofline.

        Without overlap it is a cautious prior: a roofline promises that wide forwards cost nothing until arithmetic has
        caught up with memory, and would lure a policy there.
        """
        arithmetic, traffic = work.flops / self.peak, work.bytes / self.bandwidth
        return arithmetic + traffic - self.overlap * min(arithmetic, traffic) + work.launches * self.launch_s

    def waits(self, work: Work) -> float:
        """The share of its time, from 0 to 1, that a forward waits for memory: the elasticity of a rounded roofline.

        If memory gets a percent slower, the seconds rise by this share of a percent; if arithmetic does, by the rest.
        """
        arithmetic, traffic = (work.flops / self.peak) ** ROUNDED, (work.bytes / self.bandwidth) ** ROUNDED
        return traffic / (traffic + arithmetic) if traffic + arithmetic else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A restored profile in its original state, and how far off that has been since."""

    kept: Learned
    errors: list[float] = field(default_factory=list)


class LatencyModel:
    """Seconds of the parts of a round, for one target and one drafter on one machine.

    `verify_work(n_tokens, context)` and `draft_work(context)` count a forward's work; `context` is in tokens.
    """

    def __init__(
        self,
        machine: Machine,
        verify_work: Callable[[int, int], Work],
        draft_work: Callable[[int], Work] | None = None,
    ) -> None:
        self.machine, self._verify_work, self._draft_work = machine, verify_work, draft_work
        self._learned = Learned()
        self._warm: set[int] = set()  # widths that have run in this process
        self._pace = 0.0  # log of how much slower everything is just now than it usually is
        self._latest: deque[Round] = deque(maxlen=LATEST)
        self._trial: _Trial | None = None  # of a profile that was restored lately
        self._priors: dict[int, Array] = {}  # by bucket of context, like those of drafts and what rounds cost
        self._moods: dict[int, Array] = {}
        self._draft_priors: dict[int, float] = {}
        self._costs: dict[tuple[int, int], Costs] = {}
        self._predicted: dict[tuple[int, int, bool, int], Mapping[str, float]] = {}

    def copy(self) -> LatencyModel:
        """A model that knows what this one knows, and from here on learns for itself."""
        model = LatencyModel(self.machine, self._verify_work, self._draft_work)
        model._learned, model._warm, model._pace = deepcopy(self._learned), set(self._warm), self._pace
        model._trial = deepcopy(self._trial)
        return model

    def resembling(
        self, verify_work: Callable[[int, int], Work], draft_work: Callable[[int], Work] | None
    ) -> LatencyModel:
        """A model of other work on this machine, assumed to be as far off its prior as this one; it starts on trial."""
        model = LatencyModel(self.machine, verify_work, draft_work)
        model._learned, model._warm, model._pace = self._learned.again(), set(self._warm), self._pace
        model._trial = _Trial(deepcopy(model._learned))
        return model

    def costs(self, n_max: int, context: int) -> Costs:
        """What rounds of 0 … `n_max` nodes cost now. The arrays are shared: do not write into them."""
        return _kept(self._costs, (n_max, context // BUCKET), lambda: self._price(n_max, context))

    def _price(self, n_max: int, context: int) -> Costs:
        widths, pace = np.arange(1.0, 2 + n_max), exp(self._pace)
        verify = pace * extended(widths, WIDTHS, self._verify_curve(context))
        host = pace * extended(widths, WIDTHS, self._learned.host.seconds(HOST_PRIOR))
        plain_s = float(verify[0]) + pace * self._plain_host_s()
        draft_s, position_s = self.draft_s(context), self.position_s(context)
        resume_s = draft_s * max(exp(self._learned.resume_at(context).value) - 1, 0.0)
        return Costs(plain_s, draft_s, host, verify, resume_s=resume_s, position_s=position_s)

    def draft_s(self, context: int) -> float:
        """Seconds that a draft takes now if the round before drafted, too."""
        return exp(self._pace) * self._draft_s(context)

    def position_s(self, context: int) -> float:
        """Seconds that one more position of a draft takes now."""
        return exp(self._pace) * self._draft_prior(context // BUCKET) * self._learned.position.value

    def predict(self, n: int, context: int, drafted: bool, padding: int = 0) -> Mapping[str, float]:
        """Expected seconds of each part of a round that verifies n nodes and runs `padding`; of a plain step if it was
        not `drafted`."""
        like = n, context // BUCKET, drafted, padding  # many rounds are alike, and few of them teach
        return _kept(self._predicted, like, lambda: self._predict(n, context, drafted, padding))

    def _predict(self, n: int, context: int, drafted: bool, padding: int) -> dict[str, float]:
        pace = exp(self._pace)
        verify = pace * seconds_at(1 + n + padding, self._verify_curve(context))
        if not drafted:
            return {"verify": verify, "aux": pace * self._plain_host_s()}
        host = seconds_at(1 + n, self._learned.host.seconds(HOST_PRIOR))
        return {"draft": self.draft_s(context), "verify": verify, "aux": pace * host}

    def observe(self, *rounds: Round, first: bool = False) -> None:
        """Learn from the seconds of a round, or of several that are alike in nodes, kind and reach of context.

        A `first` one drafts where those before it did not. Its draft catches up on the text since, in code that no
        cache holds any more. Later drafts are cheaper, so it is learned separately.
        """
        self._latest.extend(rounds)
        like, usually = rounds[0], exp(-self._pace)
        warm = rounds[like.width not in self._warm :]  # a width's first forward makes kernels, unlike the next ones
        if warm and like.seconds.get("verify", 0.0) > 0:
            self._learn_verify(warm, usually)
        self._warm.add(like.width)
        teaches = self._teaches(like.context, first)
        for round in rounds:
            if (draft := round.seconds.get("draft", 0.0)) > 0:
                self.observe_draft(draft, round.context, first, round.positions)
        hosts = [round.total_s - round.seconds.get("verify", 0.0) - round.seconds.get("draft", 0.0) for round in rounds]
        if (host := median(hosts)) > 0 and like.drafted and teaches:
            self._learned.host.learn(1 + like.n, host * usually, HOST_PRIOR, len(rounds))
        for host in () if like.drafted else hosts:
            if host > 0:
                self._learned.plain_host.move(log(host * usually / self._plain_host_s()))
        self._reprice()

    def observe_draft(self, seconds: float, context: int, first: bool = False, positions: int | None = None) -> None:
        """Learn from a draft alone; `positions` is None if their number makes no difference."""
        usual = seconds * exp(-self._pace)
        error = log(usual / self._draft_s(context))
        if positions is not None and not first:
            self._learned.position.move(positions, usual / self._draft_prior(context // BUCKET))
        if self._teaches(context, first):
            self._learned.draft_at(context).move(error)
        else:
            resume = self._learned.resume_at(context)
            resume.move(error - resume.value)
        self._reprice()

    def _reprice(self) -> None:
        """Forget the prices and predictions that were computed before it learned."""
        self._costs.clear()
        self._predicted.clear()

    def _teaches(self, context: int, first: bool) -> bool:
        """Whether a draft teaches what drafts usually take: a `first` one does only while few others are known."""
        return not first or self._learned.draft_at(context).seen < ROUTINE

    def _learn_verify(self, rounds: Sequence[Round], usually: float) -> None:
        """Split a surprise between this width, which keeps its part, and the machine's pace, which fades.

        A width that is not well known takes the surprise itself. But a machine that slows down for a while slows all
        widths. If the one in use took the blame, the policy would go on to others, until all of them had been blamed.
        """
        like, times = rounds[0], len(rounds)
        seconds = usually * median(round.seconds["verify"] for round in rounds)
        curve, prior = self._learned.verify_at(like.context), self._verify_prior(like.context)
        surprise, known = curve.learn(like.width, seconds, prior, times, self._mood(like.context))
        taken = (1 - (1 - PACE) ** times) * known * min(max(surprise, -times * LEAP), times * LEAP)
        self._pace = FADE**times * (self._pace + taken)
        for round in rounds:
            if self._trial is not None:
                self._judge(self._trial, round)

    def _judge(self, trial: _Trial, round: Round) -> None:
        """Drop a restored profile whose original values are far off: it is of another load, clock or build."""
        kept = trial.kept.verify_at(round.context).seconds(self._verify_prior(round.context))
        trial.errors.append(abs(log(round.seconds["verify"] / seconds_at(round.width, kept))))
        if len(trial.errors) == TRIAL:
            if float(np.median(trial.errors)) > MISFIT:
                self._learned, self._pace = Learned(), 0.0
            self._trial = None

    @property
    def seen(self) -> int:
        """How many of the latest rounds it learned from."""
        return len(self._latest)

    def errors(self) -> dict[str, Errors]:
        """How far the predictions of the latest rounds were off, by part."""
        return prediction_errors(self._latest)

    def to_json(self) -> dict[str, object]:
        """What was learned, for `restore` in a later process with the same machine, target and drafter."""
        errors = {part: [e.median, e.p90] for part, e in self.errors().items() if e.median == e.median}
        return {**self._learned.to_json(), "errors": errors}

    def restore(self, data: object) -> None:
        """Go on from what `to_json` gave. Raises BadInput, changing nothing, if `data` is anything else."""
        try:
            self._learned = Learned.of_json(data)
        except (KeyError, TypeError, ValueError):
            raise BadInput("This is not a learned latency profile of this version; it will be learned anew.") from None
        self._trial = _Trial(deepcopy(self._learned))
        self._reprice()

    def _works(self, context: int) -> list[Work]:
        """What forwards of `WIDTHS` tokens must do, for the middle of the context's bucket."""
        return [self._verify_work(int(width), _middle(context // BUCKET)) for width in WIDTHS]

    def _verify_prior(self, context: int) -> Array:
        """`[len(WIDTHS)]` seconds of the counted work, by the machine's figures."""
        return _kept(self._priors, context // BUCKET, lambda: self._count(context))

    def _count(self, context: int) -> Array:
        seconds: Array = np.maximum(list(map(self.machine.seconds, self._works(context))), LEAST_S)
        return seconds

    def _mood(self, context: int) -> Array:
        """`[len(WIDTHS), len(WIDTHS)]` covariance that a round adds, because memory, which others share, is faster at
        some times than at others.

        Widths that wait for memory change together, others do not. A policy that always drafts runs one plain step an
        answer, and these few steps must tell what narrower trees would take now. What all widths share is left to the
        pace.
        """
        return _kept(self._moods, context // BUCKET, lambda: self._tilt(context))

    def _tilt(self, context: int) -> Array:
        waits = np.array(list(map(self.machine.waits, self._works(context))))
        apart = waits - waits[WIDTHS <= USUAL].mean()
        return MOOD * np.outer(apart, apart)

    def _verify_curve(self, context: int) -> Array:
        return self._learned.verify_at(context).seconds(self._verify_prior(context))

    def _draft_s(self, context: int) -> float:
        return self._draft_prior(context // BUCKET) * exp(self._learned.draft_at(context).value)

    def _draft_prior(self, bucket: int) -> float:
        if bucket not in self._draft_priors:
            prior = self.machine.seconds(self._draft_work(_middle(bucket))) if self._draft_work else 0.0
            self._draft_priors[bucket] = max(prior, LEAST_S)
        return self._draft_priors[bucket]

    def _plain_host_s(self) -> float:
        return HOST_S * exp(self._learned.plain_host.value)


def _kept(known: dict[K, V], key: K, work_out: Callable[[], V]) -> V:
    """The value of a key, worked out when it is first asked for."""
    if key not in known:
        if len(known) == MOST_KEPT:  # nothing was learned for long, which would have cleared it
            known.clear()
        known[key] = work_out()
    return known[key]


def _middle(bucket: int) -> int:
    return bucket * BUCKET + BUCKET // 2
