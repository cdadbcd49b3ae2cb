"""Rounds as CUDA graphs: the same text, one wait a round, bounded memory. Skipped without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from draftwood import registry
from draftwood.device.graphs import Graphs
from draftwood.device.rounds import DeviceRounds
from draftwood.engine import Engine
from draftwood.latency import LatencyModel
from draftwood.probe import probe
from draftwood.sampling import Sampling
from draftwood.target import Target
from tests.reference import Noisy, Tabled, Truthful, plain_logits, tiny_dflash, tiny_model

pytestmark = pytest.mark.gpu
PROMPT = [(11 * i + 5) % 97 for i in range(13)]
NEW = 32
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalty": Sampling(repetition_penalty=1.3),
    "T = 1": Sampling(1.0, seed=3),
    "T = 0.7, top-k, top-p": Sampling(0.7, top_k=20, top_p=0.9, seed=4),
    "T = 1.3, min-p, penalty": Sampling(1.3, min_p=0.02, repetition_penalty=1.2, seed=5),
}


def on_device(family: str = "llama", dtype: torch.dtype = torch.float64) -> Target:
    return Target(tiny_model(family, dtype=dtype).to("cuda"), family)


def engine(target: Target, drafter: object, policy: str, backend: str = "auto") -> Engine:
    latency = LatencyModel(probe(target.device, target.dtype), target.work, None)
    return Engine(target, drafter, registry.policy(policy), latency, backend=backend)  # type: ignore[arg-type]


def write(made: Engine, sampling: Sampling, new: int = NEW) -> list[int]:
    return [token for step in made.run(PROMPT, new, sampling) for token in step.tokens]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", ["autoregressive", "dflash", "ddtree:16", "beam:3x4", "caddtree", "bastion"])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_float64_texts_are_those_of_the_host(family: str, policy: str, sampling: str) -> None:
    target = on_device(family)
    plain = write(engine(target, None, "autoregressive", "host"), SAMPLINGS[sampling])
    for drafter in (Tabled(Truthful("truthful", truth=PROMPT + plain)), Tabled(Noisy("noisy")), tiny_dflash(target)):
        made = engine(target, drafter, policy)
        assert made.backend().name == "device"
        for _ in range(2):  # captured, then from graphs alone
            assert write(made, SAMPLINGS[sampling]) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_argmax_or_a_near_tie(dtype: torch.dtype) -> None:
    """Through the tree-attention kernel where the device has it."""
    target = on_device("llama", dtype)
    text = write(engine(target, tiny_dflash(target), "ddtree:16"), Sampling())
    logits = plain_logits(target, PROMPT + text).float()[len(PROMPT) - 1 : -1].cpu()
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert float(gap.max()) <= 2**-5 * float(logits.abs().max())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_nothing_in_a_round_waits_but_the_read(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "ddtree:16")
    write(made, SAMPLINGS[sampling])  # everything is captured by now
    verify = DeviceRounds.verify

    def watched(self: DeviceRounds, *arguments: object) -> None:
        with no_waiting():
            verify(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceRounds, "verify", watched)
    write(made, SAMPLINGS[sampling])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_stages_never_wait_even_without_graphs(sampling: str) -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "bastion:40")
    write(made, SAMPLINGS[sampling])
    (stages,) = made.device._stages.values()
    for stage in (stages.draft, *(partial(stages.verify, width) for width in stages.widths)):
        torch.cuda.synchronize()
        with no_waiting():
            stage()


def test_a_capture_leaves_the_state_as_it_was() -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "bastion:40")
    write(made, Sampling())
    (stages,) = made.device._stages.values()
    before = [tensor.clone() for tensor in stages.changing]
    graphs = Graphs(target.device)
    for width in stages.widths:
        graphs.prepare(width, partial(stages.verify, width), stages.changing)
    assert len(graphs) == len(stages.widths)
    assert all(torch.equal(a, b) for a, b in zip(before, stages.changing, strict=True))


def test_memory_is_bounded_and_reported() -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "bastion:40")
    for seed in range(3):
        write(made, Sampling(1.0, seed=seed))
    held = made.device.nbytes()
    assert held["buffers"] > 0
    write(made, Sampling(1.0, seed=4))
    assert made.device.nbytes()["buffers"] == held["buffers"]
