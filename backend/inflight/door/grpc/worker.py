"""One process of the gRPC door: `python -m inflight.door.grpc.worker SETTINGS`, as JSON.

It prints one line when it listens. SIGTERM drains it; it exits with 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import msgspec
import uvloop

from inflight import log
from inflight.deploy.file_limit import raise_file_limit
from inflight.door.certificate import LiveCertificate
from inflight.door.grpc.calls import Calls
from inflight.door.grpc.gate import Gate
from inflight.door.grpc.health import Probes
from inflight.door.grpc.routes import Routes
from inflight.door.grpc.settings import Settings, heartbeat_of
from inflight.door.grpc.upstream import Upstream
from inflight.door.limits import Limits
from inflight.door.tracing import connect
from inflight.errors import ConfigError
from inflight.ipc.heartbeat import beat_from_loop
from inflight.ipc.metrics.request_counts import RequestCounts
from inflight.ipc.processes import end_with
from inflight.ipc.sockets.disconnects import DisconnectReporter

LISTENING = "listening"
# Per connection; gRPC clients queue further ones.
MAX_STREAMS = 1024
MAX_CALLS = 8192
# Time for the last statuses to reach clients that read.
FLUSH_S = 1.0
KEEPALIVE_S = 30.0
KEEPALIVE_TIMEOUT_S = 20.0
# Clients may ping twice as often as the shortest usual setting.
MIN_PING_INTERVAL_S = 5.0
_IDENTITY_ONLY = 1

logger = logging.getLogger(__name__)


def channel_options(limits: Limits, num_workers: int) -> list[tuple[str, int]]:
    """Options of the gRPC server."""
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", limits.max_connections // num_workers),
        # A message is inflated before its size is known.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ("grpc.server_handshake_timeout_ms", _ms(limits.header_timeout_s)),
        ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),
        # Detects clients that are gone or do not read; gRPC sets TCP_USER_TIMEOUT from it.
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(MIN_PING_INTERVAL_S)),
    ]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


class Worker:
    """The server of one process.

    Raises:
        ConfigError: the keys file cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        limits = settings.limits
        self._settings = settings
        counts = RequestCounts(Path(settings.counts)) if settings.counts else None
        self._calls = Calls(limits, counts)
        self._upstream = Upstream(settings.upstream)
        self._tracing = connect(settings.otlp_endpoint) if settings.otlp_endpoint else None
        probes = Probes(Path(settings.health), self._calls)
        disconnects = DisconnectReporter(Path(settings.health).parent)
        gate = Gate(settings.access.admission("grpc"))
        self._server = grpc.aio.server(
            options=channel_options(limits, settings.workers),
            maximum_concurrent_rpcs=MAX_CALLS,
            handlers=[
                Routes(
                    self._calls, probes, self._upstream, limits, gate, disconnects, self._tracing
                )
            ],
        )

    def bind(self) -> int:
        """Bind the port; returns it.

        Raises:
            ConfigError: it cannot be bound, or the TLS files cannot be read.
        """
        settings = self._settings
        try:
            if settings.access.tls is None:
                port: int = self._server.add_insecure_port(settings.listen)
            else:
                credentials = _credentials(LiveCertificate(settings.access.tls))
                port = self._server.add_secure_port(settings.listen, credentials)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot listen on {settings.listen}: {error}") from None
        return port

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, and drain."""
        tasks = [asyncio.create_task(self._calls.watch())]
        if self._settings.heartbeat:
            path = heartbeat_of(self._settings.heartbeat, os.getpid())
            tasks.append(asyncio.create_task(beat_from_loop(path)))
        await self._server.start()
        print(LISTENING, flush=True)
        await stop.wait()
        # New connections and calls are refused from here on.
        stopped = asyncio.create_task(self._server.stop(self._settings.drain_s + FLUSH_S))
        await self._calls.drain(self._settings.drain_s)
        await asyncio.wait([stopped], timeout=FLUSH_S)
        await self._server.stop(None)
        await stopped
        for task in tasks:
            task.cancel()
        await self._upstream.close()
        if self._tracing is not None:
            self._tracing.close()


def _credentials(certificate: LiveCertificate) -> grpc.ServerCredentials:
    """Credentials of which each handshake uses the current certificate."""
    used = certificate.contents()

    def changed() -> Any:
        """gRPC calls it before each handshake; None: as before."""
        nonlocal used
        found = certificate.contents()
        if found is used:
            return None
        used = found
        return _configuration(found)

    needs_client = used[2] is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(used), changed, needs_client)


def _configuration(contents: tuple[bytes, bytes, bytes | None]) -> Any:
    cert, key, client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


async def serve(settings: Settings) -> None:
    """Run a worker until SIGTERM."""
    worker = Worker(settings)
    worker.bind()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    await worker.run(stop)


def main() -> None:
    log.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    end_with(settings.parent)
    raise_file_limit()
    try:
        uvloop.run(serve(settings))  # a tenth faster than the loop of asyncio
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
