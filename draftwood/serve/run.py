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

BACKLOG = 2048  # connections that may wait, as in uvicorn
SURPLUS_S = 5  # for the answers that say that the server is going down
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server(uvicorn.Server):
    """Reports that it is going down before it stops listening; requests that do not end in time get an error."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.service.scheduler.draining = True  # type: ignore[union-attr]
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self.config.app.state.service  # type: ignore[union-attr]
        ending = asyncio.create_task(asyncio.to_thread(service.scheduler.drain, service.options.drain_s))
        await super().shutdown(sockets)
        await asyncio.to_thread(service.scheduler.drain, 0.0)  # after a second signal nothing waits
        await ending


def bind(options: Options) -> socket.socket:
    """The socket, opened before time is spent on loading a model. Raises BadInput if the address cannot be used."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((options.host, options.port))
        made.listen(BACKLOG)  # or a second server could take it as well; early clients wait
    except OSError as error:
        made.close()
        raise BadInput(
            f"{options.host}:{options.port} cannot be listened on ({error.strerror}); name another --host or --port."
        ) from None
    return made


def serve(llm: LLM, options: Options, listening: socket.socket) -> None:
    """Serve until a signal comes. Requests then get `drain_s` seconds to end."""
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
