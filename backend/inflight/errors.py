"""Every error that inflight raises on purpose, in one tree.

    InflightError
    ├── ConfigError      an unsupported setting, checkpoint or installation: refused at load
    ├── RequestError     the request is not allowed: its sender has to change it
    ├── QuarantinedError it crashed the engine before: refused for a while
    ├── CapacityError    allowed, but not now: retry later
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


class EngineError(InflightError):
    kind = "engine"


_BY_KIND: dict[str, type[InflightError]] = {
    cls.kind: cls
    for cls in (ConfigError, RequestError, QuarantinedError, CapacityError, EngineError)
}


KINDS = frozenset(_BY_KIND)


def from_kind(kind: str, message: str) -> InflightError:
    """Rebuild an error that crossed a process border as (kind, message)."""
    return _BY_KIND.get(kind, EngineError)(message)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'top_p'?"`, or nothing when no allowed name is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
