"""From a line of the input to a request: OpenAI's batch format, messages, or a bare prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from draftwood.serve.failure import Refused, invalid
from draftwood.serve.options import DEFAULT_MAX_TOKENS
from draftwood.serve.protocol import ChatRequest, CompletionRequest

Asked = ChatRequest | CompletionRequest
URLS: dict[str, type[Asked]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
KEYS = {"custom_id", "method", "url", "body"}
MAX_NEW_TOKENS = 256  # of a bare prompt, as on the command line


class BadLine(Exception):
    """A line that is not a request. The code is OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Fill:
    """What a line leaves open. None: the API's default in batch format, the command line's in any other."""

    models: tuple[str, ...]  # what the model is called; the first is filled in
    max_new_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    raw: bool = False  # prompts are continued without chat template

    def complete(self, body: Mapping[str, Any], name: str, bare: bool) -> dict[str, Any]:
        """The body with nothing left open. Each line has a seed of its own, the same in every run."""
        tokens = MAX_NEW_TOKENS if bare and self.max_new_tokens is None else self.max_new_tokens
        if tokens is None and "messages" in body:  # if left open, free memory would decide
            tokens = DEFAULT_MAX_TOKENS
        temperature = 0.0 if bare and self.temperature is None else self.temperature
        found: dict[str, Any] = {"model": self.models[0], "seed": _seed(self.seed, name)}
        if temperature is not None:
            found["temperature"] = temperature
        body = _told(body)
        if tokens is not None and "max_completion_tokens" not in body:
            found["max_tokens"] = tokens
        return {**found, **body}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input: a request, or why it is none."""

    number: int  # from 1
    text: str
    custom_id: str
    asked: Asked | BadLine | Refused

    @property
    def valid(self) -> bool:
        return isinstance(self.asked, ChatRequest | CompletionRequest)


def parse(number: int, text: str, fill: Fill) -> Line:
    """Never raises: a line that cannot be used says why. One without a custom_id is named by its number."""
    name = f"line-{number}"
    try:
        record = _record(text)
        name = _name(record, name)
        _refuse_bytes(record)
        return Line(number, text, name, _asked(record, name, fill))
    except (BadLine, Refused) as why:
        return Line(number, text, name, why)


def _record(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadLine("invalid_json_line", "The line is not valid JSON.") from None
    if not isinstance(found, dict):
        raise BadLine("invalid_json_line", "The line is not a JSON object.")
    return _told(found)


def _refuse_bytes(record: Mapping[str, Any]) -> None:
    """Refuse bytes of another encoding, and escapes of half a character."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeError:
        raise Refused(400, "The line is not valid UTF-8 text; convert the file.", "invalid_value") from None


def _told(found: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which tables have where a value is left open."""
    return {key: value for key, value in found.items() if value is not None}


def _name(record: Mapping[str, Any], default: str) -> str:
    name = record.get("custom_id", default)
    if not isinstance(name, str) or not name:
        raise BadLine("invalid_custom_id", "custom_id must be a text that is not empty.")
    return name


def _asked(record: Mapping[str, Any], name: str, fill: Fill) -> Asked:
    if record.keys() & (KEYS - {"custom_id"}):
        kind, body = _batched(record)
        return _checked(kind, fill.complete(body, name, bare=False), fill)
    body = {key: value for key, value in record.items() if key != "custom_id"}
    kind = ChatRequest if "messages" in body else CompletionRequest
    if kind is CompletionRequest and "prompt" not in body:
        raise BadLine("missing_required_parameter", "The line has none of body, messages and prompt.")
    several = kind is CompletionRequest and isinstance(body["prompt"], list)
    # A list of token ids is allowed: its sender has applied the template, and none applies to it here.
    if several and not fill.raw and any(isinstance(one, str) for one in body["prompt"]):
        message = "prompt is a list, which no chat template takes; give one prompt a line, or --raw to continue them."
        raise Refused(400, message, "invalid_value", "prompt")
    if kind is CompletionRequest and not fill.raw and isinstance(body["prompt"], str):
        kind, body = ChatRequest, {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
        del body["prompt"]
    return _checked(kind, fill.complete(body, name, bare=True), fill)


def _batched(record: Mapping[str, Any]) -> tuple[type[Asked], Mapping[str, Any]]:
    """Endpoint and body of a line in batch format."""
    if unknown := record.keys() - KEYS:
        raise BadLine("unknown_parameter", f"The line has an unknown field: {min(unknown)}.")
    if record.get("method", "POST") != "POST":
        raise BadLine("invalid_method", "method must be POST.")
    if record.get("url") not in tuple(URLS):  # it may be of any type
        raise BadLine("invalid_url", f"url must be one of {', '.join(URLS)}.")
    if not isinstance(record.get("body"), dict):
        raise BadLine("missing_required_parameter", "The line has no body.")
    return URLS[record["url"]], record["body"]


def _checked(kind: type[Asked], body: Mapping[str, Any], fill: Fill) -> Asked:
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(first, first["loc"]) from None
    if asked.model not in fill.models:
        message = f"The model {asked.model!r} does not exist; this run's model is called {fill.models[0]!r}"
        raise Refused(404, f"{message} (--served-model-name changes that).", "model_not_found", "model")
    if asked.stream:
        raise Refused(400, "A batch is not streamed; leave stream out.", "invalid_value", "stream")
    return asked


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 2  # 62 bits
