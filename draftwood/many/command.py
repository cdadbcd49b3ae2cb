"""`draftwood batch`: the flags. Like the command line itself it imports nothing heavy before it is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftwood.errors import MissingExtra
from draftwood.many.options import BatchOptions


def add_to(app: typer.Typer) -> None:
    """Make the command known under its name."""
    app.command()(batch)


def batch(
    source: Annotated[Path, typer.Option("--in", help="JSONL or Parquet: OpenAI's batch format, messages or prompts.")],
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl; a run that was stopped goes on.")],
    target: Annotated[str | None, typer.Option(help="Model that writes: a Hugging Face name or a folder.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Who guesses; may be repeated.")] = None,
    policy: Annotated[str | None, typer.Option(help="How much to verify: bastion, ddtree:32 …")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of lines that name no limit; none: 256 for prompts, the API's in batch format."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of lines that name none; none: 0 for prompts, the API's 1 in batch format.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Each line that names none has a seed made of this and its custom_id.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue prompts without chat template.")] = False,
    served_model_name: Annotated[str | None, typer.Option(help="What the lines call the model.")] = None,
    max_concurrency: Annotated[int, typer.Option(help="Requests that are written at once.")] = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="KV memory in tokens; else half of what is free.")] = None,
    prefix_tokens: Annotated[
        int | None, typer.Option(help="Of these, for known prefixes; 0: keep none. Without it, half.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    target_path: Annotated[str, typer.Option(help="auto, lean or universal.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the target's files.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Over the Ray cluster that RAY_ADDRESS names, or a local one.")
    ] = False,
    replicas: Annotated[int | None, typer.Option(help="With --ray: models; none: one for each GPU, or one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")] = False,
) -> None:
    """Answer a file of prompts, many at once; every line gets one result, however often the run is killed."""
    options = BatchOptions(
        source,
        out,
        target,
        drafter or None,
        policy,
        max_new_tokens,
        temperature,
        seed,
        raw,
        served_model_name,
        max_concurrency,
        max_model_len,
        kv_tokens,
        prefix_tokens,
        dtype,
        device,
        target_path,
        trust_remote_code,
        ray,
        replicas,
    )
    from draftwood.cli import hide_progress_bars

    try:
        from draftwood.many.run import run_batch, to_json
    except ImportError as missing:
        raise MissingExtra(f"Batches need the package {missing.name}; pip install 'draftwood[batch]'.") from None
    hide_progress_bars()
    tally = run_batch(options)
    if as_json:
        print(json.dumps(to_json(tally)), flush=True)
