"""Putting an engine together: drafter, machine probe, latency model, and what earlier processes learned here."""

from __future__ import annotations

import contextlib

from draftwood import registry
from draftwood.config import config
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel
from draftwood.native.build import operators
from draftwood.offline import offline_file
from draftwood.offline_profile import ConvexCosts, Profile
from draftwood.policies.base import Policy
from draftwood.probe import probe
from draftwood.store import cached_file, read_json, write_json
from draftwood.target import Target


def build_engine(target: Target, drafter_name: registry.Named, policy: Policy) -> Engine:
    """An engine for a loaded target. What it learns of latency and acceptance is kept between processes.

    Where several processes hold the target, each loads the drafter; the leading one measures and saves for all.

    Raises
    ------
    BadInput, BadModel: the drafter is unknown, unreadable or made for another target.
    """
    operators()  # compiled now, if ever: not within the first answer
    group = target.group
    drafter = group.every(lambda: registry.drafter(drafter_name, target))
    folder = config().profiles
    machine = group.decide(lambda: probe(target.device, target.dtype, folder))
    latency = LatencyModel(machine, target.work, drafter.work if drafter else None)
    profile = Profile.load(offline_file(target, drafter, machine))

    def remember() -> None:
        if not group.leads:
            return
        with contextlib.suppress(OSError):  # with a read-only cache folder only the learned profile is lost
            write_json(learned, {"of": name, **latency.to_json(), "acceptance": engine.experience()})

    engine = Engine(target, drafter, policy, latency, ConvexCosts.of(profile) if profile else None, remember)
    path = target.path.kind, *([f"{group.size} processes"] if group.size > 1 else []), engine.backend().name
    parts = target.name, *path, drafter.name if drafter else "none", target.dtype, machine.name
    name = ", ".join(map(str, parts))
    learned = cached_file(folder, "learned", name)
    known = read_json(learned)
    known = known if isinstance(known, dict) else {}
    for restore, kept in ((latency.restore, known), (engine.recall, known.get("acceptance", []))):
        with contextlib.suppress(BadInput):  # absent or damaged: learned anew
            restore(kept)
    return engine
