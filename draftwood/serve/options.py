"""The options of `draftwood serve`: where it listens, who may use it, and what one request may take."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from draftwood.errors import BadInput

DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of the command that do not name models. Sizes are in tokens unless said otherwise."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None  # of the model, as clients see it; None: the target's own
    max_concurrency: int = 16  # requests that are answered at the same time
    max_waiting: int = 256  # requests in the queue; the next one is sent away with 429
    max_model_len: int | None = None  # prompt and answer together; None: the target's window
    kv_tokens: int | None = None  # of cache for all requests and known prefixes together; None: by memory
    prefix_tokens: int | None = None  # part of `kv_tokens` for known prefixes; None: half; 0: none are kept
    deadline_s: float = 600.0  # seconds from arrival to the last token
    drain_s: float = 30.0  # seconds that requests get to finish after SIGTERM
    default_max_tokens: int = DEFAULT_MAX_TOKENS  # of chats that set no limit; memory they reserve cannot serve others
    max_body_bytes: int = 4 << 20
    max_n: int = 16
    max_stops: int = 16
    max_stop_chars: int = 256
    max_schema_bytes: int = 64 << 10
    max_top_logprobs: int = 20
    cors: tuple[str, ...] = ()  # origins of pages that may call the server from a browser
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_concurrency", 1), ("max_waiting", 0), ("default_max_tokens", 1)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"{flag} is {getattr(self, name)}; it must be {least} or more.")
        if not 0 <= self.port < 65536:
            raise BadInput(f"--port is {self.port}; a port is a number below 65536 (0: any that is free).")
        for name in ("max_model_len", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise BadInput(f"--{name.replace('_', '-')} is {value}; it must be 2 or more.")
        if self.prefix_tokens is not None and self.prefix_tokens < 0:
            raise BadInput(f"--prefix-tokens is {self.prefix_tokens}; it must be 0 (keep nothing) or more.")
        if not (self.deadline_s > 0 and 0 <= self.drain_s < inf):
            raise BadInput("--deadline must be above 0 seconds, and --drain a number of them that is 0 or more.")
        if self.api_key is not None and not self.api_key.strip():
            raise BadInput("--api-key is empty; give a key, or leave the flag out to let everybody in.")
