"""The bench's loop: which method answers which prompt when, what counts, and drafters against each other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from draftwood import registry
from draftwood.assemble import build_engine
from draftwood.bench import measure, run
from draftwood.bench.baseline import Transformers
from draftwood.bench.measure import Settings
from draftwood.bench.options import BenchOptions
from draftwood.bench.stats import PLAIN, TRANSFORMERS
from draftwood.errors import BadInput
from draftwood.llm import LLM
from tests.bench_cases import METHODS, TREE, FakeLLM, run_fake, some_prompts
from tests.reference import byte_tokenizer, dflash_files, tiny_target

pytestmark = pytest.mark.usefixtures("scripted_transformers")


def test_methods_take_turns_at_every_token_and_none_is_always_behind_the_same() -> None:
    order = list(measure.turns(["a", "b", "c"], 40, seed=1))
    assert [goal for _, goal in order] == [1 + i // 3 for i in range(120)]
    assert all({method for method, _ in order[i : i + 3]} == {"a", "b", "c"} for i in range(0, 120, 3))
    before = [one for (one, _), (other, _) in pairwise(order) if other == "b"]
    assert min(before.count("a"), before.count("c")) > 5
    assert order == list(measure.turns(["a", "b", "c"], 40, seed=1))
    assert [goal for _, goal in measure.turns(["a", "b"], 70, 1, each=32)] == [32, 32, 64, 64, 70, 70]


def test_every_method_runs_on_every_prompt_and_each_goes_first_equally_often() -> None:
    llm = FakeLLM()
    summary = run_fake(llm)
    order = [method for method, _ in llm.asked[len(METHODS) :]]  # the warm-up comes first
    assert sorted(order) == sorted(METHODS * 6)
    assert sorted(order[::3]) == sorted(METHODS * 2)
    assert summary.policies[TREE].speedup_vs_transformers == pytest.approx(4)
    assert summary.policies[TREE].speedup_vs_plain == pytest.approx(2)


def test_the_warm_up_is_not_counted() -> None:
    summary = run_fake(FakeLLM(), count=2)
    assert summary.policies[TREE].tokens == 2 * 20


def test_a_text_that_differs_from_plain_decoding_is_counted() -> None:
    summary = run_fake(FakeLLM({TREE: "another answer"}))
    assert summary.policies[TREE].identical == 0
    assert summary.policies[TRANSFORMERS].identical == 6


def test_with_sampling_transformers_is_not_expected_to_write_the_same() -> None:
    summary = run_fake(FakeLLM(), temperature=1.0)
    assert summary.policies[TRANSFORMERS].identical is None
    assert summary.policies[TREE].identical == 6


def test_a_second_turn_continues_plain_decodings_answer_for_every_method() -> None:
    llm = FakeLLM({PLAIN: "plain words", TREE: "tree words"})
    summary = run_fake(llm, count=1, turns=2)
    second = [question for _, question in llm.asked if not isinstance(question, str)]
    assert len(second) == len(METHODS) and all(q == second[0] for q in second)
    assert [m["content"] for m in second[0]] == ["question 0 0", "plain words", "question 0 1"]
    assert summary.policies[TREE].prompts == 1 and summary.policies[TREE].tokens == 40


def test_ctrl_c_keeps_the_finished_turns() -> None:
    llm = FakeLLM(interrupt_at=3 + 2 * 3 + 2)  # in the middle of the third prompt
    seen: list[str] = []
    summary = measure.measure(
        llm,
        some_prompts(6),
        [TREE],
        Settings(20),
        finished=lambda turn: seen.append(turn[0].prompt),  # type: ignore[arg-type]
    )
    assert summary.partial and summary.policies[TREE].prompts == 2 and seen == ["p0", "p1"]
    assert summary.to_json()["partial"] is True


def test_ctrl_c_before_the_first_turn_leaves_an_empty_summary() -> None:
    summary = run_fake(FakeLLM(interrupt_at=1))
    assert summary.partial and summary.to_json()["policies"] == {}


def test_figures_are_also_given_by_data_set() -> None:
    datasets = run_fake(FakeLLM(), count=5).to_json()["datasets"]
    assert {name: table[TREE]["prompts"] for name, table in datasets.items()} == {"set0": 3, "set1": 2}


def test_an_unknown_policy_and_a_prompt_without_room_are_refused_before_any_work() -> None:
    llm = FakeLLM()
    with pytest.raises(BadInput, match="ddtree"):
        measure.measure(llm, some_prompts(1), ["ddtre:4"])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"Prompt p0 .* window of 400"):
        measure.measure(llm, some_prompts(1, turns=2), [TREE], Settings(200))  # type: ignore[arg-type]
    assert llm.asked == []


def test_a_baseline_named_as_a_policy_runs_once() -> None:
    assert measure.method_names([PLAIN, TREE, TRANSFORMERS, TREE]) == METHODS


# --- drafters against each other -----------------------------------------------------------------------------


def test_with_rivals_every_policy_meets_every_drafter_and_each_row_names_both() -> None:
    assert measure.method_names([PLAIN, TREE, "dflash"], ["a", "b"]) == (
        TRANSFORMERS, PLAIN, f"{TREE}@a", "dflash@a", f"{TREE}@b", "dflash@b",
    )  # fmt: skip
    mine, theirs = FakeLLM({TREE: "the answer"}), FakeLLM({TREE: "another answer"})
    rivals: Any = {"shipped": mine, "ngram+recycling": theirs}
    summary = measure.measure(mine, some_prompts(4), [TREE], Settings(20), rivals=rivals)  # type: ignore[arg-type]
    table = summary.to_json()["policies"]
    assert list(table) == [TRANSFORMERS, PLAIN, f"{TREE}@shipped", f"{TREE}@ngram+recycling"]
    assert [row["policy"] for row in table.values()] == [TRANSFORMERS, PLAIN, TREE, TREE]
    assert [row["drafter"] for row in table.values()] == ["none", "none", "shipped", "ngram+recycling"]
    assert [row["identical"] for row in table.values()] == [4, 4, 4, 0]
    assert mine.loaded == ["none"] and {method for method, _ in theirs.asked} == {TREE}
    over = summary.to_json()["against"]
    assert set(over) == {"all", "set0", "set1"} and list(over["all"]) == [f"{TREE}@ngram+recycling"]
    row = over["all"][f"{TREE}@ngram+recycling"]
    assert row["of"] == f"{TREE}@shipped" and row["speed"] == row["tau"] == pytest.approx(1)
    assert row["speed_interval"] == pytest.approx([1, 1])


def test_drafters_are_compared_on_one_target_each_with_its_own_taps(tmp_path, monkeypatch) -> None:
    """Real models: the drafters read different layers, learn apart, and all write plain decoding's text."""
    monkeypatch.setattr(measure, "Transformers", Transformers)
    target = tiny_target(vocab_size=257)
    for seed, (name, taps) in enumerate({"a": (0, 2), "b": (1,)}.items()):
        dflash_files(target, tmp_path / name, seed, taps)
    specs = [str(tmp_path / "a"), f"{tmp_path / 'b'}+ngram+recycling", "ngram"]
    llm = LLM(build_engine(target, specs[0], registry.policy(TREE)), byte_tokenizer())
    rivals = run.rivals(llm, BenchOptions(drafter=[specs[0]], against=specs[1:]))
    assert list(rivals) == ["a", "b+ngram+recycling", "ngram"]
    assert all(each.target is target for each in rivals.values())
    summary = measure.measure(llm, some_prompts(2), [TREE, "bastion"], Settings(12), rivals=rivals)
    assert len(summary.policies) == 2 + 2 * 3
    assert all(row["identical"] == 2 for row in summary.to_json()["policies"].values())


def test_blind_is_the_same_drafter_without_foresight(monkeypatch) -> None:
    monkeypatch.setattr(measure, "Transformers", Transformers)
    target = tiny_target(vocab_size=257)
    llm = LLM(build_engine(target, "ngram", registry.policy(TREE)), byte_tokenizer())
    rivals = run.rivals(llm, BenchOptions(drafter=["ngram"], against=["blind"]))
    assert [each.engine.foresight for each in rivals.values()] == [True, False] and list(rivals) == ["ngram", "blind"]
    assert rivals["blind"].engine.drafter.name == "ngram" and rivals["blind"].fresh().engine.foresight is False
    summary = measure.measure(llm, some_prompts(2), [TREE], Settings(12, temperature=1.0), rivals=rivals)
    assert [row["identical"] for row in summary.to_json()["policies"].values()][1:] == [2, 2, 2]


def test_drafters_of_one_name_keep_their_folders(tmp_path) -> None:
    target = tiny_target(vocab_size=257)
    specs = [str(tmp_path / parent / "drafter") for parent in ("x", "y")]
    for spec in specs:
        Path(spec).parent.mkdir()
        dflash_files(target, Path(spec))
    llm = LLM(build_engine(target, specs[0], registry.policy(TREE)), byte_tokenizer())
    assert list(run.rivals(llm, BenchOptions(drafter=specs[:1], against=specs[1:]))) == specs
    assert measure.label("d2sd:/there/one,owner/two,passes=2") == "d2sd:one,two,passes=2"
