"""How long a round takes: a roofline prior from counted work, corrected by every round that runs.

A prior alone is off by a factor on every machine; an average alone knows nothing about widths it has not run
and does worse (BASTION, arXiv 2605.29727, ablation). So the prior gives the shape, and what is learned is the
logarithm of observed over prior at a few widths. Formulas: docs/latency-model.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BadInput
from draftwood.policies.base import Costs
from draftwood.trace import Round

Array = NDArray[np.float64]

# Widths (tokens of one forward) at which something is learned. In between, seconds are linear in width.
WIDTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64)
NEARNESS = 1 / (1 + np.log2(WIDTHS[:, None] / WIDTHS) ** 2)  # what one width says about another
PRIOR_WEIGHT = 0.25  # the prior counts as this many observations where only other widths have been seen
ENOUGH = 10.0  # observations after which a width is as good a witness for its neighbours as it will be
BUCKET = 64  # tokens of context that share one cost curve: their KV is small beside the weights

GAIN = 0.12  # weight of a new observation in the long run
PACE, FADE, LEAP = 0.25, 0.9, 0.5  # the pace follows and is forgotten within some ten rounds; one moves it 0.12 at most
CALM = 0.2  # the same for the spread
DOUBT = 0.3  # spread of log-ratios that is expected before any is known
LEAST_SPREAD = 0.01
LIMIT = 3.0  # spreads: an observation further off moves a level no more than one at this distance

HEAD_START = 4.0  # observations that a level learned in an earlier process counts as

HOST_S = 3e-4  # a first guess of what the host spends on a round,
HOST_PRIOR = HOST_S + 3e-6 * (WIDTHS - 1)  # and on each node
LEAST_S = 1e-6  # no draft is quicker: keeps ratios finite for drafters that count no work


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward must do at least."""

    flops: float
    bytes: float
    launches: int  # operator launches: the fixed cost that small forwards pay


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device reaches in one dtype, as measured by `probe.py`."""

    name: str
    peak: float  # FLOP/s of a large matrix product
    bandwidth: float  # bytes/s of weights streaming through a matrix-vector product
    launch_s: float  # seconds of the smallest operator

    def seconds(self, work: Work) -> float:
        """The roofline: the longer of arithmetic and memory traffic, and the launches."""
        return max(work.flops / self.peak, work.bytes / self.bandwidth) + work.launches * self.launch_s


@dataclass(slots=True)
class Level:
    """A running log-ratio: early observations move it much, a late outlier barely."""

    value: float = 0.0
    seen: float = 0.0  # observations; parts of one where it is shared between two levels
    spread: float = inf  # typical distance of an observation; infinite before the first

    def move(self, error: float, step: float = 1.0, weight: float = 1.0) -> None:
        """An observation at `value + error`; `step` scales the move, `weight` how much it counts as seen."""
        error = min(max(error, -LIMIT * self.spread), LIMIT * self.spread)
        self.value += step * max(1 / (1 + self.seen / 2), GAIN) * error
        if self.spread == inf:
            self.spread = DOUBT
        # A normal error is 0.8 deviations on average. Lasting errors widen the spread until believed.
        self.spread += CALM * weight * (abs(error) / 0.8 - self.spread)
        self.spread = max(self.spread, LEAST_SPREAD)
        self.seen += weight


class Curve:
    """Seconds over width: a prior times what was learned at each of `WIDTHS`."""

    def __init__(self) -> None:
        self.levels = [Level() for _ in WIDTHS]

    def seconds(self, prior: Array) -> Array:
        """`[len(WIDTHS)]` seconds at `WIDTHS`, given the prior's.

        A width that was run keeps what was learned there, cliffs included. One that was not takes its
        neighbours' ratio, and is not believed to be cheaper than a narrower one that was run: a prior too
        hopeful about wide forwards would lure a policy there.
        """
        seen = np.array([level.seen for level in self.levels])
        value = np.array([level.value for level in self.levels])
        witness = np.minimum(seen, ENOUGH)
        neighbours = NEARNESS @ (witness * value) / (NEARNESS @ witness + PRIOR_WEIGHT)
        run = prior * np.exp(value)
        least = np.maximum.accumulate(np.where(seen > 0, run, 0.0))
        seconds: Array = np.where(seen > 0, run, np.maximum(prior * np.exp(neighbours), least))
        return seconds

    def seen(self, width: int) -> float:
        """Observations of the least known of the two widths around `width`."""
        left = int(np.searchsorted(WIDTHS, width, side="right")) - 1
        right = min(int(np.searchsorted(WIDTHS, width)), len(WIDTHS) - 1)
        return min(self.levels[left].seen, self.levels[right].seen)

    def learn(self, width: int, seconds: float, prior: Array) -> None:
        """One observation moves the widths on both sides of it, each by its nearness."""
        left = min(int(np.searchsorted(WIDTHS, width, side="right")) - 1, len(WIDTHS) - 2)
        right_part = float((width - WIDTHS[left]) / (WIDTHS[left + 1] - WIDTHS[left]))
        now = self.seconds(prior)
        error = log(seconds / float(np.interp(width, WIDTHS, now)))
        fresh = all(level.seen == 0 for level in self.levels)
        parts = {left: 1 - right_part, left + 1: right_part}
        # Normalised least mean squares: at a gain of 1 the curve would now pass through the observation.
        norm = sum(part**2 for part in parts.values())
        for knot, part in parts.items():
            level = self.levels[knot]
            if part and not level.seen and not fresh:  # start at what the neighbours say, and doubt the rest
                level.value, level.spread = log(now[knot] / prior[knot]), DOUBT
            if part:
                level.move(error, step=part / norm, weight=part)


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
        self._verify, self._host = Curve(), Curve()
        self._draft, self._plain_host = Level(), Level()
        self._warm: set[int] = set()  # widths that have run in this process
        self._pace = 0.0  # log of how much slower all forwards are just now than they usually are
        self._priors: dict[int, Array] = {}
        self._costs: dict[tuple[int, int], Costs] = {}

    def costs(self, n_max: int, context: int) -> Costs:
        """What rounds of 0 … `n_max` nodes cost now. The arrays are shared: do not write into them."""
        key = n_max, context // BUCKET
        if key not in self._costs:
            widths = np.arange(1, 2 + n_max)
            verify = np.interp(widths, WIDTHS, self._verify.seconds(self._verify_prior(context)))
            host = np.interp(widths, WIDTHS, self._host.seconds(HOST_PRIOR))
            plain_s = float(verify[0]) + self._plain_host_s()
            self._costs[key] = Costs(plain_s, self._draft_s(context), host, verify)
        return self._costs[key]

    def predict(self, n: int, context: int, drafted: bool, padding: int = 0) -> dict[str, float]:
        """Expected seconds of each part of a round that verifies n nodes and runs `padding`; of a plain step else."""
        verify = self._verify_s(1 + n + padding, context)
        if not drafted:
            return {"verify": verify, "aux": self._plain_host_s()}
        host = float(np.interp(1 + n, WIDTHS, self._host.seconds(HOST_PRIOR)))
        return {"draft": self._draft_s(context), "verify": verify, "aux": host}

    def observe(self, round: Round) -> None:
        """Learn from where a round's seconds went."""
        verify, draft = round.seconds.get("verify", 0.0), round.seconds.get("draft", 0.0)
        host = round.total_s - verify - draft
        if verify > 0 and round.width in self._warm:
            self._learn_verify(round, verify)
        self._warm.add(round.width)  # a width's first forward makes kernels for it: no word on the next ones
        if draft > 0:
            self._draft.move(log(draft / self._draft_s(round.context)))
        if host > 0 and round.drafted:
            self._host.learn(1 + round.n, host, HOST_PRIOR)
        elif host > 0:
            self._plain_host.move(log(host / self._plain_host_s()))
        self._costs.clear()

    def _learn_verify(self, round: Round, seconds: float) -> None:
        """Split a surprise between this width, which keeps it, and the machine's pace, which fades.

        A machine that slows down for a while slows all widths. Blaming the one in use would send the policy to
        others until it had wronged them all.
        """
        usual = seconds / exp(self._pace)
        surprise = log(usual / self._verify_s(round.width, round.context))
        known = self._verify.seen(round.width) / ENOUGH  # a width that is new has itself to blame
        self._verify.learn(round.width, usual, self._verify_prior(round.context))
        pace = self._pace + PACE * min(known, 1.0) * min(max(surprise, -LEAP), LEAP)
        self._pace = FADE * pace

    def to_json(self) -> dict[str, object]:
        """What was learned, for `restore` in a later process with the same machine, target and drafter."""
        return {
            "widths": WIDTHS.tolist(),
            "levels": [[level.value, level.seen] if level.seen else None for level in self._levels()],
        }

    def restore(self, data: object) -> None:
        """Go on from what `to_json` gave. Raises BadInput, changing nothing, if `data` is anything else."""
        own = self._levels()
        known = data.get("levels") if isinstance(data, dict) and data.get("widths") == WIDTHS.tolist() else None
        if not isinstance(known, list) or len(known) != len(own) or not all(map(_is_level, known)):
            raise BadInput("This is not a learned latency profile of this version; it will be learned anew.")
        for level, values in zip(own, known, strict=True):
            if values is not None:  # a head start, not the truth: few observations, and doubt
                level.value, level.seen, level.spread = values[0], min(values[1], HEAD_START), DOUBT
        self._costs.clear()

    def _levels(self) -> list[Level]:
        return [*self._verify.levels, *self._host.levels, self._draft, self._plain_host]

    def _verify_prior(self, context: int) -> Array:
        """`[len(WIDTHS)]` the roofline's seconds, for the middle of the context's bucket."""
        bucket = context // BUCKET
        if bucket not in self._priors:
            middle = bucket * BUCKET + BUCKET // 2
            seconds = [self.machine.seconds(self._verify_work(int(width), middle)) for width in WIDTHS]
            self._priors[bucket] = np.maximum(seconds, LEAST_S)
        return self._priors[bucket]

    def _verify_s(self, width: int, context: int) -> float:
        curve = self._verify.seconds(self._verify_prior(context))
        return float(np.interp(width, WIDTHS, curve))

    def _draft_s(self, context: int) -> float:
        prior = self.machine.seconds(self._draft_work(context)) if self._draft_work else 0.0
        return max(prior, LEAST_S) * exp(self._draft.value)

    def _plain_host_s(self) -> float:
        return HOST_S * exp(self._plain_host.value)


def _is_level(values: object) -> bool:
    """Whether `values` is one entry of `to_json`'s levels."""
    if values is None:
        return True
    numbers = values if isinstance(values, (list, tuple)) else ()
    return len(numbers) == 2 and all(isinstance(x, (int, float)) and abs(x) < 1e6 for x in numbers)
