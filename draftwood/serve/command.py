"""`draftwood serve`: the flags. Like the command line itself it imports nothing heavy before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwood.errors import MissingExtra
from draftwood.serve.options import Options


def add_to(app: typer.Typer) -> None:
    """Make the command known under its name."""
    app.command()(serve)


def serve(
    target: Annotated[str | None, typer.Option(help="Model that writes: a Hugging Face name or a folder.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Who guesses; may be repeated.")] = None,
    policy: Annotated[str | None, typer.Option(help="How much to verify: bastion, ddtree:32 …")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(help="What clients must show.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_concurrency: Annotated[int, typer.Option(help="Requests that are written at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests in the queue; the next one gets 429.")] = 256,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="KV memory in tokens; else half of what is free.")] = None,
    prefix_tokens: Annotated[
        int | None, typer.Option(help="Of these, for known prefixes; 0: keep none. Without it, half.")
    ] = None,
    default_max_tokens: Annotated[int, typer.Option(help="Answer length where a client names none.")] = 1024,
    deadline: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that requests have to end after SIGTERM.")] = 30.0,
    cors: Annotated[list[str] | None, typer.Option(help="Origin of web pages that may call; may be repeated.")] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    target_path: Annotated[str, typer.Option(help="auto, lean or universal.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the target's files.")
    ] = False,
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
    from draftwood.llm import load

    listening = bind(options)
    llm = load(
        target,
        drafter or None,
        policy,
        dtype=dtype,
        device=device,
        target_path=target_path,
        trust_remote_code=trust_remote_code,
    )
    run_server(llm, options, listening)
