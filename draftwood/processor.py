"""The processor's name and abilities: what was compiled or measured for one processor does not hold for another."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
ABILITIES = ("flags", "Features", "CPU implementer", "CPU part", "CPU variant")  # of x86, and of Arm


def processor() -> str:
    """The processor's name."""
    return dict(_facts()).get("model name") or platform.processor() or platform.machine()


def abilities() -> str:
    """The name, and eight letters that stand for what the processor can do: on Arm all have one name, and hypervisors
    may show the same name with other abilities."""
    told = [fact for fact in _facts() if fact[0] in ABILITIES]
    return f"{processor()} {hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"


def can(ability: str) -> bool:
    """Whether the processor has an ability, by Linux's name for it."""
    return ability in dict(_facts()).get("flags", "").split()


def _facts() -> list[tuple[str, str]]:
    """What Linux says of the first processor."""
    with contextlib.suppress(OSError):
        first = CPUINFO.read_text(encoding="utf-8").split("\n\n")[0]
        return [
            (name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in first.splitlines())
        ]
    return []
