"""Whether something optional is worth its time: tokens per second with it and without, learned from trying both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

LOOKS, REST = 4, 32  # rounds that each way gets at first, and of every so many later ones
RECENT = 0.05
BUCKETS = 4  # of the chance that it helps: rounds that differ are decided apart


@dataclass(slots=True)
class Way:
    """What rounds of one kind brought."""

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
    """A round lasts from one `choose` to the next; `emitted` says what it brought."""

    clock: Callable[[], float] = perf_counter
    ways: list[list[Way]] = field(default_factory=lambda: [[Way(), Way()] for _ in range(BUCKETS)])
    _running: tuple[Way, float] | None = None
    _tokens: int = 0

    def choose(self, chance: float) -> bool:
        """Whether to do it in the round that begins, in which it helps with probability `chance` or so."""
        now = self.clock()
        if self._running is not None and self._tokens:
            way, start = self._running
            way.learn(self._tokens, now - start)
        pair = self.ways[min(int(chance * BUCKETS), BUCKETS - 1)]
        without, with_it = pair
        rounds = without.seen + with_it.seen
        if min(without.seen, with_it.seen) < LOOKS or rounds % REST == 0:
            done = with_it.seen <= without.seen
        else:
            done = with_it.rate > without.rate
        self._running, self._tokens = (pair[done], now), 0
        return done

    def emitted(self, tokens: int) -> None:
        """The round committed so many tokens."""
        self._tokens += tokens

    def forget(self) -> None:
        """The round that runs is not one to learn from."""
        self._running = None
