"""Putting an engine together: drafter, machine probe, latency model, and what was learned here before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from draftwood import registry
from draftwood.config import config
from draftwood.drafters.base import Drafter
from draftwood.engine import Engine
from draftwood.latency import LatencyModel, Machine
from draftwood.policies.base import Policy
from draftwood.probe import probe
from draftwood.target import Target


def build_engine(target: Target, drafter_name: str, policy: Policy) -> Engine:
    """An engine for a loaded target. What its latency model learns is kept between processes.

    Raises
    ------
    BadInput, BadModel: the drafter is unknown, unreadable or made for another target.
    """
    drafter = registry.drafter(drafter_name, target)
    folder = config().profiles
    machine = probe(target.device, target.dtype, folder)
    latency = LatencyModel(machine, target.work, drafter.work if drafter else None)
    path = profile_path(folder, machine, target, drafter)
    with contextlib.suppress(OSError, ValueError):  # absent or damaged: learned anew
        latency.restore(json.loads(path.read_text()))
    return Engine(target, drafter, policy, latency, lambda: save_profile(path, latency))


def profile_path(folder: Path, machine: Machine, target: Target, drafter: Drafter | None) -> Path:
    """One file per (machine, target, dtype, drafter); the readable part is for people, the hash for identity."""
    drafter_name = drafter.name if drafter else "none"
    identity = f"{machine.name}|{target.name}|{target.dtype}|{target.device.type}|{drafter_name}"
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(target.name).name)[:60]
    return folder / f"learned-{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"


def save_profile(path: Path, latency: LatencyModel) -> None:
    """Write atomically; a read-only cache folder costs the learned profile and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(latency.to_json(), file)
        os.replace(file.name, path)
