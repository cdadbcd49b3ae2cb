"""Which number format to run in: measured on this machine, not looked up in a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

ROWS, SIDE = 16, 1024  # tokens of a small tree against a weight matrix of a small model
REPEATS = 15
MARGIN = 1.2  # bf16 has to be this much faster: a near-tie must not flip from one start to the next


@dataclass(frozen=True, slots=True)
class Precision:
    """A number format and the sentence that says why."""

    dtype: torch.dtype
    reason: str


def choose_dtype(device: torch.device | str) -> Precision:
    """What `dtype="auto"` means on this device. Some milliseconds on a CPU, 100 on a slow one."""
    kind = torch.device(device).type
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, "the GPU computes in bf16")
        return Precision(torch.float16, "the GPU has no bf16 of its own")
    if kind != "cpu":
        return Precision(torch.float32, f"nothing faster is known to be safe on {kind}")
    seconds = matmul_seconds((torch.float32, torch.bfloat16))
    gain = seconds[torch.float32] / seconds[torch.bfloat16]
    measured = f"a {ROWS} × {SIDE} × {SIDE} product in bf16 is {gain:.2g} times as fast as in fp32"
    if gain >= MARGIN:
        return Precision(torch.bfloat16, f"measured here: {measured}")
    return Precision(torch.float32, f"measured here: {measured}, and {MARGIN} would be needed")


@torch.inference_mode()
def matmul_seconds(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """Best of a few: seconds of one small product on the CPU. In turn, so that a busy moment hits all formats alike."""
    operands = {dtype: (torch.ones(ROWS, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)) for dtype in dtypes}
    times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
    for _ in range(1 + REPEATS):
        for dtype, (x, weight) in operands.items():
            start = time.perf_counter()
            linear(x, weight)
            times[dtype].append(time.perf_counter() - start)
    return {dtype: min(each[1:]) for dtype, each in times.items()}
