"""`draftwood serve`: a socket, a model, and signals that end things in order."""

from __future__ import annotations

import asyncio
import socket
import sys
from types import FrameType

import uvicorn

from draftwood.errors import BadInput
from draftwood.llm import LLM
from draftwood.serve.app import build_app
from draftwood.serve.options import Options

BACKLOG = 2048  # connections that wait, as uvicorn's own
SURPLUS_S = 5  # for answers that say that the server is gone
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server(uvicorn.Server):
    """Says that it goes down before it stops listening; what has not ended in time is told so."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.service.scheduler.draining = True  # type: ignore[union-attr]
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self.config.app.state.service  # type: ignore[union-attr]
        ending = asyncio.create_task(asyncio.to_thread(service.scheduler.drain, service.options.drain_s))
        await super().shutdown(sockets)
        await asyncio.to_thread(service.scheduler.drain, 0.0)  # after a second signal nobody waits
        await ending


def bind(options: Options) -> socket.socket:
    """The socket, before a model's loading time is spent. Raises BadInput if it is not to be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((options.host, options.port))
        made.listen(BACKLOG)  # or a second server could take it as well; who comes early waits
    except OSError as error:
        made.close()
        raise BadInput(
            f"{options.host}:{options.port} cannot be listened on ({error.strerror}); name another --host or --port."
        ) from None
    return made


def serve(llm: LLM, options: Options, listening: socket.socket) -> None:
    """Serve until a signal comes. Requests have `drain_s` seconds to end then."""
    app = build_app(llm, options)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=round(options.drain_s) + SURPLUS_S,
        server_header=False,
    )  # fmt: skip
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    scheduler = app.state.service.scheduler
    print(
        f"{app.state.service.name} on http://{host}:{port}: {scheduler.seats} seats of {scheduler.max_len} tokens, "
        f"memory for {scheduler.kv_tokens}",
        file=sys.stderr,
        flush=True,
    )
    if options.host not in LOOPBACK and options.api_key is None:
        print("Everybody who reaches this address may use it: there is no --api-key.", file=sys.stderr, flush=True)
    Server(config).run(sockets=[listening])
