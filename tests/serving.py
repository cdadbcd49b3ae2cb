"""A server of a tiny model on a real socket, for tests."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import uvicorn

from draftwood import assemble
from draftwood.latency import Machine
from draftwood.llm import LLM, load
from draftwood.serve.app import build_app
from draftwood.serve.options import Options
from draftwood.serve.run import Server, bind
from draftwood.serve.service import Service
from tests.reference import byte_tokenizer, tiny_model

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Running:
    """A server, and what is inside of it."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread

    def wait_until_idle(self) -> None:
        for _ in range(500):
            if self.service.scheduler.load == (0, 0):
                return
            time.sleep(0.01)
        pytest.fail(f"still busy: {self.service.scheduler.load}")


def write_tiny(folder: Path) -> Path:
    """A random model that writes bytes, on disk; a text ends by itself now and then."""
    model = tiny_model(dtype=torch.float64, vocab_size=257, max_position_embeddings=1024, eos_token_id=256)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def tiny_llm(drafter: str | list[str] = "ngram", dtype: str = "float64") -> LLM:
    """The same in memory."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "probe", lambda *_: Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6))
        return load(str(write_tiny(Path(folder))), drafter, dtype=dtype, device="cpu")


@contextmanager
def serving(llm: LLM, **options: object) -> Iterator[Running]:
    """Served as `tiny` until the block ends."""
    chosen = Options(**{"port": 0, "name": "tiny", **options})  # type: ignore[arg-type]
    listening = bind(chosen)
    app = build_app(llm, chosen)
    server = Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=10))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    host, port = listening.getsockname()[:2]
    running = Running(f"http://{host}:{port}", app.state.service, server, thread)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
