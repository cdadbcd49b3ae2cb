"""What rounds took, for the latency models, which learn from several at once because learning takes time, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from draftwood.latency import LatencyModel
from draftwood.learned import reach
from draftwood.trace import Round

SURPRISING = 1.2  # times the expected seconds of a forward
# Rounds whose seconds are learned from at once: at first; then one in so many of all known ones; and at most.
SECONDS_TOGETHER, ONE_IN, MOST_TOGETHER = 4, 8, 32


class _Kind(NamedTuple):
    """What rounds that teach the same thing have in common."""

    requests: int
    first: bool  # drafts where the round before it did not
    drafted: bool
    n: int
    padding: int
    reach: int


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A round for the latency model. It can be learned from only when it is over, in the `observe` of a later one."""

    round: Round
    requests: int
    drafted: int  # requests
    first: bool  # as in `_Kind`

    @property
    def surprises(self) -> bool:
        """Whether the forward took much longer than expected. Unless that is learned at once, its width is chosen
        again."""
        return self.round.seconds.get("verify", 0.0) > SURPRISING * self.round.predicted.get("verify", inf)

    @property
    def kind(self) -> _Kind:
        r = self.round
        return _Kind(self.requests, self.first, r.drafted, r.n, r.padding, reach(r.context))


class Timings:
    """The timings of one batch's rounds."""

    def __init__(self, latency_of: Callable[[int], LatencyModel]) -> None:
        """`latency_of(requests)` is the model for batches of that size."""
        self._latency_of = latency_of
        self._timed: list[_Timed] = []
        self._learning_s = 0.0  # per round of those that were learned from last

    def add(self, round: Round, requests: int, drafted: int, first: bool) -> None:
        """Add a round of so many `requests`, of which `drafted` were drafted for; `first` is as in `LatencyModel`."""
        self._timed.append(_Timed(round, requests, drafted, first))

    def learn_some(self, requests: int) -> float:
        """Learn every so many rounds (more when more are known), and at once where one was far off.

        Returns the seconds that learning takes per round, which the `observe` of every round is charged: otherwise one
        of them would look expensive.
        """
        rounds, known = len(self._timed), self._latency_of(requests).seen
        due = min(max(SECONDS_TOGETHER, known // ONE_IN), MOST_TOGETHER)
        if rounds >= due or (self._timed and self._timed[-1].surprises):
            start = time.perf_counter()
            self.learn()
            self._learning_s = (time.perf_counter() - start) / rounds
        return self._learning_s

    def learn(self) -> None:
        """Learn what the last rounds took. A draft's seconds go to the model for as many requests as were drafted for,
        all others to the model for the whole batch."""
        alike: dict[_Kind, list[Round]] = {}
        for timed in self._timed:
            round = timed.round
            if timed.requests > 1 and (draft_s := round.seconds.get("draft", 0.0)):
                model = self._latency_of(timed.drafted)
                model.observe_draft(draft_s, round.context, timed.first, round.positions)
                round = replace(round, seconds={verb: s for verb, s in round.seconds.items() if verb != "draft"})
            alike.setdefault(timed.kind, []).append(round)
        for kind, rounds in alike.items():
            self._latency_of(kind.requests).observe(*rounds, first=kind.first)
        self._timed.clear()
