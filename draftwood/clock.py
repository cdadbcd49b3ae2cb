"""Where the seconds of a round go."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from draftwood.trace import AUX


@dataclass(slots=True)
class Clock:
    """The seconds of one round, by verb."""

    seconds: dict[str, float] = field(default_factory=dict)
    # Where a device works meanwhile: by how many seconds the host's work made the round longer. None: by all of them.
    exposed: float | None = None

    def __call__(self, verb: str) -> Lap:
        """A context whose seconds count as this verb's."""
        return Lap(self, verb)

    def add(self, verb: str, seconds: float) -> None:
        self.seconds[verb] = self.seconds.get(verb, 0.0) + seconds

    def close(self) -> None:
        """Let the host's verbs share the seconds that were exposed, so that all verbs add up to the round."""
        if self.exposed is not None:
            laps = {verb: self.seconds[verb] for verb in AUX if verb in self.seconds}
            share = self.exposed / sum(laps.values())
            self.seconds.update({verb: seconds * share for verb, seconds in laps.items()})


@dataclass(slots=True)
class Lap:
    """One timed stretch of a verb. A round has some eight, and a generator's context would take three times as long."""

    clock: Clock
    verb: str
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.clock.add(self.verb, time.perf_counter() - self.start)
