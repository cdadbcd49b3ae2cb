"""The command line: flags in, one sentence for every mistake, nothing heavy imported before it is needed."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from draftwood import __version__
from draftwood.bench import command as measuring
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
from draftwood.terminal import load
from draftwood.train import commands

BAD_INPUT, INTERRUPTED, NOBODY_READS = 2, 130, 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # a disk that takes no more
FIRST_SPEAKS_S = 30
LASTING = 50_000  # new objects between two garbage collections: imports make a million that stay
TOGETHER = ("generate", "train")  # commands that several processes may run together

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command line. Exit codes: 0, 2 for what the user can mend, 130 after Ctrl-C.

    Of several processes that torchrun started, the first one says what is wrong. When it exits, torchrun ends the
    others before they say the same.
    """
    gc.set_threshold(LASTING)
    atexit.register(gc.freeze)  # or a last collection would go through all objects for more than a second
    given = list(sys.argv[1:] if args is None else args)
    if len(given) > 1 and given[0] == "bench" and given[1] in measuring.PARTS:
        given[:2] = [f"bench-{given[1]}"]
    try:
        refuse_company(given)
        code = app(given, prog_name="draftwood", standalone_mode=False)
        print(end="", flush=True)  # works where stdout is closed, too
        if config().processes > 1:
            # While an interpreter ends, gloo's threads abort it now and then, and torchrun calls the run failed.
            sys.stderr.flush()
            os._exit(code or 0)
        sys.exit(code)
    except (DraftwoodError, typer.TyperException) as mistake:
        sentence = mistake.format_message() if isinstance(mistake, typer.TyperException) else str(mistake)
        if config().rank > 0 and not isinstance(mistake, LostProcess):
            time.sleep(FIRST_SPEAKS_S)
        if sentence:  # a bare `draftwood` has shown its help instead
            print(f"draftwood: {' '.join(sentence.split())}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.EPIPE, *FULL):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the buffered rest would fail again at exit
        if error.errno == errno.EPIPE:
            sys.exit(NOBODY_READS)
        print(f"draftwood: Nothing more can be written ({error.strerror}); make room, and try again.", file=sys.stderr)
        sys.exit(BAD_INPUT)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"draftwood {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Tree speculative decoding: a Hugging Face model writes faster, and exactly the same text."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to answer; - reads it from stdin.")] = None,
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this probability.")] = 1.0,
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
    """Write an answer and stream it; with --json the text goes to stderr, and only if that is a terminal."""
    text = read_prompt(prompt)
    from draftwood.sampling import Sampling

    # A bad value is refused before a model is loaded, which takes long.
    sampling = asdict(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed))
    from draftwood.cli_show import Screen, follow, play

    llm = load(
        target,
        drafter,
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
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Hold a conversation: each line is a turn, /help lists the commands. Without a terminal, lines come from stdin."""
    from draftwood.sampling import Sampling

    sampling = Sampling(temperature=temperature, seed=seed)
    from draftwood.chat import Chat, converse, prompt_lines
    from draftwood.cli_show import Screen

    llm = load(
        target,
        drafter,
        policy,
        dtype=dtype,
        device=device,
        target_path=target_path,
        trust_remote_code=trust_remote_code,
    )
    converse(Chat(llm, Screen.of(False), sampling, max_new_tokens, policy, system), prompt_lines())


@app.command()
def calibrate(
    target: Target = None,
    drafter: Drafter = None,
    max_width: Annotated[int, typer.Option(min=2, help="Most tokens of one verification.")] = 256,
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated.")] = "0,512,1024,2048",
    out: Annotated[Path | None, typer.Option(help="File to write; without it, where caddtree looks for it.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure in advance what verifying costs on this machine: the offline profile that caddtree decides with."""
    lengths = parse_contexts(contexts)
    from draftwood.cli_show import counting
    from draftwood.offline import calibrate_engine, offline_file

    llm = load(
        target, drafter, dtype=dtype, device=device, target_path=target_path, trust_remote_code=trust_remote_code
    )
    engine = llm.engine
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
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Watch plain decoding and draftwood answer side by side, then a table of policies."""
    from draftwood.demo import run_demo

    llm = load(
        target, drafter, dtype=dtype, device=device, target_path=target_path, trust_remote_code=trust_remote_code
    )
    run_demo(llm, limit, max_new_tokens)


measuring.add_to(app)
serving.add_to(app)
many.add_to(app)
commands.add_to(app)


def refuse_company(args: Sequence[str]) -> None:
    """Raise BadInput where torchrun started several processes of a command that runs in one."""
    together, first = config().processes, next(iter(args), "draftwood")
    if together > 1 and first not in TOGETHER:
        raise BadInput(
            f"{first} runs in one process, but torchrun started {together}; generate and train can run together."
        )


def read_prompt(prompt: str | None) -> str:
    """The prompt that was given, or what stdin holds if it is `-` or piped."""
    if prompt in (None, "-") and config().processes > 1:
        raise BadInput("Under torchrun the processes share one stdin; write the prompt after 'generate'.")
    if prompt in (None, "-") and (sys.stdin is None or (prompt is None and sys.stdin.isatty())):
        raise BadInput("No prompt was given; write it after 'generate', or give - and pipe it in.")
    try:
        text = sys.stdin.read() if prompt in (None, "-") else str(prompt)
        text.encode()
    except UnicodeError:
        raise BadInput("The prompt is not valid UTF-8 text; convert it first.") from None
    if not text.strip():
        raise BadInput("The prompt is empty; give some text to continue or to answer.")
    return text


def parse_contexts(text: str) -> list[int]:
    """`"1024,0"` -> `[0, 1024]`."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [-1]
    if lengths[0] < 0:
        raise BadInput(f"--contexts is {text!r}; expected whole numbers from 0 up, such as 0,1024.")
    return lengths
