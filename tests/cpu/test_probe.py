"""The probe measures a machine once, and what it found is kept in files that are whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftwood.cores import Load
from draftwood.probe import probe
from draftwood.store import cached_file, read_json, write_json


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    file = cached_file(tmp_path / "deep", "machine", "A/B: c")
    assert read_json(file) is None and "/" not in file.name
    assert file != cached_file(tmp_path / "deep", "machine", "A/B: d")
    write_json(file, {"x": 1})
    assert read_json(file) == {"x": 1} and [f.name for f in file.parent.iterdir()] == [file.name]
    with pytest.raises(TypeError):
        write_json(file, {"x": object()})
    assert read_json(file) == {"x": 1} and [f.name for f in file.parent.iterdir()] == [file.name]


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of milliseconds: the same code on small matrices."""
    from draftwood import probe as module

    monkeypatch.setattr(module, "ON_CPU", module.Sizes(side=64, rows=8))
    monkeypatch.setattr(module, "STREAM_BYTES", 1 << 16)
    monkeypatch.setattr(module, "BUDGET_S", 0.002)


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_probe_measures_something_for_every_figure(dtype: torch.dtype) -> None:
    machine = probe(torch.device("cpu"), dtype)
    assert min(machine.peak, machine.bandwidth, machine.launch_s) > 0
    assert str(dtype) in machine.name and torch.__version__ in machine.name


@pytest.mark.usefixtures("small_probe")
def test_a_machine_is_measured_once_and_again_when_its_file_is_damaged(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    first = probe(cpu, torch.float32, tmp_path)
    assert probe(cpu, torch.float32, tmp_path) == first
    (file,) = tmp_path.iterdir()
    for damage in (
        "{",
        "[]",
        json.dumps({"name": first.name, "peak": -1.0, "bandwidth": 1.0, "launch_s": 1.0}),
    ):
        file.write_text(damage)
        assert probe(cpu, torch.float32, tmp_path).peak > 0
    probe(cpu, torch.float64, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("small_probe")
def test_what_was_measured_beside_other_programs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "others", lambda self: 0.9)
    assert probe(torch.device("cpu"), torch.float32, tmp_path).peak > 0 and not list(tmp_path.iterdir())
    monkeypatch.setattr(Load, "others", lambda self: 0.1)
    assert probe(torch.device("cpu"), torch.float32, tmp_path).peak > 0 and list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_probe")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert probe(torch.device("cpu"), torch.float32, tmp_path / "file" / "below").peak > 0
