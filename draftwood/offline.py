"""CaDDTree's profile measured on a real target: how long one verification takes, by width and context."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from draftwood.cache import KVCache
from draftwood.config import config
from draftwood.drafters.base import Drafter, Request
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import Machine
from draftwood.offline_profile import WIDTHS, Measure, Profile, measure_profile
from draftwood.probe import wait
from draftwood.rounds import PREFILL_CHUNK
from draftwood.store import cached_file
from draftwood.target import Target
from draftwood.tree import Tree

DRAFTS = 5  # timed drafts; the first one before them warms up
CANDIDATES = 32  # of each depth, as a tree policy asks for
Progress = Callable[[int, int], None]


def offline_file(target: Target, drafter: Drafter | None, machine: Machine) -> Path:
    """Where the profile of this machine, target, path, dtype and drafter is kept and looked for."""
    name = drafter.name if drafter else "none"
    return cached_file(
        config().profiles, "offline", f"{target.name}|{target.path.name}|{name}|{target.dtype}|{machine.name}"
    )


def calibrate_engine(engine: Engine, max_width: int, contexts: Sequence[int], progress: Progress) -> Profile:
    """Time verifications of up to `max_width` tokens behind each of `contexts`, and one draft.

    Raises BadInput if a context leaves no room for that width.
    """
    target = engine.target
    if max(contexts) + max_width > target.context_limit:
        raise BadInput(
            f"A context of {max(contexts)} and a width of {max_width} exceed the context window of "
            f"{target.name} ({target.context_limit}); lower --contexts or --max-width."
        )
    widths = [*(width for width in WIDTHS if width < max_width), max_width]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return measure_profile(
        verification_clock(target, max_width),
        draft_seconds(target, engine.drafter),
        engine.latency.machine.name,
        versions,
        widths,
        contexts,
        progress=progress,
    )


def verification_clock(target: Target, max_width: int) -> Measure:
    """(width, context) -> seconds of one verification; the cache is refilled when the context changes."""
    caches: dict[int, KVCache] = {}

    def measure(width: int, context: int) -> float:
        if context not in caches:
            caches.clear()
            caches[context] = filled_cache(target, context, max_width)
        cache, tree = caches[context], binary_tree(width)
        start = now(target)
        target.verify(target.plan([tree], cache), cache)
        return now(target) - start

    return measure


def filled_cache(target: Target, context: int, room: int) -> KVCache:
    """A cache that holds `context` tokens; which tokens makes no difference to the time."""
    cache = target.new_cache(context + room)
    for start in range(0, context, PREFILL_CHUNK):
        target.prefill([0] * min(PREFILL_CHUNK, context - start), cache)
    return cache


def binary_tree(width: int) -> Tree:
    """A tree of `width` tokens, the root included. It is not a chain, since chains are cheaper to mask."""
    index = np.arange(width)
    depths = np.floor(np.log2(index + 1)).astype(np.int64)
    return Tree(np.zeros(width, np.int64), (index + 1) // 2 - 1, depths, 0.5 ** depths.astype(np.float32))


def draft_seconds(target: Target, drafter: Drafter | None) -> float:
    """Median seconds of one draft behind a short context; 0 without a drafter."""
    if drafter is None:
        return 0.0
    prompt = [0] * min(PREFILL_CHUNK, target.context_limit)
    state = drafter.open(len(prompt))
    drafter.extend(state, prompt, target.prefill(prompt, target.new_cache(len(prompt))).taps)
    seconds = []
    for _ in range(1 + DRAFTS):
        start = now(target)
        drafter.draft([Request(state, 0, CANDIDATES)])
        seconds.append(now(target) - start)
    return median(seconds[1:])


def now(target: Target) -> float:
    """Seconds, once the device has done what it was given."""
    wait(target.device)
    return time.perf_counter()
