"""What this machine reaches: bandwidth, arithmetic and launch cost, measured in about two seconds.

There is no table of processor or GPU names: a name says nothing about clocks, memory channels and neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwood.cores import Load
from draftwood.latency import Machine
from draftwood.packing import kind, linear
from draftwood.processor import abilities
from draftwood.store import measured_once

STREAM_BYTES = 256 << 20  # more weights than caches hold
FIGURES = ("peak", "bandwidth", "launch_s")  # see Machine
LAUNCHES = 1000
BUDGET_S = 0.5  # seconds for each of the three measurements
OTHERS = 0.25  # cores; if other programs use more, figures are of a machine that is shared just then


@dataclass(frozen=True, slots=True)
class Sizes:
    """Products large enough to reach the device's best, small enough for the budget."""

    side: int  # rows and columns of one weight matrix
    rows: int  # tokens of the product that measures arithmetic


ON_CPU, ON_GPU = Sizes(side=2048, rows=256), Sizes(side=8192, rows=4096)  # so large that launches do not count on a GPU


def probe(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Machine:
    """Measure `device` in `dtype`, or read from `folder` what was measured before.

    What was kept counts only for the same processor, dtype, torch version and thread count. What was measured beside
    other programs is not kept.
    """
    name, begun = machine_name(device, dtype), Load()

    def alone() -> bool:
        return (begun.others() or 0.0) < OTHERS

    return Machine(name, **measured_once(folder, "machine", name, FIGURES, lambda: measure(device, dtype), alone))


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FIGURES as they are now. The weights are laid out as the target's are."""
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    matrix_bytes = sizes.side**2 * dtype.itemsize
    layers = [
        linear(torch.ones(sizes.side, sizes.side, device=device, dtype=dtype))
        for _ in range(max(1, STREAM_BYTES // matrix_bytes))
    ]
    row, block = (torch.ones(rows, sizes.side, device=device, dtype=dtype) for rows in (1, sizes.rows))
    one = torch.ones(1, device=device)
    stream_s = _seconds(lambda: [layer(row) for layer in layers], device)
    product_s = _seconds(lambda: layers[0](block), device)
    launches_s = _seconds(lambda: [one.add_(1) for _ in range(LAUNCHES)], device)
    return dict(
        peak=2 * sizes.rows * sizes.side**2 / product_s,
        bandwidth=len(layers) * matrix_bytes / stream_s,
        launch_s=launches_s / LAUNCHES,
    )


def machine_name(device: torch.device, dtype: torch.dtype) -> str:
    """Everything that a measurement depends on, in one line."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {dtype}, torch {torch.__version__}"
    return f"{abilities()}, {torch.get_num_threads()} threads, {dtype}, {kind(dtype)}, torch {torch.__version__}"


def wait(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The best of as many runs as the budget allows: what else runs here can only slow a run down."""

    def once() -> float:
        start = time.perf_counter()
        run()
        wait(device)
        return time.perf_counter() - start

    end = time.perf_counter() + BUDGET_S
    once()
    times = [once()]
    while time.perf_counter() < end:
        times.append(once())
    return min(times)
