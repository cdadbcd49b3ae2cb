"""The command: groups of measurements, one model after the other, until they are done or the budget is spent."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from draftwood.bench.environment import environment, installed, peak_memory
from draftwood.bench.gpu.answers import PLAIN, POLICIES, Answer, Writer
from draftwood.bench.gpu.options import GpuOptions
from draftwood.bench.gpu.parts import SLACK, Bench, memory_row
from draftwood.bench.gpu.rates import Rates, find_rates
from draftwood.bench.gpu.report import print_rows, save_plot
from draftwood.bench.gpu.shapes import Shape
from draftwood.bench.gpu.synthetic import check_room, random_drafter, random_target
from draftwood.bench.records import write_summary
from draftwood.bench.results import Results, Row
from draftwood.bench.stats import jsonable
from draftwood.errors import DraftwoodError
from draftwood.latency import Machine
from draftwood.loading import parse_device, parse_dtype
from draftwood.probe import probe

ANSWER_CONTEXT = 1024  # whole answers are written at the context that is nearest to this


@dataclass(frozen=True, slots=True)
class Group:
    """Measurements that are made and written together."""

    name: str
    rows: Callable[[], list[Row]]


def run_gpu_bench(options: GpuOptions) -> dict[str, Any]:
    """Measure what is missing, print tables and, as the last line of stdout, the summary; returns the summary.

    Raises
    ------
    BadInput: a flag that cannot be used, or a folder with results of other conditions.
    """
    start = time.perf_counter()
    shapes, rates = options.shapes(), [find_rates(spec) for spec in options.rates]
    device = parse_device(options.device)
    if device.index is not None:  # else it is the current one
        torch.cuda.set_device(device)  # graphs and events belong to its streams
    dtype = parse_dtype(options.dtype, device)
    results = Results(options.out, conditions(options, device, dtype))
    notes = Console(stderr=True)
    notes.print(f"Measuring what {device} reaches in {dtype} …")
    machine = probe(device, dtype)
    groups = all_groups(options, shapes, rates, machine, device, dtype)
    left, failed = run_groups(groups, results, options, start, notes)
    summary = jsonable({"rows": results.rows(), "left": left, **circumstances(options, machine, rates)})
    write_summary(options.out, summary)
    if not options.json:
        print_rows(Console(), summary["rows"])
    if options.out is not None:
        notes.print(save_plot(summary["rows"], options.out), soft_wrap=True, markup=False)
    print(json.dumps(summary, allow_nan=False), flush=True)
    if failed is not None:
        raise failed
    return dict(summary)


def conditions(options: GpuOptions, device: torch.device, dtype: torch.dtype) -> Row:
    """What must be the same in all groups of a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {package: installed(package) for package in ("draftwood", "torch", "transformers", "triton")}
    asked = {"widths": options.all_widths(), "new_tokens": options.new_tokens, "quick": options.quick}
    asked["width_invariant"] = options.width_invariant
    return {"device": name, "dtype": str(dtype), "versions": versions, **asked}


def circumstances(options: GpuOptions, machine: Machine, rates: Sequence[Rates]) -> Row:
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    return {
        "settings": asked,
        "machine": asdict(machine),
        "synthetic_acceptance": {r.name: r.source for r in rates},
        "memory": peak_memory(),
        "environment": environment(),
    }


def run_groups(
    groups: Iterator[Group], results: Results, options: GpuOptions, start: float, notes: Console
) -> tuple[list[str], Exception | None]:
    """Measure one group after the other; returns the names of those that are left, and the first error.

    A group that fails does not stop the others. It is not written, so the same command tries it again.
    """
    left: list[str] = []
    failed, spent, longest = None, False, 0.0
    for group in groups:
        if group.name in results.groups:
            continue
        begun = time.perf_counter()
        if spent or (options.budget_s is not None and begun - start + longest > options.budget_s):
            spent = True
            left.append(group.name)
            continue
        notes.print(f"{begun - start:6.0f} s  {group.name}", highlight=False, markup=False)
        try:
            results.add(group.name, jsonable(group.rows()))
        except Exception as error:
            notes.print_exception()
            failed = failed or error
            left.append(group.name)
        longest = max(longest, time.perf_counter() - begun)
    if left:
        notes.print(
            f"{len(left)} groups are left: {', '.join(left)}. The same command goes on with them.", markup=False
        )
    return left, failed


def all_groups(
    options: GpuOptions,
    shapes: Sequence[Shape],
    rates: Sequence[Rates],
    machine: Machine,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Group]:
    for one in shapes:
        models = Models(one, machine, device, dtype, options)
        for context in models.contexts:
            yield Group(f"{one.name}, {context} tokens", partial(models.parts, context))
        for context in sorted(models.contexts, key=lambda c: abs(c - ANSWER_CONTEXT))[:1]:
            for chances in rates:
                yield Group(f"{one.name}, {chances.name}", partial(models.answers, context, chances))
        models.free()
    if options.with_smollm2:
        from draftwood.bench.gpu.real import real_rows

        yield Group("SmolLM2-135M with its weights", partial(real_rows, options, machine))


class Models:
    """Target and drafter of one shape, made when the first group needs them."""

    def __init__(
        self, one: Shape, machine: Machine, device: torch.device, dtype: torch.dtype, options: GpuOptions
    ) -> None:
        self._shape, self._machine, self._device, self._dtype = one, machine, device, dtype
        self._options = options
        self._made: tuple[Any, Any] | None = None
        room = one.positions - SLACK
        self.contexts = [context for context in options.all_contexts() if context <= room]

    def parts(self, context: int) -> list[Row]:
        """Every part of a round at `context` tokens, and the memory."""

        def measure() -> list[Row]:
            bench = Bench(*self._get(), self._machine, self._options.all_widths())
            rows = [timing.to_json(self._shape.name) for timing in bench.measure(context, self._options.batches)]
            return [*rows, {"model": self._shape.name, **memory_row("parts", context, bench.memory())}]

        return self._if_it_fits(context + SLACK, measure)

    def answers(self, context: int, rates: Rates) -> list[Row]:
        """Whole answers of every policy to a prompt of `context` tokens."""
        tokens = self._options.new_tokens

        def measure() -> list[Row]:
            target, drafter = self._get()
            writer = Writer(target, drafter, self._machine, context, tokens)
            turns = list(writer.measure(rates, POLICIES, self._options.repeats))
            work = target.work(1, context)
            floor = max(work.bytes / self._machine.bandwidth, work.flops / self._machine.peak)
            rows = [*answer_rows(turns, rates, floor), memory_row("answers", context, writer.memory())]
            return [{"model": self._shape.name, "context": context, **row} for row in rows]

        return self._if_it_fits(context + tokens + SLACK, measure)

    def free(self) -> None:
        self._made = None
        release(self._device)

    def _get(self) -> tuple[Any, Any]:
        if self._made is None:
            target = random_target(self._shape, self._device, self._dtype, self._options.width_invariant)
            self._made = target, random_drafter(self._shape, target, self._options.new_tokens)
        return self._made

    def _if_it_fits(self, tokens: int, measure: Callable[[], list[Row]]) -> list[Row]:
        try:
            if self._made is None:
                check_room(self._shape, self._device, self._dtype, tokens)
            return measure()
        except (DraftwoodError, torch.OutOfMemoryError) as error:
            return [{"model": self._shape.name, "kind": "skipped", "reason": str(error)}]
        finally:
            release(self._device)  # graphs hold memory until they are collected


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def answer_rows(turns: Sequence[Sequence[Answer]], rates: Rates, floor_s: float) -> Iterator[Row]:
    """Medians of each policy; a speedup is the median of the turns' ratios."""
    by_policy: dict[str, list[Answer]] = {}
    for turn in turns:
        for answer in turn:
            by_policy.setdefault(answer.policy, []).append(answer)
    plain = by_policy[PLAIN]
    for policy, answers in by_policy.items():
        figures = [answer.to_json() for answer in answers]
        medians = {name: float(np.median([f[name] for f in figures])) for name in figures[0] if name != "policy"}
        ratios = [a.tokens_per_s / p.tokens_per_s for a, p in zip(answers, plain, strict=True)]
        same = [a.tokens == p.tokens for a, p in zip(answers, plain, strict=True)]
        yield {
            "kind": "answers",
            "synthetic": True,
            "rates": rates.name,
            "policy": policy,
            **medians,
            "speedup": float(np.median(ratios)),
            "identical": sum(same) / len(same),
            "plain_ceiling_tokens_per_s": 1 / floor_s,
        }
