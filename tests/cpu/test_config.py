"""Where things are kept, by environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.config import config


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"DRAFTWOOD_HOME": "/a/b", "XDG_CACHE_HOME": "/c"}, Path("/a/b")),
        ({"DRAFTWOOD_HOME": "~/models"}, Path.home() / "models"),
        ({"DRAFTWOOD_HOME": "here"}, Path.cwd() / "here"),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/draftwood")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "draftwood"),
        ({"DRAFTWOOD_HOME": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "draftwood"),
        ({}, Path.home() / ".cache" / "draftwood"),
    ],
)
def test_home(environ: dict[str, str], home: Path) -> None:
    assert config(environ).home == home


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    assert config().home == tmp_path
    assert config().models.parent == config().profiles.parent == tmp_path


def test_compiling_is_switched_off_by_zero_alone() -> None:
    assert config({}).compile and config({"DRAFTWOOD_COMPILE": "1"}).compile
    assert not config({"DRAFTWOOD_COMPILE": "0"}).compile
