"""Lines of JSON between the doors and the accountant."""

from __future__ import annotations

import msgspec

from inflight.access.key import KeyLimits


class Begin(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An account begins a request. The accountant replies with a Verdict, in order."""

    account: str
    limits: KeyLimits


class End(msgspec.Struct, frozen=True, tag=True):
    """A request that was allowed has ended. No reply."""

    account: str


class ReadMetrics(msgspec.Struct, frozen=True, tag=True):
    """Request of a door for the metrics by tenant. The reply is a Metrics, in order."""


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """Attributes:
    text: in Prometheus's text format.
    """

    text: str


class Verdict(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Whether the request may run.

    Attributes:
        limit: the limit that it exceeds; empty if it may run.
        value: of the limit.
        retry_after_s: seconds.
    """

    limit: str = ""
    value: int = 0
    retry_after_s: int = 0


def to_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
