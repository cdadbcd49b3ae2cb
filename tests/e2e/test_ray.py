"""The server on a real local Ray cluster with two replicas, met with the openai client."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftwood.llm import LLM, load
from draftwood.policies.base import Outlook
from draftwood.policies.bastion import Bastion
from draftwood.serve.options import Options
from tests.local_ray import free_port, processes, ray_cluster
from tests.serving import write_tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray")  # its own
REPLICAS = 2
RETRYABLE = (openai.InternalServerError, openai.APIConnectionError)  # what the client asks again for by itself


@dataclass(frozen=True)
class Mortal(Bastion):
    """Kills the engine's thread, once, when a file says so."""

    order: str = ""

    def drafts(self, outlook: Outlook) -> bool:  # asked in every round, also where drafting does not pay
        if self.order and os.path.exists(self.order):
            os.unlink(self.order)
            raise SystemExit
        return super().drafts(outlook)


def loaded(tiny: str, order: str = "") -> LLM:
    return load(tiny, "ngram", Mortal(order=order), dtype="float64", device="cpu")


@dataclass(frozen=True)
class Cluster:
    url: str
    tiny: str
    llm: LLM  # the same model here

    def deploy(self, **changes: Any) -> None:
        from ray import serve

        from draftwood.serve_ray import Scale, application

        options = Options(name="tiny", max_concurrency=2, **changes.pop("options", {}))
        scale = Scale(REPLICAS, cpus=0.4, health_s=1)
        serve.run(application(partial(loaded, self.tiny, **changes), options, scale), name="draftwood")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", timeout=120, **{"max_retries": 0, **options})

    def alone(self, messages: Any, tokens: int) -> str:
        return self.llm.generate(messages, max_new_tokens=tokens).text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, isolated_home: None) -> Iterator[Cluster]:
    with ray_cluster():
        from ray import cloudpickle, serve

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        port, tiny = free_port(), str(write_tiny(tmp_path_factory.mktemp("tiny")))
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            running = Cluster(f"http://127.0.0.1:{port}", tiny, loaded(tiny))
            running.deploy()
            yield running
        finally:
            serve.shutdown()


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(client: openai.OpenAI, messages: Any, tokens: int = 16, **options: Any) -> tuple[str, str]:
    """The text, and who wrote it."""
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, max_tokens=tokens, temperature=0, **options
    )
    return raw.parse().choices[0].message.content or "", raw.headers["x-draftwood-replica"]


def until(true: Callable[[], bool], why: str) -> None:
    for _ in range(1200):
        if true():
            return
        time.sleep(0.1)
    pytest.fail(why)


def counted(cluster: Cluster, name: str) -> dict[str, float]:
    """A figure of each replica."""
    families = text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics", timeout=60).text)
    return {s.labels["replica"]: s.value for family in families for s in family.samples if s.name == name}


def test_load_goes_over_both_replicas(cluster: Cluster) -> None:
    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        questions = [turn(f"question {i}") for i in range(24)]
        answers = list(pool.map(lambda messages: ask(client, messages), questions))
    assert [text for text, _ in answers] == [cluster.alone(messages, 16) for messages in questions]
    assert len({replica for _, replica in answers}) == REPLICAS
    assert counted(cluster, "vllm:time_to_first_token_seconds_count") == Counter(replica for _, replica in answers)


def test_a_conversation_stays_where_its_beginning_is_known(cluster: Cluster) -> None:
    with cluster.client() as client:
        for name in ("by its beginning", "by a header"):
            headers = {"x-session-id": "s1"} if name == "by a header" else {}
            messages, homes = turn(name), set()
            for i in range(4):
                said, home = ask(client, messages, extra_headers=headers)
                homes.add(home)
                messages = [*messages, {"role": "assistant", "content": said}, *turn(f"and {i}?")]
            assert len(homes) == 1, name
        hits = counted(cluster, "vllm:prefix_cache_hits_total")
        assert len(hits) == REPLICAS and max(hits.values()) > 0, "and the replica knew the prefix"
        spread = {ask(client, turn("hi"), 2, extra_headers={"x-session-id": f"user {i}"})[1] for i in range(16)}
        assert len(spread) == REPLICAS
        same = {ask(client, turn(f"hi {i}"), 2, extra_body={"prompt_cache_key": "k"})[1] for i in range(4)}
        assert len(same) == 1


def test_streams_come_in_pieces(cluster: Cluster) -> None:
    with cluster.client() as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=turn("hello"), max_tokens=40, temperature=0, stream=True
            )
        )
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == cluster.alone(turn("hello"), 40) and len(pieces) > 3
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_mistakes_come_through(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client, turn("x" * 2000))
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_frees_its_seat(cluster: Cluster) -> None:
    session = {"x-session-id": "leaves"}

    with cluster.client() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=turn("long"), max_tokens=900, stream=True, extra_headers=session,
            extra_body={"ignore_eos": True, "policy": "autoregressive"},
        )  # fmt: skip
        next(stream)
        stream.close()
    until(lambda: not any(counted(cluster, "vllm:num_requests_running").values()), "its seat is still taken")


def test_a_killed_replica_takes_nothing_with_it(cluster: Cluster) -> None:
    """Answers that nobody has seen the beginning of are written again; a stream says that it broke."""
    long = {"extra_body": {"ignore_eos": True, "policy": "autoregressive"}}
    before = set(processes(":Replica"))
    assert len(before) == REPLICAS

    def stream(client: openai.OpenAI, i: int, session: dict[str, str]) -> str:
        chunks = client.chat.completions.create(
            model="tiny", messages=turn(f"stream {i}"), max_tokens=900, temperature=0, stream=True,
            extra_headers=session, **long,
        )  # fmt: skip
        started.release()
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    started = threading.Semaphore(0)
    with cluster.client() as client, ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(stream, client, i, session) for i, session in enumerate(both(client))]
        for _ in streams:
            assert started.acquire(timeout=120)
        whole = [pool.submit(ask, client, turn(f"whole {i}"), 60, **long) for i in range(8)]
        os.kill(before.copy().pop(), signal.SIGKILL)
        for i, future in enumerate(whole):
            assert future.result(timeout=240)[0] == written(cluster, f"whole {i}", 60)
        broken = [check_stream(cluster, i, future) for i, future in enumerate(streams)]
        assert sum(broken) == 1, "it was on one of two"
        assert ask(client, turn("later"))[0] == cluster.alone(turn("later"), 16)
    until(lambda: len(processes(":Replica")) == REPLICAS, "the replica was not started again")
    assert len(set(processes(":Replica")) & before) == REPLICAS - 1


def both(client: openai.OpenAI) -> list[dict[str, str]]:
    """A session on each replica."""
    homes: dict[str, dict[str, str]] = {}
    for i in range(64):
        session = {"x-session-id": f"both {i}"}
        homes.setdefault(ask(client, turn("hi"), 2, extra_headers=session)[1], session)
    assert len(homes) == REPLICAS
    return list(homes.values())


def written(cluster: Cluster, text: str, tokens: int) -> str:
    ids = cluster.llm.encode(turn(text))
    steps = cluster.llm.engine.run(ids, tokens)
    return str(cluster.llm.tokenizer.decode([t for step in steps for t in step.tokens], skip_special_tokens=True))


def check_stream(cluster: Cluster, i: int, future: Future[str]) -> bool:
    """Whether a stream broke, and then with an error that says so."""
    try:
        assert future.result(timeout=240) == written(cluster, f"stream {i}", 900)
        return False
    except openai.APIError as error:
        assert error.code == "replica_died" or isinstance(error, RETRYABLE)
        return True


def test_an_update_drops_no_request_and_a_dead_engine_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    order, over = tmp_path / "die", threading.Event()

    def keep_asking(i: int) -> list[tuple[str, str]]:
        answers = []
        with cluster.client() as client:
            while not over.is_set():
                answers.append(ask(client, turn(f"update {i}"), 30))
        return answers

    old = set(processes(":Replica"))
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, i) for i in range(4)]
        try:
            cluster.deploy(order=str(order))
            until(lambda: not old & set(processes(":Replica")), "old replicas are still there")
        finally:
            over.set()
        for i, future in enumerate(asking):
            answers = future.result(timeout=240)
            assert {text for text, _ in answers} == {cluster.alone(turn(f"update {i}"), 30)}
    new = set(processes(":Replica"))
    order.touch()
    with cluster.client() as client:
        with pytest.raises(openai.InternalServerError):  # 503, which clients repeat
            ask(client, turn("die"), 30)
        assert not order.exists()
        until(lambda: len(new & set(processes(":Replica"))) < REPLICAS, "nobody saw that the engine is dead")
    with cluster.client(max_retries=5) as client:
        assert ask(client, turn("die"), 30)[0] == cluster.alone(turn("die"), 30)


def test_replicas_follow_the_queue(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a user calls: `build_app`, with the server's own settings, but less patience with a long queue."""
    from ray import serve

    from draftwood.serve_ray import build_app

    monkeypatch.setattr("draftwood.serve_ray.UPSCALE_S", 2.0)
    app = build_app(
        cluster.tiny, "ngram", "autoregressive", num_replicas=1, max_replicas=2, num_cpus=0.4, dtype="float64",
        device="cpu", name="tiny", max_concurrency=1,
    )  # fmt: skip
    serve.delete("draftwood")  # an update would keep as many as there are for ten minutes
    serve.run(app, name="draftwood")
    assert len(processes(":Replica")) == 1
    with cluster.client(max_retries=5) as client, ThreadPoolExecutor(6) as pool:
        over = threading.Event()

        def keep_asking(i: int) -> None:
            while not over.is_set():
                ask(client, turn(f"queue {i}"), 200, extra_body={"ignore_eos": True})

        asking = [pool.submit(keep_asking, i) for i in range(6)]
        try:
            until(lambda: len(processes(":Replica")) == 2, "the queue is long, but there is one replica")
        finally:
            over.set()
        for future in asking:
            future.result(timeout=240)
