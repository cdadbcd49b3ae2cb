"""`draftwood train`: from flags to a run; whatever can be refused is refused before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from rich.console import Console
from torch import nn

from draftwood.bench.environment import memory_bytes
from draftwood.embedded import embedded_target
from draftwood.errors import BadInput
from draftwood.loading import load_target, load_tokenizer
from draftwood.target import Target
from draftwood.train.blocks import OBJECTIVES
from draftwood.train.card import card, outdated, push
from draftwood.train.data import frequent_tokens, read_all, split, unseen_share, usable, usual_length
from draftwood.train.features import Reader, default_limit, feature_folder
from draftwood.train.files import (
    GIGABYTE,
    WEIGHTS,
    alone,
    check_disk,
    make_folder,
    scratch_of,
    told_if_unwritable,
    write_text,
)
from draftwood.train.fleet import Fleet
from draftwood.train.loop import Course, FeaturesOf, train
from draftwood.train.loss import Head
from draftwood.train.recipe import Recipe, choose_mask_token, drafter_config, tap_layers
from draftwood.train.show import Show, bar, save_curves
from draftwood.train.start import BEGINNINGS, inherited, inherited_tokens
from draftwood.train.state import Trainee, check_state, load_state, state_path
from draftwood.train.stopping import stop_flag
from draftwood.train.together import open_features

MOST_UNSEEN = 0.01  # if more new tokens are to come, a trimmed head that nobody asked for could cost more than it saves


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The flags of the command beside the recipe."""

    data: Sequence[Path]
    out: Path
    target: str | None = None  # None: the embedded one
    dtype: str = "auto"
    device: str = "auto"
    features: Path | None = None  # where target features are cached; None: beside the data
    push_to_hub: str | None = None  # a Hub repository
    trust_remote_code: bool = False


def run_training(options: TrainOptions, recipe: Recipe) -> bool:
    """Train, or resume, and leave a drafter in `options.out`. Returns whether training came to the end.

    Raises BadInput or BadModel for whatever cannot be used, before any work where that can be known.
    """
    check_out(options, recipe.init)
    make_folder(options.out, "--out")
    fleet = Fleet.join()
    with alone(options.out) if fleet.leads else nullcontext():  # all of a fleet share one folder
        return _run(options, recipe, fleet)


def check_out(options: TrainOptions, init: str = "") -> None:
    """Refuse to leave a drafter among texts, or in place of another model."""
    out = options.out.expanduser().resolve()
    begun = "" if init in BEGINNINGS else init
    for flag, folders in (("--data", options.data), ("--target", [options.target or ""]), ("--init", [begun])):
        if out in [Path(folder).expanduser().resolve() for folder in folders if str(folder)]:
            raise BadInput(
                f"--out {options.out} is a folder of {flag}, and a drafter needs its own; name another for it."
            )
    if (out / "config.json").exists() and not state_path(out).parent.exists():
        raise BadInput(f"--out {options.out} holds a model that was not trained there; name another folder.")


def _run(options: TrainOptions, recipe: Recipe, fleet: Fleet) -> bool:
    device = options.device if fleet.device is None else str(fleet.device)
    if fleet.device is not None and options.device not in ("auto", fleet.device.type):
        raise BadInput(f"--device {options.device}: of several processes each takes its own ({device}); leave it out.")
    name, trusted = options.target or str(embedded_target()), options.trust_remote_code
    target = load_target(name, options.dtype, device, trust_remote_code=trusted)
    course = prepare(options, recipe, target, fleet)
    model = course.form.start(course.config, recipe.init, target, recipe.seed)
    check_room(course, model)
    check_state(options.out, recipe, course.origin)  # before features take the place of others'
    course = replace(course, features=features_of(course, options, model))
    trainee = Trainee.of(model, recipe)
    ended = load_state(options.out, trainee, recipe, course.origin) and trainee.step == course.steps
    if not fleet.agrees(crc32(repr((course.origin, course.steps, trainee.step)).encode())):
        raise BadInput(
            "The processes would not train the same drafter: give all of them the same flags, finished data and one "
            f"folder --out {options.out} that all can read."
        )
    notes = Console(stderr=True, highlight=False, quiet=not fleet.leads)
    notes.print(describe(course, model), soft_wrap=True)
    with stop_flag() as stop, told_if_unwritable(options.out):
        with bar(course.steps, "training", fleet.leads) as update:
            show = Show(options.out, update, stop)
            finished = train(course, trainee, show.watcher() if fleet.leads else show.silent())
        if fleet.leads:
            page = options.out / "README.md"
            if not ended or outdated(page, course.steps):  # else it may have been edited since
                write_text(page, card(course, trainee.step))
            notes.print(save_curves(options.out), soft_wrap=True)
    fleet.leave()  # nobody waits for an upload
    if fleet.leads:
        drafter = f"{course.form.prefix}{options.out}"
        notes.print(closing(drafter, options.target, trainee.step, course.steps), soft_wrap=True)
        if finished and options.push_to_hub:
            notes.print(f"Uploaded: {push(options.out, options.push_to_hub)}", soft_wrap=True)
    return finished


def prepare(options: TrainOptions, recipe: Recipe, target: Target, fleet: Fleet) -> Course:
    """Read and divide the data, decide the drafter's config and head. Features come last, in the room that is left."""
    if recipe.layers > target.num_layers:
        raise BadInput(
            f"--layers {recipe.layers}: the drafter would have more layers than {target.name}, which has "
            f"{target.num_layers}, and take longer than what it is to save; 2 to 5 are usual."
        )
    check_taps(recipe, target)
    tokenizer = load_tokenizer(target.name, options.trust_remote_code)
    texts = usable(read_all(options.data, target), min(recipe.max_length, target.context_limit))
    if not texts:
        raise BadInput(f"--data {options.data[0]}: no text has an answer of two tokens or more.")
    seen, held_out = split(texts, recipe.holdout)
    if not seen:
        raise BadInput(f"--holdout {recipe.holdout} leaves no text to train on; lower it or make more data.")
    first = inherited(recipe.init) if OBJECTIVES[recipe.objective].form == "dflash" else {}
    wanted = first.get("mask_token_id") if recipe.mask_token is None else recipe.mask_token
    mask = choose_mask_token(wanted, target, tokenizer, texts)
    decided = {"sliding_window": usual_length(texts, recipe.block_size), **first}
    config = drafter_config(recipe, target, mask, texts[0].thinking, decided)
    auto, vocab = recipe.head_tokens == "auto", target.vocab_size
    own = inherited_tokens(recipe.init, vocab) if auto and first else None
    kept = frequent_tokens(seen, vocab, recipe.head_tokens) if own is None else np.array(own, np.int64)
    head = Head.of(target, None if kept is None else torch.from_numpy(kept))
    published = OBJECTIVES[recipe.objective].form == "eagle3"  # with the head that it is trained with, and no other
    if published and (target.finishes or head.bias is not None):
        raise BadInput(
            f"--objective eagle3: the logits of {target.name} are scaled or capped, or have a bias, and EAGLE-3's "
            "checkpoints have no place for that; train a dflash drafter."
        )
    trimmed = published or own is not None or not auto or unseen_share(seen) <= MOST_UNSEEN
    return Course(recipe, config, target, head, seen, held_out, options.out, fleet, trimmed)


def check_taps(recipe: Recipe, target: Target) -> None:
    """Refuse --taps above the number of layers from the second to the third last. The default is lowered instead."""
    if recipe.init not in BEGINNINGS or OBJECTIVES[recipe.objective].form == "eagle3":
        return  # a checkpoint and EAGLE-3 decide which layers they read
    most = len(tap_layers(target.num_layers, target.num_layers))
    if recipe.taps > most and recipe.taps != Recipe().taps:
        raise BadInput(
            f"--taps {recipe.taps}: the drafter would read more layers than {target.name} has for it, which are {most} "
            f"of its {target.num_layers}; lower it."
        )


def features_of(course: Course, options: TrainOptions, model: nn.Module) -> FeaturesOf:
    """Features of the texts, then of the held-out ones; a step must fit beside them in memory."""
    recipe = course.recipe
    reader = Reader(course.target, course.config["dflash_config"]["target_layer_ids"], recipe.soft > 0)
    folder = options.features or feature_folder(options.data)
    limit = default_limit(folder) if recipe.cache_gb is None else recipe.cache_gb * GIGABYTE
    taken = 12 * parameters_of(model) + 2 * step_bytes(course)  # gradients, moments, and a rough guess twice
    return open_features(reader, [*course.texts, *course.held_out], folder, limit, taken, course.fleet.size)


def check_room(course: Course, model: nn.Module) -> None:
    """Refuse a run whose state does not fit on the disk, or whose step does not fit in memory."""
    parameters = parameters_of(model)
    files = [state_path(course.out), course.out / WEIGHTS]
    files += [scratch_of(path) for path in files]  # of a save that was cut off, which the next one replaces
    there = sum(path.stat().st_size for path in files if path.exists())
    check_disk(course.out, 2 * 12 * parameters + 2 * parameters - there, "--out", "the state of the run")
    device = course.target.device
    have = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_bytes()
    needed = 16 * parameters + course.target.weight_bytes + step_bytes(course)
    if have is not None and needed > have:
        raise BadInput(
            f"A step needs about {needed / GIGABYTE:.3g} GB of memory and this machine has {have / GIGABYTE:.3g}; "
            f"lower --micro-batch{'' if course.teacher_forced else ', --anchors'} or --max-length."
        )


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def step_bytes(course: Course) -> float:
    """Roughly what one forward keeps for its backward: activations, attention scores and a chunk of logits."""
    recipe, config = course.recipe, course.config
    share = -(-recipe.batch_size // course.fleet.size)
    texts = min(recipe.micro_batch or share, share)
    longest = max(len(text.tokens) for text in course.texts)
    tokens = texts * (longest if course.teacher_forced else recipe.anchors) * recipe.block_size
    per_layer = 12 * config["hidden_size"] + 4 * config["intermediate_size"]
    scores = 2 * config["num_attention_heads"] * longest
    width = 2 if course.autocast else 4
    return width * tokens * recipe.layers * (per_layer + scores) + 12.0 * course.head.chunk * len(course.head.weight)


def describe(course: Course, model: nn.Module) -> str:
    """What is about to be trained, in one sentence."""
    millions = parameters_of(model) / 1e6
    answers = sum(len(t.tokens) - t.prompt for t in course.texts)
    return (
        f"Training a drafter of {millions:.1f} M parameters (objective {course.recipe.objective}, "
        f"{course.recipe.layers} layers, blocks of {course.recipe.block_size}, {course.drafted} draft tokens) for "
        f"{course.target.name} on {len(course.texts)} texts with {answers} answer tokens, {len(course.held_out)} texts "
        f"held out, {course.steps} steps."
    )


def closing(drafter: str, target: str | None, step: int, steps: int) -> str:
    if step < steps:
        return f"Stopped at step {step} of {steps}; the same command goes on from there. The drafter so far: {drafter}"
    whose = f" --target {target}" if target else ""
    return f'Trained {steps} steps. Try it: draftwood generate "What is a tree?"{whose} --drafter {drafter}'
