"""Rows of texts being written: each step gives every row a token, and finished rows get the next jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from draftwood.device.draw import drawer
from draftwood.device.mail import Mail, sent
from draftwood.drafters.lattice import top_k
from draftwood.native import candidates as compiled
from draftwood.noise import keys
from draftwood.train.jobs import SELF_TEMPERATURE, SELF_TOKENS, Job, Template
from draftwood.train.rows import Rows
from draftwood.train.shards import Text

AHEAD = 64  # draws of a text that are made at once
LOOK_EVERY = 16  # tokens between two checks for a loop
LOOP = 64  # tokens that must repeat themselves
PERIOD = 16  # longest period of a loop
FEW = 8  # rows of logits that are drawn from at once on a CPU: more would leave its caches between two passes
TOGETHER = 16  # prompts are read once one row of so many is free: a single one would read the weights for few tokens


@dataclass(slots=True, eq=False)
class Row:
    """A text being written."""

    job: Job
    tokens: list[int]
    prompt: int

    @classmethod
    def of(cls, job: Job) -> Row:
        return cls(job, list(job.tokens), len(job.tokens) - job.written)

    def unfinished(self) -> Job:
        """The job of writing the rest."""
        return replace(self.job, tokens=tuple(self.tokens), written=self.written)

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def temperature(self) -> float:
        return SELF_TEMPERATURE if self.job.writes_prompt else self.job.temperature


@dataclass(frozen=True, slots=True)
class Limits:
    """When a text ends."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int = 0


@dataclass(slots=True, eq=False)
class Writing:
    """Continuous batching: `texts` yields finished texts, and None for every step without one.

    `admit` is asked whether further jobs may begin.
    """

    rows: Rows
    size: int
    jobs: Iterator[Job]
    limits: Limits
    template: Template | None = None
    admit: Callable[[], bool] = lambda: True
    begun: deque[Job] = field(default_factory=deque)  # jobs that come before all others
    _active: dict[int, Row] = field(default_factory=dict)

    @property
    def under_way(self) -> int:
        """Tokens written so far in texts that are not finished."""
        return sum(len(row.tokens) - row.prompt for row in self._active.values() if not row.job.writes_prompt)

    def unfinished(self) -> list[Job]:
        """The jobs that an interrupted run goes on with."""
        return [row.unfinished() for row in self._active.values()] + list(self.begun)

    def texts(self) -> Iterator[Text | None]:
        """Finished texts, until the jobs end or `admit` lets none begin any more."""
        while True:
            yield from self._fill()
            if not self._active:
                return
            places = list(self._active)
            logits = self.rows.step(places, [self._active[place].tokens[-1] for place in places])
            drawn = draw(logits, list(self._active.values()), self.limits.seed)
            yield None  # the device is at work meanwhile
            for place, token in zip(places, drawn.values(), strict=True):
                yield from self._append(place, token)

    def _fill(self) -> Iterator[Text | None]:
        """Give jobs to free rows, once enough are free; texts that end with their first token make room again.

        None after every turn: were all turns of users empty, this would be the only one to be heard of.
        """
        while len(self._active) <= self.size - max(1, self.size // TOGETHER) and (begun := self._begin()):
            for places in by_length(begun, self.rows.chunk):
                rows = [self._active[place] for place in places]
                logits = self.rows.prefill(places, [row.tokens for row in rows])
                for place, token in zip(places, draw(logits, rows, self.limits.seed).values(), strict=True):
                    yield from self._append(place, token)
            yield None

    def _begin(self) -> dict[int, int]:
        """Jobs for all free rows, as far as there are any: the length of each prompt by its place."""
        begun, admitted = {}, self.admit()
        for place in range(self.size):
            if place not in self._active and (job := self._next(admitted)) is not None:
                self._active[place] = Row.of(job)
                begun[place] = len(job.tokens)
        return begun

    def _next(self, admitted: bool) -> Job | None:
        if self.begun:
            return self.begun.popleft()
        return next(self.jobs, None) if admitted else None

    def _append(self, place: int, token: int) -> Iterator[Text]:
        row = self._active[place]
        row.tokens.append(token)
        if row.job.writes_prompt:
            self._end_prompt(place, row)
            return
        looped = loop_end(row.tokens, row.prompt) if row.written % LOOK_EVERY == 0 else None
        if token in self.limits.stop_ids or row.written >= self.limits.max_new_tokens or looped is not None:
            self._leave(place)
            tokens, job = np.array(row.tokens[:looped], np.int64), row.job
            yield Text(tokens, row.prompt, job.temperature, job.source, job.number, job.thinking)

    def _end_prompt(self, place: int, row: Row) -> None:
        """Once the target has ended the user's turn, its answer is the same job's second part."""
        assert self.template is not None
        ended = row.tokens[-1] in {*self.limits.stop_ids, self.template.after[0]}
        if ended or row.written >= SELF_TOKENS:
            self._leave(place)
            turn = row.tokens[row.prompt : len(row.tokens) - ended]
            if turn:
                answer = self.template.answer_to(turn)
                self.begun.append(replace(row.job, tokens=answer, writes_prompt=False, written=0))

    def _leave(self, place: int) -> None:
        del self._active[place]
        self.rows.free(place)


@dataclass(frozen=True, slots=True)
class Turns:
    """Several `Writing` with the same jobs: while a device runs a step of one, the host works on another's."""

    each: list[Writing]

    @property
    def under_way(self) -> int:
        return sum(writing.under_way for writing in self.each)

    def unfinished(self) -> list[Job]:
        """The jobs that all of them go on with."""
        return [job for writing in self.each for job in writing.unfinished()]

    def texts(self) -> Iterator[Text | None]:
        """As `Writing.texts`, each in turn until its next step is under way."""
        waiting = deque(writing.texts() for writing in self.each)
        while waiting:
            texts = waiting.popleft()
            for text in texts:
                yield text
                if text is None:
                    waiting.append(texts)
                    break


def by_length(prompts: Mapping[int, int], chunk: int) -> Iterator[list[int]]:
    """Places of prompts that are read together: of similar length, and at most `chunk` tokens unless alone."""
    together: list[int] = []
    for place in sorted(prompts, key=prompts.__getitem__):
        if together and sum(prompts[other] for other in together) + prompts[place] > chunk:
            yield together
            together = []
        together.append(place)
    if together:
        yield together


def draw(logits: Tensor, rows: Sequence[Row], seed: int) -> Mail:
    """The next token of every row; a draw depends on seed, job and place alone, not on other rows."""
    mail = Mail(len(rows), logits.device)
    heat = [row.temperature for row in rows]
    under = [key(seed, row.job.number, len(row.tokens)) if row.temperature > 0 else 0 for row in rows]
    if compiled.takes(logits):
        mail.buffer.copy_(compiled.drawn_each(logits, heat, under))
    else:
        mail.buffer.copy_(top_k(logits, 1)[1][:, 0])
        hot = [i for i, temperature in enumerate(heat) if temperature > 0]
        if hot:
            _draw_hot(logits, mail.buffer, hot, [heat[i] for i in hot], [under[i] for i in hot])
    mail.send()
    return mail


def _draw_hot(logits: Tensor, tokens: Tensor, hot: Sequence[int], heat: Sequence[float], under: Sequence[int]) -> None:
    """The tokens of the rows at `hot`, at temperatures `heat` and under keys."""
    places, temperatures, own = (sent(values, logits.device) for values in (hot, heat, under))
    few = FEW if logits.device.type == "cpu" else len(logits)
    for some, heated, keyed in zip(places.split(few), temperatures.split(few), own.split(few), strict=True):
        tokens[some] = drawer(logits.device)(logits[some].float() / heated[:, None], keyed).to(tokens.dtype)


def key(seed: int, job: int, place: int) -> int:
    """The key that draws a job's token at this place."""
    return _keys(seed, job, place // AHEAD)[place % AHEAD]


@lru_cache(maxsize=4096)  # of all texts under way: a key by itself takes some microseconds
def _keys(seed: int, job: int, block: int) -> list[int]:
    return keys(hash_of(seed, job), block * AHEAD, AHEAD).tolist()


def hash_of(seed: int, job: int) -> int:
    """A seed of its own for each job."""
    return int(np.random.SeedSequence([seed, job]).generate_state(1, np.uint64)[0] >> 1)


def loop_end(tokens: Sequence[int], prompt: int) -> int | None:
    """Where a text that has begun to repeat itself is cut: after two periods. None if it does not repeat itself."""
    tail = tokens[max(prompt, len(tokens) - LOOP) :]
    if len(tail) < LOOP:
        return None
    for period in range(1, PERIOD + 1):
        if tail[-1 - period] == tail[-1] and tail[period:] == tail[:-period]:
            start = len(tokens) - LOOP
            while start > prompt and tokens[start - 1] == tokens[start - 1 + period]:
                start -= 1
            return start + 2 * period
    return None
