"""What `doctor` says of threads, which wait for each other, and wait long where other programs use their cores.

Compiled products follow the load by themselves (`cores.py`); for PyTorch's, it says what number would be quicker.
"""

from __future__ import annotations

import time

import torch

from draftwood import container
from draftwood.cores import EVERY_S, Load, fitting, usable
from draftwood.native.products import takes
from draftwood.precision import step

TURNS, TURN_S = 4, 0.1  # each number of threads has so many turns of so many seconds
GAIN = 1.3  # fewer threads have to be this much quicker to be worth a word


def advice(dtype: torch.dtype) -> str:
    """How many threads a step uses on this CPU, and how many would be better just now. Takes some seconds."""
    if takes(torch.empty(2, 2, dtype=dtype)) and (said := followed(torch.get_num_threads(), free())):
        return said
    return told(measure(dtype), container.cores())


def free() -> float:
    """Cores that others leave, over the next second."""
    load = Load()
    load.free()
    time.sleep(EVERY_S)
    return load.free()


def followed(most: int, free: float) -> str | None:
    """A sentence about steps that use fewer threads because only so many cores are free; None if they use all."""
    now = fitting(most, free)
    if now == most:
        return None
    return f"{most}, but {now} just now: {free:.1f} of {usable()} cores are free, and threads would wait for each other"


@torch.inference_mode()
def measure(dtype: torch.dtype) -> dict[int, float]:
    """Number of threads -> seconds of a step's products: as many as steps have, as a container allows, half, and one.

    Means, not the best times: the load of other programs is what is to be measured.
    """
    usual = torch.get_num_threads()
    once = step(dtype)
    spent = {threads: [0.0, 0] for threads in (usual, fitting(usual, container.cores()), (usual + 1) // 2, 1)}
    try:
        for _ in range(TURNS):
            for threads, so_far in spent.items():
                torch.set_num_threads(threads)
                start = time.perf_counter()
                while (seconds := time.perf_counter() - start) < TURN_S:
                    once()
                    so_far[1] += 1
                so_far[0] += seconds
    finally:
        torch.set_num_threads(usual)
    return {threads: seconds / steps for threads, (seconds, steps) in spent.items()}


def told(seconds: dict[int, float], allowed: float) -> str:
    """A sentence about what was measured where a container may use so many cores."""
    usual, best = max(seconds), min(seconds, key=seconds.__getitem__)
    gain = seconds[usual] / seconds[best]
    if gain < GAIN:
        return f"{usual}"
    quicker = f"{usual}, but steps are {gain:.1f} times as quick with {best}"
    if allowed < usual:
        return f"{quicker}: the container may use {allowed:g} cores; set OMP_NUM_THREADS={best}"
    return (
        f"{quicker}: other programs use the cores, and threads wait for each other; stop them, or set "
        f"OMP_NUM_THREADS={best} for as long as they run"
    )
