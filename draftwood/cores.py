"""How many threads compiled steps take: as many as other programs leave cores for.

Threads wait for each other some 200 times a token, and long for one whose core is somebody else's just then: beside one
busy program two threads on two cores lose two thirds of their speed, where a single thread would lose nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from math import floor
from pathlib import Path

import torch

from draftwood import container

EVERY_S = 1.0  # between readings: bursts shorter than that cost less than a thread does
ENOUGH = 0.4  # of a core is worth a thread, as the scheduler shares one
STAT = Path("/proc/stat")  # where Linux tells what cores did
USER, NICE, SYSTEM, IRQ, SOFT_IRQ, STEAL = 1, 2, 3, 6, 7, 8  # ticks of a core there, by what they went to


def threads() -> int:
    """How many threads a step takes now: PyTorch's, as far as cores are free for them."""
    most = torch.get_num_threads()
    return most if most == 1 else fitting(most, load().free())


def fitting(most: int, free: float) -> int:
    """How many of `most` threads have a core, or most of one, to themselves."""
    return max(1, floor(min(free, most) + 1 - ENOUGH))


@cache
def load() -> Load:
    """This process's view of the machine."""
    return Load()


@dataclass(frozen=True, slots=True)
class Reading:
    """What others have had of this process's cores until now, in seconds."""

    at: float
    taken: float

    def taken_since(self, before: Reading) -> float:
        """Cores, in the mean."""
        return max(0.0, self.taken - before.taken) / (self.at - before.at)


def read() -> Reading:
    return Reading(time.monotonic(), taken_s())


class Load:
    """What others leave of the cores, read once a second while somebody asks."""

    def __init__(self) -> None:
        self._first = self._latest = read()
        self._free = min(container.cores(), usable())

    def free(self) -> float:
        """Cores that this process could have had to itself since the last reading."""
        latest = self._latest  # which another thread may replace meanwhile
        if time.monotonic() - latest.at >= EVERY_S:
            self._latest = now = read()
            self._free = min(container.cores(), usable() - now.taken_since(latest))
        return self._free

    def others(self) -> float | None:
        """Cores that others have taken in the mean since the first reading; None where the system does not tell, and in
        the first second."""
        now = read()
        told = sys.platform == "linux" and now.at - self._first.at >= EVERY_S
        return now.taken_since(self._first) if told else None


def usable() -> int:
    """Cores that this process may run on, where the system tells, else all."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def taken_s() -> float:
    """Seconds that others have taken of the cores that this process may run on, since some beginning; 0 where the
    system does not tell.

    What yields to this process, being nicer, takes a core only while nobody else wants it.
    """
    if sys.platform != "linux":
        return 0.0
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    nice = (NICE,) if os.getpriority(os.PRIO_PROCESS, 0) > 0 else ()
    busy = (USER, *nice, SYSTEM, IRQ, SOFT_IRQ, STEAL)
    with contextlib.suppress(OSError, ValueError, IndexError):
        cores = (line.split() for line in STAT.read_text(encoding="ascii").splitlines())
        ticks = sum(int(core[kind]) for core in cores if core[0] in ours for kind in busy)
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
    return 0.0
