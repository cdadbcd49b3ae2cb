"""The door of a deployment on Ray Serve: it names a request's conversation, and relays what a replica sends."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from draftwood.serve.failure import Refused
from draftwood.serve.guard import PAGES, Gate, Gone
from draftwood.serve.metrics import together
from draftwood.serve.options import Options

SESSION = "x-session-id"  # a header of requests
BEGINNING = 1024  # characters of a prompt that identify its conversation
METRICS_S = 10.0  # that replicas get to send theirs
ATTEMPTS = 4  # replicas that a request may go to, as one after another dies
DIED = Refused(503, "No replica could finish this answer; send the request again.", "replica_died", retry_s=1)
SCOPE = ("type", "method", "path", "root_path", "query_string", "headers")  # what the application reads of a request


class Door:
    """Takes requests in, names their conversation, and hands on what a replica answers."""

    def __init__(self, replicas: DeploymentHandle, options: Options) -> None:
        self._replicas, self._gate = replicas, Gate(options.api_key, options.max_body_bytes)
        self._cors = options.cors

    async def __call__(self, request: Request) -> Response:
        answer = await self._answer(request)
        return answer if isinstance(answer, Relay) or not self._cors else Readable(answer, self._cors)

    async def _answer(self, request: Request) -> Response:
        try:  # a body that is too large is neither read to its end nor sent to a replica
            body = await self._gate.body(request.scope, request.receive)
        except Refused as why:
            return why.response()
        except Gone:
            return Response(status_code=499)
        scope = {key: request.scope[key] for key in SCOPE}
        if scope["path"].removeprefix(scope["root_path"]) == "/metrics" and (told := await self._metrics(scope)):
            return told
        handle = self._replicas.options(method_name="answer", stream=True, session_id=conversation(request, body))
        for _ in range(ATTEMPTS):
            messages: Any = handle.remote(scope, body)
            try:
                return Relay(await anext(messages), messages)
            except BackPressureError:
                return Refused(429, "The queue is full; try again later.", "queue_full", retry_s=1).response()
            except DeploymentUnavailableError:
                break
            except RayError:
                continue  # nothing was sent to the client yet, so another replica may begin again
            except asyncio.CancelledError:
                messages.cancel()
                raise
        return DIED.response()

    async def _metrics(self, scope: dict[str, Any]) -> Response | None:
        """The metrics of all replicas; None if they refuse to give them."""
        asked = self._replicas.broadcast("metrics", scope)
        try:
            told = await asked.results_async(timeout_s=METRICS_S, return_exceptions=True)
        except (RayError, DeploymentUnavailableError, TimeoutError):
            return DIED.response()
        texts: dict[str, str] = dict(each for each in told if isinstance(each, tuple))
        return Response(together(texts), media_type=CONTENT_TYPE_LATEST) if texts else None


class Readable(Response):
    """The door's own answer, for pages of these origins too. A replica's answers have the headers already."""

    def __init__(self, answer: Response, origins: Sequence[str]) -> None:
        super().__init__(status_code=answer.status_code)
        self._app = CORSMiddleware(answer, origins, **PAGES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Relay(Response):
    """What a replica sends, as it comes. A stream whose replica dies ends with an error that says so."""

    def __init__(self, start: Message, rest: Any) -> None:
        super().__init__()
        self._start, self._rest = start, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(self._start)
            async for message in self._rest:
                await send(message)
        except RayError:
            if not self._streams:
                raise
            event = f"data: {json.dumps(DIED.body())}\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})
        finally:
            self._rest.cancel()

    @property
    def _streams(self) -> bool:
        return dict(self._start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")


def conversation(request: Request, body: bytes) -> str:
    """The session that a client names (`x-session-id`, `prompt_cache_key`), else how its conversation begins.

    All turns of a chat begin alike. Empty if there is nothing to go by: then any replica will do.
    """
    if named := request.headers.get(SESSION):
        return _hashed(named)
    try:
        asked = json.loads(body)
        return _hashed(asked["prompt_cache_key"]) if asked.get("prompt_cache_key") else _hashed(_beginning(asked))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _beginning(asked: Mapping[str, Any]) -> Any:
    """All up to the user's first message, or the first characters of a prompt."""
    if "messages" not in asked:
        return asked["prompt"][:BEGINNING]
    roles = [message["role"] for message in asked["messages"]]
    return asked["messages"][: 1 + roles.index("user")]


def _hashed(name: Any) -> str:
    """A hash, since Ray logs the names of sessions and prompts must stay out of logs."""
    return hashlib.sha256(json.dumps(name, sort_keys=True).encode()).hexdigest()[:32]
