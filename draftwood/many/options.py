"""The options of `draftwood batch`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import BadInput
from draftwood.serve.options import Options

if TYPE_CHECKING:
    from draftwood.llm import LLM

PATIENT = 2**31  # requests in the queue: a batch waits as long as it takes


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The flags of the command."""

    source: Path
    out: Path
    target: str | None = None  # None: the embedded one
    drafter: list[str] | None = None
    policy: str | None = None
    max_new_tokens: int | None = None  # of lines that name no limit
    temperature: float | None = None  # of lines that name none
    seed: int = 0
    raw: bool = False
    name: str | None = None  # of the model, in the lines; None: the target's own
    max_concurrency: int = 16  # requests that are written at once
    max_model_len: int | None = None
    kv_tokens: int | None = None
    prefix_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    target_path: str = "auto"
    trust_remote_code: bool = False
    ray: bool = False  # over a cluster
    replicas: int | None = None  # models on it; None: one for each GPU, or one

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise BadInput(f"--temperature is {self.temperature}; expected a number from 0 to 2.")
        if self.replicas is not None and (self.replicas < 1 or not self.ray):
            raise BadInput(f"--replicas is {self.replicas}; expected 1 or more, together with --ray.")
        self.serving()

    def serving(self) -> Options:
        """The options of the server inside: no deadline, and no request is refused because the queue is full."""
        return Options(
            name=self.name,
            max_concurrency=self.max_concurrency,
            max_waiting=PATIENT,
            max_model_len=self.max_model_len,
            kv_tokens=self.kv_tokens,
            prefix_tokens=self.prefix_tokens,
            deadline_s=math.inf,
        )

    def shaping(self) -> dict[str, Any]:
        """What shapes the texts: all runs that fill one folder must agree. Drafter and policy do not shape them."""
        names = ("target", "dtype", "max_new_tokens", "temperature", "seed", "raw", "max_model_len")
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

    def load(self) -> LLM:
        from draftwood.llm import load

        return load(
            self.target,
            self.drafter,
            self.policy,
            dtype=self.dtype,
            device=self.device,
            target_path=self.target_path,
            trust_remote_code=self.trust_remote_code,
        )
