"""Bounds on what a client may send; the doors refuse the rest before Triton reads it."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request and one client, for HTTP and gRPC alike.

    Attributes:
        max_body_bytes: of a request's body or message.
        max_buffered_bytes: of the bodies of all requests that are being received.
        max_header_bytes: of a request line with its headers, or of a call's metadata.
        max_headers: their number.
        max_json_depth: levels of arrays and objects.
        max_inputs: tensors of a request; as many outputs may be requested.
        max_connections: at the same time, of all clients.
        max_streams_per_key: gRPC streams that are open at the same time, in each process.
        header_timeout_s: from the first byte of a request to the end of its headers; also for a
            TLS handshake.
        body_timeout_s: from there to the end of its body.
        idle_timeout_s: for a connection without a request.
        stream_idle_timeout_s: for a gRPC stream without a request in flight.
        first_byte_timeout_s: for Triton to begin a response, and to continue it; queued requests
            wait inside of it.
        write_timeout_s: for a client that has stopped reading.
    """

    max_body_bytes: int = 4 << 20
    max_buffered_bytes: int = 256 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 100
    max_json_depth: int = 32
    max_inputs: int = 64
    max_connections: int = 4096
    max_streams_per_key: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    stream_idle_timeout_s: float = 600.0
    first_byte_timeout_s: float = 600.0
    write_timeout_s: float = 60.0
