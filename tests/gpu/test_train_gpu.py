"""Training and distilling on a device: the same numbers as on a CPU, up to rounding. Skipped without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood.target import Target
from draftwood.train.captured_rows import CapturedRows
from draftwood.train.features import Reader
from draftwood.train.jobs import Job
from draftwood.train.loop import Course, Watcher, add_gradients, train
from draftwood.train.rows import open_rows
from draftwood.train.state import Trainee, load_state, save_state
from draftwood.train.together import DeviceReader, open_features
from draftwood.train.writing import Limits, Writing
from tests.reference import plain_logits, tiny_model
from tests.train_cases import RECIPE, TEXTS, make_course, make_trainee

pytestmark = pytest.mark.gpu
SOFT = replace(RECIPE, soft=0.5, optimizer="muon", steps=6)


def target_on(device: str, dtype: torch.dtype = torch.float32) -> Target:
    return Target(tiny_model("llama", dtype=dtype).to(device), "llama")


def course_on(device: str, out: Path) -> Course:
    course = make_course(target_on(device), out, SOFT)
    reader = Reader(course.target, course.config["dflash_config"]["target_layer_ids"], True)
    return replace(course, features=open_features(reader, TEXTS, out / "cache", 1e9, taken=0, processes=1))


def test_a_steps_gradients_are_those_of_a_cpu(tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        course = course_on(device, tmp_path / device)
        assert isinstance(course.features, DeviceReader) == (device == "cuda")
        trainee = make_trainee(course)
        gradients = add_gradients(course, trainee)
        found.append((gradients.loss, {n: p.grad.cpu() for n, p in trainee.model.named_parameters()}))
    (loss, expected), (there, grads) = found
    assert there == pytest.approx(loss, rel=1e-2)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=5e-2, atol=1e-2 * float(grad.abs().max()))


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    course = course_on("cuda", tmp_path)
    whole = make_trainee(course)
    assert train(course, whole, Watcher())
    half, done = make_trainee(course), []
    assert not train(course, half, Watcher(step=done.append, stop=lambda: len(done) == 3))
    save_state(tmp_path, half, course.recipe, course.origin)
    again = course_on("cuda", tmp_path)
    rest: Trainee = make_trainee(again)
    assert load_state(tmp_path, rest, again.recipe, again.origin)
    assert train(again, rest, Watcher())
    for (name, one), (_, other) in zip(whole.model.named_parameters(), rest.model.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distilled_texts_are_the_targets_own(dtype: torch.dtype) -> None:
    """Each token is the argmax of a forward over the whole text, or nearly as likely."""
    target = target_on("cuda", dtype)
    rows = open_rows(target, 4, 64)
    assert isinstance(rows, CapturedRows)
    jobs = iter([Job(i, tuple((7 * i + j) % 97 for j in range(5 + i)), 0.0, "made") for i in range(9)])
    texts = [text for text in Writing(rows, 4, jobs, Limits(40, frozenset(), 0)).texts() if text is not None]
    assert sorted(text.job for text in texts) == list(range(9))
    for text in texts:
        tokens = torch.from_numpy(text.tokens)
        logits = plain_logits(target, tokens.tolist()).float().cpu()[text.prompt - 1 : -1]
        gap = logits.max(-1).values - logits.gather(1, tokens[text.prompt :, None])[:, 0]
        assert float(gap.max()) <= 2**-5 * float(logits.abs().max())
