"""What stands before the application: the key, the size of bodies, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.serve.failure import Refused

PAGES: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"])  # what pages of other origins may send
OPEN = ("/health", "/version", "/", "/page")  # need no key: they show nothing of the model
T = TypeVar("T")


class Gone(Exception):
    """The client has closed the connection."""


class Guard:
    """Middleware: checks the key and the size of a request's body before the application gets it."""

    def __init__(self, app: ASGIApp, key: str | None, max_body_bytes: int) -> None:
        self._app, self._gate = app, Gate(key, max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            body = await self._gate.body(scope, receive)
        except Refused as error:
            return await error.response()(scope, receive, send)
        except Gone:
            return None
        await self._app(scope, _replay(body, receive), send)


class Gate:
    """Refuses wrong keys before reading a body, and a large body before reading all of it."""

    def __init__(self, key: str | None, max_body_bytes: int) -> None:
        self._most, self._key = max_body_bytes, None if key is None else key.strip().encode()

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """A request's whole body. Raises Refused, or Gone if the client leaves."""
        self._check_key(scope)
        return await self._read(scope, receive)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"  # if mounted below another application
        if self._key is None or scope["method"] == "OPTIONS" or path in OPEN or path.startswith("/page/"):
            return
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise Refused(401, "Incorrect API key provided.", "invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            raise self._too_large()
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(413, f"The body of the request has more than {self._most} bytes.", "body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever really comes (a disconnection)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises Gone then."""
    return await _race(work, _gone(request.receive))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[Any, Any, T], leaving: Coroutine[Any, Any, None]) -> T:
    tasks: Sequence[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(leaving)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            result: T = tasks[0].result()
            return result
        raise Gone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Events(Response):
    """Server-sent events, written until they end or the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        """`close` is called when nothing more will be written."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(Gone, OSError):
                await _race(self._write(send), _gone(receive))
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
