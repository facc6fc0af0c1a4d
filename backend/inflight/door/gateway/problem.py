"""Error responses of the gateway, in no wire format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from inflight.door.http.refusal import RETRY_AFTER_S, Refusal, from_triton
from inflight.errors import RequestError

TOO_DEEP = "body: is nested too deeply"

CONTEXT_LENGTH = "context_length_exceeded"
MODEL_NOT_FOUND = "model_not_found"
DEADLINE_EXCEEDED = "deadline_exceeded"

# Triton's, of an error of a step.
_ENSEMBLE = re.compile(r"^in ensemble '[^']*', ")
# "This model's maximum context length is N tokens. However, ...": clients look for this text.
_CONTEXT = re.compile(r"^(?:(\w+): )?(This model's maximum context length)")
# Of an error of Triton's models: the tensor at fault, perhaps with the place in it.
_PARAM = re.compile(r"^(\w+)((?:\[\d+\]|\.\w+)*): ")
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    499: "client_closed_request",
    500: "internal_error",
    501: "not_supported",
    503: "server_overloaded",
    504: "timeout",
}
# Statuses that clients' libraries retry although the same request fails again, or in vain: with
# another attempt, a deadline would begin anew.
_FINAL = frozenset({501})
_FINAL_CODES = frozenset({DEADLINE_EXCEEDED})
_RETRIED = frozenset({408, 409, 429})


class Problem(Exception):
    """The response to a request that fails.

    Args:
        message: one sentence: the field, what is wrong and what is allowed.
        status: of HTTP.
        param: the field of the request at fault.
        code: a stable name; None for that of the status.
        headers: further ones of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status, "error")
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
        if not self.can_retry:
            self.headers["x-should-retry"] = "false"

    @property
    def can_retry(self) -> bool:
        """Whether the same request may succeed later."""
        if self.status in _FINAL or self.code in _FINAL_CODES:
            return False
        return self.status >= 500 or self.status in _RETRIED


def of_refusal(refusal: Refusal) -> Problem:
    return Problem(str(refusal), refusal.status, headers=refusal.headers)


def of_request(error: RequestError) -> Problem:
    """A field that is not allowed."""
    return Problem(str(error), param=error.param)


def of_triton(status: int, body: bytes, fields: Mapping[str, str]) -> Problem:
    """An error of Triton.

    Args:
        body: JSON, or a server-sent event with it.
        fields: the client's name of each tensor.
    """
    refusal = from_triton(status, body)
    text = _ENSEMBLE.sub("", str(refusal))
    context = _CONTEXT.search(text)
    if context is not None:
        param = fields.get(context[1] or "")
        return Problem(text[context.start(2) :], param=param, code=CONTEXT_LENGTH)
    if refusal.status == 504:
        return Problem(text, 504, param="deadline_ms", code=DEADLINE_EXCEEDED)
    found = _PARAM.match(text)
    if found is None or refusal.status != 400:
        return Problem(text, refusal.status, headers=refusal.headers)
    tensor, place = found.groups()
    name = fields.get(tensor, tensor)
    message = f"{name}{place}: {text[found.end() :]}"
    return Problem(message, refusal.status, param=name + place, headers=refusal.headers)
