"""Texts that part from plain decoding's: where, and how near to a tie the target is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood import registry
from draftwood.assemble import build_engine
from draftwood.bench import measure, report
from draftwood.bench.measure import Settings
from draftwood.bench.partings import parting, tie
from draftwood.bench.prompts import Prompt
from draftwood.bench.stats import PLAIN, Run
from draftwood.llm import LLM
from draftwood.target import Target
from tests.reference import byte_tokenizer, plain_logits, tiny_model, tiny_target

PROMPT = [(11 * i + 5) % 97 for i in range(13)]
TREE = "ddtree:4"


def test_a_parting_is_the_first_difference() -> None:
    assert parting([1, 2, 3], [1, 4, 3]) == 1
    assert parting([1, 2], [1, 2, 3]) is None and parting([], []) is None


@pytest.mark.parametrize("rank", [1, 2, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tie_is_counted_in_units_in_the_last_place(dtype: torch.dtype, rank: int) -> None:
    """However the text that parts goes on. Between the top two it is their gap, further down it is more."""
    target = tiny_target("qwen3", dtype=dtype)
    text = [8, 9]
    logits = plain_logits(target, PROMPT + text)[-1].double()
    best, order = float(logits.max()), logits.argsort(descending=True)
    largest = float(logits.abs().max())
    unit = next(2.0**e for e in range(20, -20, -1) if 2.0**e <= largest) * torch.finfo(dtype).eps
    found = tie(target, PROMPT, [*text, int(order[0]), 5], [*text, int(order[rank]), 6, 7])
    expected = (best - float(logits[order[rank]])) / unit
    assert found == pytest.approx(expected, rel=1e-4, abs=0 if dtype == torch.float64 else 4)


def test_texts_that_do_not_part_have_no_tie() -> None:
    assert tie(tiny_target(), PROMPT, [1, 2], [1, 2]) is None


def test_bench_says_how_near_the_tokens_are_where_texts_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is spoiled at its fourth token, by what the target likes second best."""
    target = Target(tiny_model("llama", torch.float32, vocab_size=257), "tiny")
    llm = LLM(build_engine(target, "ngram", registry.policy(TREE)), byte_tokenizer())
    answer = measure.Asker.__call__

    def spoiled(self: measure.Asker, prompt: Prompt, turn: int, messages: object, method: str) -> Run:
        run = answer(self, prompt, turn, messages, method)  # type: ignore[arg-type]
        if method != TREE:
            return run
        ids = list(run.token_ids)
        ids[3] = int(plain_logits(target, [*llm.encode("abc"), *ids[:3]])[-1].argsort(descending=True)[1])
        return replace(run, text="another", token_ids=ids)

    monkeypatch.setattr(measure.Asker, "__call__", spoiled)
    summary = measure.measure(llm, [Prompt("p", "set", ("abc",))], [TREE], Settings(8))
    assert summary.policies[TREE].identical == 0
    (gap,) = summary.policies[TREE].ties
    assert gap > 0 and not summary.policies[PLAIN].ties
    assert summary.policies[TREE].to_json()["ties"] == [gap]
    assert f"{TREE} {gap:.1f} (1 texts)" in report.ties_line(summary.policies)
    drawn = measure.measure(llm, [Prompt("p", "set", ("abc",))], [TREE], Settings(8, temperature=1.0))
    assert drawn.policies[TREE].identical == 0 and not drawn.policies[TREE].ties, "draws part at other places, too"
