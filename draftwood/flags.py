"""Flags that several commands have, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.errors import check_one_of
from draftwood.names import DTYPES, SELF, check_data, model_name


# Names are looked up as soon as flags are read: a mistake is reported before torch is imported, which takes seconds.
def _target(name: str | None) -> str | None:
    if name is not None:
        model_name(name)
    return name


def _drafter(specs: list[str] | None) -> list[str] | None:
    from draftwood import registry  # imports numpy

    if specs:
        registry.check_drafters(specs)
    return specs


def _one_drafter(spec: str) -> str:
    _drafter([spec])
    return spec


def _policy(spec: str | None) -> str | None:
    if spec is not None:
        from draftwood import registry  # imports numpy

        registry.policy(spec)
    return spec


def _policies(text: str) -> str:
    from draftwood.bench.options import check_policies

    check_policies(names(text))
    return text


def _prompts(sources: list[str] | None) -> list[str] | None:
    from draftwood.bench.prompts import check_source

    for source in sources or ():
        check_source(source)
    return sources


def _prompts_or_self(sources: list[str] | None) -> list[str] | None:
    _prompts([source for source in sources or () if source != SELF])
    return sources


def _data(folders: list[Path]) -> list[Path]:
    for folder in folders:
        check_data(folder)
    return folders


def _dtype(dtype: str) -> str:
    check_one_of("dtype", dtype, DTYPES)
    return dtype


Target = Annotated[
    str | None, typer.Option(help="Model that writes: a Hugging Face name or a folder.", callback=_target)
]
Drafter = Annotated[
    list[str] | None,
    typer.Option(
        help="Drafter: shipped, ngram, a DFlash folder or name … or none; for several, repeat it or join them by +.",
        callback=_drafter,
    ),
]
Policy = Annotated[str | None, typer.Option(help="How much to verify: bastion, ddtree:32 …", callback=_policy)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.", callback=_dtype)]
TargetPath = Annotated[str, typer.Option(help="How the target runs: auto, lean or universal.")]
WidthInvariant = Annotated[
    bool, typer.Option("--width-invariant", help="In bf16 on a GPU, the same bits whatever is verified; slower.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the target's files.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]

# Of commands that measure.
Policies = Annotated[str, typer.Option(help="Comma-separated, as in generate --policy.", callback=_policies)]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="JSONL file or data set name; may be repeated; without it, our own.", callback=_prompts),
]
More = Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Further prompt sets.", callback=_prompts)]

# Of the trainer's commands.
PromptsOrSelf = Annotated[
    list[str] | None,
    typer.Option(
        help="JSONL file, data set name or self (the target invents them); may be repeated.", callback=_prompts_or_self
    ),
]
Data = Annotated[list[Path], typer.Option(help="Folder that distill wrote; may be repeated.", callback=_data)]
OneDrafter = Annotated[
    str,
    typer.Option(help="The drafter to measure, as in generate --drafter; several joined by +.", callback=_one_drafter),
]

# Of commands that write many texts at once.
MaxConcurrency = Annotated[int, typer.Option(help="Requests that are written at once.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")]
KvTokens = Annotated[int | None, typer.Option(help="KV memory in tokens; without it, half of what is free.")]
PrefixTokens = Annotated[
    int | None, typer.Option(help="Of --kv-tokens, for known prefixes; 0: none; without it, half.")
]


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`: of flags that take several at once."""
    return [name.strip() for name in text.split(",") if name.strip()]
