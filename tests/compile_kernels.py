"""Compile attention, growth and draws for the CUDA architectures named, on a machine without any; a script.

A stand-in for the driver says which architecture to compile for, and launches only compile. Prints one JSON object:
architecture to how many of each kernel every width and way of growing needed, and the shared memory of the largest.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from draftwood.attention import triton_alone, triton_rows, triton_tree
from draftwood.device import triton_draw, triton_growth
from draftwood.device.ancestors import bitmask, lineage, visible
from draftwood.drafters.base import Candidates
from draftwood.grow import Growth
from tests.attention_cases import make_case, random_tree

KERNELS = {
    triton_tree: ("_attend_split", "_merge_splits"),
    triton_alone: ("_attend_alone", "_merge_alone"),
    triton_rows: ("_attend_row",),
    triton_growth: ("_best_first", "_relate"),
    triton_draw: ("_noisiest",),
}


class Absent:
    """As much of a driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


class Compiled:
    """Stands for a kernel whose launches only compile it."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel, self.found = kernel, {}

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self.keep(self.kernel.warmup(*args, grid=grid, **options))

    def keep(self, made) -> None:
        self.found[made.hash] = made.metadata.shared


def grow(growth: Growth, paired: bool) -> None:
    """A tree of a draft of 15 depths with 16 candidates each, and who sees whom in it."""
    names, pairs = torch.zeros(15, 16, dtype=torch.int64), torch.zeros(14, 16, 16) if paired else None
    grower = triton_growth.TritonGrower(growth, 15, 16, names.device, paired)
    numbers = torch.zeros(1, dtype=torch.int64), torch.tensor(99), torch.tensor(99)
    tree = grower(Candidates(names, torch.zeros(15, 16), pairs), *numbers)
    parents = torch.zeros_like(tree.parents)  # nothing has run
    line = lineage(parents, 15)
    grower.relate(parents, line, visible(line), bitmask(visible(line)))


def compile_for(architecture: int) -> dict[str, int | dict[str, int]]:
    triton.runtime.driver.set_active(Absent(architecture))
    named = [(module, name) for module, names in KERNELS.items() for name in names]
    usual = [getattr(module, name) for module, name in named]
    kernels = [Compiled(kernel) for kernel in usual]
    for (module, name), kernel in zip(named, kernels, strict=True):
        setattr(module, name, kernel)
    for nodes in (3, 8, 16, 33, 64):
        case = make_case(random_tree(nodes), 50, kv_heads=2, groups=4, size=128, dtype=torch.bfloat16, window=40)
        case.attend()
        case.alone()
    keys = torch.zeros(3, 2, 50, 64, dtype=torch.bfloat16)
    for window in (None, 40):
        triton_rows.rows_attention(keys.new_zeros(3, 8, 64), keys, keys, torch.tensor([7, 49, 0]), 1.0, window)
    for scores in (torch.float64, torch.float32):
        triton_draw.noisiest(torch.zeros(3, 5000, dtype=scores), torch.zeros(3, dtype=torch.int64))
    for growth in (Growth(256), Growth(64), Growth(15, per_depth=1)):
        grow(growth, False)
        grow(growth, True)
    for (module, name), kernel in zip(named, usual, strict=True):
        setattr(module, name, kernel)
    return dict(
        kernels={name: len(kernel.found) for (_, name), kernel in zip(named, kernels, strict=True)},
        shared_bytes=max(bytes_ for kernel in kernels for bytes_ in kernel.found.values()),
    )


if __name__ == "__main__":
    for module in (triton_tree, triton_alone, triton_rows):
        module.product_format = lambda query: tl.bfloat16  # as on the device
    print(json.dumps({name: compile_for(int(name)) for name in sys.argv[1:]}))
