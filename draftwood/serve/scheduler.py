"""The worker: one thread runs the rounds of a batch, admits requests while there is room, and drops abandoned ones."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from draftwood import memory
from draftwood.batch import Step
from draftwood.drafters.base import state_bytes
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.prefix import PrefixCache
from draftwood.request import Request
from draftwood.rounds import Prefix
from draftwood.serve.failure import Refused
from draftwood.serve.metrics import Metrics
from draftwood.serve.options import Options
from draftwood.serve.rules import Shaping

LOG = logging.getLogger("draftwood.serve")
SAMPLE = 1024  # tokens over which a drafter's memory is averaged
LONGEST_RETRY_S = 60
FAILURES = 5  # failed rounds in a row after which the next ones are expected to fail, too
REMEMBER_S = 300.0  # after which what was learned is saved in the next idle moment, so that a kill loses little
PATIENT = 2  # times REMEMBER_S, after which it is saved even if requests have to wait
STALLED_S = 300.0  # no healthy round takes as long
GIVEN_UP = "abandoned"
MISTAKE = Refused(500, "The server made a mistake; its log says more.", "internal_error")


@dataclass(slots=True, eq=False)
class Job:
    """One text to be written. `tell` gets its steps, or why there will be none, on the worker's thread."""

    request: Request
    tell: Callable[[Step | Refused], None]
    until: float  # monotonic time at which it is given up
    rule: Shaping | None = None
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = math.nan
    first: float = math.nan  # when its first step came
    last: float = math.nan  # when its last step came
    cancelled: str | None = None  # why nobody wants more of it


class Scheduler:
    """Jobs wait in line, first come, first served, until a seat and memory for all of their tokens are free."""

    def __init__(self, engine: Engine, options: Options, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.max_len = min(options.max_model_len or engine.target.context_limit, engine.target.context_limit)
        self.seats, self.max_waiting = options.max_concurrency, options.max_waiting
        self.kv_tokens = options.kv_tokens or self._affordable()
        known = self.kv_tokens // 2 if options.prefix_tokens is None else options.prefix_tokens
        self.prefixes = PrefixCache(engine.drafter, min(known, self.kv_tokens))
        self.draining = False
        self._waiting: deque[Job] = deque()
        self._running: dict[Request, Job] = {}
        self._batch = engine.batch(self._keep)
        self._changed = threading.Condition()
        self._mean_s = 1.0  # that a job takes, on average
        self._stopped = False
        self._failures = 0  # failed rounds since one last wrote something
        self._remembered = time.monotonic()  # when what was learned was last saved
        self._turned = time.monotonic()  # when the worker was last between two rounds
        self._thread = threading.Thread(target=self._work, name="draftwood-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of these, or raise Refused."""
        needed = max(job.request.capacity for job in jobs)
        if needed > self.kv_tokens:
            message = f"The request needs memory for {needed} tokens, and there is memory for {self.kv_tokens}"
            raise Refused(400, f"{message} (--kv-tokens).", "needs_memory")
        if len(jobs) > (most := self.seats + self.max_waiting):
            raise Refused(
                400, f"{len(jobs)} texts were asked for; no more than {most} can run and wait here.", None, "n"
            )
        with self._changed:
            if self.draining:
                raise Refused(503, "The server is going down.", "shutting_down", retry_s=1)
            free = max(0, self.seats - len(self._running))
            if len(self._waiting) + len(jobs) > self.max_waiting + free:
                self.metrics.refused()
                raise Refused(429, "The queue is full; try again later.", "queue_full", retry_s=self._retry_s())
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def cancel(self, job: Job, reason: str = GIVEN_UP) -> None:
        """Drop a job before the next round."""
        with self._changed:
            job.cancelled = reason
            self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """Take nothing new, let jobs end for `seconds`, then give up what is left."""
        self.draining = True
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not (self._waiting or self._running), seconds)
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self.engine.remember()

    @property
    def load(self) -> tuple[int, int]:
        """How many jobs are being written, and how many wait."""
        return len(self._running), len(self._waiting)

    @property
    def reserved(self) -> int:
        """Tokens that running jobs may come to need."""
        return sum(request.capacity for request in list(self._running))

    @property
    def sick(self) -> str | None:
        """Why no further round will succeed; None while all is well."""
        if self._thread.ident and not self._thread.is_alive() and not self._stopped:
            return "The worker has died."
        if self._failures >= FAILURES:
            return f"The last {self._failures} rounds have failed."
        if self._running and time.monotonic() - self._turned > STALLED_S:
            return f"A round has not ended for {STALLED_S:.0f} seconds."
        return None

    def _retry_s(self) -> int:
        turns = 1 + len(self._waiting) / self.seats
        return min(LONGEST_RETRY_S, max(1, math.ceil(turns * self._mean_s)))

    def _affordable(self) -> int:
        """Tokens in half of the memory that is free, but no more than all seats could use."""
        target = self.engine.target
        each = target.kv_bytes_per_token() + state_bytes(self.engine.drafter, SAMPLE) // SAMPLE
        most = self.seats * (self.max_len + 1 + self.engine.policy.n_max)
        free = memory.free_bytes(target.device)
        return most if free is None else max(2, min(most, free // 2 // max(each, 1)))

    # --- the worker's thread -----------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            self._turns()
        finally:  # even if the thread dies, no client waits in vain
            self.draining = True
            with self._changed:
                waiting, self._waiting = self._waiting, deque()
            self._give_up(Refused(503, "The server is going down.", "shutting_down", retry_s=1), *waiting)

    def _turns(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._stopped)
                if self._stopped:
                    return
            self._turned = time.monotonic()
            try:
                if self._turn():
                    self._failures = 0
            except Exception:
                LOG.exception("a round failed; its requests are given up")
                self._failures += 1
                self._give_up(MISTAKE)
            if time.monotonic() - self._remembered > (PATIENT if self._running else 1) * REMEMBER_S:
                self.engine.remember()
                self._remembered = time.monotonic()

    def _turn(self) -> bool:
        """Run a round. Returns whether one was written or an answer ended: prompts are read even if all drafts fail."""
        self._drop()
        self._admit()
        if not self._batch.requests:
            return False
        steps = self._batch.round()
        now = time.monotonic()
        if (round := next((step.round for step in steps.values() if step.round), None)) is not None:
            self.metrics.turn(round)
        for request, step in steps.items():
            job = self._running[request]
            job.first = now if step.round is None else job.first
            self.metrics.step(job, step, now)
            job.last = now
            if request.finished:
                self._end(job)
            job.tell(step)
        return round is not None or any(request.finished for request in steps)

    def _drop(self) -> None:
        """Let go of jobs whose client has left or whose deadline has passed."""
        now = time.monotonic()
        with self._changed:
            gone = [job for job in (*self._running.values(), *self._waiting) if job.cancelled or job.until <= now]
            self._waiting = deque(job for job in self._waiting if job not in gone)
            self._changed.notify_all()
        for job in gone:
            if job.request in self._running:
                self._batch.leave(job.request)
                self._end(job, job.cancelled or GIVEN_UP)
            else:
                self.metrics.lost(GIVEN_UP)
            if not job.cancelled:
                job.tell(Refused(504, "The request's deadline passed.", "deadline_exceeded"))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.seats:
            job = self._waiting[0]
            if self.reserved + job.request.capacity > self.kv_tokens:
                return  # those after it wait, too: else a large request would wait forever
            with self._changed:
                self._waiting.popleft()
            self.prefixes.shrink(self.kv_tokens - self.reserved - job.request.capacity)
            try:
                self._begin(job)
            except BadInput as error:  # there is less memory than was thought
                if not self._running and not self.prefixes.tokens:
                    self._lose(job, Refused(503, str(error), "out_of_memory", retry_s=self._retry_s()))
                    continue
                with self._changed:
                    self._waiting.appendleft(job)
                if self._running:
                    return
                self.prefixes.shrink(0)  # what they hold beside their tokens is not counted
            except Exception:  # the job is in no list any more
                self._lose(job, MISTAKE)
                raise

    def _begin(self, job: Job) -> None:
        request = job.request
        afresh = False
        if self.seats == 1 and request.likelihoods is None:  # rounds may run on the device, which takes no prefix
            afresh = self.engine.backend(request.policy, job.rule).name == "device"
            self._batch = self.engine.batch_of_one(request.policy, job.rule, self._keep)
        elif self.seats == 1:  # the last request's rounds may have run on the device
            self._batch = self.engine.batch(self._keep)
        self._batch.join(request, None if afresh else self.prefixes.find(request))
        job.admitted = time.monotonic()
        self._running[request] = job
        self.metrics.admitted(job)

    def _keep(self, request: Request, prefix: Prefix) -> None:
        if request not in self._running:  # it was given up, perhaps in the middle of a round
            return
        self.prefixes.keep(request, prefix)
        self.prefixes.shrink(self.kv_tokens - self.reserved)

    def _end(self, job: Job, reason: str | None = None) -> None:
        now = time.monotonic()
        with self._changed:
            del self._running[job.request]
            self._changed.notify_all()
        self._mean_s += 0.1 * (now - job.admitted - self._mean_s)
        self.metrics.ended(job, reason or finish_reason(job), now)

    def _give_up(self, why: Refused, *waiting: Job) -> None:
        """Give up the running jobs, whichever is to blame, and `waiting`. Other waiting jobs took no part in it."""
        with self._changed:
            jobs = [*self._running.values(), *waiting]
            self._running = {}
            self._changed.notify_all()
        with suppress(Exception):  # frees the device, if it ran rounds
            self._batch.close()
        self._batch = self.engine.batch(self._keep)
        for job in jobs:
            self._lose(job, why)

    def _lose(self, job: Job, why: Refused) -> None:
        self.metrics.lost("error")
        job.tell(why)


def finish_reason(job: Job) -> str:
    ended = job.request.sampler.tokens[-1] in job.request.stop_ids
    return "stop" if ended and not (job.rule and job.rule.broken) else "length"
