"""Validation of the server's address and the timeout."""

from __future__ import annotations

import re

from inflight_client.errors import InvalidRequest

DEFAULT_URL = "127.0.0.1:8001"
WANTED = f"gRPC's host:port, by default {DEFAULT_URL}"

# gRPC treats an address without a port, or with a scheme, as a name to resolve, without saying so
# in its errors.
_ADDRESS = re.compile(
    r"(?:(?:grpc|http)://)?((?:\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5}))/?", re.IGNORECASE
)
_MAX_PORT = 65535
# Thirty years; far above that gRPC's deadline overflows and expires immediately.
_MAX_TIMEOUT_S = 1e9


def checked_url(url: str) -> str:
    """The host:port of `url`, without a leading `grpc://` or `http://`.

    Raises:
        InvalidRequest: not a valid address.
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
        InvalidRequest: not positive, or too large.
    """
    if timeout is not None and not (
        isinstance(timeout, int | float) and 0 < timeout <= _MAX_TIMEOUT_S
    ):
        raise InvalidRequest(
            f"timeout: {timeout!r} is not a valid number of seconds; allowed: above 0, up to "
            f"{_MAX_TIMEOUT_S:.0f}; omit it for no limit"
        )
    return timeout
