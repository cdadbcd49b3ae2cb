"""Training: blocks by definition, the module against the drafter it becomes, exact resume, and that it learns."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.utils import filter_repo_objects
from pyarrow import parquet
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Muon
from torch.overrides import TorchFunctionMode

from draftwood import registry
from draftwood.decoder import Sight
from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_config import parse_config
from draftwood.drafters.markov import Markov, draft_of
from draftwood.engine import Engine
from draftwood.errors import BadInput, BadModel, MissingExtra
from draftwood.latency import LatencyModel, Machine
from draftwood.target import Target
from draftwood.train import attention, data, features, files, loop, loss, optimizers, shards, show, together
from draftwood.train import run as run_module
from draftwood.train.attention import Layout
from draftwood.train.blocks import OBJECTIVES, draw_anchors, make_blocks
from draftwood.train.card import card, outdated, push
from draftwood.train.data import Identity, Manifest, usual_length
from draftwood.train.distill import DistillOptions, run_distill
from draftwood.train.features import CachedReader, Reader
from draftwood.train.files import scratch_of
from draftwood.train.fleet import Fleet
from draftwood.train.holdout import forward, held_out_tau, lattices, walk
from draftwood.train.loop import (
    Course,
    Progress,
    Watcher,
    add_gradients,
    descend,
    plan_step,
    run_part,
    teacher_of,
    train,
)
from draftwood.train.loss import Before, Head, Labels, Teacher, backpropagate
from draftwood.train.model import MarkovHead, TrainableDFlash
from draftwood.train.optimizers import MARKOV_PACE, OPTIMIZERS
from draftwood.train.recipe import Recipe, drafter_config
from draftwood.train.run import TrainOptions, check_room, check_taps, describe, prepare, step_bytes
from draftwood.train.shards import Text
from draftwood.train.show import Log, Show, read_log
from draftwood.train.start import inherited, inherited_tokens, start
from draftwood.train.state import Trainee, export, load_state, save_state, state_path
from draftwood.train.stopping import stop_flag
from draftwood.train.together import DeviceReader
from tests.reference import VOCAB, plain_logits, tiny_target

MASK = 96
RECIPE = Recipe(
    layers=2, block_size=6, taps=2, steps=8, batch_size=4, anchors=5, eval_every=4, lr=3e-3, autocast=False, holdout=0.0
)
SIGHTS = [Sight(None, False), Sight(7, False), Sight(7, True)]


def some_text(job: int, length: int = 40, prompt: int = 6) -> Text:
    """Numbers that climb by a step that depends on the text: something to learn."""
    step = 2 + job % 5
    return Text(np.array([(11 * job + step * i) % 90 for i in range(length)]), prompt, 0.0, "made", job)


TEXTS = [some_text(i, 30 + 2 * i) for i in range(7)]


@pytest.fixture(scope="module")
def single() -> Target:
    """In float32: packed, like the targets of users."""
    return tiny_target(dtype=torch.float32, pack=True)


def make_course(target: Target, out: Path, recipe: Recipe = RECIPE, texts: list[Text] = TEXTS, **more) -> Course:
    config = drafter_config(recipe, target, MASK)
    reader = Reader(target, config["dflash_config"]["target_layer_ids"], recipe.soft > 0)
    held_out = more.pop("held_out", [])
    features = CachedReader(reader, [*texts, *held_out], out / "features", more.pop("limit", 1e9))
    head = Head.of(target, more.pop("tokens", None))
    return Course(recipe, config, target, head, texts, held_out, out, Fleet(), features=features, **more)


def make_trainee(course: Course) -> Trainee:
    return Trainee.of(course.form.start(course.config, course.recipe.init, course.target, 0), course.recipe)


# --- blocks ---------------------------------------------------------------------------------------------------


def test_a_block_shows_its_prefix_and_predicts_the_rest_of_the_text() -> None:
    text = some_text(1, length=12)
    blocks = make_blocks([text], [np.array([7, 9])], [np.array([1, 2])], size=5, mask=MASK, gamma=2.0)
    t = text.tokens
    assert blocks.tokens.tolist() == [[t[7], MASK, MASK, MASK, MASK], [t[9], t[10], MASK, MASK, MASK]]
    assert blocks.labels[0].tolist() == t[8:12].tolist()
    assert blocks.labels[1][1] == t[11]
    np.testing.assert_allclose(blocks.weights[0], np.exp([0, -0.5, -1, -1.5]), rtol=1e-6)
    np.testing.assert_allclose(blocks.weights[1], [0, 1, 0, 0])  # shown; predicted; behind the end twice


@pytest.mark.parametrize("objective", ["dflash", "variable-prefix"])
def test_anchors_lie_in_the_answer_and_leave_something_to_predict(objective: str) -> None:
    rng, text = np.random.default_rng(0), some_text(2, length=20, prompt=8)
    for count in (1, 5, 100):
        anchors = draw_anchors(rng, text, count)
        assert len(set(anchors)) == len(anchors) == min(count, 11)
        assert anchors.min() >= text.prompt and anchors.max() <= len(text.tokens) - 2
        shown = OBJECTIVES[objective].prefixes(rng, len(anchors), 6)
        assert (shown == 1).all() if objective == "dflash" else ((shown >= 2) & (shown <= 5)).all()
        assert (make_blocks([text], [anchors], [shown], 6, MASK, 4.0).weights.max(1) == 1).all()


def test_anchors_are_drawn_anew_in_every_epoch_and_every_text_is_seen_once_in_it() -> None:
    places = [pair for step in range(6) for pair in RECIPE.batch(step, 8)]
    assert [epoch for epoch, _ in places] == sorted(epoch for epoch, _ in places)
    for epoch in range(3):
        assert sorted(text for e, text in places if e == epoch) == list(range(8))
    assert [t for e, t in places if e == 0] != [t for e, t in places if e == 1]
    draws = [draw_anchors(RECIPE.anchor_rng(epoch, 3), some_text(3), 5).tolist() for epoch in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [Recipe(lr=1e-3, warmup=0.1).rate(step, 100) for step in range(100)]
    assert rates[:3] == pytest.approx([1e-4, 2e-4, 3e-4]) and max(rates) == pytest.approx(1e-3)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:])) and 1e-4 <= rates[-1] < 1.1e-4


# --- attention and the module ---------------------------------------------------------------------------------


def attention_inputs(counts: tuple[int, ...] = (3, 1, 2)) -> tuple[Layout, list[Tensor]]:
    torch.manual_seed(0)
    layout = Layout(4, (9, 5, 20), counts, torch.tensor([2, 5, 7, 3, 0, 19]))
    q, k, v = (torch.randn(24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    ck, cv = (torch.randn(34, 2, 8, dtype=torch.float64) for _ in range(2))
    return layout, [q, ck, cv, k, v]


def block_alone(layout: Layout, inputs: list[Tensor], sight: Sight, block: int) -> Tensor:
    """One block by definition: its own text's features before the anchor, and itself, under one mask."""
    q, ck, cv, k, v = inputs
    text = int(np.searchsorted(np.cumsum(layout.counts), block, side="right"))
    begin, anchor = sum(layout.lengths[:text]), int(layout.anchors[block])
    own = slice(4 * block, 4 * block + 4)
    keys, values = (torch.cat([far[begin : begin + anchor], near[own]]) for far, near in ((ck, k), (cv, v)))
    ahead = torch.arange(anchor + 4) - (anchor + torch.arange(4))[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if sight.window is not None:
        seen &= ahead.abs() < sight.window
    if sight.causal:
        seen &= ahead <= 0
    heads = (q[own].transpose(0, 1), *(x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values)))
    return F.scaled_dot_product_attention(*heads, seen).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("make", [attention.text_by_text, attention.side_by_side])
@pytest.mark.parametrize("sight", SIGHTS)
def test_many_blocks_at_once_are_each_block_alone(make: Callable, sight: Sight) -> None:
    layout, inputs = attention_inputs()
    together = make(layout, sight)(*inputs)
    alone = torch.cat([block_alone(layout, inputs, sight, b) for b in range(6)])
    torch.testing.assert_close(together, alone)


@pytest.fixture(params=["llama", "qwen3"])
def double(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param)


@pytest.mark.parametrize("trimmed", [False, True])
def test_the_exported_drafter_drafts_what_the_module_predicts(double: Target, trimmed: bool, tmp_path: Path) -> None:
    kept = torch.arange(0, VOCAB, 3) if trimmed else None
    course = make_course(double, tmp_path, tokens=kept)
    model = noisy_model(course)
    export(tmp_path, model, course.config, kept)
    drafter = DFlashDrafter.load(str(tmp_path), double)
    text, shown = TEXTS[4], 1
    taps = taps_by_transformers(double, text, drafter.tap_layers)
    found = drafts_of(model, course, text, taps, shown)
    for place, draft in enumerate(found[:8]):
        at = text.prompt + place
        state = drafter.open(64)
        drafter.extend(state, text.tokens[:at].tolist(), taps[:at])
        expected = drafter.draft([Request(state, int(text.tokens[at]), 5)])[0]
        np.testing.assert_array_equal(draft.lattice.tokens, expected.lattice.tokens)
        np.testing.assert_allclose(draft.lattice.logp, expected.lattice.logp, atol=1e-5)
        np.testing.assert_allclose(draft.pairs, expected.pairs, atol=1e-4)
        assert np.abs(draft.pairs - draft.lattice.logp[1:, None]).max() > 0.1
        assert not trimmed or set(expected.lattice.tokens.ravel().tolist()) <= set(kept.tolist())


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


@torch.no_grad()
def drafts_of(model: TrainableDFlash, course: Course, text: Text, taps: Tensor, shown: int) -> list:
    anchors = np.arange(text.prompt, len(text.tokens) - 1)
    size = course.recipe.block_size
    blocks = make_blocks([text], [anchors], [np.full(len(anchors), shown)], size, MASK, 4.0)
    hidden = forward(model, course.target, blocks.tokens, [taps], Layout.of(blocks, taps.device))
    markov = Markov.of(*model.markov.matrices, course.target, course.head.tokens)
    return [draft_of(course.head.logits(h), 8, course.head.tokens, markov) for h in hidden]


def test_texts_do_not_see_each_other(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    model = make_trainee(course).model
    anchors = [np.array([8, 11]), np.array([9]), np.array([6, 20, 21])]
    texts, taps = TEXTS[:3], [f.taps for f in course.features(range(3))]

    def run(which: list[int]) -> Tensor:
        chosen = [anchors[i] for i in which]
        blocks = make_blocks([texts[i] for i in which], chosen, [np.ones(len(a), int) for a in chosen], 6, MASK, 4.0)
        layout = Layout.of(blocks, single.device)
        return forward(model, single, blocks.tokens, [taps[i] for i in which], layout)

    together = run([0, 1, 2])
    torch.testing.assert_close(together, torch.cat([run([0]), run([1]), run([2])]), atol=1e-5, rtol=1e-4)


# --- the loss -------------------------------------------------------------------------------------------------


def test_a_head_in_float16_is_widened() -> None:
    """Gradients of unlikely tokens are below what float16 can tell from 0."""
    assert Head.of(tiny_target(dtype=torch.float16), None).weight.dtype == torch.float32


@pytest.mark.parametrize(("soft", "paired"), [(0.0, False), (0.4, False), (0.4, True)])
def test_the_chunked_loss_is_the_plain_one(
    single: Target, soft: float, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.train.loss.CHUNK", 7)
    torch.manual_seed(0)
    kept = torch.arange(0, VOCAB, 2)
    head = Head.of(single, kept)
    hidden = torch.randn(6, 5, 32, requires_grad=True)
    labels, weights = torch.randint(VOCAB, (6, 5)), torch.rand(6, 5)
    weights[0, 2:] = 0
    asked = Labels.of(labels.numpy(), weights.numpy(), head)
    teacher = Teacher(torch.randint(VOCAB, (30, 3)), torch.rand(30, 3).softmax(-1))
    markov, embedded, unseen = MarkovHead(32, 4), torch.randn(6, 5, 32), torch.rand(6, 5) < 0.7
    before = Before(markov, embedded, unseen, head) if paired else None
    outcome = backpropagate(hidden, head, asked, 0.5, teacher, soft, before)
    learning = [hidden, *(markov.parameters() if paired else ())]
    found = [parameter.grad for parameter in learning]
    for parameter in learning:
        parameter.grad = None
    logits = hidden @ single.head_rows(None)[0][kept].T
    if paired:  # a token before that the block shows has had its say
        one, other = markov.tables(embedded, head.weight)
        logits = torch.where(unseen[..., None], logits + one @ other.T, logits)
    logp = logits.log_softmax(-1).flatten(0, 1)
    loss = torch.zeros(())
    for n, (label, weight) in enumerate(zip(labels.flatten().tolist(), weights.flatten(), strict=True)):
        hard = -logp[n, label // 2] if label % 2 == 0 else 0.0
        known = {int(t): p for t, p in zip(teacher.tokens[n], teacher.probs[n], strict=True) if t % 2 == 0}
        both = [(t, p) for t, p in zip(teacher.tokens[n].tolist(), teacher.probs[n], strict=True) if t in known]
        total = sum(p for _, p in both)
        softly = -sum(p / total * logp[n, t // 2] for t, p in both) if both else 0.0
        loss = loss + weight * ((1 - soft) * hard + soft * softly)
    (0.5 * loss).backward()
    torch.testing.assert_close(outcome.loss, loss.detach())
    torch.testing.assert_close(found, [parameter.grad for parameter in learning])
    assert outcome.total.tolist() == [6, 6, 5, 5, 5]
    best = 2 * logp.argmax(-1).view(6, 5)
    assert outcome.right.tolist() == ((best == labels) & (weights > 0)).sum(0).tolist()


def test_the_teacher_of_a_position_is_what_the_target_expects_there(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path, replace(RECIPE, soft=0.5))
    anchors = [np.array([8, 30]), np.array([7])]
    texts = TEXTS[1:3]
    blocks = make_blocks(texts, anchors, [np.ones(2, int), np.ones(1, int)], 6, MASK, 4.0)
    teacher = teacher_of(blocks, course.features([1, 2]))
    expected = [plain_logits(single, t.tokens.tolist()).softmax(-1) for t in texts]
    row = 0
    for text, places, probs in zip(texts, anchors, expected, strict=True):
        for anchor in places:
            for position in range(1, 6):
                if anchor + position < len(text.tokens):
                    values, tokens = probs[anchor + position - 1].topk(4)
                    assert teacher.tokens[row][:4].tolist() == tokens.tolist()
                    torch.testing.assert_close(teacher.probs[row][:4], values, atol=5e-3, rtol=1e-2)
                row += 1


# --- features -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
def test_features_are_the_same_from_target_and_disk(single: Target, tmp_path: Path, soft: bool) -> None:
    reader = Reader(single, [0, 1], soft)
    limit = float(sum(features.row_bytes(len(t.tokens), reader.width) for t in TEXTS[:4]) + 10)
    cached = CachedReader(reader, TEXTS, tmp_path, limit)
    fresh = [reader.unpack(reader.row(t.tokens)) for t in TEXTS]
    for again in (cached, cached, CachedReader(reader, TEXTS, tmp_path, limit)):
        for i, expected in enumerate(fresh):
            found = again([i])[0]
            assert torch.equal(found.taps, expected.taps)
            assert not soft or torch.equal(found.teacher.tokens, expected.teacher.tokens)
    torch.testing.assert_close(
        fresh[2].taps.float(), taps_by_transformers(single, TEXTS[2], (0, 1)), rtol=1e-2, atol=1e-2
    )
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4 and sum(file.stat().st_size for file in files) <= limit
    for file, damage in zip(files, (b"", b"\x00", b"\x01" * 700), strict=False):  # as a power cut may leave it
        file.write_bytes(damage + file.read_bytes()[len(damage) :] if damage else b"")
    again = CachedReader(reader, TEXTS, tmp_path, limit)
    assert all(torch.equal(again([i])[0].taps, fresh[i].taps) for i in range(4))


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("kept", "beside"), [(0, 0), (3, 0), (2, 3), (7, 0), (0, 7)])
def test_texts_read_together_are_each_text_alone(
    soft: bool, family: str, kept: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "TOKENS", 70)
    reader = Reader(tiny_target(family, "lean", dtype=torch.float32), [0, 1], soft)
    unpacked = reader.width + soft * features.TEACHER_NUMBERS
    here = [features.row_bytes(len(t.tokens), unpacked) for t in TEXTS]
    pinned = [1 << (features.row_bytes(len(t.tokens), reader.width) - 1).bit_length() for t in TEXTS]
    source = DeviceReader(reader, TEXTS, sum(here[:kept]), sum(pinned[kept : kept + beside]))
    asked = [6, 2, 0, 5, 2, 1, 4, 3]
    for _ in range(2):
        for i, found in zip(asked, source(asked), strict=True):
            expected = reader.unpack(reader.row(TEXTS[i].tokens))
            torch.testing.assert_close(found.taps, expected.taps, rtol=1e-2, atol=1e-2)
            assert not soft or torch.equal(found.teacher.tokens, expected.teacher.tokens)
    assert sorted(source._kept) == list(range(kept)) and sorted(source._beside) == list(range(kept, kept + beside))


def test_every_text_is_in_one_group_and_groups_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "TOKENS", 20)
    lengths = [3, 9, 30, 4, 10, 10, 1]
    made = together.groups(lengths)
    assert sorted(i for group in made for i in group) == list(range(7))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 20 for group in made)
    assert len(made) < 7


class CountingReader(Reader):
    """Counts what goes through the target."""

    computed = 0

    def row(self, tokens: np.ndarray) -> Tensor:
        self.computed += 1
        return super().row(tokens)


def test_what_is_cached_is_used_again_by_other_runs(single: Target, tmp_path: Path) -> None:
    def computed(texts: list[Text], taps: tuple[int, ...] = (0, 1), limit: float = 1e9) -> int:
        reader = CountingReader(single, taps, False)
        cached = CachedReader(reader, texts, tmp_path, limit)
        for i, text in enumerate(texts):
            assert torch.equal(cached([i])[0].taps, reader.unpack(Reader.row(reader, text.tokens)).taps)
        return reader.computed

    assert computed(TEXTS[:3]) == 3
    assert computed([TEXTS[5], *TEXTS[:3]]) == 1  # a new one in front of them
    assert computed(TEXTS[1:4]) == 1
    assert computed([TEXTS[0], TEXTS[0]], taps=(1,)) == 1  # other layers of the same text
    assert computed([replace(TEXTS[0], tokens=TEXTS[0].tokens[:20])]) == 1
    assert computed([TEXTS[6]], limit=0) == 1 and computed([TEXTS[6]]) == 1
    files = features.cached_files(tmp_path)
    oldest, room = list(files)[-1], features.row_bytes(len(TEXTS[4].tokens), 64)
    assert computed([TEXTS[4]], limit=sum(files.values()) + room - 1) == 1  # one file too many
    left = features.cached_files(tmp_path)
    assert sum(left.values()) <= sum(files.values()) + room - 1
    assert files.keys() - left.keys() == {oldest} and len(left) == len(files)


def test_features_stay_where_they_are_if_data_are_added(tmp_path: Path) -> None:
    (tmp_path / "old" / "features").mkdir(parents=True)
    folders = [tmp_path / "new", tmp_path / "old"]
    assert features.feature_folder(folders) == tmp_path / "old" / "features"
    assert features.feature_folder(folders[:1]) == tmp_path / "new" / "features"


def test_a_disk_that_fills_up_costs_time_only(single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    reader = Reader(single, [0], False)
    cached = CachedReader(reader, TEXTS, tmp_path, 1e9)
    assert torch.equal(cached([0])[0].taps, reader.unpack(reader.row(TEXTS[0].tokens)).taps)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_the_work(single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.train.files.free_bytes", lambda folder: 100)
    with pytest.raises(BadInput, match="free"):
        CachedReader(Reader(single, [0], False), TEXTS, tmp_path, 1e9)


def test_features_of_other_texts_make_room_before_the_disk_is_called_full(
    single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, room = tmp_path / "other.features", 10**6
    other.write_bytes(bytes(room))
    monkeypatch.setattr("draftwood.train.files.free_bytes", lambda folder: 100)
    CachedReader(Reader(single, [0], False), TEXTS, tmp_path, room)
    assert not other.exists()


def test_a_folder_for_features_that_is_none_is_refused(single: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--features .*file"):
        CachedReader(Reader(single, [0], False), TEXTS, tmp_path / "file", 1e9)


@pytest.mark.parametrize(
    ("page", "old"), [(None, True), ("300 of 500 steps", True), ("500 of 500 steps", False), ("Mine.", False)]
)
def test_a_card_of_a_run_that_had_not_ended_is_written_anew(page: str | None, old: bool, tmp_path: Path) -> None:
    if page is not None:
        (tmp_path / "README.md").write_text(page)
    assert outdated(tmp_path / "README.md", 500) is old


def test_a_run_that_goes_on_needs_no_room_for_what_it_saved(
    single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = make_course(single, tmp_path)
    trainee = make_trainee(course)
    parameters = sum(p.numel() for p in trainee.model.parameters())
    monkeypatch.setattr("draftwood.train.files.free_bytes", lambda folder: 20 * parameters)
    with pytest.raises(BadInput, match="the state of the run needs"):
        check_room(course, trainee.model)
    state_path(tmp_path).parent.mkdir(exist_ok=True)
    state_path(tmp_path).write_bytes(bytes(12 * parameters))
    check_room(course, trainee.model)
    state_path(tmp_path).rename(scratch_of(state_path(tmp_path)))  # a save that was cut off
    check_room(course, trainee.model)


def test_a_step_counts_what_its_process_keeps(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    head = 12.0 * course.head.chunk * len(course.head.weight)
    half = replace(course, fleet=Fleet(0, 2))
    assert step_bytes(half) - head == (step_bytes(course) - head) / 2
    forced = replace(course, recipe=replace(RECIPE, objective="eagle3", anchors=1))
    of_a_block = (step_bytes(course) - head) / RECIPE.layers / RECIPE.anchors
    assert step_bytes(forced) - head == of_a_block * len(TEXTS[-1].tokens), "one begins at every token"


def test_muon_steps_as_pytorch_does() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((24, 48), (48, 24), (24, 48), (30, 30))]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    both = optimizers.Muon({"params": ours, **options}), Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        for optimizer in both:
            optimizer.step()
    for one, other, before in zip(ours, theirs, start, strict=True):
        moved = torch.linalg.vector_norm(other - before)
        assert torch.linalg.vector_norm(one - other) < 0.02 * moved


# --- the run --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What nothing catches."""


def run_to_the_end(course: Course) -> Trainee:
    trainee = make_trainee(course)
    load_state(course.out, trainee, course.recipe, course.origin)
    assert train(course, trainee, Show(course.out, lambda done, text: None, lambda: False).watcher())
    return trainee


def first_step(single: Target, out: Path, optimizer: str) -> tuple[float, dict[str, Tensor]]:
    """The rate of a run's first step, and how it moved each parameter."""
    course = make_course(single, out, replace(RECIPE, optimizer=optimizer))
    trainee = make_trainee(course)
    before = {name: parameter.detach().clone() for name, parameter in trainee.model.named_parameters()}
    rate = descend(course, trainee, add_gradients(course, trainee)).rate
    return rate, {name: p.detach() - before[name] for name, p in trainee.model.named_parameters()}


def test_scores_of_pairs_have_a_rate_of_their_own(single: Target, tmp_path: Path) -> None:
    """Adam's first step moves a weight by its rate."""
    rate, moved = first_step(single, tmp_path, "adamw")
    assert float(moved["fc.weight"].abs().max()) == pytest.approx(rate, rel=0.01)
    assert float(moved["markov.after.weight"].abs().max()) == pytest.approx(MARKOV_PACE * rate, rel=0.01)


def test_muon_moves_matrices_in_all_directions_alike(single: Target, tmp_path: Path) -> None:
    """Newton and Schulz's five iterations bring singular values to 0.5 … 1.5; AdamW moves them as if there were one."""
    spread = {}
    for optimizer in OPTIMIZERS:
        rate, moved = first_step(single, tmp_path / optimizer, optimizer)
        values = torch.linalg.svdvals(moved["fc.weight"])
        spread[optimizer] = float(values[0] / values[len(values) // 2])
        assert float(moved["norm.weight"].abs().max()) == pytest.approx(rate, rel=0.01)  # a vector, AdamW's
    assert spread["muon"] < 3 < spread["adamw"]


@pytest.mark.parametrize("native", [True, False])
def test_products_are_in_bf16_only_where_the_processor_has_them(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take ten times as long elsewhere: autocast, the head of a bf16 target, and PyTorch's Muon ask for them."""
    met: list[torch.dtype] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.mm, Tensor.matmul, Tensor.__matmul__, F.linear):
                met.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    for user in (loss, loop, optimizers):
        monkeypatch.setattr(user, "computes_bf16", lambda device: native)
    target = tiny_target(dtype=torch.bfloat16)
    course = make_course(target, tmp_path, replace(RECIPE, optimizer="muon", autocast=True, soft=0.5))
    trainee = make_trainee(course)
    course.features(range(len(TEXTS)))  # by the target's own products, which stay as they are
    with Watch():
        descend(course, trainee, add_gradients(course, trainee))
    assert (torch.bfloat16 in met) == native and course.autocast == native


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_killed_run_that_is_resumed_is_the_same_run(
    single: Target, tmp_path: Path, objective: str, optimizer: str
) -> None:
    recipe = replace(RECIPE, objective=objective, optimizer=optimizer, save_minutes=0.0, soft=0.3)
    whole = run_to_the_end(make_course(single, tmp_path / "whole", recipe))
    for step, moment in ((3, "after a step"), (5, "while saving")):
        course = make_course(single, tmp_path / "parts", recipe)
        with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
            kill_at(step, moment, patch)
            run_to_the_end(course)
    resumed = run_to_the_end(make_course(single, tmp_path / "parts", recipe))
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    states = [load_file(state_path(tmp_path / run)) for run in ("whole", "parts")]
    matrices = [n for n, p in whole.model.named_parameters() if p.ndim == 2 and not n.startswith("markov.")]
    spared = len(matrices) if optimizer == "muon" else 0  # it remembers one moment instead of two
    assert len(states[0]) == 3 * len(whole.model.state_dict()) - spared and states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    logs = [[x["loss"] for x in read_log(tmp_path / run) if "loss" in x] for run in ("whole", "parts")]
    assert len(logs[0]) == 8 and logs[0] == logs[1]


def kill_at(step: int, moment: str, patch: pytest.MonkeyPatch) -> None:
    """In the middle of a step's log line, or of a state that is being written."""
    if moment == "while saving":
        replace_file = __import__("os").replace

        def torn(source: Path, goal: Path) -> None:
            if goal.name == "state.safetensors" and f'"{step}"' in str(source.read_bytes()[:20000]):
                source.write_bytes(source.read_bytes()[:1000])
                raise Killed
            replace_file(source, goal)

        patch.setattr("draftwood.train.files.os.replace", torn)
        return
    write = Log.write

    def cut(self: Log, line: dict) -> None:
        if line["step"] == step:
            self._file.write('{"step": ')
            self._file.flush()
            raise Killed
        write(self, line)

    patch.setattr(Log, "write", cut)


def test_asking_to_stop_saves(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    trainee, asked = make_trainee(course), iter([False, False, True])
    assert not train(course, trainee, Watcher(stop=lambda: next(asked)))
    again = make_trainee(course)
    assert load_state(tmp_path, again, RECIPE, course.origin) and again.step == 2
    DFlashDrafter.load(str(tmp_path), single)  # there is a drafter already


def test_a_loss_that_is_no_number_keeps_the_last_good_state(single: Target, tmp_path: Path) -> None:
    """The weights that led nowhere are not saved: from those before them a lower rate may lead on."""
    course = make_course(single, tmp_path, replace(RECIPE, save_minutes=0.0))
    trainee = make_trainee(course)
    good: dict[int, list[Tensor]] = {}

    def poison(progress: Progress) -> None:
        good[progress.step] = [p.detach().clone() for p in trainee.model.parameters()]
        if progress.step == 3:
            single_nan(course)

    with pytest.raises(BadInput, match=r"step 3.*nan.*state.safetensors.*--lr"):
        train(course, trainee, Watcher(step=poison))
    again = make_trainee(course)
    recipe = replace(course.recipe, lr=1e-4)
    assert load_state(tmp_path, again, recipe, course.origin) and again.step == 2
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), good[2], strict=True))
    with pytest.raises(BadInput, match="Nothing had been saved"):
        train(replace(course, out=tmp_path / "new"), make_trainee(course), Watcher())


def single_nan(course: Course) -> None:
    """From now on features are not numbers."""
    read = course.features

    def broken(indices: list[int]):
        return [replace(features, taps=features.taps * math.nan) for features in read(indices)]

    object.__setattr__(course, "features", broken)


def test_the_target_stays_outside_of_autocast(single: Target, tmp_path: Path) -> None:
    """Nothing is cached here: evaluation and steps read features through the target itself."""
    texts = [some_text(i, 230) for i in range(2)]
    recipe = replace(RECIPE, autocast=True, steps=2, eval_every=1)
    course = make_course(single, tmp_path, recipe, texts, held_out=texts[:1], limit=0)
    fresh = course.features([0])[0].taps
    run_to_the_end(course)
    assert torch.equal(course.features([0])[0].taps, fresh)
    assert all("dflash" in line["tau"] for line in read_log(tmp_path) if "tau" in line)


def test_no_time_left_is_told_before_there_is_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on begins with all that was done before."""
    monkeypatch.setattr(show, "LINE_EVERY_S", -1)
    with show.bar(100, "training") as update:
        update(40, "so far")
        update(41, "and on")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "training 40/100  so far" and second.endswith("0 min left")


def test_the_latest_drafter_is_exported_unless_an_earlier_one_was_clearly_better(
    single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, exported = iter([2.0, 1.97, 1.95, 2.1, 2.0]), list[float]()
    monkeypatch.setattr(loop, "held_out_tau", lambda *_: {"dflash": next(measured)})
    monkeypatch.setattr(Course, "export", lambda _course, _model, tau: exported.append(tau))
    run_to_the_end(make_course(single, tmp_path, replace(RECIPE, steps=5, eval_every=1)))
    assert exported == [2.0, 1.97, 2.1]


def test_the_card_marks_what_was_exported_however_long_ago(
    single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, kept = iter([2.0, 2.4, 2.36, 2.3, 2.2, 2.1, 2.0, 1.9]), list[float]()
    monkeypatch.setattr(loop, "held_out_tau", lambda *_: {"dflash": next(measured)})
    monkeypatch.setattr(Course, "export", lambda _course, _model, tau: kept.append(tau))
    course = make_course(single, tmp_path, replace(RECIPE, eval_every=1))
    run_to_the_end(course)
    rows = [line for line in card(course, 8).splitlines() if re.fullmatch(r"\| \d.* \| [\d.]+ \|", line)]
    assert kept[-1] == 2.36 and rows[0] == "| 3, this drafter | 2.36 |"
    assert rows[1:] == [
        f"| {step} | {tau:.2f} |" for step, tau in zip(range(4, 9), [2.3, 2.2, 2.1, 2.0, 1.9], strict=True)
    ]


def test_micro_batches_add_up(single: Target, tmp_path: Path) -> None:
    gradients = []
    for micro in (None, 1, 3):
        course = make_course(single, tmp_path, replace(RECIPE, micro_batch=micro, clip=1e9))
        trainee = make_trainee(course)
        add_gradients(course, trainee)
        gradients.append([p.grad.clone() for p in trainee.model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_processes_share_the_work(single: Target, tmp_path: Path) -> None:
    """The gradients of two processes, each with its share of the texts, add up to those of one."""
    sums = []
    for size in (1, 2):
        trainee = make_trainee(make_course(single, tmp_path))
        for rank in range(size):
            course = replace(make_course(single, tmp_path), fleet=Fleet(rank, size))
            for part in plan_step(course, step=1):
                run_part(course, trainee, part, scale=0.01)
        sums.append([p.grad for p in trainee.model.parameters()])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"block_size": 4}, "--block-size"), ({"objective": "variable-prefix"}, "--objective"), ({"seed": 2}, "--seed")],
)
def test_another_recipe_is_not_resumed(single: Target, tmp_path: Path, changed: dict, says: str) -> None:
    course = make_course(single, tmp_path)
    trainee = make_trainee(course)
    save_state(tmp_path, trainee, RECIPE, course.origin)
    with pytest.raises(BadInput, match=says):
        load_state(tmp_path, trainee, replace(RECIPE, **changed), course.origin)
    with pytest.raises(BadInput, match="another data"):
        load_state(tmp_path, trainee, RECIPE, {**course.origin, "data": "7 texts, 0"})
    state_path(tmp_path).write_bytes(b"no state")
    with pytest.raises(BadInput, match="damaged"):
        load_state(tmp_path, trainee, RECIPE, course.origin)


def test_a_run_is_not_resumed_as_another_drafter_or_in_another_dtype(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    trainee = make_trainee(course)
    save_state(tmp_path, trainee, RECIPE, course.origin)
    changed = {
        "list of draft tokens": replace(course, head=Head.of(single, torch.tensor([5, 7, 8]))),
        "mask token": replace(course, config=drafter_config(RECIPE, single, MASK - 1)),
        "window": replace(course, config=drafter_config(RECIPE, single, MASK, first={"sliding_window": 64})),
        "dtype": replace(course, target=tiny_target(dtype=torch.bfloat16)),
    }
    for what, other in changed.items():
        with pytest.raises(BadInput, match=f"a run with another {what} .* instead of"):
            load_state(tmp_path, trainee, RECIPE, other.origin | {"target": course.origin["target"]})
    save_state(tmp_path, trainee, RECIPE, {what: course.origin[what] for what in ("target", "data")})
    assert load_state(tmp_path, trainee, RECIPE, course.origin), "an earlier version's"


def test_a_checkpoint_to_begin_from_decides_what_is_read_and_other_taps_are_refused(single: Target) -> None:
    first = {"target_layer_ids": [0, 1]}
    for taps in (2, Recipe().taps):
        found = drafter_config(replace(RECIPE, taps=taps), single, MASK, first=first)
        assert found["dflash_config"]["target_layer_ids"] == [0, 1]
    with pytest.raises(BadInput, match=r"--taps is 3, but --init old/drafter reads 2 target layers"):
        drafter_config(replace(RECIPE, taps=3, init="old/drafter"), single, MASK, first=first)


def test_a_run_may_start_from_a_checkpoint_of_the_same_shape(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    model = noisy_model(course)
    export(tmp_path, model, course.config, None)
    again = start(course.config, str(tmp_path), single, 0)
    assert all(torch.equal(a, b.float()) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    with pytest.raises(BadModel, match="another"):
        start({**course.config, "intermediate_size": 24}, str(tmp_path), single, 0)
    with pytest.raises(BadModel, match="has 2 layers; give --layers 2"):
        start({**course.config, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, str(tmp_path), single, 0)


def test_a_drafter_that_goes_on_from_a_checkpoint_reads_the_same_target_layers(single: Target, tmp_path: Path) -> None:
    recipe = replace(RECIPE, taps=1)
    course = make_course(single, tmp_path, recipe)
    config = drafter_config(recipe, single, 7, first={"target_layer_ids": [0]})
    export(tmp_path, start(config, "random", single, 0), config, None)
    first = inherited(str(tmp_path))
    assert (first["target_layer_ids"], first["mask_token_id"]) == ([0], 7)
    assert course.config["dflash_config"]["target_layer_ids"] != [0]
    again = drafter_config(recipe, single, first["mask_token_id"], first=first)
    start(again, str(tmp_path), single, 0)
    assert again == config and inherited("target") == inherited("random") == {}


def test_a_checkpoint_of_other_heads_than_the_targets_is_gone_on_from_as_it_is(single: Target, tmp_path: Path) -> None:
    theirs = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True}
    rope = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = {**drafter_config(RECIPE, single, MASK), **theirs, **rope, "input_embedding_scale": 3.0}
    model = start(config, "random", single, 0)
    export(tmp_path, model, config, None)
    again = drafter_config(RECIPE, single, MASK, first=inherited(str(tmp_path)))
    assert parse_config(again, "again") == parse_config(config, "before")
    start(again, str(tmp_path), single, 0)


def test_rotary_settings_that_depend_on_the_length_are_the_targets_alone(
    single: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"longrope": {"short_factor": [1.0]}, "dynamic": {"factor": 2.0}, "linear": {"factor": 2.0}}
    for kind, more in kinds.items():
        settings = {"rope_type": kind, "rope_theta": 500.0, **more}
        monkeypatch.setattr(single.config, "rope_parameters", settings)
        rope = parse_config(drafter_config(RECIPE, single, MASK), "made").rope
        assert rope["rope_theta"] == 500.0 and rope["rope_type"] == (kind if kind == "linear" else "default")


def test_a_drafter_that_goes_on_from_a_checkpoint_proposes_the_same_tokens(single: Target, tmp_path: Path) -> None:
    config = drafter_config(RECIPE, single, MASK)
    export(tmp_path, start(config, "random", single, 0), config, torch.tensor([3, 5, 8]))
    assert inherited_tokens(str(tmp_path), VOCAB) == [3, 5, 8] and inherited_tokens("target", VOCAB) is None
    export(tmp_path, start(config, "random", single, 0), config, None)
    assert inherited_tokens(str(tmp_path), VOCAB) is None, "all of them"


def test_a_causal_drafter_may_go_on_from_one_that_is_not_and_stays_causal(single: Target, tmp_path: Path) -> None:
    plain, causal = drafter_config(RECIPE, single, MASK), drafter_config(replace(RECIPE, causal=True), single, MASK)
    (tmp_path / "plain").mkdir()
    (tmp_path / "causal").mkdir()
    export(tmp_path / "plain", start(plain, "random", single, 0), plain, None)
    model = start(causal, str(tmp_path / "plain"), single, 0)
    assert model.config.causal and not parse_config(plain, "plain").causal
    export(tmp_path / "causal", model, causal, None)
    assert drafter_config(RECIPE, single, MASK, first=inherited(str(tmp_path / "causal"))) == causal


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_what_every_layer_looks_back_and_goes_on_from_a_checkpoint(
    single: Target, tmp_path: Path, causal: bool
) -> None:
    recipe = replace(RECIPE, causal=causal, window=9)
    config = drafter_config(recipe, single, MASK, first={"sliding_window": 70})
    assert parse_config(config, "windowed").sights == (Sight(9, causal),) * 2
    export(tmp_path, start(config, "random", single, 0), config, None)
    first = inherited(str(tmp_path))
    assert drafter_config(RECIPE, single, MASK, first=first) == config
    assert parse_config(drafter_config(replace(RECIPE, window=0), single, MASK, first=first), "whole").window is None
    assert parse_config({**config, "layer_types": ["full_attention", "sliding_attention"]}, "mixed").window is None
    with pytest.raises(BadInput, match=r"--block-size is 10, but --init old looks back 9 tokens"):
        drafter_config(replace(RECIPE, block_size=10, init="old"), single, MASK, first=first)
    with pytest.raises(BadInput, match="--window is 5; it must be 0"):
        replace(RECIPE, window=5)


def test_a_drafter_looks_back_as_far_as_most_texts_are_long() -> None:
    texts = [some_text(1, length=length) for length in [40] * 17 + [100, 120, 3000]]
    assert usual_length(texts) == 128 and usual_length(texts[:17]) == 64
    assert usual_length(texts, 64) == 128 and usual_length(texts[:17], 80) == 128, "and no less than a block"


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_block_predicts_what_a_longer_one_begins_with(single: Target, tmp_path: Path, causal: bool) -> None:
    recipe = replace(RECIPE, causal=causal)
    model, text = noisy_model(make_course(single, tmp_path, recipe)), TEXTS[4]
    taps = taps_by_transformers(single, text, model.config.target_layer_ids)
    hidden = []
    for size in (6, 3):
        blocks = make_blocks([text], [np.arange(8, 20)], [np.ones(12, np.int64)], size, MASK, 1.0)
        hidden.append(forward(model, single, blocks.tokens, [taps], Layout.of(blocks, single.device))[:, :2])
    assert torch.allclose(*hidden, atol=1e-5) is causal


@pytest.mark.parametrize(("flag", "found", "meant"), [("optimizer", "moun", "muon"), ("objective", "dflsh", "dflash")])
def test_a_name_that_does_not_exist_is_refused_with_the_nearest_one(flag: str, found: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"--{flag} is '{found}'; expected one of .*Did you mean '{meant}'"):
        replace(RECIPE, **{flag: found})


def test_more_layers_than_the_target_has_are_refused_before_any_work(single: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--layers 1000000.*more layers than"):
        prepare(TrainOptions([tmp_path], tmp_path), replace(RECIPE, layers=1_000_000), single, Fleet())


def test_more_taps_than_the_target_has_layers_are_refused_before_any_work(single: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--taps 999.*more layers than"):
        prepare(TrainOptions([tmp_path], tmp_path), replace(RECIPE, taps=999), single, Fleet())
    check_taps(replace(RECIPE, taps=Recipe().taps), single)  # which nobody chose, and less will do


@pytest.mark.parametrize(("name", "value"), [("lr", math.nan), ("lr", 1.0), ("soft", 1.5), ("holdout", 0.95)])
def test_a_number_out_of_its_range_is_told_the_range(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=rf"--{name} is {value}; it must be a finite number .*\d"):
        replace(RECIPE, **{name: value})


def test_a_folder_is_trained_in_by_one_run_at_a_time_and_is_none_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = iter([Fleet(), Fleet(rank=1, size=2)])
    monkeypatch.setattr(run_module.Fleet, "join", lambda: next(fleets))
    monkeypatch.setattr(run_module, "_run", lambda options, recipe, fleet: not fleet.leads)
    options = TrainOptions([tmp_path / "texts"], tmp_path / "out")
    with files.alone(tmp_path), pytest.raises(BadInput, match=r"--out .*another process"):
        run_module.run_training(replace(options, out=tmp_path), RECIPE)
    with files.alone(tmp_path):
        assert run_module.run_training(replace(options, out=tmp_path), RECIPE), "the others of a fleet share its folder"
    with pytest.raises(BadInput, match="a folder of --data"):
        run_module.run_training(replace(options, out=tmp_path / "x" / ".." / "texts"), RECIPE)
    assert not (tmp_path / "texts").exists()


def test_it_begins_as_the_end_of_its_target(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    model = start(course.config, "target", single, 0)
    source = tiny_target(dtype=torch.float32).model.model
    for layer, theirs in zip(model.layers, source.layers[-2:], strict=True):
        for part in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            assert torch.equal(layer.get_submodule(part).weight, theirs.get_submodule(part).weight)
    taps = torch.randn(3, 64)
    assert torch.equal(model.fc(taps), taps[:, -32:])


# --- it learns ------------------------------------------------------------------------------------------------


def greedy_texts(target: Target, count: int, length: int) -> list[Text]:
    """What the target itself writes at temperature 0."""
    texts = []
    for job in range(count):
        tokens = [(13 * job + 7 * i) % 90 for i in range(5)]
        while len(tokens) < length:
            tokens.append(int(plain_logits(target, tokens)[-1].argmax()))
        texts.append(Text(np.array(tokens), 5, 0.0, "greedy", job))
    return texts


def engine_rounds(target: Target, drafter: DFlashDrafter, text: Text, policy: str) -> list[int]:
    """Tokens of each round of a real run over the text."""
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)
    engine = Engine(target, drafter, registry.policy(policy), latency)
    steps = engine.run(text.tokens[: text.prompt].tolist(), len(text.tokens) - text.prompt)
    return [len(step.tokens) for step in steps if step.round]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Course, Trainee, DFlashDrafter]]:
    """A drafter that has seen six texts of its target very often."""
    out = tmp_path_factory.mktemp("trained")
    target = tiny_target(dtype=torch.float32)
    recipe = replace(RECIPE, steps=150, batch_size=6, anchors=12, eval_every=50, lr=6e-3, taps=3, window=24)
    texts = greedy_texts(target, 6, 45)
    course = make_course(target, out, recipe, texts, held_out=texts[:2])
    trainee = run_to_the_end(course)
    yield course, trainee, DFlashDrafter.load(str(out), target)


def test_an_overfitted_drafter_is_accepted_and_a_random_one_is_not(trained, tmp_path: Path) -> None:
    course, _, drafter = trained
    export(tmp_path, start(course.config, "random", course.target, 3), course.config, None)
    chance = DFlashDrafter.load(str(tmp_path), course.target)
    learned, random = (
        np.mean([n for text in course.texts for n in engine_rounds(course.target, d, text, "dflash")])
        for d in (drafter, chance)
    )
    assert random < 1.3 and learned > 2.0
    losses = [x["loss"] for x in read_log(course.out) if "loss" in x]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("policy", ["dflash", "ddtree:8"])
def test_held_out_tau_counts_the_rounds_of_a_real_run(trained, policy: str) -> None:
    course, _, drafter = trained
    model = start(course.config, str(course.out), course.target, 0)  # the exported one, which need not be the last
    for i, text in enumerate(course.texts[:4]):
        drafts = lattices(model, course.target, course.head, text, course.features([i])[0], 1, 8)
        walked = walk(drafts, text, 1, policy)
        real = engine_rounds(course.target, drafter, text, policy)
        # The last rounds differ: a real run may not draft behind the end that it was given.
        assert walked[: len(real) - 2] == real[: len(real) - 2]


def test_a_line_of_the_log_that_was_cut_off_anywhere_is_left_out(tmp_path: Path) -> None:
    whole = '{"step": 5, "tau": {"dflash": 2.0}}'
    (tmp_path / "training").mkdir()
    for length in range(len(whole)):
        (tmp_path / "training" / "log.jsonl").write_text(f"{whole}\n{whole[:length]}")
        assert [line["step"] for line in read_log(tmp_path)] == [5]


def test_a_run_leaves_log_curves_and_card(trained) -> None:
    course, _, _ = trained
    taus = [line["tau"] for line in read_log(course.out) if "tau" in line]
    assert len(taus) == 3 and taus[-1]["dflash"] > taus[0]["dflash"]
    assert DFlashDrafter.load(str(course.out), course.target).promised_tau == pytest.approx(
        max(tau["dflash"] for tau in taus), abs=0.005
    )
    assert (course.out / "training" / "curves.png").stat().st_size > 1000
    text = card(course, 150)
    assert f"{taus[-1]['dflash']:.2f}" in text and "greedy (6)" in text and "Thinking: default" in text


def test_the_hub_gets_the_drafter_and_not_the_state(trained, monkeypatch: pytest.MonkeyPatch) -> None:
    course, _, _ = trained
    told: list[dict] = []

    class Hub:
        def create_repo(self, name: str, exist_ok: bool) -> None:
            if name == "nobody/refused":
                raise OSError("401 Unauthorized\nmore")
            if name == "nobody/offline":
                raise RuntimeError  # the network's errors are of whatever library brings them

        def upload_folder(self, **what) -> None:
            told.append(what)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    (course.out / "data").mkdir()
    (course.out / "data" / "data.json").write_text("{}")
    (course.out / "data" / "model.safetensors").write_text("somebody's")
    assert push(course.out, "me/mine").endswith("me/mine")
    kept = filter_repo_objects(
        [p.relative_to(course.out).as_posix() for p in course.out.rglob("*") if p.is_file()],
        allow_patterns=told[0]["allow_patterns"],
    )
    assert sorted(kept) == ["config.json", "markov/model.safetensors", "model.safetensors"]
    old = list(filter_repo_objects(["draft_tokens.json", "README.md"], allow_patterns=told[0]["delete_patterns"]))
    assert old == ["draft_tokens.json"], "an earlier drafter's would trim this one"
    with pytest.raises(BadInput, match="401 Unauthorized"):
        push(course.out, "nobody/refused")
    with pytest.raises(BadInput, match="RuntimeError"):
        push(course.out, "nobody/offline")


def test_variable_prefix_tau_counts_behind_the_known_token(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path, replace(RECIPE, objective="variable-prefix"))
    model = make_trainee(course).model
    tau = held_out_tau(model, single, course.head, course.texts, course.features(range(len(TEXTS))), shown=2)
    assert all(1 <= value <= 6 for value in tau.values()) and set(tau) == {"dflash", "ddtree:64"}


# --- data -----------------------------------------------------------------------------------------------------


def test_shards_come_back_as_they_were(tmp_path: Path) -> None:
    texts = [replace(text, temperature=0.5 * (text.job % 2), thinking="off") for text in TEXTS]
    shards.write_shard(tmp_path, 3, texts)
    (path,) = shards.shard_paths(tmp_path)
    for found, text in zip(shards.read_shard(path), texts, strict=True):
        assert {**asdict(found), "tokens": found.tokens.tolist()} == {**asdict(text), "tokens": text.tokens.tolist()}
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BadInput, match="no shard"):
        shards.read_shard(path)


@pytest.mark.parametrize(("tokens", "prompt"), [([], 0), ([1, -5, 3], 1), ([1, 2, 3], 4), ([1, 2, 3], -1)])
def test_a_shard_with_texts_that_cannot_be_is_refused(tokens: list[int], prompt: int, tmp_path: Path) -> None:
    shards.write_shard(tmp_path, 0, [TEXTS[0], Text(np.array(tokens, np.int64), prompt, 0.0, "x", 1)])
    with pytest.raises(BadInput, match="no shard of training data"):
        shards.read_shard(tmp_path / "shard-00000.parquet")


def test_shards_are_parquet_for_everybody(tmp_path: Path) -> None:
    shards.write_shard(tmp_path, 0, TEXTS)
    path = tmp_path / "shard-00000.parquet"
    table = parquet.read_table(path)
    assert table.column("tokens")[2].as_py() == TEXTS[2].tokens.tolist()
    assert table.column_names == ["tokens", "prompt_tokens", "origin", "temperature", "thinking", "request"]
    parquet.write_table(table.replace_schema_metadata({"draftwood": "99"}), path)
    with pytest.raises(BadInput, match="version is 99"):
        shards.read_shard(path)
    parquet.write_table(table.drop_columns(["prompt_tokens"]), path)
    with pytest.raises(BadInput, match="prompt_tokens"):
        shards.read_shard(path)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"draftwood\[train\]"):
        shards.read_shard(tmp_path / "shard-00000.parquet")
    with pytest.raises(MissingExtra, match=r"draftwood\[train\]"):
        run_distill(DistillOptions(tmp_path / "out", 10))
    assert not list(tmp_path.iterdir())


def test_data_remember_whose_they_are(single: Target) -> None:
    """In whatever dtype and layout it is loaded; not another one, and not a tuned one."""
    ours = Identity.of(single)
    assert Identity.of(tiny_target(dtype=torch.float32)).same_as(ours)
    assert not Identity.of(tiny_target(dtype=torch.float32, seed=5)).same_as(ours)
    tuned = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        tuned.model.model.layers[-1].self_attn.v_proj.weight.add_(0.1)
    assert not Identity.of(tuned).same_as(ours)


def test_data_of_another_target_is_refused(single: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="distill"):
        data.read_all([tmp_path], single)
    Manifest(Identity.of(tiny_target(seed=5)), "default", {}).save(tmp_path)
    with pytest.raises(BadInput, match="with other weights, or in another --dtype, not by"):
        data.read_all([tmp_path], single)
    Manifest(replace(Identity.of(single), name="elsewhere"), "default", {}).save(tmp_path)
    with pytest.raises(BadInput, match="no texts"):
        data.read_texts(tmp_path, single)
    shards.write_shard(tmp_path, 0, [Text(np.array([1, 2, VOCAB]), 1, 0.0, "x", 0)])
    with pytest.raises(BadInput, match=str(VOCAB)):
        data.read_texts(tmp_path, single)
    for damaged in (json.dumps({"format": 1}), "[", "1"):
        (tmp_path / "data.json").write_text(damaged)
        with pytest.raises(BadInput, match="damaged"):
            data.read_all([tmp_path], single)


def test_others_may_read_what_was_written(single: Target, tmp_path: Path) -> None:
    Manifest(Identity.of(single), "default", {}).save(tmp_path)
    (tmp_path / "like").touch()
    assert (tmp_path / "data.json").stat().st_mode == (tmp_path / "like").stat().st_mode
    (tmp_path / "data.json").unlink()
    (tmp_path / "data.json").mkdir()
    with pytest.raises(BadInput, match="cannot be read"):
        data.read_all([tmp_path], single)


def test_folders_go_together_if_they_are_of_one_mode(single: Target, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, text in zip(folders, TEXTS, strict=False):
        folder.mkdir()
        Manifest(Identity.of(single), "default", {}).save(folder)
        shards.write_shard(folder, 0, [text])
    assert [t.job for t in data.read_all(folders, single)] == [0, 1]
    assert len(data.read_all([*folders, folders[0]], single)) == 2  # a text counts once
    shards.write_shard(folders[1], 0, [replace(TEXTS[1], thinking="off")])
    with pytest.raises(BadInput, match="one mode"):
        data.read_all(folders, single)


def test_answers_to_one_prompt_are_all_held_out_or_all_seen() -> None:
    texts = [replace(some_text(i // 3, 30), tokens=np.append(some_text(i // 3, 29).tokens, i)) for i in range(600)]
    seen, held_out = data.split(texts, 0.2)
    prompts = [{tuple(t.tokens[: t.prompt]) for t in part} for part in (seen, held_out)]
    assert not prompts[0] & prompts[1] and len(seen) + len(held_out) == 600
    assert 10 < len(prompts[1]) < 80


def test_a_list_of_draft_tokens_is_exported_where_few_others_are_to_come(single: Target, tmp_path: Path) -> None:
    texts = [Text(np.array([0, *[5] * 6, 7, 7, 8]), 1, 0.0, "x", i) for i in range(2)]
    assert data.unseen_share(texts[:1]) == 1 / 9 and data.unseen_share(texts) == 0
    course = make_course(single, tmp_path, tokens=torch.tensor([5, 7, 8]))
    assert course.draft_tokens.tolist() == [5, 7, 8] and course.drafting is course.head
    whole = replace(course, trimmed=False)
    assert whole.draft_tokens is None and len(whole.drafting.weight) == VOCAB, "and so it is measured"
    for some, told in ((course, "3"), (whole, f"{VOCAB} (trained on 3)")):
        assert f"| draft tokens | {told} |" in card(some, 1) and f", {told} draft tokens)" in describe(
            some, make_trainee(some).model
        )


def test_the_trimmed_head_holds_what_the_target_writes() -> None:
    answer = [5] * 900 + [7] * 99 + [8]
    texts = [Text(np.array([50, 51, *answer]), 2, 0.0, "x", 0)]
    assert data.frequent_tokens(texts, 1000, "auto").tolist() == [5, 7]
    assert data.frequent_tokens(texts, 1000, "1").tolist() == [5]
    assert data.frequent_tokens(texts, 1000, "7").tolist() == [0, 1, 5, 7, 8, 50, 51]
    assert data.frequent_tokens(texts, 1000, "all") is None
    few = [Text(np.array([0, 1, 2]), 1, 0.0, "x", 0)]
    assert data.frequent_tokens(few, 3, "auto") is None  # nothing worth saving


# --- stopping -------------------------------------------------------------------------------------------------


def test_the_first_signal_asks_an_echo_is_none_and_a_later_one_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.1, 15.0])
    monkeypatch.setattr("draftwood.train.stopping.time.monotonic", lambda: next(now))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_flag() as stop:
        assert not stop()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert stop()
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
