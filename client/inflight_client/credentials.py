"""What a server with keys or TLS asks of its clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from inflight_client.errors import InvalidRequest

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


def channel(url: str, ca_file: str | None, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """A connection; with TLS if `ca_file` names the authorities to trust.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    if ca_file is None:
        return grpc.insecure_channel(url, options=options)
    try:
        authorities = Path(ca_file).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"ca_file: {ca_file}: {error.strerror}") from None
    return grpc.secure_channel(url, grpc.ssl_channel_credentials(authorities), options=options)
