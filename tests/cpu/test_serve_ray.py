"""The server on Ray Serve, as far as it goes without a cluster."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.types import Send

from draftwood import engine as engine_module
from draftwood.batch import Batch
from draftwood.config import deployed
from draftwood.errors import BadInput
from draftwood.serve import scheduler as scheduler_module
from draftwood.serve.failure import Refused
from draftwood.serve.metrics import Metrics, together
from draftwood.serve.options import Options
from draftwood.serve.protocol import ChatRequest, CompletionRequest
from draftwood.serve.service import Service
from tests.serving import tiny_llm

pytest.importorskip("ray")
from ray.serve.exceptions import BackPressureError

from draftwood import serve_ray
from draftwood.serve.door import SCOPE, conversation
from draftwood.serve_ray import _value, build_app


def test_importing_starts_nothing() -> None:
    script = "import ray, sys, draftwood.serve_ray; assert not ray.is_initialized() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"DRAFTWOOD_SERVE_NUM_REPLICAS": "2", "DRAFTWOOD_SERVE_API_KEY": "1234", "DRAFTWOOD_HOME": "/x"}
    assert deployed(env) == {"num_replicas": "2", "api_key": "1234"}
    found: dict[str, object] = {}
    monkeypatch.setattr(serve_ray, "build_app", lambda **given: found.update(given))
    for name, value in {**env, "DRAFTWOOD_SERVE_DRAFTER": "ngram", "DRAFTWOOD_SERVE_TARGET": "a/b"}.items():
        monkeypatch.setenv(name, value)
    assert serve_ray.app is None
    assert found == {"num_replicas": 2, "api_key": "1234", "drafter": "ngram", "target": "a/b"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_concurency": 3}, "'max_concurrency'"),
        ({"num_replica": 3}, "'num_replicas'"),
        ({"num_replicas": 0}, "1 or more"),
        ({"num_replicas": 3, "max_replicas": 2}, "no less"),
        ({"max_concurrency": 0}, "--max-concurrency is 0"),
        ({"max_concurrency": 2.5}, "max_concurrency is 2.5; expected int"),
        ({"num_replicas": "2"}, "num_replicas is '2'; expected int"),
        ({"num_doors": 0}, "num_doors is 0"),
        ({"num_cpus": -1}, "num_cpus is -1"),
        ({"num_gpus": math.nan}, "num_gpus is nan"),
        ({"health_check_s": 0}, "health_check_s is 0"),
        ({"policy": "ddtre"}, "'ddtree'"),
        ({"drafter": "foo"}, "foo.*A folder or a Hub name"),
        ({"drafter": ["ngram", "foo"]}, "foo.*A folder or a Hub name"),
        ({"drafter": 3}, "drafter is 3; expected"),
        ({"target": "/nope"}, "/nope holds no config.json"),
        ({"target": Path("/nope")}, "/nope holds no config.json"),
        ({"dtype": "foo"}, "dtype is 'foo'; expected one of"),
        ({"target_path": "x"}, "target_path is 'x'; expected one of"),
        ({"cors": "https://a.example"}, "cors is 'https://a.example'; expected"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        build_app(device="cpu", **given)  # type: ignore[arg-type]


def test_settings_that_can_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    drafters = [tmp_path, "ngram"]
    assert build_app(tmp_path, drafters, "ddtree:8", device="cpu", num_cpus=2, deadline_s=9, cors=["https://a.example"])
    assert build_app("owner/name", "ngram+recycling", device="cpu", num_gpus=0.5, api_key="k")


def named(body: object, **headers: str) -> str:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return conversation(Request({"type": "http", "headers": pairs}), raw)


def test_turns_of_a_conversation_have_one_name() -> None:
    system, hello, bye = ({"role": r, "content": c} for r, c in (("system", "s"), ("user", "hello"), ("user", "bye")))
    answer = {"role": "assistant", "content": "a"}
    begun = named({"messages": [system, hello]})
    assert begun == named({"messages": [system, hello, answer, bye], "seed": 3}) != ""
    assert len({begun, named({"messages": [hello]}), named({"messages": [system, bye]})}) == 3
    assert named({"prompt": "x" * 2000}) == named({"prompt": "x" * 1024 + "y"}) != named({"prompt": "y"})
    sessions = [named({"messages": [m]}, x_session_id="me") for m in (hello, bye)]
    assert sessions[0] == sessions[1] and "me" not in sessions[0]
    keys = [named({"messages": [m], "prompt_cache_key": "k"}) for m in (hello, bye)]
    assert keys[0] == keys[1] not in sessions
    for nothing in (b"", b"{nope", b"[1]", {"messages": 3}, {"messages": [answer]}, {"prompt": 7}, b"[" * 100_000):
        assert named(nothing) == ""


def test_settings_of_the_environment_are_of_their_kind() -> None:
    given = {
        "trust_remote_code": "False", "log_prompts": "no", "num_replicas": "2", "num_gpus": "null", "drain_s": "2.5",
        "cors": "https://a.example", "drafter": '["ngram", "none"]', "name": "7", "what": "ever",
    }  # fmt: skip
    assert {name: _value(name, text) for name, text in given.items()} == {
        "trust_remote_code": False, "log_prompts": False, "num_replicas": 2, "num_gpus": None, "drain_s": 2.5,
        "cors": ("https://a.example",), "drafter": ["ngram", "none"], "name": "7", "what": "ever",
    }  # fmt: skip
    for name, text in (("num_replicas", "two"), ("trust_remote_code", "maybe"), ("max_concurrency", "1.5")):
        with pytest.raises(BadInput, match=f"DRAFTWOOD_SERVE_{name.upper()} is '{text}'; expected (int|bool)"):
            _value(name, text)


def test_an_engine_that_cannot_go_on_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ChatRequest(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3)

    def ask(service: Service) -> str:
        async def answer() -> None:
            await (await service.begin(asked)).whole()

        with pytest.raises(Refused) as why:
            asyncio.run(answer())
        return str(why.value.code)

    def service(error: type[BaseException]) -> Service:
        def round(self: Batch) -> None:
            raise error

        monkeypatch.setattr(Batch, "round", round)
        made = Service(llm, Options(name="tiny"))
        made.scheduler.start()
        assert made.scheduler.sick is None
        return made

    llm = tiny_llm()
    lost = Service(llm, Options(name="tiny"))
    lost.scheduler.start()
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "join", lambda *_: 1 / 0)
        assert ask(lost) == "internal_error", "nor where it could not even begin"
    lost.scheduler.drain(0)
    failing = service(RuntimeError)
    for _ in range(scheduler_module.FAILURES):
        assert failing.scheduler.sick is None
        assert ask(failing) == "internal_error"
    assert "rounds have failed" in str(failing.scheduler.sick)
    failing.scheduler.drain(0)
    dead = service(SystemExit)
    assert ask(dead) == "shutting_down", "nobody waits in vain"
    dead.scheduler._thread.join()
    assert "died" in str(dead.scheduler.sick)


def test_an_engine_whose_drafts_all_fail_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it reads their prompts. A round that writes makes up for those before it, or an answer without one."""
    llm = tiny_llm()
    service = Service(llm, Options(name="tiny", max_concurrency=2))
    service.scheduler.start()

    def ask(tokens: int) -> str | None:
        asked = CompletionRequest(model="tiny", prompt=[1, 2], max_tokens=tokens, ignore_eos=True, policy="dflash")

        async def answer() -> None:
            await (await service.begin(asked)).whole()

        try:
            asyncio.run(answer())
        except Refused as why:
            return why.code
        return None

    for tokens in (6, 1):
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine.drafter), "draft", lambda *_: 1 / 0)
            for _ in range(scheduler_module.FAILURES - 1):
                assert ask(6) == "internal_error"
            assert service.scheduler.sick is None
        assert ask(tokens) is None
    monkeypatch.setattr(type(llm.engine.drafter), "draft", lambda *_: 1 / 0)
    for _ in range(scheduler_module.FAILURES):
        assert service.scheduler.sick is None
        assert ask(6) == "internal_error"
    assert "rounds have failed" in str(service.scheduler.sick)
    service.scheduler.drain(0)


def test_a_policy_that_clients_make_up_is_not_remembered_for_ever() -> None:
    engine = tiny_llm().engine
    usual = engine.acceptance(engine.policy.name, 0.0)
    for nodes in range(200):
        assert engine.acceptance(f"ddtree:{nodes}", 0.0) is engine.acceptance(f"ddtree:{nodes}", 0.0)
    assert len(engine._acceptance) == engine_module.MOST_KINDS and engine.acceptance(engine.policy.name, 0.0) is usual


@pytest.mark.parametrize(("patient", "busy"), [(0, True), (math.inf, False)], ids=["beside requests", "when idle"])
def test_what_was_learned_is_kept_while_a_server_runs(
    patient: float, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ChatRequest(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    llm, kept = tiny_llm(), []
    llm.engine.remember = lambda: kept.append(made.scheduler.load[0] > 0)
    monkeypatch.setattr(scheduler_module, "REMEMBER_S", 1e-9)
    monkeypatch.setattr(scheduler_module, "PATIENT", patient)
    made = Service(llm, Options(name="tiny"))
    made.scheduler.start()

    async def answer() -> None:
        await (await made.begin(asked)).whole()

    asyncio.run(answer())
    asyncio.run(answer())
    assert False in kept and (True in kept) == busy
    made.scheduler.drain(0)


def test_the_door_reads_no_more_than_a_server_takes() -> None:
    async def answer(key: bytes, size: int) -> int:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": bytes(size), "more_body": True}

        headers = [(b"authorization", b"Bearer " + key)]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "root_path": ""}
        door = serve_ray.Door(None, Options(name="tiny", api_key="mine", max_body_bytes=999))  # type: ignore[arg-type]
        return (await door(Request(scope, receive))).status_code

    assert [asyncio.run(answer(*given)) for given in ((b"mine", 400), (b"other", 1))] == [413, 401]


class Full:
    """Replicas that take nothing more."""

    def options(self, **_: object) -> Full:
        return self

    def remote(self, *_: object) -> Full:
        return self

    async def __anext__(self) -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)


def test_pages_can_read_why_the_door_refuses() -> None:
    async def told(key: bytes, size: int, origin: bytes, **options: Any) -> tuple[int, str]:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": bytes(size)}

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        headers = [(b"authorization", b"Bearer " + key), (b"origin", origin)]
        scope = dict.fromkeys(SCOPE, "") | {
            "type": "http",
            "method": "POST",
            "path": "/v1",
            "headers": headers,
        }
        door = serve_ray.Door(Full(), Options(api_key="mine", max_body_bytes=999, **options))  # type: ignore[arg-type]
        await (await door(Request(scope, receive)))(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]).get(b"access-control-allow-origin", b"").decode()

    page = b"https://a.example"
    for key, size, status in ((b"other", 1, 401), (b"mine", 1000, 413), (b"mine", 1, 429)):
        assert asyncio.run(told(key, size, page, cors=(page.decode(),))) == (status, page.decode())
        assert asyncio.run(told(key, size, b"https://b.example", cors=(page.decode(),))) == (status, "")
        assert asyncio.run(told(key, size, page)) == (status, "")


def test_a_mistake_of_a_replica_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: object, receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        raise RuntimeError("the reason")  # as Starlette does once it has told the client

    async def answer() -> list[int]:
        replica = serve_ray.Replica.__new__(serve_ray.Replica)  # without a model
        replica._app, replica._id = app, b"me"  # type: ignore[assignment]
        return [message["status"] async for message in replica.answer({"type": "http"}, b"")]

    assert asyncio.run(answer()) == [500]
    assert "the reason" in caplog.text


def test_metrics_of_several_servers_are_told_apart() -> None:
    one, two = Metrics("tiny"), Metrics("tiny")
    one.refused()
    told = {name: metrics.text(3, 0, 0.5).decode() for name, metrics in {"a": one, "b": two}.items()}
    found = {family.name: family for family in text_string_to_metric_families(together(told).decode())}
    for name, text in told.items():
        for family in text_string_to_metric_families(text):
            merged = found[family.name]
            assert (merged.type, merged.documentation) == (family.type, family.documentation)
            own = [s for s in merged.samples if s.labels["replica"] == name]
            assert [(s.name, s.labels, s.value) for s in own] == [
                (s.name, {**s.labels, "replica": name}, s.value) for s in family.samples
            ]
    assert together(told).decode().count("# TYPE draftwood:requests_refused_total counter") == 1


def test_kept_prefixes_make_room_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ChatRequest(model="tiny", messages=[{"role": "user", "content": "x" * 40}], max_tokens=3)
    made = Service(tiny_llm(), Options(name="tiny"))
    made.scheduler.start()

    async def answer() -> None:
        await (await made.begin(asked)).whole()

    asyncio.run(answer())
    assert made.scheduler.prefixes.tokens
    join = Batch.join

    def full(self: Batch, *joining: object) -> None:
        if made.scheduler.prefixes.tokens:
            raise BadInput("no memory")
        join(self, *joining)

    monkeypatch.setattr(Batch, "join", full)
    asyncio.run(answer())
    made.scheduler.drain(0)
