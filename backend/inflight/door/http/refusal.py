"""Error responses: the door's own refusals, and Triton's errors under the right status."""

from __future__ import annotations

import re

import msgspec

from inflight.door import shared_memory
from inflight.door.versions import without_versions
from inflight.errors import (
    CapacityError,
    InflightError,
    LimitExceeded,
    NotPermitted,
    Unauthenticated,
    UnknownModel,
)

# Of a request that may be repeated as it is, in seconds, unless the error says when.
RETRY_AFTER_S = 1
_RETRY_IN = re.compile(r"\bretry in (\d{1,4}) s\b")
# Of a `DeadlineError`, in whatever status Triton sends it.
_DEADLINE = re.compile(r"\bdeadline_ms: the request was not complete \d+ ms after its arrival\b")

# Texts of this backend and of Triton 2.51 for "not now". Over /generate, Triton gives each error of
# a model the status 400.
_UNAVAILABLE = re.compile(
    r"retry (?:it|later|in a moment|in \d+ s)|safe to retry|to another server|no available versions"
    r"|is not ready|maximum queue size|not healthy|[Ss]tub process|the engine (?:exited|did not)"
)
_NOT_FOUND = re.compile(r"unknown model|is not found")
# Of an internal error although the request is at fault.
_AT_FAULT = re.compile(
    r"[Pp]arse|JSON|unexpected|expected|data-type|shape|invalid|[Uu]nable to|must (?:be|have)"
    r"|[Mm]issing|not (?:supported|allowed)|unknown|already exists|[Dd]uplicate|should"
)
_DECOUPLED = "decoupled transaction policy"
# Paths, addresses, names of shared memory and places in sources: of no use to a client.
_INTERNAL = re.compile(r"(?:/[\w.+-]+){2,}|0x[0-9a-fA-F]{4,}|\w*shm\w*|\w+\.(?:py|cc|h):?\d*")


class Refusal(Exception):
    """The answer to a request that is not passed on, or that Triton refused.

    Args:
        text: one sentence: the field, what is wrong and what is allowed.
        status: of HTTP.
        headers: further ones of the response.
    """

    def __init__(self, text: str, status: int = 400, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}
        if status == 503:
            self.headers["Retry-After"] = str(retry_after_s(text))

    @property
    def body(self) -> bytes:
        """In the form of Triton's errors."""
        return msgspec.json.encode({"error": str(self)})


def retry_after_s(text: str) -> int:
    """Seconds after which a request may be repeated that an error with this text refuses."""
    found = _RETRY_IN.search(text)
    return RETRY_AFTER_S if found is None else int(found[1])


def is_deadline(text: str) -> bool:
    """Whether it is the error of a request whose own deadline has passed."""
    return _DEADLINE.search(text) is not None


def unavailable(reason: str) -> Refusal:
    return Refusal(reason or "the server is not ready; retry later", 503)


def of_error(error: InflightError) -> Refusal:
    """The refusal of a request that its key does not allow."""
    text = str(error)
    if isinstance(error, Unauthenticated):
        return Refusal(text, 401, {"WWW-Authenticate": 'Bearer realm="inflight"'})
    if isinstance(error, NotPermitted):
        return Refusal(text, 403)
    if isinstance(error, UnknownModel):
        return Refusal(text, 404)
    if isinstance(error, LimitExceeded):
        return Refusal(text, 429, {"Retry-After": str(error.retry_after_s)})
    if isinstance(error, CapacityError):
        return unavailable(text)
    return Refusal("the server failed to process the request", 500)


def from_triton(status: int, body: bytes) -> Refusal:
    """The refusal that a response of Triton with an error stands for.

    Args:
        body: JSON, plain text, or the first server-sent event.
    """
    text = _error_text(body)
    if shared_memory.is_full(text):
        return Refusal(shared_memory.FULL, 503)
    text = _INTERNAL.sub("[...]", without_versions(text))
    if status == 404:  # of a model that is not loaded, although its name is known
        return Refusal(text, 404)
    if is_deadline(text):
        return Refusal(text, 504)
    if _UNAVAILABLE.search(text):
        return Refusal(text, 503)
    if status == 500 and _AT_FAULT.search(text):
        return Refusal(text, 404 if _NOT_FOUND.search(text) else 400)
    if status == 501 and _DECOUPLED in text:
        return Refusal("infer: the model streams; use generate, generate_stream or gRPC", 501)
    if 200 <= status < 400:  # an error that came after Triton had written the status
        status = 400
    return Refusal(text, status)


def _error_text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body.removeprefix(b"data: "))["error"])
    except (msgspec.DecodeError, TypeError, KeyError):
        return "the server failed to process the request"
