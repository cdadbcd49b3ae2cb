"""The parts of a round, one by one: each is a captured graph of its own, and all parts at a context are timed in turn.

Without CUDA the same code runs without graphs, and the clock is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from draftwood.bench.baseline import TokenClock
from draftwood.device.graphs import Graphs, Span, Stage
from draftwood.device.rounds import Device, stages_of
from draftwood.device.stages import Stages
from draftwood.device.state import State
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.latency import Machine, Work
from draftwood.policies.bastion import Bastion
from draftwood.probe import wait
from draftwood.rounds import PREFILL_CHUNK
from draftwood.target import Target

SLACK = 1024  # tokens after the context: what the timed rounds may commit, and the tree
BATCH_S, MOST_RUNS = 0.02, 50  # a batch of runs takes about so long, and has at most so many runs
EAGER_TOKENS = 16
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Part:
    """Something to time, and the least time that the machine's bandwidth and arithmetic allow for it."""

    name: str
    width: int  # tokens of the forward; 0: it has none
    seconds: Callable[[], float]  # of one run
    floor_s: float = NAN


@dataclass(frozen=True, slots=True)
class Timing:
    """One part at one context."""

    part: str
    width: int
    context: int
    seconds: list[float]  # of one run, for each batch
    floor_s: float

    def to_json(self, model: str) -> dict[str, object]:
        """Median and range over the batches."""
        where = {"model": model, "kind": "part", "context": self.context, "part": self.part, "width": self.width}
        least, most = min(self.seconds), max(self.seconds)
        return {**where, "seconds": median(self.seconds), "least_s": least, "most_s": most, "floor_s": self.floor_s}


class Bench:
    """A target and its drafter on static buffers, at contexts of random content."""

    def __init__(self, target: Target, drafter: DFlashDrafter, machine: Machine, widths: Sequence[int]) -> None:
        self.target, self.drafter, self.machine = target, drafter, machine
        target.tap(drafter.tap_layers)
        self._device = Device(target, drafter)
        self._policy = Bastion(n_max=max(2, max(widths)) - 1)
        self.widths = tuple(widths)

    def measure(self, context: int, batches: int) -> Iterator[Timing]:
        """Every part at `context` tokens, `batches` times in turn."""
        state, stages = self._device.open(self._policy, context + SLACK, *stages_of(self._policy))
        try:
            fill(state, stages, context, self.drafter.config.tap_width)
            parts = list(self._parts(state, stages, context))
            times: list[list[float]] = [[] for _ in parts]
            for batch in range(batches):
                for i in range(len(parts)):  # another one first in each batch
                    index = (i + batch) % len(parts)
                    times[index].append(parts[index].seconds())
        finally:
            self._device.close()
        for part, seconds in zip(parts, times, strict=True):
            yield Timing(part.name, part.width, context, seconds, part.floor_s)

    def memory(self) -> dict[str, int]:
        """Bytes by what holds them: weights, and the buffers and graphs of the context that was measured last."""
        config = self.drafter.config
        drafter = (config.block_parameters() + config.context_parameters()) * self.target.dtype.itemsize
        return {"target": self.target.weight_bytes, "drafter": drafter, **self._device.nbytes()}

    def _parts(self, state: State, stages: Stages, context: int) -> Iterator[Part]:
        yield Part("transformers", 1, partial(eager_seconds, self.target, context), self._floor(1, context))
        timer = Timer(self._device.graphs, state, stages)
        for width in self.widths:
            found = stages.forward(width)
            walked = stages.accept(width, found.logits)
            floors = (
                self._floor(width, context),
                found.logits.nbytes / self.machine.bandwidth,
                self._commit_floor(),
            )
            verbs: tuple[Stage, ...] = (
                partial(stages.forward, width),
                partial(stages.accept, width, found.logits),
                partial(repeatable, state, partial(stages.commit, walked, found.taps)),
            )
            for name, stage, floor in zip(("verify", "accept", "commit"), verbs, floors, strict=True):
                yield timer.part(name, width, stage, floor)
            whole = partial(repeatable, state, partial(stages.verify, width))
            yield timer.part("verify, accept, commit", width, whole, sum(floors))
        draft, owed, block = stages.propose(), self._catch_up_floor(), self.seconds(self.drafter.work(context))
        yield timer.part("catch up", 0, stages.catch_up, owed)
        yield timer.part("draft", 0, stages.propose, block)
        yield timer.part("grow", 0, partial(stages.grow, draft), NAN)
        yield timer.part("catch up, draft, grow", 0, stages.draft, owed + block)

    def _floor(self, width: int, context: int) -> float:
        return self.seconds(self.target.work(width, context))

    def _commit_floor(self) -> float:
        """Reading and writing the path's slots once."""
        moved = 2 * self.drafter.max_depth * self.target.kv_bytes_per_token()
        return moved / self.machine.bandwidth

    def _catch_up_floor(self) -> float:
        """Reading the weights for context features once."""
        return self.drafter.config.context_parameters() * self.target.dtype.itemsize / self.machine.bandwidth

    def seconds(self, work: Work) -> float:
        """The roofline, without launches."""
        return max(work.flops / self.machine.peak, work.bytes / self.machine.bandwidth)


@dataclass(frozen=True, slots=True, eq=False)
class Timer:
    """Times stages as graphs, each from the same state of the request."""

    graphs: Graphs
    state: State
    stages: Stages

    def part(self, name: str, width: int, stage: Stage, floor_s: float) -> Part:
        key = ("bench", name, width, self.state.capacity, int(self.state.length))
        changing = self.stages.changing
        before = [tensor.clone() for tensor in changing]
        self.graphs.prepare(key, stage, changing)
        device = self.state.kv.device

        def batch(runs: int) -> float:
            for tensor, old in zip(changing, before, strict=True):
                tensor.copy_(old)
            self.state.n.fill_(max(0, width - 1))
            span = Span(device)
            for _ in range(runs):
                self.graphs.run(key, stage)
            span.end()
            wait(device)
            return span.seconds / runs

        batch(1)  # pages in
        runs = min(MOST_RUNS, max(1, round(BATCH_S / max(batch(1), 1e-6))))
        return Part(name, width, partial(batch, runs), floor_s)


def repeatable(state: State, commit: Stage) -> None:
    """Commit, and count the tokens as read by the drafter: there is no room to owe it those of all repeats."""
    commit()
    state.drafted.copy_(state.length)


@torch.inference_mode()
def fill(state: State, stages: Stages, context: int, tap_width: int) -> None:
    """Random keys and values for `context` tokens, a root, and a tree after it."""
    state.kv.normal_()
    drafter = stages.drafter
    assert drafter is not None
    taps = torch.randn(PREFILL_CHUNK, tap_width, device=state.kv.device, dtype=state.kv.dtype)
    for at in range(0, context, PREFILL_CHUNK):
        drafter.extend(taps[: context - at], torch.tensor(at, device=state.kv.device))
    for length in (state.length, state.drafted):
        length.fill_(context)
    state.root.fill_(1)
    state.end.fill_(context + SLACK)
    stages.draft()


def eager_seconds(target: Target, context: int) -> float:
    """Seconds of a token that `model.generate` writes, the first one not counted."""
    ids = torch.full((1, context), 1, device=target.device)
    clock = TokenClock()
    with target.plain_transformers() as model:
        generate: Any = model.generate
        generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=EAGER_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0, streamer=clock,
        )  # fmt: skip
    return (clock.ended - clock.times[1]) / (EAGER_TOKENS - 1)


def memory_row(of: str, context: int, sizes: Mapping[str, int]) -> dict[str, object]:
    """Bytes that `parts` or whole `answers` took at `context` tokens."""
    return {"kind": "memory", "of": of, "context": context, **sizes}
