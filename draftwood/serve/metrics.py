"""Prometheus metrics under vLLM's names, so that its dashboards and benchmark clients can read them, and our own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from draftwood.batch import Step
    from draftwood.serve.scheduler import Job
    from draftwood.trace import Round

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKENS = tuple(2**k for k in range(18))
ERRORS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)


class Metrics:
    """One server's counters; all of them carry the label model_name."""

    def __init__(self, model: str) -> None:
        self.registry, self._model = CollectorRegistry(), model
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._written = counter("vllm:generation_tokens", "Tokens that were written.")
        self._success = Counter(
            "vllm:request_success", "Requests by how they ended.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._refused = counter("draftwood:requests_refused", "Requests that found the queue full.")
        self._first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._between = histogram("vllm:inter_token_latency_seconds", "Between tokens; a round's share each.", SECONDS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to admission.", SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From admission to the first token.", SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first to the last token.", SECONDS)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answers = histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Rounds that verified a draft.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens that were verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Verified tokens that were accepted.")
        self._per_pos = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth.", ["model_name", "position"],
            registry=self.registry,
        )  # fmt: skip
        self._error = histogram("draftwood:latency_model_error", "|predicted / measured - 1| of rounds.", ERRORS)
        self._width = histogram("draftwood:round_tokens", "Tokens of a round's forward.", TOKENS)
        self._gauges = {
            "running": gauge("vllm:num_requests_running", "Requests being written."),
            "waiting": gauge("vllm:num_requests_waiting", "Requests in the queue."),
            "kv": gauge("vllm:kv_cache_usage_perc", "Share of the KV memory that is reserved or holds prefixes."),
        }
        self._queries = counter("vllm:prefix_cache_queries", "Tokens of prompts looked up among known prefixes.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens of prompts found among known prefixes.")

    # --- what the worker reports -------------------------------------------------------------------------
    def refused(self) -> None:
        self._refused.inc()

    def admitted(self, job: Job) -> None:
        request = job.request
        self._queue.observe(job.admitted - job.arrived)
        self._prompt.inc(request.prompt)
        self._prompts.observe(request.prompt)
        self._queries.inc(request.prompt)
        self._hits.inc(request.filled)

    def step(self, job: Job, step: Step, now: float) -> None:
        self._written.inc(len(step.tokens))
        if step.round is None:
            self._first.observe(now - job.arrived)
            self._prefill.observe(now - job.admitted)
            return
        for _ in step.tokens:
            self._between.observe((now - job.last) / len(step.tokens))
        round = step.round
        if round.n:
            self._drafts.inc()
            self._draft_tokens.inc(round.n)
            self._accepted.inc(round.accepted)
            for position in range(round.accepted):
                self._per_pos.labels(self._model, str(position)).inc()

    def turn(self, round: Round) -> None:
        """The width and the seconds of a forward, from the round of any request that took part in it."""
        self._width.observe(round.width)
        if round.predicted and round.total_s > 0:
            self._error.observe(abs(round.predicted_s / round.total_s - 1))

    def lost(self, reason: str) -> None:
        """A request whose text was not begun, or not finished."""
        self._success.labels(self._model, reason).inc()

    def ended(self, job: Job, reason: str, now: float) -> None:
        self._success.labels(self._model, reason).inc()
        self._whole.observe(now - job.arrived)
        self._answers.observe(len(job.request.sampler.tokens) - job.request.prompt)
        if job.first <= now:  # NaN if it was given up before
            self._decode.observe(now - job.first)

    # --- what Prometheus reads ---------------------------------------------------------------------------
    def text(self, running: int, waiting: int, kv_usage: float) -> bytes:
        """The exposition format."""
        for name, value in (("running", running), ("waiting", waiting), ("kv", kv_usage)):
            self._gauges[name].set(value)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=(*buckets, math.inf))
        return made.labels(self._model)


def together(texts: Mapping[str, str]) -> bytes:
    """The exposition format of several servers in one; the label `replica` has the keys of `texts`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry: Any = SimpleNamespace(collect=families.values)
    return generate_latest(registry)
