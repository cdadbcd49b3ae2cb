"""Training data: shards, whose they are, what is held out, and the tokens that a drafter may propose."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

from draftwood.errors import BadInput, MissingExtra
from draftwood.target import Target
from draftwood.train import data, shards
from draftwood.train.card import card
from draftwood.train.data import Identity, Manifest
from draftwood.train.distill import DistillOptions, run_distill
from draftwood.train.run import describe
from draftwood.train.shards import Text
from tests.reference import VOCAB, tiny_target
from tests.train_cases import TEXTS, make_course, make_trainee, some_text


def test_shards_come_back_as_they_were(tmp_path: Path) -> None:
    texts = [replace(text, temperature=0.5 * (text.job % 2), thinking="off") for text in TEXTS]
    shards.write_shard(tmp_path, 3, texts)
    (path,) = shards.shard_paths(tmp_path)
    for found, text in zip(shards.read_shard(path), texts, strict=True):
        assert {**asdict(found), "tokens": found.tokens.tolist()} == {**asdict(text), "tokens": text.tokens.tolist()}
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BadInput, match="no shard"):
        shards.read_shard(path)


@pytest.mark.parametrize(("tokens", "prompt"), [([], 0), ([1, -5, 3], 1), ([1, 2, 3], 4), ([1, 2, 3], -1)])
def test_a_shard_with_texts_that_cannot_be_is_refused(tokens: list[int], prompt: int, tmp_path: Path) -> None:
    shards.write_shard(tmp_path, 0, [TEXTS[0], Text(np.array(tokens, np.int64), prompt, 0.0, "x", 1)])
    with pytest.raises(BadInput, match="no shard of training data"):
        shards.read_shard(tmp_path / "shard-00000.parquet")


def test_shards_are_parquet_for_everybody(tmp_path: Path) -> None:
    shards.write_shard(tmp_path, 0, TEXTS)
    path = tmp_path / "shard-00000.parquet"
    table = parquet.read_table(path)
    assert table.column("tokens")[2].as_py() == TEXTS[2].tokens.tolist()
    assert table.column_names == ["tokens", "prompt_tokens", "origin", "temperature", "thinking", "request"]
    parquet.write_table(table.replace_schema_metadata({"draftwood": "99"}), path)
    with pytest.raises(BadInput, match="version is 99"):
        shards.read_shard(path)
    parquet.write_table(table.drop_columns(["prompt_tokens"]), path)
    with pytest.raises(BadInput, match="prompt_tokens"):
        shards.read_shard(path)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"draftwood\[train\]"):
        shards.read_shard(tmp_path / "shard-00000.parquet")
    with pytest.raises(MissingExtra, match=r"draftwood\[train\]"):
        run_distill(DistillOptions(tmp_path / "out", 10))
    assert not list(tmp_path.iterdir())


def test_data_remember_whose_they_are(single: Target) -> None:
    """In whatever dtype and layout it is loaded; not another one, and not a tuned one."""
    ours = Identity.of(single)
    assert Identity.of(tiny_target(dtype=torch.float32)).same_as(ours)
    assert not Identity.of(tiny_target(dtype=torch.float32, seed=5)).same_as(ours)
    tuned = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        tuned.model.model.layers[-1].self_attn.v_proj.weight.add_(0.1)
    assert not Identity.of(tuned).same_as(ours)


def test_data_of_another_target_is_refused(single: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="distill"):
        data.read_all([tmp_path], single)
    Manifest(Identity.of(tiny_target(seed=5)), "default", {}).save(tmp_path)
    with pytest.raises(BadInput, match="with other weights, or in another --dtype, not by"):
        data.read_all([tmp_path], single)
    Manifest(replace(Identity.of(single), name="elsewhere"), "default", {}).save(tmp_path)
    with pytest.raises(BadInput, match="no texts"):
        data.read_texts(tmp_path, single)
    shards.write_shard(tmp_path, 0, [Text(np.array([1, 2, VOCAB]), 1, 0.0, "x", 0)])
    with pytest.raises(BadInput, match=str(VOCAB)):
        data.read_texts(tmp_path, single)
    for damaged in (json.dumps({"format": 1}), "[", "1"):
        (tmp_path / "data.json").write_text(damaged)
        with pytest.raises(BadInput, match="damaged"):
            data.read_all([tmp_path], single)


def test_others_may_read_what_was_written(single: Target, tmp_path: Path) -> None:
    Manifest(Identity.of(single), "default", {}).save(tmp_path)
    (tmp_path / "like").touch()
    assert (tmp_path / "data.json").stat().st_mode == (tmp_path / "like").stat().st_mode
    (tmp_path / "data.json").unlink()
    (tmp_path / "data.json").mkdir()
    with pytest.raises(BadInput, match="cannot be read"):
        data.read_all([tmp_path], single)


def test_folders_go_together_if_they_are_of_one_mode(single: Target, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, text in zip(folders, TEXTS, strict=False):
        folder.mkdir()
        Manifest(Identity.of(single), "default", {}).save(folder)
        shards.write_shard(folder, 0, [text])
    assert [t.job for t in data.read_all(folders, single)] == [0, 1]
    assert len(data.read_all([*folders, folders[0]], single)) == 2  # a text counts once
    shards.write_shard(folders[1], 0, [replace(TEXTS[1], thinking="off")])
    with pytest.raises(BadInput, match="one mode"):
        data.read_all(folders, single)


def test_answers_to_one_prompt_are_all_held_out_or_all_seen() -> None:
    texts = [replace(some_text(i // 3, 30), tokens=np.append(some_text(i // 3, 29).tokens, i)) for i in range(600)]
    seen, held_out = data.split(texts, 0.2)
    prompts = [{tuple(t.tokens[: t.prompt]) for t in part} for part in (seen, held_out)]
    assert not prompts[0] & prompts[1] and len(seen) + len(held_out) == 600
    assert 10 < len(prompts[1]) < 80


def test_the_first_of_those_held_out_are_greedy_and_of_all_sources() -> None:
    """They are the ones that are evaluated."""
    texts = [replace(some_text(i, 40), source="ab"[i // 1000], temperature=0.7 * (i % 2)) for i in range(2000)]
    _, held_out = data.split(texts, 0.2)
    hot = [t.temperature > 0 for t in held_out]
    assert 0 < sum(hot) < len(hot) and hot == sorted(hot)
    assert {t.source for t in held_out[:32]} == {"a", "b"}


def test_a_list_of_draft_tokens_is_exported_where_few_others_are_to_come(single: Target, tmp_path: Path) -> None:
    texts = [Text(np.array([0, *[5] * 6, 7, 7, 8]), 1, 0.0, "x", i) for i in range(2)]
    assert data.unseen_share(texts[:1]) == 1 / 9 and data.unseen_share(texts) == 0
    course = make_course(single, tmp_path, tokens=torch.tensor([5, 7, 8]))
    assert course.draft_tokens.tolist() == [5, 7, 8] and course.drafting is course.head
    whole = replace(course, trimmed=False)
    assert whole.draft_tokens is None and len(whole.drafting.weight) == VOCAB, "and so it is measured"
    for some, told in ((course, "3"), (whole, f"{VOCAB} (trained on 3)")):
        assert f"| draft tokens | {told} |" in card(some, 1) and f", {told} draft tokens)" in describe(
            some, make_trainee(some).model
        )


def test_the_trimmed_head_holds_what_the_target_writes() -> None:
    answer = [5] * 900 + [7] * 99 + [8]
    texts = [Text(np.array([50, 51, *answer]), 2, 0.0, "x", 0)]
    assert data.frequent_tokens(texts, 1000, "auto").tolist() == [5, 7]
    assert data.frequent_tokens(texts, 1000, "1").tolist() == [5]
    assert data.frequent_tokens(texts, 1000, "7").tolist() == [0, 1, 5, 7, 8, 50, 51]
    assert data.frequent_tokens(texts, 1000, "all") is None
    few = [Text(np.array([0, 1, 2]), 1, 0.0, "x", 0)]
    assert data.frequent_tokens(few, 3, "auto") is None  # nothing worth saving
