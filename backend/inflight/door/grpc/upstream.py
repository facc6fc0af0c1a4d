"""Triton behind the door: raw calls, on one connection of each worker."""

from __future__ import annotations

from typing import Any

import grpc

_OPTIONS = [
    # Proxies of the environment are for other hosts.
    ("grpc.enable_http_proxy", 0),
    # Triton's responses are as large as they are.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # What is buffered here for a client that reads slowly; on loopback a small window is fast.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 << 10),
    # After a restart of Triton, calls succeed at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]
# Of a client's metadata, what Triton reads.
_PASSED_ON = frozenset({"triton_grpc_error"})

Metadata = tuple[tuple[str, str], ...]


def passed_on(metadata: Any, request_id: str) -> Metadata:
    """The metadata of a call to Triton."""
    known = tuple((key, value) for key, value in metadata if key in _PASSED_ON)
    return (*known, ("x-request-id", request_id))


class Upstream:
    """The connection to Triton.

    Args:
        address: host:port.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def unary(
        self, method: str, data: bytes, timeout: float | None, metadata: Metadata
    ) -> bytes:
        """The response to one message.

        Raises:
            grpc.aio.AioRpcError: Triton's error.
        """
        call = self._channel.unary_unary(method)
        response: bytes = await call(data, timeout=timeout, metadata=metadata)
        return response

    def stream(self, method: str, timeout: float | None, metadata: Metadata) -> Any:
        """A bidirectional stream of messages as bytes."""
        return self._channel.stream_stream(method)(timeout=timeout, metadata=metadata)

    async def close(self) -> None:
        await self._channel.close()
