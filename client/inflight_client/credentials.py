"""What a server with keys or TLS asks of its clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc

from inflight_client.errors import InvalidRequest

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default gRPC tries to connect again after 1 s, later than the first retries of a request.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
_KEY = re.compile(r"[!-~]{1,4096}")


def authorization(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of calls.

    Raises:
        InvalidRequest: the key has characters that metadata cannot carry.
    """
    if api_key is None:
        return ()
    if not _KEY.fullmatch(api_key):
        raise InvalidRequest("api_key: allowed: printable ASCII without spaces")
    return (("authorization", f"Bearer {api_key}"),)


def of_channel(ca_file: str | None) -> grpc.ChannelCredentials | None:
    """For TLS, if `ca_file` names the authorities to trust.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    if ca_file is None:
        return None
    try:
        return grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
    except OSError as error:
        raise InvalidRequest(f"ca_file: {ca_file}: {error.strerror}") from None


def channel(transport: Any, url: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """A connection of `transport`, which is grpc or grpc.aio."""
    if credentials is None:
        return transport.insecure_channel(url, options=_CHANNEL_OPTIONS)
    return transport.secure_channel(url, credentials, options=_CHANNEL_OPTIONS)
