"""The command line: flags in, one sentence for every mistake, nothing heavy imported before it is needed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from draftwood.config import config
from draftwood.errors import BadInput, DraftwoodError, LostProcess
from draftwood.flags import (
    Device,
    Drafter,
    Dtype,
    Json,
    MaxNewTokens,
    Policy,
    Seed,
    Target,
    TargetPath,
    Temperature,
    TrustRemoteCode,
    WidthInvariant,
)
from draftwood.many import command as many
from draftwood.serve import command as serving
from draftwood.train import commands

BAD_INPUT, INTERRUPTED = 2, 130
FIRST_SPEAKS_S = 30
TOGETHER = ("generate", "train")  # commands that several processes may run together

app = typer.Typer(
    help="Tree speculative decoding: a Hugging Face model writes faster, and exactly the same text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command line. Exit codes: 0, 2 for what the user can mend, 130 after Ctrl-C.

    Of several processes that torchrun started, the first one says what is wrong; that it ends makes torchrun end the
    others before they say the same.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given[:2] in (
        ["bench", "gpu"],
        ["bench", "grid"],
        ["bench", "serve"],
    ):  # commands of their own: their flags are others
        given[:2] = [f"bench-{given[1]}"]
    try:
        refuse_company(given)
        sys.exit(app(given, prog_name="draftwood", standalone_mode=False))
    except (DraftwoodError, typer.TyperException) as mistake:
        sentence = mistake.format_message() if isinstance(mistake, typer.TyperException) else str(mistake)
        if config().rank > 0 and not isinstance(mistake, LostProcess):
            time.sleep(FIRST_SPEAKS_S)
        print(f"draftwood: {' '.join(sentence.split())}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to answer; - reads it from stdin.")] = None,
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that hold this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without chat template.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    width_invariant: WidthInvariant = False,
    as_json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the last round's draft tree.")] = False,
) -> None:
    """Write an answer, streamed; with --json the text goes to a terminal's stderr instead."""
    text = read_prompt(prompt)
    from draftwood.sampling import Sampling

    # Refused here, a bad value does not cost a model's loading time.
    sampling = asdict(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed))
    from draftwood.cli_show import Screen, follow, play
    from draftwood.llm import load

    hide_progress_bars()
    llm = load(
        target,
        drafter or None,
        policy,
        dtype=dtype,
        device=device,
        target_path=target_path,
        width_invariant=width_invariant,
        trust_remote_code=trust_remote_code,
        tensor_parallel=config().processes > 1,
    )
    stream = llm.stream(text, max_new_tokens=max_new_tokens, stop=stop or (), system=system, raw=raw, **sampling)
    group = llm.target.group
    interrupted = play(stream, llm.tokenizer, Screen.of(as_json), show_tree) if group.leads else follow(stream)
    if not interrupted:
        group.close()
    if as_json and group.leads:
        print(json.dumps(stream.generation.to_json()), flush=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def chat(
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
) -> None:
    """Hold a conversation; a line is a turn, /help lists what else there is. Without a terminal, lines of stdin."""
    from draftwood.sampling import Sampling

    sampling = Sampling(temperature=temperature, seed=seed)
    from draftwood.chat import Chat, converse, prompt_lines
    from draftwood.cli_show import Screen
    from draftwood.llm import load

    hide_progress_bars()
    llm = load(target, drafter, policy, dtype=dtype, device=device, target_path=target_path)
    converse(Chat(llm, Screen.of(False), sampling, max_new_tokens, policy, system), prompt_lines())


@app.command()
def bench(
    more: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Further prompt sets.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="JSONL file or data set name, or several; none: our own.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Comma-separated, as in generate --policy.")
    ] = "dflash,ddtree:8,caddtree,bastion",
    max_new_tokens: MaxNewTokens = 128,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts of every set.")] = None,
    temperature: Temperature = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    width_invariant: WidthInvariant = False,
    target: Target = None,
    drafter: Drafter = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Another drafter that every policy runs with, such as ngram+recycling; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rounds.jsonl and summary.json.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Record what was drafted, too; needs --out.")] = False,
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


@app.command("bench-gpu")
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
        float | None, typer.Option(help="Seconds; what is left then is done by the same command later. Needs --out.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    width_invariant: WidthInvariant = False,
    out: Annotated[Path | None, typer.Option(help="Folder for groups.jsonl, summary.json and gpu.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the summary, no tables.")] = False,
) -> None:
    """Or "bench gpu": what a round takes of a device, part by part beside its roofline; no weights, no network."""
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


@app.command("bench-serve")
def bench_serve(
    concurrency: Annotated[str, typer.Option(help="Users at once, comma-separated.")] = "1,2,4,8,16,32",
    policies: Annotated[
        str, typer.Option(help="Comma-separated; plain decoding is always among them.")
    ] = "bastion,ddtree:8",
    prompts: Annotated[list[str] | None, typer.Option(help="JSONL file or data set name; none: our own.")] = None,
    turns: Annotated[int, typer.Option(help="Answers of each user.")] = 2,
    repeats: Annotated[int, typer.Option(help="Passes of each method.")] = 3,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for summary.json.")] = None,
    seed: Seed = 0,
) -> None:
    """Or "bench serve": many users at once, in all and for each of them, against plain batched decoding."""
    loads = parse_numbers("concurrency", concurrency)
    from rich.console import Console

    from draftwood.bench.crowd import CrowdOptions, run_crowd
    from draftwood.llm import load

    options = CrowdOptions(
        loads, names(policies), prompts or [], turns, max_new_tokens, repeats, temperature, seed, out
    )
    hide_progress_bars()
    llm = load(target, drafter or None, dtype=dtype, device=device, target_path=target_path)
    run_crowd(llm, options, Console(stderr=True))


@app.command("bench-grid")
def bench_grid(
    out: Annotated[Path, typer.Option(help="Folder; cells that it holds are not measured again.")],
    prompts: Annotated[list[str] | None, typer.Option(help="JSONL files or data sets: one row of cells each.")] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Further prompt sets.")] = None,
    limit: Annotated[int, typer.Option(help="Prompts of a cell.")] = 4,
    max_new_tokens: MaxNewTokens = 64,
    cells: Annotated[int | None, typer.Option(help="Measure only so many of the missing cells.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Every context in every cell, not in turn.")] = False,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    seed: Seed = 0,
) -> None:
    """Or "bench grid": is bastion never slower than plain decoding and fixed budgets? Good and bad drafters."""
    from functools import partial

    from rich.console import Console

    from draftwood.bench.grid import GridOptions, run_grid
    from draftwood.llm import load

    hide_progress_bars()
    options = GridOptions(out, [*(prompts or []), *(more or [])], limit, max_new_tokens, cells, full, seed)
    model = partial(load, target, drafter, dtype=dtype, device=device, target_path=target_path)
    run_grid(options, model, Console(stderr=True))


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="File that bench --trace wrote.")],
    policies: Annotated[
        str, typer.Option(help="Comma-separated, as in generate --policy.")
    ] = "dflash,ddtree:4,ddtree:8,ddtree:16,ddtree:32,ddtree:64,bastion",
    hardware: Annotated[
        str, typer.Option(help="this, a100, h100, h200, rtx4090, rtxpro6000 or a JSON file; or several.")
    ] = "this",
    target_config: Annotated[
        str | None, typer.Option(help="qwen3-4b, qwen3-8b, llama-3.1-8b or a config.json; none: as recorded.")
    ] = None,
    users: Annotated[str, typer.Option(help="Also many users at once, each number for itself: 1,8,32.")] = "",
    context: Annotated[int, typer.Option(min=0, help="Tokens of context of each user besides what was recorded.")] = 0,
    price: Annotated[float | None, typer.Option(help="Of the machine for an hour: what a million tokens cost.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for simulation.json and pareto.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the figures, no tables.")] = False,
) -> None:
    """Replay recorded drafts under other policies, on this machine or a modelled one."""
    numbers = parse_numbers("users", users)
    if min(numbers, default=1) < 1 or (price is not None and price <= 0):
        raise BadInput("--users and --price must be positive.")
    from draftwood.bench.capacity import Crowd
    from draftwood.bench.simulation import run_simulation

    crowd = Crowd(numbers, context, price)
    run_simulation(trace, names(policies), names(hardware), target_config, out, as_json, crowd)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="What bench --trace --out wrote.")]) -> None:
    """Draw the figures of a benchmark: PNGs, and one page that holds them all."""
    from draftwood.bench.page import run_report

    print(run_report(folder))


@app.command()
def calibrate(
    target: Target = None,
    drafter: Drafter = None,
    max_width: Annotated[int, typer.Option(min=2, help="Most tokens of one verification.")] = 256,
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated.")] = "0,512,1024,2048",
    out: Annotated[Path | None, typer.Option(help="File to write; else where caddtree finds it.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
) -> None:
    """Measure what verifying costs here, beforehand: the offline profile that caddtree decides with."""
    lengths = parse_contexts(contexts)
    from draftwood.cli_show import counting
    from draftwood.llm import load
    from draftwood.offline import calibrate_engine, offline_file

    hide_progress_bars()
    engine = load(target, drafter or None, dtype=dtype, device=device, target_path=target_path).engine
    with counting("measuring") as progress:
        profile = calibrate_engine(engine, max_width, lengths, progress)
    path = out or offline_file(engine.target, engine.drafter, engine.latency.machine)
    try:
        profile.save(path)
    except OSError as error:
        raise BadInput(f"--out {path} cannot be written ({error.strerror}); name another file.") from None
    print(path)


@app.command()
def doctor(target: Target = None, device: Device = "auto", as_json: Json = False) -> None:
    """Say what this machine can do, what is cached where, and what is missing for which feature."""
    from draftwood.doctor import examine, show

    report = examine(target, device)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        show(report)


@app.command()
def demo(
    max_new_tokens: MaxNewTokens = 64,
    limit: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 4,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
) -> None:
    """Watch plain decoding and draftwood answer side by side, then compare every policy in a table."""
    from draftwood.demo import run_demo
    from draftwood.llm import load

    hide_progress_bars()
    run_demo(load(target, drafter or None, dtype=dtype, device=device, target_path=target_path), limit, max_new_tokens)


serving.add_to(app)
many.add_to(app)
commands.add_to(app)


def refuse_company(args: Sequence[str]) -> None:
    """Raise BadInput where torchrun started several processes of a command that runs in one."""
    together, first = config().processes, next(iter(args), "draftwood")
    if together > 1 and first not in TOGETHER:
        raise BadInput(f"{first} runs in one process, but torchrun started {together}; together run: generate, train.")


def read_prompt(prompt: str | None) -> str:
    """The prompt that was given, or what stdin holds if it is `-` or piped."""
    if prompt in (None, "-") and config().processes > 1:
        raise BadInput("Under torchrun the processes share one stdin; write the prompt after 'generate'.")
    if prompt is None and sys.stdin.isatty():
        raise BadInput("No prompt was given; write it after 'generate', or give - and pipe it in.")
    try:
        text = sys.stdin.read() if prompt in (None, "-") else str(prompt)
        text.encode()
    except UnicodeError:
        raise BadInput("The prompt is not valid UTF-8 text; convert it first.") from None
    if not text.strip():
        raise BadInput("The prompt is empty; give some text to continue or to answer.")
    return text


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_contexts(text: str) -> list[int]:
    """`"1024,0"` -> `[0, 1024]`."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [-1]
    if lengths[0] < 0:
        raise BadInput(f"--contexts is {text!r}; expected whole numbers from 0 up, such as 0,1024.")
    return lengths


def parse_numbers(flag: str, text: str) -> list[int]:
    """`"1,16"` -> `[1, 16]`."""
    try:
        return [int(part) for part in names(text)]
    except ValueError:
        raise BadInput(f"--{flag} is {text!r}; expected whole numbers, such as 1,16.") from None


def hide_progress_bars() -> None:
    """Keep transformers' bars out of logs and pipes; in a terminal they tell why it takes long.

    Of several processes only the first shows them, and none lists the layers that are not divided.
    """
    from transformers.utils import logging

    here = config()
    if not sys.stderr.isatty() or here.rank > 0:
        logging.disable_progress_bar()
    if here.processes > 1:
        logging.set_verbosity_error()
