"""CUDA graphs by key, captured when first needed, in one memory pool; without CUDA the same stages run as they are.

A stage reads and writes static buffers only, so a replay repeats it on whatever they hold by then. Graphs share one
pool because no two of them run at the same time, and only the buffers outlive a replay.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

MOST = 128  # graphs kept, the longest unused go first: each one holds its kernels' parameters
WARM_UPS = 2  # runs before a capture: kernels are chosen and compiled in them

LOG = logging.getLogger("draftwood")
Stage = Callable[[], object]


class Graphs:
    """Runs stages, on CUDA by replaying what it captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures = device.type == "cuda"
        # PyTorch's own stream for captures belongs to the device of the process's first one.
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool: Any = None  # of the first capture
        self.nbytes = 0  # device memory that captures took
        self.short = False  # whether a capture found too little of it, after which stages run as they are

    def __len__(self) -> int:
        return len(self._graphs)

    def prepare(self, key: Hashable, stage: Stage, changing: Sequence[Tensor]) -> None:
        """Capture `stage` under `key` if that is not done yet. `changing` is put back to what it was before."""
        if not self._captures:
            return
        if key not in self._graphs:
            if len(self._graphs) == MOST:
                self._graphs.popitem(last=False)
            try:
                self._graphs[key] = self._capture(stage, changing)
            except torch.OutOfMemoryError:
                self.clear()
                self._captures, self.short = False, True
                LOG.warning(
                    "Memory ran out while CUDA graphs were captured; rounds run without them, and slower. Free some "
                    "memory of the device and load the model again."
                )
                return
        self._graphs.move_to_end(key)

    def run(self, key: Hashable, stage: Stage) -> None:
        """Run `stage`, which was prepared under `key`."""
        if self._captures:
            self._graphs[key].replay()
        else:
            stage()

    def clear(self) -> None:
        """Forget all graphs and give their memory back.

        Later graphs get a new pool: PyTorch refuses a pool that all graphs have left while anything else is in it, such
        as a workspace of cuBLAS.
        """
        self._graphs.clear()
        self._pool = None
        self.nbytes = 0

    def _capture(self, stage: Stage, changing: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        self._warm_up(stage, changing)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with _workspaces_apart():
            reserved = self._reserved()
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                stage()
        self.nbytes += max(0, self._reserved() - reserved)
        return graph

    def _reserved(self) -> int:
        """Bytes of the device that PyTorch holds, after it has given back those that it kept for later."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _warm_up(self, stage: Stage, changing: Sequence[Tensor]) -> None:
        """Run the stage before its capture, on a side stream, as captures require.

        A stage that finds no memory leaves `changing` as it was."""
        saved = [tensor.clone() for tensor in changing]
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    try:
                        stage()
                    finally:
                        for tensor, before in zip(changing, saved, strict=True):
                            tensor.copy_(before)
        finally:
            current.wait_stream(side)


@contextmanager
def _workspaces_apart() -> Iterator[None]:
    """Give a capture a cuBLAS workspace in its own pool, and free the one that warming up left behind.

    PyTorch keeps one workspace for each stream: captures of two engines would share it, and it would go with the first.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Span:
    """Seconds that the device takes from `Span(device)` to `end()`, measured without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if device.type == "cuda" else 0)]
        self._times: list[float] = []
        self.end()

    def end(self) -> None:
        if self._events:
            self._events[len(self._times)].record()
        self._times.append(perf_counter())

    @property
    def begun(self) -> float:
        """When the host gave the device the first work of the span."""
        return self._times[0]

    @property
    def seconds(self) -> float:
        """To be read only when the device is past both ends."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._times[1] - self._times[0]
