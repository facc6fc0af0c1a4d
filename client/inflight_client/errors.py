"""Every error that a client raises, in one tree.

    ClientError
    ├── InvalidRequest     rejected by the server or the client: correct the request
    ├── Unavailable        the server cannot accept it now: retry later
    ├── Cancelled          cancelled by the client or the server
    ├── TimedOut           the caller's timeout has expired, or the request's deadline_ms
    ├── ServerError        the server failed; the request is not at fault
    └── ConnectionFailed   no server, or the connection was lost

gRPC's status codes and Triton's messages are mapped to them only here.
"""

from __future__ import annotations

import re

import grpc


class ClientError(Exception):
    """Base of all of them."""


class InvalidRequest(ClientError):
    pass


class Unavailable(ClientError):
    """Attributes:
    retry_after: seconds after which the server allows another attempt; None if it gave none.
    """

    retry_after: float | None = None


class Cancelled(ClientError):
    pass


class TimedOut(ClientError):
    pass


class ServerError(ClientError):
    pass


class ConnectionFailed(ClientError):
    pass


BY_CODE: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.OK: ServerError,  # not expected with an error
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNKNOWN: ServerError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.PERMISSION_DENIED: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unavailable,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.ABORTED: ServerError,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DATA_LOSS: ServerError,
}

# gRPC reports a lost connection as UNAVAILABLE too, with these messages.
_TRANSPORT = re.compile(
    r"failed to connect|socket closed|connection (?:reset|refused|closed|timed out)|broken pipe"
    r"|stream removed|goaway|endpoint closing|transport closed|dns resolution|recvmsg"
    r"|name resolution|keepalive|channel closed|failed parsing http/2",
    re.IGNORECASE,
)

# Of a tritonserver whose operator has closed a method, as UNAVAILABLE.
_RESTRICTED = "This protocol is restricted"

# When to try again, as a server reports it: seconds, milliseconds (gRFC A6), or in the text.
_RETRY_AFTER = "retry-after"
_PUSHBACK = "grpc-retry-pushback-ms"
_RETRY_IN = re.compile(r"\bretry in (\d+(?:\.\d+)?) s\b")

# Of a request whose `deadline_ms` passed on the server; Triton itself has no code for it.
_DEADLINE = re.compile(r"\bdeadline_ms: the request was not complete\b")

# Triton sends some errors as messages in a successful stream, without a code.
_MESSAGES: tuple[tuple[re.Pattern[str], type[ClientError]], ...] = (
    (
        re.compile(r"no available versions|[Ss]erver is stopping|not ready|[Uu]navailable"),
        Unavailable,
    ),
    (
        re.compile(r"unknown model|unexpected (?:inference )?(?:input|shape|datatype)"),
        InvalidRequest,
    ),
    (re.compile(r"expected \d+ inputs|missing|must have|expects"), InvalidRequest),
    (re.compile(r"[Cc]ancell?ed"), Cancelled),
)


def from_rpc(error: grpc.RpcError, hint: str = "", timeout: float | None = None) -> ClientError:
    """Convert a failed call to a ClientError.

    Args:
        error: gRPC's.
        hint: what to check if the connection failed.
        timeout: seconds, as set by the caller.
    """
    hint = hint and f" ({hint})"
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ConnectionFailed(f"{error}{hint}")
    code = error.code()
    details = error.details() or code.name
    if code is grpc.StatusCode.UNAVAILABLE and _TRANSPORT.search(details):
        return ConnectionFailed(f"{details}{hint}")
    if _DEADLINE.search(details):
        return TimedOut(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
        return TimedOut(f"no complete response within the timeout of {timeout:g} s")
    if code is grpc.StatusCode.UNAVAILABLE and _RESTRICTED in details:
        return InvalidRequest("the method is closed on this server")
    mapped = BY_CODE.get(code, ServerError)(details)
    if isinstance(mapped, Unavailable):
        mapped.retry_after = _retry_after(error, details)
    return mapped


def from_message(message: str) -> ClientError:
    """Convert an error message in a stream to a ClientError."""
    if _DEADLINE.search(message):
        return TimedOut(message)
    if (found := _RETRY_IN.search(message)) is not None:
        refusal = Unavailable(message)
        refusal.retry_after = float(found[1])
        return refusal
    for pattern, kind in _MESSAGES:
        if pattern.search(message):
            return kind(message)
    return ServerError(message)


def _retry_after(error: grpc.Call | grpc.aio.AioRpcError, details: str) -> float | None:
    metadata = dict(error.trailing_metadata() or ())
    for name, scale in ((_RETRY_AFTER, 1.0), (_PUSHBACK, 0.001)):
        try:
            seconds = float(metadata[name]) * scale
        except (KeyError, ValueError):  # or a date, which HTTP allows
            continue
        if seconds >= 0:
            return seconds
    found = _RETRY_IN.search(details)
    return float(found[1]) if found else None
