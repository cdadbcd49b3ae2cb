"""Whether something optional is worth its time: tokens per second with it and without, learned from trying both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

LOOKS, REST = 4, 32  # each way is tried so often at first; later, one round in so many tries the rarer way
RECENT = 0.05
BUCKETS = 4  # of the chance that it helps; each is decided by its own trials


@dataclass(slots=True)
class Way:
    """Mean tokens and seconds of rounds of one kind."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen: int = 0

    def learn(self, tokens: float, seconds: float) -> None:
        self.seen += 1
        step = max(RECENT, 1 / self.seen)
        self.tokens += step * (tokens - self.tokens)
        self.seconds += step * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(slots=True, eq=False)
class Trials:
    """Trials with it and without. A round lasts from `begin` to `emitted`: time between rounds does not count."""

    clock: Callable[[], float] = perf_counter
    ways: list[list[Way]] = field(default_factory=lambda: [[Way(), Way()] for _ in range(BUCKETS)])
    _start: float = 0.0
    _running: Way | None = None

    def begin(self) -> None:
        """A round begins."""
        self._start, self._running = self.clock(), None

    def choose(self, chance: float) -> bool:
        """Whether to do it in this round, in which it helps with a probability of about `chance`."""
        pair = self.ways[min(int(chance * BUCKETS), BUCKETS - 1)]
        without, with_it = pair
        rounds = without.seen + with_it.seen
        if min(without.seen, with_it.seen) < LOOKS or rounds % REST == 0:
            done = with_it.seen <= without.seen
        else:
            done = with_it.rate > without.rate
        self._running = pair[done]
        return done

    def emitted(self, tokens: int) -> None:
        """The round, if one runs, committed so many tokens."""
        if self._running is not None:
            self._running.learn(tokens, self.clock() - self._start)
        self._running = None
