"""That it learns, and what a run leaves: held-out tau, the better drafter, log, curves, card and what the Hub gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from draftwood import registry
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel, Machine
from draftwood.target import Target
from draftwood.train import loop, show
from draftwood.train.card import card, outdated, push
from draftwood.train.holdout import held_out_tau, lattices, walk
from draftwood.train.loop import Course
from draftwood.train.shards import Text
from draftwood.train.show import read_log
from draftwood.train.start import start
from draftwood.train.state import Trainee, export
from tests.reference import plain_logits, tiny_target
from tests.train_cases import RECIPE, TEXTS, make_course, make_trainee, run_to_the_end

# --- it learns -----------------------------------------------------------------------------------------------


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


def test_variable_prefix_tau_counts_behind_the_known_token(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path, replace(RECIPE, objective="variable-prefix"))
    model = make_trainee(course).model
    tau = held_out_tau(model, single, course.head, course.texts, course.features(range(len(TEXTS))), shown=2)
    assert all(1 <= value <= 6 for value in tau.values()) and set(tau) == {"dflash", "ddtree:64"}


def test_the_latest_drafter_is_exported_unless_an_earlier_one_was_clearly_better(
    single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, exported = iter([2.0, 1.97, 1.95, 2.1, 2.0]), list[float]()
    monkeypatch.setattr(loop, "held_out_tau", lambda *_: {"dflash": next(measured)})
    monkeypatch.setattr(Course, "export", lambda _course, _model, tau: exported.append(tau))
    run_to_the_end(make_course(single, tmp_path, replace(RECIPE, steps=5, eval_every=1)))
    assert exported == [2.0, 1.97, 2.1]


# --- what a run leaves ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("page", "old"), [(None, True), ("300 of 500 steps", True), ("500 of 500 steps", False), ("Mine.", False)]
)
def test_a_card_of_a_run_that_had_not_ended_is_written_anew(page: str | None, old: bool, tmp_path: Path) -> None:
    if page is not None:
        (tmp_path / "README.md").write_text(page)
    assert outdated(tmp_path / "README.md", 500) is old


def test_a_line_of_the_log_that_was_cut_off_anywhere_is_left_out(tmp_path: Path) -> None:
    whole = '{"step": 5, "tau": {"dflash": 2.0}}'
    (tmp_path / "training").mkdir()
    for length in range(len(whole)):
        (tmp_path / "training" / "log.jsonl").write_text(f"{whole}\n{whole[:length]}")
        assert [line["step"] for line in read_log(tmp_path)] == [5]


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
