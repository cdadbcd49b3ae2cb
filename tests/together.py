"""What the processes of test_parallel.py run: `python -m tests.together TASK FOLDER`, by torchrun or by hand."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from draftwood import registry
from draftwood.engine import Engine
from draftwood.errors import BadInput, DraftwoodError, LostProcess
from draftwood.latency import LatencyModel, Machine
from draftwood.loading import load_target
from draftwood.parallel import Group
from draftwood.sampling import Sampler, Sampling
from tests.reference import Noisy, Truthful

DRAFTERS = ("dflash", "d2sd", "pooled", "truthful", "noisy")
POLICIES = ["autoregressive", "dflash", "ddtree:7", "beam:3x4", "caddtree", "bastion", "bastion:paper"]
SAMPLINGS = {
    "greedy": Sampling(),
    "T = 1": Sampling(1.0, seed=3),
    "T = 0.7, top-k, penalty": Sampling(0.7, top_k=20, repetition_penalty=1.2, seed=4),
}
PROMPT = [(11 * i + 5) % 97 for i in range(13)]
NEW = 12
WHOLE = "llama"  # the family that every policy and drafter runs on; of the others some


def forbidden(*_args: object, **_options: object) -> NoReturn:
    raise AssertionError("decided by a process that does not lead")


def drafters(folder: Path, target: Any, truth: list[int]) -> dict[str, Any]:
    """Those that share the target's embedding and head, one that decides by a clock of its own, and scripted ones."""
    return {
        "dflash": registry.drafter(str(folder / "drafter"), target),
        "d2sd": registry.drafter(f"d2sd:{folder / 'drafter'}", target),
        "pooled": registry.drafter([str(folder / "drafter"), "ngram", "recycling"], target),
        "truthful": Truthful("truthful", tap_layers=(0, 2), truth=truth),
        "noisy": Noisy("noisy"),
    }


def chosen(family: str) -> list[tuple[str, str]]:
    """Drafters and policies that run on a family's target."""
    if family != WHOLE:
        return [("dflash", "ddtree:7"), ("d2sd", "bastion")]
    return [("dflash", rule) for rule in POLICIES] + [(name, "bastion") for name in DRAFTERS[1:]]


def texts(folder: Path, group: Group) -> dict[str, dict[str, list[int]]]:
    """What the target in `folder` writes. Every process drafts; the first one decides when, and what is verified."""
    target = load_target(str(folder), "float64", "auto", group=group)
    assert target.path.name == "universal" and target.vocab_size == 98
    truth = json.loads((folder / "truth.json").read_text())
    # For one process wide trees are cheap, for the other one dear: by its own clock each would verify another number.
    latency = LatencyModel(Machine(str(group.rank), 1e13 / 1e6**group.rank, 1e9, 1e-9), target.work, None)
    found: dict[str, dict[str, list[int]]] = {}
    for kind, sampling in SAMPLINGS.items():
        made = drafters(folder, target, truth[kind])
        assert tuple(made) == DRAFTERS
        for name, policy in chosen(folder.name):
            rule = registry.policy(policy)
            if not group.leads:
                Sampler.draw = forbidden
                type(rule).choose = forbidden
                type(rule).drafts = lambda *_, plain=policy == "autoregressive": plain  # the contrary
            steps = list(Engine(target, made[name], rule, latency).run(PROMPT, NEW, sampling))
            drafted = [step.round is not None and step.round.drafted for step in steps]
            assert group.decide(lambda told=drafted: told) == drafted, "in the same rounds"
            found.setdefault(kind, {})[f"{name}, {policy}"] = [token for step in steps for token in step.tokens]
    heads = target.config.num_key_value_heads
    assert target.kv_bytes_per_token() == 2 * 3 * heads // group.size * target.config.head_dim * 8
    return found


def equal(folder: Path) -> None:
    group = Group.join()
    found = {family.name: texts(family, group) for family in sorted(folder.iterdir()) if family.is_dir()}
    assert group.decide(lambda: json.dumps(found)) == json.dumps(found), "every process has the same text: it was told"
    if group.leads:
        (folder / "found.json").write_text(json.dumps(found))
    group.close()


def errors(folder: Path) -> None:
    """A mistake of one process is everybody's, and in time."""
    group = Group.join()
    said = []
    for act in (
        lambda: group.decide(lambda: refuse("the first one's")),
        lambda: group.every(lambda: refuse("the last one's") if not group.leads else None),
        lambda: load_target(str(folder / "llama"), device="cuda:7", group=group),
        lambda: load_target(str(folder / "llama"), path="lean", dtype="float64", group=group),
        lambda: load_target(str(folder / "absent"), dtype="float64", group=group),
    ):
        try:
            act()
        except DraftwoodError as error:
            said.append(str(error))
    (folder / f"said-{group.rank}.json").write_text(json.dumps(said))
    group.close()


def refuse(whose: str) -> None:
    raise BadInput(f"{whose} mistake")


def lost(folder: Path, how: str) -> None:
    """The last process dies in the middle of an answer, or the first one hangs; what the other one says about it."""
    group = Group.join()
    patience = timedelta(seconds=5 if how == "hangs" else 900)
    group = replace(group, channel=dist.new_group(backend="gloo", timeout=patience))
    target = load_target(str(folder / "llama"), "float64", group=group)
    latency = LatencyModel(Machine("made-up", 1e13, 1e9, 1e-9), target.work, None)
    try:
        for i, _ in enumerate(Engine(target, Noisy("noisy"), registry.policy("ddtree:7"), latency).run(PROMPT, 200)):
            if i == 2 and not group.leads and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if i == 2 and group.leads and how == "hangs":
                (folder / "waiting").touch()
                time.sleep(3600)
    except LostProcess as error:
        (folder / f"lost-{how}").write_text(str(error))
        os._exit(2)


if __name__ == "__main__":
    task, folder = sys.argv[1], Path(sys.argv[2])
    {"equal": equal, "errors": errors}[task](folder) if task in ("equal", "errors") else lost(folder, task)
