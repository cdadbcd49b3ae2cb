"""How many threads compiled steps take: as many as other programs leave cores for.

Threads wait for each other some 200 times a token, and long for one whose core is somebody else's just then: beside one
busy program two threads on two cores lose two thirds of their speed, where a single thread would lose nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import cache
from math import floor, inf
from pathlib import Path

import torch

EVERY_S = 1.0  # between readings: bursts shorter than that cost less than a thread does
ENOUGH = 0.4  # of a core is worth a thread, as the scheduler shares one
STAT, QUOTA = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")  # where Linux tells of cores, and of a container's
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


class Load:
    """What others leave of the cores, read a few times a second while somebody asks."""

    def __init__(self) -> None:
        self._at, self._taken, self._free = -inf, 0.0, inf

    def free(self) -> float:
        """Cores that this process could have had to itself since the last reading."""
        now = time.monotonic()
        if (since := now - self._at) >= EVERY_S:
            taken = taken_s()
            others = max(0.0, taken - self._taken) / since
            self._at, self._taken, self._free = now, taken, min(quota(), usable() - others)
        return self._free


def usable() -> int:
    """Cores that this process may run on, where the system tells, else all."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def quota() -> float:
    """How many cores' time a container may take."""
    with contextlib.suppress(OSError, ValueError):
        allowed, period = QUOTA.read_text(encoding="ascii").split()
        return int(allowed) / int(period)
    return inf


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
