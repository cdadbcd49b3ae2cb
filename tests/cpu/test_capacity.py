"""Many users at once, replayed: the batch's own loop over recorded texts and modelled seconds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood import cli, registry
from draftwood.acceptance import AcceptanceModel
from draftwood.bench.capacity import prices, replay_load
from draftwood.bench.loads import Crowd
from draftwood.bench.simulation import crowded, run_simulation
from draftwood.footprint import Footprint
from draftwood.hardware import Hardware
from draftwood.latency import Machine, Work
from draftwood.ledger import Ledger
from draftwood.recording import Answer, Header, Trace
from draftwood.simulate import scripts
from draftwood.trace import Round
from draftwood.tree import Lattice

SIZES = Footprint(weight_bytes=1e9, itemsize=2, hidden_size=64, layers=4, kv_bytes=1000, launches=80)
DRAFT = Work(1e9, 1e7, 20)
FACTS = {
    "machine": {"name": "made up", "peak": 1e14, "bandwidth": 1e12, "launch_s": 1e-6},
    "footprint": {name: getattr(SIZES, name) for name in Footprint.__slots__},
    "draft_work": {"0": [1e9, 1e7, 20]},
}


def answer(seed: int, knows: int = 3, prompt: int = 10, new: int = 30) -> Answer:
    """A text with a draft behind every token, the first `knows` tokens of which are right."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 50, prompt + new)

    def draft(context: int) -> Lattice:
        following = np.append(text[context + 1 :], [0] * 8)[:6]
        likeliest = np.where(np.arange(6) < knows, following, 99)
        tokens = np.stack([likeliest, np.full(6, 98)], axis=1)
        return Lattice(tokens, np.log(np.tile([0.8, 0.1], (6, 1))).astype(np.float32))

    nothing = np.zeros(0, np.float32), np.zeros(0, np.int64)
    rounds = [
        Round(at, 0, True, *nothing, [], {"verify": 0.01}, {}, 0, draft(at)) for at in range(prompt, prompt + new - 1)
    ]
    return Answer(f"prompt {seed}", "made up", "record", 0.0, prompt, text[prompt:].tolist(), 0.1, 1.0, rounds)


@pytest.fixture
def trace() -> Trace:
    return Trace(Header("target", "drafter", FACTS), [answer(seed) for seed in range(4)])


def rate(trace: Trace, policy: str, users: int, machine: Machine | None = None, more: int = 0):
    machine = machine or Machine(**FACTS["machine"])
    price = prices(Hardware(machine), SIZES, lambda context: DRAFT, more)
    return replay_load(registry.policy(policy), scripts(trace.answers), price, users)


@pytest.mark.parametrize("policy", ["autoregressive", "dflash", "ddtree:4", "bastion"])
@pytest.mark.parametrize("users", [1, 3, 16])
def test_everybody_gets_the_recorded_text(trace: Trace, policy: str, users: int) -> None:
    """Tokens are counted while all users are there: whole answers, but for those of the last batch."""
    played = rate(trace, policy, users)
    whole = max(2 * users, 4) * 29
    assert whole - users * 29 < played.tokens <= whole
    assert played.rounds == played.batches * users


def test_one_plain_user_costs_what_the_roofline_says(trace: Trace) -> None:
    played = rate(trace, "autoregressive", 1)
    read = (SIZES.weight_bytes + 25 * SIZES.kv_bytes) / 1e12
    assert played.seconds / played.tokens == pytest.approx(read + 80e-6, rel=0.5)
    assert played.tokens == played.run == played.rounds


def test_where_reading_weights_takes_the_time_users_are_nearly_free(trace: Trace) -> None:
    one, many = rate(trace, "autoregressive", 1), rate(trace, "autoregressive", 16)
    assert 4 * one.tokens_per_s < many.tokens_per_s < 16 * one.tokens_per_s


def test_trees_pay_until_arithmetic_takes_the_time(trace: Trace) -> None:
    """On a machine that computes slowly bastion stops drafting in a crowd, and loses next to nothing."""
    slow = Machine("slow", 3e11, 1e12, 1e-6)
    assert rate(trace, "bastion", 1).tokens_per_s > 1.3 * rate(trace, "autoregressive", 1).tokens_per_s
    fixed, chosen, plain = (
        rate(trace, policy, 16, slow).tokens_per_s for policy in ("ddtree:4", "bastion", "autoregressive")
    )
    assert fixed < plain and chosen > 0.95 * plain


def test_what_is_learned_of_drafting_is_of_the_modelled_machine(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine takes to learn it."""
    spent: list[float] = []
    enter, observe = Ledger.enter, AcceptanceModel.observe

    def slowly(*args: Any, **named: Any) -> None:
        time.sleep(0.01)
        observe(*args, **named)

    def heard(self: Ledger, round: Round, plain_s: float) -> None:
        spent.append(round.total_s / plain_s)
        enter(self, round, plain_s)

    monkeypatch.setattr(Ledger, "enter", heard)
    monkeypatch.setattr(AcceptanceModel, "observe", slowly)
    played = rate(trace, "ddtree:4", 1)
    assert np.mean(spent[:-1]) == pytest.approx(
        played.seconds / played.batches / (1 / rate(trace, "autoregressive", 1).tokens_per_s), rel=0.01
    )


def test_what_a_drafter_shares_is_in_memory_once(trace: Trace) -> None:
    def stored(*draft: float) -> float:
        known = replace(trace, header=replace(trace.header, facts={**FACTS, "draft_work": {"0": draft}}))
        return crowded(known, ["ddtree:4"], ["h100"], None, Crowd([2]))[-1].gib

    assert stored(1e9, 2**30, 20) - stored(1e9, 2**30, 20, 2**28) == pytest.approx(0.25)


def test_drafts_that_no_drafter_ran_for_cost_none(trace: Trace) -> None:
    def silent(one: Answer) -> Answer:
        return replace(one, rounds=[replace(r, positions=0) for r in one.rounds])

    free = replace(trace, answers=list(map(silent, trace.answers)))
    usual, spared = (rate(of, "ddtree:4", 1) for of in (trace, free))
    price = prices(Hardware(Machine(**FACTS["machine"])), SIZES, lambda context: DRAFT)(1)
    drafts_s = round(usual.drafted) * price.costs(0, 25).draft_s
    assert spared.drafted == usual.drafted > 0 and spared.tokens == usual.tokens
    assert spared.seconds == pytest.approx(usual.seconds - drafts_s)


def test_users_are_named_where_something_is_asked_of_them() -> None:
    for flag in ("--context", "--price"):
        with pytest.raises(SystemExit) as end:
            cli.main(["simulate", "--trace", "t", flag, "8"])
        assert end.value.code == 2


def test_context_costs(trace: Trace) -> None:
    assert rate(trace, "ddtree:4", 8, more=100_000).tokens_per_s < 0.9 * rate(trace, "ddtree:4", 8).tokens_per_s


def test_the_command_tells_users_and_money(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.save(tmp_path / "trace.jsonl.gz")
    crowd = Crowd([1, 4], context=100, price=3.6)
    run_simulation(tmp_path / "trace.jsonl.gz", ["bastion"], ["h100"], "qwen3-8b", None, True, crowd)
    loads = json.loads(capsys.readouterr().out)["loads"]
    assert [(load["policy"], load["users"]) for load in loads] == [
        (policy, users) for users in (1, 4) for policy in ("autoregressive", "bastion")
    ]
    for load in loads:
        assert load["cost"] == pytest.approx(1000 / load["tokens_per_s"])
        assert load["each"] == pytest.approx(load["tokens_per_s"] / load["users"])
    assert loads[0]["speedup"] == loads[2]["speedup"] == 1
