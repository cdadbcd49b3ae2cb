"""`draftwood bench serve`: several requests at once. Speed of all and of each user, beside plain batched decoding.

At every load (a number of users) the methods answer the same prompts in one process. Each method has a room of its own,
and they take turns of a token for each user, so that the machine's changing speed affects all alike. A room has as many
seats as there are users, and all are taken all the time: when an answer ends, the next prompt takes its seat. The first
answers are cut at different lengths, so that seats do not change hands together. The clock starts when these are over:
neither the beginning nor an emptying room is measured. Plain decoding runs without a drafter and without its taps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from draftwood import registry
from draftwood.batch import Step
from draftwood.bench.environment import environment
from draftwood.bench.measure import turns
from draftwood.bench.prompts import Prompt, by_dataset, load_prompts
from draftwood.bench.records import check_writable, write_summary
from draftwood.bench.stats import PLAIN, jsonable
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel
from draftwood.llm import LLM
from draftwood.request import Request
from draftwood.sampling import Sampling

LEAST_OF_PLAIN = 0.97
LEAST_ANSWERS = 32  # of a pass: passes may read one prompt more or less, and of 8 prompts one takes 4 % of the time


@dataclass(frozen=True, slots=True)
class CrowdOptions:
    """What to measure. Raises BadInput for numbers that cannot be used."""

    loads: Sequence[int] = (1, 2, 4, 8, 16, 32)
    policies: Sequence[str] = ("bastion", "ddtree:8")
    prompts: Sequence[str] = ()
    turns: int = 2  # answers' worth of tokens for each user, on average, at least
    max_new_tokens: int = 64
    repeats: int = 3
    temperature: float = 0.0
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.loads or min(*self.loads, self.turns, self.repeats, 1) < 1 or self.max_new_tokens < 2:
            raise BadInput("--concurrency, --turns and --repeats must be 1 or more, --max-new-tokens 2 or more.")


@dataclass(frozen=True, slots=True)
class Pass:
    """What one method wrote while the clock ran."""

    tokens: int
    seconds: float
    users: list[float]  # tokens per second of each request, after its first token
    width: float  # tokens of a forward, on average

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of one method at one load; a ratio is the median of those to plain decoding in each repeat."""

    users: int
    method: str
    tokens_per_s: float
    user_tokens_per_s: float  # the median user's
    slowest_user: float
    of_plain: float
    width: float


def run_crowd(llm: LLM, options: CrowdOptions, console: Console) -> dict[str, Any]:
    """Measure every load, print the table, write and return the summary."""
    check_writable(options.out)
    methods = [PLAIN, *(policy for policy in options.policies if policy != PLAIN)]
    prompts = [llm.encode(prompt.turns[0]) for prompt in mixed(load_prompts(options.prompts))]
    crowd = Crowd(llm, methods, options)
    loads: list[Load] = []
    for users in options.loads:
        loads += crowd.measure(users, prompts, lambda line: console.print(line, style="dim", highlight=False))
    facts = {"loads": [jsonable(asdict(load)) for load in loads], "environment": environment()}
    if options.out is not None:
        write_summary(options.out, facts)
    console.print(table(loads, methods))
    print(json.dumps(facts), flush=True)
    return facts


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One prompt of each data set in turn, so that a small crowd, too, asks a bit of everything."""
    return [prompt for row in zip_longest(*by_dataset(prompts).values()) for prompt in row if prompt is not None]


class Crowd:
    """An engine for each method; each learns for itself."""

    def __init__(self, llm: LLM, methods: Sequence[str], options: CrowdOptions) -> None:
        self._llm, self._options = llm, options
        self._engines = {method: self._engine(method) for method in methods}

    def _engine(self, method: str) -> Engine:
        policy = registry.policy(method)
        if method != PLAIN:
            engine = self._llm.engine.fresh()
            engine.policy = policy
            return engine
        target = self._llm.target
        return Engine(target, None, policy, LatencyModel(self._llm.engine.latency.machine, target.work))

    def measure(self, users: int, prompts: Sequence[Sequence[int]], say: Callable[[str], None]) -> list[Load]:
        methods = list(self._engines)
        self.rooms(users, prompts, 0)  # kernels, and prices of forwards of this size
        passes: dict[str, list[Pass]] = {method: [] for method in methods}
        for repeat in range(self._options.repeats):
            for method, room in self.rooms(users, prompts, repeat).items():
                passes[method].append(found := room.heard.result())
                say(f"{users} users, {method}: {found.tokens_per_s:.1f} tokens/s")
        return [summed(users, method, passes[method], passes[PLAIN]) for method in methods]

    def rooms(self, users: int, prompts: Sequence[Sequence[int]], seed: int) -> dict[str, Room]:
        """Run every method until all have written their answers' worth of tokens; `seed` shuffles their turns."""
        rooms = {
            method: Room(engine, users, prompts, self._llm.stop_ids, self._options)
            for method, engine in self._engines.items()
        }
        share = max(self._options.turns, ceil(LEAST_ANSWERS / users)) * self._options.max_new_tokens
        for method, goal in turns(list(rooms), share, seed):
            rooms[method].run(users * goal)
        for method, room in rooms.items():
            room.close()  # the next pass has the same texts, which no drafter may have learned
            self._engines[method] = self._engines[method].fresh()
        return rooms


class Room:
    """One method's seats. Its clock runs only during its turns."""

    def __init__(
        self,
        engine: Engine,
        users: int,
        prompts: Sequence[Sequence[int]],
        stop_ids: frozenset[int],
        options: CrowdOptions,
    ) -> None:
        self._engine, self._users, self._prompts = engine, users, prompts
        self._stop_ids, self._options = stop_ids, options
        self._batch, self._seated = engine.batch(), 0
        self.heard = Heard(users)

    def run(self, tokens: int) -> None:
        """Run rounds until so many tokens were counted."""
        self._engine.tap()
        while self.heard.tokens < tokens:
            start = time.perf_counter()
            while len(self._batch.requests) < self._users:
                self._seat()
            steps = self._batch.round()
            self.heard.take(steps, time.perf_counter() - start)

    def close(self) -> None:
        self._batch.close()

    def _seat(self) -> None:
        seat, options, prompts = self._seated, self._options, self._prompts
        sampling = Sampling(options.temperature, seed=options.seed + seat)
        size = length(seat, self._users, options.max_new_tokens)
        self._batch.join(self._engine.request(prompts[seat % len(prompts)], size, sampling, self._stop_ids))
        self._seated += 1


def length(seat: int, users: int, longest: int) -> int:
    """How long an answer may be: lengths of the first answers are spread out, later ones have the whole length."""
    return max(2, longest * (1 + seat) // users) if seat < users else longest


class Heard:
    """What a batch writes, counted from when as many answers have ended as there are seats."""

    def __init__(self, users: int) -> None:
        self.tokens = 0
        self._unmeasured = users
        self._now = self._start = 0.0  # seconds of rounds
        self._first: dict[Request, float] = {}
        self._speeds: list[float] = []
        self._widths: list[int] = []

    def take(self, steps: Mapping[Request, Step], seconds: float) -> None:
        """Count what a round of `seconds` wrote."""
        self._now += seconds
        for request in steps:
            self._first.setdefault(request, self._now)
            if request.finished:
                self._end(request)
        if self._unmeasured > 0:
            self._start = self._now
            return
        self.tokens += sum(len(step.tokens) for step in steps.values())
        rounds = [step.round for step in steps.values() if step.round]
        self._widths += [rounds[0].width] if rounds else []

    def result(self) -> Pass:
        return Pass(self.tokens, self._now - self._start, self._speeds, float(np.mean(self._widths)))

    def _end(self, request: Request) -> None:
        began, written = self._first.pop(request), len(request.sampler.tokens) - request.prompt - 1
        if self._unmeasured <= 0 and self._now > began:
            self._speeds.append(written / (self._now - began))
        self._unmeasured -= 1


def summed(users: int, method: str, passes: Sequence[Pass], plain: Sequence[Pass]) -> Load:
    speeds = [speed for one in passes for speed in one.users] or [float("nan")]  # it may be that no answer ended
    return Load(
        users,
        method,
        tokens_per_s=float(np.median([one.tokens_per_s for one in passes])),
        user_tokens_per_s=float(np.median(speeds)),
        slowest_user=min(speeds),
        of_plain=float(np.median([a.tokens_per_s / b.tokens_per_s for a, b in zip(passes, plain, strict=True)])),
        width=float(np.mean([one.width for one in passes])),
    )


def table(loads: Sequence[Load], methods: Sequence[str]) -> Table:
    """A row for each load; a ratio below the promise is marked."""
    shown = Table(title="tokens/s of all · of a user · over plain")
    shown.add_column("users", justify="right")
    for method in methods:
        shown.add_column(method, justify="right")
    for users in dict.fromkeys(load.users for load in loads):
        cells = [
            f"{load.tokens_per_s:.1f} · {load.user_tokens_per_s:.1f} · {load.of_plain:.2f}"
            f"{'' if load.of_plain >= LEAST_OF_PLAIN else ' !'}"
            for load in loads
            if load.users == users
        ]
        shown.add_row(str(users), *cells)
    return shown
