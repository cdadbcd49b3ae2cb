"""What a figure was measured on: command, versions, hardware, commit, date."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftwood import container
from draftwood.cores import load, usable
from draftwood.processor import processor

PACKAGES = ("draftwood", "torch", "transformers", "tokenizers", "numpy", "datasets", "triton")


def environment() -> dict[str, Any]:
    """A JSON-ready record; None for what this system does not report."""
    return {
        "command": shlex.join([*program(), *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "system": platform.platform(),
        "processor": processor(),
        "cores": usable(),
        "cores_of_others": load().others(),  # on average, since this process began to compute
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": memory_bytes(),
        "gpus": [gpu(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def program() -> list[str]:
    """How this process was called: by a script's name, or as a package's module."""
    path = Path(sys.argv[0])
    return ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]


def commit(checkout: Path) -> str | None:
    """The commit that `checkout` is at, `+changes` if files differ; None unless it is a repository itself.

    An installed package may lie inside another project's repository, whose commit would mean nothing.
    """
    if not (checkout / ".git").exists():
        return None
    revision, changes = git(checkout, "rev-parse", "HEAD"), git(checkout, "status", "--porcelain", "-uno")
    return None if revision is None else revision + ("+changes" if changes else "")


def git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def memory_bytes() -> int | None:
    """What this process may use, where the system reports it."""
    if sys.platform == "win32":
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, container.memory() or physical)


def gpu(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    return {"name": facts.name, "memory_bytes": facts.total_memory}


def peak_memory() -> dict[str, int | None]:
    """The most bytes that this process has used: resident, and on the GPU."""
    return {
        "peak_resident_bytes": peak_resident_bytes(),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def peak_resident_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
