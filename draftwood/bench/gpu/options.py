"""The options of `draftwood bench gpu`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from draftwood.bench.gpu.shapes import SHAPES, Shape, shape
from draftwood.errors import BadInput

WIDTHS, CONTEXTS = (1, 4, 8, 16, 32, 64, 128, 256), (128, 1024, 4096, 16384)
MOST_WIDTHS = 15  # with four graphs each, and some more, all graphs are still kept at once
QUICK_WIDTHS, QUICK_CONTEXTS, QUICK_MODELS = (1, 16, 64, 256), (1024,), ("SmolLM2-135M", "Qwen3-8B")
BATCHES, QUICK_BATCHES = 7, 3
REPEATS, QUICK_REPEATS = 3, 1


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The flags of the command; empty lists mean all."""

    models: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    rates: list[str] = field(default_factory=lambda: ["gsm8k", "tau9.56"])
    new_tokens: int = 256
    quick: bool = False
    with_smollm2: bool = False
    budget_s: float | None = None  # no group is begun that would probably end later
    device: str = "auto"
    dtype: str = "auto"
    width_invariant: bool = False
    out: Path | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for name, values, least in (("widths", self.widths, 1), ("contexts", self.contexts, 1)):
            if any(value < least for value in values):
                raise BadInput(f"--{name} is {','.join(map(str, values))}; expected whole numbers from {least} up.")
        if len(set(self.widths)) > MOST_WIDTHS:
            raise BadInput(f"--widths names {len(set(self.widths))}; at most {MOST_WIDTHS} are measured together.")
        if self.new_tokens < 2:
            raise BadInput(f"--new-tokens is {self.new_tokens}; measuring needs at least 2.")
        if self.budget_s is not None and self.out is None:
            raise BadInput("--budget needs --out, the folder that a later run goes on from.")

    def shapes(self) -> list[Shape]:
        return [shape(name) for name in self.models or (QUICK_MODELS if self.quick else [s.name for s in SHAPES])]

    def all_widths(self) -> list[int]:
        return sorted(set(self.widths or (QUICK_WIDTHS if self.quick else WIDTHS)))

    def all_contexts(self) -> list[int]:
        return sorted(set(self.contexts or (QUICK_CONTEXTS if self.quick else CONTEXTS)))

    @property
    def batches(self) -> int:
        """How often every part is timed."""
        return QUICK_BATCHES if self.quick else BATCHES

    @property
    def repeats(self) -> int:
        """How often every policy writes an answer."""
        return QUICK_REPEATS if self.quick else REPEATS
