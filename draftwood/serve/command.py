"""`draftwood serve`: the flags. Like the command line itself it imports nothing heavy before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwood.errors import MissingExtra
from draftwood.flags import (
    Device,
    Drafter,
    Dtype,
    KvTokens,
    MaxConcurrency,
    MaxModelLen,
    Policy,
    PrefixTokens,
    Target,
    TargetPath,
    TrustRemoteCode,
)
from draftwood.serve.options import Options
from draftwood.terminal import load


def add_to(app: typer.Typer) -> None:
    """Make the command known under its name."""
    app.command()(serve)


def serve(
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_concurrency: MaxConcurrency = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; the next one gets 429.")] = 256,
    max_model_len: MaxModelLen = None,
    kv_tokens: KvTokens = None,
    prefix_tokens: PrefixTokens = None,
    default_max_tokens: Annotated[
        int, typer.Option(help="Answer length of chats that set none; text completions get 16.")
    ] = 1024,
    deadline: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that requests get to finish after SIGTERM.")] = 30.0,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may call the server; may be repeated.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    target_path: TargetPath = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model with OpenAI's API: many requests at once, their trees in one forward."""
    options = Options(
        host=host,
        port=port,
        api_key=api_key,
        name=served_model_name,
        max_concurrency=max_concurrency,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        prefix_tokens=prefix_tokens,
        default_max_tokens=default_max_tokens,
        deadline_s=deadline,
        drain_s=drain,
        cors=tuple(cors or ()),
        log_prompts=log_prompts,
    )
    try:
        from draftwood.serve.run import bind
        from draftwood.serve.run import serve as run_server
    except ImportError as missing:
        raise MissingExtra(f"Serving needs the package {missing.name}; pip install 'draftwood[serve]'.") from None
    listening = bind(options)
    llm = load(
        target,
        drafter,
        policy,
        dtype=dtype,
        device=device,
        target_path=target_path,
        trust_remote_code=trust_remote_code,
    )
    run_server(llm, options, listening)
