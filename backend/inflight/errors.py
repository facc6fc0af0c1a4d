"""Every error that inflight raises on purpose, in one tree.

    InflightError
    ├── ConfigError      an unsupported setting, checkpoint or installation: refused at load
    ├── RequestError     the request is not allowed: its sender has to change it
    ├── QuarantinedError it crashed the engine before: refused for a while
    ├── CapacityError    allowed, but not now: retry later
    │   └── LimitExceeded    a limit of the API key
    ├── DeadlineError    the request's own deadline has passed
    ├── Unauthenticated  no valid API key
    ├── NotPermitted     the key's role does not suffice
    ├── UnknownModel     a model that the key does not allow, or a version that is not loaded
    └── EngineError      the engine failed: no request is at fault

Each message is one sentence: what is wrong, where, what is allowed and what to do.
Protocol borders (Triton's tensors, the engine's frames) map `kind` and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class InflightError(Exception):
    """Base of all of them; `kind` is the stable name used on the wire."""

    kind: ClassVar[str] = "internal"


class ConfigError(InflightError):
    kind = "config"


class RequestError(InflightError):
    """A request that can never be served as sent.

    Args:
        message: what is wrong and what is allowed.
        param: the tensor or field at fault; it leads the message.
    """

    kind = "invalid"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param


class QuarantinedError(InflightError):
    kind = "quarantined"


class CapacityError(InflightError):
    kind = "capacity"


class DeadlineError(InflightError):
    """The time that a request has by itself is over: 504, DEADLINE_EXCEEDED.

    Doors recognise the text: Triton has no such code.
    """

    kind = "deadline"


class EngineError(InflightError):
    kind = "engine"


# Refusals of a door that checks API keys; they do not cross a process border.


class Unauthenticated(InflightError):
    """No valid key: 401, UNAUTHENTICATED. The text does not distinguish an unknown key from an
    expired one; the audit log does.

    Args:
        reason: for the audit log.
    """

    kind = "unauthenticated"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "Authorization: no valid API key; allowed: `Bearer KEY`, or `X-Api-Key: KEY`, once"
        )
        self.reason = reason


class NotPermitted(InflightError):
    """The key's role does not suffice: 403, PERMISSION_DENIED."""

    kind = "not_permitted"


class UnknownModel(InflightError):
    """A model that the key does not allow, whether or not it exists, or a version of one that is
    not loaded: 404, NOT_FOUND."""

    kind = "unknown_model"


class LimitExceeded(CapacityError):
    """A limit of the key: 429 with Retry-After, RESOURCE_EXHAUSTED.

    Args:
        limit: its name in the keys file.
        value: what it allows.
        retry_after_s: seconds, at least 1.
    """

    kind = "limit"

    def __init__(self, limit: str, value: int, retry_after_s: int) -> None:
        super().__init__(
            f"{limit}: the key has reached its limit of {value}; retry in {retry_after_s} s"
        )
        self.limit = limit
        self.retry_after_s = retry_after_s


_BY_KIND: dict[str, type[InflightError]] = {
    cls.kind: cls
    for cls in (
        *(ConfigError, RequestError, QuarantinedError),
        *(CapacityError, DeadlineError, EngineError),
    )
}


KINDS = frozenset(_BY_KIND)


def from_kind(kind: str, message: str) -> InflightError:
    """Rebuild an error that crossed a process border as (kind, message)."""
    return _BY_KIND.get(kind, EngineError)(message)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'top_p'?"`, or nothing when no allowed name is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
