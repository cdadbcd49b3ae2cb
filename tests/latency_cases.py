"""A made-up machine, the work of forwards on it, and rounds that take given seconds: what latency models learn from."""

from __future__ import annotations

import numpy as np

from draftwood.latency import LatencyModel, Machine, Work
from draftwood.trace import Round

MACHINE = Machine("made up", peak=1e12, bandwidth=1e10, launch_s=1e-5)
# Measured on a processor: flat, a jump at 4 and a step at 8 tokens, then compute-bound.
TRUE_S = {1: 0.033, 2: 0.034, 4: 0.040, 8: 0.041, 16: 0.045, 32: 0.057, 64: 0.083, 128: 0.141}


def verify_work(n_tokens: int, context: int) -> Work:
    return Work(flops=2.7e8 * n_tokens, bytes=2.7e8 + 2e4 * context, launches=300)


def draft_work(context: int) -> Work:
    return Work(flops=4e8, bytes=2.4e7, launches=60)


def model() -> LatencyModel:
    return LatencyModel(MACHINE, verify_work, draft_work)


def a_round(n: int, verify_s: float, drafted: bool = True, context: int = 100, host_s: float = 4e-4) -> Round:
    seconds = {"choose": host_s, "verify": verify_s} | ({"draft": 0.007} if drafted else {})
    return Round(context, n, drafted, np.zeros(n, np.float32), np.ones(n, np.int64), [], seconds, {})


def trained(
    widths: list[int], rounds: int = 40, noise: float = 0.03, latency: LatencyModel | None = None
) -> LatencyModel:
    latency, rng = latency or model(), np.random.default_rng(0)
    for i in range(rounds):
        width = widths[i % len(widths)]
        latency.observe(a_round(width - 1, TRUE_S[width] * np.exp(noise * rng.normal())))
    return latency
