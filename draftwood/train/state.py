"""A run on disk: its exact state in one file, and the drafter in z-lab's format for others to load.

The state holds the weights and their moments in float32, and the step; anchors, order and learning rate are functions
of the step. Nothing is pickled. The state is written atomically, so that a kill at any moment leaves a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwood.drafters import markov
from draftwood.drafters.checkpoint import DRAFT_TOKENS
from draftwood.errors import BadInput
from draftwood.train.eagle3 import Trainable
from draftwood.train.files import WEIGHTS, write_tensors, write_text
from draftwood.train.model import TrainableDFlash
from draftwood.train.optimizers import MOMENTS, Optimizers
from draftwood.train.recipe import Recipe


@dataclass(slots=True, eq=False)
class Trainee:
    """What training changes: the drafter, its optimizers, the steps done and the best tau so far."""

    model: Trainable
    optimizers: Optimizers
    step: int = 0
    best: float = 0.0

    @classmethod
    def of(cls, model: Trainable, recipe: Recipe) -> Trainee:
        pairs = [] if model.markov is None else list(model.markov.parameters())
        layers = [p for p in model.parameters() if all(p is not pair for pair in pairs)]
        return cls(model, Optimizers(recipe.optimizer, layers, pairs, recipe.weight_decay))


def state_path(out: Path) -> Path:
    return out / "training" / "state.safetensors"


def save_state(out: Path, trainee: Trainee, recipe: Recipe, origin: Mapping[str, str]) -> None:
    """Write `training/state.safetensors`, atomically; `origin` holds marks of what else the run depends on."""
    tensors = dict(trainee.model.state_dict())
    for name, parameter in trainee.model.named_parameters():
        tensors |= {f"{moment}.{name}": value for moment, value in trainee.optimizers.moments(parameter).items()}
    metadata = {
        "step": str(trainee.step),
        "best": repr(trainee.best),
        "recipe": json.dumps(recipe.to_json()),
        **origin,
    }
    path = state_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors, metadata)


def load_state(out: Path, trainee: Trainee, recipe: Recipe, origin: Mapping[str, str]) -> bool:
    """Continue where the run in `out` was; False if there is none.

    Raises BadInput for a damaged state, or one of another target, data or recipe.
    """
    metadata = check_state(out, recipe, origin)
    if metadata is None:
        return False
    with safe_open(state_path(out), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    _restore(trainee, tensors, int(metadata["step"]))
    trainee.best = float(metadata["best"])
    return True


def check_state(out: Path, recipe: Recipe, origin: Mapping[str, str]) -> Mapping[str, str] | None:
    """The metadata of the state of the run in `out`; None if there is none. Raises BadInput as `load_state`."""
    path = state_path(out)
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata()
        found = json.loads(metadata["recipe"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is damaged ({error}); delete it to begin anew.") from None
    for what, mark in origin.items():
        if (theirs := metadata.get(what, mark)) != mark:  # earlier versions had fewer marks
            raise BadInput(
                f"{path} is a run with another {what} ({theirs} instead of {mark}); name another --out, and its "
                "folder as --init to go on from its weights."
            )
    recipe.check_same(found, str(path))
    return metadata


def _restore(trainee: Trainee, tensors: dict[str, Tensor], step: int) -> None:
    model = trainee.model
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    trainee.step = step
    for name, parameter in model.named_parameters():
        moments = {moment: tensors[key] for moment in MOMENTS if (key := f"{moment}.{name}") in tensors}
        if moments:
            trainee.optimizers.restore(parameter, moments, step)


def export(
    out: Path, model: TrainableDFlash, config: dict[str, Any], draft_tokens: Tensor | None, tau: float | None = None
) -> None:
    """The drafter's folder: config.json with the measured tau, bf16 weights, and the list of a trimmed head."""
    everything = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    ours = {name for name in everything if name.startswith(markov.PREFIX)}
    pairs = {name.removeprefix(markov.PREFIX): everything[name] for name in ours}
    tensors = {name: tensor for name, tensor in everything.items() if name not in ours}
    write_tensors(out / WEIGHTS, tensors, {"format": "pt"})
    if pairs:
        (out / markov.FILE).parent.mkdir(exist_ok=True)
        write_tensors(out / markov.FILE, pairs, {"format": "pt"})
    else:
        (out / markov.FILE).unlink(missing_ok=True)
    if draft_tokens is not None:
        write_text(out / DRAFT_TOKENS, json.dumps(draft_tokens.tolist()))
    else:
        (out / DRAFT_TOKENS).unlink(missing_ok=True)
    promise = {} if tau is None else {"tau": round(tau, 2)}
    config = {**config, "dflash_config": {**config["dflash_config"], **promise}}
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
