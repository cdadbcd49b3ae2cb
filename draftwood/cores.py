"""How many threads compiled steps use: no more than other programs leave cores for.

Threads wait for each other some 200 times a token, and they wait long for one whose core another program uses just
then. Beside one busy program, two threads on two cores lose two thirds of their speed; a single one would lose nothing.
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

EVERY_S = 1.0  # between readings: bursts shorter than that cost less than a thread less
ENOUGH = 0.4  # share of a core that is worth a thread, given how the scheduler shares cores
STAT = Path("/proc/stat")  # where Linux counts what cores did
USER, NICE, SYSTEM, IRQ, SOFT_IRQ, STEAL = 1, 2, 3, 6, 7, 8  # ticks of a core there, by what they went to


def threads() -> int:
    """How many threads a step uses now: PyTorch's number, or fewer if not enough cores are free."""
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
    """The seconds that others have used of this process's cores until some time."""

    at: float
    taken: float

    def taken_since(self, before: Reading) -> float:
        """How many cores others used between the two readings, on average."""
        return max(0.0, self.taken - before.taken) / (self.at - before.at)


def read() -> Reading:
    return Reading(time.monotonic(), taken_s())


class Load:
    """What others leave of the cores, read once a second at most, and only when asked."""

    def __init__(self) -> None:
        self._first = self._latest = read()
        self._free = min(container.cores(), usable())

    def free(self) -> float:
        """Cores that this process could have had to itself since the last reading."""
        latest = self._latest  # another thread may replace it meanwhile
        if time.monotonic() - latest.at >= EVERY_S:
            self._latest = now = read()
            self._free = min(container.cores(), usable() - now.taken_since(latest))
        return self._free

    def others(self) -> float | None:
        """Cores that others have used on average since the first reading; None in the first second, and where the
        system does not tell."""
        now = read()
        told = sys.platform == "linux" and now.at - self._first.at >= EVERY_S
        return now.taken_since(self._first) if told else None


def usable() -> int:
    """How many cores this process may run on; all of them where the system does not tell."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def taken_s() -> float:
    """Seconds that others have used of the cores that this process may run on, since some fixed time; 0 where the
    system does not tell.

    Programs of low priority (nice) count only if this process has a low one, too: otherwise they yield to it.
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
