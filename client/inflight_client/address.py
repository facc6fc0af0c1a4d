"""Where the server is and how long it may take: what a client is made with."""

from __future__ import annotations

import re

from inflight_client.errors import InvalidRequest

DEFAULT_URL = "127.0.0.1:8001"
WANTED = f"gRPC's host:port, by default {DEFAULT_URL}"

# What has no port, or a scheme, is for gRPC a name to look up, and its errors do not say so.
_ADDRESS = re.compile(
    r"(?:(?:grpc|http)://)?((?:\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5}))/?", re.IGNORECASE
)
_MAX_PORT = 65535
# Thirty years; gRPC's deadline overflows somewhere above, and has passed at once.
_MAX_TIMEOUT_S = 1e9


def checked_url(url: str) -> str:
    """The host:port of `url`; `grpc://` or `http://` in front of it is left out.

    Raises:
        InvalidRequest: it is something else.
    """
    found = _ADDRESS.fullmatch(url) if isinstance(url, str) else None
    if found is None or not 1 <= int(found[2]) <= _MAX_PORT:
        raise InvalidRequest(
            f"url: {url!r} is not host:port; allowed: {WANTED}, with a port from 1 to {_MAX_PORT} "
            "and an IPv6 address in brackets"
        )
    return found[1]


def checked_timeout(timeout: float | None) -> float | None:
    """`timeout`, in seconds.

    Raises:
        InvalidRequest: it is not above 0, or too long to count.
    """
    if timeout is not None and not (
        isinstance(timeout, int | float) and 0 < timeout <= _MAX_TIMEOUT_S
    ):
        raise InvalidRequest(
            f"timeout: {timeout!r} is not a number of seconds; allowed: above 0, to "
            f"{_MAX_TIMEOUT_S:.0f}; leave it out for no limit"
        )
    return timeout
