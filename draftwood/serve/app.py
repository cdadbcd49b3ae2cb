"""The application: OpenAI's endpoints, vLLM's helpers around them, and nothing that computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from draftwood import __version__, registry
from draftwood.llm import LLM
from draftwood.serve import failure, playground
from draftwood.serve.failure import REFUSALS, Refused
from draftwood.serve.guard import PAGES, Events, Gone, Guard, while_there
from draftwood.serve.options import Options
from draftwood.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from draftwood.serve.service import Service

Answers: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events.", "content": {"application/json": {}, "text/event-stream": {}}},
    **REFUSALS,
}


async def respond(service: Service, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
    """Queue the choices of all prompts, then stream them or wait for them."""
    writing = await service.begin(asked)
    try:
        if not asked.stream:
            return JSONResponse(await while_there(request, writing.whole()))
        first = await while_there(request, writing.first())
    except Gone:
        return Response(status_code=499)
    finally:
        if not asked.stream:
            writing.close()
    return Events(writing.events(first), writing.close)


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
    playground.install(app)
    app.add_middleware(Guard, key=options.api_key, max_body_bytes=options.max_body_bytes)
    if options.cors:
        app.add_middleware(CORSMiddleware, allow_origins=options.cors, **PAGES)
    return app


def _writing(service: Service) -> APIRouter:
    """The endpoints that write."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=Answers)
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        return await respond(service, request, asked)

    @router.post("/v1/completions", responses=Answers)
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        return await respond(service, request, asked)

    @router.post("/tokenize", responses=REFUSALS)
    def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        if asked.messages is not None:
            ids = service.prompts.chat(asked.messages, generate=asked.add_generation_prompt)
        else:
            ids = service.prompts.encode(asked.prompt or "", asked.add_special_tokens)
        return {"count": len(ids), "max_model_len": service.scheduler.max_len, "tokens": ids}

    @router.post("/detokenize", responses=REFUSALS)
    def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        if any(not 0 <= token < service.llm.target.vocab_size for token in asked.tokens):
            raise Refused(400, "Some of these are not tokens of this model.", None, "tokens")
        return {"prompt": str(service.llm.tokenizer.decode(asked.tokens))}

    return router


def _telling(service: Service) -> APIRouter:
    """The endpoints that report the model, its health and its metrics."""
    router = APIRouter()

    @router.get("/v1/models", responses=REFUSALS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{model:path}", responses=REFUSALS)
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return _card(service)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=REFUSALS)
    async def health() -> dict[str, str]:
        if service.scheduler.draining:
            raise Refused(503, "The server is going down.", "shutting_down")
        if why := service.scheduler.sick:
            raise Refused(503, why, "engine_failed")
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
        "policies": registry.policy_names(),
    }
