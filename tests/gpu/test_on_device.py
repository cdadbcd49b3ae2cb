"""The same promise on a CUDA device. Skipped without one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from draftwood import registry
from draftwood.engine import Engine
from draftwood.latency import LatencyModel
from draftwood.probe import probe
from draftwood.sampling import Sampling
from draftwood.target import Target
from tests.reference import Noisy, Truthful, plain_logits, tiny_dflash, tiny_model

pytestmark = pytest.mark.gpu
machine = cache(probe)  # two seconds each time
PROMPT = [(11 * i + 5) % 97 for i in range(13)]
NEW = 32


def on_device(family: str, dtype: torch.dtype) -> Target:
    return Target(tiny_model(family, dtype=dtype).to("cuda"), family)


def write(target: Target, drafter: object, policy: str, sampling: Sampling) -> list[int]:
    latency = LatencyModel(machine(target.device, target.dtype), target.work, None)
    engine = Engine(target, drafter, registry.policy(policy), latency)  # type: ignore[arg-type]
    return [token for step in engine.run(PROMPT, NEW, sampling) for token in step.tokens]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "T = 1"])
@pytest.mark.parametrize("policy", ["dflash", "ddtree:16", "bastion"])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "gemma2"])
def test_float64_texts_are_those_of_plain_decoding(family: str, policy: str, sampling: Sampling) -> None:
    target = on_device(family, torch.float64)
    plain = write(target, None, "autoregressive", sampling)
    for drafter in (Truthful("truthful", truth=PROMPT + plain), tiny_dflash(target)):
        assert write(target, drafter, policy, sampling) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_argmax_or_a_near_tie(dtype: torch.dtype) -> None:
    target = on_device("llama", dtype)
    text = write(target, Noisy("noisy", tap_layers=(1,)), "ddtree:16", Sampling())
    logits = plain_logits(target, PROMPT + text).float()[len(PROMPT) - 1 : -1].cpu()
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert float(gap.max()) <= 2**-5 * float(logits.abs().max())
