"""A target whose code comes with its files: it runs only where the user asks for it, and then in every command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from draftwood import assemble, cli, registry
from draftwood.errors import BadModel
from draftwood.latency import Machine
from draftwood.loading import load_target
from tests.reference import byte_tokenizer, tiny_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
CLASSES = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
FEW = ("--limit", "1", "--max-new-tokens", "4")
COMMANDS = [
    ["generate", "to be", *FEW[2:]],
    ["chat", *FEW[2:]],
    ["calibrate", "--max-width", "2", "--contexts", "0", "--drafter", "ngram"],
    ["demo", *FEW],
    ["bench", *FEW, "--policies", "ddtree:2"],
    ["bench", "serve", "--concurrency", "1", "--turns", "1", "--repeats", "1", "--policies", "ddtree:2", *FEW[2:]],
    ["bench", "grid", *FEW, "--cells", "1", "--out", "out"],
    ["batch", "--in", "prompts.jsonl", "--out", "out", *FEW[2:]],
    ["distill", "--tokens", "30", "--prompts", "default", "--out", "data", *FEW],
    ["eval-drafter", "--drafter", "ngram", "--policies", "ddtree:2", *FEW],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    tiny_model(dtype=torch.float32, vocab_size=270, max_position_embeddings=2048, eos_token_id=256).save_pretrained(
        folder
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[u]{{ m.content }}{% endfor %}[a]"
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": CLASSES}))
    (folder / "own.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_code_runs_where_it_is_asked_for(
    command: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6)
    monkeypatch.setattr(assemble, "probe", lambda device, dtype, folder: machine)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("to be\n"))
    Path("prompts.jsonl").write_text('{"prompt": "to be"}\n')
    given = [*command, "--target", str(folder), "--dtype", "float32"]
    assert ended(given) == 2
    (sentence,) = capsys.readouterr().err.splitlines()[-1:]
    assert sentence.startswith("draftwood: ") and "--trust-remote-code" in sentence
    assert not (tmp_path / "modules").exists()
    assert not ended([*given, "--trust-remote-code"]), capsys.readouterr().err


def test_a_draft_models_code_runs_where_the_targets_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    target = load_target(str(folder), "float32", trust_remote_code=True)
    assert registry.drafter(f"draft-model:{folder}", target).max_depth == 5
    target.trusts_code = False
    with pytest.raises(BadModel, match="--trust-remote-code"):
        registry.drafter(f"draft-model:{folder}", target)


def ended(args: list[str]) -> object:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    return end.value.code


def test_doctor_runs_none_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["doctor", "--target", str(folder)]) == 2
    assert "custom code" in capsys.readouterr().err
