"""Rounds as CUDA graphs: the same text, one wait a round, bounded memory. Skipped without a device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch

from draftwood import registry
from draftwood.bench.worse import worse
from draftwood.device.graphs import MOST, Graphs
from draftwood.device.mail import Mail
from draftwood.device.rounds import stages_of
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel
from draftwood.probe import probe
from draftwood.sampling import Sampling
from draftwood.target import Target
from draftwood.trace import Round
from tests.reference import Noisy, Tabled, Truthful, plain_logits, tiny_dflash, tiny_model

pytestmark = pytest.mark.gpu
machine = cache(probe)  # two seconds each time
PROMPT = [(11 * i + 5) % 97 for i in range(13)]
NEW = 32
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalty": Sampling(repetition_penalty=1.3),
    "T = 1": Sampling(1.0, seed=3),
    "T = 0.7, top-k, top-p": Sampling(0.7, top_k=20, top_p=0.9, seed=4),
    "T = 1.3, min-p, penalty": Sampling(1.3, min_p=0.02, repetition_penalty=1.2, seed=5),
    "T = 1, top-k": Sampling(1.0, top_k=20, seed=6),
}


def on_device(family: str = "llama", dtype: torch.dtype = torch.float64) -> Target:
    return Target(tiny_model(family, dtype=dtype).to("cuda"), family)


def engine(target: Target, drafter: object, policy: str, backend: str = "auto") -> Engine:
    latency = LatencyModel(machine(target.device, target.dtype), target.work, None)
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
    text_alone = registry.drafter(["ngram", "recycling"], target)  # drafts on the host
    placed = Tabled(Truthful("truthful", truth=PROMPT + plain)), Tabled(Noisy("noisy")), tiny_dflash(target)
    for drafter in (*placed, text_alone):
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


def watched(made: Engine, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Round | None], list[Mail]]:
    """The rounds behind an answer's first step, none of which may wait for the device, and the reports waited for."""
    steps = made.run(PROMPT, NEW, sampling)
    next(steps)
    mails: list[Mail] = []
    wait = Mail.wait
    monkeypatch.setattr(Mail, "wait", lambda self: (mails.append(self), wait(self))[1])
    with no_waiting():
        return [step.round for step in steps], mails


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", ["autoregressive", "dflash", "ddtree:16", "bastion:40"])
def test_nothing_in_a_round_waits_but_the_reports(policy: str, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on all of the engine's loop is watched; waiting for a report's own event is no such wait.

    The first draft is waited for before: the first token leaves when its round has been started.
    """
    target = on_device()
    made = engine(target, tiny_dflash(target), policy)
    write(made, SAMPLINGS[sampling])  # everything is captured by now
    rounds, mails = watched(made, SAMPLINGS[sampling], monkeypatch)
    assert len(mails) == len(rounds) + sum(r.drafted for r in rounds[1:] if r is not None)


def test_rounds_that_the_host_drafts_for_wait_for_verdicts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = on_device()
    plain = write(engine(target, None, "autoregressive", "host"), Sampling())
    made = engine(target, Truthful("truthful", truth=PROMPT + plain), "ddtree:7")
    assert made.device.hosted and write(made, Sampling()) == plain  # everything is captured by now
    rounds, mails = watched(made, Sampling(), monkeypatch)
    assert len(mails) == len(rounds) and sum(r.drafted for r in rounds if r is not None) > 3


def test_a_stage_that_finds_no_memory_before_it_is_captured_changes_nothing() -> None:
    count = torch.zeros(1, device="cuda")
    graphs = Graphs(count.device)

    def stage() -> None:
        count.add_(1)
        raise torch.OutOfMemoryError("none left")

    graphs.prepare("key", stage, (count,))
    assert graphs.short and float(count) == 0


def test_every_width_and_the_draft_are_captured_with_the_first_answer() -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "bastion:40")
    steps = made.run(PROMPT, NEW)
    next(steps)
    (stages,) = made.device._stages.values()
    captured = set(made.device.graphs._graphs)
    assert {key[2] for key in captured} == {"catch up", "draft", *stages.widths}
    list(steps)
    assert set(made.device.graphs._graphs) == captured, "nothing was captured in a round"


def test_the_verdict_travels_beside_the_draft() -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "ddtree:16")
    write(made, Sampling())
    (stages,) = made.device._stages.values()
    side = stages.report._side
    assert side is not None and side != torch.cuda.current_stream()


def test_after_a_stop_nothing_is_emitted_or_started() -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "ddtree:16")
    text = write(made, Sampling())
    stop = text[NEW // 2]
    steps = list(made.run(PROMPT, NEW, stop_ids=frozenset({stop})))
    assert [t for step in steps for t in step.tokens] == text[: text.index(stop) + 1]
    assert write(made, Sampling()) == text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling", ["greedy", "T = 1"])
def test_width_invariant_texts_are_those_of_plain_decoding(sampling: str, dtype: torch.dtype) -> None:
    target = Target(tiny_model("llama", dtype=dtype).to("cuda"), "llama", width_invariant=True)
    for prompt in range(4):
        given = [(11 * i + 5 + prompt) % 97 for i in range(13)]
        texts = []
        for policy in ("autoregressive", "dflash", "ddtree:16", "bastion:40"):
            made = engine(target, tiny_dflash(target), policy)
            texts.append([t for step in made.run(given, 100, SAMPLINGS[sampling]) for t in step.tokens])
        assert all(text == texts[0] for text in texts)


def test_a_request_that_does_not_fit_is_refused_before_it_is_allocated() -> None:
    target = on_device()
    made = engine(target, None, "autoregressive")
    before = torch.cuda.memory_allocated()
    too_many = torch.cuda.mem_get_info()[1] // target.kv_bytes_per_token()
    with pytest.raises(BadInput, match="are free on cuda"):
        made.device.open(made.policy, too_many, *stages_of(made.policy))
    assert torch.cuda.memory_allocated() == before


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
    assert made.device.nbytes() == held, "the same rounds capture nothing anew"
    assert 0 < len(made.device.graphs) <= MOST


@pytest.mark.parametrize("drafter", ["none", "noisy", "dflash"])
def test_the_verbs_of_a_round_are_its_seconds(drafter: str) -> None:
    """What the host does behind the device's work is not counted twice, nor left out where the device waits for it."""
    target = on_device("llama", torch.bfloat16)
    made = engine(
        target, {"none": None, "noisy": Tabled(Noisy("noisy")), "dflash": tiny_dflash(target)}[drafter], "ddtree:16"
    )
    write(made, Sampling(), 200)  # captures
    start, rounds = time.perf_counter(), []
    for step in made.run(PROMPT, 200, Sampling()):
        if step.round is None:
            start = time.perf_counter()
        else:
            rounds.append(step.round)
    seconds = time.perf_counter() - start
    assert sum(round.total_s for round in rounds) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_p=0.9, seed=4), Sampling(1.0, top_k=50, seed=5)])
def test_large_vocabularies_and_long_pauses(sampling: Sampling) -> None:
    """Sorts of as many tokens as models have, and taps that are owed for longer than the drafter may leave them."""
    model = tiny_model("llama", dtype=torch.float64, vocab_size=49_152)
    target = Target(model.to("cuda"), "llama")
    plain = write(engine(target, None, "autoregressive", "host"), sampling, 160)
    pairs, *others = tiny_dflash(target, rank=4), *(tiny_dflash(target, form=form) for form in ("DFlash 2", "DSpark"))
    for drafter in (pairs, *others, worse(pairs, 1.0, target.vocab_size)):
        assert write(engine(target, drafter, "bastion:16"), sampling, 160) == plain


def test_ways_of_drawing_do_not_push_each_other_out() -> None:
    target = on_device()
    made = engine(target, tiny_dflash(target), "bastion")
    for _ in range(2):
        for sampling in SAMPLINGS.values():
            write(made, sampling)
    graphs = len(made.device.graphs)
    for sampling in SAMPLINGS.values():
        write(made, sampling)
    assert len(made.device.graphs) == graphs < MOST
