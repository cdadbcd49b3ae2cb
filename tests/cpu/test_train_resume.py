"""A run that was killed, stopped or led nowhere goes on exactly, and only as itself."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftwood.drafters.dflash import DFlashDrafter
from draftwood.errors import BadInput
from draftwood.target import Target
from draftwood.train.blocks import OBJECTIVES
from draftwood.train.loop import Course, Progress, Watcher, train
from draftwood.train.loss import Head
from draftwood.train.optimizers import OPTIMIZERS
from draftwood.train.recipe import drafter_config
from draftwood.train.show import Log, read_log
from draftwood.train.state import load_state, save_state, state_path
from draftwood.train.stopping import stop_flag
from tests.reference import tiny_target
from tests.train_cases import MASK, RECIPE, make_course, make_trainee, run_to_the_end


class Killed(BaseException):
    """What nothing catches."""


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
