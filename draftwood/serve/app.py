"""The application: OpenAI's endpoints, vLLM's helpers around them, and nothing that computes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from draftwood import __version__
from draftwood.llm import LLM
from draftwood.serve import failure
from draftwood.serve.answer import Answer, Choice, Delta, live
from draftwood.serve.failure import REFUSALS, Refused
from draftwood.serve.grammar import Grammars
from draftwood.serve.guard import Events, Gone, Guard, while_there
from draftwood.serve.metrics import Metrics
from draftwood.serve.options import Options
from draftwood.serve.prompts import Prompts
from draftwood.serve.protocol import Asked, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from draftwood.serve.render import Chat, Completion, Renderer
from draftwood.serve.scheduler import LOG, Scheduler

Answers: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events.", "content": {"application/json": {}, "text/event-stream": {}}},
    **REFUSALS,
}


class Service:
    """What the endpoints share: the model, its worker, and its counters."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.options = llm, options
        self.name = options.name or llm.target.name
        self.metrics = Metrics(self.name)
        self.scheduler = Scheduler(llm.engine, options, self.metrics)
        grammars = Grammars(llm.tokenizer, llm.target.vocab_size, llm.stop_ids)
        self.prompts = Prompts(llm, options, self.scheduler.max_len, grammars)
        self.started = int(time.time())

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name, self.llm.target.name):
            raise Refused(404, f"The model {name!r} does not exist; this server has {self.name!r}.", "model_not_found")

    async def answer(self, request: Request, asked: Asked, prompts: list[list[int]], renderer: Renderer) -> Response:
        """Queue the choices of all prompts, then stream them or wait for them."""
        top = _top(asked)
        making = await asyncio.to_thread(lambda: [job for ids in prompts for job in self.prompts.jobs(ids, asked, top)])
        answer = Answer(self.scheduler, self.llm.tokenizer, asked.stops, sum(map(len, prompts)))
        await asyncio.to_thread(answer.make, making)
        answer.submit()
        deltas = answer.deltas()
        try:
            if not asked.stream:
                return JSONResponse(await while_there(request, self._whole(answer, deltas, renderer)))
            first = await while_there(request, _first(deltas))  # until here a failure still has a status of its own
        except Gone:
            return Response(status_code=499)
        finally:
            if not asked.stream:
                answer.close()
        return Events(self._events(asked, answer, _again(first, deltas), renderer), answer.close)

    async def _whole(self, answer: Answer, deltas: AsyncIterator[tuple[Choice, Delta]], renderer: Renderer) -> Any:
        told: dict[int, list[Delta]] = {choice.index: [] for choice in answer.choices}
        async for choice, delta in deltas:
            told[choice.index].append(delta)
        body = renderer.envelope([renderer.whole(c, told[c.index]) for c in answer.choices], streamed=False)
        return {**body, "usage": answer.usage, "metrics": answer.metrics}

    async def _events(
        self, asked: Asked, answer: Answer, deltas: AsyncIterator[tuple[Choice, Delta]], renderer: Renderer
    ) -> AsyncIterator[str]:
        options = asked.stream_options
        try:
            for choice in answer.choices:
                for chunk in renderer.opening(choice):
                    yield json.dumps(renderer.envelope([chunk], streamed=True))
            async for choice, delta in deltas:
                for chunk in renderer.chunks(choice, delta):
                    body = renderer.envelope([chunk], streamed=True)
                    if options and options.include_draftwood:
                        body["draftwood"] = live(choice, delta, self.llm)
                    yield json.dumps(body)
            if options and options.include_usage:
                body = renderer.envelope([], streamed=True)
                yield json.dumps({**body, "usage": answer.usage, "metrics": answer.metrics})
        except Refused as error:
            yield json.dumps(error.body())
        yield "[DONE]"


def _top(asked: Asked) -> int | None:
    if isinstance(asked, CompletionRequest):
        return asked.logprobs
    assert isinstance(asked, ChatRequest)
    if asked.top_logprobs and not asked.logprobs:
        raise Refused(400, "top_logprobs needs logprobs to be true.", None, "top_logprobs")
    return (asked.top_logprobs or 0) if asked.logprobs else None


async def _first(deltas: AsyncIterator[tuple[Choice, Delta]]) -> tuple[Choice, Delta]:
    return await anext(deltas)


async def _again(
    first: tuple[Choice, Delta], rest: AsyncIterator[tuple[Choice, Delta]]
) -> AsyncIterator[tuple[Choice, Delta]]:
    yield first
    async for pair in rest:
        yield pair


def build_app(llm: LLM, options: Options) -> FastAPI:
    """The server of one model. Its worker runs from startup to shutdown."""
    service = Service(llm, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        await asyncio.to_thread(service.scheduler.drain, 0.0)

    app = FastAPI(title="draftwood", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    failure.install(app)
    app.include_router(_writing(service))
    app.include_router(_telling(service))
    app.add_middleware(Guard, key=options.api_key, max_body_bytes=options.max_body_bytes)
    if options.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.cors, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


def _writing(service: Service) -> APIRouter:
    """The endpoints that write."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=Answers)
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        service.check_model(asked.model)
        if service.options.log_prompts:
            LOG.info("chat: %s", asked.messages)
        form = service.prompts.form(asked)
        ids = await asyncio.to_thread(service.prompts.chat, asked.messages, asked)
        renderer = Chat(service.name, service.llm.tokenizer, form, bool(asked.logprobs))
        return await service.answer(request, asked, [ids], renderer)

    @router.post("/v1/completions", responses=Answers)
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        service.check_model(asked.model)
        if service.options.log_prompts:
            LOG.info("completion: %s", asked.prompt)
        prompts = await asyncio.to_thread(service.prompts.texts, asked.prompt)
        if len(prompts) * (asked.n or 1) > service.options.max_n:
            raise Refused(400, f"At most {service.options.max_n} texts are written for a request.", None, "n")
        renderer = Completion(service.name, service.llm.tokenizer, asked.logprobs is not None)
        return await service.answer(request, asked, prompts, renderer)

    @router.post("/tokenize", responses=REFUSALS)
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        if asked.messages is not None:
            ids = service.prompts.chat(asked.messages, generate=asked.add_generation_prompt)
        else:
            ids = service.prompts.encode(asked.prompt or "", asked.add_special_tokens)
        return {"count": len(ids), "max_model_len": service.scheduler.max_len, "tokens": ids}

    @router.post("/detokenize", responses=REFUSALS)
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        if any(not 0 <= token < service.llm.target.vocab_size for token in asked.tokens):
            raise Refused(400, "Some of these are not tokens of this model.", None, "tokens")
        return {"prompt": str(service.llm.tokenizer.decode(asked.tokens))}

    return router


def _telling(service: Service) -> APIRouter:
    """The endpoints that tell how things are."""
    router = APIRouter()

    @router.get("/v1/models", responses=REFUSALS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{model:path}", responses=REFUSALS)
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return _card(service)

    @router.get("/health", responses=REFUSALS)
    async def health() -> dict[str, str]:
        if service.scheduler.draining:
            raise Refused(503, "The server is going down.", "shutting_down")
        return {"status": "ok"}

    @router.get("/version", responses=REFUSALS)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **REFUSALS})
    async def metrics() -> Response:
        scheduler = service.scheduler
        used = (scheduler.reserved + scheduler.prefixes.tokens) / scheduler.kv_tokens
        return Response(service.metrics.text(*scheduler.load, used), media_type=CONTENT_TYPE_LATEST)

    return router


def _card(service: Service) -> dict[str, Any]:
    drafter = service.llm.drafter
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "draftwood",
        "root": service.llm.target.name,
        "max_model_len": service.scheduler.max_len,
        "drafter": drafter.name if drafter else None,
        "policy": service.llm.engine.policy.name,
    }
