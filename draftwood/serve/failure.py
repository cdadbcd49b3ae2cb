"""Mistakes in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` with the status that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from draftwood.errors import DraftwoodError

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error


class Refused(Exception):
    """The error that a client gets instead of an answer."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_s = status, code, param, retry_s

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = str(self).encode(errors="replace").decode()  # what was quoted may be half a surrogate pair
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        return JSONResponse(self.body(), self.status, headers)


def install(app: FastAPI) -> None:
    """Answer every kind of failure in OpenAI's form."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return error.response()

    @app.exception_handler(DraftwoodError)
    async def mistake(_: Request, error: DraftwoodError) -> JSONResponse:
        return Refused(400, str(error)).response()

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        # A field that may have several forms has an error for each: the form that was read furthest was meant.
        first = max((e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]), key=lambda e: len(e["loc"]))
        return invalid(first, first["loc"][1:]).response()  # the first part is "body"

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        response = Refused(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return Refused(500, "The server made a mistake; its log says more.", "internal_error").response()


def invalid(first: Mapping[str, Any], place: Sequence[int | str]) -> Refused:
    """The first error that pydantic finds, at `place` in the body; in OpenAI's words where it has some."""
    param = ".".join(str(part) for part in place if not _is_type(part)) or None
    if first["type"] == "extra_forbidden":
        return Refused(400, f"Unrecognized request argument supplied: {param}", "unknown_parameter", param)
    if first["type"] == "json_invalid":
        return Refused(400, "The body of the request is not valid JSON.", "invalid_json")
    if first["type"] == "model_attributes_type" and param is None:
        return Refused(400, "The body must be a JSON object, sent as application/json.", "invalid_json")
    if first["type"] == "missing":
        message = f"You must provide a {param} parameter." if param else "The request has no body."
        return Refused(400, message, "missing_required_parameter", param)
    reason = first["msg"].removeprefix("Value error, ")
    return Refused(400, f"Invalid value for '{param}': {reason}" if param else f"{reason}.", "invalid_value", param)


def _is_type(part: int | str) -> bool:
    """Whether this is pydantic's name for a member of a union, which means nothing to a client."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or not part.islower())


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be served as it is.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        413: "The body of the request is too large.",
        429: "The queue is full; Retry-After says when to come back.",
        500: "The server made a mistake.",
        503: "The server is going down.",
        504: "The request's deadline passed.",
    }.items()
}
