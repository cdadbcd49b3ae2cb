"""The text layer: streams, origins, stop strings, abandonment, mistakes; and loading from a folder."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import draftwood
from draftwood.errors import BadInput, BadModel, DraftwoodError
from draftwood.llm import LLM
from draftwood.trace import Round
from tests.reference import VOCAB, tiny_model

WORDS = ["<end>", *(f"w{i}" for i in range(1, VOCAB))]
PROMPT = "w5 w16 w27 w38 w49 w60 w71"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, saved as users save theirs."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="w1").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def llm(folder: Path, session_home: Path) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_HOME", str(session_home))
        return draftwood.load(str(folder), "ngram", "ddtree:8", dtype="float64")


def test_what_a_user_reads_first(llm: LLM) -> None:
    answer = llm.generate(PROMPT, max_new_tokens=30)
    plain = llm.generate(PROMPT, max_new_tokens=30, policy="autoregressive")
    assert answer.text == plain.text and answer.token_ids == plain.token_ids
    assert plain.tau == 1 and answer.tau >= 1
    assert sum(1 + r.accepted for r in answer.rounds) >= len(answer.token_ids) - 1
    assert answer.to_json()["policy"] == "ddtree:8" and answer.tokens_per_s > 0
    assert set(answer.seconds_by_verb) == {"draft", "grow", "choose", "verify", "accept", "commit", "observe"}


def test_pieces_add_up_and_know_where_they_came_from(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_new_tokens=40)
    pieces = list(stream)
    answer = stream.generation
    assert "".join(p.text for p in pieces) == answer.text
    assert [t for p in pieces for t in p.token_ids] == answer.token_ids
    drafted = sum(p.origin == "draft" for p in pieces)
    assert drafted == sum(r.accepted for r in answer.rounds)
    assert stream.last_round_tree is not None and answer.finish_reason in ("length", "stop")


def test_a_stream_can_be_left_at_any_time(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_new_tokens=20).token_ids
    for count in range(1, 8):
        stream = llm.stream(PROMPT, max_new_tokens=20)
        for _, _piece in zip(range(count), stream, strict=False):
            pass
        stream.close()
        so_far = stream.generation
        assert so_far.finish_reason == "abandoned" and so_far.token_ids == whole[: len(so_far.token_ids)]
    assert llm.generate(PROMPT, max_new_tokens=20).token_ids == whole


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_new_tokens=30).text
    stop = whole.split()[6]
    answer = llm.generate(PROMPT, max_new_tokens=30, stop=[stop])
    assert answer.text == whole[: whole.index(stop)] and answer.finish_reason == "stop"
    for same in (stop, iter([stop])):
        assert llm.generate(PROMPT, max_new_tokens=3e1, stop=same).text == answer.text
    assert llm.generate(PROMPT, max_new_tokens=30, stop=None).text == whole


def test_what_a_template_or_tokenizer_refuses_is_one_sentence(llm: LLM) -> None:
    strict = LLM(llm.engine, copy.deepcopy(llm.tokenizer))
    strict.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BadInput, match="System role not supported"):
        strict.generate("hi", system="Be brief.")
    strict.tokenizer.chat_template = None
    with pytest.raises(BadInput, match="refuses this prompt"):
        strict.generate("caf\udce9")


def test_seeds_repeat_and_do_not_depend_on_the_policy(llm: LLM) -> None:
    def ids(seed: int, policy: str) -> list[int]:
        return llm.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=seed, policy=policy).token_ids

    assert ids(1, "ddtree:8") == ids(1, "autoregressive") == ids(1, "bastion") != ids(2, "bastion")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(prompt=""), "empty"),
        (dict(prompt="   "), "empty"),
        (dict(prompt=[]), "empty"),
        (dict(prompt=5), "The prompt is 5; give a text"),
        (dict(prompt=["hi"]), "or a list of messages"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=2.5), "whole number"),
        (dict(max_new_tokens=None), "whole number"),
        (dict(seed=10**400), "seed"),
        (dict(prompt="w3 " * 300), "context window of 256"),
        (dict(temperature=-1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(stop=[""]), "stop string"),
        (dict(policy="ddtre"), "Did you mean 'ddtree'"),
        (dict(system="be kind"), "chat template"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(llm: LLM, options: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        llm.stream(**{"prompt": PROMPT, **options})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional=dict(
            temperature=st.floats(), top_k=st.integers(), top_p=st.floats(), min_p=st.floats(), seed=st.integers(),
            repetition_penalty=st.floats(), max_new_tokens=st.integers(-5, 3), prompt=st.text(max_size=5),
        ),
    )
)  # fmt: skip
def test_any_value_works_or_is_refused(llm: LLM, options: dict) -> None:
    try:
        llm.generate(**{"prompt": PROMPT, "max_new_tokens": 2, **options})
    except DraftwoodError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("./nowhere", "config.json"), ("not-a-model-anywhere", "could not be loaded"), ("/", "config.json")],
)
def test_a_missing_model_is_named(name: str, says: str) -> None:
    with pytest.raises(BadModel, match=says):
        draftwood.load(name, "none")


def test_a_folder_may_be_a_path(folder: Path) -> None:
    assert draftwood.load(folder, ["ngram"]).drafter is not None
    with pytest.raises(BadModel, match="nowhere"):
        draftwood.load(folder, folder / "nowhere" / "model")


def test_a_damaged_model_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(BadModel, match="could not be loaded"):
        draftwood.load(str(tmp_path), "none")


@pytest.mark.parametrize(("option", "value"), [("dtype", "bf16"), ("device", "tpu"), ("device", "cuda:7")])
def test_an_unknown_dtype_or_device_is_named(folder: Path, option: str, value: str) -> None:
    with pytest.raises(BadInput, match=option):
        draftwood.load(str(folder), "none", **{option: value})


def test_a_drafter_made_for_another_target_is_refused(folder: Path) -> None:
    from draftwood.embedded import EMBEDDED_DRAFTER

    with pytest.raises(BadModel, match="hidden"):
        draftwood.load(str(folder), str(EMBEDDED_DRAFTER))


def test_what_was_learned_is_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    first = draftwood.load(str(folder), "ngram")
    first.generate(PROMPT, max_new_tokens=12)
    learned = list((tmp_path / "profiles").glob("learned-*.json"))
    assert len(learned) == 1
    second = draftwood.load(str(folder), "ngram")
    fresh = type(second.engine.latency)(second.engine.latency.machine, second.target.work, None)
    assert second.engine.latency.costs(0, 0).plain_s != fresh.costs(0, 0).plain_s
    kept = learned[0].read_text()
    second.fresh().generate(PROMPT, max_new_tokens=12)
    assert learned[0].read_text() == kept, "a copy for comparisons would overwrite it with what it did not learn"
    learned[0].write_text("{")
    draftwood.load(str(folder), "ngram")


def test_what_texts_taught_of_acceptance_is_known_to_the_next_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    first = draftwood.load(str(folder), "ngram")
    drafted = Round(9, 1, True, np.array([0.5], np.float32), np.array([1]), [1], {}, {})
    first.engine.acceptance("bastion", 0.7).observe(drafted)
    assert not first.engine.experience(), "one round is no experience"
    for _ in range(20):
        first.engine.acceptance("bastion", 0.7).observe(drafted)
    first.generate(PROMPT, max_new_tokens=2)
    second = draftwood.load(str(folder), "ngram")
    assert [row[:2] for row in second.engine.experience()] == [["bastion", 0.5]]
    assert not second.fresh().engine.experience()
    learned = next((tmp_path / "profiles").glob("learned-*.json"))
    kept = json.loads(learned.read_text())
    for damage in ("x", 3, [["bastion", 0.5, {}]], [["bastion"]], None):
        learned.write_text(json.dumps(kept | {"acceptance": damage}))
        assert not draftwood.load(str(folder), "ngram").engine.experience()


def test_two_engines_in_one_process(folder: Path, llm: LLM) -> None:
    other = draftwood.load(str(folder), "none", dtype="float64")
    a, b = llm.stream(PROMPT, max_new_tokens=15), other.stream(PROMPT, max_new_tokens=15)
    for _ in zip(a, b, strict=False):
        pass
    for rest in (a, b):
        list(rest)
    assert a.generation.token_ids == b.generation.token_ids
