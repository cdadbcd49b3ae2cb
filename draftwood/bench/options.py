"""The options of `draftwood bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftwood import registry
from draftwood.bench.stats import TRANSFORMERS
from draftwood.errors import BadInput


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The flags of the command, unresolved. Raises BadInput for numbers that cannot be used."""

    prompts: list[str] = field(default_factory=list)  # JSONL files, names of data sets; none: default
    policies: list[str] = field(default_factory=list)  # such as `ddtree:32`; the baselines always run
    max_new_tokens: int = 128  # per turn
    limit: int | None = None  # the first so many prompts of every set; None: all
    temperature: float = 0.0
    dtype: str = "auto"
    target_path: str = "auto"
    width_invariant: bool = False
    trust_remote_code: bool = False
    device: str = "auto"
    target: str | None = None  # None: the embedded one
    drafter: list[str] | None = None  # several propose together
    against: list[str] = field(default_factory=list)  # further drafters, with which every policy runs, too
    out: Path | None = None  # a folder for the records; None: only the terminal
    seed: int = 0
    json: bool = False  # nothing but the summary on stdout
    trace: bool = False  # record what was drafted, too, and replay every token once for it

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise BadInput(
                f"--max-new-tokens is {self.max_new_tokens}; measuring needs at least 2, because decoding "
                "speed counts the tokens after the first."
            )
        if self.trace and self.out is None:
            raise BadInput("--trace writes into the folder of --out; name one, such as --out results/mine.")
        if self.trace and self.against:
            raise BadInput("--trace records the drafts of one drafter; leave --against out, or trace each by itself.")
        if self.limit is not None and self.limit < 1:
            raise BadInput(f"--limit is {self.limit}; it must be 1 or more (leave it out for all prompts).")


def check_policies(policies: Sequence[str]) -> None:
    """Refuse an unknown policy now, rather than when its turn comes."""
    for spec in policies:
        if spec != TRANSFORMERS:
            registry.policy(spec)
