"""`draftwood bench serve`: what is counted, and that all methods write the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from draftwood.bench.crowd import Crowd, CrowdOptions, Pass, length, mixed, run_crowd, summed
from draftwood.bench.prompts import Prompt
from draftwood.errors import BadInput
from tests.serving import tiny_llm


def test_every_load_and_method_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": f"p/{i}", "turns": [f"word {i} " * (1 + i)]}) + "\n" for i in range(5)))
    options = CrowdOptions((1, 3), ("bastion",), [str(file)], turns=2, max_new_tokens=6, repeats=2, out=tmp_path)
    facts = run_crowd(tiny_llm(), options, Console(quiet=True))
    assert facts == json.loads(capsys.readouterr().out) == json.loads((tmp_path / "summary.json").read_text())
    assert [(load["users"], load["method"]) for load in facts["loads"]] == [
        (1, "autoregressive"), (1, "bastion"), (3, "autoregressive"), (3, "bastion"),
    ]  # fmt: skip
    assert all(load["of_plain"] == 1 for load in facts["loads"] if load["method"] == "autoregressive")
    assert all(
        load["tokens_per_s"] > 0 and load["slowest_user"] <= load["user_tokens_per_s"] for load in facts["loads"]
    )


def test_all_seats_are_taken_while_the_clock_runs() -> None:
    llm = tiny_llm()
    options = CrowdOptions(turns=2, max_new_tokens=12)
    crowd = Crowd(llm, ["autoregressive", "ddtree:4", "bastion"], options)
    prompts = [llm.encode("a" * (1 + i)) for i in range(7)]
    rooms = crowd.rooms(3, prompts, seed=1)
    for room in rooms.values():
        found = room.heard.result()
        assert 396 <= found.tokens < 396 + 3 * 12 and found.users and found.seconds > 0
    assert rooms["autoregressive"].heard.result().width >= 3, "chunks of prompts and three roots"


def test_engines_know_what_was_measured_offline() -> None:
    llm = tiny_llm()
    llm.engine._offline = object()  # type: ignore[assignment]
    crowd = Crowd(llm, ["autoregressive", "caddtree"], CrowdOptions(turns=2, max_new_tokens=12))
    engine = crowd._engines["caddtree"]
    assert engine._offline is llm.engine._offline and engine.policy.name == "caddtree"


def test_sets_take_turns() -> None:
    prompts = [Prompt(f"{name}/{i}", name, ("x",)) for name, size in (("a", 3), ("b", 1)) for i in range(size)]
    assert [prompt.id for prompt in mixed(prompts)] == ["a/0", "b/0", "a/1", "a/2"]


def test_first_answers_have_all_lengths() -> None:
    assert [length(seat, 4, 64) for seat in range(6)] == [16, 32, 48, 64, 64, 64]
    assert length(0, 64, 8) == 2, "a request of one token would end with its prompt"


def test_ratios_are_of_neighbours() -> None:
    plain = [Pass(100, 1.0, [10.0], 2.0), Pass(100, 2.0, [5.0], 2.0), Pass(100, 1.0, [10.0], 2.0)]
    ours = [Pass(100, 0.5, [20.0, 18.0], 4.0), Pass(100, 1.0, [9.0], 4.0), Pass(100, 0.25, [40.0], 4.0)]
    found = summed(2, "bastion", ours, plain)
    assert found.of_plain == 2 and found.tokens_per_s == 200 and found.slowest_user == 9 and found.width == 4


def test_no_answer_need_end_while_the_clock_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summed(1, "bastion", [Pass(100, 1.0, [], 2.0)], [Pass(100, 1.0, [], 2.0)])
    assert np.isnan(found.slowest_user) and np.isnan(found.user_tokens_per_s)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"turns": ["word"]}) + "\n")
    options = CrowdOptions((1,), ("bastion",), [str(file)], turns=1, max_new_tokens=6, repeats=1, out=tmp_path)
    run_crowd(tiny_llm(), options, Console(quiet=True))
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_numbers_that_cannot_be() -> None:
    for wrong in (dict(loads=()), dict(loads=(0,)), dict(turns=0), dict(max_new_tokens=1)):
        with pytest.raises(BadInput, match="must be"):
            CrowdOptions(**wrong)
