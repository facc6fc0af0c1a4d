"""Errors in OpenAI's form."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from inflight.door.gateway.problem import Problem

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_WELL_KNOWN = "invalid_request_error"


def body_of(problem: Problem) -> bytes:
    """JSON."""
    kind = _KINDS.get(problem.status, _WELL_KNOWN if problem.status < 500 else "server_error")
    error = {
        "message": problem.message,
        "type": kind,
        "param": problem.param,
        "code": problem.code,
    }
    return msgspec.json.encode({"error": error})


def event_of(problem: Problem) -> bytes:
    """The last event of a stream."""
    return b"data: " + body_of(problem) + b"\n\n"


def respond(problem: Problem) -> Response:
    return Response(body_of(problem), problem.status, problem.headers, "application/json")
