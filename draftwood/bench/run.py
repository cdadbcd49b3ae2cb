"""The bench command: from flags to tables, files and one JSON line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from rich.console import Console

from draftwood import probe
from draftwood.bench.environment import environment, peak_memory
from draftwood.bench.measure import Settings, Summary, check_room, label, measure, method_names
from draftwood.bench.options import BenchOptions, check_policies
from draftwood.bench.plots import save_plots
from draftwood.bench.prompts import Prompt, fingerprint, load_prompts
from draftwood.bench.records import check_writable, recording, write_summary
from draftwood.bench.report import print_tables, progress_bar
from draftwood.bench.stats import PLAIN
from draftwood.cores import ENOUGH, usable
from draftwood.latency import Machine, Work
from draftwood.llm import LLM, load
from draftwood.recording import Header
from draftwood.sampling import Sampling

BLIND = "blind"  # among `--against`: the same drafter without foresight
RECORD = "record"  # the policy whose rounds make a trace complete
DRAFT_CONTEXTS = (0, 4096)  # a draft's work is linear between them, or nearly so


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Measure, print the tables and, as the last line of stdout, the summary; returns that summary.

    Raises
    ------
    BadInput, BadModel, MissingExtra: something cannot be used; nothing has been measured or written by then.
    KeyboardInterrupt: after Ctrl-C, once everything that was finished is written and shown, marked as partial.
    """
    Sampling(temperature=options.temperature, seed=options.seed)  # refuses values that cannot be used
    check_policies(options.policies)
    check_writable(options.out)
    prompts = load_prompts(options.prompts, options.limit)
    llm = load(
        options.target,
        options.drafter,
        dtype=options.dtype,
        device=options.device,
        target_path=options.target_path,
        width_invariant=options.width_invariant,
        trust_remote_code=options.trust_remote_code,
    )
    check_room(llm, prompts, options.max_new_tokens)  # before files of an earlier run are opened
    summary = measured(llm, prompts, options, rivals(llm, options))
    facts = {**summary.to_json(), **circumstances(llm, prompts, options, summary)}
    write_summary(options.out, facts)
    show(summary, facts, options)
    print(json.dumps(facts, allow_nan=False), flush=True)
    if summary.partial:
        raise KeyboardInterrupt
    return facts


def rivals(llm: LLM, options: BenchOptions) -> dict[str, LLM]:
    """Every drafter's LLM by its label, all on one target; none if there is nothing to compare."""
    if not options.against:
        return {}
    first = "+".join(options.drafter) if options.drafter else llm.drafter.name if llm.drafter else "none"
    specs = list(dict.fromkeys([first, *options.against]))
    short = [label(spec) for spec in specs]
    labels = short if len(set(short)) == len(short) else specs
    others = [llm.blind() if spec == BLIND else llm.with_drafter(spec) for spec in specs[1:]]
    return dict(zip(labels, [llm, *others], strict=True))


def measured(llm: LLM, prompts: list[Prompt], options: BenchOptions, rivals: Mapping[str, LLM]) -> Summary:
    settings = Settings(options.max_new_tokens, options.temperature, options.seed)
    policies = [*options.policies, *([RECORD] if options.trace else [])]
    runs = sum(len(p.turns) for p in prompts) * len(method_names(policies, list(rivals)))
    header = trace_header(llm) if options.trace else None
    with recording(options.out, header, options.temperature) as finished, progress_bar(runs) as started:
        return measure(llm, prompts, policies, settings, rivals=rivals, started=started, finished=finished)


def trace_header(llm: LLM) -> Header:
    """What a simulator needs to price the same rounds elsewhere."""
    target, drafter, latency = llm.target, llm.drafter, llm.engine.latency
    works = {str(c): astuple(drafter.work(c)) for c in DRAFT_CONTEXTS} if drafter else {}
    facts = {
        "machine": asdict(latency.machine),
        "footprint": asdict(target.footprint),
        "draft_work": works,
        "dtype": str(target.dtype).removeprefix("torch."),
        "path": target.path.kind,
    }
    return Header(Path(target.name).name, Path(drafter.name).name if drafter else "none", facts)


def circumstances(llm: LLM, prompts: list[Prompt], options: BenchOptions, summary: Summary) -> dict[str, Any]:
    """Everything that is needed to read a figure."""
    contexts, plain = sorted(r.context for run in summary.runs for r in run.rounds) or [0], summary.policies.get(PLAIN)
    dtype = str(llm.target.dtype).removeprefix("torch.")
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    return {
        "ceiling": ceiling(llm, contexts[len(contexts) // 2], plain.tokens_per_s if plain else 0.0),
        "memory": peak_memory(),
        "settings": {
            **asked,
            "target": options.target or Path(llm.target.name).name,
            "target_path": llm.target.path.kind,
            "dtype": dtype,
        },
        "prompt_set": {"prompts": len(prompts), "sha256": fingerprint(prompts)},
        "environment": environment(),
    }


def ceiling(llm: LLM, context: int, reached: float) -> dict[str, float]:
    """Roofline of plain decoding at `context` tokens: what bandwidth and peak arithmetic allow.

    If plain decoding `reached` more tokens/s, the machine was busier when it was probed; then it is probed again.
    """
    target, machine = llm.target, llm.engine.latency.machine
    work = target.work(1, context)
    if reached > plain_roofline(work, machine):
        machine = probe.probe(target.device, target.dtype)
    return {
        "plain_tokens_per_s": plain_roofline(work, machine),
        "context": context,
        "bytes_per_token": work.bytes,
        "bandwidth_bytes_per_s": machine.bandwidth,
        "peak_flops_per_s": machine.peak,
    }


def plain_roofline(work: Work, machine: Machine) -> float:
    """Tokens/s of one-token forwards of that `work`."""
    return 1 / max(work.bytes / machine.bandwidth, work.flops / machine.peak)


def show(summary: Summary, facts: dict[str, Any], options: BenchOptions) -> None:
    """Tables on stdout unless only JSON was asked for; notes on stderr."""
    notes = Console(stderr=True)
    if summary.partial:
        turns = len({(r.prompt, r.turn) for r in summary.runs})
        notes.print(f"Interrupted: the figures cover the {turns} turns that were finished before.")
    if not summary.runs:
        return
    if not options.json:
        print_tables(Console(), summary.policies, summary.datasets, summary.what_if, facts["ceiling"], summary.against)
    if (taken := facts["environment"]["cores_of_others"] or 0.0) > ENOUGH:
        notes.print(f"Other programs took {taken:.1f} of {usable()} cores meanwhile, which slowed all methods down.")
    if options.out is not None:
        notes.print(save_plots(summary.policies, options.out), soft_wrap=True, markup=False)
