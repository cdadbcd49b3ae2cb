"""Where the seconds of a round go."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from draftwood.trace import AUX


@dataclass(slots=True)
class Clock:
    """Seconds by verb of one round."""

    seconds: dict[str, float] = field(default_factory=dict)
    # Of what the host does, what the round was longer for, where a device works meanwhile; None: all of it.
    exposed: float | None = None

    def __call__(self, verb: str) -> Lap:
        """A context whose seconds count as this verb's."""
        return Lap(self, verb)

    def add(self, verb: str, seconds: float) -> None:
        self.seconds[verb] = self.seconds.get(verb, 0.0) + seconds

    def close(self) -> None:
        """The host's verbs share what was exposed of them, so that all verbs together are the round."""
        if self.exposed is not None:
            laps = {verb: self.seconds[verb] for verb in AUX if verb in self.seconds}
            share = self.exposed / sum(laps.values())
            self.seconds.update({verb: seconds * share for verb, seconds in laps.items()})


@dataclass(slots=True)
class Lap:
    """One stretch of a verb. Not a generator, whose context takes three times as long: a round has some eight."""

    clock: Clock
    verb: str
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.clock.add(self.verb, time.perf_counter() - self.start)
