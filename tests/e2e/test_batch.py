"""`draftwood batch` as a process that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftwood.llm import load
from tests.serving import write_tiny

LINES, TOKENS = 30, 100


def count(out: Path) -> int:
    path = out / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("where", ["here", "ray"])
def test_a_run_that_is_killed_goes_on_and_answers_every_line_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "ray":
        pytest.importorskip("ray")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    source, out, tiny = tmp_path / "prompts.jsonl", tmp_path / "out", write_tiny(tmp_path / "tiny")
    source.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(LINES)))
    flags = dict(target=tiny, drafter="ngram", dtype="float64", max_new_tokens=TOKENS, max_concurrency=2)
    command = [sys.executable, "-m", "draftwood", "batch", "--in", source, "--out", out, "--json"]
    command += [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
    command += ["--ray", "--replicas", "2"] if where == "ray" else []

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def stopped_after(more: int, number: int) -> tuple[int, str]:
        before, process = count(out), start()
        while count(out) < before + more and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, number)  # Ctrl-C, too, reaches all that a command has started
        _, err = process.communicate()
        assert before + more <= count(out) < LINES, "it was stopped under way"
        return process.returncode, err

    assert stopped_after(3, signal.SIGKILL)[0] == -signal.SIGKILL
    code, err = stopped_after(3, signal.SIGINT)
    told = re.search(rf"(\d+) of {LINES} lines are done", err)
    assert code == 130 and told and "Traceback" not in err
    assert count(out) - int(told[1]) in (0, 1), "one may be on the disk and not yet counted"
    process = start()
    told, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(told.splitlines()[-1])["answered"] == LINES

    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    texts = {result["custom_id"]: result["response"]["body"]["choices"][0]["message"]["content"] for result in found}
    assert len(found) == len(texts) == LINES
    llm = load(str(tiny), "none", "autoregressive", dtype="float64", device="cpu")
    for i in range(0, LINES, 5):
        assert texts[f"line-{i + 1}"] == llm.generate(f"prompt {i}", max_new_tokens=TOKENS).text
