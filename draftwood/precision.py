"""Which number format to run in: measured on this machine, not looked up in a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwood.packing import LEAST_ROWS, linear, onednn_has_bf16
from draftwood.probe import machine_name
from draftwood.store import measured_once

FORMATS = ("float32", "bfloat16")
ROWS, SIDE = LEAST_ROWS, 1024  # the narrowest step, which most trees are near, against a weight of a small model
MATRICES = 32  # 128 MiB in fp32: a step reads weights from memory, and out of a cache fp32 looks too good
REPEATS = 7
MARGIN = 1.2  # bf16 has to be this much faster: a near-tie must not flip from one start to the next


@dataclass(frozen=True, slots=True)
class Precision:
    """A number format and the sentence that says why."""

    dtype: torch.dtype
    reason: str


def choose_dtype(device: torch.device | str, folder: Path | None = None) -> Precision:
    """What `dtype="auto"` means on this device. Measured once per machine where `folder` keeps it.

    A choice that is kept is the same at every start, and so are the texts.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        if computes_bf16(kind):
            return Precision(torch.bfloat16, "the GPU computes in bf16")
        return Precision(torch.float16, "the GPU has no bf16 of its own")
    if kind != "cpu":
        return Precision(torch.float32, f"nothing faster is known to be safe on {kind}")
    machine = machine_name(torch.device(kind), torch.bfloat16)
    seconds = measured_once(folder, "precision", machine, FORMATS, step_seconds)
    gain = seconds["float32"] / seconds["bfloat16"]
    measured = f"{MATRICES} products of {ROWS} × {SIDE} × {SIDE} in bf16 are {gain:.2g} times as fast as in fp32"
    if gain >= MARGIN:
        return Precision(torch.bfloat16, f"measured here: {measured}")
    return Precision(torch.float32, f"measured here: {measured}, and {MARGIN} would be needed")


def computes_bf16(device: torch.device | str) -> bool:
    """Whether PyTorch multiplies bf16 matrices by the processor's own instructions, not number after number."""
    kind = torch.device(device).type
    if kind == "cpu":
        return onednn_has_bf16()
    return kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def step(dtype: torch.dtype) -> Callable[[], None]:
    """A step's products on the CPU, with weights laid out as the target's are."""
    layers = [linear(torch.ones(SIDE, SIDE, dtype=dtype)) for _ in range(MATRICES)]
    x = torch.ones(ROWS, SIDE, dtype=dtype)

    def run() -> None:
        for layer in layers:
            layer(x)

    return run


@torch.inference_mode()
def step_seconds() -> dict[str, float]:
    """Best of a few: seconds of a step's products in each of FORMATS.

    They take turns, so that a busy moment hits all alike.
    """
    steps = {name: step(getattr(torch, name)) for name in FORMATS}
    times: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(1 + REPEATS):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(each[1:]) for name, each in times.items()}
