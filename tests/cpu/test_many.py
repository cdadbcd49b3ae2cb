"""`draftwood batch`: every line gets one result, the text it would have had alone, whatever stops the run."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from draftwood import assemble, registry
from draftwood.batch import Batch
from draftwood.errors import BadInput, BadModel
from draftwood.latency import Machine
from draftwood.llm import LLM, load
from draftwood.many import run as run_module
from draftwood.many import writer
from draftwood.many.folder import MANIFEST, RESULTS, Folder
from draftwood.many.lines import Fill, parse
from draftwood.many.options import BatchOptions
from draftwood.many.run import run_batch, to_json
from draftwood.many.source import Source
from draftwood.train.files import LOCK
from tests.local_ray import free_port
from tests.serving import write_tiny

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FILL = Fill(("tiny",))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    """What the runs load, and what they are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "probe", lambda *_: Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6))
        loaded = load(str(tiny), "ngram", dtype="float64", device="cpu")
        patch.setattr(BatchOptions, "load", lambda self: loaded)
        yield loaded


def batched(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """By custom_id; each stands once."""
    found = [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
    assert len({result["custom_id"] for result in found}) == len(found)
    return {result["custom_id"]: result for result in found}


def text(result: dict[str, Any]) -> str:
    choice = result["response"]["body"]["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.fixture
def options(tmp_path: Path, tiny: Path, llm: LLM) -> BatchOptions:
    lines = [{"prompt": f"prompt {i}"} for i in range(12)]
    source = write(tmp_path / "prompts.jsonl", lines)
    return BatchOptions(source, tmp_path / "out", str(tiny), max_new_tokens=12, max_concurrency=3)


# --- lines ----------------------------------------------------------------------------------------------------


def test_forms_of_lines() -> None:
    messages = [{"role": "user", "content": "hi"}]
    for line in ({"prompt": "hi"}, {"messages": messages}, batched("x", messages=messages, temperature=0)):
        asked = parse(1, json.dumps(line), FILL).asked
        assert [m.model_dump(exclude_none=True) for m in asked.messages] == messages and asked.temperature == 0
    assert parse(1, json.dumps({"prompt": "hi"}), replace(FILL, raw=True)).asked.prompt == "hi"
    assert parse(1, json.dumps({"prompt": [1, 2]}), FILL).asked.prompt == [1, 2]
    assert parse(1, json.dumps({"prompt": ["a", "b"]}), replace(FILL, raw=True)).asked.prompt == ["a", "b"]
    assert parse(7, '{"prompt": "hi"}', FILL).custom_id == "line-7"


def test_what_a_line_leaves_open() -> None:
    bare, full = {"prompt": "hi"}, batched("x", messages=[{"role": "user", "content": "hi"}], model="tiny")
    asked = [parse(1, json.dumps(line), FILL).asked for line in (bare, full)]
    assert [(a.temperature, a.max_tokens) for a in asked] == [(0, 256), (1, 1024)], "the command's, the API's"
    flags = replace(FILL, temperature=0.5, max_new_tokens=9)
    asked = [parse(1, json.dumps(line), flags).asked for line in (bare, full)]
    assert [(a.temperature, a.max_tokens) for a in asked] == [(0.5, 9)] * 2
    said = parse(1, '{"prompt": "hi", "temperature": 1, "max_completion_tokens": 3, "seed": 5}', flags).asked
    assert (said.temperature, said.max_tokens, said.max_completion_tokens, said.seed) == (1, None, 3, 5)
    nulls = {"messages": None, "custom_id": None, "temperature": None, "max_completion_tokens": None, "seed": None}
    assert parse(1, json.dumps({**bare, **nulls}), flags).asked == parse(1, json.dumps(bare), flags).asked
    seeds = [parse(n, json.dumps(bare), replace(FILL, seed=s)).asked.seed for n, s in ((1, 0), (2, 0), (1, 1), (1, 0))]
    assert len(set(seeds)) == 3 and seeds[0] == seeds[3]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{nope", "invalid_json_line"),
        ("[" * 100_000, "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        ('{"custom_id": 7, "prompt": "x"}', "invalid_custom_id"),
        ('{"text": "x"}', "missing_required_parameter"),
        ('{"url": "/v1/embeddings", "body": {}}', "invalid_url"),
        ('{"url": [], "body": {}}', "invalid_url"),
        (json.dumps({**batched("x"), "method": "GET"}), "invalid_method"),
        (json.dumps({**batched("x"), "bdy": 1}), "unknown_parameter"),
        (json.dumps({**batched("x"), "body": None}), "missing_required_parameter"),
        (json.dumps(batched("x")), "missing_required_parameter"),
        ('{"prompt": "x", "temprature": 1}', "unknown_parameter"),
        ('{"prompt": "x", "temperature": 9}', "invalid_value"),
        ('{"prompt": "x", "stream": true}', "invalid_value"),
        ('{"prompt": "x", "model": "gpt-9"}', "model_not_found"),
        ('{"prompt": ["a", "b"]}', "invalid_value"),
    ],
)
def test_lines_that_cannot_be_used(line: str, code: str) -> None:
    found = parse(1, line, FILL)
    assert not found.valid and found.asked.code == code and str(found.asked)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "from_windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert Source(path).survey(FILL).valid == 2


# --- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_lone_requests(options: BatchOptions, llm: LLM, temperature: float) -> None:
    tally = run_batch(replace(options, temperature=temperature))
    assert (tally.answered, tally.failed) == (12, 0) and to_json(tally)["tokens_per_s"] > 0
    fill = replace(FILL, temperature=temperature)
    for number, line in Source(options.source).texts():
        asked = parse(number, line, fill).asked
        alone = llm.generate(f"prompt {number - 1}", max_new_tokens=12, temperature=temperature, seed=asked.seed)
        assert text(results(options.out)[f"line-{number}"]) == alone.text


def test_a_bad_line_does_not_stop_the_others(options: BatchOptions, llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    write(
        options.source,
        [
            batched("good", messages=hello, temperature=0, max_tokens=5),
            "{nope",
            "",
            batched("old", TEXT, prompt="once", temperature=0, max_tokens=5),
            batched("long", messages=[{"role": "user", "content": "x" * 2000}]),
            batched("typo", messages=hello, temprature=0),
            batched("shape", messages=hello, response_format={"type": "grammar", "definition": "nope"}),
            {"prompt": "\ud800", "custom_id": "no text"},
        ],
    )
    tally, found = run_batch(options), results(options.out)
    assert (tally.lines, tally.answered, tally.failed) == (7, 2, 5)
    assert text(found["good"]) == llm.generate(hello, max_new_tokens=5).text and found["good"]["error"] is None
    assert text(found["old"]) == llm.generate("once", raw=True, max_new_tokens=5).text
    assert found["line-2"]["response"] is None and found["line-2"]["error"]["code"] == "invalid_json_line"
    for name in ("long", "typo", "shape", "no text"):
        response = found[name]["response"]
        assert response["status_code"] == 400 and response["body"]["error"]["message"] and not found[name]["error"]
    assert found["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_a_line_that_breaks_rounds_fails_alone(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": f"prompt {i}", "logprobs": True, "top_logprobs": 3 if i == 4 else 1} for i in range(8)]
    write(options.source, lines)
    sound = Batch.round

    def round(self: Batch) -> Any:
        if any(request.likelihoods == 3 for request in self.requests):
            raise RuntimeError("poison")
        return sound(self)

    monkeypatch.setattr(Batch, "round", round)
    tally = run_batch(options)
    assert (tally.answered, tally.failed) == (7, 1)
    assert results(options.out)["line-5"]["response"]["status_code"] == 500


def test_a_line_that_needs_more_memory_waits_for_a_run_that_has_it(options: BatchOptions, llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    bare = {"prompt": "short", "max_tokens": 9}
    write(options.source, [bare, batched("open", messages=hello, temperature=0), bare])
    with pytest.raises(BadModel, match=r"needs memory for .*--kv-tokens.*The same command goes on"):
        run_batch(replace(options, kv_tokens=200, max_new_tokens=None))
    assert results(options.out).keys() == {"line-1", "line-3"}
    assert run_batch(replace(options, max_new_tokens=None)).answered == 3
    assert text(results(options.out)["open"]) == llm.generate("hello", max_new_tokens=1024).text


def test_lines_wait_for_an_engine_that_is_broken(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def round(self: Batch) -> Any:
        raise RuntimeError("the device is gone")

    for lines in (40, 2):  # more than are under way at once, or the last ones of a file
        write(options.source, [{"prompt": f"prompt {i}"} for i in range(lines)])
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "round", round)
            with pytest.raises(BadModel, match=r"(rounds have failed|Nothing is answered).*The same command goes on"):
                run_batch(options)
        assert not results(options.out)
    write(options.source, [{"prompt": f"prompt {i}"} for i in range(3)])
    assert run_batch(options).answered == 3


def test_lines_wait_for_an_engine_whose_drafts_all_fail(
    options: BatchOptions, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "policy", registry.policy("dflash"))  # drafts in every round
        patch.setattr(type(llm.engine.drafter), "draft", lambda *_: 1 / 0)
        for lines in (40, 2):
            write(options.source, [{"prompt": f"prompt {i}"} for i in range(lines)])
            with pytest.raises(BadModel, match=r"(rounds have failed|Nothing is answered).*The same command goes on"):
                run_batch(options)
            assert not results(options.out)
    assert run_batch(options).answered == 2


def test_lines_wait_for_a_worker_that_has_died(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def round(self: Batch) -> Any:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "round", round)
        patch.setattr(writer, "PATIENCE", 2)
        with pytest.raises(BadModel, match=r"died.*The same command goes on"):
            run_batch(options)
    assert not results(options.out) and run_batch(options).answered == 12


def test_lines_may_name_the_model_as_the_server_does(options: BatchOptions, tiny: Path) -> None:
    write(options.source, [{"prompt": "x", "model": name} for name in (tiny.name, str(tiny))])
    assert run_batch(options).failed == 0


def test_lines_wait_for_memory_that_others_have(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    join, tries = Batch.join, itertools.count()

    def full(self: Batch, *joining: Any) -> None:
        if next(tries) < 15:
            raise BadInput("no memory")
        join(self, *joining)

    async def at_once(seconds: float) -> None:
        pass

    monkeypatch.setattr(writer.asyncio, "sleep", at_once)
    monkeypatch.setattr(Batch, "join", full)
    assert run_batch(options).answered == 12
    tries = itertools.repeat(0)  # type: ignore[assignment]
    with pytest.raises(BadModel, match="The same command goes on"):
        run_batch(replace(options, out=options.out / "again"))


class Full(io.BufferedRandom):
    """A file on a disk without room: what is in its buffer cannot be written, when it is closed either."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    close = flush


def test_a_full_disk_is_one_sentence(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def open_full(path: Path, mode: str = "r", **how: Any) -> Any:
        return Full(io.FileIO(path, "a+")) if mode == "ab+" else opened(path, mode, **how)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(BadInput, match=r"results cannot be written .No space left on device"):
        run_batch(options)


def test_an_interrupted_run_goes_on(
    options: BatchOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_batch(replace(options, out=options.out / "whole"))
    whole = {name: text(result) for name, result in results(options.out / "whole").items()}
    keep = Folder.add

    def stop_after(count: int) -> None:
        added = itertools.count(1)

        def add(self: Folder, result: Any) -> None:
            keep(self, result)
            if next(added) == count:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Folder, "add", add)

    for count in (2, 2):  # of a run: a slow machine stops some lines later
        stop_after(count)
        # Two at a time: on a slow machine all twelve could end in one turn of the loop.
        with pytest.raises(KeyboardInterrupt):
            run_batch(replace(options, max_concurrency=2))
        assert count <= len(results(options.out)) < 12
        assert f"{len(results(options.out))} of 12 lines are done" in capsys.readouterr().err
        with (options.out / RESULTS).open("ab") as file:
            file.write(b'{"id": "batch_req_1", "custom_id": "line-1')  # as a kill leaves it
    monkeypatch.setattr(Folder, "add", keep)
    run_batch(replace(options, drafter=["none"], max_concurrency=1))  # what does not shape texts may change
    assert {name: text(result) for name, result in results(options.out).items()} == whole
    before = (options.out / RESULTS).read_bytes()
    monkeypatch.setattr(run_module, "_write", None)  # nothing is left to write
    run_batch(options)
    assert (options.out / RESULTS).read_bytes() == before


def test_parquet(options: BatchOptions, llm: LLM, tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [
        {"custom_id": "a", "messages": [{"role": "user", "content": "hello", "name": None}], "max_tokens": None},
        {"custom_id": "b", "messages": [{"role": "user", "content": "you", "name": "Ada"}], "max_tokens": 3},
        {"custom_id": "c", "messages": [{"role": "user", "content": "you", "name": "Ada"}], "max_tokens": 1 << 50},
    ]
    for row in rows:  # as a data frame keeps whole numbers of which some are missing
        row["max_tokens"] = None if row["max_tokens"] is None else float(row["max_tokens"])
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    run_batch(replace(options, source=path))
    table = {row["custom_id"]: row for row in pq.read_table(options.out / "results.parquet").to_pylist()}
    assert table["a"]["text"] == llm.generate([{"role": "user", "content": "hello"}], max_new_tokens=12).text
    assert json.loads(table["b"]["response"])["usage"]["completion_tokens"] <= 3
    assert table["c"]["text"] is None and table["c"]["status_code"] == 400
    bodies = [{"url": TEXT, "body": json.dumps({"prompt": "once", "max_tokens": 2})}]
    pq.write_table(pa.Table.from_pylist(bodies), path)
    run_batch(replace(options, source=path, out=tmp_path / "bodies", temperature=0.0))
    told = text(results(tmp_path / "bodies")["line-1"])
    assert told == llm.generate("once", raw=True, max_new_tokens=2).text


def test_binary_columns_of_parquet_are_text(options: BatchOptions, tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"prompt": ["Trois ch\xeanes".encode(), b"caf\xe9"]}), tmp_path / "x.parquet")
    good, bad = [json.loads(line) for _, line in Source(tmp_path / "x.parquet").texts()]
    assert good == {"prompt": "Trois ch\xeanes"}
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    ((_, line),) = Source(tmp_path / "x.jsonl").texts()
    assert bad == json.loads(line), "what is not UTF-8 is treated as in JSONL"
    run_batch(replace(options, source=tmp_path / "x.parquet"))
    found = results(options.out)
    assert text(found["line-1"]) and found["line-2"]["response"]["status_code"] == 400
    assert "not valid UTF-8" in found["line-2"]["response"]["body"]["error"]["message"]


def test_a_deep_row_of_parquet_is_refused_alone(options: BatchOptions, tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    bodies = [json.dumps({"prompt": "once", "max_tokens": 2}), '{"prompt": ' + "[" * 3000 + "]" * 3000 + "}"]
    pq.write_table(pa.table({"url": [TEXT, TEXT], "body": bodies}), tmp_path / "x.parquet")
    run_batch(replace(options, source=tmp_path / "x.parquet"))
    found = results(options.out)
    assert text(found["line-1"]) and found["line-2"]["error"]["code"] == "missing_required_parameter"


# --- what is refused ------------------------------------------------------------------------------------------


def refused(options: BatchOptions) -> str:
    with pytest.raises(BadInput) as why:
        run_batch(options)
    assert "\n" not in str(why.value)
    return str(why.value)


def test_inputs_that_are_refused(options: BatchOptions, tmp_path: Path) -> None:
    assert "No such file" in refused(replace(options, source=tmp_path / "none.jsonl"))
    os.mkfifo(tmp_path / "pipe")
    assert "save it to a file" in refused(replace(options, source=tmp_path / "pipe"))
    for lines, says in (
        ([], "it is empty"),
        (["{nope", '{"prompt": 7}'], "line 1: The line is not valid JSON"),
        ([{"prompt": "x", "model": "gpt-9"}], "--served-model-name"),
        ([{"prompt": "x", "custom_id": n} for n in "abca"], "'a' stands in lines 1 and 4"),
        ([{"prompt": "x"}, {"prompt": "x", "custom_id": "line-1"}], "lines 1 and 2"),
    ):
        write(options.source, lines)
        assert says in refused(options)
    assert not options.out.exists()
    pytest.importorskip("pyarrow")
    assert "not Parquet" in refused(replace(options, source=options.source.rename(tmp_path / "x.parquet")))


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://localhost:{}", "[::1]:{}", "127.0.0.1:70000", "nope"])
def test_clusters_that_do_not_answer_are_refused(
    options: BatchOptions, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        assert ":" not in address, "it would try for minutes"
        raise ValueError("Invalid address format")

    monkeypatch.setattr(ray, "init", init)
    address = address.format(free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    says = refused(replace(options, ray=True))
    assert f"RAY_ADDRESS is {address!r}" in says and "host:port" in says


def test_what_ray_says_of_a_cluster_is_told(options: BatchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        raise ConnectionError("no such cluster\nand more")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for address in ("auto", f"127.0.0.1:{listening.getsockname()[1]}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert "(no such cluster)" in refused(replace(options, ray=True))


def test_folders_that_are_refused(options: BatchOptions) -> None:
    run_batch(options)
    for changed in (dict(seed=1), dict(max_new_tokens=13), dict(temperature=0.5), dict(dtype="float32")):
        says = refused(replace(options, **changed))
        assert f"--{next(iter(changed)).replace('_', '-')}" in says and "another folder" in says
    content = options.source.read_text()
    options.source.write_text(content + '{"prompt": "more"}\n')
    assert "--in" in refused(options)
    options.source.write_text(content)
    with FileLock(options.out / LOCK):
        assert "another process" in refused(options)
    results = options.out / RESULTS
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join([*lines[:2], "\0\0\0\n", *lines[2:]]))
    assert "line 3 is damaged" in refused(options)
    results.write_text("".join(lines))
    (options.out / MANIFEST).unlink()
    assert "another run" in refused(options)


@pytest.mark.parametrize("flags", [dict(temperature=3.0), dict(max_concurrency=0), dict(kv_tokens=1)])
def test_flags_that_cannot_be(tmp_path: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="--" + next(iter(flags)).replace("_", "-")):
        BatchOptions(tmp_path, tmp_path, **flags)
