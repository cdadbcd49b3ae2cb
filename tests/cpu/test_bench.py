"""The bench: its accounting by definition, its prompt sets, its files, and what it refuses."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood import registry
from draftwood.assemble import build_engine
from draftwood.bench import environment, hub, measure, plots, prompts, records, report, run
from draftwood.bench.baseline import Transformers
from draftwood.bench.measure import Settings, Summary
from draftwood.bench.options import BenchOptions
from draftwood.bench.prompts import Prompt
from draftwood.bench.stats import PLAIN, TRANSFORMERS, Run, bootstrap, compare, jsonable, summarize, what_if
from draftwood.cores import Load
from draftwood.errors import BadInput, DraftwoodError, MissingExtra
from draftwood.footprint import Footprint
from draftwood.latency import Machine, Work
from draftwood.llm import LLM
from draftwood.packing import PackedLinear, pack_linears
from draftwood.recording import Trace
from draftwood.trace import VERBS, Round
from tests.reference import byte_tokenizer, dflash_files, tiny_target

TREE = "ddtree:4"
METHODS = (TRANSFORMERS, PLAIN, TREE)


def a_round(accepted: int = 1, n: int = 4, seconds: float = 0.04, predicted: float = 0.05) -> Round:
    """Three quarters verify, one quarter commit."""
    by_verb = {"verify": 0.75 * seconds, "commit": 0.25 * seconds}
    parts = {"verify": 0.8 * predicted, "aux": 0.2 * predicted} if predicted else {}
    return Round(9, n, n > 0, np.ones(n, np.float32), np.ones(n, np.int64), range(1, 1 + accepted), by_verb, parts)


def a_run(prompt: str, method: str, tokens: int, decode_s: float, **more: object) -> Run:
    return Run(prompt, "set", 0, method, "text", tokens, 0.5, decode_s, **more)  # type: ignore[arg-type]


# --- figures by definition -------------------------------------------------------------------------------


def test_speed_counts_tokens_after_the_first_and_leaves_the_prefill_out() -> None:
    runs = [a_run(p, m, 11, s) for p, s in (("a", 1.0), ("b", 3.0)) for m in METHODS]
    stats = summarize(runs, METHODS)[TREE]
    assert stats.tokens_per_s == pytest.approx(20 / 4)
    assert stats.end_to_end_tokens_per_s == pytest.approx(22 / (4 + 2 * 0.5))


def test_speedups_are_ratios_of_total_rates_not_means_of_ratios() -> None:
    seconds = {TRANSFORMERS: (2.0, 6.0), PLAIN: (1.0, 5.0), TREE: (1.0, 1.0)}
    runs = [a_run(p, m, 11, seconds[m][i]) for i, p in enumerate("ab") for m in METHODS]
    stats = summarize(runs, METHODS)
    assert stats[TREE].speedup_vs_transformers == pytest.approx(8 / 2)
    assert stats[TREE].speedup_vs_plain == pytest.approx(6 / 2)
    assert stats[PLAIN].speedup_vs_plain == 1
    assert stats[TRANSFORMERS].speedup_vs_plain == pytest.approx(6 / 8)


def test_the_interval_of_a_method_against_itself_has_no_width() -> None:
    runs = [a_run(str(i), m, 11, 1.0 + i) for i in range(5) for m in METHODS]
    low, high = summarize(runs, METHODS)[PLAIN].speedup_vs_plain_interval or (0, 0)
    assert low == pytest.approx(1) and high == pytest.approx(1)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(100):
        tokens = rng.integers(50, 150, 40).astype(float)
        slow = tokens * 0.02 * rng.lognormal(0, 0.2, 40)
        fast = tokens * 0.01 * rng.lognormal(0, 0.2, 40)
        low, high = bootstrap(np.stack([tokens, fast], 1), np.stack([tokens, slow], 1), trial) or (0, 0)
        hits += low <= 2.0 <= high
    assert 85 <= hits <= 100


def test_one_prompt_has_no_interval_and_the_same_seed_gives_the_same_one() -> None:
    many = np.random.default_rng(0).random((9, 2)) + 1
    assert bootstrap(many[:1], many[:1], 0) is None
    assert bootstrap(many, many[::-1], 3) == bootstrap(many, many[::-1], 3)


def test_methods_take_turns_at_every_token_and_none_is_always_behind_the_same() -> None:
    order = list(measure.turns(["a", "b", "c"], 40, seed=1))
    assert [goal for _, goal in order] == [1 + i // 3 for i in range(120)]
    assert all({method for method, _ in order[i : i + 3]} == {"a", "b", "c"} for i in range(0, 120, 3))
    before = [one for (one, _), (other, _) in pairwise(order) if other == "b"]
    assert min(before.count("a"), before.count("c")) > 5
    assert order == list(measure.turns(["a", "b", "c"], 40, seed=1))
    assert [goal for _, goal in measure.turns(["a", "b"], 70, 1, each=32)] == [32, 32, 64, 64, 70, 70]


def test_a_prompt_is_identical_only_if_all_its_turns_are() -> None:
    runs = [
        a_run("a", TREE, 5, 1.0, identical=True),
        a_run("a", TREE, 5, 1.0, identical=False),
        a_run("b", TREE, 5, 1.0, identical=True),
    ]
    runs += [a_run(p, m, 5, 1.0, identical=None) for p in "ab" for m in (TRANSFORMERS, PLAIN)]
    stats = summarize(runs, METHODS)
    assert (stats[TREE].identical, stats[TREE].prompts) == (1, 2)
    assert stats[TRANSFORMERS].identical is None


def test_rounds_give_tau_width_verbs_host_share_and_latency_error() -> None:
    wide, silent = a_round(accepted=3, n=6, predicted=0.02), a_round(accepted=1, n=0, predicted=0)
    rounds = [a_round(accepted=0, n=2), wide, silent]
    runs = [a_run("a", m, 5, 1.0, rounds=rounds if m == TREE else ()) for m in METHODS]
    stats = summarize(runs, METHODS)[TREE]
    assert stats.tau == pytest.approx((1 + 4 + 2) / 3)
    assert stats.mean_width == pytest.approx((3 + 7 + 1) / 3)
    assert stats.widths == {1: 1, 3: 1, 7: 1} and stats.accepted == {0: 1, 1: 1, 3: 1}
    assert stats.verb_ms["verify"] == pytest.approx(30) and stats.round_ms == pytest.approx(40)
    assert stats.host_share == pytest.approx(0.25)
    assert stats.draftless_rounds == 1
    errors = stats.latency_errors
    assert errors["round"].median == pytest.approx((0.25 + 0.5) / 2)  # 50 and 20 ms expected of 40
    assert errors["verify"].median == pytest.approx((10 / 30 + 14 / 30) / 2)  # 40 and 16 of 30
    assert math.isnan(errors["draft"].median)


def test_without_rounds_every_forward_emits_one_token() -> None:
    stats = summarize([a_run("a", m, 5, 1.0) for m in METHODS], METHODS)[TRANSFORMERS]
    assert stats.tau == 1 and stats.mean_width == 1
    assert stats.to_json()["round_ms"] is None


def test_answers_of_one_token_have_no_speed_rather_than_a_wrong_one() -> None:
    stats = summarize([a_run("a", m, 1, 0.0) for m in METHODS], METHODS)[TREE]
    assert math.isnan(stats.tokens_per_s) and math.isnan(stats.speedup_vs_plain)
    json.dumps(stats.to_json(), allow_nan=False)


def test_what_if_divides_tau_by_the_measured_round_and_leaves_out_the_impossible() -> None:
    rounds = [a_round(n=4, seconds=0.1)] * 5 + [a_round(n=15, seconds=0.2)] * 5 + [a_round(n=7)] * 4
    table = what_if([*rounds, *[a_round(n=0)] * 9], plain_tokens_per_s=10)
    assert set(table) == {5, 16}  # width 8 was seen too rarely, width 1 drafted nothing
    assert table[5]["tokens_per_s"] == {3: pytest.approx(30), 5: pytest.approx(50)}
    assert table[16]["speedup_vs_plain"][7] == pytest.approx(3.5)


def test_json_has_text_keys_and_no_nan() -> None:
    found = jsonable({1: float("nan"), "a": (float("inf"), 2.5, {3: None})})
    assert found == {"1": None, "a": [None, 2.5, {"3": None}]}


# --- the loop --------------------------------------------------------------------------------------------


class FakeLLM:
    """Answers a fixed text at a fixed speed per policy, and remembers what it was asked."""

    def __init__(self, texts: dict[str, str] | None = None, interrupt_at: int | None = None) -> None:
        self.texts, self.interrupt_at = texts or {}, interrupt_at
        self.asked: list[tuple[str, object]] = []
        work = Work(flops=2e9, bytes=1e9, launches=7)
        self.target = SimpleNamespace(
            name="fake",
            path=SimpleNamespace(kind="lean"),
            context_limit=400,
            device=torch.device("cpu"),
            dtype=torch.float32,
            work=lambda tokens, context: work,
            footprint=Footprint(1e6, 4, 64, 2, 512, 30),
        )
        self.drafter = None
        machine = Machine("here", peak=1e12, bandwidth=2e10, launch_s=1.0)
        self.engine = SimpleNamespace(latency=SimpleNamespace(machine=machine), tap=lambda: None)
        self.loaded: list[str] = []

    def fresh(self) -> FakeLLM:
        return self

    def with_drafter(self, drafter: str) -> FakeLLM:
        self.loaded.append(drafter)
        return self

    def encode(self, prompt: object) -> list[int]:
        return [1] * len(str(prompt).split())

    def answer(self, method: str, question: object, size: int) -> SimpleNamespace:
        self.asked.append((method, question if isinstance(question, str) else [dict(m) for m in question]))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        seconds = {TRANSFORMERS: 0.4, PLAIN: 0.2}.get(method, 0.1)
        rounds = [] if method == TRANSFORMERS else [a_round()]
        text = self.texts.get(method, "the answer")
        times = {"prefill_s": 0.1, "decode_s": seconds * (size - 1)}
        return SimpleNamespace(text=text, token_ids=list(range(size)), prompt_tokens=5, rounds=rounds, **times)

    def generate(self, question: object, *, max_new_tokens: int, policy: str, **_: object) -> SimpleNamespace:
        return self.answer(policy, question, max_new_tokens)


@pytest.fixture(autouse=True)
def scripted_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(llm: FakeLLM) -> SimpleNamespace:
        return SimpleNamespace(generate=lambda question, size, *_: llm.answer(TRANSFORMERS, question, size))

    monkeypatch.setattr(measure, "Transformers", SimpleNamespace(beside=beside))


def some_prompts(count: int, turns: int = 1) -> list[Prompt]:
    asked = [tuple(f"question {i} {turn}" for turn in range(turns)) for i in range(count)]
    return [Prompt(f"p{i}", f"set{i % 2}", questions) for i, questions in enumerate(asked)]


def run_fake(llm: FakeLLM, count: int = 6, turns: int = 1, **options: object) -> Summary:
    settings = Settings(max_new_tokens=20, **options)  # type: ignore[arg-type]
    return measure.measure(llm, some_prompts(count, turns), [TREE], settings)  # type: ignore[arg-type]


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


def test_drafters_are_compared_by_totals() -> None:
    ours = [a_run(p, "a", 11, s, rounds=[a_round(accepted=4)] * 2) for p, s in (("x", 1.0), ("y", 3.0))]
    theirs = [a_run(p, "b", 11, 4.0, rounds=[a_round(accepted=1)] * 5) for p in ("x", "y")]
    found = compare(ours, theirs)
    assert found["speed"] == pytest.approx(8 / 4) and found["tau"] == pytest.approx(5 / 2)
    assert found["end_to_end"] == pytest.approx((22 / 5) / (22 / 9))


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


def test_the_tables_show_every_method() -> None:
    summary = run_fake(FakeLLM())
    policies = {name: replace(stats, ties=[0.5, 1.5]) for name, stats in summary.policies.items()}
    against = {"all": {f"{TREE}@rival": {"speed": 1.2, "speed_interval": [1.1, 1.3], "tau": 3, "tau_interval": [2, 4]}}}
    ceiling = {"plain_tokens_per_s": 9.0, "bytes_per_token": 1e6, "bandwidth_bytes_per_s": 1e9}
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_tables(console, policies, summary.datasets, summary.what_if, ceiling, against)
    text = console.export_text()
    assert all(name in text for name in METHODS) and "6/6" in text and "4.00" in text
    assert f"{TREE} 1.5 (2 texts)" in text and f"{TREE}@rival" in text and "1.20" in text


# --- the whole command ------------------------------------------------------------------------------------


def test_the_last_line_of_stdout_is_the_summary(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    returned = run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=4, out=tmp_path))
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert printed == json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(returned))
    wanted = {*measure.HEADLINES, "end_to_end_tokens_per_s", "widths", "verb_ms", "host_share"}
    assert set(printed["policies"]) == set(METHODS) and wanted <= set(printed["policies"][TREE])
    assert printed["ceiling"]["plain_tokens_per_s"] == pytest.approx(2e10 / 1e9)
    assert printed["prompt_set"] == {"prompts": 4, "sha256": prompts.fingerprint(prompts.load_prompts([], 4))}
    assert {"settings", "environment", "memory", "what_if", "datasets"} <= set(printed)


def test_a_ceiling_that_plain_decoding_passes_is_measured_again(monkeypatch) -> None:
    monkeypatch.setattr(run.probe, "probe", lambda device, dtype: Machine("here", 1e12, 3e10, 1.0))
    llm = FakeLLM()
    assert run.ceiling(llm, 0, reached=19.9)["plain_tokens_per_s"] == pytest.approx(20)
    assert run.ceiling(llm, 0, reached=20.1)["bandwidth_bytes_per_s"] == 3e10


def test_a_trace_holds_every_answer_of_ours_and_one_that_drafts_everywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=2, out=tmp_path, trace=True, json=True))
    trace = Trace.load(tmp_path / records.TRACE)
    assert sorted(a.policy for a in trace.answers) == sorted([PLAIN, TREE, "record"] * 2)
    assert trace.header.facts["footprint"]["layers"] == 2 and trace.header.facts["machine"]["peak"] == 1e12
    assert all(list(a.tokens) == list(range(20)) and len(a.rounds) == 1 for a in trace.answers)
    with pytest.raises(BadInput, match="--out"):
        BenchOptions(trace=True)
    run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=2, out=tmp_path, json=True))
    assert not (tmp_path / records.TRACE).exists(), "it is another run's, which a report would draw as this one's"


def test_json_alone_leaves_stdout_to_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=1, json=True))
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(("taken", "told"), [(0.93, True), (0.1, False), (None, False)])
def test_a_neighbour_that_slowed_it_down_is_told(taken: float | None, told: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    monkeypatch.setattr(Load, "others", lambda self: taken)
    facts = run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=4, json=True))
    assert facts["environment"]["cores_of_others"] == taken
    assert ("Other programs took 0.9 of " in capsys.readouterr().err) == told


def test_an_interrupted_command_writes_what_it_has_and_passes_the_interrupt_on(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM(interrupt_at=3 + 3 + 2))
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=4, out=tmp_path))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["partial"] and written["policies"][TREE]["prompts"] == 1
    assert "Interrupted" in capsys.readouterr().err


def test_mistakes_are_found_before_a_model_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "file").write_text("")
    for options in (
        {"policies": ["bastian"]},
        {"out": tmp_path / "file"},
        {"prompts": [str(tmp_path / "absent.jsonl")]},
        {"temperature": float("nan")},
    ):
        with pytest.raises(BadInput):
            run.run_bench(BenchOptions(**options))


# --- the outside baseline --------------------------------------------------------------------------------


class TinyLLM:
    """A real transformers model of two layers behind the few names that the baseline uses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config).eval()
        self.target = SimpleNamespace(
            name="tiny",
            device=self.model.device,
            dtype=self.model.dtype,
            model=self.model,
            plain_transformers=lambda: nullcontext(self.model),
        )
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
        self.stop_ids: frozenset[int] = frozenset()

    def encode(self, _prompt: object) -> list[int]:
        return [3, 5, 7]


def test_generate_is_timed_from_the_first_token_and_greedy_at_temperature_zero() -> None:
    llm = TinyLLM()
    made = Transformers.beside(llm).generate("x", 6, 0.0, 0)  # type: ignore[arg-type]
    ids = torch.tensor([llm.encode("x")])
    for _ in range(6):
        ids = torch.cat([ids, llm.model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    assert made.token_ids == ids[0, 3:].tolist()
    assert made.text == " ".join(map(str, made.token_ids))
    assert made.prefill_s > 0 and made.decode_s > 0


def test_generate_stops_where_the_other_methods_stop() -> None:
    llm = TinyLLM()
    free = Transformers.beside(llm).generate("x", 6, 0.0, 0).token_ids  # type: ignore[arg-type]
    llm.stop_ids = frozenset([free[2]])
    stopped = Transformers.beside(llm).generate("x", 6, 0.0, 0).token_ids  # type: ignore[arg-type]
    assert stopped == free[: free.index(free[2]) + 1]


def test_generate_samples_by_seed_and_leaves_the_random_state_alone() -> None:
    llm = TinyLLM()
    state = torch.random.get_rng_state()
    texts = [Transformers.beside(llm).generate("x", 12, 2.0, seed).text for seed in (1, 1, 2)]  # type: ignore[arg-type]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(state, torch.random.get_rng_state())


def test_packed_weights_are_not_what_users_have(tmp_path) -> None:
    llm = TinyLLM()
    llm.model.save_pretrained(tmp_path)
    llm.target.name = str(tmp_path)
    expected = Transformers.beside(llm).generate("x", 6).token_ids
    pack_linears(llm.model)
    if not any(isinstance(module, PackedLinear) for module in llm.model.modules()):
        pytest.skip("this processor packs nothing")
    outside = Transformers.beside(llm)
    assert outside.copy is not None and outside.generate("x", 6).token_ids == expected
    assert not any(isinstance(module, PackedLinear) for module in outside.copy.modules())


# --- prompts ---------------------------------------------------------------------------------------------


def test_the_packaged_set_covers_four_kinds_in_turn() -> None:
    default = prompts.load_prompts([])
    kinds = {p.dataset: [q for q in default if q.dataset == p.dataset] for p in default}
    assert set(kinds) == {"maths", "code", "chat", "summary"}
    assert all(len(kind) >= 10 for kind in kinds.values())
    assert len({p.dataset for p in prompts.load_prompts([], limit=4)}) == 4
    assert all(p.turns[0].endswith(hub.BOXED) for p in kinds["maths"])


def test_a_file_needs_only_turns_and_limit_holds_for_every_source(tmp_path) -> None:
    for name in ("one", "two"):
        lines = [json.dumps({"turns": [f"{name} {i}", "and then?"]}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    found = prompts.load_prompts([str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")], limit=2)
    assert [p.id for p in found] == ["one/1", "one/2", "two/1", "two/2"]
    assert found[0] == Prompt("one/1", "one", ("one 0", "and then?"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"turns": ["a"]', "not valid JSON"),
        ("[1]", "JSON object was expected, not list"),
        ('{"prompt": "a"}', "'turns' must be"),
        ('{"turns": []}', "'turns' must be"),
        ('{"turns": "a"}', "'turns' must be"),
        ('{"turns": ["a", " "]}', "'turns' must be"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line: str, complaint: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"turns": ["fine"]}}\n\n{line}\n')
    with pytest.raises(BadInput, match=f"mine.jsonl, line 3: .*{complaint}"):
        prompts.load_prompts([str(path)])


def test_files_that_cannot_be_used_are_refused(tmp_path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for source, complaint in [
        (tmp_path / "empty.jsonl", "holds no prompts"),
        (tmp_path / "binary.jsonl", "not UTF-8"),
        (tmp_path / "absent.jsonl", "no such file"),
        (tmp_path, "cannot be read"),
        ("gsm8", "Did you mean 'gsm8k'"),
    ]:
        with pytest.raises(BadInput, match=complaint):
            prompts.load_prompts([str(source)])


def test_an_id_may_not_be_used_twice(tmp_path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"id": "x", "turns": ["a"]}\n{"id": "x", "turns": ["b"]}\n')
    with pytest.raises(BadInput, match="'x'"):
        prompts.load_prompts([str(path)])


def test_the_fingerprint_changes_with_text_and_order() -> None:
    a, b = some_prompts(2)
    prints = {prompts.fingerprint(p) for p in ([a, b], [b, a], [a], [a, Prompt(b.id, b.dataset, ("other",))])}
    assert len(prints) == 4 and prompts.fingerprint([a, b]) in prints


ROWS = {
    "gsm8k": ({"question": "1+1?", "answer": "2"}, ("1+1?" + hub.BOXED,)),
    "math500": ({"problem": "x=?"}, ("x=?" + hub.BOXED,)),
    "aime25": ({"problem": "y=?"}, ("y=?" + hub.BOXED,)),
    "humaneval": (
        {"prompt": "def f():\n"},
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```",
        ),
    ),
    "mbpp": ({"prompt": "Write f."}, ("Write f.",)),
    "mt-bench": ({"prompt": ["first", "second"]}, ("first", "second")),
    "alpaca": ({"instruction": "Do it.", "input": "", "output": "done"}, ("Do it.",)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_the_harness_prompt(name: str) -> None:
    row, turns = ROWS[name]
    assert hub.DATASETS[name].turns(row) == turns


def test_alpaca_adds_its_input_and_livecodebench_its_starter_code() -> None:
    assert hub.alpaca({"instruction": "Sum.", "input": "1 2"}) == ("Sum.\n\nInput:\n1 2",)
    (with_code,) = hub.livecodebench({"question_content": "Q", "starter_code": "class A:"})
    (without,) = hub.livecodebench({"question_content": "Q", "starter_code": ""})
    assert "### Question:\nQ\n" in with_code and "```python\nclass A:\n```" in with_code
    assert "# YOUR CODE HERE" in without
    assert with_code.endswith("backticks)") and without.endswith("backticks)")


def test_every_data_set_is_loaded_with_its_table_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(path: str, config: str | None, *, split: str, data_files: object) -> list[dict[str, str]]:
        calls.append((path, config, split, data_files))
        return [{"question": "a"}, {"question": "b"}]

    monkeypatch.setattr(hub, "hub_loader", lambda name: load)
    found = prompts.load_prompts(["gsm8k"], limit=1)
    assert calls == [("openai/gsm8k", "main", "test", None)]
    assert found == [Prompt("gsm8k/0", "gsm8k", ("a" + hub.BOXED,))]


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> list[dict[str, str]]:
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setattr(hub, "hub_loader", lambda name: offline)
    with pytest.raises(BadInput, match=r"gsm8k \(openai/gsm8k\).*Couldn't reach the Hub\)") as caught:
        prompts.load_prompts(["gsm8k"])
    assert "\n" not in str(caught.value)


def test_without_the_datasets_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtra, match="draftwood\\[datasets"):
        prompts.load_prompts(["mbpp"])


# --- files, environment, options -------------------------------------------------------------------------


def test_runs_and_rounds_are_on_disk_turn_by_turn(tmp_path) -> None:
    folder = tmp_path / "deep" / "out"
    records.check_writable(folder)
    with records.recording(folder) as finished:
        summary = measure.measure(FakeLLM(), some_prompts(2), [TREE], Settings(20), finished=finished)  # type: ignore[arg-type]
        runs = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
        assert len(runs) == 2 * len(METHODS)  # flushed before the end
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [r["rounds"] for r in runs if r["method"] == TREE] == [1, 1]
    assert {(r["prompt"], r["policy"], r["round"]) for r in rounds} == {
        (p, m, 0) for p in ("p0", "p1") for m in (PLAIN, TREE)
    }
    records.write_summary(folder, summary.to_json())
    assert json.loads((folder / "summary.json").read_text())["policies"][TREE]["prompts"] == 2


def test_an_output_folder_that_cannot_be_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match=r"--out .*file.*name another folder"):
            records.check_writable(folder)
    records.check_writable(None)


def test_plots_are_written_or_their_absence_explained(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.bench.plots import save_plots

    summary = run_fake(FakeLLM())
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in save_plots(summary.policies, tmp_path)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    save_plots(summary.policies, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"speedup.png", "rounds.png", "widths.png"}


def test_plots_can_be_read_in_grey_and_widths_that_none_ran_at_are_zeros() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    policies = run_fake(FakeLLM()).policies
    policies = {
        name: replace(s, rounds=4, widths={1: 1, 9: 3}, verb_ms=dict.fromkeys(VERBS, 1.0))
        for name, s in policies.items()
    }
    widths, rounds = figure.subplots(1, 2)
    plots.draw_widths(widths, policies)
    plots.draw_rounds(rounds, policies)
    assert all(list(line.get_ydata()) == [0.25, *[0] * 7, 0.75] for line in widths.lines)
    assert len({(line.get_marker(), line.get_linestyle()) for line in widths.lines}) == len(policies)
    assert len({bars[0].get_hatch() for bars in rounds.containers}) == len(VERBS)


@pytest.mark.parametrize(
    ("called", "told"), [("/x/bin/draftwood", "draftwood"), ("/x/draftwood/__main__.py", "python -m draftwood")]
)
def test_a_command_is_told_as_it_was_typed(called: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [called, "bench", "--out", "a b"])
    assert environment.environment()["command"] == f"{told} bench --out 'a b'"


def test_the_environment_is_json_and_names_what_it_ran_on(tmp_path) -> None:
    facts = json.loads(json.dumps(environment.environment()))
    assert facts["versions"]["torch"] in torch.__version__ or torch.__version__ in facts["versions"]["torch"]
    assert facts["cores"] >= 1 and facts["command"] and facts["date"].endswith("+00:00")
    assert environment.commit(tmp_path) is None
    assert (environment.peak_memory()["peak_resident_bytes"] or 0) > 1e6


def test_a_trace_of_several_drafters_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="--against"):
        BenchOptions(against=["ngram"], trace=True, out=tmp_path)


@pytest.mark.parametrize("bad", [{"max_new_tokens": 1}, {"max_new_tokens": -3}, {"limit": 0}])
def test_numbers_that_cannot_be_used_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(DraftwoodError, match=str(next(iter(bad.values())))):
        BenchOptions(**bad)  # type: ignore[arg-type]
