"""What the processor is called: what was compiled or measured for one is not for another."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
