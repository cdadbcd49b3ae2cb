"""The bench's prompts: the packaged set, files, and public data sets as their harnesses ask them."""

from __future__ import annotations

import json

import pytest

from draftwood.bench import hub, prompts
from draftwood.bench.prompts import Prompt
from draftwood.errors import BadInput, MissingExtra
from tests.bench_cases import some_prompts


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
