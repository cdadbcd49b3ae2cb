"""`draftwood batch`: the flags. Like the command line itself it imports nothing heavy before it is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftwood.errors import MissingExtra
from draftwood.flags import (
    Device,
    Drafter,
    Dtype,
    Json,
    KvTokens,
    MaxConcurrency,
    MaxModelLen,
    Policy,
    PrefixTokens,
    Target,
    TargetPath,
    TrustRemoteCode,
)
from draftwood.many.options import BatchOptions


def add_to(app: typer.Typer) -> None:
    """Make the command known under its name."""
    app.command()(batch)


def batch(
    source: Annotated[
        Path, typer.Option("--in", exists=True, help="JSONL or Parquet: OpenAI's batch format, messages or prompts.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl; a run that was stopped goes on.")],
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Answer length of lines that set none; none: 256, or the API's in batch format."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of lines that set none; none: 0, or the API's 1 in batch format.")
    ] = None,
    seed: Annotated[int, typer.Option(help="A line that sets none gets a seed made of this and its custom_id.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue prompts without chat template.")] = False,
    served_model_name: Annotated[str | None, typer.Option(help="What the lines call the model.")] = None,
    max_concurrency: MaxConcurrency = 16,
    max_model_len: MaxModelLen = None,
    kv_tokens: KvTokens = None,
    prefix_tokens: PrefixTokens = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    trust_remote_code: TrustRemoteCode = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on the Ray cluster that RAY_ADDRESS names, or a local one.")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(help="With --ray: how many models; none: one for each GPU, or one.")
    ] = None,
    as_json: Json = False,
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
    from draftwood.terminal import hide_progress_bars

    try:
        from draftwood.many.run import run_batch, to_json
    except ImportError as missing:
        raise MissingExtra(f"Batches need the package {missing.name}; pip install 'draftwood[batch]'.") from None
    hide_progress_bars()
    tally = run_batch(options)
    if as_json:
        print(json.dumps(to_json(tally)), flush=True)
