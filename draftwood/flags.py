"""Flags that several commands have, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[str | None, typer.Option(help="Model that writes: a Hugging Face name or a folder.")]
Drafter = Annotated[
    list[str] | None,
    typer.Option(
        help="Who guesses: shipped, ngram, a DFlash folder or name … or none; repeated or joined by +: together."
    ),
]
Policy = Annotated[str | None, typer.Option(help="How much to verify: bastion, ddtree:32 …")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")]
TargetPath = Annotated[str, typer.Option(help="How the target runs: auto, lean or universal.")]
WidthInvariant = Annotated[
    bool, typer.Option("--width-invariant", help="The same bits in bf16 on a GPU whatever is verified; slower.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the target's files.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]

# Of commands that write many texts at once.
MaxConcurrency = Annotated[int, typer.Option(help="Requests that are written at once.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")]
KvTokens = Annotated[int | None, typer.Option(help="KV memory in tokens; else half of what is free.")]
PrefixTokens = Annotated[int | None, typer.Option(help="Of these, for known prefixes; 0: keep none. Without it, half.")]


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`: of flags that take several at once."""
    return [name.strip() for name in text.split(",") if name.strip()]
