"""Many clients at once, some of which leave or send nonsense; and everything that the OpenAPI document allows."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import dataclass

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from draftwood.llm import LLM
from tests.serving import Running, serving, tiny_llm

CLIENTS, EACH = 64, 2
NONSENSE = [
    b"{",
    b'{"model": "tiny"}',
    b'{"model": "tiny", "messages": [{"role": "king", "content": ""}]}',
    b"\xff\xfe",
]


@dataclass(frozen=True)
class Task:
    kind: str  # read, leave or nonsense
    words: int
    tokens: int
    temperature: float
    seed: int
    policy: str

    @property
    def messages(self) -> list[dict[str, str]]:
        shared = "You answer briefly and to the point. " * (self.seed % 3)
        return [{"role": "user", "content": shared + f"word{self.seed} " * self.words}]

    @property
    def body(self) -> dict:
        return dict(model="tiny", messages=self.messages, max_tokens=self.tokens, temperature=self.temperature,
                    seed=self.seed, stream=True, policy=self.policy)  # fmt: skip


def tasks() -> list[Task]:
    rng = random.Random(0)
    kinds = ["leave"] * (CLIENTS * EACH // 10) + ["nonsense"] * (CLIENTS * EACH // 20)
    kinds += ["read"] * (CLIENTS * EACH - len(kinds))
    rng.shuffle(kinds)
    return [
        Task(kind, rng.choice([1, 1, 3, 10, 40]), rng.choice([1, 5, 20, 60]), rng.choice([0, 0, 1]), i,
             rng.choice(["bastion", "bastion", "ddtree:6", "autoregressive"]))
        for i, kind in enumerate(kinds)
    ]  # fmt: skip


async def run(client: httpx.AsyncClient, task: Task) -> str | None:
    """The text, or None if there was to be none."""
    url = "/v1/chat/completions"
    if task.kind == "nonsense":
        answer = await client.post(url, content=NONSENSE[task.seed % 4], headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]
        return None
    text = ""
    async with client.stream("POST", url, json=task.body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
                text += chunk["choices"][0]["delta"].get("content") or ""
                if task.kind == "leave" and text:
                    return None
    raise AssertionError("the stream ended without its end")


async def drive(running: Running, todo: list[Task]) -> dict[Task, str | None]:
    """All clients at once, each with one task after the other."""
    found: dict[Task, str | None] = {}

    async def one(mine: list[Task]) -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=300) as client:
            for task in mine:
                found[task] = await run(client, task)

    await asyncio.gather(*(one(todo[i::CLIENTS]) for i in range(CLIENTS)))
    return found


def queue_p99(running: Running) -> float:
    """Seconds, the upper end of the histogram's bucket."""
    text = httpx.get(f"{running.url}/metrics").text
    name = "vllm:request_queue_time_seconds_bucket"
    buckets = [line for line in text.splitlines() if line.startswith(name)]
    counts = [(float(b.split('le="')[1].split('"')[0]), float(b.split()[-1])) for b in buckets]
    return next(le for le, count in counts if count >= 0.99 * counts[-1][1])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def test_sixty_four_clients(llm: LLM) -> None:
    todo = tasks()
    with serving(llm, max_concurrency=16) as running:
        first = asyncio.run(drive(running, todo[:CLIENTS]))
        running.wait_until_idle()
        gc.collect()
        before = psutil.Process().memory_info().rss
        rest = asyncio.run(drive(running, todo[CLIENTS:]))
        running.wait_until_idle()
        gc.collect()
        growth = psutil.Process().memory_info().rss - before
        scheduler = running.service.scheduler
        assert scheduler.reserved == 0 and not scheduler._batch.requests
        assert scheduler.prefixes.tokens <= scheduler.prefixes.capacity
        kept = scheduler.prefixes.tokens * llm.target.kv_bytes_per_token()
        print(f"p99 of queue time: at most {queue_p99(running)} s; memory grew by {growth >> 10} KiB")
        assert growth < kept + (48 << 20)
    for task, text in {**first, **rest}.items():
        if text is not None:
            options = dict(max_new_tokens=task.tokens, temperature=float(task.temperature), seed=task.seed)
            assert text == llm.generate(task.messages, policy="autoregressive", **options).text, task


def test_everything_the_document_allows(llm: LLM) -> None:
    """Whatever is sent: an answer in the documented form, and never a 500."""
    with serving(llm, default_max_tokens=3, max_model_len=64, max_n=2) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        for operation in schema.get_all_operations():
            _try(operation.ok(), running)
        running.wait_until_idle()


def _try(operation, running: Running) -> None:
    @settings(
        max_examples=12, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def check(case) -> None:
        if isinstance(case.body, dict) and "model" in case.body:  # most would otherwise ask for another model
            case.body["model"] = "tiny"
            for limit in {"max_tokens", "max_completion_tokens"} & set(case.body):
                case.body[limit] = 2
        response = case.call(base_url=running.url, timeout=60)
        # What is too long for the model's window is refused, and no document can say what that is.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    check()
