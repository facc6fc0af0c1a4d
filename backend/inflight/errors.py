"""Every error that inflight raises on purpose, in one tree.

    InflightError
    ├── ConfigError      a setting, checkpoint or installation that cannot work: refused at load
    ├── RequestError     what a client asked for is not allowed: its sender's to mend
    ├── CapacityError    allowed, but not now: retry later
    └── EngineError      the engine failed: nobody's request was at fault

Each carries one sentence that says what is wrong, where, what is allowed and what to do.
The border of a protocol (Triton's tensors, the engine's frames) maps `kind` and nothing else.
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
    """A request that can never be served as it is.

    Args:
        message: what is wrong and what is allowed.
        param: the tensor or field at fault; it leads the message.
    """

    kind = "invalid"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param


class CapacityError(InflightError):
    kind = "capacity"


class EngineError(InflightError):
    kind = "engine"


_BY_KIND: dict[str, type[InflightError]] = {
    cls.kind: cls for cls in (ConfigError, RequestError, CapacityError, EngineError)
}


KINDS = frozenset(_BY_KIND)


def from_kind(kind: str, message: str) -> InflightError:
    """The error that crossed a process border as (kind, message)."""
    return _BY_KIND.get(kind, EngineError)(message)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'top_p'?"`, or nothing when no allowed name is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
