"""`draftwood bench gpu` on a device, in a shape that takes seconds. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.bench.gpu.answers import PLAIN, POLICIES
from draftwood.bench.gpu.options import GpuOptions
from draftwood.bench.gpu.run import run_gpu_bench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width_invariant", [False, True])
def test_from_flags_to_files(tmp_path: Path, width_invariant: bool) -> None:
    options = GpuOptions(
        models=["tiny"], widths=[1, 16, 64], contexts=[100, 1024], rates=["gsm8k"], new_tokens=64, quick=True,
        dtype="bfloat16", width_invariant=width_invariant, out=tmp_path,
    )  # fmt: skip
    summary = run_gpu_bench(options)
    assert summary["left"] == []
    rows = summary["rows"]
    assert {row["kind"] for row in rows} == {"part", "memory", "answers"}
    assert all(row["seconds"] > 0 for row in rows if row["kind"] == "part")
    answers = {row["policy"]: row for row in rows if row["kind"] == "answers"}
    assert set(answers) == {PLAIN, *POLICIES}
    assert all(row["identical"] == 1 for row in answers.values())
    assert all(row["graphs"] > 0 for row in rows if row["kind"] == "memory")
    assert (tmp_path / "gpu.png").exists()
