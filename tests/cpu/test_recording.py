"""Traces: what is written is read back, damage is one sentence, and the text says how any draft would have fared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import recording
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.grow import grow
from draftwood.latency import LatencyModel, Machine
from draftwood.recording import Answer, Header, Trace, round_from_json, round_to_json
from draftwood.registry import policy
from draftwood.simulate import scripts
from draftwood.target import Target
from draftwood.trace import Errors, Round, prediction_errors
from draftwood.tree import Lattice
from tests.reference import Noisy

MACHINE = Machine("made up", 1e12, 1e10, 1e-6)


def some_lattice(seed: int, depth: int, width: int) -> Lattice:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(depth, width)) * 3
    logp = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True) + 1)), axis=1)
    return Lattice(rng.integers(0, 999, (depth, width)), logp.astype(np.float32))


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    lattice = some_lattice(draw(st.integers(0, 999)), draw(st.integers(0, 5)), draw(st.integers(1, 4)))
    whole = grow(lattice, 5, 12)
    tree = whole[: draw(st.integers(0, len(whole)))]
    draft = draw(st.sampled_from([lattice, whole, None]))
    if draft is None:
        tree = tree[:0]
    seconds, predicted = {"verify": 0.03, "draft": 0.01}, draw(st.sampled_from([{}, {"verify": 0.02, "aux": 1e-3}]))
    masses = tree.mass[1:], tree.depths[1:]
    padding, sure = draw(st.integers(0, 3)), draw(st.sampled_from([None, 0.125, 1.0]))
    positions = draw(st.sampled_from([None, 5])) if draft is not None else None
    faint = draw(st.sampled_from([0.0, 0.01]))
    known = {"draft": draft, "positions": positions, "confidence": sure, "faint": faint}
    return Round(7, len(tree), draft is not None, *masses, [], seconds, predicted, padding, **known)


@given(rounds())
@settings(max_examples=60)
def test_a_round_is_read_as_it_was_written(round: Round) -> None:
    again = round_from_json(json.loads(json.dumps(round_to_json(round))))
    for name in (
        "context",
        "n",
        "drafted",
        "path",
        "seconds",
        "predicted",
        "padding",
        "width",
        "positions",
        "confidence",
        "faint",
    ):
        assert getattr(again, name) == getattr(round, name), name
    np.testing.assert_allclose(again.mass, round.mass, rtol=1e-3)
    assert np.array_equal(again.depths, round.depths) and type(again.draft) is type(round.draft)
    if isinstance(round.draft, Lattice) and isinstance(again.draft, Lattice):
        assert again.draft.tokens.tolist() == round.draft.tokens.tolist()
        np.testing.assert_allclose(again.draft.logp.ravel(), round.draft.logp.ravel(), atol=6e-4)
    elif round.draft is not None and again.draft is not None and not isinstance(round.draft, Lattice):
        assert np.array_equal(again.draft.parents, round.draft.parents)  # type: ignore[union-attr]
        assert np.array_equal(again.draft.depths, round.draft.depths)  # type: ignore[union-attr]


def an_answer(name: str, rounds: list[Round] | None = None) -> Answer:
    return Answer(name, "set", "record", 0.0, 3, [10, 11, 12, 13], 0.1, 0.2, rounds or [])


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_grows_answer_by_answer(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    recording.start(path, Header("target", "drafter", {"machine": {"peak": 1.0}}))
    recording.append(path, [an_answer("a", [round_from_json({"c": 3, "a": [], "s": {"verify": 1.0}})])])
    recording.append(path, [an_answer("b")])
    trace = Trace.load(path)
    assert trace.header == Header("target", "drafter", {"machine": {"peak": 1.0}})
    assert [(a.prompt, len(a.rounds), list(a.tokens)) for a in trace.answers] == [
        ("a", 1, [10, 11, 12, 13]),
        ("b", 0, [10, 11, 12, 13]),
    ]


def test_a_turn_is_kept_apart_from_its_prompt_and_found_behind_it_in_older_traces(tmp_path: Path) -> None:
    path, answers = tmp_path / "t.jsonl", [an_answer("q#1"), replace(an_answer("q"), turn=1)]
    Trace(Header("t", "d"), answers).save(path)
    assert [(a.prompt, a.turn) for a in Trace.load(path).answers] == [("q#1", 0), ("q", 1)]
    assert len(scripts(answers)) == 2
    path.write_text(path.read_text().replace(',"turn":0', "").replace('"q","', '"q#x","').replace(',"turn":1', ""))
    assert [(a.prompt, a.turn) for a in Trace.load(path).answers] == [("q", 1), ("q#x", 0)]


def test_of_a_trace_that_was_cut_off_all_whole_answers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recording.start(path, Header("target", "drafter"))
    rounds = [round_from_json({"c": 3 + i, "a": [], "s": {"verify": 1.0}}) for i in range(3)]
    recording.append(path, [an_answer("a", rounds)])
    whole = path.stat().st_size
    recording.append(path, [an_answer("b", rounds)])
    written = path.read_bytes()
    for size in range(whole, len(written)):
        path.write_bytes(written[:size])
        assert [a.prompt for a in Trace.load(path).answers] == ["a"] + ["b"] * (size == len(written) - 1)
    Trace.load(path).save(tmp_path / "t.jsonl.gz")
    (tmp_path / "t.jsonl.gz").write_bytes((tmp_path / "t.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(BadInput, match="is cut off"):
        Trace.load(tmp_path / "t.jsonl.gz")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", '{"schema": 1, "target": 3}', '{"schema":1}\n{"x":1}'])
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match="not a trace"):
        Trace.load(path)


def test_another_schema_and_a_missing_or_damaged_file_say_so(tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text(json.dumps({"schema": 99, "target": "t", "other": 1}) + "\n")
    with pytest.raises(BadInput, match=r"is a trace of schema 99; this version reads schema .\.$"):
        Trace.load(tmp_path / "new.jsonl")
    with pytest.raises(BadInput, match=r"^There is no trace"):
        Trace.load(tmp_path / "none.jsonl")
    (tmp_path / "t.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(BadInput, match="cannot be read"):
        Trace.load(tmp_path / "t.jsonl.gz")


def test_the_record_of_an_engine_knows_what_the_target_wrote_after_every_draft(target: Target) -> None:
    drafter = Noisy("noisy", max_depth=3)
    engine = Engine(target, drafter, policy("record"), LatencyModel(MACHINE, target.work))
    prompt = [1, 2, 3]
    steps = list(engine.run(prompt, 12))
    tokens = [t for step in steps for t in step.tokens]
    answer = Answer("a", "", "record", 0.0, len(prompt), tokens, 0, 0, [s.round for s in steps if s.round])
    assert len(answer.rounds) == len(tokens) - 1, "one round for each token after the first"
    assert answer.rounds[-1].draft is None, "with one token to go there is nothing to draft"
    for i, round in enumerate(answer.rounds[:-1]):
        assert isinstance(round.draft, Lattice) and round.drafted and round.n == 0
        assert list(answer.continuation(round.context)) == tokens[i + 1 :]


def test_errors_are_relative_to_what_was_measured() -> None:
    errors = Errors.of([(1.1, 1.0), (0.8, 1.0), (1.0, 2.0), (1.0, 0.0)])
    assert errors.median == pytest.approx(0.2) and errors.p90 == pytest.approx(0.44)
    assert np.isnan(Errors.of([]).median)
    silent = round_from_json({"c": 3, "a": [], "s": {"verify": 1.0}})
    plain = round_from_json({"c": 3, "a": [], "s": {"verify": 1.0, "grow": 0.5}, "p": {"verify": 1.5, "aux": 0.5}})
    found = prediction_errors([silent, plain])
    assert found["verify"].median == pytest.approx(0.5) and found["aux"].median == 0
    assert found["round"].median == pytest.approx(1 / 3) and np.isnan(found["draft"].median)
