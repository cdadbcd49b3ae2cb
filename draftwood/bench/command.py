"""`draftwood bench …`, `simulate` and `report`: the flags. Nothing heavy is imported before it is needed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftwood.errors import BadInput
from draftwood.flags import (
    Device,
    Drafter,
    Dtype,
    MaxNewTokens,
    More,
    Policies,
    Prompts,
    Seed,
    Target,
    TargetPath,
    Temperature,
    TrustRemoteCode,
    WidthInvariant,
    names,
)
from draftwood.terminal import hide_progress_bars, load

PARTS = ("gpu", "grid", "serve")  # as in "bench gpu": commands of their own, with other flags


def add_to(app: typer.Typer) -> None:
    """Make the commands known under their names."""
    app.command()(bench)
    for command in (bench_gpu, bench_serve, bench_grid):
        app.command(command.__name__.replace("_", "-"))(command)
    app.command()(simulate)
    app.command()(report)


def bench(
    more: More = None,
    prompts: Prompts = None,
    policies: Policies = "dflash,ddtree:8,caddtree,bastion",
    max_new_tokens: MaxNewTokens = 128,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts of every set.")] = None,
    temperature: Temperature = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    width_invariant: WidthInvariant = False,
    trust_remote_code: TrustRemoteCode = False,
    target: Target = None,
    drafter: Drafter = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Another drafter that every policy runs with, such as ngram+recycling, or blind: the same without "
            "foresight; may be repeated."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rounds.jsonl and summary.json.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also record what was drafted; needs --out.")] = False,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the summary, no tables.")] = False,
) -> None:
    """Measure policies against plain decoding and transformers.generate, interleaved prompt by prompt."""
    from draftwood.bench.options import BenchOptions

    options = BenchOptions(
        prompts=[*(prompts or []), *(more or [])],
        policies=names(policies),
        max_new_tokens=max_new_tokens,
        limit=limit,
        temperature=temperature,
        dtype=dtype,
        device=device,
        target_path=target_path,
        width_invariant=width_invariant,
        trust_remote_code=trust_remote_code,
        target=target,
        drafter=drafter or None,
        against=against or [],
        out=out,
        seed=seed,
        json=as_json,
        trace=trace,
    )
    from draftwood.bench.run import run_bench

    hide_progress_bars()
    run_bench(options)


def bench_gpu(
    models: Annotated[str, typer.Option(help="Shapes, comma-separated, such as Qwen3-8B; none: all.")] = "",
    widths: Annotated[str, typer.Option(help="Tokens of a verification, comma-separated.")] = "",
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated.")] = "",
    rates: Annotated[
        str, typer.Option(help="Synthetic acceptance, comma-separated: gsm8k, tau9.56, or a file of bench --trace.")
    ] = "gsm8k,tau9.56",
    new_tokens: Annotated[int, typer.Option(help="Tokens of a whole answer.")] = 256,
    quick: Annotated[bool, typer.Option("--quick", help="Two models, one context, few repeats.")] = False,
    with_smollm2: Annotated[
        bool, typer.Option("--with-smollm2", help="Also SmolLM2-135M with its real weights and drafter.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="Seconds; the same command does the rest later. Needs --out.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    width_invariant: WidthInvariant = False,
    out: Annotated[Path | None, typer.Option(help="Folder for groups.jsonl, summary.json and gpu.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the summary, no tables.")] = False,
) -> None:
    """Or "bench gpu": how long each part of a round takes on a device, beside its roofline; no weights, no network."""
    numbers = [parse_numbers(name, text) for name, text in (("widths", widths), ("contexts", contexts))]
    from draftwood.bench.gpu.options import GpuOptions

    options = GpuOptions(
        models=names(models),
        widths=numbers[0],
        contexts=numbers[1],
        rates=names(rates),
        new_tokens=new_tokens,
        quick=quick,
        with_smollm2=with_smollm2,
        budget_s=budget,
        device=device,
        dtype=dtype,
        width_invariant=width_invariant,
        out=out,
        json=as_json,
    )
    from draftwood.bench.gpu.run import run_gpu_bench

    hide_progress_bars()
    run_gpu_bench(options)


def bench_serve(
    concurrency: Annotated[str, typer.Option(help="Users at once, comma-separated.")] = "1,2,4,8,16,32",
    policies: Policies = "bastion,ddtree:8",
    prompts: Prompts = None,
    turns: Annotated[int, typer.Option(help="Answers of each user, at least; at least 32 of all users.")] = 2,
    repeats: Annotated[int, typer.Option(help="Passes of each method.")] = 3,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for summary.json.")] = None,
    seed: Seed = 0,
) -> None:
    """Or "bench serve": speed with many users, together and for each of them, against plain batched decoding."""
    loads = parse_numbers("concurrency", concurrency)
    from rich.console import Console

    from draftwood.bench.crowd import CrowdOptions, run_crowd

    options = CrowdOptions(
        loads, names(policies), prompts or [], turns, max_new_tokens, repeats, temperature, seed, out
    )
    llm = load(
        target, drafter, dtype=dtype, device=device, target_path=target_path, trust_remote_code=trust_remote_code
    )
    run_crowd(llm, options, Console(stderr=True))


def bench_grid(
    out: Annotated[
        Path, typer.Option(help="Folder; its cells are measured again only if undecided, with a higher --most.")
    ],
    prompts: Prompts = None,
    more: More = None,
    limit: Annotated[int, typer.Option(help="Prompts of a cell.")] = 8,
    most: Annotated[int | None, typer.Option(help="Most prompts of a cell that fewer leave undecided.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    cells: Annotated[int | None, typer.Option(help="Measure only so many cells, missing or undecided.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Every context in every cell, not in turn.")] = False,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    trust_remote_code: TrustRemoteCode = False,
    seed: Seed = 0,
) -> None:
    """Or "bench grid": is bastion never slower than plain decoding and fixed budgets? A row of cells for each set."""
    from rich.console import Console

    from draftwood.bench.grid import GridOptions, run_grid

    options = GridOptions(out, [*(prompts or []), *(more or [])], limit, max_new_tokens, cells, full, seed, most)
    model = partial(
        load, target, drafter, dtype=dtype, device=device, target_path=target_path, trust_remote_code=trust_remote_code
    )
    run_grid(options, model, Console(stderr=True))


def simulate(
    trace: Annotated[Path, typer.Option(help="File that bench --trace wrote.")],
    policies: Policies = "dflash,ddtree:4,ddtree:8,ddtree:16,ddtree:32,ddtree:64,bastion",
    hardware: Annotated[
        str, typer.Option(help="this, a100, h100, h200, rtx4090, rtxpro6000 or a JSON file; or several.")
    ] = "this",
    target_config: Annotated[
        str | None, typer.Option(help="qwen3-4b, qwen3-8b, llama-3.1-8b or a config.json; none: as recorded.")
    ] = None,
    users: Annotated[
        str, typer.Option(help="Also simulate this many users at once, comma-separated, such as 1,8,32.")
    ] = "",
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of context that each user has besides the recorded ones.")
    ] = 0,
    price: Annotated[
        float | None, typer.Option(help="Price of the machine for an hour, to tell what a million tokens cost.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for simulation.json and pareto.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the figures, no tables.")] = False,
) -> None:
    """Replay recorded drafts under other policies, on this machine or a modelled one."""
    numbers = parse_numbers("users", users)
    if min(numbers, default=1) < 1 or (price is not None and price <= 0):
        raise BadInput("--users and --price must be positive.")
    if not numbers and (context or price is not None):
        raise BadInput("--context and --price belong to many users; give --users, too, such as --users 1,8.")
    from draftwood.bench.loads import Crowd
    from draftwood.bench.simulation import run_simulation

    crowd = Crowd(numbers, context, price)
    run_simulation(trace, names(policies), names(hardware), target_config, out, as_json, crowd)


def report(folder: Annotated[Path, typer.Argument(help="What bench --trace --out wrote.")]) -> None:
    """Draw the figures of a benchmark: PNGs, and one page with all of them."""
    from draftwood.bench.page import run_report

    print(run_report(folder))


def parse_numbers(flag: str, text: str) -> list[int]:
    """`"1,16"` -> `[1, 16]`."""
    try:
        return [int(part) for part in names(text)]
    except ValueError:
        raise BadInput(f"--{flag} is {text!r}; expected whole numbers, such as 1,16.") from None
