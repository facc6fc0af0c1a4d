"""How a call ends: gRPC's status codes with texts without internal details."""

from __future__ import annotations

import re
from dataclasses import dataclass

import grpc

from inflight.door import shared_memory
from inflight.door.http.refusal import is_deadline, retry_after_s
from inflight.door.versions import without_versions
from inflight.errors import (
    CapacityError,
    EngineError,
    InflightError,
    LimitExceeded,
    NotPermitted,
    RequestError,
    Unauthenticated,
    UnknownModel,
)

Code = grpc.StatusCode
LOST = "the server was lost while it ran the request; send the request again"
FAILED = "the server failed to run the request"

# Texts of the gRPC library about a connection; all others are Triton's, about a request.
_CONNECTION = re.compile(
    r"ipv[46]:|unix:|socket|connect|stream removed|goaway|transport|keepalive|broken pipe"
    r"|cancelling all calls|endpoint",
    re.IGNORECASE,
)
# Of the same library about bytes that are no HTTP/2 or no gRPC.
_PROTOCOL = re.compile(
    r"stream removed|http/?2|rst_stream|hpack|:status|internal error from core", re.IGNORECASE
)
# A path, or the name of a shared-memory region (CVE-2025-23320).
_INTERNAL = re.compile(r"shm_region|/dev/shm|(?<![\w.])/(?:[\w.-]+/)+[\w.-]+|Traceback")


_OF_KEYS = {
    Unauthenticated: Code.UNAUTHENTICATED,
    NotPermitted: Code.PERMISSION_DENIED,
    UnknownModel: Code.NOT_FOUND,
}


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a call, other than OK.

    Attributes:
        text: one sentence: what is wrong, where, what is allowed.
        wait_s: seconds until a limit of the client's key allows its request; 0 without a limit.
    """

    code: grpc.StatusCode
    text: str
    wait_s: int = 0

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Trailing metadata: `retry-after` in seconds, as over HTTP, if the same request may be
        accepted later."""
        is_refusal = self.code is Code.UNAVAILABLE
        seconds = retry_after_s(self.text) if is_refusal else self.wait_s
        return (("retry-after", str(seconds)),) if seconds else ()


class Refused(InflightError):
    """A call that the door refuses."""

    kind = "refused"

    def __init__(self, code: grpc.StatusCode, text: str, wait_s: int = 0) -> None:
        super().__init__(text)
        self.status = Status(code, text, wait_s)


def of(error: Exception) -> Status:
    """The status of an error raised by the door or by the call to Triton."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, LimitExceeded):
        return Status(Code.RESOURCE_EXHAUSTED, str(error), error.retry_after_s)
    for kind, code in _OF_KEYS.items():
        if isinstance(error, kind):
            return Status(code, str(error))
    if isinstance(error, RequestError):
        return Status(Code.INVALID_ARGUMENT, str(error))
    if isinstance(error, CapacityError):
        return Status(Code.UNAVAILABLE, str(error))
    if isinstance(error, grpc.aio.AioRpcError):
        return of_triton(error.code(), error.details() or "")
    if isinstance(error, EngineError):
        return Status(Code.INTERNAL, str(error))
    return Status(Code.INTERNAL, FAILED)


def of_triton(code: grpc.StatusCode, text: str) -> Status:
    """Triton's own status, or that its connection was lost, or that a deadline has passed, for
    which Triton has no code."""
    if is_deadline(text):
        return Status(Code.DEADLINE_EXCEEDED, clean(text))
    if code is Code.UNAVAILABLE and _CONNECTION.search(text):
        return Status(code, LOST)
    if code in (Code.INTERNAL, Code.UNKNOWN, Code.UNAVAILABLE) and _PROTOCOL.search(text):
        return Status(Code.UNAVAILABLE, LOST)
    if code is Code.UNIMPLEMENTED and "decoupled" in text:
        return Status(code, "ModelInfer: the model streams; allowed: ModelStreamInfer")
    return Status(Code.UNAVAILABLE if shared_memory.is_full(text) else code, clean(text))


def clean(text: str) -> str:
    """An error text of Triton or a model, unless it contains a path or a shared-memory region."""
    if shared_memory.is_full(text):
        return shared_memory.FULL
    return FAILED if _INTERNAL.search(text) else without_versions(text)
