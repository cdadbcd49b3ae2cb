"""SmolLM2-135M with its own weights and the drafter that ships: the same parts, and answers as users get them."""

from __future__ import annotations

from draftwood.bench.gpu.options import GpuOptions
from draftwood.bench.gpu.parts import SLACK, Bench, memory_row
from draftwood.bench.measure import Settings, measure
from draftwood.bench.prompts import load_prompts
from draftwood.bench.results import Row
from draftwood.bench.stats import NAN
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.embedded import EMBEDDED_DRAFTER
from draftwood.latency import Machine
from draftwood.llm import LLM, load

NAME = "SmolLM2-135M, real"
POLICIES = ("dflash", "ddtree:15", "bastion")


def real_rows(options: GpuOptions, machine: Machine) -> list[Row]:
    """Nothing is synthetic: packaged prompts, the model's own texts, acceptance of its own drafter."""
    drafter = str(EMBEDDED_DRAFTER)
    llm = load(drafter=drafter, dtype=options.dtype, device=options.device, width_invariant=options.width_invariant)
    assert isinstance(llm.drafter, DFlashDrafter)
    bench = Bench(llm.target, llm.drafter, machine, options.all_widths())
    contexts = [c for c in options.all_contexts() if c <= llm.target.context_limit - SLACK]
    rows: list[Row] = []
    for context in contexts:
        rows += [timing.to_json(NAME) for timing in bench.measure(context, options.batches)]
        rows.append({"model": NAME, **memory_row("parts", context, bench.memory())})
    return [*rows, *answer_rows(options, llm)]


def answer_rows(options: GpuOptions, llm: LLM) -> list[Row]:
    prompts = load_prompts([], 4 if options.quick else 16)
    summary = measure(llm, prompts, POLICIES, Settings(options.new_tokens))
    rows = []
    for policy, stats in summary.policies.items():
        figures = {"tokens_per_s": stats.tokens_per_s, "tau": stats.tau, "width": stats.mean_width}
        rows.append(
            {
                "model": NAME,
                "kind": "answers",
                "synthetic": False,
                "rates": "its own",
                "policy": policy,
                **figures,
                "fair_tokens_per_s": None,
                "speedup": stats.speedup_vs_plain,
                "round_s": stats.round_ms / 1e3,
                "choose_s": stats.verb_ms.get("choose", NAN) / 1e3,
                "identical": None if stats.identical is None else stats.identical / stats.prompts,
            }
        )
    return rows
