"""The training loop: draw blocks, run them, step; save, evaluate and export on the way.

Everything that a step does follows from the recipe, the data and the step's number, so a run that was killed
and resumed is the same run, bit for bit.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import BadInput
from draftwood.precision import computes_bf16
from draftwood.target import Target
from draftwood.train.attention import Layout
from draftwood.train.blocks import OBJECTIVES, Blocks, make_blocks
from draftwood.train.data import Identity
from draftwood.train.features import Features
from draftwood.train.fleet import Fleet
from draftwood.train.forms import FORMS, Form
from draftwood.train.holdout import TEXTS, forward, held_out_tau
from draftwood.train.loss import Before, Head, Labels, Outcome, Teacher, backpropagate
from draftwood.train.model import MarkovHead
from draftwood.train.recipe import Recipe
from draftwood.train.shards import Text
from draftwood.train.state import Trainee, save_state, state_path

ALIKE = 0.98  # of the best held-out tau: so few texts cannot tell nearer ones apart, and more training is likely better
FeaturesOf = Callable[[Sequence[int]], list[Features]]  # of texts by number
Part = tuple[list[int], Blocks]  # texts of one forward, and their blocks


@dataclass(frozen=True, eq=False)
class Course:
    """What a run works with and does not change."""

    recipe: Recipe
    config: dict[str, Any]  # the drafter's config.json
    target: Target
    head: Head
    texts: Sequence[Text]
    held_out: Sequence[Text]
    out: Path
    fleet: Fleet
    trimmed: bool = True  # whether drafts are limited to the head's tokens, as training is
    features: FeaturesOf = lambda indices: []  # of the texts, then of the held-out ones; until it is opened, none

    @property
    def teacher_forced(self) -> bool:
        return OBJECTIVES[self.recipe.objective].teacher_forced

    @property
    def draft_tokens(self) -> Tensor | None:
        return self.head.tokens if self.trimmed else None

    @property
    def drafting(self) -> Head:
        """The head that the exported drafter drafts with."""
        return self.head if self.trimmed else Head.of(self.target, None)

    @property
    def drafted(self) -> str:
        """How many tokens drafts choose from, and how many training did if those were fewer."""
        trained = str(len(self.head.weight))
        return trained if self.trimmed else f"{self.target.vocab_size} (trained on {trained})"

    @cached_property
    def origin(self) -> dict[str, str]:
        """Marks that identify a run: of the target, of the texts and of what --init decides."""
        mark = zlib.crc32(b"".join(text.tokens.tobytes() for text in self.texts))
        kept = b"" if self.head.tokens is None else self.head.tokens.cpu().numpy().tobytes()
        reads = self.config["dflash_config"]
        return {
            "target": Identity.of(self.target).fingerprint,
            "data": f"{len(self.texts)} texts, {mark:08x}",
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "list of draft tokens": f"{len(self.head.weight)} tokens, {zlib.crc32(kept):08x}",
            "mask token": str(reads["mask_token_id"]),
            "choice of target layers": str(reads["target_layer_ids"]),
            "window": str(self.config["sliding_window"] or "all"),
        }

    @property
    def autocast(self) -> bool:
        """Whether products are in bf16."""
        return self.recipe.autocast and computes_bf16(self.target.device)

    @property
    def steps(self) -> int:
        return self.recipe.total_steps(len(self.texts))

    @property
    def form(self) -> Form:
        return FORMS[OBJECTIVES[self.recipe.objective].form]

    def export(self, model: Any, tau: float | None) -> None:
        """Write the drafter's folder, in a form that others can load."""
        self.form.export(self.out, model, self.config, self.head, self.draft_tokens, tau)


@dataclass(frozen=True, slots=True)
class Progress:
    """The figures of one step."""

    step: int
    loss: float
    accuracy: list[float]  # of positions 1 … B - 1
    rate: float
    norm: float  # of the gradient, before clipping
    seconds: float
    predicted: int  # tokens


@dataclass(frozen=True, slots=True)
class Watcher:
    """What is called when something happens."""

    step: Callable[[Progress], None] = lambda progress: None
    tau: Callable[[int, Mapping[str, float]], None] = lambda step, tau: None
    begin: Callable[[int], None] = lambda step: None  # the step that the run goes on from
    stop: Callable[[], bool] = lambda: False  # asked before every step


def train(course: Course, trainee: Trainee, watcher: Watcher) -> bool:
    """Train from the trainee's step to the end, or until `watcher.stop`. Returns whether it came to the end.

    Raises BadInput if the loss is no longer finite. On the way, weights are saved only after they gave a finite loss.
    """
    watcher.begin(began_at := trainee.step)
    saved_at, parts = time.monotonic(), None
    while trainee.step < course.steps:
        if course.fleet.any(watcher.stop()):
            _save(course, trainee)
            return False
        try:
            gradients = add_gradients(course, trainee, parts)
        except ArithmeticError as error:
            raise BadInput(_diverged(course, trainee.step, error)) from None
        if course.fleet.any(time.monotonic() - saved_at > 60 * course.recipe.save_minutes):
            _save(course, trainee)
            saved_at = time.monotonic()
        watcher.step(descend(course, trainee, gradients))
        parts = gradients.following
        if trainee.step == course.steps or trainee.step % course.recipe.eval_every == 0:
            _evaluate(course, trainee, watcher)
    if trainee.step > began_at:
        _save(course, trainee)
    return True


@dataclass(frozen=True, slots=True)
class Gradients:
    """What is known of a step before it is taken; the gradients themselves lie in the drafter."""

    loss: float
    norm: float  # before clipping
    outcome: Outcome
    seconds: float
    following: Sequence[Part]  # of the next step


def add_gradients(course: Course, trainee: Trainee, parts: Sequence[Part] | None = None) -> Gradients:
    """Forward and backward of a step's parts, and clipping. ArithmeticError if loss or gradient is not finite.

    The next step is planned here, before the host waits for the device; without `parts` this one is, too.
    """
    began = time.perf_counter()
    parts = plan_step(course, trainee.step) if parts is None else parts
    device = course.target.device
    weight = course.fleet.sum(torch.tensor(float(sum(p[1].weights.sum() for p in parts)), device=device))
    trainee.model.zero_grad(set_to_none=True)
    outcome = _nothing(course)
    for part in parts:
        outcome = outcome + run_part(course, trainee, part, 1 / float(weight))
    outcome = course.fleet.sum_outcome(outcome)
    course.fleet.sum_gradients(trainee.model)
    clipped = torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), course.recipe.clip)
    following = plan_step(course, trainee.step + 1)
    norm, loss = float(clipped), float(outcome.loss / weight)
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise ArithmeticError(f"the loss is {loss} and its gradient's norm {norm}")
    return Gradients(loss, norm, outcome, time.perf_counter() - began, following)


def descend(course: Course, trainee: Trainee, gradients: Gradients) -> Progress:
    """Take the step whose gradients lie in the drafter."""
    began = time.perf_counter()
    rate = course.recipe.rate(trainee.step, course.steps)
    trainee.optimizers.step(rate)
    trainee.step += 1
    outcome = gradients.outcome
    accuracy = (outcome.right / outcome.total.clamp_min(1)).tolist()
    predicted, seconds = int(outcome.total.sum()), gradients.seconds + time.perf_counter() - began
    return Progress(trainee.step, gradients.loss, accuracy, rate, gradients.norm, seconds, predicted)


def plan_step(course: Course, step: int) -> list[Part]:
    """This process's share of a step's texts, in parts of one forward each, with freshly drawn blocks."""
    recipe, config = course.recipe, course.config
    mask, objective = config["dflash_config"]["mask_token_id"], OBJECTIVES[recipe.objective]
    mine = recipe.batch(step, len(course.texts))[course.fleet.rank :: course.fleet.size]
    size, parts = recipe.micro_batch or max(1, len(mine)), []
    for at in range(0, len(mine), size):
        anchors, shown = [], []
        for epoch, index in mine[at : at + size]:
            rng = recipe.anchor_rng(epoch, index)
            places, visible = objective.draw(rng, course.texts[index], recipe.anchors, recipe.block_size)
            anchors.append(places)
            shown.append(visible)
        indices = [index for _, index in mine[at : at + size]]
        texts = [course.texts[index] for index in indices]
        forced = course.teacher_forced
        parts.append((indices, make_blocks(texts, anchors, shown, recipe.block_size, mask, recipe.decay, forced)))
    return parts


def run_part(course: Course, trainee: Trainee, part: Part, scale: float) -> Outcome:
    """Forward and backward of one part; gradients add up in the drafter."""
    indices, blocks = part
    features = course.features(indices)
    # Copies from the host come first: a copy waits for the work that the device was given before it.
    labels = Labels.of(blocks.labels, blocks.weights, course.head)
    teacher = teacher_of(blocks, features) if course.recipe.soft else None
    markov = trainee.model.markov
    before = None if markov is None else before_of(course, markov, blocks)
    taps, layout = [f.taps for f in features], Layout.of(blocks, course.target.device)
    hidden = forward(trainee.model, course.target, blocks.tokens, taps, layout, course.autocast)
    return backpropagate(hidden, course.head, labels, scale, teacher, course.recipe.soft, before)


def before_of(course: Course, markov: MarkovHead, blocks: Blocks) -> Before:
    """The correction by the text's own token before each predicted one."""
    known = np.concatenate([blocks.tokens[:, :1], blocks.labels[:, :-1]], 1)
    tokens, hidden = (torch.from_numpy(x).to(course.target.device) for x in (known, blocks.tokens[:, :-1] != known))
    return Before(markov, course.target.embed(tokens).detach(), hidden, course.head)


def teacher_of(blocks: Blocks, features: Sequence[Features]) -> Teacher:
    """The target's expectation at every predicted position, `[M * (B - 1), K]`: that after the token before it."""
    last = np.repeat(blocks.lengths, blocks.counts)[:, None] - 1
    first = np.repeat(np.cumsum([0, *blocks.lengths[:-1]]), blocks.counts)[:, None]
    places = first + np.minimum(blocks.anchors[:, None] + np.arange(blocks.labels.shape[1]), last)
    teachers = [f.teacher for f in features if f.teacher is not None]
    whole = Teacher(torch.cat([t.tokens for t in teachers]), torch.cat([t.probs for t in teachers]))
    return whole[torch.from_numpy(places.ravel()).to(whole.tokens.device)]


def _nothing(course: Course) -> Outcome:
    device, positions = course.target.device, course.recipe.block_size - 1
    return Outcome(torch.zeros((), device=device), *(torch.zeros(positions, device=device) for _ in range(2)))


def _diverged(course: Course, step: int, error: ArithmeticError) -> str:
    path = state_path(course.out)
    saved = f"The last good state is in {path}" if path.exists() else "Nothing had been saved yet"
    return f"Training stopped after step {step}: {error}. {saved}; run the command again with a lower --lr."


def _save(course: Course, trainee: Trainee) -> None:
    """The state; and the drafter, if no evaluation has exported one yet."""
    if course.fleet.leads:
        save_state(course.out, trainee, course.recipe, course.origin)
        if not trainee.best:
            course.export(trainee.model, None)


def keeps_up(score: float, best: float) -> bool:
    """Whether a drafter is worth exporting beside the best one so far."""
    return score >= ALIKE * best


def _evaluate(course: Course, trainee: Trainee, watcher: Watcher) -> None:
    """Tau on held-out texts; the drafter is exported unless an earlier one was better, or if nothing is held out."""
    if not course.fleet.leads:
        return
    objective, texts = OBJECTIVES[course.recipe.objective], course.held_out[:TEXTS]
    tau = held_out_tau(
        trainee.model,
        course.target,
        course.drafting,
        texts,
        course.features(range(len(course.texts), len(course.texts) + len(texts))),
        objective.shown,
        course.autocast,
        course.teacher_forced,
    )
    watcher.tau(trainee.step, tau)
    score = next(iter(tau.values()), 0.0)
    if keeps_up(score, trainee.best):
        promised = score if tau and objective.shown == 1 else None  # that of a first drafter
        course.export(trainee.model, promised)
    trainee.best = max(trainee.best, score)
