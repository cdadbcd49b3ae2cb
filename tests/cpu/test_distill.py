"""Texts of the target: rows together write what each writes alone, nothing is lost, and the commands fit together."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, cycle, islice, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftwood import assemble, cli
from draftwood.bench.prompts import load_prompts
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.errors import BadInput
from draftwood.latency import Machine
from draftwood.loading import load_target
from draftwood.names import SELF
from draftwood.target import Target
from draftwood.train import distill as distill_module
from draftwood.train import jobs as jobs_module
from draftwood.train import writing
from draftwood.train.captured_rows import CapturedRows
from draftwood.train.distill import DistillOptions, Shards, run_distill
from draftwood.train.evaluate import EvalOptions, Tally, measure, run_evaluation, warnings
from draftwood.train.files import alone
from draftwood.train.jobs import Job, Jobs, Opening, digest_of, make_jobs, user_template
from draftwood.train.rows import PagedRows, PlainRows, open_rows
from draftwood.train.shards import Text, read_shard, shard_paths
from draftwood.train.show import read_log
from draftwood.train.writing import LOOK_EVERY, Limits, Writing, loop_end
from draftwood.tree import Tree
from tests.reference import VOCAB, ReplayedGraphs, byte_tokenizer, plain_logits, tiny_model, tiny_target
from tests.serving import tiny_llm

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ '!' if enable_thinking }}{% endif %}"
)
END = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random chat model on disk."""
    folder = tmp_path_factory.mktemp("chat")
    tiny_model(dtype=torch.float32, vocab_size=270, max_position_embeddings=512, eos_token_id=END).save_pretrained(
        folder
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"Say {word}."]}) + "\n" for word in ["one", "two", "three", "four"]))
    return path


def some_jobs() -> list[Job]:
    return [Job(i, tuple((7 * i + 3 * j) % VOCAB for j in range(5 + 9 * i)), 0.8 * (i % 2), "made") for i in range(7)]


def written(rows, size: int, jobs: list[Job], new: int = 24, stop: int = 3, **limits) -> dict[int, list[int]]:
    made = Writing(rows, size, iter(jobs), Limits(new, frozenset({stop}), **limits))
    return {text.job: text.tokens.tolist() for text in made.texts() if text is not None}


# --- rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])  # for free rows before it reads prompts
@pytest.mark.parametrize(
    ("family", "kind", "own"),
    [(family, kind, False) for family in ("llama", "qwen3_sliding") for kind in (PagedRows, CapturedRows)]
    + [(family, CapturedRows, True) for family in ("llama", "qwen3_sliding")]  # by Triton's kernel
    + [("gpt2", PlainRows, False)],
)
def test_rows_together_write_what_each_writes_alone(
    family: str, kind: type, own: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernel needs its interpreter here")
    monkeypatch.setattr("draftwood.train.rows.PAGE", 8)  # several pages for each text
    for reader in (PlainRows, kind):
        monkeypatch.setattr(reader, "chunk", 16)  # shorter than some prompts
    monkeypatch.setattr("draftwood.train.writing.LOOP", 1000)
    monkeypatch.setattr("draftwood.train.writing.TOGETHER", 1 if waits else 16)
    target, jobs = tiny_target(family), some_jobs()
    assert type(open_rows(target, 3, 100)) in (PagedRows, kind)  # captured on a GPU
    rows = kind(target, 3, 100)
    if kind is CapturedRows:
        monkeypatch.setattr("draftwood.train.captured_rows.BUCKET", 32)
        rows = kind(target, 3, 100)
        rows._own = own
        if not own:  # what is interpreted cannot be replayed
            rows._graphs = ReplayedGraphs(target.device)
    new = 10 if own else 24  # interpreted steps are slow; ten reach into another page and bucket
    endless = written(PlainRows(target, 1, 100), 1, jobs, new, stop=-1)
    stop = next(token for i, text in endless.items() for token in text[len(jobs[i].tokens) + 3 : -3])
    together = written(rows, 3, jobs, new, stop)
    assert together == written(PlainRows(target, 1, 100), 1, jobs, new, stop) and len(together) == len(jobs)
    assert len({len(text) - len(jobs[i].tokens) for i, text in together.items()}) > 1, "some end early"
    greedy = jobs[0]
    tokens = list(greedy.tokens)
    while len(tokens) < len(greedy.tokens) + new and tokens[len(greedy.tokens) :][-1:] != [stop]:
        tokens.append(int(plain_logits(target, tokens)[-1].argmax()))
    assert together[0] == tokens


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", PagedRows), ("llama", CapturedRows), ("qwen3_sliding", PagedRows), ("gpt2", PlainRows)],
)
def test_prompts_read_together_give_the_logits_of_each_alone(
    family: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.train.rows.PAGE", 8)
    target = tiny_target(family)
    rows, prompts = kind(target, 4, 40), [list(range(3)), [5], list(range(40, 79)), [7] * 8]
    logits = rows.prefill([2, 0, 3, 1], prompts)
    for prompt, found in zip(prompts, logits, strict=True):
        torch.testing.assert_close(found, plain_logits(target, prompt)[-1], rtol=1e-5, atol=1e-6)


def test_free_rows_are_filled_together_and_prompts_of_a_length_read_together() -> None:
    rows = open_rows(tiny_target(), 4, 700)
    jobs = [Job(i, (1,) * length, 0.0, "made") for i, length in enumerate((300, 9, 500, 7, 8, 6, 5, 4))]
    read, prefill = [], rows.prefill

    def watched(places: list[int], prompts: list[list[int]]) -> torch.Tensor:
        read.append([len(prompt) for prompt in prompts])
        return prefill(places, prompts)

    rows.prefill = watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.train.writing.TOGETHER", 2)
        written(rows, 4, jobs)
    assert read[:2] == [[7, 9, 300], [500]] and sum(map(len, read)) == len(jobs)
    assert all(len(lengths) >= 2 for lengths in read[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the second is drawn from by compiled operators
def test_draws_follow_the_targets_probabilities(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=dtype)
    rows = [writing.Row(Job(i, (0,), 0.5, "x"), [0], 1) for i in range(4000)]
    drawn, again, other = (writing.draw(logits.expand(4000, 4), rows, seed).values() for seed in (1, 1, 2))
    expected = (logits.float() / 0.5).softmax(-1).numpy()
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - expected).max() < 0.03
    assert drawn == again != other


def test_rows_that_take_turns_write_what_they_write_alone() -> None:
    """Each steps once before the next one does, all take from the same jobs, and none is lost or written twice."""
    target, jobs = tiny_target("llama", "lean", dtype=torch.float64), some_jobs()
    left, steps = iter(jobs), []

    class Watched(PagedRows):
        def step(self, rows, tokens):
            steps.append(self)
            return super().step(rows, tokens)

    each = [Writing(Watched(target, 2, 128), 2, left, Limits(24, frozenset({3}))) for _ in range(2)]
    turns = writing.Turns(each)
    texts = [text for text in turns.texts() if text is not None]
    assert {t.job: t.tokens.tolist() for t in texts} == written(PagedRows(target, 4, 128), 4, jobs)
    assert len(texts) == len(jobs) and steps[:10] == [one.rows for one in each] * 5
    assert turns.unfinished() == [] and turns.under_way == 0


def test_a_loop_is_cut_behind_two_periods() -> None:
    fresh = list(range(20))
    assert loop_end([*fresh, *[1, 2, 3] * 40], 5) == 20 + 6
    assert loop_end([*fresh, *range(100, 200)], 5) is None
    assert loop_end([7] * 100, 60) is None  # 40 of them are the prompt's
    assert loop_end([7] * 200, 60) == 60 + 2  # the answer's first ones
    for begin, period in product(range(5, 38), (1, 3, 16)):  # looked at every so often, wherever the loop began
        text = [*range(100, 100 + begin), *islice(cycle(range(period)), 256)]
        looks = (loop_end(text[: 5 + written], 5) for written in count(LOOK_EVERY, LOOK_EVERY))
        assert next(cut for cut in looks if cut is not None) == begin + 2 * period


# --- jobs -----------------------------------------------------------------------------------------------------


def test_every_prompt_gets_every_temperature_and_zero_only_once() -> None:
    jobs = Jobs(tuple(Opening(source, (i,)) for i, source in enumerate("aab", 1)), (0.0, 0.7), None)
    first = list(islice(jobs, 12))
    assert {(j.tokens, j.temperature) for j in first[:6]} == {((i,), t) for i in (1, 2, 3) for t in (0.0, 0.7)}
    assert all(j.temperature == 0.7 for j in first[6:])
    assert len({j.number for j in first}) == 12 and [j.number for j in first] == [j.number for j in islice(jobs, 12)]
    assert len(list(Jobs(jobs.prompts, (0.0,), None))) == 3


@pytest.mark.parametrize("heats", [(0.0, 0.7), (0.0, 0.4, 0.8), (0.0, 0.3, 0.7, 1.0)])
def test_prompts_and_the_targets_own_get_every_temperature_alike(heats: tuple[float, ...], tmp_path: Path) -> None:
    tokenizer, path = byte_tokenizer(), tmp_path / "twelve.jsonl"
    tokenizer.chat_template = TEMPLATE
    path.write_text("".join(json.dumps({"turns": [f"Say {i}."]}) + "\n" for i in range(12)))
    jobs = make_jobs([str(path), SELF], heats, tokenizer)
    asked = Counter((job.writes_prompt, job.temperature) for job in islice(jobs, 24))  # one turn
    assert asked == {(own, heat): 12 // len(heats) for own in (False, True) for heat in heats}
    texts = [("twelve", f"Say {i}.") for i in range(12)]
    assert jobs.digest != digest_of(texts, True, TEMPLATE), "that of folders whose numbers mean other temperatures"
    assert make_jobs([str(path), SELF], (0.5,), tokenizer).digest == digest_of(texts, True, TEMPLATE)


def test_a_data_set_that_is_called_self_is_one(folder: Path, prompts: Path, tmp_path: Path) -> None:
    named = prompts.rename(tmp_path / "self.jsonl")
    run_distill(options(folder, tmp_path / "alone", named, tokens=40))
    tokenizer = byte_tokenizer()
    asked = [tokenizer.decode(tokens[:prompt]) for tokens, prompt, *_ in all_texts(tmp_path / "alone").values()]
    assert asked and all(text.startswith("[u]Say ") for text in asked)
    tokenizer.chat_template = TEMPLATE
    jobs = make_jobs([str(named), SELF], (0.0,), tokenizer)
    assert [job.writes_prompt for job in islice(jobs, 8)] == [False, True] * 4
    assert len(list(make_jobs([str(named)], (0.0,), tokenizer))) == 4, "nothing of them is endless"


def test_the_template_is_taken_apart_around_the_users_turn(prompts: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    template = user_template(tokenizer, "default")
    assert tokenizer.decode(list(template.answer_to(tokenizer("hi").input_ids))) == "[u]hi<end>[a]"
    (first, *_) = make_jobs([str(prompts)], (0.0,), tokenizer, "on")
    assert tokenizer.decode(list(first.tokens)) == "[u]Say one.<end>[a]!" and first.source == "prompts"
    mixed = list(islice(make_jobs([str(prompts), SELF], (0.0,), tokenizer), 8))
    assert [job.writes_prompt for job in mixed] == [False, True] * 4
    with pytest.raises(BadInput, match="expected one of"):
        make_jobs([str(prompts)], (0.0,), tokenizer, "loud")
    with pytest.raises(BadInput, match="--raw leaves out"):
        make_jobs([str(prompts)], (0.0,), tokenizer, "on", raw=True)
    tokenizer.chat_template = "{{ messages[0].content }}<end>"
    with pytest.raises(BadInput, match="both ends of a user's turn"):
        make_jobs([SELF], (0.0,), tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("{{ '!' if enable_thinking }}", "")
    with pytest.raises(BadInput, match="switch"):
        make_jobs([str(prompts)], (0.0,), tokenizer, "off")


def test_the_target_may_write_its_own_prompts(folder: Path) -> None:
    target, tokenizer = load_target(str(folder), "float32", "cpu"), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    jobs = make_jobs([SELF], (0.0,), tokenizer)
    rows = open_rows(target, 2, 400)
    texts = Writing(rows, 2, islice(jobs, 4), Limits(20, frozenset({END})), jobs.template).texts()
    found = [text for text in texts if text is not None]
    assert 1 <= len(found) <= 4 and len({tuple(t.tokens[: t.prompt]) for t in found}) == len(found)
    for text in found:
        prompt = text.tokens[: text.prompt].tolist()
        assert prompt[:3] == list(jobs.template.before) and prompt[-len(jobs.template.after) :] == list(
            jobs.template.after
        )
        assert text.source == SELF and len(prompt) > 3 + len(jobs.template.after)


def test_a_target_that_leaves_its_own_prompts_empty_is_heard_of(folder: Path) -> None:
    """Else nobody would see progress, or could stop it."""
    target, tokenizer = load_target(str(folder), "float32", "cpu"), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    jobs = make_jobs([SELF], (0.0,), tokenizer)
    every = frozenset(range(270))  # whatever it writes ends the turn
    texts = Writing(open_rows(target, 2, 400), 2, iter(jobs), Limits(20, every), jobs.template).texts()
    assert [*islice(texts, 5)] == [None] * 5


# --- the folder -----------------------------------------------------------------------------------------------


def all_texts(folder: Path) -> dict[int, tuple]:
    texts = [text for path in shard_paths(folder) for text in read_shard(path)]
    assert len({t.job for t in texts}) == len(texts)
    return {t.job: (t.tokens.tolist(), t.prompt, round(t.temperature, 3), t.source) for t in texts}


def options(folder: Path, out: Path, prompts: Path, **more) -> DistillOptions:
    given = dict(tokens=400, temperatures=(0.0, 0.9), max_new_tokens=30, rows=3, dtype="float32", device="cpu")
    return DistillOptions(out, prompts=[str(prompts)], target=str(folder), **{**given, **more})


def test_one_run_at_a_time_writes_into_a_folder(folder: Path, prompts: Path, tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(BadInput, match="another process is writing there"):
        run_distill(options(folder, tmp_path, prompts))
    assert run_distill(options(folder, tmp_path, prompts))


def test_what_is_written_needs_no_room_any_more(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_distill(options(folder, tmp_path, prompts))
    monkeypatch.setattr("draftwood.train.files.free_bytes", lambda _: 1000)
    assert run_distill(options(folder, tmp_path, prompts))
    with pytest.raises(BadInput, match="GB are free"):
        run_distill(options(folder, tmp_path / "new", prompts))


def test_prompts_of_its_own_are_others_beside_other_prompts(folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Their jobs have the same numbers in both folders."""
    found = []
    for name in ("Say it.", "Do not."):
        prompts.write_text(json.dumps({"turns": [name]}) + "\n")
        given = options(folder, tmp_path / name, prompts, temperatures=(1.0,))
        assert run_distill(replace(given, prompts=[str(prompts), SELF]))
        found.append({tuple(text[0]) for text in all_texts(tmp_path / name).values() if text[3] == SELF})
    assert all(found) and not found[0] & found[1]


def test_an_interrupted_run_goes_on_where_it_was(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill_module, "SHARD_TEXTS", 2)
    assert run_distill(options(folder, tmp_path / "whole", prompts))
    whole = all_texts(tmp_path / "whole")
    assert sum(len(tokens) - prompt for tokens, prompt, _, _ in whole.values()) >= 400
    add, added = Shards.add, []

    def killed(self: Shards, text: Text) -> None:
        added.append(text)
        if len(added) == 6:
            raise KeyboardInterrupt
        add(self, text)

    monkeypatch.setattr(Shards, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        run_distill(options(folder, tmp_path / "parts", prompts))
    monkeypatch.setattr(Shards, "add", add)
    before = all_texts(tmp_path / "parts")
    assert 0 < len(before) < len(whole)
    assert run_distill(options(folder, tmp_path / "parts", prompts))
    parts = all_texts(tmp_path / "parts")
    shared = whole.keys() & parts.keys()
    assert before.items() <= parts.items() and len(shared) >= len(whole) - 3
    assert all(whole[job] == parts[job] for job in shared)
    count = len(shard_paths(tmp_path / "parts"))
    assert run_distill(options(folder, tmp_path / "parts", prompts))  # nothing is left to do
    assert len(shard_paths(tmp_path / "parts")) == count


def test_a_run_that_is_asked_to_stop_loses_nothing(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_distill(options(folder, tmp_path / "whole", prompts))

    @contextmanager
    def soon() -> Iterator[Callable[[], bool]]:
        asked = count()
        yield lambda: next(asked) >= 25

    with monkeypatch.context() as patch:
        patch.setattr(distill_module, "stop_flag", soon)
        assert not run_distill(options(folder, tmp_path / "parts", prompts))
    left = Shards.open(tmp_path / "parts").unfinished()
    assert len(left) == 3 and any(job.written > 1 for job in left)
    assert run_distill(options(folder, tmp_path / "parts", prompts))
    whole, parts = all_texts(tmp_path / "whole"), all_texts(tmp_path / "parts")
    assert {job.number for job in left} <= parts.keys() and not Shards.open(tmp_path / "parts").unfinished()
    assert all(whole[job] == parts[job] for job in whole.keys() & parts.keys())
    (tmp_path / "parts" / distill_module.UNDER_WAY).write_text("{}")
    with pytest.raises(BadInput, match="damaged"):
        run_distill(options(folder, tmp_path / "parts", prompts))


def test_other_flags_do_not_mix(folder: Path, prompts: Path, tmp_path: Path) -> None:
    run_distill(options(folder, tmp_path / "x", prompts, tokens=40))
    with pytest.raises(BadInput, match="other flags"):
        run_distill(options(folder, tmp_path / "x", prompts, tokens=80, max_new_tokens=31))
    with pytest.raises(BadInput, match="context window"):
        run_distill(options(folder, tmp_path / "y", prompts, max_new_tokens=510))
    run_distill(options(folder, tmp_path / "y", prompts, tokens=40))  # what was refused has claimed nothing
    with pytest.raises(BadInput, match="--rows"):
        run_distill(options(folder, tmp_path / "z", prompts, rows=10**9))


def test_fewer_texts_at_once_where_memory_is_short_or_few_tokens_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    text = 100 * target.kv_bytes_per_token()

    def at_once(texts: int, tokens: int, rows: int | None = None) -> int:
        """Where so many texts take all of the memory."""
        monkeypatch.setattr(distill_module, "memory_bytes", lambda: texts * text)
        return distill_module.at_once(DistillOptions(tmp_path, tokens, rows=rows, max_new_tokens=50), 100, target)

    for tiles, most in ((True, 256), (False, 128)):
        monkeypatch.setattr(distill_module, "can", lambda _, tiles=tiles: tiles)
        assert [at_once(texts, 10**6) for texts in (10**6, 400, 2)] == [most, 64, 1] and at_once(400, 10**6, 256) == 256
    assert [at_once(10**6, 2000), at_once(10**6, 10), at_once(10**6, 10, 3)] == [10, 1, 3]
    with pytest.raises(BadInput, match="1 texts of up to 100 tokens"):
        at_once(1, 10**6)


def test_doubles_are_left_out(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    for job in range(3):
        shards.add(Text(np.array([1, 2, 3 + job // 2]), 1, 0.0, "x", job))
    shards.flush()
    again = Shards.open(tmp_path)
    assert (shards.doubles, again.done, again.tokens) == (1, {0, 2}, 4)


def test_prompts_that_run_out_end_the_run(folder: Path, prompts: Path, tmp_path: Path, capsys) -> None:
    run_distill(options(folder, tmp_path / "x", prompts, tokens=10**6, temperatures=(0.0,)))
    assert len(all_texts(tmp_path / "x")) <= 4
    assert "ran out" in capsys.readouterr().err


def test_prompts_whose_answers_are_all_there_end_the_run(
    folder: Path, prompts: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "BARREN", 8)
    run_distill(options(folder, tmp_path / "x", prompts, tokens=10**6, temperatures=(0.0, 1e-4), max_new_tokens=5))
    texts = len(all_texts(tmp_path / "x"))
    assert f"{texts} texts" in (said := capsys.readouterr().err) and "Nothing new comes of these prompts" in said


def test_other_prompts_in_files_of_the_same_name_do_not_mix(folder: Path, prompts: Path, tmp_path: Path) -> None:
    run_distill(options(folder, tmp_path / "x", prompts, tokens=40))
    prompts.write_text(prompts.read_text() + json.dumps({"turns": ["A new one."]}) + "\n")
    with pytest.raises(BadInput, match=r"begun with other prompts.*another folder"):
        run_distill(options(folder, tmp_path / "x", prompts, tokens=80))
    run_distill(options(folder, tmp_path / "y", prompts, tokens=40))


def test_a_long_prompt_is_refused_before_any_is_measured(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("Hi.", "x" * 600)))
    with pytest.raises(BadInput, match="context window"):
        run_evaluation(EvalOptions("ngram", str(folder), [str(path)], max_new_tokens=8, device="cpu"))


def test_prompts_are_the_same_on_another_day(prompts: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%S.%f') }}" + TEMPLATE
    one, other = (make_jobs([str(prompts), SELF], (0.0,), tokenizer) for _ in range(2))
    assert one.prompts != other.prompts and one.digest == other.digest
    assert make_jobs([str(prompts)], (0.0,), tokenizer).digest != one.digest


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_the_tokenizer_refuses_is_one_sentence(raw: bool, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    (tmp_path / "cut.jsonl").write_text('{"turns": ["half of a \\ud83d"]}\n')
    with pytest.raises(BadInput, match="refuses this prompt"):
        make_jobs([str(tmp_path / "cut.jsonl")], (0.0,), tokenizer, raw=raw)


# --- evaluation -----------------------------------------------------------------------------------------------


def test_acceptance_and_calibration_by_definition() -> None:
    tally = Tally(
        emitted=[1, 3, 4, 2],
        accepted=[0, 2, 3, 1],
        drafted=[3, 3, 3, 1],
        mass=[0.11, 0.13, 0.95, 0.99],
        kept=[False, True, True, True],
    )
    assert tally.tau == 2.5 and tally.confidence() == pytest.approx({"predicted": 0.545, "observed": 0.75})
    assert [(r["position"], r["reached"], r["right"]) for r in tally.acceptance()] == [
        (1, 1.0, 0.75), (2, 0.5, 1.0), (3, 0.5, 0.5),
    ]  # fmt: skip
    (low, high) = tally.calibration()
    assert (low["nodes"], low["observed"]) == (2, 0.5) and low["predicted"] == pytest.approx(0.12)
    assert (high["nodes"], high["observed"]) == (2, 1.0) and high["predicted"] == pytest.approx(0.97)


def chain(tokens: list[int]) -> Tree:
    places = np.arange(len(tokens))
    return Tree(np.array(tokens), places - 1, places, np.ones(len(tokens), np.float32))


def test_a_drafted_stop_token_was_right() -> None:
    tally, tree = Tally(), chain([9, 5, 6, 7])  # one more was drafted behind the stop token
    tally.add(SimpleNamespace(tree=tree, tokens=[5, 6], path=[1, 2]))  # type: ignore[arg-type]
    assert [row["right"] for row in tally.acceptance()] == [1, 1] and tally.tau == 2 and tally.kept == [True, True]


def test_tau_counts_the_round_that_reaches_the_budget_whole(prompts: Path) -> None:
    llm, asked = tiny_llm(), load_prompts([str(prompts)], 1)

    def rounds(budget: int) -> Tally:
        options = EvalOptions("ngram", policies=("dflash",), max_new_tokens=budget)
        return measure(llm, asked, options)["dflash"]["all"]

    whole = rounds(200).emitted
    for budget in range(40, 60):
        emitted = rounds(budget).emitted
        assert emitted == whole[: len(emitted)], "the last one, too"
        assert sum(emitted[:-1]) < budget


def test_no_policy_knows_what_another_one_wrote(folder: Path, prompts: Path) -> None:
    def tau(*policies: str) -> float:
        options = EvalOptions("recycling+ngram", str(folder), [str(prompts)], policies, 24, device="cpu")
        return run_evaluation(options)["policies"]["ddtree:8"]["tau"]["all"]

    assert tau("ddtree:8") == tau("dflash", "ddtree:8")


@pytest.mark.parametrize(
    ("spec", "thinking", "says"),
    [
        ("FIRST", "default", []),
        ("dflash:FIRST", "on", ["thinking default"]),
        ("SECOND", "off", ["variable-prefix drafter"]),
        ("d2sd:FIRST,SECOND,again=1", "default", ["thinking off"]),
        ("ngram:max_depth=4+FIRST", "on", ["thinking default"]),
        ("eagle3:EAGLE", "default", ["thinking on"]),
        ("ngram", "on", []),
        ("other:unknown", "on", []),
    ],
)
def test_a_drafter_that_was_trained_for_something_else(
    spec: str, thinking: str, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in (
        ("FIRST", {"dflash_config": {"thinking": "default", "objective": "dflash"}}),
        ("SECOND", {"dflash_config": {"thinking": "off", "objective": "variable-prefix"}}),
        ("EAGLE", {"eagle_config": {"thinking": "on"}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    found = warnings(EvalOptions(spec, thinking=thinking))
    assert len(found) == len(says) and all(part in line for part, line in zip(says, found, strict=True))


# --- the commands ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    machine = Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6)
    monkeypatch.setattr(assemble, "probe", lambda device, dtype, folder: machine)

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in (*args, "--dtype", "float32", "--device", "cpu")])
        return (end.value.code or 0, *capsys.readouterr())

    return run


def test_from_prompts_to_a_drafter(
    run: Callable, folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = tmp_path / "texts", tmp_path / "drafter"
    code, _, err = run(
        "distill", "--target", folder, "--prompts", prompts, "--tokens", 300, "--temperature", "0,0.9",
        "--max-new-tokens", 40, "--rows", 4, "--out", texts, "--thinking", "off",
    )  # fmt: skip
    assert code == 0 and f"draftwood train --target {folder} --data {texts}" in err
    flags = ["--target", folder, "--data", texts, "--out", out, "--layers", 1, "--block-size", 6, "--taps", 2]
    flags += ["--anchors", 6, "--batch-size", 2, "--holdout", 0.3, "--eval-every", 5, "--lr", 3e-3]
    code, _, err = run("train", *flags, "--steps", 10)
    assert code == 0 and f"--target {folder} --drafter {out}" in err and len(read_log(out)) == 12
    assert {p.name for p in out.iterdir()} >= {"config.json", "model.safetensors", "README.md", "training"}
    config = json.loads((out / "config.json").read_text())["dflash_config"]
    assert config["thinking"] == "off" and 257 <= config["mask_token_id"] < 270  # behind the tokenizer's own
    with monkeypatch.context() as patch:  # what is refused takes no room for features of its own
        patch.setattr("draftwood.train.run.features_of", lambda *_: pytest.fail("cached"))
        code, _, err = run("train", *flags, "--steps", 11)
    assert code == 2 and "--steps" in err and err.count("\n") == 1
    card, told = out / "README.md", []
    card.write_text("Prompts: mine.")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda api, name, exist_ok: told.append(name))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda api, **what: told.append(card.read_text()))
    code, _, err = run("train", *flags, "--steps", 10, "--push-to-hub", "me/mine")
    assert code == 0 and "huggingface.co/me/mine" in err and told == ["me/mine", "Prompts: mine."]
    code, text, _ = run("generate", "Say one.", "--target", folder, "--drafter", out, "--max-new-tokens", 12)
    assert code == 0
    assert text == run("generate", "Say one.", "--target", folder, "--drafter", "none", "--max-new-tokens", 12)[1]
    code, shown, _ = run(
        "eval-drafter", "--target", folder, "--drafter", out, "--prompts", prompts, "--policies", "dflash,ddtree:4",
        "--max-new-tokens", 12, "--thinking", "on", "--out", tmp_path / "eval", "--json",
    )  # fmt: skip
    report = json.loads(shown.splitlines()[-1])
    assert code == 0 and any("trained with thinking off" in line for line in report["says"])
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"evaluation.json", "evaluation.png"}
    tree = report["policies"]["ddtree:4"]
    assert 1 <= tree["tau"]["all"] <= 6
    assert {key: tree[key] for key in tree["categories"]["prompts"]} == tree["categories"]["prompts"]  # the only one
    target: Target = load_target(str(folder), "float32", "cpu")
    assert DFlashDrafter.load(str(out), target).max_depth == 5
