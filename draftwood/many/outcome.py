"""Results in the form of OpenAI's batch output: one for every line, whatever became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from draftwood.many.lines import BadLine
from draftwood.serve.failure import Refused

Found = dict[str, Any] | Refused | BadLine  # the body of an answer, or why there is none


def outcome(custom_id: str, found: Found) -> dict[str, Any]:
    """A request that was refused has a status and an error in its body; a line that is no request has no response."""
    response, error = None, None
    if isinstance(found, BadLine):
        error = {"code": found.code, "message": str(found)}
    else:
        status, body = (found.status, found.body()) if isinstance(found, Refused) else (200, found)
        response = {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def failed(result: Mapping[str, Any]) -> bool:
    """Whether a result is an error instead of an answer."""
    return result["response"] is None or result["response"]["status_code"] != 200


def written(result: Mapping[str, Any]) -> int:
    """Tokens of an answer; 0 for an error."""
    return 0 if failed(result) else int(result["response"]["body"]["usage"]["completion_tokens"])
