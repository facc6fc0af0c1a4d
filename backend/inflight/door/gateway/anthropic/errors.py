"""Errors in Anthropic's form."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from inflight.door.gateway.problem import CONTEXT_LENGTH, Problem

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Clients look for this text to shorten a conversation.
_TOO_LONG = "prompt is too long: "


def body_of(problem: Problem) -> bytes:
    """JSON."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    is_too_long = problem.code == CONTEXT_LENGTH
    error = {
        "type": _KINDS.get(problem.status, other),
        "message": f"{_TOO_LONG if is_too_long else ''}{problem.message}",
    }
    return msgspec.json.encode({"type": "error", "error": error})


def event_of(problem: Problem) -> bytes:
    """The last event of a stream."""
    return b"event: error\ndata: " + body_of(problem) + b"\n\n"


def respond(problem: Problem) -> Response:
    return Response(body_of(problem), problem.status, problem.headers, "application/json")
