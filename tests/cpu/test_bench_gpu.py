"""`draftwood bench gpu` from end to end on a CPU: the same code as on a GPU, but for the clock and the graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from draftwood import cli, memory, registry
from draftwood.assemble import build_engine
from draftwood.bench import command
from draftwood.bench.gpu import real, run
from draftwood.bench.gpu.answers import PLAIN, POLICIES, Writer
from draftwood.bench.gpu.options import MOST_WIDTHS, GpuOptions
from draftwood.bench.gpu.parts import SLACK
from draftwood.bench.gpu.rates import GSM8K, PUBLISHED, RANKS, Rates, find_rates, from_trace
from draftwood.bench.gpu.report import print_rows
from draftwood.bench.gpu.shapes import SHAPES, TINY, shape
from draftwood.bench.gpu.synthetic import check_room, random_drafter, random_target
from draftwood.drafters.dflash_config import parse_config
from draftwood.embedded import EMBEDDED_DRAFTER
from draftwood.errors import BadInput
from draftwood.grow import Growth
from draftwood.latency import Machine
from draftwood.llm import LLM
from draftwood.recording import Answer, Header, Trace
from draftwood.trace import Round, tau
from draftwood.tree import Lattice
from tests.reference import byte_tokenizer, dflash_files, tiny_target

CPU = torch.device("cpu")
MACHINE = Machine("made-up", peak=1e12, bandwidth=1e10, launch_s=1e-6)
SMALL = dict(models=["tiny"], widths=[1, 4], contexts=[40], rates=["gsm8k"], new_tokens=12, device="cpu", quick=True)


@pytest.fixture(scope="module")
def models():
    target = random_target(TINY, CPU, torch.bfloat16)
    return target, random_drafter(TINY, target, positions=160)


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "probe", lambda device, dtype: MACHINE)


# --- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions", "drafter"),
    [("SmolLM2-135M", 134.5, None), ("Qwen3-0.6B", 596, None), ("Qwen3-4B", 4022, 537), ("Qwen3-8B", 8191, 1049),
     ("Llama-3.1-8B", 8030, None)],
)  # fmt: skip
def test_shapes_have_the_published_number_of_parameters(name: str, millions: float, drafter: float | None) -> None:
    config = AutoConfig.for_model(shape(name).family, **shape(name).target_config())
    assert memory.target_bytes(config, torch.bfloat16) / 2e6 == pytest.approx(millions, rel=2e-3)
    if drafter is not None:
        draft = parse_config(shape(name).drafter_config(), name)
        copies = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * draft.hidden_size
        assert (draft.block_parameters() + draft.context_parameters() - copies) / 1e6 == pytest.approx(
            drafter, rel=2e-3
        )


def test_tapped_layers_are_the_published_ones() -> None:
    assert parse_config(shape("qwen3-8b").drafter_config(), "").target_layer_ids == (1, 9, 17, 25, 33)


def test_an_unknown_shape_is_a_mistake() -> None:
    with pytest.raises(BadInput, match="Did you mean 'Qwen3-8B'"):
        shape("Qwen3-8C")


def test_the_text_of_a_random_target_does_not_hang_on_rounding(models: Any) -> None:
    target, _ = models
    ids = torch.randint(0, TINY.vocab, (1, 50), generator=torch.Generator().manual_seed(0))
    with target.plain_transformers() as model, torch.inference_mode():
        logits = model(input_ids=ids).logits[0].float()
    best, next_best = logits.topk(2).values.T
    assert torch.equal(logits.argmax(-1), ids[0])
    assert float(((best - next_best) / best).min()) > 0.25


# --- synthetic acceptance ------------------------------------------------------------------------------------------


def test_gsm8k_has_the_published_figures() -> None:
    chain, tree = (Growth(n, per_depth=one)(GSM8K.ranked(64), 0) for n, one in ((64, 1), (256, None)))
    assert GSM8K.expected_tau(chain) == pytest.approx(6.39, abs=0.02)
    assert 1 - GSM8K.spine[0, 0] == pytest.approx(0.112) and np.prod(GSM8K.spine[:, 0]) == pytest.approx(
        0.084, abs=1e-3
    )
    assert GSM8K.expected_tau(tree) == pytest.approx(7.77, abs=0.02)


def test_tau_9_56_is_what_it_says() -> None:
    rates = PUBLISHED["tau9.56"]
    assert rates.expected_tau(Growth(128)(rates.ranked(64), 0)) == pytest.approx(9.56, abs=0.02)


@pytest.mark.parametrize("rates", PUBLISHED.values(), ids=PUBLISHED)
def test_ranks_are_drawn_as_the_rates_say(rates: Rates) -> None:
    ranks = rates.draw(20_000, seed=0)
    tree = Growth(40)(rates.ranked(64), 0)
    emitted = np.ones(len(ranks))
    for node in range(1, 1 + len(tree)):
        path, at = [], node
        while at:
            path.append(tree.tokens[at])
            at = int(tree.parents[at])
        emitted += (ranks[:, : len(path)] == path[::-1]).all(1)
    assert emitted.mean() == pytest.approx(rates.expected_tau(tree), rel=0.02)


def test_candidates_fall_and_are_probabilities() -> None:
    logp = GSM8K.logp(200)
    assert logp.shape == (15, 200) and (np.diff(logp) <= 0).all() and (np.exp(logp).sum(1) <= 1 + 1e-6).all()


def test_fewer_and_more_depths() -> None:
    assert len(GSM8K.to_depth(9).spine) == 9
    assert (GSM8K.to_depth(20).spine[14:] == GSM8K.spine[14]).all()


def test_rates_of_a_trace_are_those_it_was_made_with() -> None:
    rates = GSM8K.to_depth(5)
    ranks = rates.draw(4000, seed=1)
    text = np.random.default_rng(2).integers(0, 9, size=len(ranks) + 6)
    rounds = []
    for at, row in enumerate(ranks):
        tokens = np.tile(10 + np.arange(RANKS), (5, 1))
        for d, rank in enumerate(row):
            if rank < RANKS:
                tokens[d, rank] = text[at + 1 + d]
        drawn = Lattice(tokens, np.zeros(tokens.shape, np.float32))
        empty = np.zeros(0)
        rounds.append(Round(100 + at, 0, True, empty, empty.astype(int), 0, {}, {}, draft=drawn))
    answer = Answer("p", "set", "record", 0.0, 100, text.tolist(), 0.0, 0.0, rounds)
    found = from_trace(Trace(Header("target", "drafter"), [answer]), "mine")
    np.testing.assert_allclose(found.spine, rates.spine, atol=0.03)
    np.testing.assert_allclose(found.branch[1:, 0], rates.branch[1:, 0], atol=0.1)
    assert found.branch[0].sum() == 0 and "4000 drafts of drafter for target" in found.source


def test_drafts_of_fewer_candidates_do_not_count_what_they_left_out_as_misses(tmp_path: Path) -> None:
    def answer(policy: str, tokens: list[list[int]]) -> Answer:
        draft = Lattice(np.array(tokens), np.zeros((len(tokens), len(tokens[0])), np.float32))
        drawn = Round(100, 0, True, np.zeros(0), np.zeros(0, int), [], {}, {}, draft=draft)
        return Answer("p", "set", policy, 0.0, 100, [5, 6, 7], 0.0, 0.0, [drawn])

    trace = Trace(Header("t", "d"), [answer("dflash", [[4], [4]]), answer("record", [[4, 6], [3, 7]])])
    found = from_trace(trace, "mine")
    assert found.spine[0, :2].tolist() == [0, 1] and "1 drafts" in found.source
    names = set()
    for folder, answers in (("a", trace.answers), ("b", trace.answers[1:])):
        (tmp_path / folder).mkdir()
        Trace(trace.header, answers).save(tmp_path / folder / "trace.jsonl")
        names.add(find_rates(str(tmp_path / folder / "trace.jsonl")).name)
    assert len(names) == 2, "all traces are called alike"


def test_unknown_rates_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gsm8k, tau9\.56 or a file"):
        find_rates("gsm9k")
    with pytest.raises(BadInput, match="no recorded lattice"):
        from_trace(Trace(Header("t", "d"), []), "empty")


def test_answers_accept_as_often_as_asked_and_say_the_same(models: Any) -> None:
    target, drafter = models
    writer = Writer(target, drafter, MACHINE, context=30, tokens=160)
    rates = GSM8K.to_depth(drafter.max_depth)
    turns = list(writer.measure(rates, ["dflash", "ddtree:20"], repeats=2))
    assert [turn[0].policy for turn in turns] == ["dflash", "ddtree:20"]
    for turn in turns:
        assert len({tuple(answer.tokens) for answer in turn}) == 1
    for policy in ("dflash", "ddtree:20"):
        rounds = [r for turn in turns for a in turn if a.policy == policy for r in a.rounds]
        expected = rates.expected_tau(registry.policy(policy).grow(rates.ranked(64), 0))
        spread = np.std([r.accepted for r in rounds]) / np.sqrt(len(rounds))
        assert abs(tau(rounds) - expected) < 4 * spread + 0.05  # the last round may be cut
        for answer in (a for turn in turns for a in turn if a.policy == policy):
            fair = answer.fair_tokens_per_s * answer.seconds / len(answer.rounds)
            assert fair == pytest.approx(expected, rel=0.06), (
                "what the draws gave does not count, but the last rounds do"
            )


def test_the_drafter_s_own_pass_runs_all_the_same(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, drafter = models
    placed = drafter.place(64)
    calls: list[int] = []
    monkeypatch.setattr(type(placed._placed), "draft", lambda self, *a: calls.append(1))
    placed.draft(torch.tensor([1]), torch.tensor(7), 4)
    assert calls == [1]


# --- the command ---------------------------------------------------------------------------------------------------


def bench(out: Path | None, **changes: Any) -> dict[str, Any]:
    return run.run_gpu_bench(GpuOptions(**{**SMALL, "out": out, **changes}))


def test_from_flags_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--models", "tiny", "--widths", "1,4", "--contexts", "40,60", "--rates", "gsm8k", "--new-tokens", "12"]
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "gpu", *flags, "--quick", "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)])
    assert not end.value.code
    out = capsys.readouterr().out
    summary = json.loads(out.splitlines()[-1])
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    timings = {(r["part"], r["width"], r["context"]): r for r in summary["rows"] if r["kind"] == "part"}
    forwards = [(part, w) for w in (1, 4) for part in ("verify", "accept", "commit", "verify, accept, commit")]
    once = [("transformers", 1), *((part, 0) for part in ("catch up", "draft", "grow", "catch up, draft, grow"))]
    assert set(timings) == {(*key, context) for key in (*forwards, *once) for context in (40, 60)}
    for row in timings.values():
        assert 0 < row["least_s"] <= row["seconds"] <= row["most_s"]
        assert (row["floor_s"] is None) == (row["part"] == "grow")
    answers = [r for r in summary["rows"] if r["kind"] == "answers"]
    assert {r["policy"] for r in answers} == {PLAIN, *POLICIES}
    assert all(r["synthetic"] and r["identical"] == 1 and r["tokens_per_s"] > 0 for r in answers)
    assert all(0 < r["choose_s"] < r["round_s"] for r in answers)
    sizes = [r for r in summary["rows"] if r["kind"] == "memory"]
    assert [(r["of"], r["context"]) for r in sizes] == [("parts", 40), ("parts", 60), ("answers", 60)]
    assert all(r["buffers"] > 0 and r["graphs"] == 0 for r in sizes), "nothing is captured on a CPU"
    assert all(r["target"] > 0 and r["drafter"] > 0 for r in sizes if r["of"] == "parts")
    assert "SYNTHETIC" in out and summary["left"] == [] and "published" in summary["synthetic_acceptance"]["gsm8k"]
    assert (tmp_path / "gpu.png").stat().st_size > 1000


def test_with_real_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--with-smollm2`, with a tiny model and drafter instead: the same rows, nothing of them synthetic."""
    target = tiny_target(dtype=torch.float32, vocab_size=257, max_position_embeddings=4096)
    dflash_files(target, tmp_path)
    engine = build_engine(target, str(tmp_path), registry.policy("bastion"))
    asked: dict[str, object] = {}
    monkeypatch.setattr(real, "load", lambda **given: (asked.update(given), LLM(engine, byte_tokenizer()))[1])
    monkeypatch.setattr(run.Models, "parts", lambda self, context: [])
    monkeypatch.setattr(run.Models, "answers", lambda self, context, rates: [])
    rows = bench(None, with_smollm2=True, new_tokens=4)["rows"]
    assert asked["drafter"] == str(EMBEDDED_DRAFTER)
    assert [(r["of"], r["context"]) for r in rows if r["kind"] == "memory"] == [("parts", 40)]
    parts = {(r["part"], r["width"]) for r in rows if r["kind"] == "part"}
    assert parts >= {("verify", 1), ("verify", 4), ("draft", 0)}
    answers = {r["policy"]: r for r in rows if r["kind"] == "answers"}
    assert set(answers) == {"transformers", PLAIN, *real.POLICIES} and not any(r["synthetic"] for r in answers.values())
    assert all(r["tokens_per_s"] > 0 and r["identical"] is not None for r in answers.values())
    assert "of its own drafter" in capsys.readouterr().out


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench(tmp_path, budget_s=1e-9)
    assert first["rows"] == [] and first["left"] == ["tiny, 40 tokens", "tiny, gsm8k"]
    monkeypatch.setattr(run.Models, "answers", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench(tmp_path)
    half = json.loads((tmp_path / "summary.json").read_text())
    assert half["left"] == ["tiny, gsm8k"] and half["rows"]
    monkeypatch.undo()
    monkeypatch.setattr(run, "probe", lambda device, dtype: MACHINE)
    monkeypatch.setattr(run.Models, "parts", lambda *a: pytest.fail("measured twice"))
    whole = bench(tmp_path)
    assert whole["rows"][: len(half["rows"])] == half["rows"] and whole["left"] == []


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.Models, "parts", lambda self, context: [{"model": "tiny", "kind": "other"}])
    monkeypatch.setattr(run.Models, "answers", lambda self, context, rates: [])
    bench(tmp_path)
    file = tmp_path / "groups.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-5])
    bench(tmp_path)
    assert file.read_text().count("tiny, gsm8k") == 1


def test_results_of_other_conditions_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(tmp_path, budget_s=1e-9)
    with pytest.raises(BadInput, match="name another folder"):
        bench(tmp_path, widths=[1, 8])


def test_what_does_not_fit_is_left_out_with_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 300_000)
    monkeypatch.setattr(run, "random_target", lambda *a: pytest.fail("allocated"))
    rows = bench(None)["rows"]
    assert {row["kind"] for row in rows} == {"skipped"}
    assert all("tiny in torch" not in row["reason"] and "293.0 KiB are free" in row["reason"] for row in rows)
    with pytest.raises(BadInput, match=r"Qwen3-8B in bfloat16 needs .* \(target 15\.3 GiB, drafter 2\.\d GiB, cache"):
        check_room(shape("Qwen3-8B"), CPU, torch.bfloat16, 4096)


def test_contexts_beyond_the_window_are_left_out() -> None:
    options = GpuOptions(**{**SMALL, "contexts": [40, TINY.positions - SLACK, TINY.positions]})
    assert run.Models(TINY, MACHINE, CPU, torch.float32, options).contexts == [40, TINY.positions - SLACK]


def test_all_models_by_default_and_two_for_a_quick_look() -> None:
    assert [s.name for s in GpuOptions().shapes()] == [s.name for s in SHAPES]
    assert [s.name for s in GpuOptions(quick=True).shapes()] == ["SmolLM2-135M", "Qwen3-8B"]
    assert GpuOptions().all_contexts() == [128, 1024, 4096, 16384]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": [0]}, "--widths is 0"),
        ({"widths": [*range(1, 1 + 2 * MOST_WIDTHS)]}, f"at most {MOST_WIDTHS} are measured"),
        ({"new_tokens": 1}, "at least 2"),
        ({"budget_s": 5.0}, "--budget needs --out"),
    ],
)
def test_flags_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        GpuOptions(**changes)


def test_numbers_on_the_command_line() -> None:
    assert command.parse_numbers("widths", "4, 1") == [4, 1]
    with pytest.raises(BadInput, match="--widths is '1,x'"):
        command.parse_numbers("widths", "1,x")


def test_tables_of_nothing() -> None:
    print_rows(run.Console(), [])
