"""Texts to learn from and courses of training on a tiny target: what the tests of training run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.target import Target
from draftwood.train.features import CachedReader, Reader
from draftwood.train.fleet import Fleet
from draftwood.train.loop import Course, train
from draftwood.train.loss import Head
from draftwood.train.model import TrainableDFlash
from draftwood.train.recipe import Recipe, drafter_config
from draftwood.train.shards import Text
from draftwood.train.show import Show
from draftwood.train.start import start
from draftwood.train.state import Trainee, load_state

MASK = 96
RECIPE = Recipe(
    layers=2, block_size=6, taps=2, steps=8, batch_size=4, anchors=5, eval_every=4, lr=3e-3, autocast=False, holdout=0.0
)


def some_text(job: int, length: int = 40, prompt: int = 6) -> Text:
    """Numbers that climb by a step that depends on the text: something to learn."""
    step = 2 + job % 5
    return Text(np.array([(11 * job + step * i) % 90 for i in range(length)]), prompt, 0.0, "made", job)


TEXTS = [some_text(i, 30 + 2 * i) for i in range(7)]


def make_course(target: Target, out: Path, recipe: Recipe = RECIPE, texts: list[Text] = TEXTS, **more) -> Course:
    config = drafter_config(recipe, target, MASK)
    reader = Reader(target, config["dflash_config"]["target_layer_ids"], recipe.soft > 0)
    held_out = more.pop("held_out", [])
    features = CachedReader(reader, [*texts, *held_out], out / "features", more.pop("limit", 1e9))
    head = Head.of(target, more.pop("tokens", None))
    return Course(recipe, config, target, head, texts, held_out, out, Fleet(), features=features, **more)


def make_trainee(course: Course) -> Trainee:
    return Trainee.of(course.form.start(course.config, course.recipe.init, course.target, 0), course.recipe)


def run_to_the_end(course: Course) -> Trainee:
    trainee = make_trainee(course)
    load_state(course.out, trainee, course.recipe, course.origin)
    assert train(course, trainee, Show(course.out, lambda done, text: None, lambda: False).watcher())
    return trainee


def noisy_model(course: Course) -> TrainableDFlash:
    """Away from its start, in weights that bf16 holds exactly, in the target's dtype."""
    model = start(course.config, "target", course.target, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
    return model.to(course.target.dtype)


def taps_by_transformers(target: Target, text: Text, layers: tuple[int, ...]) -> Tensor:
    with target.plain_transformers() as model, torch.no_grad():
        out = model(input_ids=torch.from_numpy(text.tokens)[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1][0] for layer in layers], -1)
