"""The compiled CPU operators: the same numbers as PyTorch's, and a reason wherever they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwood import doctor
from draftwood.drafters.lattice import candidates
from draftwood.native import build as building
from draftwood.native.build import build, operators
from draftwood.native.candidates import takes
from draftwood.native.forward import Native
from draftwood.target import Target
from draftwood.tree import Tree, chain_tree
from tests.attention_cases import random_tree
from tests.reference import tiny_target

compiled = pytest.mark.skipif(building.shutil.which("cc") is None, reason="no C compiler")
TEXT = [int(t) for t in torch.randint(0, 97, (90,), generator=torch.Generator().manual_seed(1))]


def lean(family: str, **options) -> Target:
    return tiny_target(family, "lean", hidden_size=64, intermediate_size=96, **options)


def logits_of(target: Target, tree: Tree, prompt: int) -> torch.Tensor:
    """Of a tree behind a prompt, and of one behind a second, shorter one."""
    target.tap((0, 2))
    cache = target.new_cache(capacity=4, requests=2)
    target.prefill(TEXT[:prompt], cache, row=0)
    target.prefill(TEXT[: prompt // 2], cache, row=1)
    found = target.verify(target.plan([tree, chain_tree([5, 9])], cache, rows=[0, 1]), cache)
    assert found.taps is not None
    return torch.cat([found.logits.double(), found.taps.double()], 1)


@compiled
@pytest.mark.parametrize("prompt", [10, 80])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_sliding"])
def test_they_are_as_close_to_the_truth_as_pytorchs(family: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = random_tree(12)
    truth = logits_of(lean(family), tree, prompt)
    native = lean(family, dtype=torch.bfloat16)
    assert isinstance(native.path.native, Native) and not native.path.exact_cache
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    torchs = lean(family, dtype=torch.bfloat16)
    assert isinstance(torchs.path.native, str)
    errors = [float((logits_of(target, tree, prompt) - truth).abs().mean()) for target in (native, torchs)]
    assert errors[0] <= 1.25 * errors[1]


def test_models_they_do_not_serve_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not bfloat16" in lean("llama").path.native
    assert "multiples of 16" in tiny_target("llama", "lean", dtype=torch.bfloat16).path.native
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    target = lean("llama", dtype=torch.bfloat16)
    assert "DRAFTWOOD_COMPILE" in target.path.native and target.path.kind == "lean"


@compiled
def test_compiled_once_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path, "some processor")
    assert first.library is not None and [*tmp_path.iterdir()] == [first.library]
    monkeypatch.setattr(building.subprocess, "run", None)  # not called again
    assert build(tmp_path, "some processor").library == first.library


def test_without_a_working_compiler_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    built = build(tmp_path / "cache", "some processor")
    assert built.library is None and "no such flag" in built.reason and not [*(tmp_path / "cache").iterdir()]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "no C compiler" in build(tmp_path / "cache", "some processor").reason
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot be written" in build(tmp_path / "file", "some processor").reason


def test_doctor_says_whether_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert doctor.operators_state(cpu, torch.bfloat16) == operators().reason
    assert "for bfloat16" in doctor.operators_state(cpu, torch.float32)
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    assert "switched off" in doctor.operators_state(cpu, torch.bfloat16)


@compiled
@pytest.mark.parametrize("size", [5, 64, 1000, 49152])
def test_the_likeliest_tokens_are_those_of_the_formula(size: int) -> None:
    logits = (torch.randn(9, size, generator=torch.Generator().manual_seed(2)) * 4).bfloat16()
    logits[3] = -torch.inf
    logits[3, 2] = 1.0
    logits[4, :5] = 30.0  # equals
    assert takes(logits)
    tokens, logp = candidates(logits, 8)
    truth = torch.log_softmax(logits.double(), -1)
    order = truth.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    rows = [r for r in range(9) if r != 3]
    assert torch.equal(tokens[rows], order[rows]) and int(tokens[3, 0]) == 2
    torch.testing.assert_close(logp.double(), truth.gather(1, order), rtol=1e-5, atol=1e-5)
    none, _ = candidates(logits[:0], 8)
    assert none.shape == (0, min(8, size))
