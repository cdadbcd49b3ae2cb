"""What a run refuses before any work: names, numbers, sizes, room, and a folder that another run is in."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood.errors import BadInput, MissingExtra
from draftwood.target import Target
from draftwood.train import files
from draftwood.train import run as run_module
from draftwood.train.files import scratch_of
from draftwood.train.fleet import Fleet
from draftwood.train.recipe import Recipe
from draftwood.train.run import TrainOptions, check_room, check_taps, prepare, step_bytes
from draftwood.train.state import state_path
from tests.train_cases import RECIPE, TEXTS, make_course, make_trainee


@pytest.mark.parametrize(("flag", "found", "meant"), [("optimizer", "moun", "muon"), ("objective", "dflsh", "dflash")])
def test_a_name_that_does_not_exist_is_refused_with_the_nearest_one(flag: str, found: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"--{flag} is '{found}'; expected one of .*Did you mean '{meant}'"):
        replace(RECIPE, **{flag: found})


@pytest.mark.parametrize(("name", "value"), [("lr", math.nan), ("lr", 1.0), ("soft", 1.5), ("holdout", 0.95)])
def test_a_number_out_of_its_range_is_told_the_range(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=rf"--{name} is {value}; it must be a finite number .*\d"):
        replace(RECIPE, **{name: value})


def test_more_layers_than_the_target_has_are_refused_before_any_work(single: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--layers 1000000.*more layers than"):
        prepare(TrainOptions([tmp_path], tmp_path), replace(RECIPE, layers=1_000_000), single, Fleet())


def test_more_taps_than_the_target_has_layers_are_refused_before_any_work(single: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--taps 999.*more layers than"):
        prepare(TrainOptions([tmp_path], tmp_path), replace(RECIPE, taps=999), single, Fleet())
    check_taps(replace(RECIPE, taps=Recipe().taps), single)  # which nobody chose, and less will do


def test_a_step_counts_what_its_process_keeps(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path)
    head = 12.0 * course.head.chunk * len(course.head.weight)
    half = replace(course, fleet=Fleet(0, 2))
    assert step_bytes(half) - head == (step_bytes(course) - head) / 2
    assert step_bytes(replace(half, recipe=replace(RECIPE, micro_batch=1000))) == step_bytes(half), "it has no more"
    forced = replace(course, recipe=replace(RECIPE, objective="eagle3", anchors=1))
    of_a_block = (step_bytes(course) - head) / RECIPE.layers / RECIPE.anchors
    assert step_bytes(forced) - head == of_a_block * len(TEXTS[-1].tokens), "one begins at every token"


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


def test_a_drafter_does_not_take_the_place_of_another_model(tmp_path: Path) -> None:
    options = TrainOptions([tmp_path / "texts"], tmp_path / "model", target=str(tmp_path / "model"))
    with pytest.raises(BadInput, match="a folder of --target"):
        run_module.check_out(options)
    options = replace(options, target=None)
    with pytest.raises(BadInput, match="a folder of --init"):
        run_module.check_out(options, str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    with pytest.raises(BadInput, match="not trained there"):
        run_module.check_out(options, "target")
    state_path(tmp_path / "model").parent.mkdir()
    run_module.check_out(options, "target")
    run_module.check_out(replace(options, out=Path("target")), "target")  # that is no folder's name there


def test_processes_that_cannot_be_one_run_are_told_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = TrainOptions([tmp_path], tmp_path / "out", device="cuda:1")
    with pytest.raises(BadInput, match=r"--device cuda:1.*each takes its own \(cpu\)"):
        run_module._run(options, RECIPE, Fleet(0, 2, torch.device("cpu")))
    assert Fleet().agrees(5)
    for other, same in ((5, True), (6, False)):
        monkeypatch.setattr(Fleet, "sum", lambda self, marks, other=other: marks + torch.tensor([0, other]))
        assert Fleet(0, 2, torch.device("cpu")).agrees(5) == same
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Fleet.join() == Fleet()
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingExtra, match="accelerate"):
        Fleet.join()
