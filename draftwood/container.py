"""What Linux's control groups, versions 1 and 2, allow this process: the limits of a container or of a service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import inf
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # what groups allow, and which of them are ours
MEMORY = (  # limit, use, and what of it is page cache, in each version
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)
UNLIMITED = 2**62  # bytes: how version 1 says that there is no limit


def cores() -> float:
    """How much processor time this process may use, in cores."""
    return min(map(_cores, _groups("cpu")), default=inf)


def memory() -> int | None:
    """The limit on memory in bytes; None without one."""
    return min((limit for limit, _ in _memories()), default=None)


def free_memory() -> int | None:
    """Bytes that the limits leave, where the page cache does not count as used; None without a limit."""
    return min((free for _, free in _memories()), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the groups that contain this process, from the innermost out; a container may not see its own."""
    with contextlib.suppress(OSError, ValueError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = ROOT / controller if controllers else ROOT
                own = root / path.lstrip("/")
                yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _cores(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        allowed, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return int(allowed) / int(period)
    with contextlib.suppress(OSError, ValueError):
        allowed, period = ((group / f"cpu.cfs_{part}_us").read_text(encoding="ascii") for part in ("quota", "period"))
        return int(allowed) / int(period) if int(allowed) > 0 else inf
    return inf


def _memories() -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of each group that has a limit, in bytes."""
    for group in _groups("memory"):
        for limit, use, cache in MEMORY:
            with contextlib.suppress(OSError, ValueError, KeyError):
                allowed, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, use))
                stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                if allowed < UNLIMITED:
                    yield allowed, max(0, allowed - used + int(stat[cache]))
