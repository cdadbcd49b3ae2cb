"""Methods answer the same prompt in turn, in one process: a few tokens each, none of them always first."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import numpy as np

from draftwood.bench.grid_table import OURS
from draftwood.bench.measure import turns
from draftwood.engine import Engine
from draftwood.offline import now
from draftwood.prefix import PrefixCache
from draftwood.sampling import Sampling
from draftwood.trace import Round

WARM_TOKENS = 48
# Tokens. After each turn the host waits for the device. Rounds on the device gain from the host working at the same
# time, so they need longer turns.
TURN = {"host": 1, "device": 32}
EARLIER_SEED = 10**6  # for other draws than those that are measured
PAUSE = 5.0  # a round counts as at most so many times the method's usual one: longer ones are pauses of the machine


def race(
    ran: Mapping[str, Engine],
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    known: Mapping[bool, PrefixCache],
    seed: int,
) -> dict[str, Answering]:
    """All methods answer a prompt in turns, in an order that `seed` shuffles. `known` is by having no drafter."""
    read(ran, prompt, known)
    # Asked before any of them begins: a device that is at work names the host, which would serve the next request.
    each = max(TURN[engine.backend().name] for engine in ran.values())
    answers = {
        method: Answering(engine, prompt, tokens, sampling, known[engine.drafter is None])
        for method, engine in ran.items()
    }
    for method, goal in turns(list(ran), tokens, seed, each):
        answers[method].run(goal)
    return answers


class Answering:
    """One method's answer while it is written. Methods take turns, so that the machine's changing speed affects all."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], tokens: int, sampling: Sampling, known: PrefixCache
    ) -> None:
        """Reads the prompt, unless it is `known`."""
        self._engine, ahead = engine, engine.backend().name == "device"
        self._request = engine.request(prompt, tokens, sampling)
        self._batch = engine.batch_of_one(engine.policy, None, known.keep)
        self.tokens, self.rounds, self._spent = 0, list[Round](), list[float]()  # after the first token
        engine.tap()
        self._batch.join(self._request, None if ahead else known.find(self._request))
        while not (steps := list(self._batch.round().values())):
            pass
        self.tokens = len(steps[0].tokens) - 1
        if ahead:  # the first round is under way by now
            self._spent.append(now(engine.target) - self._request.start - steps[0].seconds)

    def run(self, tokens: int) -> None:
        """Run rounds until there are so many tokens, or all."""
        self._engine.tap()  # plain decoding pays for no taps
        while self.tokens < tokens and not self._request.finished:
            start = time.perf_counter()
            steps = list(self._batch.round().values())
            self._spent.append(time.perf_counter() - start)
            for step in steps:
                self.tokens += len(step.tokens)
                self.rounds += [step.round] if step.round else []
        self._wait()

    def _wait(self) -> None:
        """What the device still does for this answer, its next draft, counts as this answer's time."""
        start = time.perf_counter()
        if self._spent:
            self._spent[-1] += now(self._engine.target) - start

    @property
    def wall_s(self) -> float:
        """Seconds of all rounds."""
        return sum(self._spent)

    @property
    def seconds(self) -> float:
        """The same without the machine's pauses."""
        return float(np.minimum(self._spent, PAUSE * np.median(self._spent)).sum())


def read(ran: Mapping[str, Engine], prompt: Sequence[int], known: Mapping[bool, PrefixCache]) -> None:
    """Read a prompt once with a drafter and once without, for all methods whose rounds run on the host.

    The last engine of each kind reads it, and gets one more text to learn from. It is not `OURS` if there are others.
    """
    for reader in {engine.drafter is None: engine for engine in ran.values()}.values():
        if reader.backend().name == "host":
            Answering(reader, prompt, 1, Sampling(), known[reader.drafter is None])


def warmed(ran: Mapping[str, Engine], prompt: Sequence[int], known: Mapping[bool, PrefixCache]) -> dict[str, Engine]:
    """The same engines after the machine has been used, at a context like this one.

    Kernels of their widths exist, and all engines know what any of them learned about seconds, as from a profile. From
    here on each is as if in a process of its own: what one learns from texts and clocks helps no other.
    """
    race(ran, prompt, WARM_TOKENS, Sampling(), known, 0)
    return {method: engine.fresh() for method, engine in ran.items()}


def experienced(
    ran: Mapping[str, Engine],
    texts: Sequence[Sequence[int]],
    tokens: int,
    temperature: float,
    known: Mapping[bool, PrefixCache],
) -> dict[str, Engine]:
    """The same engines; `OURS` begins with what an earlier process that answered `texts` learned about acceptance."""
    earlier, later = {OURS: ran[OURS].fresh()}, ran[OURS].fresh()
    for i, ids in enumerate(texts):
        race(earlier, ids, tokens, Sampling(temperature, seed=EARLIER_SEED + i), {False: known[False]}, i)
    later.recall(json.loads(json.dumps(earlier[OURS].experience())))
    return {**ran, OURS: later}
